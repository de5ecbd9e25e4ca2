"""How fast does the local engine sample, compared with transformers' `generate` on the same
weights?

In: nothing. This file creates a random Qwen3 of about three million parameters. Out:
results/rollout_speed.json with two cases:

* even: one batch of completions of equal length, which measures only the decode steps.
* uneven: several batches of completions, with lengths similar to those of reasoning models. The
  mean length is a third of the maximum, and both engines process at most `--batch` completions at a
  time. The local engine replaces finished completions. `generate` continues each batch until its
  longest row ends, and pads the other rows. Only the requested ("useful") tokens are counted.

`generate` runs with its fastest settings: the default cache, inference mode, no logits processor
(temperature 1 needs none), and prompts of equal length, which need no padding. `generate` is
measured with two attention implementations, and the table compares with the faster one. The local
engine also returns the log-prob of every token, which GRPO needs. `generate` does not. On a CPU,
the local engine packs its weights for oneDNN, but transformers does not. The row "nanogrpo,
unpacked" shows the speed without packing.

If vLLM is installed (--vllm-python), its server is measured as well. Requests are sent over HTTP as
in `train.py --engine vllm`, but with one request per completion. The server has the same number of
threads as the other engines, computes in float32, and processes at most --batch completions at a
time.

With --shape 0.6B, this command instead compares the local engine with vLLM on a GPU
(results/rollout_large.json). Both engines compute in bfloat16, use CUDA graphs, and process 256
completions at a time. Read next: nanogrpo/engine/local.py.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
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


def make_engine(model: Decoder, slots: int, packed: bool) -> LocalEngine:
    """Return the local engine with the model's weights, packed for oneDNN if `packed` is true."""
    device, context = model.lm_head.weight.device, model.cfg.max_position_embeddings
    engine = LocalEngine(model.cfg, max_len=context, slots=slots, device=device)
    # Without oneDNN, the engine does not pack its weights.
    library = linear._onednn if packed else None
    with patch.object(linear, "_onednn", library):
        engine.load(model, version=0)
    return engine


