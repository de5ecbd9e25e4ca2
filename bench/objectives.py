"""How do the objective, the group size, the baseline, the normalizer, staleness and the clip affect
learning? Each experiment varies one setting, by default with five seeds per row.

In: nothing. If a model is missing, it is created as in `make demo` or `make real`. Out:
results/objectives.json with one record per run. docs/objectives.md and its picture are created from
these records. Each run calls train.py with the options of one row. The following command runs a
single row:

    python -m bench.objectives --experiments clip --cases "0.2"

Six experiments train SmolLM2-135M on the word problems of `make real`, and need a GPU. The last
experiment trains the tiny model of `make demo` on a CPU. It has a row for each loss type, and rows
for other options of the loss. The options of individual rows are not tuned. Within an experiment,
all rows have the same learning rate, except the on-policy row of the tiny model.

Several runs execute in parallel. A record is written when its run ends. A run that has a record is
not repeated, so an interrupted benchmark can be continued. If two rows have the same options, both
rows use the same runs. Read next: docs/objectives.md, nanogrpo/extras/objectives.py.
"""

from __future__ import annotations

import argparse
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
from bench import common, real_model, runs
from bench.learning import fingerprint
from bench.tables_learning import show
from nanogrpo.extras import commandline, completions
from nanogrpo.extras.arithmetic import warmup

# Options of the word problems. Evaluations sample four answers to each of 120 problems.
# The accuracy of 480 sampled answers has half the noise of the accuracy of 120 answers.
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
    options: str  # options of train.py for all rows
    cases: dict[str, str]  # options of each row of the table
    finding: str  # shown under the question


def one_generation(updates: int) -> str:
    """Return options that split a generation into `updates` updates of 32 completions each.

    All runs with these options make 96 updates with 3,072 completions.
    """
    steps = 96 // updates
    return (
        f"--generation-batch-size {32 * updates} --steps-per-generation {updates}"
        f" --max-steps {steps} --eval-steps {math.ceil(steps / 4)}"
    )


