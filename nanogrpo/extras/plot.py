"""Plot one or several runs: `nanogrpo plot RUN [RUN …] [--metrics NAME …] [--out curve.png]`.

In: the metrics.jsonl of each run. Out: one picture, with a panel for each metric that is not always
0. The points are evaluations. `nanogrpo view` also averages noisy curves. This program needs
matplotlib: `pip install 'nanogrpo[plot]'`.
"""

import argparse
import fnmatch
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nanogrpo.errors import UserError
from nanogrpo.extras.view.data import curves
from nanogrpo.logs.files import read_records

METRICS = """
    reward rewards/*/mean frac_reward_zero_std completions/mean_length
    completions/clipped_ratio entropy grad_norm kl clip_ratio/region_mean
"""


def figure(runs: Sequence[Path], wanted: Sequence[str]) -> Any:
    """Return a matplotlib Figure. `wanted` has names or patterns of metrics. If it is empty,
    METRICS is used.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as e:
        raise UserError("plotting needs matplotlib: pip install 'nanogrpo[plot]'") from e
    data = {str(run): curves(read_records(run / "metrics.jsonl")) for run in runs}
    curved = (item for log in data.values() for item in log.items())
    known = sorted({name for name, curve in curved if wanted or any(curve["y"])})
    patterns = wanted or METRICS.split()
    names = [name for pattern in patterns for name in fnmatch.filter(known, pattern)]
    if not names:
        raise UserError(f"no metric matches {' '.join(patterns)}: the log has {known}.")
    lines = (len(names) + 2) // 3

    class Shown(Figure):
        def _repr_png_(self) -> bytes:
            """Return what a notebook shows."""
            file = io.BytesIO()
            self.savefig(file, dpi=70)
            return file.getvalue()

    out = Shown(figsize=(15, 3 * lines), layout="tight")
    for i, name in enumerate(names, start=1):
        axis = out.add_subplot(lines, 3, i)
        for color, (label, log) in enumerate(data.items()):
            if curve := log.get(name):
                axis.plot(curve["x"], curve["y"], f"C{color}", label=label, linewidth=0.8)
            if points := log.get(f"eval/{name.removesuffix('/mean')}"):
                axis.plot(points["x"], points["y"], f"C{color}.--")
        axis.set(title=name, xlabel="finished steps")
    out.axes[0].legend()
    return out


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="nanogrpo plot", description="Plot the metrics of one or several runs."
    )
    parser.add_argument("runs", nargs="+", type=Path, help="output folders")
    text = "metrics of the log, such as grad_norm 'rewards/*'"
    parser.add_argument("--metrics", nargs="+", default=[], metavar="NAME", help=text)
    text = "the picture (default: curve.png in the first folder)"
    parser.add_argument("--out", type=Path, help=text)
    args = parser.parse_args(argv)
    out = args.out or args.runs[0] / "curve.png"
    plot = figure(args.runs, args.metrics)
    try:
        plot.savefig(out, dpi=110)
    except (OSError, ValueError) as e:  # ValueError: an unknown suffix
        raise UserError(f"--out {out} cannot be written: {e}; choose another file.") from e
    print(out)
