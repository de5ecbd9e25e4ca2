"""Plot one or several runs: `nanogrpo plot RUN [RUN …] [--metrics NAME …] [--out curve.png]`.

In: the metrics.jsonl of each run. Out: one picture. Noisy curves are drawn twice: faint as they
are, and as a moving average. A panel appears only if a run has its metrics and they say something:
each reward function if there are several, the KL if there is a reference, the clip and truncation
if they occurred, the gap between trainer and engine if it is more than rounding. `--metrics`
chooses the panels instead, also those of `log_metric`. Needs matplotlib: `pip install
'nanogrpo[plot]'`.
"""

from __future__ import annotations

import argparse
import difflib
import fnmatch
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nanogrpo.errors import UserError
from nanogrpo.logs.files import read_records
from nanogrpo.logs.progress import GAP

# title → metric. Each is drawn if a run has a value above the number.
OTHERS = {
    "groups without a signal (share)": ("frac_reward_zero_std", -1.0),
    "completion length (tokens)": ("completions/mean_length", -1.0),
    "truncated completions (share)": ("completions/clipped_ratio", 0.0),
    "entropy (nats per token)": ("entropy", -1.0),
    "gradient norm before clipping": ("grad_norm", -1.0),
    "KL to the reference (nats per token)": ("kl", -1.0),
    "clipped tokens (share)": ("clip_ratio/region_mean", 0.0),
    "mean |log-prob trainer - engine|": (GAP, 1e-4),
}
Rows = list[dict]


def read(run: Path) -> Rows:
    """Return the numbers of a run's steps and evaluations. run: its folder, or a metrics.jsonl."""
    path = run / "metrics.jsonl" if run.is_dir() else run
    rows = [
        # NaN, infinity, and integers that are too large for a float cannot be drawn
        {k: v for k, v in record.items() if isinstance(v, int | float) and abs(v) < 1e300}
        for _, record in read_records(path)
    ]
    return [row for row in rows if "step" in row]


def series(rows: Rows, name: str) -> tuple[list[float], list[float]]:
    """Return (finished steps, values) of a metric. If a step has several records, the last one
    counts. For the metrics of an evaluation, the number of steps is "eval/after".
    """
    found = {row.get("eval/after", row["step"] + 1): row[name] for row in rows if name in row}
    return sorted(found), [found[step] for step in sorted(found)]


def smoothed(values: Sequence[float], window: int) -> np.ndarray:
    """Return the mean of the `window` values around each one; at the ends, of those that exist."""
    half = window // 2
    total = np.concatenate([[0.0], np.cumsum(values)])
    at = np.arange(len(values))
    low, high = np.maximum(at - half, 0), np.minimum(at + half + 1, len(values))
    return (total[high] - total[low]) / (high - low)


# --- panels: title → metrics ---


def default_panels(runs: Sequence[Rows]) -> dict[str, list[str]]:
    """Return the panels that say something about these runs.

    The held-out curve of a reward is in the panel of the training curve. If there is one reward
    function, its curve is that of the reward, so it has no panel of its own. If the other functions
    hardly change, the curve of the sum is left out instead.
    """
    largest: dict[str, float] = {}
    for rows in runs:
        for row in rows:
            for name, value in row.items():
                largest[name] = max(value, largest.get(name, value))
    bases = [n.removesuffix("/mean").removeprefix("eval/") for n in largest if _is_function(n)]
    functions = [*dict.fromkeys(bases)]
    panels = {"reward": ["reward", "eval/reward"]}
    if len(functions) > 1:
        for name in functions:
            panels[name.removeprefix("rewards/")] = [f"{name}/mean", f"eval/{name}"]
            if _parallel(runs, "reward", f"{name}/mean") and _parallel(
                runs, "eval/reward", f"eval/{name}"
            ):
                panels.pop("reward", None)
    panels |= {title: [name] for title, (name, _) in OTHERS.items()}
    above = {name: bound for name, bound in OTHERS.values()}
    return {
        title: shown
        for title, names in panels.items()
        if (shown := [n for n in names if n in largest and largest[n] > above.get(n, -np.inf)])
    }


def _parallel(runs: Sequence[Rows], one: str, other: str) -> bool:
    """Return whether two metrics change together, by the same amounts, in every run that has them.

    Without such a run, the answer is yes.
    """
    for rows in runs:
        both = np.array([[row[one], row[other]] for row in rows if one in row and other in row])
        if len(both) and np.ptp(both[:, 0] - both[:, 1]) >= 0.05 * np.ptp(both[:, 0]):
            return False
    return True