# options of each row; objectives with one ratio per sequence use the bounds of their papers
LOSSES = {
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
        "In held-out accuracy, `sapo` is 6 points above `dapo` (3.7 standard errors), and `luspo`"
        " is 5 points below `dapo` (4.5 standard errors). In training accuracy, `sapo` is 4 points"
        " above `dapo`, and `luspo` is 5 points below `dapo` (3.5 standard errors each). `gspo` is"
        " 3 points below `dapo`, both in held-out and in training accuracy (2.3 and 2.4 standard"
        " errors). `gspo` also learns more slowly at first on the tiny model. All other"
        " differences from `dapo` are within the noise. `gspo` and `luspo` use one ratio per"
        " sequence, with the narrow bounds of their papers. Because of the narrow bounds, more"
        " than a third of the sequences of `gspo` and `luspo` have no gradient. `gspo`, `sapo` and"
        " `luspo` also weight completions differently, but the section on the normalizer finds no"
        " effect of such weights.",
    ),
    "group size": Experiment(
        "How many completions should each prompt get, if a step has 128 completions in total?",
        ON_POLICY,
        {
            "8 × 16 prompts": "",
            "2 × 64 prompts": "--num-generations 2",
            "4 × 32 prompts": "--num-generations 4",
            "16 × 8 prompts": "--num-generations 16",
            "32 × 4 prompts": "--num-generations 32",
            "64 × 2 prompts": "--num-generations 64",
        },
        "The differences between groups of 4, 8 and 16 are within the noise. Compared with groups"
        " of 8, groups of 2, 32 and 64 have a lower mean accuracy at the end (by 2 to 6 points) and"
        " in training (by 7 to 10 points). But the differences from groups of 8 are at most 2.3"
        " standard errors. We also found a larger difference, which we had not planned to test: in"
        " training, runs with groups of 32 are 7 points less accurate than runs with groups of 16"
        " (3.4 standard errors). So the eight seeds suggest, but do not prove, that runs learn more"
        " slowly with groups of two, and with large groups from few prompts.",
    ),
    "baseline": Experiment(
        "What should be subtracted from a reward, and by what should the difference be divided?",
        ON_POLICY,
        {
            "group's mean / its deviation": "",
            "group's mean / 1": "--scale-rewards none",
            "group's mean / batch's deviation": "--scale-rewards batch",
            "mean of the others / 1": "--advantage-estimator rloo",
            "group's mean / group's mean": "--advantage-estimator maxrl",
        },
        "If centered rewards are divided by the standard deviation of the batch instead of the"
        " group, runs end 6.5 points higher (3.4 standard errors). But the 6.5 points may be"
        " chance. The difference in training accuracy is within the noise, and so are the"
        " differences from the rows without a division. All other differences from the first row"
        " are within the noise. `rloo` subtracts the mean of the other seven completions. The"
        " advantages of `rloo` are 8/7 times the advantages of the second row, and AdamW almost"
        " cancels such a factor. So `rloo` and the second row should end alike, and we attribute"
        " their difference of 2.4 ± 2.1 points to chance.",
    ),
    "normalizer": Experiment(
        "By which number is the loss of a token divided?",
        ON_POLICY,
        {
            "dapo: tokens of the step": "",
            "grpo: tokens of a completion": "--loss-type grpo",
            "dr_grpo: maximum length": "--loss-type dr_grpo",
        },
        "All differences in this table are within the noise. With the first five seeds, `grpo`"
        " was 4 points above `dapo` (2.9 standard errors). With all eight seeds, the difference is"
        " only 1 point (0.7 standard errors). So do not rely on a single difference of this size."
        " `bnpo` is not shown, because it equals `dapo` in nanogrpo.",
    ),
    "staleness": Experiment(
        "How many updates should use the completions of one generation? All rows sample 3,072"
        " completions, and make 96 updates with 32 completions each. Rows with `--num-iterations"
        " 2` use each completion twice, so these rows make 192 updates.",
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
        "With the default clip of 0.2, the difference between one and four updates per generation"
        " is within the noise. With 16 updates, runs end 10 points lower than with four updates."
        " A decrease of 10 points is about as large as the difference between `luspo` and `sapo`."
        " With 48 and 96 updates, runs end 20 and 25 points lower. Decreases of 20 points and more"
        " are larger than any difference in the tables above. With 96 updates, all completions"
        " come from the base model, and four fifths of the gain in accuracy are lost. The clip"
        " causes much of the decrease. Without the clip, runs with 16 updates end as high as runs"
        " with four updates (see the next section). Runs with 48 and 96 updates end 10 points"
        " higher without the clip than with the clip. Even without the clip, runs with 48 updates"
        " lose a third of the gain, and runs with 96 updates lose half of it. Training on each"
        " completion twice does not change the final accuracy beyond the noise. But with four"
        " updates, training twice raises the training accuracy by 2.5 points (2.6 standard"
        " errors). For rows with different numbers of generations, compare only the held-out"
        " accuracies. With few generations, most completions come from barely trained models, so"
        " the training accuracy is lower in any case.",
    ),
    "clip": Experiment(
        "How far may the ratio move away from 1, with 16 updates per generation?",
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
        "With bounds of 0.02 and 0.05, runs end 9.5 and 8.5 points lower than with 0.2. A larger"
        " upper bound, or no upper bound, does not change the final accuracy beyond the noise. But"
        " the training accuracy is 4 points higher without an upper bound, and also with 0.4 on"
        " both sides. Without clipping, runs end 10 points higher than with 0.2, and as high as"
        " with four updates per generation. Runs without clipping also end 8 points higher than"
        " runs with only the lower bound (3.3 standard errors). So the lower bound, which keeps"
        " tokens from becoming less likely, seems to slow learning more than it helps. But no row"
        " tests this explanation directly, by removing only the lower bound. `--delta 4` is an"
        " upper bound for tokens with a negative advantage, and the effect of this bound is within"
        " the noise. Longer runs and higher learning rates may give other results.",
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
        "All rows learn, and end within 2.2 points of `dapo`. Only two rows end lower than `dapo`"
        " by more than 2.8 standard errors. The row `dapo, on policy` is 2.2 points lower, and"
        " `vespo` is 0.9 points lower. In training accuracy, `gspo` and `luspo` are 11 points"
        " lower than `dapo`, and the row with the off-policy mask is 2 points lower. `sapo`,"
        " `dppo_tv`, `dppo_kl` and `dapo, on policy` are 2 points higher than `dapo`. All other"
        " differences are below 2.8 standard errors. The table has 34 differences, of which one or"
        " two would exceed 2.8 standard errors by chance alone.",
    ),
}
PAGE = """# Objectives

How do the objective, the group size, the baseline, the normalizer, staleness and the clip affect
learning? The command `python -m bench.objectives` writes this page (bench/objectives.py). Do not
edit the page by hand.

The tables show accuracies as means ± standard deviations over the seeds. One point is an accuracy
of 0.01. The column `held-out` is the accuracy after the last step, on problems that do not occur in
training. For the word problems, each of 120 problems gets four sampled answers. The column
`training` is the mean accuracy of all answers that were sampled for training, so `training` is
higher if a run learns sooner. The column `entropy` is the entropy in the last step. The entropy
tends to stay higher if a run learns less. The column `clipped` is the fraction of tokens that have
no gradient because of the objective. For gspo and luspo, `clipped` is the fraction of sequences
without a gradient. For cispo, `clipped` is the fraction of tokens whose ratio is clipped. Clipped
tokens of cispo keep their gradient.

The column `minus first row` is the mean difference from the first row ± its standard error. For
each seed, the run of a row is compared with the run of the first row. If two rows were equally
good, their difference would still exceed a certain limit by chance in one of twenty cases. For
eight seeds, this limit is 2.4 standard errors, and for five seeds, it is 2.8 standard errors
(Student's t). So a table with sixteen differences may well contain a difference that exceeds the
limit by chance. The tables on group size, baseline and normalizer have the same eight runs in their
first rows. If these eight runs ended low by chance, all differences in these three tables are too
high.

We did not tune the options of individual rows. All rows of a table have the same learning rate. The
learning rate is 3e-5, from examples/word_problems.json, unless the options of all rows set another
learning rate. Only the row `dapo, on policy` of the tiny model has its own learning rate. The page
[choices.md](choices.md#4-the-relatives-of-grpo) explains the objectives, and
[equations.md](equations.md#the-loss-of-a-token) lists their equations.

The default values of options are those of TRL, so that a command for TRL gives the same numbers in
nanogrpo. For cispo, gspo and luspo, TRL's defaults are not the values of the papers. With the
default `--epsilon 0.2`, cispo limits each weight to 0.2, and the ratios of sequences in gspo and
luspo are almost never clipped. Without `--importance-sampling-level sequence`, luspo has ratios per
token. If a run uses one of these losses with TRL's defaults, it logs the values of the paper when
it starts. The rows below use the values of the papers. With sequence ratios,
`--top-entropy-quantile` cannot remove the gradient of single tokens, because the ratio of a
sequence depends on all of its tokens. As in TRL, the option then only scales the gradient of each
completion.

To repeat a row, run `python train.py` with the options of all rows and the options of this row,
once for each of the seeds 0, 1, … (`--seed 0`). The word problems need `--model runs/smollm2`,
which `make real` creates. The tiny task needs `--model runs/demo/base`, which `make demo` creates.

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
    """Return all options of a row, except model, seed and output folder."""
    found = EXPERIMENTS[experiment]
    return f"{found.options} {found.cases[case]}".rstrip()


# --- the runs ---


def quiet() -> None:
    """Set up a worker process with one thread, in which runs print nothing."""
    torch.set_num_threads(1)
    completions.console.quiet = True
    logging.disable(logging.WARNING)


def run_case(base: str, options: str, seed: int) -> dict:
    """Run train.py once. Return the time of the run and the metrics from its log."""
    with tempfile.TemporaryDirectory() as where:
        argv = f"--seed {seed} --model {base} --output-dir {where} {options}"
        began = time.perf_counter()
        if status := train.main(shlex.split(argv)):
            raise RuntimeError(f"train.py ended with status {status}: {argv}")
        seconds = time.perf_counter() - began
        steps, evaluations = runs.logged(Path(where))
    torch.cuda.empty_cache()  # leave memory for other workers on the same GPU
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


def runs_of(records: Sequence[dict], experiment: str, case: str) -> list[dict]:
    options = command(experiment, case)
    return sorted((r for r in records if r["options"] == options), key=lambda r: r["seed"])


def end(run: dict) -> float:
    return run["held_out"][-1]


def training(run: dict) -> float:
    return statistics.fmean(run["rewards"])


def difference(value: Callable[[dict], float], mine: Sequence[dict], first: Sequence[dict]) -> str:
    """Return the mean difference between two rows, and its standard error.

    The runs are paired by seed, because runs with the same seed draw the same prompts.
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
                    for text in (show([*map(value, mine)], 3), difference(value, mine, first))
                ),
                f"{statistics.fmean(r['entropies'][-1] for r in mine):.3f}",
                "–" if clip[0] is None else f"{100 * statistics.fmean(clip):.2f} %",
            ]
        )
    return lines


