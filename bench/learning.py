"""Does nanogrpo learn as well as TRL, and how much faster does it train? Both trainers learn the
tiny task from the same base model, with several seeds per trainer.

In: nothing. Without --base, a base model is created as in `nanogrpo warmup`. Out:
results/learning.json with one record per run, and docs/img/learning.png. The plot shows reward and
held-out accuracy by step and by second, as mean and standard deviation over the seeds.

Both trainers use the options in SETTINGS. All other options have nanogrpo's defaults, which
trl_run.py passes to TRL. Both trainers use the same prompts in the same order, and the same reward
functions. The prompts differ between seeds. For a given seed, the trainers differ only in their
implementation and in the random numbers for sampling. A third run per seed removes the effect of
these random numbers: TRL trains on the completions that nanogrpo sampled, and should end with the
same model as nanogrpo. In all runs, the same engine answers the held-out problems with greedy
decoding. Evaluations are not timed.

Why 16 seeds? If the same trainer is run twice with n seeds, the two means typically differ by
sqrt(2/n) standard deviations of a single run. So with 5 seeds, the two means of equal trainers
differ by more than one standard deviation at one in nine evaluations. With 16 seeds, they differ by
so much only at one in two hundred evaluations. The sides run alternately. A record is written when
its run ends, and a run that has a record is not repeated. So an interrupted benchmark can be
continued. Read next: runs.py.
"""

from __future__ import annotations

import hashlib
import itertools
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from bench import common, runs, tables, tables_learning
from nanogrpo import Config
from nanogrpo.extras.arithmetic import warmup

SETTINGS = {
    "num_generations": 8,
    "generation_batch_size": 128,
    "max_concurrent": 128,
    "max_completion_length": 48,
    "learning_rate": 5e-5,
    "device": "cpu",
}
COLOURS = {"nanogrpo": "C0", "TRL": "C1"}


def draw_band(
    axis, x: Sequence[float], mean: list[float], std: list[float], color: str, label: str
) -> None:
    """Plot a mean curve, and an area of one standard deviation around it."""
    low, high = ([m + sign * s for m, s in zip(mean, std)] for sign in (-1, 1))
    axis.plot(x, mean, color=color, label=label)
    axis.fill_between(x, low, high, color=color, alpha=0.2, linewidth=0)


def draw_side(axes, records: list[dict], color: str, side: str) -> None:
    """Plot the reward (left or top axis) and the held-out accuracy of a side by step."""
    for axis, name in zip(axes, ("reward", "held_out")) if records else ():
        curve = tables_learning.curve(records, name)
        draw_band(axis, *curve, color, f"{side}, {len(records)} seeds")
        axis.legend(fontsize=9)


def draw(records: list[dict], path: Path) -> None:
    """Plot rewards (top) and held-out accuracy (bottom), by step (left) and by second (right)."""
    figure, axes = common.subplots(2, 2, figsize=(10, 6.5), sharey="row")
    timed = tables_learning.alternated(records)
    for side, colour in COLOURS.items():
        mine = [record for record in records if record["side"] == side]
        if not mine:
            continue
        label = f"{side}{' 1.16.0' if side == 'TRL' else ''}, {len(mine)} seeds"
        for (left, right), name in zip(axes, ("reward", "held_out")):
            x, mean, std = tables_learning.curve(mine, name)
            seconds = [
                statistics.fmean(sum(r["seconds"][:step]) for r in timed[side]) for step in x
            ]
            draw_band(left, x, mean, std, colour, label)
            draw_band(right, seconds, mean, std, colour, label)
    axes[0, 0].set_ylabel("training reward")
    axes[1, 0].set_ylabel("held-out accuracy (greedy)")
    axes[1, 0].set_xlabel("step")
    axes[1, 1].set_xlabel("second (mean over the seeds; evaluation not counted)")
    axes[0, 0].legend(fontsize=9)
    figure.suptitle("mean ± standard deviation over the seeds", fontsize=10)
    common.save_picture(figure, path)


def fingerprint(*files: Path) -> str:
    """Return a hash of the contents of files, such as a base model's weights."""
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


def main(argv: Sequence[str]) -> list[dict]:
    parser = runs.parser(
        "learning",
        __doc__,
        common.ROOT / "runs/bench/base",
        seeds=(16, "runs of each kind, with seeds 0, 1, …"),
        steps=(40, "GRPO steps per run"),
        eval_steps=(2, "number of steps between evaluations on the held-out problems"),
    )
    args = parser.parse_args(argv)
    if not args.redraw:
        if not args.base.exists():
            warmup.make_base(args.base)
        same = {
            "steps": args.steps,
            "eval_steps": args.eval_steps,
            "threads": args.threads,
            "base": fingerprint(args.base / "model.safetensors"),
            "settings": SETTINGS,
        }

        def start(seed: int, side: str) -> dict:
            cfg = Config(
                model=str(args.base.resolve()),
                data=("arithmetic",),
                max_steps=args.steps,
                eval_steps=args.eval_steps,
                seed=seed,
                **SETTINGS,
            )
            return {**runs.run(side, cfg, args.threads), **same}

        wanted = list(itertools.product(range(args.seeds), (*common.SIDES, common.REPLAYED)))
        # Records of runs with other options are not used.
        runs.complete("learning", wanted, start, args, argv, lambda r: same.items() <= r.items())
    records = tables.report("learning", args.out)
    draw(records, common.place_of(args.out, "docs/img/learning.png"))
    return records


if __name__ == "__main__":
    main(sys.argv[1:])
