"""The table of bench.learning: how the curves of the two sides compare, and TRL's on our
completions. In: rows. Out: cells.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from bench.common import REPLAYED, SIDES


def mean_std(values: Sequence[float]) -> tuple[float, float]:
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def curve(rows: list[dict], name: str) -> tuple[list[int], list[float], list[float]]:
    """(finished steps, mean, standard deviation) over runs: of a list with a value a step, or of
    "held_out".
    """
    if name == "held_out":
        steps = sorted(map(int, rows[0][name]))
        values = [[row[name][str(step)] for row in rows] for step in steps]
    else:
        steps = list(range(1, len(rows[0][name]) + 1))
        values = list(zip(*(row[name] for row in rows)))
    means, stds = zip(*map(mean_std, values))
    return steps, list(means), list(stds)


def apart(rows: list[dict], name: str) -> tuple[float, float]:
    """(share of the steps at which the two mean curves are within one standard deviation, the
    largest distance in deviations).

    The deviation of a step is that of the two sides together: the root of their mean variance.
    Steps at which neither side varies count by whether the means are equal.
    """
    sides = [[row for row in rows if row["side"] == side] for side in SIDES]
    (_, a, sa), (_, b, sb) = (curve(side, name) for side in sides)
    distances = []
    for x, dx, y, dy in zip(a, sa, b, sb):
        deviation = ((dx**2 + dy**2) / 2) ** 0.5
        distances.append(abs(x - y) / deviation if deviation else math.inf if x != y else 0.0)
    return statistics.fmean(d <= 1 for d in distances), max(distances)


def seconds_to(row: dict, accuracy: float) -> float | None:
    """Training seconds of a run until an evaluation reached `accuracy`."""
    reached = [int(step) for step, value in row["held_out"].items() if value >= accuracy]
    return sum(row["seconds"][: min(reached)]) if reached else None


def show(values: Sequence[float], digits: int) -> str:
    return "{:.{d}f} ± {:.{d}f}".format(*mean_std(values), d=digits)


def learning(rows: list[dict]) -> list[tuple]:
    lines = []
    for side in (*SIDES, REPLAYED):
        mine = [row for row in rows if row["side"] == side]
        if not mine:
            continue
        ends = [row["held_out"][max(row["held_out"], key=int)] for row in mine]
        reached = [seconds_to(row, 0.9) for row in mine]
        to90 = show([s for s in reached if s is not None], 1) if any(reached) else "–"
        to90 += f" ({sum(s is None for s in reached)} never)" if None in reached else ""
        reward = [statistics.fmean(row["reward"][-5:]) for row in mine]
        seconds = (
            (show([sum(row["seconds"]) for row in mine], 1), to90)
            if side in SIDES
            else ("it samples nothing", "")
        )
        lines.append((side, len(mine), show(ends, 3), show(reward, 3), *seconds))
    return lines


def replay_apart(rows: list[dict]) -> list[str]:
    """How far TRL is from us when both learn from the same completions. A replay's row has "ours",
    the run that drew them.
    """
    theirs = [row for row in rows if row["side"] == REPLAYED]
    if not theirs:
        return []
    both = [(row["ours"][step], value) for row in theirs for step, value in row["held_out"].items()]
    equal, most = sum(a == b for a, b in both), max(abs(a - b) for a, b in both)
    return [
        "TRL on the completions that our runs drew, where only the training is left to differ: its held-out accuracy is ours at "
        f"{equal} of {len(both)} evaluations (at most {most:.3f} apart), and its final weights differ from ours by at most "
        f"{max(row['weights_apart'] for row in theirs):.1e} of the way from the base."
    ]


def curves_apart(rows: list[dict]) -> list[str]:
    if not {row["side"] for row in rows} >= set(SIDES):
        return []
    notes = []
    for name, title in (("held_out", "held-out accuracy"), ("reward", "reward")):
        share, most = apart(rows, name)
        notes.append(
            f"The two mean curves of {title} by step are within one standard deviation at {share:.0%} of the steps, "
            f"and at most {most:.2f} standard deviations apart."
        )
    return notes + replay_apart(rows)