def page(records: Sequence[dict]) -> str:
    """Return the text of docs/objectives.md, with a section for each experiment that has runs."""
    out = [PAGE]
    for name, experiment in EXPERIMENTS.items():
        table = lines_of(records, name)
        if not table:
            continue
        first = runs_of(records, name, next(iter(experiment.cases)))
        before = statistics.fmean(r["held_out"][0] for r in first)
        out += [
            f"## {name.capitalize()}\n",
            f"{experiment.question}\n",
            f"{experiment.finding}\n",
            f"Before training, the held-out accuracy is {before:.3f}."
            " All rows have these options:\n",
            f"```\n{experiment.options}\n```\n",
            common.markdown(COLUMNS, table),
            f"\n{where([r for case in experiment.cases for r in runs_of(records, name, case)])}\n",
        ]
    return "\n".join(out)


def where(records: Sequence[dict]) -> str:
    machine = records[0]["machine"]
    commits = dict.fromkeys(common.commit(r["machine"]) for r in records)
    device = machine["gpu"] or machine["cpu"]
    versions = f"torch {machine['versions']['torch']}, at commit {', and at commit '.join(commits)}"
    return f"This table was measured on {device} with {versions}."


def draw(records: Sequence[dict], path: Path) -> None:
    """Plot the held-out accuracy of each row against the finished fraction of the run."""
    names = [n for n in EXPERIMENTS if n != "tiny" and lines_of(records, n)]
    if not names:
        return
    rows = math.ceil(len(names) / 2)
    figure, axes = common.subplots(rows, 2, figsize=(10, 3.6 * rows), squeeze=False)
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
    common.place_of(args.out, "docs/objectives.md").write_text(page(records))
    draw(records, common.place_of(args.out, "docs/img/objectives.png"))
    return records


def measure(args: argparse.Namespace, records: list[dict], argv: Sequence[str]) -> None:
    """Perform all runs that have no record yet, and add their records."""
    wanted = {  # a dict removes duplicates, because several experiments may have the same row
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
            pool.shutdown(cancel_futures=True)  # after Ctrl-C, no further run starts


if __name__ == "__main__":
    main(sys.argv[1:])
