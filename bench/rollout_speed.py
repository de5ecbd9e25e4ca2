"""How fast does the embedded engine sample, against `transformers` generate on the same weights?

In: nothing: a random Qwen3 of about three million parameters is made here. Out: rows for two cases,
results/rollout_speed.json.

* even: one batch of P·G completions, all of the same length: the plain cost of a decode step.
* uneven: several batches' worth of completions whose lengths are like those of reasoning models,
  with a mean of a third of the
  maximum, at most `--batch` at once on both sides. The engine lets finished completions leave; generate keeps a batch until its
  longest row ends, its finished rows padded on. Only the tokens asked for are counted ("useful").

Generate gets its best: its default cache, inference mode, no logits processor (temperature 1 needs
none), prompts of one length so that nothing is padded, and both its attention implementations, the
faster of which is the peer in the ratio. The engine returns the log-prob of every token, as GRPO
needs; generate is not asked to. On a CPU it packs its weights for oneDNN, which transformers does
not: the side "nanogrpo, unpacked" tells how much of it that is.

With a vLLM at hand (--vllm-python) its server is a side too, asked over HTTP as train.py --engine
vllm asks it, but with a request a completion; it has the same threads, float32, and at most --batch
completions at once. Read next: nanogrpo/engine/local.py.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest.mock import patch

import torch

from bench import common, tables
from nanogrpo.engine.base import SamplingParams
from nanogrpo.engine.local import LocalEngine
from nanogrpo.model import checkpoint
from nanogrpo.model.decoder import Decoder
from nanogrpo.run import warmup
from nanogrpo.types import Prompt
from nanogrpo.vllm.client import VLLMEngine
from nanogrpo.vllm.server import Sidecar


def uneven_lengths(n: int, longest: int, seed: int = 0) -> list[int]:
    """n lengths in 1 … longest with a mean of longest / 3: exponential, cut at the maximum as a
    token limit cuts.
    """
    draws = torch.empty(n, dtype=torch.float64).exponential_(
        generator=torch.Generator().manual_seed(seed)
    )
    low, high = 0.0, float(longest)
    for _ in range(60):  # the scale whose cut mean is right, by bisection
        scale = (low + high) / 2
        lengths = (draws * scale).ceil().clamp(1, longest)
        low, high = (low, scale) if lengths.mean() > longest / 3 else (scale, high)
    return lengths.long().tolist()


def peer(model: Decoder, attention: str):
    """The same weights as a transformers model, ready for generate."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(**{**model.cfg.to_dict(), "attn_implementation": attention})
    theirs = Qwen3ForCausalLM(config).eval()
    theirs.load_state_dict(model.state_dict(), strict=True)
    theirs.generation_config.eos_token_id = None  # lengths are forced
    theirs.generation_config.pad_token_id = 0
    return theirs


def generate(theirs, prompts: list[Prompt], lengths: list[int], batch: int) -> list[int]:
    """Completes prompt i with lengths[i] tokens, `batch` rows at a time; returns the useful tokens
    of each row.
    """
    from transformers import StoppingCriteria, StoppingCriteriaList

    class AtLength(StoppingCriteria):
        def __init__(self, ends: torch.Tensor):
            self.ends = ends  # [rows] prompt and completion

        def __call__(self, input_ids, scores, **_):
            return input_ids.shape[1] >= self.ends  # [rows] bool: this row is done

    done = []
    for i in range(0, len(lengths), batch):
        ids = torch.tensor([p.token_ids for p in prompts[i : i + batch]])  # [rows, prompt]
        wanted = torch.tensor(lengths[i : i + batch])
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
def vllm_server(model: Decoder, context: int, args: argparse.Namespace) -> Iterator[VLLMEngine]:
    """A vLLM server with the model's weights, as an engine: float32, as many threads and sequences
    at once as the others have.
    """
    settings = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(args.threads),
    }
    with tempfile.TemporaryDirectory() as where, patch.dict(os.environ, settings):
        base = Path(where) / "base"
        base.mkdir()
        checkpoint.export(model, base, warmup.write_tokenizer(base))
        options = [
            "--dtype",
            "float32",
            "--max-model-len",
            str(context),
            "--max-num-seqs",
            str(args.batch),
            *args.vllm_options,
        ]
        sidecar = Sidecar(base, options, args.vllm_python, Path(where) / "serve.log")
        with contextlib.closing(
            VLLMEngine(model, max_len=context, sidecar=sidecar, window=args.batch)
        ) as engine:
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
    """The rows of a case: each side completes the same prompts with the same numbers of tokens."""
    params = SamplingParams(max_tokens=max(args.length, args.longest), ignore_stop=True)
    count, V = len(lengths) // args.group, args.vocab
    prompts = [
        Prompt(i, "", torch.randint(V, (args.prompt_length,)).tolist()) for i in range(count)
    ]
    repeated = [p for p in prompts for _ in range(args.group)]

    def ours(name: str) -> None:
        # one limit a prompt
        got = [
            len(s.token_ids)
            for s in engines[name].sample(repeated, 1, params, step=0, limits=lengths)
        ]
        assert got == lengths

    def theirs(name: str) -> None:
        assert generate(peers[name], repeated, lengths, args.batch) == lengths

    sides = {name: functools.partial(ours, name) for name in engines}
    sides |= {name: functools.partial(theirs, name) for name in peers}
    timings = common.interleave(sides, args.repeats, title=case)
    best = min(peers, key=lambda name: timings[name].median)
    rows = []
    for name, t in timings.items():
        figures = {
            "tokens": sum(lengths),
            "tokens_per_second": sum(lengths) / t.median,
            "speedup_over_best_generate": timings[best].median / t.median,
            "completions": len(lengths),
            "longest": max(lengths),
            "mean_length": sum(lengths) / len(lengths),
            "parameters": sum(p.numel() for p in model.parameters()),
            "model": dataclasses.asdict(model.cfg),
        }
        rows.append(common.row("rollout_speed", case, name, t, argv, **figures))
    return rows


