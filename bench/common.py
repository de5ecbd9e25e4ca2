"""Utilities shared by all benchmarks: command line, timing, records and console tables.

In: functions to time. Out: `bench/results/<name>.json`, a list of records. Each record says what
was measured, on which machine, with which versions, at which commit and by which command. All
tables and plots are generated from these records.

A benchmark is a module with `main(argv)` that runs as `python -m bench.<name>`. A benchmark
compares several programs, called its sides, such as nanogrpo and TRL. The programs are timed
alternately in one process (`interleave`), so that a busy machine or a hot chip affects all of them
equally. The tables show the median and the spread of the times. Read next: rollout_speed.py.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import functools
import importlib.metadata
import json
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from nanogrpo.config import dashed
from nanogrpo.model.hf_config import ModelConfig

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
SIDES = ("nanogrpo", "TRL")  # programs in benchmarks of full runs
# a third kind of run: TRL trains on the completions that nanogrpo has sampled with the same seed
REPLAYED = "TRL, our completions"


# --- command line ---


def parser(bench: str, doc: str, threads: bool = True, **numbers) -> argparse.ArgumentParser:
    """Return the parser of `python -m bench.<bench>`, with the option --out and, if `threads` is
    true, the option --threads.

    `numbers` contains further options as name=(default, help), such as
    `prompt_length=(32, "tokens per prompt")`.
    """
    if threads:
        numbers["threads"] = (2, "CPU threads")
    out = argparse.ArgumentParser(prog=f"python -m bench.{bench}", description=doc.split("\n\n")[0])
    for name, (default, text) in numbers.items():
        text = f"{text} (default {default})"
        out.add_argument(f"--{dashed(name)}", type=type(default), default=default, help=text)
    out.add_argument(
        "--out",
        type=Path,
        default=RESULTS,
        help="folder of the results, plots and pages; the default is bench/results, with the plots"
        " in docs/img",
    )
    return out


def place_of(folder: Path, path: str) -> Path:
    """Return the file to which a plot or page is written. This file is `path` in the repository
    if the results are written to bench/results. Otherwise, it is in the folder of the results.
    """
    return ROOT / path if folder == RESULTS else folder / Path(path).name


def add_alone(parser: argparse.ArgumentParser) -> None:
    """Add the option `--alone`, which compare.py uses."""
    parser.add_argument(
        "--alone", action="store_true", help="measure only nanogrpo, without other programs"
    )


def add_cases(parser: argparse.ArgumentParser, cases: Collection[str]) -> None:
    """Add the option `--cases`, which selects the cases to run."""
    parser.add_argument(
        "--cases",
        nargs="*",
        default=list(cases),
        choices=cases,
        metavar="CASE",
        help=f"cases to run (default: all of {'; '.join(cases)})".replace("%", "%%"),
    )


def add_vllm(parser: argparse.ArgumentParser) -> None:
    """Add the option `--vllm-python`. The default is "" if there is no vLLM (docs/vllm.md)."""
    found = os.environ.get("NANOGRPO_VLLM_PYTHON") or str(ROOT / ".venv-vllm/bin/python")
    parser.add_argument(
        "--vllm-python",
        default=found if Path(found).exists() else "",
        help="Python of an environment with vLLM; '' leaves it out (default $NANOGRPO_VLLM_PYTHON)",
    )


# --- models ---


def small_qwen3(hidden: int, layers: int, vocab: int, context: int) -> ModelConfig:
    """Return the model shape of the CPU benchmarks. The model has tied weights, two query heads per
    key head, and a head dimension of 32.

    With a hidden size of 256 and 4 layers, the model has about 3 M parameters.
    """
    heads = max(2, hidden // 32)
    return ModelConfig(
        model_type="qwen3",
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=32,
        max_position_embeddings=context,
        rope_theta=10_000.0,
        tie_word_embeddings=True,
    )


def _qwen3(D: int, F: int, layers: int, heads: int, tied: bool = True) -> ModelConfig:
    return ModelConfig(
        *("qwen3", 151936, D, F, layers, heads, 8, 128, 40960),
        rope_theta=1e6,
        tie_word_embeddings=tied,
    )


QWEN3 = {
    "0.6B": _qwen3(1024, 3072, 28, 16),
    "1.7B": _qwen3(2048, 6144, 28, 16),
    "4B": _qwen3(2560, 9728, 36, 32),
    "8B": _qwen3(4096, 12288, 36, 32, tied=False),
    "14B": _qwen3(5120, 17408, 40, 40, tied=False),
    "32B": _qwen3(5120, 25600, 64, 64, tied=False),
}
LARGE = ("0.6B", "1.7B")  # the models of the GPU benchmarks


def large_qwen3(name: str, context: int) -> ModelConfig:
    """Return the shape of a real Qwen3, for the GPU benchmarks."""
    return dataclasses.replace(QWEN3[name], max_position_embeddings=context)


# --- measuring ---


@dataclasses.dataclass(frozen=True)
class Timing:
    """The seconds of each repeat of one side, in the order of the repeats."""

    seconds: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> list[float]:
        """[fastest, slowest]"""
        return [min(self.seconds), max(self.seconds)]


def interleave(
    sides: dict[str, Callable[[], object]], repeats: int, warmup: int = 1, title: str = "timing"
) -> dict[str, Timing]:
    """Time each side `repeats` times, in rotating order: A B C, B C A, C A B, …

    The order rotates, so that a side does not always run after the same other side. `warmup`
    untimed rounds come first. On a GPU, each call is followed by a synchronization. A progress bar
    is shown on stderr.
    """
    names = list(sides)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(title, total=(warmup + repeats) * len(names))
        for turn in range(-warmup, repeats):
            shift = turn % len(names)
            for name in names[shift:] + names[:shift]:
                progress.update(task, description=f"{title}: {name}")
                began = time.perf_counter()
                sides[name]()
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
                if turn >= 0:
                    seconds[name].append(time.perf_counter() - began)
                progress.advance(task)
    return {name: Timing(s) for name, s in seconds.items()}


def in_process(folder: Path, argv: Sequence[object], threads: int) -> dict:
    """Run `python -m argv…` in a new process, and return the JSON in folder/found.json.

    The new process writes found.json, and has its own threads, allocator and peak memory. The
    output of the process is shown only if the process fails.
    """
    env = {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "TRL_EXPERIMENTAL_SILENCE": "1",
    }
    command = [sys.executable, "-m", *map(str, argv)]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(
            f"`{shlex.join(command)}` failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        )
    return json.loads((folder / "found.json").read_text())


# --- records ---


@functools.cache
def checkout() -> dict:
    """Return the commit of this checkout, and whether its code has uncommitted changes."""

    def git(*args: str) -> str:
        command = ["git", "-C", str(ROOT), *args]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()

    code = ("nanogrpo", "kernels", "bench/*.py")
    return {
        "commit": git("rev-parse", "HEAD") or None,  # None: not a git checkout
        "uncommitted_changes": bool(
            git("status", "--porcelain", "--untracked-files=no", "--", *code)
        ),
    }


def versions(packages: Sequence[str]) -> dict[str, str]:
    """Return the versions of those packages that are installed."""
    found = {}
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def machine() -> dict:
    """Return the hardware, the versions and the commit, but no host name and no paths."""
    cpu = re.search(r"^model name\s*: (.*)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    libraries = versions(("torch", "triton", "transformers", "trl", "vllm"))
    return {
        "cpu": cpu[1] if cpu else platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        # a load above the number of threads means that other programs were running
        "load_average": round(os.getloadavg()[0], 2),
        "versions": {"python": platform.python_version(), **libraries},
        **checkout(),
    }


def without_places(argv: Sequence[str]) -> list[str]:
    """Return a command line without the options whose values are paths on this machine."""
    hidden = ("--vllm-python", "--out", "--base")
    return [a for i, a in enumerate(argv) if a not in hidden and not (i and argv[i - 1] in hidden)]


def record(
    bench: str,
    case: str,
    side: str,
    argv: Sequence[str],
    timing: Timing | None = None,
    **figures,
) -> dict:
    """Return the record of one side in one case.

    `figures` contains the other values to record, such as tokens per second, shapes and settings.
    """
    times = timing and {
        "seconds_median": timing.median,
        "seconds_spread": timing.spread,
        "seconds": timing.seconds,
    }
    return {
        "bench": bench,
        "case": case,
        "side": side,
        **(times or {}),
        **figures,
        "command": shlex.join(["python", "-m", f"bench.{bench}", *without_places(argv)]),
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": machine(),
    }


def write(name: str, records: list[dict], folder: Path = RESULTS) -> None:
    """Write `folder/<name>.json` atomically, replacing the results of an earlier run."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    part = path.with_suffix(".part")
    part.write_text(json.dumps(records, indent=1) + "\n")
    part.replace(path)


