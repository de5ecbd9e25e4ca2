"""How long is a training step on given completions: ours with shared prompts, ours with copies of
the prompt, and TRL's?

In: nothing: a random Qwen3 of about three million parameters and random completions are made here.
Out: rows for each case, results/step_time.json, and docs/img/step_time.png: how the time grows with
tokens, G and vocabulary. A step is everything between the samples and the new weights: packing or
padding, forward, loss, backward, clipping, AdamW; on policy, float32. The sides start from the same
weights and must find the same gradient (its norm is compared to 1e-3 before anything is timed), so
that no side is fast by computing something else.

TRL with the settings of trl_run.py. Cases that are not run keep their rows. "Tokens/s" counts
completion tokens, which is what a step is for; "computed" counts what the decoder ran over, padding
included. Peak memory: step_memory.py. With --shape, one step of a model of real size on a GPU
instead: step_large.py. Read next: step_sides.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from bench import common, step_large, tables
from bench.step_sides import Case, Ours, Trl, options_of
from nanogrpo.model import checkpoint
from nanogrpo.model.decoder import Decoder
from nanogrpo.run import warmup

CASES = {
    "even, G=8": Case(8, 8, 32, 64, even=True),
    "uneven, G=8": Case(8, 8, 32, 192),
    "uneven, G=4": Case(16, 4, 32, 192),
    "uneven, G=16": Case(4, 16, 32, 192),
    "prompt half the completion, G=8": Case(8, 8, 64, 128, even=True),
    "long prompt, uneven, G=8": Case(8, 8, 256, 192),
}
LENGTHS = {f"uneven, longest {n}": Case(8, 8, 32, n) for n in (48, 96, 384)}
VOCABULARIES = {
    f"vocabulary {n:,}": Case(2, 8, 32, 96, vocab=n) for n in (1024, 8192, 32768, 151936)
}
CASES |= LENGTHS | VOCABULARIES
# How the cost grows: the panels of the picture, each with the figure of a row that its axis shows.
GROWTH = {
    "completion tokens (64 completions)": (
        lambda row: row["completion_tokens"],
        ("uneven, G=8", *LENGTHS),
    ),
    "completions a prompt, G (64 completions)": (
        lambda row: row["group"],
        ("uneven, G=4", "uneven, G=8", "uneven, G=16"),
    ),
    "vocabulary (16 completions)": (lambda row: row["model"]["vocab_size"], tuple(VOCABULARIES)),
}


def write_model(case: Case, folder: Path, args: argparse.Namespace) -> dict:
    """A random model of the case in `folder`; returns its shape."""
    tokenizer = warmup.write_tokenizer(folder)
    shape = common.small_qwen3(args.hidden, args.layers, case.vocab, 1024)
    torch.manual_seed(0)
    checkpoint.export(Decoder(shape), folder, tokenizer)
    return dataclasses.asdict(shape)


SIDES = {
    "nanogrpo": Ours,
    "nanogrpo, prompts copied": lambda folder, cfg: Ours(
        folder, dataclasses.replace(cfg, share_prompts=False)
    ),
    "TRL": Trl,
}


def measure(name: str, args: argparse.Namespace, argv: Sequence[str]) -> list[dict]:
    """The rows of one case."""
    skipped = {"TRL"} if args.no_trl else set()
    # nothing new to tell there
    skipped |= {"nanogrpo, prompts copied"} if name in LENGTHS | VOCABULARIES else set()
    names = [n for n in SIDES if n not in skipped]
    with tempfile.TemporaryDirectory() as where:
        shape = write_model(CASES[name], Path(where), args)
        cfg, samples = options_of(CASES[name], args.scale)
        sides = {n: SIDES[n](Path(where), cfg) for n in names}
        norms = {n: side.step(samples) for n, side in sides.items()}
    expected = norms["nanogrpo"]
    for side, norm in norms.items():
        if abs(norm - expected) > 1e-3 * expected:
            raise RuntimeError(
                f"{name}: the gradient's norm is {norm} for {side} and {expected} for nanogrpo"
            )
    for side in sides.values():
        side.clock.seconds.clear()
    steps: dict[str, Callable] = {
        n: functools.partial(side.step, samples) for n, side in sides.items()
    }
    timings = common.interleave(steps, args.repeats, title=name)
    useful, rows = sum(len(s.token_ids) for s in samples), []
    for n, t in timings.items():
        figures = {
            "completion_tokens": useful,
            "group": cfg.num_generations,
            "tokens_per_second": useful / t.median,
            "computed_tokens": sides[n].computed(samples),
            # the untimed round too
            "phases": {
                phase: s / (args.repeats + 1) for phase, s in sides[n].clock.seconds.items()
            },
            "speedup_over_trl": timings["TRL"].median / t.median if "TRL" in timings else None,
            "gradient_norm": norms[n],
            "parameters": sum(p.numel() for p in sides["nanogrpo"].model.parameters()),
            "model": shape,
        }
        rows.append(common.row("step_time", name, n, t, argv, **figures))
    return rows


def draw(rows: list[dict], out: Path) -> None:
    """How seconds a step grow, a panel for each of GROWTH; cases that are not measured leave gaps."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(GROWTH), figsize=(12, 3.8))
    for axis, (title, (x, cases)) in zip(axes, GROWTH.items()):
        for side in ("nanogrpo", "TRL"):
            points = sorted(
                (x(row), row["seconds_median"])
                for row in rows
                if row["side"] == side and row["case"] in cases
            )
            axis.plot(*zip(*points) if points else ([], []), marker="o", label=side)
        axis.set_xlabel(title)
        axis.locator_params(axis="x", nbins=5)  # labels of six digits
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("seconds a training step (median)")
    axes[0].legend()
    figure.tight_layout()
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=110)
    plt.close(figure)


