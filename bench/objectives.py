"""How do the objective, the group size, the baseline, the normalizer, staleness and the clip change
learning? Each experiment varies one of them, by default with five seeds per row.

In: nothing; a missing model is made as by `make demo` or `make real`. Out: results/objectives.json
with one record per run, docs/objectives.md, which is made from it, and its picture. A run is
train.py with the options of its row. This command runs a single row:

    python -m bench.objectives --experiments clip --cases "0.2"

Six experiments train SmolLM2-135M on the word problems of `make real`, and need a GPU. The last one
trains the tiny model of `make demo` on a CPU, with each loss type and other options. Nothing is
tuned for a single row: within an experiment, all rows have the same learning rate, except the row
on policy of the tiny model.

Several runs execute in parallel. A record is written when its run ends. A run that has a record is
not repeated, so an interrupted benchmark can be continued, and rows with the same options share
their runs. Read next: docs/objectives.md, nanogrpo/extras/objectives.py.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import multiprocessing
import os
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress

import train
from bench import common, real_model
from bench.learning import fingerprint
from nanogrpo.extras import commandline, completions
from nanogrpo.extras.arithmetic import warmup

# Options of the word problems: sampled answers, because they measure the policy that is trained,
# and because 480 answers have half the noise of 120.
WORDS = (
    "--config examples/word_problems.json --device cuda --token-budget 16384"
    " --eval-temperature 0.7 --num-generations-eval 4"
)
ON_POLICY = f"{WORDS} --max-steps 24 --eval-steps 6"
# Options of experiments with several updates per generation
RATE = "--learning-rate 1e-5"
OFF_POLICY = f"{ON_POLICY} {RATE} --steps-per-generation 4"
STALE = (
    f"{WORDS} {RATE} --generation-batch-size 512 --max-steps 6 --eval-steps 2"
    " --steps-per-generation 16"
)
NO_CLIP = "--epsilon 0.999999 --epsilon-high 1e9"
TINY = (
    "--num-generations 8 --generation-batch-size 64 --max-concurrent 64 --max-completion-length 48"
    " --device cpu --steps-per-generation 2 --num-iterations 2 --learning-rate 5e-5"
    " --eval-samples 128 --data arithmetic --max-steps 15 --eval-steps 5"
)


@dataclass(frozen=True)
class Experiment:
    question: str
    options: str  # options of train.py that all rows have
    cases: dict[str, str]  # row of the table → its options
    finding: str  # shown under the question


def one_generation(updates: int) -> str:
    """Return options under which a generation serves so many updates of 32 completions each.

    All such runs make 96 updates with 3,072 completions.
    """
    steps = 96 // updates
    return (
        f"--generation-batch-size {32 * updates} --steps-per-generation {updates}"
        f" --max-steps {steps} --eval-steps {math.ceil(steps / 4)}"
    )


LOSSES = {  # row → its options; those of a ratio per sequence have the bounds of their papers
    "dr_grpo": "--loss-type dr_grpo --scale-rewards none",
    "gspo": "--loss-type grpo --importance-sampling-level sequence"
    " --epsilon 3e-4 --epsilon-high 4e-4",
    "luspo": "--loss-type luspo --importance-sampling-level sequence"
    " --epsilon 2e-3 --epsilon-high 2.5e-3",
    "cispo": "--loss-type cispo --epsilon-high 5",
    "sapo": "--loss-type sapo",
    "vespo": "--loss-type vespo",
    "dppo_tv": "--loss-type dppo_tv",
    "dppo_kl": "--loss-type dppo_kl --epsilon 0.05",
}
EXPERIMENTS = {
    "objective": Experiment(
        "Which objective learns best, with four updates per generation?",
        OFF_POLICY,
        {
            "dapo": "",
            **LOSSES,
        },
        "`sapo` ends 6 points above `dapo` (3.7 standard errors) and `luspo` 5 below (4.5)."
        " Their training accuracies differ by 4 and 5 points (3.5 both). `gspo` is 3 points"
        " lower in both (2.3 and 2.4); it also learns later on the tiny model. The other rows do"
        " not differ from `dapo` beyond the noise. `gspo` and `luspo` have one ratio per"
        " sequence, and with the narrow bounds of their papers, more than a third of the"
        " sequences have no gradient. `gspo`, `sapo` and `luspo` also weight completions"
        " differently, but the section on the normalizer finds no effect of that.",
    ),
    "group size": Experiment(
        "How many completions per prompt, if a step has 128 completions in total?",
        ON_POLICY,
        {
            "8 × 16 prompts": "",
            "2 × 64 prompts": "--num-generations 2",
            "4 × 32 prompts": "--num-generations 4",
            "16 × 8 prompts": "--num-generations 16",
            "32 × 4 prompts": "--num-generations 32",
            "64 × 2 prompts": "--num-generations 64",
        },
        "Groups of 4, 8 and 16 do not differ beyond the noise. Groups of 2, 32 and 64 have"
        " lower means at the end (by 2 to 6 points) and in training (by 7 to 10), but only by up"
        " to 2.3 standard errors. A clearer difference, which we did not plan to test, is that"
        " groups of 32 have 7 points less training accuracy than groups of 16 (3.4 standard"
        " errors). So eight seeds suggest, but do not show, that groups of two, and large groups"
        " from few prompts, learn more slowly.",
    ),
    "baseline": Experiment(
        "What is subtracted from a reward, and what is the difference divided by?",
        ON_POLICY,
        {
            "group's mean / its deviation": "",
            "group's mean / 1": "--scale-rewards none",
            "group's mean / batch's deviation": "--scale-rewards batch",
            "mean of the others / 1": "--advantage-estimator rloo",
            "group's mean / group's mean": "--advantage-estimator maxrl",
        },
        "With the deviation of the batch instead of the group's, runs end 6.5 points higher"
        " (3.4 standard errors). But their training accuracy does not differ beyond the noise,"
        " nor do they from the rows without a divisor, so this may be chance. No other row"
        " differs from the first beyond the noise. `rloo` subtracts the mean of the other seven"
        " completions. Its advantages are those of the second row times 8/7, and AdamW almost"
        " cancels such a factor. So these two rows should end alike: their difference of 2.4 ±"
        " 2.1 points is chance.",
    ),
    "normalizer": Experiment(
        "Over what is the loss averaged?",
        ON_POLICY,
        {
            "dapo: tokens of the step": "",
            "grpo: tokens of a completion": "--loss-type grpo",
            "dr_grpo: maximum length": "--loss-type dr_grpo",
        },
        "The choice does not matter beyond the noise here. After five seeds, `grpo` ended 4"
        " points above `dapo`, by 2.9 standard errors; with three more seeds, 1 point and 0.7"
        " standard errors are left. So take single differences of this size with care. `bnpo` is"
        " not shown, because a step has one micro-batch here, so it equals `dapo`.",
    ),
    "staleness": Experiment(
        "How many updates may use one generation? All rows sample 3,072 completions, and make 96"
        " updates with 32 completions each. Rows with `--num-iterations 2` use each completion"
        " twice, so they make 192.",
        f"{WORDS} {RATE}",
        {
            "4 updates": one_generation(4),
            "1 update": one_generation(1),
            "16 updates": one_generation(16),
            "48 updates": one_generation(48),
            "96 updates": one_generation(96),
            "4 updates, twice": f"{one_generation(4)} --num-iterations 2",
            "16 updates, twice": f"{one_generation(16)} --num-iterations 2",
            "48 updates, no clip": f"{one_generation(48)} {NO_CLIP}",
            "96 updates, no clip": f"{one_generation(96)} {NO_CLIP}",
        },
        "With the default clip of 0.2, one and four updates per generation do not differ beyond"
        " the noise. With 16, runs end 10 points lower, which is about as much as `luspo`"
        " instead of `sapo`. With 48 and 96, the loss is 20 and 25 points, more than by any"
        " choice above. In the last of these, all completions come from the base model, and four"
        " fifths of the gain are lost. The clip causes much of this: without it, 16 updates end"
        " as high as four (next section), and 48 and 96 end 10 points above the same rows with"
        " it. Even so, 48 updates lose a third of the gain, and 96 lose half. Training on each"
        " completion twice does not change the end beyond the noise; with four updates, it"
        " raises training accuracy by 2.5 points (2.6 standard errors). Rows with different"
        " numbers of generations can only be compared by their held-out accuracies: with few"
        " generations, most completions come from earlier models, so the training accuracy is"
        " lower in any case.",
    ),
    "clip": Experiment(
        "How far may the ratio move, with 16 updates per generation?",
        STALE,
        {
            "0.2": "",
            "0.02": "--epsilon 0.02",
            "0.05": "--epsilon 0.05",
            "0.4": "--epsilon 0.4",
            "0.2 below, 0.28 above": "--epsilon-high 0.28",
            "0.2 below, none above": "--epsilon-high 1e9",
            "none": NO_CLIP,
            "none, but delta 4": f"{NO_CLIP} --delta 4",
        },
        "With bounds of 0.02 and 0.05, runs end 9.5 and 8.5 points lower than with 0.2. A wider"
        " upper bound, or none, does not change the end beyond the noise; training accuracy is 4"
        " points higher without an upper bound, and with 0.4 on both sides. Without any clip,"
        " runs end 10 points higher than with 0.2, as high as with four updates per generation,"
        " and 8 points higher than without only the upper bound (3.3 standard errors). This"
        " points to the lower bound, which stops tokens from becoming less likely: here it slows"
        " learning more than it protects it. No row leaves out the lower bound alone. `--delta"
        " 4`, an upper bound for tokens with a negative advantage, changes nothing beyond the"
        " noise. Longer runs and higher learning rates may differ.",
    ),
    "tiny": Experiment(
        "Does a model learn with each loss type, and with other options of the loss? Here, the"
        " tiny model of `make demo` learns arithmetic, with four updates per generation.",
        TINY,
        {
            "dapo": "",
            "dapo, on policy": "--steps-per-generation 1 --num-iterations 1 --learning-rate 2e-4",
            "dapo, clip-higher": "--epsilon-high 0.28",
            "grpo": "--loss-type grpo",
            **LOSSES,
            "dapo, top 20 % entropy": "--top-entropy-quantile 0.2",
            "dapo, entropy bonus": "--entropy-coef 0.01",
            "dapo, off-policy mask": "--off-policy-mask-threshold 0.01",
            "dapo, rloo": "--advantage-estimator rloo",
            "dapo, maxrl": "--advantage-estimator maxrl",
            "dapo, gdpo": "--multi-objective-aggregation normalize_then_sum",
        },
        "All rows learn, and end within 2.2 points of `dapo`. Only two end lower by more than"
        " chance (2.8 standard errors): on policy, by 2.2 points, and `vespo`, by 0.9. In"
        " training, `gspo` and `luspo` are 11 points lower, and the off-policy mask 2. `sapo`,"
        " `dppo_tv`, `dppo_kl` and on policy are 2 points higher. Of 34 such differences, chance"
        " makes one or two this large.",
    ),
}
PAGE = """# Objectives

