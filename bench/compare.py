"""Is a change faster? Compare this checkout with another one, such as a worktree of `main`.

    git worktree add ../main main
    python -m bench.compare ../main --bench step_time --cases "even, G=8" "uneven, G=8"

In: the other checkout, a benchmark, and options of the benchmark. Out: a table with one row per
case, and one line with the verdict. The benchmark runs in a new process for each measurement, with
`--alone`, so that nanogrpo is measured without other programs. The two checkouts are measured in
pairs of runs, whose order alternates, so a busy machine affects both checkouts equally. Each pair
of runs gives a ratio: the seconds of this checkout divided by the seconds of the other one. A case
is called faster or slower only if all its ratios are below 1, or all are above 1. Nothing is
written into the checkouts. Read next: step_time.py.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from bench import common

BENCHES = ("step_time", "rollout_speed", "end_to_end")


def measure(checkout: Path, bench: str, options: Sequence[str]) -> dict[str, float]:
    """Run a benchmark in a checkout. Return the median seconds of nanogrpo, by case."""
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-m", f"bench.{bench}", "--alone", "--out", out, *options]
        env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(
            command, cwd=checkout, env=env, capture_output=True, text=True, check=False
        )
        if done.returncode:
            sys.exit(f"{bench} failed in {checkout}:\n{done.stderr[-3000:]}")
        (path,) = Path(out).glob("*.json")
        return {
            record["case"]: record["seconds_median"]
            for record in json.loads(path.read_text())
            if record["side"] == "nanogrpo"
        }


def verdict(ratios: Sequence[float]) -> str:
    """Return how this checkout compares with the other one, given the ratios of the pairs of runs.

    >>> [verdict(x) for x in ([0.9, 0.95], [0.99, 1.01], [1.2, 1.3])]
    ['7.5 % faster', 'no difference', '25.0 % slower']
    """
    change = 100 * (statistics.median(ratios) - 1)
    if min(ratios) < 1 < max(ratios) or not change:
        return "no difference"
    return f"{abs(change):.1f} % {'faster' if change < 0 else 'slower'}"


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.compare",
        description=__doc__.split("\n\n")[0],
        epilog="All other options are passed to the benchmark.",
        allow_abbrev=False,
    )
    parser.add_argument("other", type=Path, help="folder of the other checkout")
    parser.add_argument("--bench", default="step_time", choices=BENCHES, help="the benchmark")
    parser.add_argument("--pairs", type=int, default=5, help="runs of each checkout (default 5)")
    args, options = parser.parse_known_args(argv)
    file = args.other / "bench" / f"{args.bench}.py"
    if not file.exists() or "add_alone" not in file.read_text():
        parser.error(
            f"{args.other} has no bench/{args.bench}.py with the option --alone: check out nanogrpo"
            " there, at commit 2ea017d or later."
        )
    checkouts = [common.ROOT, args.other.resolve()]
    found: list[list[dict[str, float]]] = [[], []]
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(args.bench, total=2 * args.pairs)
        for pair in range(args.pairs):
            for side in (0, 1) if pair % 2 else (1, 0):
                found[side].append(measure(checkouts[side], args.bench, options))
                progress.advance(task)
    ours, theirs = found
    lines = []
    for case in ours[0]:
        if case not in theirs[0]:
            parser.error(f"{args.other} does not have the case {case!r}: leave it out with --cases")
        ratios = [a[case] / b[case] for a, b in zip(ours, theirs)]
        seconds = (statistics.median(run[case] for run in side) for side in found)
        middle, spread = statistics.median(ratios), f"{min(ratios):.3f} – {max(ratios):.3f}"
        lines.append((case, *seconds, f"{middle:.3f}", spread, verdict(ratios)))
    columns = ("case", "seconds, this", "seconds, other", "this / other", "pairs", "verdict")
    common.table(f"{args.bench}, {args.pairs} pairs", columns, lines)
    verdicts = "; ".join(f"{line[0]}: {line[-1]}" for line in lines)
    print(f"{args.bench}, this checkout against {args.other}: {verdicts}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