def main(argv: Sequence[str] | None = None) -> list[dict]:
    parser = argparse.ArgumentParser(
        prog="python -m bench.rollout_speed", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default 2)")
    parser.add_argument(
        "--repeats", type=int, default=7, help="timed runs of each side, interleaved (default 7)"
    )
    parser.add_argument(
        "--batch", type=int, default=64, help="completions at once, on both sides (default 64)"
    )
    parser.add_argument("--group", type=int, default=8, help="completions a prompt (default 8)")
    parser.add_argument(
        "--prompt-length", type=int, default=32, help="tokens a prompt (default 32)"
    )
    parser.add_argument(
        "--length", type=int, default=128, help="even case: tokens a completion (default 128)"
    )
    parser.add_argument(
        "--longest", type=int, default=192, help="uneven case: the length limit (default 192)"
    )
    parser.add_argument(
        "--batches",
        type=int,
        default=4,
        help="uneven case: completions as a multiple of --batch (default 4)",
    )
    parser.add_argument(
        "--hidden", type=int, default=256, help="hidden size of the model (default 256)"
    )
    parser.add_argument("--layers", type=int, default=4, help="layers of the model (default 4)")
    parser.add_argument("--vocab", type=int, default=2048, help="vocabulary (default 2048)")
    parser.add_argument(
        "--vllm-python",
        default=common.vllm_python(),
        help="has vLLM; '' leaves it out (default $NANOGRPO_VLLM_PYTHON)",
    )
    parser.add_argument(
        "--vllm-options",
        nargs="*",
        default=["--enforce-eager"],
        help="more for it (default --enforce-eager)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=common.RESULTS,
        help="folder for the JSON rows (default bench/results)",
    )
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)

    cfg = common.small_qwen3(
        args.hidden, args.layers, args.vocab, args.prompt_length + max(args.length, args.longest)
    )
    model = Decoder(cfg).requires_grad_(False)
    engines = {}
    for name in ("nanogrpo", "nanogrpo, unpacked"):
        engines[name] = LocalEngine(
            cfg, max_len=cfg.max_position_embeddings, slots=args.batch, device="cpu"
        )
        engines[name].packs = engines[name].packs and name == "nanogrpo"
        engines[name].load(model, version=0)
    peers = {f"transformers {a}": peer(model, a) for a in ("eager", "sdpa")}

    n = args.batch * args.batches
    cases = {"even": [args.length] * args.batch, "uneven": uneven_lengths(n, args.longest)}
    rows = []
    with contextlib.ExitStack() as stack:
        if args.vllm_python:
            engines["vLLM"] = stack.enter_context(
                vllm_server(model, cfg.max_position_embeddings, args)
            )
        for case, lengths in cases.items():
            rows += measure(
                case, lengths, engines, peers, model, args, [] if argv is None else argv
            )
    path = common.write("rollout_speed", rows, args.out)
    tables.show("rollout_speed", rows)
    print(f"rows: {path}")
    return rows


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
