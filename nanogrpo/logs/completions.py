"""Completions: a table on the console (`--num-completions-to-print`) and one file per step
(`--log-completions`).

In: the samples of a step. Out: `output_dir/completions/completions_00001.jsonl` and so on, where
the number counts finished steps, as in checkpoint-N. Each line is one completion with TRL's
columns: step, prompt, completion, one column per reward function, reward, advantage, and then the
columns of `log_extra`. `pandas.read_json(path, lines=True)` reads a file. Read next: logs/plot.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from nanogrpo.config import Config
from nanogrpo.distributed.world import World
from nanogrpo.logs.files import replace, set_aside
from nanogrpo.types import Sample

# Print Text objects only: rich would read brackets in a str as markup, such as "[/INST]".
console = Console(stderr=True)


class Completions:
    """Call `log(step, samples)` after each step on every rank. The file contains the samples of all
    ranks.
    """

    def __init__(self, cfg: Config, world: World, start: int):
        """Prepare the folder for a run that continues after `start` steps.

        A resumed run repeats the steps after its checkpoint, so their files are deleted. A run that
        starts over keeps the old folder under another name.
        """
        self.cfg, self.world, self.folder = cfg, world, Path(cfg.output_dir) / "completions"
        if not world.main:
            return
        if start == 0 and self.folder.exists():
            set_aside(self.folder)
        for path in self.folder.glob("completions_*.jsonl"):
            number = re.fullmatch(r"completions_(\d+)", path.stem)
            if number and int(number[1]) > start:
                path.unlink()

    def log(self, step: int, samples: Sequence[Sample]) -> None:
        if self.cfg.num_completions_to_print and self.world.main:
            show(samples[: self.cfg.num_completions_to_print])
        if not self.cfg.log_completions:
            return
        records = self.world.concat([record(step, sample) for sample in samples])
        if not self.world.main:
            return
        lines = [json.dumps(r, ensure_ascii=False, default=str) + "\n" for r in records]
        path = self.folder / f"completions_{step + 1:05d}.jsonl"
        # A lone surrogate cannot be encoded in UTF-8, so it is written as a JSON escape.
        data = "".join(lines).encode("utf-8", "backslashreplace")
        replace(path, data)


def record(step: int, sample: Sample) -> dict:
    """Return a line of the table. rewards/runner.py makes sure that no column occurs twice."""
    return {
        "step": step,
        "prompt": sample.prompt.text,
        "completion": sample.text,
        **sample.rewards,
        "reward": sample.reward,
        "advantage": sample.advantage,
        "stopped": sample.stopped,
        **sample.extra,
    }


def show(samples: Sequence[Sample]) -> None:
    """Print a table of completions with their rewards, as TRL does."""
    table = Table("prompt", "completion", "reward", "advantage", show_lines=True)
    for s in samples:
        prompt = s.prompt.text if isinstance(s.prompt.text, str) else s.prompt.text[-1]["content"]
        reward = "-" if s.reward is None else f"{s.reward:.2f}"
        table.add_row(_plain(prompt[-200:]), _plain(s.text[-400:]), reward, f"{s.advantage:+.2f}")
    console.print(table)


def _plain(text: str) -> Text:
    """Replace control characters: a model may write them, and a terminal would interpret them."""
    return Text("".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text))
