"""Plot one or several runs: `python -m nanogrpo.logs.plot RUN [RUN …] [--out curve.png]`.

In: the metrics.jsonl of each run. Out: one picture with the reward, completion length, entropy and
the gap between trainer and engine; held-out accuracy and reward and the KL divergence are added if
a run has them. Needs matplotlib (`pip install -e .[plot]`).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from nanogrpo.errors import UserError
from nanogrpo.logs.files import read_records

# title → metric. For the metrics of an evaluation, the x value is "eval/after".
PANELS = {
    "training reward": "reward",
    "held-out accuracy (greedy)": "eval/rewards/accuracy_reward",
    "held-out reward (greedy)": "eval/reward",
    "completion length (tokens)": "completions/mean_length",
    "entropy (nats per token)": "entropy",
    "KL to the reference (nats per token)": "kl",
    "|log-prob trainer - engine|": "sampling/sampling_logp_difference/mean",
}


def read(run: Path) -> list[dict]:
    """Return the numbers of a run's steps and evaluations. run: its folder, or a metrics.jsonl."""
    path = run / "metrics.jsonl" if run.is_dir() else run
    records = [record for _, record in read_records(path) if "step" in record]
    return [{k: v for k, v in record.items() if isinstance(v, int | float)} for record in records]


def series(rows: list[dict], name: str) -> tuple[list[float], list[float]]:
    """Return (finished steps, values) of a metric. If a step has several records, the last one
    counts.
    """
    found = {row.get("eval/after", row["step"] + 1): row[name] for row in rows if name in row}
    return sorted(found), [found[step] for step in sorted(found)]


def draw(runs: list[Path], out: Path) -> None:
    """Write the plot to `out`, in the format given by its suffix."""
    try:
        from matplotlib.figure import Figure
    except ImportError as e:
        raise UserError("plotting needs matplotlib: pip install -e .[plot]") from e
    data = {str(run): read(run) for run in runs}
    panels = {
        title: name
        for title, name in PANELS.items()
        if any(name in row for rows in data.values() for row in rows)
    }
    if not panels:
        raise UserError(f"{' '.join(data)}: there is no step to plot yet; wait for the first one.")
    lines = -(-len(panels) // 2)
    figure = Figure(figsize=(10, 3 * lines), layout="tight")
    for i, (title, name) in enumerate(panels.items(), start=1):
        axis = figure.add_subplot(lines, 2, i)
        for label, rows in data.items():
            axis.plot(*series(rows, name), ".-" if name.startswith("eval/") else "-", label=label)
        axis.set(title=title, xlabel="step")
        axis.grid(alpha=0.3)
        if name.startswith("sampling/"):
            axis.set_yscale("log")
    if len(data) > 1:
        figure.axes[0].legend()
    try:
        figure.savefig(out, dpi=110, format=out.suffix.removeprefix("."))
    except (OSError, ValueError) as e:  # ValueError: an unknown suffix
        raise UserError(f"--out {out} cannot be written: {e}; choose another file.") from e


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Plot the metrics of one or several runs.")
    parser.add_argument("runs", nargs="+", type=Path, help="output folders")
    parser.add_argument(
        "--out", type=Path, help="the picture (default: curve.png in the first folder)"
    )
    args = parser.parse_args(argv)
    first = args.runs[0]
    out = args.out or (first.parent if first.is_file() else first) / "curve.png"
    try:
        draw(args.runs, out)
    except UserError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    print(out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
