"""Draws runs: `python -m nanogrpo.logs.plot runs/demo [runs/other …] [--out curve.png]`, several
runs overlaid.

In: the metrics.jsonl of each run. Out: one picture with reward, completion length, entropy, the gap
between trainer and engine, and, where a run has them, held-out accuracy and reward, and KL. Needs
matplotlib (`pip install -e .[plot]`).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from nanogrpo.errors import UserError

# title → metric; those of evaluations are drawn at "eval/after"
PANELS = {
    "training reward": "reward",
    "held-out accuracy (greedy)": "eval/rewards/accuracy_reward",
    "held-out reward (greedy)": "eval/reward",
    "completion length (tokens)": "completions/mean_length",
    "entropy (nats a token)": "entropy",
    "KL to the reference (nats a token)": "kl",
    "|log-prob trainer - engine|": "sampling/sampling_logp_difference/mean",
}


def read(run: Path) -> list[dict]:
    """The rows of a run's metrics.jsonl, head lines left out, and a last line that is only half
    written (by a run under way).
    """
    path = run / "metrics.jsonl" if run.is_dir() else run
    try:
        lines = path.read_bytes().splitlines()
    except OSError as e:
        raise UserError(
            f"{path} cannot be read ({e.strerror}): name the output folder of a run."
        ) from e
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as e:  # not JSON, or not UTF-8, or brackets without end
            if number < len(lines):
                raise UserError(
                    f"{path}:{number} is not JSON ({e}): name the output folder of a run."
                ) from e
            break
        if not isinstance(row, dict):
            raise UserError(
                f"{path}:{number} holds a {type(row).__name__} and no metrics: name the output folder of a run."
            )
        if isinstance(row.get("step"), int):
            rows.append(
                {name: value for name, value in row.items() if isinstance(value, int | float)}
            )
    if not any(name in row for row in rows for name in PANELS.values()):
        raise UserError(
            f"{path} holds no step to draw yet: wait for the run's first, or name another one."
        )
    return rows


def series(rows: list[dict], name: str) -> tuple[list[float], list[float]]:
    """(steps finished, values) of a metric. Where a step stands twice, as in logs put together by
    hand, the later line counts.
    """
    found = sorted(
        {row.get("eval/after", row["step"] + 1): row[name] for row in rows if name in row}.items()
    )
    return [x for x, _ in found], [y for _, y in found]


def labels(runs: list[Path]) -> list[str]:
    """The names of the folders, with as much of the path before them as tells them apart."""
    folders = [(run.parent if run.is_file() else run).resolve() for run in runs]
    names = [folder.name for folder in folders]
    if len(set(names)) == len(set(folders)):
        return names
    common = os.path.commonpath(folders)
    return [os.path.relpath(folder, common) for folder in folders]


def draw(runs: list[Path], out: Path) -> None:
    """Writes the picture `out`, in the format that its suffix names."""
    try:
        import matplotlib
    except ImportError as e:
        raise UserError("drawing needs matplotlib: pip install -e .[plot]") from e
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.backend_bases import FigureCanvasBase

    formats = sorted(FigureCanvasBase.get_supported_filetypes())
    if out.suffix.removeprefix(".").lower() not in formats:
        raise UserError(
            f"--out {out}: the suffix {out.suffix!r} names no format of pictures; use one of {', '.join(formats)}."
        )
    data = dict(zip(labels(runs), map(read, runs)))
    shown = {
        title: name
        for title, name in PANELS.items()
        if any(series(rows, name)[0] for rows in data.values())
    }
    columns = min(len(shown), 2)
    figure, axes = plt.subplots(
        -(-len(shown) // columns),
        columns,
        figsize=(10, 3 * -(-len(shown) // columns)),
        squeeze=False,
    )
    for axis in axes.flat[len(shown) :]:
        axis.remove()
    for axis, (title, name) in zip(axes.flat, shown.items()):
        for label, rows in data.items():
            steps, values = series(rows, name)
            axis.plot(
                steps,
                values,
                label=label,
                marker="o" if name.startswith("eval/") else "",
                linewidth=1.5,
                markersize=4,
            )
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("step", fontsize=9)
        axis.grid(alpha=0.3)
        if name.endswith("accuracy_reward"):
            axis.set_ylim(0, 1.02)
        elif name.startswith("sampling/"):
            axis.set_yscale("log")
    if len(data) > 1:
        axes.flat[0].legend(fontsize=8)
    figure.tight_layout()
    try:
        figure.savefig(out, dpi=110)
    except OSError as e:
        raise UserError(
            f"--out {out} cannot be written ({e.strerror}): name a file in a folder that exists."
        ) from e
    finally:
        plt.close(figure)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Draw the metrics of one or several runs.")
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
