"""Draw the study of docs/precision.md from bench/results/precision.json: gaps, and learning curves.

    python docs/img/precision.py

In: the records of bench/precision.py. Out: precision.svg in this folder. Read next:
../precision.md.
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import fmean

from draw import FONT, GRID, HEALTHY, SICK, WIDTH, save
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))

from bench import common, precision  # noqa: E402 (bench is not installed)

SMALLEST = 1e-14  # where a gap of 0 is drawn, as on a logarithmic axis 0 has no place


def draw() -> Figure:
    records, names = common.read("precision"), [*precision.SETTINGS]
    trained = any(r["side"] in precision.SIDES for r in records)
    figure = Figure((WIDTH / 10, 3.2 * (1 + trained)), layout="constrained")
    gaps, *curves = figure.subplots(1 + trained, squeeze=False)[:, 0]
    for prefix, color, label in (
        ("", HEALTHY, "the trained model"),
        (precision.WIDE, SICK, "the wider model"),
    ):
        points = [(x, n) for n in names if (x := gap(records, prefix + n)) is not None]
        gaps.plot(
            [max(x, SMALLEST) for x, _ in points],
            [names.index(n) for _, n in points],
            *("o",),
            color=color,
            label=label,
        )
    gaps.set(xscale="log", xlabel="k3 (left edge: exactly 0)")
    gaps.set_yticks(range(len(names)), names)
    gaps.invert_yaxis()
    for axes in curves:
        draw_curves(axes, records)
    for axes in (gaps, *curves):
        axes.grid(color=GRID, lw=0.5)
        axes.legend(frameon=False, fontsize=9)
    return figure


def draw_curves(axes: Axes, records: list[dict]) -> None:
    for side in precision.SIDES:
        mine = [r["rewards"] for r in records if r["side"] == side]
        means = [fmean(at) for at in zip(*mine)]
        weights, control = precision.CORRECTED in side, precision.FLOAT8 in side
        label = precision.FLOAT8 if control else "all other settings"
        label += precision.CORRECTED if weights else ""
        first = control or side.startswith("float32")
        axes.plot(
            range(1, len(means) + 1),
            means,
            color=SICK if weights else HEALTHY,
            ls="--" if control else "-",
            lw=2 if control else 1,
            label=label if first else None,
        )
    axes.set(xlabel="step", ylabel="accuracy of the sampled answers")


def gap(records: list[dict], side: str) -> float | None:
    found = [x for r in records if r["side"] == side for x in r["k3"]]
    return fmean(found) if found else None


if __name__ == "__main__":
    with rc_context(FONT):
        save(draw(), HERE / "precision.svg")
