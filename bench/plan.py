"""How well does `nanogrpo plan` predict the seconds of a step? On this machine's CPU, with the
speeds that nanogrpo/run/cost.py measures on it.

In: nothing; models with random weights of three sizes are made here, the largest with the shape of
SmolLM2-135M. Out: results/plan.json: for each size the seconds of `sample`, `train` and the whole
step, as predicted and as train.py took. Lengths are uneven, and the prediction gets the lengths
that were sampled, as it would from a user who knows them. Read next: nanogrpo/run/cost.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from bench import common, end_to_end, runs, tables
from nanogrpo.model.hf_config import ModelConfig
from nanogrpo.run import cost
from nanogrpo.types import Sample

# hidden size, layers, vocabulary
SIZES = {"3M": (256, 4, 2048), "38M": (512, 12, 16384), "135M": (576, 30, 49152)}


def shape(size: str, context: int) -> ModelConfig:
    hidden, layers, vocab = SIZES[size]
    small = common.small_qwen3(hidden, layers, vocab, context)
    return dataclasses.replace(small, tie_word_embeddings=False)  # as end_to_end.py needs it


def work_of(samples: list[Sample]) -> cost.Work:
    """Return the lengths of a step, and the share of the completions without a gradient."""
    prompts = {s.prompt.id: len(s.prompt.token_ids) for s in samples}
    skipped = sum(not s.advantage for s in samples) / len(samples)
    return cost.Work(list(prompts.values()), [len(s.token_ids) for s in samples], skipped)


def measure(size: str, args: argparse.Namespace, argv: Sequence[str]) -> dict:
    """Return the record of one size."""
    context = args.prompt_length + args.longest
    c = shape(size, context)
    sampled: list[list[Sample]] = []
    with tempfile.TemporaryDirectory() as where:
        cfg = end_to_end.write_case(Path(where), c, args, even=False)
        found = runs.ours(dataclasses.replace(cfg, output_dir=str(Path(where) / "out")), sampled)
    rows = round(statistics.fmean(sum(len(s.token_ids) for s in step) for step in sampled))
    slots = round(
        statistics.fmean(
            sum(len(s.token_ids) for s in step) / max(len(s.token_ids) for s in step)
            for step in sampled
        )
    )
    device = cost.measured(c, rows, max(slots, 1), args.prompt_length + args.longest // 3)
    predicted = {"sample": [], "train": [], "sync": []}
    for step in sampled[1:]:
        work = work_of(step)
        predicted["sample"].append(cost.sample(c, work, device, cfg.slots))
        predicted["train"].append(cost.train(c, work, device, budget=cfg.strip_tokens))
        predicted["sync"].append(cost.sync(c, device, 1))
    real = {name: statistics.median(found["phases"][name][1:]) for name in (*predicted, "score")}
    guess = {name: statistics.median(values) for name, values in predicted.items()}
    return common.record(
        "plan",
        size,
        "nanogrpo",
        argv,
        predicted={**guess, "step": sum(guess.values())},
        real={**real, "step": sum(real.values())},
        device=device._asdict(),
        parameters=cost.Weights.of(c).total,
    )


def main(argv: Sequence[str]) -> list[dict]:
    parser = common.parser(
        "plan",
        __doc__,
        steps=(6, "steps of each run, the first of which is not counted"),
        prompts=(8, "prompts per step"),
        group=(8, "completions per prompt"),
        prompt_length=(64, "tokens per prompt"),
        longest=(128, "length limit of the completions"),
    )
    common.add_cases(parser, list(SIZES))
    args = parser.parse_args(argv)
    args.shape = "small"  # on the CPU
    torch.set_num_threads(args.threads)
    for size in args.cases:
        path = common.merge("plan", [measure(size, args, argv)], args.out)
    records = common.read("plan", args.out)
    tables.show("plan", records)
    print(f"results: {path}")
    return records


if __name__ == "__main__":
    main(sys.argv[1:])
