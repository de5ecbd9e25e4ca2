"""How fast does the local engine sample, compared with transformers' `generate` on the same
weights?

In: nothing. This file creates a random Qwen3 of about three million parameters. Out:
results/rollout_speed.json with three cases:

* even: one batch of completions of equal length. This case measures only the decode steps.
* uneven: several batches of completions, whose lengths vary as in the output of a reasoning
  model. The mean length is a third of the maximum, and both engines process at most `--batch`
  completions at a time. The local engine replaces finished completions. `generate` continues each
  batch until its longest row ends, and pads the other rows. Only the requested ("useful") tokens
  are counted.
* nano-vllm: a smaller version of the workload of nano-vllm's bench.py (`nano_vllm`). The prompts
  have different lengths, too, and all sequences are requested at once. Transformers'
  `generate_batch` (continuous batching) is used instead of `generate`.

`generate` runs with its fastest settings: the default cache, inference mode, no logits processor
(temperature 1 needs none), and prompts of equal length, which need no padding. `generate` is
measured with two attention implementations, and the local engine is compared with the faster one.
The local engine also returns the log-prob of every token, which GRPO needs. `generate` does not. On
a CPU, the local engine packs its weights for oneDNN, but transformers does not. The row "nanogrpo,
unpacked" shows the speed without packing.

If vLLM is installed (--vllm-python), its server is measured as well. Requests are sent over HTTP as
in `train.py --engine vllm`, but with one request per completion. The server has the same number of
threads as the other engines, computes in float32, and processes at most --batch completions at a
time.

With --shape 0.6B, this command instead compares the engines on a GPU (results/rollout_large.json),
in the cases `uneven` and `nano-vllm`. All engines compute in bfloat16, and process 256 completions
at a time. The case `nano-vllm` is then the original workload: 256 sequences with prompts and
completions of up to 1,024 tokens each. Read next: nanogrpo/engine/local.py.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import random
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from bench import common, tables
from nanogrpo.engine.base import SamplingParams
from nanogrpo.engine.local import LocalEngine
from nanogrpo.extras.arithmetic import warmup
from nanogrpo.kernels import linear
from nanogrpo.model import checkpoint
from nanogrpo.model.decoder import Decoder
from nanogrpo.types import Prompt
from nanogrpo.vllm.client import VLLMEngine
from nanogrpo.vllm.server import Sidecar

CASES = ("even", "uneven", "nano-vllm")
TEMPERATURE = 0.6  # of the case nano-vllm


def uneven_lengths(n: int, longest: int, seed: int = 0) -> list[int]:
    """Return n lengths from 1 to `longest` with a mean of longest / 3.

    The distribution is exponential, and lengths above `longest` are set to `longest`.
    """
    generator = torch.Generator().manual_seed(seed)
    unit = torch.empty(n, dtype=torch.float64).exponential_(generator=generator)  # [n]
    low, high = 0.0, float(longest)
    for _ in range(60):  # bisection finds the scale that gives the desired mean
        scale = (low + high) / 2
        lengths = (unit * scale).ceil().clamp(1, longest)
        low, high = (low, scale) if lengths.mean() > longest / 3 else (scale, high)
    return lengths.long().tolist()


def nano_vllm(sequences: int, longest_prompt: int, longest: int, vocab: int) -> list[Prompt]:
    """Return the requests of nano-vllm's bench.py, or of a smaller version.

    The shortest prompt and the shortest completion are about a tenth as long as the longest. If the
    first three arguments are 256, 1024 and 1024, and the vocabulary has more than 10,000 ids, the
    requests are the same as in nano-vllm: 142,827 tokens of prompts and 133,966 tokens of
    completions in total (github.com/GeeeekExplorer/nano-vllm).
    """
    rng, last = random.Random(0), min(10_000, vocab - 1)

    def length(longest: int) -> int:
        return rng.randint(max(1, 100 * longest // 1024), longest)

    tokens = [
        [rng.randint(0, last) for _ in range(length(longest_prompt))] for _ in range(sequences)
    ]
    return [Prompt(i, "", ids, max_tokens=length(longest)) for i, ids in enumerate(tokens)]


def make_engine(
    model: Decoder, slots: int, packed: bool, cache_tokens: int | None = None
) -> LocalEngine:
    """Return the local engine with the model's weights, packed for oneDNN if `packed` is true."""
    device, context = model.lm_head.weight.device, model.cfg.max_position_embeddings
    engine = LocalEngine(
        model.cfg, max_len=context, slots=slots, device=device, cache_tokens=cache_tokens
    )
    # Without oneDNN, the engine does not pack its weights.
    library = linear._onednn if packed else None
    with patch.object(linear, "_onednn", library):
        engine.load(model, version=0)
    return engine


