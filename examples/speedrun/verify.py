"""Check records of the speedrun against its rules.

    python -m examples.speedrun.verify                                  # all records, and a table
    python -m examples.speedrun.verify my_idea.json --fresh             # also train with a new seed
    python -m examples.speedrun.verify --plot curves.png                # also plot the curves

In: files that run.py has written; by default, all files in records/. Out: one line per broken rule,
a table, and exit status 1 if a rule is broken. README.md explains the rules. Read before: run.py.

Equation. p = 1 - Φ((a - 0.55) √S / s), with the mean accuracy a of S seeds. The standard deviation
s of the S accuracies is measured, but is at least √(0.55 · 0.45 / 120), the noise of 120 answers.
Suppose that a recipe has an accuracy of 0.55 on average. Then p is about the probability that the
mean accuracy of S seeds is a or more by chance. A record needs p < 0.05.
"""

from __future__ import annotations

import argparse
import math
import secrets
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from bench.common import commit, save_picture, subplots
from examples.speedrun.run import one, options
from nanogrpo.errors import UserError, read_json

RECORDS = Path(__file__).with_name("records")
PROBLEMS, BEFORE, TARGET, LEVEL = 120, 0.192, 0.55, 0.05
# The options that define the task of the speedrun. All other options may change.
FIXED = """
    model data eval_data prompt_column answer_column system_prompt enable_thinking tools rollout
    chat_template_kwargs max_prompt_length long_prompts environment_factory reward_funcs
    reward_weights eval_samples eval_temperature num_generations_eval engine device lora_adapter
"""
ENVIRONMENT = ("OMP_", "GOMP_", "KMP_", "MALLOC_", "THP_")  # prefixes of allowed variables


def chance(runs: Sequence[dict]) -> float:
    """Return the p of the equation above."""
    ends = [run["curve"][-1][3] for run in runs]
    spread = statistics.stdev(ends) if len(ends) > 1 else 0.0
    noise = max(spread, math.sqrt(TARGET * (1 - TARGET) / PROBLEMS))
    z = (statistics.fmean(ends) - TARGET) * math.sqrt(len(ends)) / noise
    return 1 - statistics.NormalDist().cdf(z)


def read(path: Path) -> dict:
    """Return the record in a file. Raises UserError if a part of it is missing."""
    record = read_json(path)
    missing = {"idea", "options", "runs", "date", "machine"} - record.keys()
    if missing:
        raise UserError(
            f"{path} has no {', '.join(sorted(missing))}: run.py adds all except idea and options."
        )
    for run in record["runs"]:
        curve = run.get("curve", [])
        if not {"seed", "threads"} <= run.keys() or {*map(len, curve)} != {4}:
            raise UserError(
                f"{path}: each run needs seed, threads, and a curve of rows with four numbers."
            )
    return record


def problems(record: dict) -> Iterator[str]:
    """Yield a sentence for each rule that a record breaks."""
    runs, steps = record["runs"], options(record)["max_steps"]
    for name in sorted(record["options"].keys() & set(FIXED.split())):
        yield f"the option {name} is fixed: leave it out."
    if options(record)["max_completion_length"] > 40:
        yield "max_completion_length is over 40: evaluations must not allow more."
    for name in record.get("environment", {}):
        if not name.startswith(ENVIRONMENT):
            yield f"the variable {name} may not be set: allowed are {'*, '.join(ENVIRONMENT)}*."
    if sorted(run["seed"] for run in runs) != [*range(len(runs))] or len(runs) < 3:
        yield "the seeds must be 0, 1, 2, and so on, at least three, with none left out."
    for run in runs:
        name, curve = f"seed {run['seed']}", run["curve"]
        if run["threads"] > 2:
            yield f"{name} used {run['threads']} threads: use one or two."
        if [row[0] for row in curve[:1] + curve[-1:]] != [0, steps]:
            yield f"{name} must be evaluated before the first step and after step {steps}."
        if any(a >= b for x, y in pairwise(curve) for a, b in zip(x[:3], y[:3])):
            yield f"{name} has steps or seconds that do not rise."
        if abs(curve[0][3] - BEFORE) > 0.02:
            yield f"{name} starts at {curve[0][3]}, not at {BEFORE}: use the model from PyPI."
    if (p := chance(runs)) >= LEVEL:
        yield f"p is {p:.3f}, not below {LEVEL}: train longer, or run more seeds."


COLUMNS = ("idea", "seeds", "accuracy", "p", "steps", "processor s", "wall s", "date", "commit")


def row(record: dict) -> list[str]:
    """Return the cells of COLUMNS. Seconds and accuracies are means over the seeds."""
    ends = [run["curve"][-1] for run in record["runs"]]
    steps, seconds, processor, accuracy = (statistics.fmean(column) for column in zip(*ends))
    p = f"{chance(record['runs']):.2g}"
    numbers = len(ends), f"{accuracy:.3f}", p, int(steps), round(processor), round(seconds)
    return [record["idea"], *map(str, numbers), record["date"], commit(record["machine"])]


def plot(records: Sequence[dict], path: Path) -> None:
    """Plot the mean accuracy over the seeds against the mean processor time."""
    figure, axis = subplots(figsize=(8, 4.5))
    for record in records:
        curves = zip(*(run["curve"] for run in record["runs"]))
        points = [[statistics.fmean(c) for c in zip(*rows)] for rows in curves]
        _, _, processor, accuracy = zip(*points)
        axis.plot(processor, accuracy, marker="o", label=record["idea"])
    axis.axhline(TARGET, color="gray", linestyle="--", label=f"target: {TARGET}")
    axis.set(xlabel="processor seconds of training", ylabel="held-out accuracy")
    axis.legend()
    save_picture(figure, path)


def fresh(record: dict) -> str | None:
    """Train with a random seed. Return a message if p is too large after this seed is added."""
    with tempfile.TemporaryDirectory() as where:
        run = one(record, secrets.randbelow(10**6) + 1000, Path(where) / "run")
    _, _, processor, accuracy = run["curve"][-1]
    print(f"seed {run['seed']}: {accuracy:.3f} after {processor:.0f} s of processor time")
    p = chance([*record["runs"], run])
    return None if p < LEVEL else f"with the seed {run['seed']}, p is {p:.3f}."


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("records", type=Path, nargs="*", help="default: all files of records/")
    parser.add_argument("--fresh", action="store_true", help="also train with a random seed")
    parser.add_argument("--plot", type=Path, help="file for a plot of the curves")
    args = parser.parse_args(argv)
    paths, broken = args.records or sorted(RECORDS.glob("*.json")), False
    try:
        records = [*map(read, paths)]
        for path, record in zip(paths, records):
            found = [*problems(record)]
            if args.fresh and not found:
                found = [p for p in [fresh(record)] if p]
            for problem in found:
                print(f"{path.name}: {problem}")
            broken |= bool(found)
    except UserError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    for cells in (COLUMNS, ["---"] * len(COLUMNS), *map(row, records)):
        print(f"| {' | '.join(cells)} |")
    if args.plot:
        plot(records, args.plot)
    return int(broken)


if __name__ == "__main__":
    sys.exit(main())
