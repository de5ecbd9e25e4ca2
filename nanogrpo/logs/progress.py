"""The console during a run: a summary, one row per step, and the checkpoint at the end.

In: the sizes of the run, then the metrics of each step (logs/metrics.py). Out: lines of at most 120
columns, for example

     step  epoch  reward  accuracy  format  zero_std  length  entropy  tok/s   left
     1/60  0.002   1.305     0.312   0.992     0.062   11.27    0.255  7,471   0:19

A column appears only if it can carry news: each reward function if there are several, the KL if
there is a reference, the clip if the ratio can leave 1, the gap if the engine is a separate one.
Read next: logs/no_signal.py.
"""

from __future__ import annotations

import contextlib
import math
import os
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from nanogrpo.config import Config
from nanogrpo.distributed.world import World

WIDTH = 120
# Print Text objects only: rich would read brackets in a str as markup, such as "[/INST]".
console = Console(stderr=True, force_jupyter=False, width=None if sys.stderr.isatty() else WIDTH)

EVERY = 20  # rows between two headers
GAP = "sampling/sampling_logp_difference/mean"
# A larger gap is a sign of a bug (docs/metrics.md), so it is shown for every engine.
GAP_BOUND = {"cpu": 1e-5, "cuda": 0.02}


def print_line(text: str) -> None:
    console.print(Text(text), soft_wrap=True)


class _Output(Console):
    def on_broken_pipe(self) -> None:
        raise BrokenPipeError  # rich would exit with status 1


@contextlib.contextmanager
def output() -> Iterator[Console]:
    """Yield a console for stdout. If its reader ends, such as `head`, so does the block."""
    try:
        yield _Output(highlight=False)
    except BrokenPipeError:
        # Python flushes stdout when it exits, and would complain
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


# --- before and after the steps ---


def summary(cfg: Config, prompts: int, held_out: int, trained: int, parameters: int) -> str:
    """Return the first two lines of a run: the sizes of its data and of its model."""
    P = cfg.prompts_per_step
    data = f"{prompts:,} prompts" + (f" and {held_out:,} held-out prompts" if held_out else "")
    epoch = f"{prompts / P:,.1f}".removesuffix(".0")
    share = "all" if trained == parameters else f"{trained:,} of"
    return (
        f"{data}; with {P:,} per step, an epoch is {epoch} steps, and this run "
        f"({cfg.max_steps:,} steps) is {number(cfg.max_steps * P / prompts)} epochs\n"
        f"training {share} {parameters:,} parameters"
    )


def closing_line(cfg: Config, done: int) -> str:
    """Return the last line of a run, which says where the model is and how to use it."""
    checkpoint = Path(cfg.output_dir) / f"checkpoint-{done}"
    if checkpoint.is_relative_to(Path.cwd()):
        checkpoint = checkpoint.relative_to(Path.cwd())
    early = f"stopped after {done} of {cfg.max_steps} steps (continue with --resume); "
    early, name = early if done < cfg.max_steps else "", shlex.quote(str(checkpoint))
    if not cfg.save_merged:
        return (
            f"{early}the adapters are in {checkpoint / 'adapter'}: merge them into their base with "
            f"`nanogrpo merge {name} FOLDER`"
        )
    return (
        f"{early}the model is in {checkpoint}: try it with `nanogrpo chat {name}`, or measure it "
        "with `nanogrpo eval`"
    )


# --- one row per step ---


