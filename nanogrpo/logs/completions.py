"""What the model wrote: a table on the console (`--num-completions-to-print`), and one file a step
(`--log-completions`).

In: the step's samples. Out: `output_dir/completions/completions_00001.jsonl` and so on, a
completion a line, with TRL's columns: step, prompt, completion, one column a reward function,
reward, advantage, then what reward functions gave to `log_extra`. `pandas.read_json(path,
lines=True)` reads one. The number counts finished steps, as checkpoint-N does. Read next: plot.py.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from nanogrpo.config import Config
from nanogrpo.distributed.world import World
from nanogrpo.errors import UserError
from nanogrpo.types import Sample

# is given Text: a str's brackets would be read as markup, "[/INST]" as an end of nothing
console = Console(stderr=True)


class Completions:
    """`log(step, samples)` after each step, on every rank: the files hold the samples of all."""

    def __init__(self, cfg: Config, world: World, start: int):
        """A resumed run repeats the steps after its checkpoint: their files are dropped. Without
        one all are kept aside.
        """
        self.cfg, self.world, self.folder = cfg, world, Path(cfg.output_dir) / "completions"
        if not world.main or not self.folder.exists():
            return
        if start == 0:
            self.folder.rename(
                next(
                    p
                    for i in itertools.count(1)
                    if not (p := self.folder.with_name(f"completions-{i}")).exists()
                )
            )
            return
        for path in self.folder.glob("completions_*.jsonl"):
            number = re.fullmatch(r"completions_(\d+)", path.stem)
            if number and int(number[1]) > start:
                path.unlink()

    def log(self, step: int, samples: Sequence[Sample]) -> None:
        if self.cfg.num_completions_to_print and self.world.main:
            show(samples[: self.cfg.num_completions_to_print])
        if not self.cfg.log_completions:
            return
        rows = self.world.concat([row(step, s) for s in samples])
        if not self.world.main:
            return
        path = self.folder / f"completions_{step + 1:05d}.jsonl"
        try:
            self.folder.mkdir(exist_ok=True)
            aside = path.with_suffix(".tmp")
            text = "".join(json.dumps(r, ensure_ascii=False, default=str) + "\n" for r in rows)
            # half a character, as JSON writes it
            aside.write_text(text, encoding="utf-8", errors="backslashreplace")
            aside.replace(path)
        except OSError as e:
            raise UserError(
                f"{path} could not be written ({e.strerror}): make room, or leave out --log-completions."
            ) from e


def row(step: int, s: Sample) -> dict:
    """A line of the table."""
    own = {"step": step, "prompt": s.prompt.text, "completion": s.text}
    own |= {**s.rewards, "reward": s.reward, "advantage": s.advantage, "stopped": s.stopped}
    return own | s.extra  # whose names are others: reward_runner.py has seen to it


def show(samples: Sequence[Sample]) -> None:
    """A table of completions with their rewards, as TRL's log_completions shows."""
    table = Table("prompt", "completion", "reward", "advantage", show_lines=True)
    for s in samples:
        prompt = s.prompt.text if isinstance(s.prompt.text, str) else s.prompt.text[-1]["content"]
        reward = "-" if s.reward is None else f"{s.reward:.2f}"
        table.add_row(_plain(prompt[-200:]), _plain(s.text[-400:]), reward, f"{s.advantage:+.2f}")
    console.print(table)


def _plain(text: str) -> Text:
    """As it is, but for the characters that would command the terminal: a model may write those,
    too.
    """
    return Text(
        "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)
    )
