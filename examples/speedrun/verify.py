"""Check records of the speedrun against its rules.

    python -m examples.speedrun.verify                                  # all records, and a table
    python -m examples.speedrun.verify my_idea.json --fresh             # also train with a new seed
    python -m examples.speedrun.verify --plot docs/img/speedrun.png     # also plot the curves

In: files that run.py wrote; default: those in records/. Out: one line per broken rule, a table, and
exit status 1 if a rule is broken. README.md explains the rules. Read before: run.py.

Equation.   With S seeds and 120 held-out problems, n = 120 S answers, of which k are right:
            p = Σ_{i ≥ k} C(n, i) · 0.55^i · 0.45^{n - i}
            is the probability of k or more right answers if each one is right with probability
            0.55. A record needs p < 0.05.
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

from bench.common import commit, save_picture, subplots, table
from examples.speedrun.run import one, options
from nanogrpo.errors import UserError, read_json

RECORDS = Path(__file__).with_name("records")
PROBLEMS, BEFORE, TARGET, LEVEL = 120, 0.192, 0.55, 0.05
# The options that make the task. All other options may change.
FIXED = """
    model data eval_data prompt_column answer_column system_prompt enable_thinking tools rollout
    chat_template_kwargs max_prompt_length long_prompts environment_factory reward_funcs
    reward_weights eval_samples eval_temperature num_generations_eval engine device
"""
ENVIRONMENT = ("OMP_", "GOMP_", "KMP_", "MALLOC_", "THP_")  # prefixes of variables that may be set


def chance(runs: Sequence[dict]) -> float:
    """Return the p of the equation above."""
    n = PROBLEMS * len(runs)
    right = sum(round(PROBLEMS * run["curve"][-1][3]) for run in runs)
    ways = sum(math.comb(n, i) * 11**i * 9 ** (n - i) for i in range(right, n + 1))
    return ways / 20**n  # 11 / 20 is the target


def problems(record: dict) -> Iterator[str]:
    """Yield a sentence for each rule that a record breaks."""
    missing = {"idea", "options", "runs", "date", "machine"} - record.keys()
    if missing:
        yield f"{', '.join(sorted(missing))} is missing: run.py writes runs, date and machine."
        return
    runs, steps = record["runs"], record["options"].get("max_steps")
    if not all(
        {"seed", "threads", "curve"} <= run.keys()
        and [*map(len, run["curve"])] == [4] * max(len(run["curve"]), 2)
        for run in runs
    ):
        yield "each run needs seed, threads, and a curve of rows with four numbers."
        return
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


def row(record: dict) -> list:
    """Return the cells of COLUMNS. Seconds and accuracies are means over the seeds."""
    ends = [run["curve"][-1] for run in record["runs"]]
    steps, seconds, processor, accuracy = (statistics.fmean(column) for column in zip(*ends))
    return [
        record["idea"],
        len(ends),
        f"{accuracy:.3f}",
        f"{chance(record['runs']):.3f}",
        int(steps),
        round(processor),
        round(seconds),
        record["date"],
        commit(record["machine"]),
    ]


def plot(records: Sequence[dict], path: Path) -> None:
    """Plot the mean accuracy over the seeds against the mean processor seconds."""
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
    """Train with a random seed. Return a sentence if the test fails with this seed included."""
    with tempfile.TemporaryDirectory() as where:
        run = one(record, secrets.randbelow(10**6) + 1000, Path(where) / "run")
    _, _, processor, accuracy = run["curve"][-1]
    print(f"seed {run['seed']}: {accuracy:.3f} after {processor:.0f} processor seconds")
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
        records = [read_json(path) for path in paths]
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
    if not broken:
        table("speedrun", COLUMNS, [row(record) for record in records])
        if args.plot:
            plot(records, args.plot)
    return int(broken)


if __name__ == "__main__":
    sys.exit(main())