def peer(model: Decoder, attention: str):
    """Return a transformers model with the same weights, ready for `generate`."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(**{**model.cfg.to_dict(), "attn_implementation": attention})
    theirs = Qwen3ForCausalLM(config).eval()
    theirs.load_state_dict(model.state_dict(), strict=True)
    theirs.generation_config.eos_token_id = None  # no token ends a completion
    theirs.generation_config.pad_token_id = 0
    return theirs


def generate(theirs, prompts: list[Prompt], lengths: list[int], batch: int) -> list[int]:
    """Generate lengths[i] tokens for prompt i, processing `batch` prompts at a time.

    Returns the number of useful tokens in each completion.
    """
    from transformers import StoppingCriteria, StoppingCriteriaList

    class AtLength(StoppingCriteria):
        def __init__(self, ends: torch.Tensor):
            self.ends = ends  # [batch] prompt and completion

        def __call__(self, input_ids, scores, **_):
            return input_ids.shape[1] >= self.ends  # [batch] bool: finished

    done = []
    for i in range(0, len(lengths), batch):
        ids = torch.tensor([p.token_ids for p in prompts[i : i + batch]])  # [batch, prompt]
        wanted = torch.tensor(lengths[i : i + batch])  # [batch]
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


def measure(
    case: str,
    lengths: list[int],
    engines: dict,
    peers: dict,
    model: Decoder,
    args: argparse.Namespace,
    argv: Sequence[str],
) -> list[dict]:
    """Return the records of a case. All engines complete the same prompts with the same lengths."""
    params = SamplingParams(max_tokens=max(args.length, args.longest))
    prompts = [
        Prompt(i, "", torch.randint(args.vocab, (args.prompt_length,)).tolist())
        for i in range(len(lengths) // args.group)
    ]
    # Each completion has its own prompt, because length limits are set per prompt.
    repeated = [
        dataclasses.replace(prompts[i // args.group], max_tokens=m) for i, m in enumerate(lengths)
    ]

    def ours(name: str) -> None:
        samples = engines[name].sample(repeated, 1, params, step=0)
        assert [len(s.token_ids) for s in samples] == lengths

    def theirs(name: str) -> None:
        assert generate(peers[name], repeated, lengths, args.batch) == lengths

    sides = {name: functools.partial(ours, name) for name in engines}
    sides |= {name: functools.partial(theirs, name) for name in peers}
    timings = common.interleave(sides, args.repeats, title=case)
    best = min((timings[name].median for name in peers), default=None)
    tokens = sum(lengths)
    figures = {
        "tokens": tokens,
        "completions": len(lengths),
        "longest": max(lengths),
        "mean_length": tokens / len(lengths),
        "parameters": sum(p.numel() for p in model.parameters()),
        "model": dataclasses.asdict(model.cfg),
    }
    return [
        common.record(
            "rollout_speed",
            case,
            name,
            argv,
            timing,
            tokens_per_second=tokens / timing.median,
            speedup_over_best_generate=best / timing.median if best else None,
            **figures,
        )
        for name, timing in timings.items()
    ]


def on_gpu(args: argparse.Namespace, argv: Sequence[str]) -> list[dict]:
    """Compare the local engine with vLLM on a GPU, with a random model of real size."""
    args.batch, args.longest = 256, 512
    shape = common.large_qwen3(args.shape, args.prompt_length + args.longest)
    args.vocab, args.vllm_options = shape.vocab_size, ["--gpu-memory-utilization", "0.4"]
    with torch.device("cuda"):
        model = Decoder(shape).bfloat16().requires_grad_(False)
    engines: dict = {"nanogrpo": make_engine(model, args.batch, packed=False)}
    lengths = uneven_lengths(4 * args.batch, args.longest)
    case = f"{args.shape}, GPU, bfloat16, uneven, {args.batch} at a time"
    with contextlib.ExitStack() as stack:
        if args.vllm_python:
            engines["vLLM"] = stack.enter_context(vllm_server(model, args))
        records = measure(case, lengths, engines, {}, model, args, argv)
    common.write("rollout_large", records, args.out)
    tables.show("rollout_large", records)
    return records


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
    parser.add_argument(
        "--vllm-python",
        default=common.vllm_python(),
        help="Python of an environment with vLLM; '' leaves it out (default $NANOGRPO_VLLM_PYTHON)",
    )
    parser.add_argument(
        "--vllm-options",
        nargs="*",
        default=["--enforce-eager"],
        help="additional options of the server (default --enforce-eager)",
    )
    parser.add_argument(
        "--shape",
        choices=list(common.LARGE),
        help="compare with vLLM on a GPU, with a model of this size, instead of the cases",
    )
    common.add_alone(parser)
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    if args.shape:
        if not torch.cuda.is_available():
            parser.error(f"--shape {args.shape} needs a GPU, and torch finds none.")
        return on_gpu(args, argv)

    context = args.prompt_length + max(args.length, args.longest)
    cfg = common.small_qwen3(args.hidden, args.layers, args.vocab, context)
    model = Decoder(cfg).requires_grad_(False)
    engines: dict[str, LocalEngine | VLLMEngine] = {
        "nanogrpo": make_engine(model, args.batch, packed=True)
    }
    peers = {}
    if not args.alone:
        engines["nanogrpo, unpacked"] = make_engine(model, args.batch, packed=False)
        peers = {f"transformers {a}": peer(model, a) for a in ("eager", "sdpa")}

    cases = {
        "even": [args.length] * args.batch,
        "uneven": uneven_lengths(args.batch * args.batches, args.longest),
    }
    records = []
    with contextlib.ExitStack() as stack:
        if args.vllm_python and not args.alone:
            engines["vLLM"] = stack.enter_context(vllm_server(model, args))
        for case, lengths in cases.items():
            records += measure(case, lengths, engines, peers, model, args, argv)
    path = common.write("rollout_speed", records, args.out)
    tables.show("rollout_speed", records)
    print(f"results: {path}")
    return records


if __name__ == "__main__":
    main(sys.argv[1:])
