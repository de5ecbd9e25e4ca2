"""Write bench/README.md from the results. With --check, the file is not written, and the exit
status tells whether it is up to date.

In: bench/results/*.json. Out: one section per benchmark, with its question, its table, and the
command, machine and commit of its records. A test checks that the file in the repository is up to
date (tests/bench/test_readme.py). Read next: tables.py.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from bench import common, tables

HEAD = """# Benchmarks

`python -m bench.readme` generates this page from the records in bench/results/, so do not edit this
page. Each benchmark is a Python module, and `--help` shows its options. `make gpu` runs benchmarks
on a GPU. To repeat only some of its stages, name them, as in `make gpu STAGES="kernels step"`.

Each benchmark compares several programs, such as nanogrpo and TRL. These programs are called the
sides of the benchmark. While a benchmark runs, its sides alternate and use the same number of
threads. The tables show medians, and the smallest and largest values. The column "over TRL" is the
speed of a program divided by TRL's speed. The column "of TRL's" is the memory of a program divided
by TRL's memory. We run TRL 1.16.0 with the settings that are best for TRL (bench/trl_run.py), and
also show cases in which TRL is faster. A row says "not yet measured" if there is no record of a
measurement.

`python -m bench.compare OTHER_CHECKOUT` compares the speed of two checkouts of nanogrpo.
[docs/benchmarks.md](../docs/benchmarks.md) shows how to add a row in three minutes.

The following table summarizes the results on two CPU cores in float32. The side TRL is TRL's
`GRPOTrainer`, which pads sequences. In each row, nanogrpo and TRL have the same model, prompts,
rewards and settings.
"""


# results with a separate page
ELSEWHERE = {"objectives": "docs/objectives.md", "precision": "docs/precision.md"}


# The most important ratios: what, bench, quantity, cases of even lengths, cases of uneven lengths.
SPEED, MEMORY = "speedup_over_trl", "peak_bytes_above_libraries"
RATIOS = (
    ("complete steps per second (2.9 M parameters)", "end_to_end", SPEED, ("even",), ("uneven",)),
    (
        "the same for `make real`'s language model (135 M parameters)",
        *("real_model", "over TRL", (), ("nanogrpo",)),
    ),
    (
        "a training step with the same gradient",
        *("step_time", SPEED, ("even, G=8", "prompt half the completion, G=8")),
        ("uneven, G=8", "uneven, G=4", "uneven, G=16", "long prompt, uneven, G=8"),
    ),
    (
        "sampling, compared with transformers' `generate`",
        *("rollout_speed", "speedup_over_best_generate", ("even",), ("uneven",)),
    ),
    ("peak memory of complete steps", "end_to_end", MEMORY, ("even",), ("uneven",)),
    (
        "the same for `make real`'s language model",
        *("real_model", MEMORY, (), tuple(f"seed {i}" for i in range(5))),
    ),
    (
        "peak memory of a training step, vocabulary of 151,936",
        *("step_memory", MEMORY, ("V = 151,936",), ()),
    ),
)


def ratios(bench: str, quantity: str, cases: Sequence[str], folder: Path) -> list[float]:
    """Return the ratios between nanogrpo and TRL in these cases. The ratio of memory compares
    the largest value of each trainer.
    """
    records = common.read(bench, folder)
    if quantity == "over TRL":  # computed from all steps of both trainers
        columns = tables.BENCHES[bench].columns
        lines = [dict(zip(columns, line)) for line in tables.lines_of(bench, records)]
        cells = [line[quantity] for line in lines if line["side"] in cases]
        return [float(cell[:-1]) for cell in cells if cell.endswith("×")]
    sides = {
        side: [r[quantity] for r in records if r["case"] in cases and r["side"] == side]
        for side in common.SIDES
    }
    if quantity == MEMORY:
        return [max(sides["nanogrpo"]) / max(sides["TRL"])] if all(sides.values()) else []
    return sides["nanogrpo"]


def summary(folder: Path = common.RESULTS) -> str:
    """Return the table of the most important ratios, which README.md shows, too."""
    out = [
        "| ratio to `GRPOTrainer` | even lengths | uneven lengths | command |",
        "|---|---|---|---|",
    ]
    for what, bench, quantity, *columns in RATIOS:
        digits, cells = 2 if quantity == MEMORY else 1, []
        for cases in columns:
            found = ratios(bench, quantity, cases, folder) if cases else []
            ends = dict.fromkeys(f"{f(found):.{digits}f}" for f in (min, max)) if found else {}
            cells.append("–".join(ends) + "×" * bool(ends))
        out.append(f"| {what} | {' | '.join(cells)} | `python -m bench.{bench}` |")
    return "\n".join(out).replace("|  |", "| |") + "\n"


def origin(record: dict) -> str:
    """Return the command, machine and commit of a record as one line."""
    m = record["machine"]
    chip, cores = (m["gpu"], "") if m["gpu"] else (m["cpu"], f"{m['cores']} cores, ")
    packages = ("python", "torch", "transformers", "trl")
    versions = ", ".join(f"{name} {v}" for name, v in m["versions"].items() if name in packages)
    threads = record.get("threads", m["threads"])
    return (
        f"`{record['command']}` ran on {record['time'][:10]} on {chip}"
        f" ({cores}{threads} thread{'s' * (threads != 1)}) with {versions},"
        f" at commit {common.commit(m)}."
    )


def section(name: str, records: list[dict]) -> str:
    """Return the Markdown section of a benchmark."""
    bench = tables.BENCHES[name]
    table = common.markdown(bench.columns, tables.lines_of(name, records))
    out = [f"## {name}", "", bench.question, "", table, ""]
    notes = bench.notes(records) if records else []
    if notes:
        out += [*(f"* {note}" for note in notes), ""]
    if bench.picture and (common.ROOT / "docs/img" / bench.picture).exists():
        out += [f"![{name}](../docs/img/{bench.picture})", ""]
    command = bench.command or f"python -m bench.{name}"
    measured = list(dict.fromkeys(map(origin, records)))
    missing = f"Not yet measured; run `{command}`."
    out += ["These commands measured the table:" if measured else missing, ""]
    out += [*(f"* {line}" for line in measured), ""] if measured else []
    return "\n".join(out)


def render(folder: Path = common.RESULTS) -> str:
    """Return the full page. Raise ValueError if no table shows the records of a file."""
    unknown = {path.stem for path in folder.glob("*.json")} - set(tables.BENCHES) - set(ELSEWHERE)
    if unknown:
        raise ValueError(f"no table in bench/tables.py shows {', '.join(sorted(unknown))}")
    links = [f"See also: [{name}](../{page})\n" for name, page in ELSEWHERE.items()]
    sections = [section(name, common.read(name, folder)) for name in tables.BENCHES]
    return "\n".join([HEAD, summary(folder), *links, *sections]).rstrip() + "\n"


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.readme", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit with 1 if the file is out of date"
    )
    parser.add_argument(
        "--file",
        type=Path,
        default=common.ROOT / "bench/README.md",
        help="the page (default bench/README.md)",
    )
    parser.add_argument(
        "--results",
        type=Path,
        default=common.RESULTS,
        help="folder of the results (default bench/results)",
    )
    args = parser.parse_args(argv)
    text = render(args.results)
    if args.check:
        good = args.file.exists() and args.file.read_text() == text
        state = "up to date" if good else "out of date; run `python -m bench.readme`"
        print(f"{args.file} is {state}")
        return int(not good)
    args.file.write_text(text)
    print(args.file)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