def read(name: str, folder: Path = RESULTS) -> list[dict]:
    """Return the records of a benchmark, or an empty list if there are none yet."""
    path = folder / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else []


def merge(name: str, records: list[dict], folder: Path = RESULTS) -> None:
    """Write records to folder/<name>.json. A new record replaces the earlier record of the same
    case and side. All other records are kept, so a benchmark can be run in parts.
    """
    fresh = {(record["case"], record["side"]): record for record in records}
    kept = [fresh.pop((r["case"], r["side"]), r) for r in read(name, folder)]
    write(name, [*kept, *fresh.values()], folder)


# --- tables and pictures ---


def commit(machine: dict) -> str:
    """Return the commit of a record, and whether the checkout had uncommitted changes."""
    changed = " with uncommitted changes" if machine["uncommitted_changes"] else ""
    return (machine["commit"] or "unknown")[:7] + changed


def show(x: object) -> str:
    """Format a number with three significant digits and with commas as thousands separators."""
    if isinstance(x, float):
        return f"{x:,.0f}" if abs(x) >= 1000 else f"{x:.3g}"
    return f"{x:,}" if isinstance(x, int) else str(x)


def times(x: float | None) -> str:
    return f"{x:.2f}×" if x else "–"


def mib(x: float) -> str:
    return f"{x / 2**20:,.0f} MiB"


