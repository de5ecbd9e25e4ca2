"""How long does a training step on given completions take with nanogrpo and with TRL? nanogrpo runs
twice, with shared prompts and with a copy of the prompt for each completion.

In: nothing. This file creates a random Qwen3 of about three million parameters and random
completions. Out: results/step_time.json, and docs/img/step_time.png, which plots the time against
the number of tokens, the group size G and the vocabulary size. A step includes everything from the
samples to the new weights: packing or padding, forward pass, loss, backward pass, clipping and
AdamW. Steps are on-policy and in float32. Both trainers start from the same weights. Before the
measurement, the gradient norms of all trainers must agree to 1e-3. So no trainer is faster because
it computes something else.

"TRL" is the GRPOTrainer, which pads its batches, with the settings of trl_run.py. "TRL,
asynchronous" is the AsyncGRPOTrainer, which packs completions without padding and computes a prompt
once for its group (step_sides.py). Cases that are not run keep their earlier results. In the
tables, "tokens/s" counts completion tokens, and "computed tokens" counts all tokens that the
decoder processed, including padding. step_memory.py measures peak memory. With --shape,
step_large.py instead measures one step of a real model on a GPU. Read next: step_sides.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from bench import common, step_large, tables
from bench.step_sides import Case, Ours, Trl, TrlAsync, check_norms, options_of

CASES = {
    "even, G=8": Case(8, 8, 32, 64, even=True),
    "uneven, G=8": Case(8, 8, 32, 192),
    "uneven, G=4": Case(16, 4, 32, 192),
    "uneven, G=16": Case(4, 16, 32, 192),
    "prompt half the completion, G=8": Case(8, 8, 64, 128, even=True),
    "long prompt, uneven, G=8": Case(8, 8, 256, 192),
    "small, uneven, G=8": Case(4, 8, 32, 96),
    "large, uneven, G=8": Case(16, 8, 32, 192),
}
LENGTHS = {f"uneven, longest {n}": Case(8, 8, 32, n) for n in (48, 96, 384)}
VOCABULARIES = {
    f"vocabulary {n:,}": Case(2, 8, 32, 96, vocab=n) for n in (1024, 8192, 32768, 151936)
}
CASES |= LENGTHS | VOCABULARIES
# The panels of the plot: title → (function from record to x value, cases).
GROWTH = {
    "completion tokens (64 completions)": (
        lambda record: record["completion_tokens"],
        ("uneven, G=8", *LENGTHS),
    ),
    "completions per prompt, G (64 completions)": (
        lambda record: record["group"],
        ("uneven, G=4", "uneven, G=8", "uneven, G=16"),
    ),
    "vocabulary (16 completions)": (
        lambda record: record["model"]["vocab_size"],
        tuple(VOCABULARIES),
    ),
}


def copied(folder: Path, cfg) -> Ours:
    return Ours(folder, dataclasses.replace(cfg, share_prompts=False))


SIDES = {
    "nanogrpo": Ours,
    "nanogrpo, prompts copied": copied,
    "TRL": Trl,
    "TRL, asynchronous": TrlAsync,
}


def write_model(case: Case, folder: Path, args: argparse.Namespace) -> dict:
    """Write a random model for the case to `folder`, and return its shape."""
    shape = common.small_qwen3(args.hidden, args.layers, case.vocab, 1024)
    step_large.write_model(shape, folder)
    return dataclasses.asdict(shape)


def measure(case: str, args: argparse.Namespace, argv: Sequence[str]) -> list[dict]:
    """Return the records of one case."""
    names = ["nanogrpo"] if args.alone else list(SIDES)
    if case in LENGTHS | VOCABULARIES and not args.alone:
        # in these cases, a run with copies of the prompts shows nothing new
        names = ["nanogrpo", "TRL"]
    with tempfile.TemporaryDirectory() as where:
        shape = write_model(CASES[case], Path(where), args)
        cfg, samples = options_of(CASES[case], args.scale)
        sides = {name: SIDES[name](Path(where), cfg) for name in names}
        norms = {name: side.step(samples) for name, side in sides.items()}
    check_norms(case, norms)
    for side in sides.values():
        side.clock.seconds.clear()
    steps = {name: functools.partial(side.step, samples) for name, side in sides.items()}
    timings = common.interleave(steps, args.repeats, title=case)
    tokens = sum(len(s.token_ids) for s in samples)
    records = []
    for name, timing in timings.items():
        seconds = sides[name].clock.seconds
        figures = {
            "completion_tokens": tokens,
            "group": cfg.num_generations,
            "tokens_per_second": tokens / timing.median,
            "computed_tokens": sides[name].computed(samples),
            # the clock also counted the warm-up round, which is not a step
            "phases": {phase: s / (args.repeats + 1) for phase, s in seconds.items()},
            "speedup_over_trl": None if args.alone else timings["TRL"].median / timing.median,
            "gradient_norm": norms[name],
            "model": shape,
        }
        records.append(common.record("step_time", case, name, argv, timing, **figures))
    return records


def draw(records: list[dict], path: Path) -> None:
    """Plot the seconds per step, one panel per entry of GROWTH."""
    figure, axes = common.subplots(1, len(GROWTH), figsize=(12, 3.8))
    for axis, (title, (x, cases)) in zip(axes, GROWTH.items()):
        for side in common.SIDES:
            points = sorted(
                (x(record), record["seconds_median"])
                for record in records
                if record["side"] == side and record["case"] in cases
            )
            axis.plot(*zip(*points) if points else ([], []), marker="o", label=side)
        axis.set_xlabel(title)
        axis.locator_params(axis="x", nbins=5)  # because labels have six digits
        axis.set_ylim(bottom=0)
    axes[0].set_ylabel("seconds per training step (median)")
    axes[0].legend()
    common.save_picture(figure, path)


def main(argv: Sequence[str]) -> list[dict]:
    parser = common.parser(
        "step_time",
        __doc__,
        repeats=(5, "timed steps of each side"),
        hidden=(256, "hidden size of the model"),
        layers=(4, "layers of the model"),
        scale=(1.0, "factor on all lengths; 0.2 is a quick check"),
    )
    common.add_cases(parser, CASES)
    parser.add_argument(
        "--shape",
        choices=common.LARGE,
        help="measure a model of this size on a GPU instead of the cases",
    )
    common.add_alone(parser)
    args = parser.parse_args(argv)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    if args.shape:
        if not torch.cuda.is_available():
            parser.error(f"--shape {args.shape} needs a GPU, and torch finds none.")
        sides = [s for s in step_large.SETTINGS if not (args.alone and s.startswith("TRL"))]
        return step_large.main(args.shape, args.repeats, sides, args.out, argv)
    torch.set_num_threads(args.threads)
    for case in args.cases:
        # Results are written after each case, so an interrupted run keeps them.
        common.merge("step_time", measure(case, args, argv), args.out)
    draw(common.read("step_time", args.out), common.place_of(args.out, "docs/img/step_time.png"))
    return tables.report("step_time", args.out)


if __name__ == "__main__":
    main(sys.argv[1:])
