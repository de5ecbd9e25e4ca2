"""Create the tables of benchmarks in which models learn, such as bench.learning.

In: records. Out: table lines and notes. Read next: tables.py.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from bench.common import REPLAYED, SIDES, listed, mib, times


def mean_std(values: Sequence[float]) -> tuple[float, float]:
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def curve(records: list[dict], name: str) -> tuple[list[int], list[float], list[float]]:
    """Return (finished steps, mean, standard deviation) over the runs.

    `name` is the name of a list with one value per step, or "held_out".
    """
    if name == "held_out":
        steps, values = sorted(map(int, records[0][name])), map(held_out, records)
    else:
        steps, values = list(range(1, len(records[0][name]) + 1)), (r[name] for r in records)
    means, stds = zip(*map(mean_std, zip(*values)))
    return steps, list(means), list(stds)


def apart(records: list[dict], name: str) -> tuple[float, float]:
    """Compare the mean curves of the two trainers.

    Returns the fraction of steps at which the means differ by at most one standard deviation, and
    the largest distance in standard deviations. The standard deviation at a step is the square root
    of the mean of the two variances. If both variances are 0, the means must be equal.
    """
    (_, a, sa), (_, b, sb) = (curve(by_side(records)[side], name) for side in SIDES)
    distances = []
    for x, dx, y, dy in zip(a, sa, b, sb):
        deviation = ((dx**2 + dy**2) / 2) ** 0.5
        distances.append(abs(x - y) / deviation if deviation else math.inf if x != y else 0.0)
    return statistics.fmean(d <= 1 for d in distances), max(distances)


def held_out(run: dict) -> list[float]:
    """Return the accuracies of a run on the held-out problems, in the order of its evaluations."""
    return [run["held_out"][step] for step in sorted(run["held_out"], key=int)]


def seconds_to(record: dict, accuracy: float) -> float | None:
    """Return the training seconds until an evaluation reached `accuracy`, or None."""
    reached = [int(step) for step, value in record["held_out"].items() if value >= accuracy]
    return sum(record["seconds"][: min(reached)]) if reached else None


def by_side(records: list[dict]) -> dict[str, list[dict]]:
    """Return the runs of each side that has runs."""
    found: dict[str, list[dict]] = {}
    for r in records:
        if "held_out" in r:  # not a profile
            found.setdefault(r["side"], []).append(r)
    return found


def alternated(records: list[dict]) -> dict[str, list[dict]]:
    """Return the runs of those seeds that both trainers ran, because only the times of these runs
    can be compared. If only one trainer has runs, all its runs are returned.
    """
    runs = by_side(records)
    both = set.intersection(*({r["seed"] for r in runs.get(side, ())} for side in SIDES))
    return {side: [r for r in mine if r["seed"] in both] or mine for side, mine in runs.items()}


def show(values: Sequence[float], digits: int) -> str:
    return "{:.{d}f} ± {:.{d}f}".format(*mean_std(values), d=digits)


def show_reached(seconds: Sequence[float | None], digits: int) -> str:
    """Show the seconds of those runs that have reached an accuracy, and the number of others."""
    reached = [s for s in seconds if s is not None]
    text = show(reached, digits) if reached else "–"
    never = len(seconds) - len(reached)
    return f"{text} ({never} never)" if never else text


def ends(runs: list[dict]) -> list[str]:
    """Show the held-out accuracy before and after training."""
    return [show([held_out(r)[i] for r in runs], 3) for i in (0, -1)]


def last_rewards(runs: list[dict]) -> str:
    return show([statistics.fmean(r["reward"][-5:]) for r in runs], 3)


def learning(records: list[dict]) -> list[tuple]:
    lines = []
    for side, mine in by_side(records).items():
        seconds, to90 = "does not sample", ""
        if side in SIDES:
            seconds = show([sum(r["seconds"]) for r in mine], 1)
            to90 = show_reached([seconds_to(r, 0.9) for r in mine], 1)
        lines.append((side, len(mine), ends(mine)[1], last_rewards(mine), seconds, to90))
    return lines


def before_and_after(records: list[dict]) -> list[tuple]:
    """Return one line per side, with its held-out accuracy before and after training."""
    return [
        (
            side,
            f"{len(mine)} × {mine[0]['steps']} steps",
            *ends(mine),
            last_rewards(mine),
            show([sum(r["seconds"]) for r in mine], 1),
            mib(max(r["peak_bytes_above_libraries"] for r in mine)),
        )
        for side, mine in by_side(records).items()
    ]


def real_model(records: list[dict]) -> list[tuple]:
    timed = alternated(records)
    # TRL runs fewer steps than nanogrpo, and the first steps take longer.
    # So only the steps that both trainers ran are compared.
    count = min((r["steps"] for mine in timed.values() for r in mine), default=0)
    first = {side: [s for r in mine for s in r["seconds"][:count]] for side, mine in timed.items()}
    lines = []
    for side, mine in by_side(records).items():
        over = None
        if "TRL" in first:
            over = statistics.median(first["TRL"]) / statistics.median(first[side])
        seconds = [s for r in timed[side] for s in r["seconds"]]
        phases = {
            name: statistics.median([s for r in timed[side] for s in r["phases"][name]])
            for name in mine[0]["phases"]
        }
        lines.append(
            (
                side,
                f"{len(mine)} × {mine[0]['steps']} steps",
                statistics.median(seconds),
                f"{min(seconds):.3g} – {max(seconds):.3g}",
                times(over) if side != "TRL" else "",
                mib(max(r["peak_bytes_above_libraries"] for r in mine)),
                *ends(mine),
                show_reached([seconds_to(r, held_out(r)[0] + 0.25) for r in timed[side]], 0),
                listed(phases, ".2f"),
            )
        )
    return lines


def shares(records: list[dict]) -> list[str]:
    """Return notes on the records that --profile has written."""
    notes = [
        "Peak memory is the peak of the trainer's process minus the memory of its imported"
        " libraries. The times come from the seeds that both trainers ran. The column 'over TRL'"
        " compares only the steps that both trainers ran."
    ]
    for r in records:
        if "peak_flops" in r:
            share = {phase: r[phase]["share_of_peak"] for phase in ("train", "sample")}
            notes.append(
                f"Training reaches {share['train']:.0%} of the speed of the fastest matrix product"
                f" measured in the same process ({r['peak_flops'] / 1e9:.0f} GFLOP/s), and sampling"
                f" reaches {share['sample']:.0%} of this speed."
            )
    if len(notes) == 1:
        notes.append("The fraction of the peak speed (--profile) is not yet measured.")
    return notes


def replay_apart(records: list[dict]) -> list[str]:
    """Return how much TRL differs from nanogrpo if both learn from the same completions.

    In these records, "ours" is nanogrpo's run that sampled the completions.
    """
    theirs = by_side(records).get(REPLAYED)
    if not theirs:
        return []
    both = [(r["ours"][step], value) for r in theirs for step, value in r["held_out"].items()]
    equal, most = sum(a == b for a, b in both), max(abs(a - b) for a, b in both)
    weights = max(r["weights_apart"] for r in theirs)
    return [
        "TRL was also trained on the completions that nanogrpo sampled, so that both trainers"
        f" could differ only in training. Both trainers then have the same held-out accuracy at"
        f" {equal} of {len(both)} evaluations, and the largest difference is {most:.3f}. The"
        f" distance between the final weights of the two trainers is at most {weights:.1e} times"
        " the distance between nanogrpo's final weights and the base model."
    ]


def rises(records: list[dict]) -> list[str]:
    """Return one note per side that says how much held-out accuracy changes during training."""
    notes = []
    for side, mine in by_side(records).items():
        rise = [100 * (values[-1] - values[0]) for values in map(held_out, mine)]
        span = f"{min(rise):+.1f} to {max(rise):+.1f} (mean {statistics.fmean(rise):+.1f})"
        notes.append(
            f"In the runs `{side}`, held-out accuracy changes by {span} percentage points."
        )
    return notes


def vision(records: list[dict]) -> list[str]:
    notes = [
        "A question asks for the sum of one, two or three dice. The sum has 6, 11 or 16 possible"
        " values, which are equally likely. So on average, a guess is right with a probability of"
        " 0.107."
    ]
    notes += rises(records)
    busy = max(r["machine"]["load_average"] for r in records)
    if busy > 2 * records[0]["machine"]["cores"]:
        notes.append(f"Other programs ran at the same time (load average up to {busy:.0f}).")
    return notes


def curves_apart(records: list[dict]) -> list[str]:
    if not by_side(records).keys() >= {*SIDES}:
        return []
    notes = []
    for name, title in (("held_out", "held-out accuracy"), ("reward", "reward")):
        share, most = apart(records, name)
        notes.append(
            f"At {share:.0%} of the steps, the two trainers differ in mean {title} by at most one"
            f" standard deviation. The largest difference is {most:.2f} standard deviations."
        )
    return notes + replay_apart(records)