def main(argv: Sequence[str] | None = None) -> list[dict]:
    parser = argparse.ArgumentParser(
        prog="python -m bench.step_time", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default 2)")
    parser.add_argument(
        "--repeats", type=int, default=5, help="timed steps of each side, interleaved (default 5)"
    )
    parser.add_argument(
        "--cases",
        nargs="*",
        default=list(CASES),
        choices=list(CASES),
        metavar="CASE",
        help="some of the cases",
    )
    parser.add_argument(
        "--hidden", type=int, default=256, help="hidden size of the model (default 256)"
    )
    parser.add_argument("--layers", type=int, default=4, help="layers of the model (default 4)")
    parser.add_argument(
        "--scale", type=float, default=1.0, help="scales all lengths (a quick check: 0.2)"
    )
    parser.add_argument(
        "--shape",
        choices=list(common.LARGE),
        help="instead of the cases: a model of this size, on a GPU",
    )
    parser.add_argument("--no-trl", action="store_true", help="leave TRL out")
    parser.add_argument(
        "--out",
        type=Path,
        default=common.RESULTS,
        help="folder for the JSON rows (default bench/results)",
    )
    parser.add_argument(
        "--picture",
        type=Path,
        default=common.ROOT / "docs/img/step_time.png",
        help="where it is drawn",
    )
    args = parser.parse_args(argv)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    shown = [] if argv is None else argv
    if args.shape:
        if not torch.cuda.is_available():
            parser.error(f"--shape {args.shape} is measured on a GPU, and torch sees none here.")
        return step_large.main(
            args.shape,
            args.repeats,
            list(step_large.SETTINGS)[: 1 if args.no_trl else None],
            args.out,
            shown,
        )
    torch.set_num_threads(args.threads)
    for case in args.cases:
        path = common.merge("step_time", measure(case, args, shown), args.out)  # kept if cut short
    rows = common.read("step_time", args.out)
    draw(rows, args.picture)
    tables.show("step_time", rows)
    print(f"rows: {path}, picture: {args.picture}")
    return rows


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
