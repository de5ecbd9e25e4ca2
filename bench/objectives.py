"""What does each objective, and each way to take advantages, learn? The tiny task, off policy,
several seeds a case.

In: nothing: the base is made by nanogrpo.run.warmup, unless --base names one. Out: a row a run,
results/objectives.json, and from the rows docs/objectives.md. Each run is train.py's loop with
SETTINGS: four updates a generation, so that the ratios leave 1 (on policy all objectives are one,
but for their averages), and one learning rate for all: nothing is tuned for a case. It is a check
that each learns, not a contest: on so small a task a difference is often that of the seeds, which
the table shows.

Runs share the cores, one thread each. A row is written when its run ends and not computed again
while the base, the options and SETTINGS are the same: an interrupted bench goes on. Read next:
docs/objectives.md, nanogrpo/grpo/objectives.py.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import multiprocessing
import os
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress

import train
from bench import common
from nanogrpo.logs import completions
from nanogrpo.run import warmup

SETTINGS = "--num-generations 8 --generation-batch-size 64 --max-concurrent 64 --max-completion-length 48 --device cpu"
SETTINGS += " --steps-per-generation 2 --num-iterations 2 --learning-rate 5e-5 --eval-samples 128"
CASES = {  # name in the table → options beside SETTINGS
    "dapo": "",
    "dapo, on policy": "--steps-per-generation 1 --num-iterations 1 --learning-rate 2e-4",
    "dapo, clip-higher": "--epsilon-high 0.28",
    "grpo": "--loss-type grpo",
    "dr_grpo": "--loss-type dr_grpo --scale-rewards none",
    "gspo": "--loss-type grpo --importance-sampling-level sequence --epsilon 3e-4 --epsilon-high 4e-4",
    "luspo": "--loss-type luspo --importance-sampling-level sequence --epsilon 2e-3 --epsilon-high 2.5e-3",
    "cispo": "--loss-type cispo --epsilon-high 5",
    "sapo": "--loss-type sapo",
    "vespo": "--loss-type vespo",
    "dppo_tv": "--loss-type dppo_tv",
    "dppo_kl": "--loss-type dppo_kl --epsilon 0.05",
    "dapo, top 20 % entropy": "--top-entropy-quantile 0.2",
    "dapo, entropy bonus": "--entropy-coef 0.01",
    "dapo, off-policy mask": "--off-policy-mask-threshold 0.01",
    "dapo, rloo": "--advantage-estimator rloo",
    "dapo, maxrl": "--advantage-estimator maxrl",
    "dapo, gdpo": "--multi-objective-aggregation normalize_then_sum",
}
ACCURACY = "rewards/accuracy_reward"
PAGE = common.ROOT / "docs" / "objectives.md"


def quiet() -> None:
    """In each worker: one thread, and no lines of the runs on the console."""
    torch.set_num_threads(1)
    completions.console.quiet = True
    logging.disable(logging.WARNING)


def one(base: str, options: str, seed: int, steps: int) -> dict:
    """One run: seconds, and what its log says."""
    with tempfile.TemporaryDirectory() as where:
        argv = [
            *shlex.split(SETTINGS),
            "--model",
            base,
            "--data",
            "arithmetic",
            "--output-dir",
            where,
            "--seed",
            str(seed),
        ]
        began = time.perf_counter()
        status = train.main(
            [
                *argv,
                "--max-steps",
                str(steps),
                "--eval-steps",
                str(max(1, steps // 3)),
                *shlex.split(options),
            ]
        )
        seconds = time.perf_counter() - began
        if status:
            raise RuntimeError(f"train.py ended with {status}: {shlex.join(argv)} {options}")
        lines = [
            json.loads(line)
            for line in (Path(where) / "metrics.jsonl").read_text().splitlines()[1:]
        ]
    rows, evaluations = [x for x in lines if "loss" in x], [x for x in lines if "eval/after" in x]
    clip = [x.get("clip_ratio/region_mean", x.get("cispo_clip_ratio")) for x in rows]
    return {
        # before, after each third of the steps
        "held_out": [x[f"eval/{ACCURACY}"] for x in evaluations],
        "rewards": [x[f"{ACCURACY}/mean"] for x in rows],
        "entropies": [x["entropy"] for x in rows],
        "clip_ratio": None if clip[0] is None else statistics.fmean(clip),
        "grad_norm": statistics.fmean(x["grad_norm"] for x in rows),
        "run_seconds": seconds,
    }


def spread(values: Sequence[float]) -> str:
    return f"{statistics.fmean(values):.3f} ± {statistics.stdev(values) if len(values) > 1 else 0.0:.3f}"


def lines_of(rows: Sequence[dict]) -> list[list[str]]:
    """A line a case: means and standard deviations over its seeds."""
    out = []
    for case, options in CASES.items():
        mine = [row for row in rows if row["case"] == case]
        if mine:
            clip = [row["clip_ratio"] for row in mine]
            out.append(
                [
                    case,
                    f"`{options or 'the defaults'}`",
                    str(len(mine)),
                    spread([row["held_out"][0] for row in mine]),
                    spread([row["held_out"][1] for row in mine]),
                    spread([row["held_out"][-1] for row in mine]),
                    spread([statistics.fmean(row["rewards"]) for row in mine]),
                    f"{statistics.fmean(row['entropies'][-1] for row in mine):.3f}",
                    "–" if clip[0] is None else f"{100 * statistics.fmean(clip):.2f} %",
                ]
            )
    return out


COLUMNS = [
    "case",
    "options",
    "seeds",
    "held-out before",
    "after a third",
    "after all",
    "training",
    "last entropy",
    "cut",
]


def page(rows: Sequence[dict]) -> str:
    """docs/objectives.md: the table in Markdown, and what made it."""
    head, last = __doc__.split("\n\n")[0], rows[-1]
    settings = f"`{SETTINGS} --max-steps {last['steps']}`"
    text = f"# Objectives\n\n{head}\nMade by `{last['command']}`, not by hand (bench/objectives.py).\n\n"
    text += f"Options of all: {settings}. Accuracy of the answers, mean ± standard deviation over the seeds; held-out problems\n"
    text += "answered greedily, before, after a third of the steps and after all; `training`: those sampled, mean of all steps.\n"
    text += "`cut`: share of the tokens whose gradient the objective cuts off (cispo: limits).\n\n"
    for line in [COLUMNS, ["---"] * len(COLUMNS), *lines_of(rows)]:
        text += f"| {' | '.join(line)} |\n"
    machine = last["machine"]
    return (
        text
        + f"\n{machine['cpu']}, torch {machine['versions']['torch']}, commit {str(machine['commit'])[:12]}.\n"
    )


def main(argv: Sequence[str] | None = None) -> list[dict]:
    parser = argparse.ArgumentParser(
        prog="python -m bench.objectives", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument(
        "--seeds", type=int, default=5, help="runs of each case, seeds 0, 1, … (default 5)"
    )
    parser.add_argument("--steps", type=int, default=15, help="generations of a run (default 15)")
    parser.add_argument(
        "--cases", nargs="*", choices=list(CASES), default=list(CASES), metavar="CASE"
    )
    parser.add_argument(
        "--workers", type=int, default=os.cpu_count(), help="runs at once (default: one a core)"
    )
    parser.add_argument(
        "--base",
        type=Path,
        default=common.ROOT / "runs" / "objectives" / "base",
        help="made if it is not there",
    )
    parser.add_argument(
        "--out", type=Path, default=common.RESULTS, help="folder of objectives.json"
    )
    parser.add_argument("--page", type=Path, default=PAGE, help="the table in Markdown")
    args = parser.parse_args(argv)
    given = list(sys.argv[1:] if argv is None else argv)
    if not (args.base / "model.safetensors").exists():
        warmup.make_base(args.base)
    base = hashlib.sha256((args.base / "model.safetensors").read_bytes()).hexdigest()[:16]
    path = args.out / "objectives.json"
    rows = json.loads(path.read_text()) if path.exists() else []

    def key(row: dict) -> tuple:
        return tuple(row[name] for name in ("base", "settings", "steps", "case", "options", "seed"))

    stands = {key(row) for row in rows}
    wanted = [
        {
            "base": base,
            "settings": SETTINGS,
            "steps": args.steps,
            "case": case,
            "options": CASES[case],
            "seed": seed,
        }
        for seed in range(args.seeds)  # seed by seed: interrupted, every case has as many
        for case in args.cases
    ]
    asked = {key(what) for what in wanted}
    todo = [what for what in wanted if key(what) not in stands]
    spawn = multiprocessing.get_context("spawn")
    with (
        Progress(console=Console(stderr=True), transient=True) as progress,
        ProcessPoolExecutor(args.workers, mp_context=spawn, initializer=quiet) as pool,
    ):
        task = progress.add_task("runs", total=len(todo))
        futures = {
            pool.submit(one, str(args.base), what["options"], what["seed"], args.steps): what
            for what in todo
        }
        for future in as_completed(futures):
            found, what = future.result(), futures[future]
            timing = common.Timing([found["run_seconds"]])
            row = common.row(
                "objectives", what.pop("case"), "nanogrpo", timing, given, **what, **found
            )
            rows.append(row)
            common.write("objectives", rows, args.out)
            progress.advance(task)
    mine = [row for row in rows if key(row) in asked]
    common.table(
        "objectives on the tiny task",
        COLUMNS[:1] + COLUMNS[2:],
        [x[:1] + x[2:] for x in lines_of(mine)],
    )
    args.page.write_text(page(mine))
    return mine


if __name__ == "__main__":
    main()
