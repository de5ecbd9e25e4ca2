"""Print the progress of a run: a summary, one row per step, and the checkpoint.

In: the sizes of the run, then the metrics of each step (logs/metrics.py). Out: lines of at most 120
columns, for example

     step  epoch  reward  accuracy  format  zero_std  length  entropy  tok/s   left
     1/60  0.002   1.305     0.312   0.992     0.062   11.27    0.255  7,471   0:19

Each reward function has its own column if there are several functions. Metrics that are usually 0
appear at the end of a row only if they are not 0. Read before: logs/console.py.
"""

import shlex
import sys
import time
from collections.abc import Mapping, Sequence

from nanogrpo.config import Config

EVERY = 20  # rows between two headers
FLAT = 5  # steps without a learning signal before a warning


def print_line(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# --- before and after the steps ---


def summary(cfg: Config, prompts: int, held_out: int, trained: int, parameters: int) -> str:
    """Return the first two lines of a run: the sizes of its data and of its model."""
    P = cfg.prompts_per_step
    data = f"{prompts:,} prompts" + (f" and {held_out:,} held-out prompts" if held_out else "")
    share = "all" if trained == parameters else f"{trained:,} of"
    return (
        f"{data}; with {P:,} per step, an epoch is {round(prompts / P, 1):,.9g} steps, and this run"
        f" ({cfg.max_steps:,} steps) is {number(cfg.max_steps * P / prompts)} epochs\n"
        f"training {share} {parameters:,} parameters"
    )


def print_end(cfg: Config, done: int, kept: set[str]) -> None:
    """Print where the model is, and the commands that use it.

    `kept` is the name of the best checkpoint, if there is one.
    """
    early = f"stopped after {done} of {cfg.max_steps} steps (continue with --resume); "
    run = shlex.quote(cfg.output_dir)
    model = f"{run}/{min(kept, default=f'checkpoint-{done}')}"
    print_line(f"""\
{early if done < cfg.max_steps else ""}the model is in {model}; next:
  nanogrpo chat {model}
  nanogrpo eval {model}
  nanogrpo view {run}""")


# --- one row per step ---


class Progress:
    """Print one row per step, and repeat the header every few rows."""

    def __init__(self, cfg: Config, device: str, start: int):
        self.cfg, self.start, self.began = cfg, start, time.perf_counter()
        # Larger differences of log-probs have causes other than rounding (docs/metrics.md).
        self.largest_gap = 1e-5 if device == "cpu" else 0.02
        self.rows = 0  # rows since the last header
        self.flat = 0  # steps in a row without a learning signal

    def step(self, step: int, row: Mapping[str, float], functions: Sequence[str]) -> None:
        """Print the row of a step. `functions` holds the names of the reward functions."""
        total = self.cfg.max_steps
        per_step = (time.perf_counter() - self.began) / (step + 1 - self.start)
        several = functions if len(functions) > 1 else []
        metrics = [
            ("epoch", "epoch"),
            ("reward", "reward"),
            *((name.removesuffix("_reward")[:10], f"rewards/{name}/mean") for name in several),
            ("zero_std", "frac_reward_zero_std"),
            ("length", "completions/mean_length"),
            ("entropy", "entropy"),
        ]
        columns = [  # title, cell
            (f"{'step':>{len(f'{total}/{total}')}}", f"{step + 1}/{total}"),
            *((f"{title:>5}", number(row.get(metric))) for title, metric in metrics),
            ("tok/s", f"{row['tokens_per_second']:,.0f}"),
            (" left", duration(per_step * (total - step - 1))),
        ]
        if self.rows % EVERY == 0:
            print_line("  ".join(title for title, _ in columns))
        self.rows += 1
        bounds = [  # a metric is printed at the end of the row if it exceeds its bound
            ("truncated", "completions/clipped_ratio", 0.0),
            ("clip", "clip_ratio/region_mean", 0.0),
            ("kl", "kl", 0.0),
            ("gap", "sampling/sampling_logp_difference/mean", self.largest_gap),
        ]
        cells = [f"{cell:>{len(title)}}" for title, cell in columns]
        cells += [f"{name} {number(row[m])}" for name, m, most in bounds if row.get(m, 0.0) > most]
        print_line("  ".join(cells))
        self.flat = self.flat + 1 if row.get("frac_tokens_skipped") == 1 else 0
        if self.flat == FLAT:
            print_line(
                f"warning: in {FLAT} steps in a row, all completions of a prompt got the same "
                "reward, so nothing was learned: look at some with --num-completions-to-print 4"
            )


def number(x: float | None) -> str:
    """Return a number in about five characters, so that columns align.

    >>> [number(x) for x in (0.3125, 11.3, 7471.0, 0.00004, 0.0, None)]
    ['0.312', '11.30', '7,471', '4e-05', '0.000', '-']
    """
    if x is None:
        return "-"
    size = abs(x)
    if 0 < size < 0.0005 or size >= 1e6:
        return f"{x:.0e}"
    return f"{x:.3f}" if size < 10 else f"{x:.2f}" if size < 100 else f"{x:,.0f}"


def duration(seconds: float) -> str:
    """Return a time as minutes and seconds, or with hours: 0:19, 12:05, 3:00:00."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