def _is_function(name: str) -> bool:
    """Return whether a metric is the mean of a reward function."""
    trained = name.startswith("rewards/") and name.endswith("/mean")
    return trained or (name.startswith("eval/rewards/") and name != "eval/rewards/failures")


def chosen_panels(runs: Sequence[Rows], wanted: Sequence[str]) -> dict[str, list[str]]:
    """Return a panel for each metric that --metrics names, or matches: "rewards/*"."""
    known = dict.fromkeys(name for rows in runs for row in rows for name in row)
    panels: dict[str, list[str]] = {}
    for pattern in wanted:
        names = fnmatch.filter(known, pattern)
        if not names:
            near = difflib.get_close_matches(pattern, known, n=3) or sorted(known)
            raise UserError(
                f"--metrics {pattern}: no such metric in these runs; choose from {', '.join(near)}."
            )
        panels |= {name: [name] for name in names}
    return panels


# --- the picture ---


def draw(runs: list[Path], out: Path, metrics: Sequence[str] = (), smooth: int = 0) -> None:
    """Write the plot to `out`, in the format given by its suffix.

    metrics: the panels; empty: a default choice. smooth: steps in the moving average; 0: a tenth of
    the run.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as e:
        raise UserError("plotting needs matplotlib: pip install 'nanogrpo[plot]'") from e
    data = {str(run): read(run) for run in runs}
    everything = list(data.values())
    if not any(len(row) > 1 for rows in everything for row in rows):
        raise UserError(f"{' '.join(data)}: there is no step to plot yet; wait for the first one.")
    panels = chosen_panels(everything, metrics) if metrics else default_panels(everything)
    columns = 2 if len(panels) < 7 else 3
    lines = -(-len(panels) // columns)
    figure = Figure(figsize=(5 * columns, 3 * lines), layout="tight")
    for i, (title, names) in enumerate(panels.items(), start=1):
        axis = figure.add_subplot(lines, columns, i)
        for number, (label, rows) in enumerate(data.items()):
            for place, name in enumerate(names):
                color = f"C{place if len(data) == 1 else number}"
                _curve(axis, *series(rows, name), name, None if place else label, color, smooth)
        points = " (points: held-out)" if len(names) > 1 else ""
        axis.set(title=title + points, xlabel="finished steps")
        axis.ticklabel_format(axis="y", useOffset=False)
        axis.grid(alpha=0.3)
    if len(data) > 1:
        figure.axes[0].legend()
    try:
        figure.savefig(out, dpi=110, format=out.suffix.removeprefix("."))
    except (OSError, ValueError) as e:  # ValueError: an unknown suffix
        raise UserError(f"--out {out} cannot be written: {e}; choose another file.") from e


def _curve(
    axis: Any,
    steps: list[float],
    values: list[float],
    name: str,
    label: str | None,
    color: str,
    smooth: int,
) -> None:
    """Draw one metric of one run."""
    window = smooth or len(values) // 10
    if name.startswith("eval/"):
        axis.plot(steps, values, ".--", color=color, label=label)
    elif window < 3:  # too few values to smooth
        axis.plot(steps, values, color=color, label=label)
    else:
        axis.plot(steps, values, color=color, alpha=0.25, linewidth=0.8)
        axis.plot(steps, smoothed(values, window), color=color, label=label)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Plot the metrics of one or several runs.")
    parser.add_argument("runs", nargs="+", type=Path, help="output folders")
    parser.add_argument(
        "--metrics",
        nargs="+",
        default=[],
        metavar="NAME",
        help="draw these metrics of metrics.jsonl, such as grad_norm or 'rewards/*'"
        " (default: those that say something about the runs)",
    )
    parser.add_argument(
        "--smooth",
        type=int,
        default=0,
        metavar="STEPS",
        help="steps in the moving average; 1: do not smooth (default: a tenth of the run)",
    )
    parser.add_argument(
        "--out", type=Path, help="the picture (default: curve.png in the first folder)"
    )
    args = parser.parse_args(argv)
    first = args.runs[0]
    out = args.out or (first.parent if first.is_file() else first) / "curve.png"
    try:
        if args.smooth < 0:
            raise UserError(f"--smooth is {args.smooth}: give a number of steps.")
        draw(args.runs, out, args.metrics, args.smooth)
    except UserError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    print(out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