How do the objective, the group size, the baseline, the normalizer, staleness and the clip change
learning? Generated by `python -m bench.objectives` (bench/objectives.py); do not edit.

Accuracies are means ± standard deviations over the seeds, and a point is 0.01. `held-out` is the
accuracy after the last step on problems that do not occur in training; for the word problems, of
four sampled answers to each of 120 problems. `training` is the mean accuracy of all answers that
were sampled for training, so it is higher if a run learns sooner. `entropy` is that of the last
step; it tends to stay higher where runs learn less. `clipped` is the share of tokens without a
gradient because of the objective. For gspo and luspo, it is the share of such sequences. For cispo,
it is the share of ratios that were clipped, whose tokens keep their gradient.

`minus first row` is the mean difference from the first row ± its standard error, with runs paired
by their seed. If two rows were equal, chance would make one difference in twenty larger than 2.4
standard errors with eight seeds, and than 2.8 with five (Student's t). A table with sixteen such
differences may well have one. The first rows of group size, baseline and normalizer are the same
eight runs. If these ended low by chance, all differences from them are too high.

Nothing was tuned for a single row. All rows of a table have the same learning rate: 3e-5 from
examples/word_problems.json, unless its options have another one. The only exception is the row on
policy of the tiny model. [grpo.md](grpo.md) explains the methods, and
[equations.md](equations.md#the-loss-of-a-token) has their equations.

To repeat a row, run `python train.py` with the options of all rows, its own, and the seeds from
`--seed 0`. `make real` makes the model of the word problems, in `runs/smollm2`. The tiny task needs
`--model runs/demo/base`, which `make demo` makes.

![Held-out accuracy during the runs](img/objectives.png)
"""
COLUMNS = (
    "row",
    "options",
    "seeds",
    "held-out",
    "minus first row",
    "training",
    "minus first row",
    "entropy",
    "clipped",
)


def command(experiment: str, case: str) -> str:
    """Return all options of a row, without model, seed and output folder."""
    found = EXPERIMENTS[experiment]
    return f"{found.options} {found.cases[case]}".rstrip()


# --- the runs ---


def quiet() -> None:
    """Set up a worker: one thread, and no console output of the runs."""
    torch.set_num_threads(1)
    completions.console.quiet = True
    logging.disable(logging.WARNING)


def run_case(base: str, options: str, seed: int) -> dict:
    """Run train.py once; return the time it took and the metrics from its log."""
    with tempfile.TemporaryDirectory() as where:
        argv = f"--seed {seed} --model {base} --output-dir {where} {options}"
        began = time.perf_counter()
        if status := train.main(shlex.split(argv)):
            raise RuntimeError(f"train.py ended with status {status}: {argv}")
        seconds = time.perf_counter() - began
        log = (Path(where) / "metrics.jsonl").read_text().splitlines()[1:]
    torch.cuda.empty_cache()  # other workers may use the same GPU
    lines = [json.loads(line) for line in log]
    steps = [line for line in lines if "loss" in line]
    evaluations = [line for line in lines if "eval/after" in line]
    accuracy = next(name for name in steps[0] if name.startswith("rewards/"))  # the first reward's
    clip = [x.get("clip_ratio/region_mean", x.get("cispo_clip_ratio")) for x in steps]
    return {
        "held_out": [x[f"eval/{accuracy.removesuffix('/mean')}"] for x in evaluations],
        "rewards": [x[accuracy] for x in steps],
        "entropies": [x["entropy"] for x in steps],
        "clip_ratio": None if clip[0] is None else statistics.fmean(clip),
        "grad_norm": statistics.fmean(x["grad_norm"] for x in steps),
        "run_seconds": seconds,
    }


# --- the page ---


def spread(values: Sequence[float]) -> str:
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.fmean(values):.3f} ± {deviation:.3f}"


def runs_of(records: Sequence[dict], experiment: str, case: str) -> list[dict]:
    options = command(experiment, case)
    return sorted((r for r in records if r["options"] == options), key=lambda r: r["seed"])


def end(run: dict) -> float:
    return run["held_out"][-1]


def training(run: dict) -> float:
    return statistics.fmean(run["rewards"])


def difference(value: Callable[[dict], float], mine: Sequence[dict], first: Sequence[dict]) -> str:
    """Return the mean difference of two rows and its standard error.

    The runs are paired by their seed, because runs of one seed draw the same prompts.
    """
    of_seed = {r["seed"]: value(r) for r in first}
    apart = [value(r) - of_seed[r["seed"]] for r in mine if r["seed"] in of_seed]
    if mine is first or len(apart) < 2:
        return "–"
    return f"{statistics.fmean(apart):+.3f} ± {statistics.stdev(apart) / len(apart) ** 0.5:.3f}"


def lines_of(records: Sequence[dict], experiment: str) -> list[list[str]]:
    """Return one table line per row that has runs."""
    cases = EXPERIMENTS[experiment].cases
    first, lines = runs_of(records, experiment, next(iter(cases))), []
    for i, (case, options) in enumerate(cases.items()):
        mine = runs_of(records, experiment, case) if i else first
        if not mine:
            continue
        clip = [r["clip_ratio"] for r in mine]
        lines.append(
            [
                case,
                f"`{options}`" if options else "–",
                str(len(mine)),
                *(
                    text
                    for value in (end, training)
                    for text in (spread([*map(value, mine)]), difference(value, mine, first))
                ),
                f"{statistics.fmean(r['entropies'][-1] for r in mine):.3f}",
                "–" if clip[0] is None else f"{100 * statistics.fmean(clip):.2f} %",
            ]
        )
    return lines


def page(records: Sequence[dict]) -> str:
    """Return docs/objectives.md: a section per experiment that has runs."""
    out = [PAGE]
    for name, experiment in EXPERIMENTS.items():
        table = lines_of(records, name)
        if not table:
            continue
        first = runs_of(records, name, next(iter(experiment.cases)))
        before = statistics.fmean(r["held_out"][0] for r in first)
        rows = [COLUMNS, ["---"] * len(COLUMNS), *table]
        out += [
            f"## {name.capitalize()}\n",
            f"{experiment.question}\n",
            f"{experiment.finding}\n",
            f"All rows: `{experiment.options}`, beginning at a held-out accuracy of"
            f" {before:.3f}.\n",
            *(f"| {' | '.join(row)} |" for row in rows),
            f"\n{where([r for case in experiment.cases for r in runs_of(records, name, case)])}\n",
        ]
    return "\n".join(out)


def where(records: Sequence[dict]) -> str:
    machine = records[0]["machine"]
    commits = dict.fromkeys(common.commit(r["machine"]) for r in records)
    device = machine["gpu"] or machine["cpu"]
    return f"{device}, torch {machine['versions']['torch']}, commit {', '.join(commits)}."


def draw(records: Sequence[dict], path: Path) -> None:
    """Plot the held-out accuracy of each experiment's rows over the share of the run."""
    names = [n for n in EXPERIMENTS if n != "tiny" and lines_of(records, n)]
    if not names:
        return
    figure, axes = common.subplots(
        math.ceil(len(names) / 2), 2, figsize=(10, 3.6 * math.ceil(len(names) / 2)), squeeze=False
    )
    for axis, name in zip(axes.flat, names):
        for case in EXPERIMENTS[name].cases:
            if mine := runs_of(records, name, case):
                mean = [statistics.fmean(at) for at in zip(*(r["held_out"] for r in mine))]
                x = [i / (len(mean) - 1) for i in range(len(mean))]
                axis.plot(x, mean, marker=".", label=case)
        axis.set_title(name, fontsize=10)
        axis.set_xlabel("share of the run")
        axis.set_ylabel("held-out accuracy")
        axis.legend(fontsize=7)
    common.save_picture(figure, path)


# --- the command ---


def main(argv: Sequence[str]) -> list[dict]:
    parser = common.parser(
        "objectives",
        __doc__,
        threads=False,
        seeds=(5, "runs of each row, with seeds 0, 1, …"),
        workers=(os.cpu_count() or 1, "number of parallel runs"),
    )
    for option, default, text in (
        ("--base", "runs/smollm2", "SmolLM2-135M-Instruct"),
        ("--tiny-base", "runs/objectives/base", "the tiny model"),
        ("--page", "docs/objectives.md", "file of the tables"),
        ("--picture", "docs/img/objectives.png", "file of the plot"),
    ):
        path = common.ROOT / default
        parser.add_argument(option, type=Path, default=path, help=f"{text} (default {default})")
    for option, choices in (
        ("--experiments", [*EXPERIMENTS]),
        ("--cases", sorted({case for e in EXPERIMENTS.values() for case in e.cases})),
    ):
        text = f"{option[2:]} to run (default: all)"
        parser.add_argument(option, nargs="*", choices=choices, metavar="NAME", help=text)
    parser.add_argument("--redraw", action="store_true", help="only write page and picture")
    args = parser.parse_args(argv)
    records = common.read("objectives", args.out)
    if not args.redraw:
        measure(args, records, argv)
        for name in args.experiments or EXPERIMENTS:
            columns = [i for i, column in enumerate(COLUMNS) if column != "options"]
            lines = [[line[i] for i in columns] for line in lines_of(records, name)]
            common.table(name, [COLUMNS[i] for i in columns], lines)
    args.page.write_text(page(records))
    draw(records, args.picture)
    return records


def measure(args: argparse.Namespace, records: list[dict], argv: Sequence[str]) -> None:
    """Run what has no record yet, and add the records."""
    wanted = {  # a dict, because experiments share rows; the seeds are the outer loop
        (command(name, case), seed): args.tiny_base if name == "tiny" else args.base
        for seed in range(args.seeds)
        for name in args.experiments or EXPERIMENTS
        for case in EXPERIMENTS[name].cases
        if case in (args.cases or [case])
    }
    bases = {}
    for base in {*wanted.values()}:
        if base == args.base:
            real_model.prepare(
                commandline.parse(["--config", str(real_model.OPTIONS), "--model", str(base)])
            )
        elif not base.exists():
            warmup.make_base(base)
        bases[base] = fingerprint(base / "model.safetensors")
    have = {(r["options"], r["seed"]) for r in records if r["base"] in bases.values()}
    spawn = multiprocessing.get_context("spawn")
    with (
        Progress(console=Console(stderr=True), transient=True) as progress,
        ProcessPoolExecutor(args.workers, mp_context=spawn, initializer=quiet) as pool,
    ):
        todo = {key: base for key, base in wanted.items() if key not in have}
        task = progress.add_task("runs", total=len(todo))
        futures = {
            pool.submit(run_case, str(base), *key): (key, base) for key, base in todo.items()
        }
        try:
            for future in as_completed(futures):
                (options, seed), base = futures[future]
                found = future.result()
                timing = common.Timing([found.pop("run_seconds")])
                same = {"options": options, "seed": seed, "base": bases[base]}
                case = f"{options}, seed {seed}"
                records.append(
                    common.record("objectives", case, "nanogrpo", argv, timing, **same, **found)
                )
                common.write("objectives", records, args.out)
                progress.advance(task)
        finally:
            pool.shutdown(cancel_futures=True)  # Ctrl-C starts no further run


if __name__ == "__main__":
    main(sys.argv[1:])