def listed(values: dict[str, float], form: str) -> str:
    """Return named numbers as text: listed({"a": 0.5, "b": 2}, ".1f") → "a 0.5, b 2.0"."""
    return ", ".join(f"{name} {x:{form}}" for name, x in values.items())


def by_record(cells: Callable[[dict], tuple]) -> Callable[[list[dict]], list[tuple]]:
    """Return a function that makes one table line of each record: its case, its side, and `cells`
    of the record or, if the side could not run, the reason.
    """

    def lines(records: list[dict]) -> list[tuple]:
        return [
            (r["case"], r["side"], *((r["why_not"],) if "why_not" in r else cells(r)))
            for r in records
        ]

    return lines


def table(title: str, columns: Sequence[str], lines: Sequence[Sequence[object]]) -> None:
    """Print a table."""
    out = Table(title=title, title_justify="left")
    for i, c in enumerate(columns):
        out.add_column(c, justify="left" if i == 0 else "right")
    for line in lines:
        out.add_row(*map(show, line))
    console = Console()
    # a log file has no width, but each row of a table must fit on one line
    console.width = max(console.width, 150)
    console.print(out)


def markdown(columns: Sequence[str], lines: Sequence[Sequence[object]]) -> str:
    """Return a table in Markdown."""
    rows = columns, ["---"] * len(columns), *lines
    cells = ([show(x).replace("|", "\\|") for x in row] for row in rows)
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def subplots(*args, figsize: tuple[float, float], **kwargs):
    """Return a figure that is saved to a file and not shown, and its axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize)
    return figure, figure.subplots(*args, **kwargs)


def save_picture(figure, path: Path) -> None:
    for axis in figure.axes:
        axis.grid(alpha=0.3)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