def peer(model: Decoder, attention: str):
    """Return a transformers model with the same weights, ready for `generate`."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(**model.cfg.to_dict(), attn_implementation=attention)
    weight = model.lm_head.weight
    theirs = Qwen3ForCausalLM(config).eval().to(weight.device, weight.dtype)
    theirs.load_state_dict(model.state_dict(), strict=True)
    theirs.generation_config.eos_token_id = None  # no token ends a completion
    theirs.generation_config.pad_token_id = 0
    return theirs


def generate(theirs, batch: int, prompts: list[Prompt]) -> list[int]:
    """Generate `max_tokens` tokens for each prompt, processing `batch` prompts at a time.

    All prompts have the same length. Returns the number of useful tokens in each completion.
    """
    from transformers import StoppingCriteria, StoppingCriteriaList

    class AtLength(StoppingCriteria):
        def __init__(self, ends: torch.Tensor):
            self.ends = ends  # [batch] prompt and completion

        def __call__(self, input_ids, scores, **_):
            return input_ids.shape[1] >= self.ends  # [batch] bool: finished

    done = []
    for i in range(0, len(prompts), batch):
        ids = torch.tensor([p.token_ids for p in prompts[i : i + batch]])  # [batch, prompt]
        wanted = torch.tensor([p.max_tokens for p in prompts[i : i + batch]])  # [batch]
        with torch.inference_mode():
            out = theirs.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                max_new_tokens=int(wanted.max()),
                stopping_criteria=StoppingCriteriaList([AtLength(wanted + ids.shape[1])]),
            )
        done += wanted.clamp(max=out.shape[1] - ids.shape[1]).tolist()
    return done


@contextlib.contextmanager
def batching(theirs, batch: int, tokens: int) -> Iterator[Callable[[list[Prompt]], list[int]]]:
    """Start the loop of `generate_batch` once. Yield a function that sends prompts to this loop and
    returns the number of tokens in each completion. (`generate_batch` itself has one length limit
    for all prompts, and starts the loop in each call.)

    tokens: the size of the cache.
    """
    from transformers import GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    config = GenerationConfig(
        do_sample=True, temperature=TEMPERATURE, top_k=0, top_p=1.0, eos_token_id=-1, pad_token_id=0
    )
    blocks = tokens // 256 + batch  # a block has 256 tokens; a sequence's last block is not full
    sizes = ContinuousBatchingConfig(num_blocks=blocks, max_requests_per_batch=batch)
    manager: Any
    with theirs.continuous_batching_context_manager(
        generation_config=config, continuous_batching_config=sizes
    ) as manager:

        def run(prompts: list[Prompt]) -> list[int]:
            names = [manager.add_request(p.token_ids, max_new_tokens=p.max_tokens) for p in prompts]
            done = {}
            while len(done) < len(names):
                result = manager.get_result(timeout=1)
                if result and result.is_finished():
                    done[result.request_id] = len(result.generated_tokens)
                elif not (result or manager.is_running()):
                    raise RuntimeError("the loop of transformers' generate_batch has ended")
            return [done[name] for name in names]

        yield run


@contextlib.contextmanager
def vllm_server(model: Decoder, args: argparse.Namespace) -> Iterator[VLLMEngine]:
    """Run a vLLM server with the model's weights, and with as many threads and concurrent sequences
    as the other engines.
    """
    context = model.cfg.max_position_embeddings
    settings = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(args.threads),
    }
    with tempfile.TemporaryDirectory() as where, patch.dict(os.environ, settings):
        base = Path(where) / "base"
        base.mkdir()
        checkpoint.export(model, base, warmup.write_tokenizer(base))
        dtype = str(model.lm_head.weight.dtype).removeprefix("torch.")
        options = f"--dtype {dtype} --max-model-len {context} --max-num-seqs {args.batch}".split()
        log = Path(where) / "serve.log"
        sidecar = Sidecar(base, [*options, *args.vllm_options], args.vllm_python, log)
        engine = VLLMEngine(model, max_len=context, sidecar=sidecar, window=args.batch)
        with contextlib.closing(engine):
            engine.load(model, version=0)
            yield engine


def sampled(engine: LocalEngine | VLLMEngine, temperature: float, prompts: list[Prompt]) -> list:
    """Sample a completion of each prompt, and return the lengths."""
    params = SamplingParams(temperature=temperature, max_tokens=1)  # each prompt has its own limit
    return [len(s.token_ids) for s in engine.sample(prompts, 1, params, step=0)]


def measure(
    case: str,
    kind: str,
    engines: dict[str, LocalEngine | VLLMEngine],
    peers: dict[str, Callable[[list[Prompt]], list[int]]],
    args: argparse.Namespace,
    argv: Sequence[str],
) -> list[dict]:
    """Return the records of a case. All engines complete the same prompts with the same lengths.

    kind: "even", "uneven" or "nano-vllm". peers: functions that complete prompts with transformers.
    """
    prompts, temperature = requests(kind, args), TEMPERATURE if kind == "nano-vllm" else 1.0
    lengths: list[Any] = [p.max_tokens for p in prompts]
    runs = {n: functools.partial(sampled, e, temperature) for n, e in engines.items()} | peers

    def once(name: str) -> None:
        assert runs[name](prompts) == lengths

    sides = {name: functools.partial(once, name) for name in runs}
    timings = common.interleave(sides, args.repeats, title=case)
    best = min((timings[name].median for name in peers), default=None)
    tokens = sum(lengths)
    records = [
        common.record(
            "rollout_speed",
            case,
            name,
            argv,
            timing,
            tokens_per_second=tokens / timing.median,
            speedup_over_best_generate=best / timing.median if best else None,
            tokens=tokens,
        )
        for name, timing in timings.items()
    ]
    if not (args.vllm_python or args.alone):
        why_not = "left out: no Python with vLLM (--vllm-python)"
        records.append(common.record("rollout_speed", case, "vLLM", argv, why_not=why_not))
    return records


def requests(kind: str, args: argparse.Namespace) -> list[Prompt]:
    """Return the prompts of a case, each with the length of its completion."""
    if kind == "nano-vllm":
        return nano_vllm(args.batch, args.prompt_length, args.longest, args.vocab)
    lengths = [args.length] * args.batch
    if kind == "uneven":
        lengths = uneven_lengths(args.batch * args.batches, args.longest)
    tokens = [
        torch.randint(args.vocab, (args.prompt_length,)).tolist()
        for _ in range(len(lengths) // args.group)
    ]
    return [
        Prompt(i // args.group, "", tokens[i // args.group], max_tokens=m)
        for i, m in enumerate(lengths)
    ]


def generators(kind: str, model: Decoder, args: argparse.Namespace, stack: ExitStack) -> dict:
    """Return functions that complete the prompts of a case with transformers."""
    if kind == "nano-vllm":
        loop = batching(peer(model, "sdpa"), args.batch, cached(args))
        return {"transformers generate_batch": stack.enter_context(loop)}
    return {
        f"transformers {name}": functools.partial(generate, peer(model, name), args.batch)
        for name in ("eager", "sdpa")
    }


def cached(args: argparse.Namespace) -> int:
    """Return the size of the cache in the case `nano-vllm`, in tokens.

    Two thirds of the tokens of all sequences are always enough, because sequences end at different
    times.
    """
    return sum(len(p.token_ids) + (p.max_tokens or 0) for p in requests("nano-vllm", args)) * 2 // 3


def on_gpu(kind: str, args: argparse.Namespace, argv: Sequence[str]) -> list[dict]:
    """Measure a case on a GPU, with a random model of real size."""
    args.batch, args.prompt_length, args.longest = 256, 32, 512
    if nano := kind == "nano-vllm":
        args.prompt_length, args.longest = 1024, 1024
    shape = common.large_qwen3(args.shape, args.prompt_length + args.longest)
    args.vocab, args.vllm_options = shape.vocab_size, ["--gpu-memory-utilization", "0.28"]
    with torch.device("cuda"):
        model = Decoder(shape).bfloat16().requires_grad_(False)
    size = cached(args) if nano else None
    engines: dict = {"nanogrpo": make_engine(model, args.batch, packed=False, cache_tokens=size)}
    case = f"{args.shape}, GPU, bfloat16, {kind}, {args.batch} at a time"
    with ExitStack() as stack:
        if args.vllm_python:
            engines["vLLM"] = stack.enter_context(vllm_server(model, args))
        peers = generators(kind, model, args, stack) if nano else {}
        return measure(case, kind, engines, peers, args, argv)


def main(argv: Sequence[str]) -> list[dict]:
    parser = common.parser(
        "rollout_speed",
        __doc__,
        repeats=(7, "timed runs of each side"),
        batch=(64, "completions processed at a time, on all sides"),
        group=(8, "completions per prompt"),
        prompt_length=(32, "tokens per prompt"),
        length=(128, "tokens per completion of the even case"),
        longest=(192, "length limit of the uneven case"),
        batches=(4, "completions of the uneven case, as a multiple of --batch"),
        hidden=(256, "hidden size of the model"),
        layers=(4, "layers of the model"),
        vocab=(2048, "vocabulary"),
    )
    common.add_vllm(parser)
    parser.add_argument(
        "--vllm-options",
        nargs="*",
        default=["--enforce-eager"],
        help="additional options of the server (default --enforce-eager)",
    )
    parser.add_argument(
        "--shape",
        choices=common.LARGE,
        help="compare on a GPU, with a model of this size; without the case even",
    )
    common.add_cases(parser, CASES)
    common.add_alone(parser)
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    if args.shape:
        if not torch.cuda.is_available():
            parser.error(f"--shape {args.shape} needs a GPU, and torch finds none.")
        for kind in [name for name in args.cases if name != "even"]:
            common.merge("rollout_large", on_gpu(kind, args, argv), args.out)
        return tables.report("rollout_large", args.out)

    context = args.prompt_length + max(args.length, args.longest)
    cfg = common.small_qwen3(args.hidden, args.layers, args.vocab, context)
    model = Decoder(cfg).requires_grad_(False)
    engines: dict[str, LocalEngine | VLLMEngine] = {
        "nanogrpo": make_engine(model, args.batch, packed=True)
    }
    if not args.alone:
        engines["nanogrpo, unpacked"] = make_engine(model, args.batch, packed=False)
    records = []
    with ExitStack() as stack:
        if args.vllm_python and not args.alone:
            engines["vLLM"] = stack.enter_context(vllm_server(model, args))
        for kind in args.cases:
            peers = {} if args.alone else generators(kind, model, args, stack)
            case = "nano-vllm, small" if kind == "nano-vllm" else kind
            records += measure(case, kind, engines, peers, args, argv)
    common.write("rollout_speed", records, args.out)
    return tables.report("rollout_speed", args.out)


if __name__ == "__main__":
    main(sys.argv[1:])
