"""Do LoRA adapters learn as well on a base model in four bits (--load-in-4bit) as on a base model
in bfloat16? How much memory does a run need with each base model?

In: nothing. If a base model is missing, it is created as in bench.learning or bench.real_model.
Out: results/four_bits.json with one record per run, and docs/img/four_bits.png. The plot shows
reward and held-out accuracy by step, as mean and standard deviation over the seeds.

The two cases are the tiny task of `make demo`, and the word problems of `make real` with fewer
steps and seeds. In both cases, adapters of rank 8 are trained on each base model, with the same
seeds, prompts and options. A record is written when its run ends, and a run that has a record is
not repeated. Runs on a GPU (--device cuda) are recorded as separate cases. Read next: runs.py,
learning.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path

from bench import common, learning, real_model, runs, tables
from nanogrpo import Config
from nanogrpo.extras.arithmetic import warmup

LORA = {"lora_r": 8, "lora_alpha": 16.0, "dtype": "bfloat16"}
SIDES: dict[str, dict] = {"bfloat16": {}, "4 bits": {"load_in_4bit": True}}
RATES = {"tiny": 1e-3, "135M": 5e-4}  # learning rates


def options(case: str, side: str, seed: int, args: argparse.Namespace) -> Config:
    if case == "tiny":
        base = {"model": str(args.base.resolve()), "data": ("arithmetic",), "eval_steps": 2}
        cfg = Config(**{**learning.SETTINGS, **base, "max_steps": args.steps})
    else:
        given = argparse.Namespace(base=args.real_base, quick=False, steps=args.real_steps)
        cfg = dataclasses.replace(real_model.options(given), eval_steps=5)
    changes = {"seed": seed, "learning_rate": RATES[case], "device": args.device}
    return dataclasses.replace(cfg, **changes, **LORA, **SIDES[side])


def draw(records: list[dict], path: Path) -> None:
    """Plot rewards (above) and held-out accuracy (below) of each case (left, right) by step."""
    cases = [*dict.fromkeys(r["side"].rpartition(", ")[0] for r in records)]
    figure, axes = common.subplots(2, len(cases), figsize=(5 * len(cases), 6.5), squeeze=False)
    for column, case in zip(axes.T, cases):
        for colour, side in enumerate(SIDES):
            mine = [r for r in records if r["side"] == f"{case}, {side}"]
            learning.draw_side(column, mine, f"C{colour}", side)
        column[0].set_title(case, fontsize=10)
        column[1].set_xlabel("step")
    axes[0, 0].set_ylabel("training reward")
    axes[1, 0].set_ylabel("held-out accuracy (greedy)")
    common.save_picture(figure, path)


def main(argv: Sequence[str]) -> list[dict]:
    parser = runs.parser(
        "four_bits",
        __doc__,
        common.ROOT / "runs/bench/base",
        seeds=(5, "runs on each base, with seeds 0, 1, …"),
        steps=(20, "GRPO steps per run"),
        real_seeds=(1, "the same for the word problems; 0: leave them out"),
        real_steps=(10, "the same for the word problems"),
    )
    parser.add_argument(
        "--real-base", type=Path, default=common.ROOT / "runs/smollm2", help="SmolLM2-135M-Instruct"
    )
    devices = {"cpu": "", "cuda": " on a GPU"}
    parser.add_argument("--device", choices=devices, default="cpu", help="default: cpu")
    args = parser.parse_args(argv)
    if not args.redraw:
        if not args.base.exists():
            warmup.make_base(args.base)
        if args.real_seeds:
            real_model.prepare(options("135M", "4 bits", 0, args))

        def start(seed: int, name: str) -> dict:
            case, _, side = name.partition(", ")
            cfg = options(case.removesuffix(where), side, seed, args)
            found = runs.run("nanogrpo", cfg, args.threads)
            return {**found, "steps": cfg.max_steps, "device": cfg.device}

        seeds, where = {"tiny": args.seeds, "135M": args.real_seeds}, devices[args.device]
        wanted = [
            (seed, f"{case}{where}, {side}")
            for case, count in seeds.items()
            for seed, side in itertools.product(range(count), SIDES)
        ]
        runs.complete("four_bits", wanted, start, args, argv)
    records = tables.report("four_bits", args.out)
    draw(records, common.place_of(args.out, "docs/img/four_bits.png"))
    return records


if __name__ == "__main__":
    main(sys.argv[1:])
