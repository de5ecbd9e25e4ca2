"""What every bench shares: the machine's description, fair timing of several sides, JSON rows, a
table.

In: functions to time. Out: `bench/results/<name>.json`, a list of rows, each of which stands alone:
what was measured, on which machine, with which versions, at which commit, by which command. Tables
and plots are made from those rows, never typed.

A bench is a module with `main(argv)`, run as `python -m bench.<name>`: it interleaves its sides in
one process (`interleave`), so that a busy neighbour or a warm chip meets all of them, and reports
medians with their spread. Read next: rollout_speed.py.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from nanogrpo.model.hf_config import ModelConfig

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
SIDES = ("nanogrpo", "TRL")  # of benches of whole runs
# given those that our run of the same seed drew: only the training is left to differ
REPLAYED = "TRL, our completions"


def small_qwen3(hidden: int, layers: int, vocab: int, context: int) -> ModelConfig:
    """The shape that the CPU benches run: heads of 32, two query heads per key head, tied; about 3
    M parameters at 256 × 4.
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


# Qwen3: D, F, layers, heads, key heads
LARGE = {"0.6B": (1024, 3072, 28, 16, 8), "1.7B": (2048, 6144, 28, 16, 8)}


def large_qwen3(name: str, context: int) -> ModelConfig:
    """The shape of a Qwen3 of real size, which the GPU benches run; tied, as these are."""
    D, F, L, H, K = LARGE[name]
    return ModelConfig(
        "qwen3", 151936, D, F, L, H, K, 128, context, rope_theta=1e6, tie_word_embeddings=True
    )


def vllm_python() -> str:
    """The interpreter that has vLLM, as docs/vllm.md sets it up; empty when there is none."""
    found = os.environ.get("NANOGRPO_VLLM_PYTHON") or str(ROOT / ".venv-vllm/bin/python")
    return found if Path(found).exists() else ""


@dataclass(frozen=True)
class Timing:
    """Seconds of each repeat of one side, in the order run."""

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
    """Times each side `repeats` times, in turns: A B C, B C A, C A B, … so that none always follows
    the same neighbour.

    `warmup` untimed rounds come first. On a GPU each call is followed by a synchronize. Shows a
    progress bar on stderr.
    """
    names, seconds = list(sides), {name: [] for name in sides}
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


def machine() -> dict:
    """Where this runs: hardware, versions, commit. No host name, no paths."""

    def git(*args: str) -> str:
        return subprocess.run(
            ["git", "-C", ROOT, *args], capture_output=True, text=True, check=False
        ).stdout.strip()

    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        models = [
            line.split(":", 1)[1].strip()
            for line in info.read_text().splitlines()
            if line.startswith("model name")
        ]
        cpu = models[0] if models else cpu
    versions = {"python": platform.python_version()}
    for package in ("torch", "triton", "transformers", "trl", "vllm"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue  # not part of every install; the rows name only what was there
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        # above the number of threads: somebody else was working
        "load_average": round(os.getloadavg()[0], 2),
        "versions": versions,
        "commit": git("rev-parse", "HEAD") or None,  # None: not run from a checkout
        "uncommitted_changes": bool(
            git(
                "status",
                "--porcelain",
                "--untracked-files=no",
                "--",
                "nanogrpo",
                "kernels",
                "bench/*.py",
            )
        ),
    }


def row(bench: str, case: str, side: str, timing: Timing, argv: Sequence[str], **figures) -> dict:
    """One measurement of one side in one case. `figures`: whatever the bench derives (tokens a
    second, shapes, settings).
    """
    times = {
        "seconds_median": timing.median,
        "seconds_spread": timing.spread,
        "seconds": timing.seconds,
    }
    return facts(bench, case, side, argv, **times, **figures)


def shown(argv: Sequence[str]) -> list[str]:
    """A command line without what holds only on this machine: where things lie."""
    hidden = ("--vllm-python", "--out", "--base", "--picture")
    return [a for i, a in enumerate(argv) if a not in hidden and not (i and argv[i - 1] in hidden)]


def facts(bench: str, case: str, side: str, argv: Sequence[str], **figures) -> dict:
    """A row of figures that are no times of `interleave`."""
    return {
        "bench": bench,
        "case": case,
        "side": side,
        **figures,
        "command": shlex.join(["python", "-m", f"bench.{bench}", *shown(argv)]),
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": machine(),
    }


def write(name: str, rows: list[dict], folder: Path = RESULTS) -> Path:
    """Writes `folder/<name>.json` in one move, so that a reader never sees half a file. Replaces an
    earlier run.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    part = path.with_suffix(".part")
    part.write_text(json.dumps(rows, indent=1) + "\n")
    part.replace(path)
    return path


def read(name: str, folder: Path = RESULTS) -> list[dict]:
    """The rows of a bench; none when it has not run."""
    path = folder / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else []


def merge(name: str, rows: list[dict], folder: Path = RESULTS) -> Path:
    """`write`, but only rows of the same case and side are replaced: a bench can be run in parts."""
    fresh = {(row["case"], row["side"]): row for row in rows}
    kept = [fresh.pop((row["case"], row["side"]), row) for row in read(name, folder)]
    return write(name, [*kept, *fresh.values()], folder)


def show(x: object) -> str:
    """A figure in a table: three significant digits, thousands grouped."""
    if isinstance(x, float):
        return f"{x:,.0f}" if abs(x) >= 1000 else f"{x:.3g}"
    return f"{x:,}" if isinstance(x, int) else str(x)


def times(x: float | None) -> str:
    return f"{x:.2f}×" if x else "–"


def mib(x: float) -> str:
    return f"{x / 2**20:,.0f} MiB"


def table(title: str, columns: Sequence[str], lines: Sequence[Sequence[object]]) -> None:
    """Prints a table."""
    out = Table(title=title, title_justify="left")
    for i, c in enumerate(columns):
        out.add_column(c, justify="left" if i == 0 else "right")
    for line in lines:
        out.add_row(*map(show, line))
    console = Console()
    console.width = max(console.width, 150)  # a log file has no width: do not fold the figures
    console.print(out)
