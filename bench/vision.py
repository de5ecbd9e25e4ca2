"""Does a model learn to look at pictures with GRPO, and does it learn nothing from random pixels?

In: nothing. If the base model is missing, it is created as in examples/pictures.py. Out:
results/vision.json with one record per run, and docs/img/vision.png. The plot shows some of the
pictures, and reward and held-out accuracy by step, as mean and standard deviation over the seeds.

Both kinds of run, "pictures" and "noise", use examples/pictures.json, the same base model, and the
same questions and answers in the same order. In the runs "noise", random pixels replace every
picture, in training and in evaluation. A record is written when its run ends, and a run that has a
record is not repeated. Read next: runs.py, learning.py.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path

from bench import common, learning, runs, tables
from examples import pictures
from nanogrpo import Config

OPTIONS = common.ROOT / "examples/pictures.json"
SIDES = ("pictures", "noise")


def options(side: str, seed: int, base: Path, steps: int) -> Config:
    """Return the options of a run. The data of each kind of run are in a folder next to the base
    model.
    """
    cfg = Config(**json.loads(OPTIONS.read_text()))
    folder = base.resolve().parent / side
    return dataclasses.replace(
        cfg,
        model=str(base.resolve()),
        data=(str(folder / "train.jsonl"),),
        eval_data=(str(folder / "held_out.jsonl"),),
        max_steps=steps,
        seed=seed,
        device="cpu",
    )


def prepare(base: Path) -> None:
    """Write the data of both kinds of run and the base model unless they exist."""
    for side in SIDES:
        folder = base.parent / side
        if not (folder / "held_out.jsonl").exists():
            pictures.write_data(folder, noisy=side == "noise")
    if not base.exists():
        pictures.write_base(base)


def draw(records: list[dict], path: Path) -> None:
    """Plot some pictures (left), rewards (middle) and held-out accuracy (right)."""
    figure, axes = common.subplots(1, 3, figsize=(12, 3.6), width_ratios=(1, 1.2, 1.2))
    show_pictures(axes[0])
    for colour, side in enumerate(SIDES):
        mine = [r for r in records if r["side"] == side]
        learning.draw_side(axes[1:], mine, f"C{colour}", side)
    for axis in axes[1:]:
        axis.set_xlabel("step")
    axes[1].set_ylabel("training reward")
    axes[2].set_ylabel("held-out accuracy (greedy)")
    axes[2].set_ylim(0, 1)
    common.save_picture(figure, path)


def show_pictures(axis) -> None:
    """Draw four held-out problems with their questions and answers."""
    width, height = 110, 90  # size of a cell in the plot, in pixels
    rng = random.Random("shown")
    for i, p in enumerate(pictures.problems("held_out", 4, seed=0)):
        left, top = width * (i % 2), height * (i // 2)
        rows, columns = (pictures.SIDE * n for n in p.size)
        axis.imshow(pictures.picture(p, rng), extent=(left, left + columns, top + rows, top))
        axis.text(left, top - 4, f"{p.question}{sum(p.numbers)}", fontsize=8)
    axis.set(xlim=(-2, 2 * width), ylim=(2 * height - 20, -15))
    axis.axis("off")


def main(argv: Sequence[str]) -> list[dict]:
    parser = runs.parser(
        "vision",
        __doc__,
        common.ROOT / "runs/bench/vision/base",
        seeds=(5, "runs of each kind, with seeds 0, 1, …"),
        steps=(30, "GRPO steps per run"),
    )
    args = parser.parse_args(argv)
    if not args.redraw:
        prepare(args.base)

        def start(seed: int, side: str) -> dict:
            cfg = options(side, seed, args.base, args.steps)
            return {**runs.run("nanogrpo", cfg, args.threads), "steps": args.steps}

        wanted = list(itertools.product(range(args.seeds), SIDES))
        runs.complete("vision", wanted, start, args, argv)
    records = tables.report("vision", args.out)
    draw(records, common.place_of(args.out, "docs/img/vision.png"))
    return records


if __name__ == "__main__":
    main(sys.argv[1:])
