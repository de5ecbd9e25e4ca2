"""Does our trainer learn as TRL's does, and how much sooner? The tiny task from one base model,
several seeds a side.

In: nothing: the base is made by `python -m nanogrpo.run.warmup` unless --base names one. Out: a row
a run, results/learning.json, and docs/img/learning.png: reward and held-out accuracy by step and by
second, mean and standard deviation over the seeds.

Both sides train with SETTINGS and our other defaults (trl_run.py hands them to TRL), on the same
prompts in the same order (each seed draws its own), with the same reward functions; what differs is
who implements them, and the random numbers of sampling. A third run of each seed takes the random
numbers away: TRL trains on the completions that our run drew, and should make of them what we made.
Held-out problems are answered greedily by one engine for all, and not timed.

How many seeds? The means of n runs of one and the same trainer are apart by sqrt(2/n) standard
deviations on the average: with 5 seeds, one evaluation in nine is beyond one deviation by chance,
with 16 one in two hundred. Runs take turns; each row is written when its run ends, and a run whose
row stands already is not repeated: an interrupted bench goes on. Read next: runs.py.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import statistics
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from bench import common, runs, tables, tables_learning
from nanogrpo.config import Config
from nanogrpo.run import warmup

SETTINGS = {
    "num_generations": 8,
    "generation_batch_size": 128,
    "max_concurrent": 128,
    "max_completion_length": 48,
    "learning_rate": 5e-5,
    "device": "cpu",
}
COLOURS = {"nanogrpo": "C0", "TRL": "C1"}


def draw(rows: list[dict], out: Path) -> None:
    """The picture: rewards above, held-out accuracy below; by step on the left, by second on the
    right.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(10, 6.5), sharey="row")
    for side in common.SIDES:
        mine = [row for row in rows if row["side"] == side]
        if not mine:
            continue
        label = f"{side}{' 1.16.0' if side == 'TRL' else ''}, {len(mine)} seeds"
        for (left, right), name in zip(axes, ("reward", "held_out")):
            x, mean, std = tables_learning.curve(mine, name)
            seconds = [statistics.fmean(sum(row["seconds"][:step]) for row in mine) for step in x]
            for axis, at in ((left, x), (right, seconds)):
                axis.plot(at, mean, color=COLOURS[side], label=label, linewidth=1.5)
                low, high = ([m + sign * s for m, s in zip(mean, std)] for sign in (-1, 1))
                axis.fill_between(at, low, high, color=COLOURS[side], alpha=0.2, linewidth=0)
    for axis, title in zip(axes[:, 0], ("training reward", "held-out accuracy (greedy)")):
        axis.set_ylabel(title)
    for axis, title in zip(
        axes[1], ("step", "second (mean over the seeds; evaluation not counted)")
    ):
        axis.set_xlabel(title)
    for axis in axes.flat:
        axis.grid(alpha=0.3)
    axes[0, 0].legend(fontsize=9)
    figure.suptitle("mean ± standard deviation over the seeds", fontsize=10)
    figure.tight_layout()
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=110)
    plt.close(figure)


def fingerprint(base: Path) -> str:
    return hashlib.sha256((base / "model.safetensors").read_bytes()).hexdigest()[:16]


def main(argv: Sequence[str] | None = None) -> list[dict]:
    parser = argparse.ArgumentParser(
        prog="python -m bench.learning", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument(
        "--seeds", type=int, default=16, help="runs of each kind, seeds 0, 1, … (default 16)"
    )
    parser.add_argument("--steps", type=int, default=40, help="GRPO steps a run (default 40)")
    parser.add_argument(
        "--eval-steps",
        type=int,
        default=2,
        help="steps between two looks at the held-out problems (default 2)",
    )
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default 2)")
    parser.add_argument(
        "--base",
        type=Path,
        default=common.ROOT / "runs/bench/base",
        help="the base model; made when missing",
    )
    parser.add_argument(
        "--afresh", action="store_true", help="repeat the runs whose rows stand already"
    )
    parser.add_argument(
        "--redraw", action="store_true", help="no runs: the picture and the table from the rows"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=common.RESULTS,
        help="folder for the JSON rows (default bench/results)",
    )
    parser.add_argument(
        "--picture",
        type=Path,
        default=common.ROOT / "docs/img/learning.png",
        help="where it is drawn",
    )
    args = parser.parse_args(argv)

    path = args.out / "learning.json"
    rows = json.loads(path.read_text()) if path.exists() and not args.afresh else []
    if not args.redraw:
        if not args.base.exists():
            args.base.parent.mkdir(parents=True, exist_ok=True)
            warmup.make_base(args.base, seed=0)
        same = {
            "steps": args.steps,
            "eval_steps": args.eval_steps,
            "threads": args.threads,
            "base": fingerprint(args.base),
        }
        same["settings"] = SETTINGS
        # others are of another bench
        rows = [row for row in rows if all(row[name] == value for name, value in same.items())]
        wanted = list(itertools.product(range(args.seeds), (*common.SIDES, common.REPLAYED)))
        with Progress(console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task("learning", total=len(wanted))
            for seed, side in wanted:
                progress.update(task, description=f"seed {seed}: {side}")
                if not any((row["seed"], row["side"]) == (seed, side) for row in rows):
                    options = {
                        **SETTINGS,
                        "max_steps": args.steps,
                        "eval_steps": args.eval_steps,
                        "seed": seed,
                    }
                    found = runs.run(
                        side,
                        Config(model=str(args.base.resolve()), data=("arithmetic",), **options),
                        args.threads,
                    )
                    found |= {**same, "seed": seed}
                    rows.append(
                        common.facts(
                            "learning", f"seed {seed}", side, [] if argv is None else argv, **found
                        )
                    )
                    common.write("learning", rows, args.out)
                progress.advance(task)
    draw(rows, args.picture)
    tables.show("learning", rows)
    print(f"rows: {path}, picture: {args.picture}")
    return rows


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