class Progress:
    """Print a row per step, under a header that is repeated now and then."""

    def __init__(self, cfg: Config, world: World, start: int):
        self.cfg, self.start, self.began = cfg, start, time.perf_counter()
        # with vLLM, the gap has a column
        self.bound = math.inf if cfg.engine == "vllm" else GAP_BOUND[world.device.type]
        self.rows = 0  # since the header; 0: print the header first

    def step(self, step: int, row: Mapping[str, float], functions: Sequence[str]) -> None:
        """Print the row of a step. functions: the names of the reward functions."""
        total = self.cfg.max_steps
        per_step = (time.perf_counter() - self.began) / (step + 1 - self.start)
        columns = [  # title, cell, width
            ("step", f"{step + 1}/{total}", max(4, len(f"{total}/{total}"))),
            *((t, number(row.get(metric)), _width(t)) for t, metric in self._metrics(functions)),
            ("tok/s", f"{row['tokens_per_second']:,.0f}", 5),
            ("left", duration(per_step * (total - step - 1)), 5),
        ]
        if self.rows % EVERY == 0:
            print_line("  ".join(f"{title:>{width}}" for title, _, width in columns))
        self.rows += 1
        cells = [f"{cell:>{width}}" for _, cell, width in columns]
        print_line("  ".join([*cells, *self._remarks(row)]))

    def _metrics(self, functions: Sequence[str]) -> list[tuple[str, str]]:
        """Return (title, metric) of each column with a metric."""
        cfg = self.cfg
        moves = not cfg.on_policy  # the ratio can leave 1, so it can be clipped
        before = [("epoch", "epoch"), ("reward", "reward")]
        after = [
            ("zero_std", "frac_reward_zero_std"),
            ("length", "completions/mean_length"),
            ("entropy", "entropy"),
            *([("kl", "kl")] if cfg.beta else []),
            *([("clip", "clip_ratio/region_mean")] if moves else []),
            *([("gap", GAP)] if cfg.engine == "vllm" else []),
        ]
        if len(functions) < 2:
            return before + after
        others = [title for title, _ in before + after]
        room = WIDTH - 27 - sum(_width(title) + 2 for title in others)
        titles = fitted(short_names(functions, taken=others), room)
        metrics = [f"rewards/{name}/mean" for name in functions]
        return [*before, *zip(titles, metrics), *after]

    def _remarks(self, row: Mapping[str, float]) -> list[str]:
        """Return what is named at the end of a row, because it is not 0 as it should be."""
        bounds = [("truncated", "completions/clipped_ratio", 0.0), ("gap", GAP, self.bound)]
        return [f"{name} {number(row[m])}" for name, m, most in bounds if row.get(m, 0.0) > most]


def _width(title: str) -> int:
    return max(len(title), 5)


def number(x: float | None) -> str:
    """Return a number in about five characters, so that columns align.

    >>> [number(x) for x in (0.3125, 11.3, 7471.0, 0.00004, 0.0, None)]
    ['0.312', '11.30', '7,471', '4e-05', '0.000', '-']
    """
    if x is None:
        return "-"
    size, decimals = abs(x), 3
    if 0 < size < 0.0005 or size >= 1e6:
        return f"{x:.0e}"
    for limit in (9.9995, 99.995, 999.95):  # one decimal less for each digit before the point
        if size >= limit:
            decimals -= 1
    return f"{x:,.{max(decimals, 0)}f}"


def duration(seconds: float) -> str:
    """Return a time as minutes and seconds, or with hours: 0:19, 12:05, 3:00:00."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def short_names(functions: Sequence[str], taken: Sequence[str] = ()) -> list[str]:
    """Return the names without the ending `_reward`, unless that makes a name ambiguous."""
    short = [name.removesuffix("_reward") or name for name in functions]
    return [
        name if brief in taken or short.count(brief) > 1 else brief
        for name, brief in zip(functions, short)
    ]


def fitted(names: Sequence[str], room: int, gap: int = 2) -> list[str]:
    """Return the names as titles of columns, cut so that the columns, each with a gap, fit into
    `room`. No title is cut to less than six characters.
    """
    cut = list(names)
    for longest in range(max(map(len, names)), 5, -1):
        cut = [n if len(n) <= longest else n[: longest - 1] + "…" for n in names]
        if sum(_width(title) + gap for title in cut) <= room:
            break
    return cut
