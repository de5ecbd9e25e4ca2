"""Completions: a table on the console (`--num-completions-to-print`), one file per step, and a
table in the dashboards (both `--log-completions`).

In: the samples of a step. Out: `output_dir/completions/completions_00001.jsonl` and so on, where
the number counts finished steps, as in checkpoint-N; an evaluation writes eval_00001.jsonl. Each
line is one completion with TRL's columns: step, prompt, completion, one column per reward function,
reward, advantage, and then the columns of `log_extra`. If a prompt has pictures, the column images
has the paths of small copies, which are in the folder, too. `pandas.read_json(path, lines=True)`
reads a file. Read next: logs/tokens.py (the numbers of each token), logs/report.py (the
dashboards).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from nanogrpo.config import Config
from nanogrpo.distributed.world import World
from nanogrpo.logs.files import replace, set_aside
from nanogrpo.logs.progress import console, fitted, number, short_names
from nanogrpo.rewards.runner import COLUMNS
from nanogrpo.types import Sample

PICTURE = "pictures/{}.webp"  # a file, by the picture's name


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
        self.pictures: set[str] = set()  # the names of those that have a file
        if not world.main:
            return
        if start == 0 and self.folder.exists():
            set_aside(self.folder)
        for path in self.folder.glob("*.jsonl*"):
            name = re.fullmatch(r"(?:completions|eval|tokens)_(\d+)\.jsonl(?:\.gz)?", path.name)
            if name and int(name[1]) > start:
                path.unlink()

    def log(self, step: int, samples: Sequence[Sample]) -> list[dict]:
        """Print and write the completions of a step. Return the written records of all ranks on the
        main rank.
        """
        if self.cfg.num_completions_to_print and self.world.main:
            show(spread(samples, self.cfg.num_completions_to_print), step)
        return self._write(f"completions_{step + 1:05d}.jsonl", step, samples)

    def evaluation(self, done: int, samples: Sequence[Sample]) -> None:
        """Write the completions of an evaluation after `done` steps to eval_00060.jsonl."""
        self._write(f"eval_{done:05d}.jsonl", done, samples)

    def _write(self, name: str, step: int, samples: Sequence[Sample]) -> list[dict]:
        if not self.cfg.log_completions:
            return []
        mine = [record(step, sample) for sample in samples], self._new_pictures(samples)
        everyones = self.world.concat([mine])
        if not self.world.main:
            return []
        records = [r for part, _ in everyones for r in part]
        write(self.folder / name, records)
        for _, pictures in everyones:
            for file, data in pictures.items():
                replace(self.folder / file, data)
        return records

    def _new_pictures(self, samples: Sequence[Sample]) -> dict[str, bytes]:
        """Return file names and small copies of the pictures that this process shows first."""
        found = {}
        for images in {id(s.prompt): s.prompt.images for s in samples}.values():
            for i, name in enumerate(images.names if images else ()):
                if name not in self.pictures:
                    self.pictures.add(name)
                    found[PICTURE.format(name)] = images.thumbnail(i)
        return found


def write(path: Path, records: Sequence[dict]) -> None:
    """Write one record per line."""
    lines = [json.dumps(r, ensure_ascii=False, default=str) + "\n" for r in records]
    # A lone surrogate cannot be encoded in UTF-8, so it is written as a JSON escape.
    replace(path, "".join(lines).encode("utf-8", "backslashreplace"))


def record(step: int, sample: Sample) -> dict:
    """Return a line of the table.

    rewards/runner.py makes sure that no column of `log_extra` has the name of another one. A reward
    function that is named like one of our columns, such as `step`, gets the column `step_reward`.
    """
    images = sample.prompt.images
    rewards = {f"{n}_reward" if n in COLUMNS else n: value for n, value in sample.rewards.items()}
    return {
        "step": step,
        "prompt": _spoken(sample.prompt.text),
        **({"images": [PICTURE.format(name) for name in images.names]} if images else {}),
        "completion": sample.text,
        **rewards,
        "reward": sample.reward,
        "advantage": sample.advantage,
        "stopped": sample.stopped,
        **sample.extra,
    }


def _spoken(prompt: str | list[dict]) -> str | list[dict]:
    """Return a prompt whose messages are texts, with <picture 64×48> in place of a picture."""
    if isinstance(prompt, str):
        return prompt
    return [
        m
        if isinstance(m["content"], str)
        else {**m, "content": "".join(str(part[part["type"]]) for part in m["content"])}
        for m in prompt
    ]


def spread(samples: Sequence[Sample], count: int) -> list[Sample]:
    """Return `count` samples: the first of each prompt, then the second of each, and so on."""
    return sorted(samples, key=lambda s: s.index)[:count]  # sorting keeps the order of the prompts


def show(samples: Sequence[Sample], step: int = 0) -> None:
    """Print a table of completions.

    Columns, as in TRL: the end of the prompt and of the completion, each reward function, their
    weighted sum if there are several, the advantage, and what the functions passed to `log_extra`.
    """
    functions = [*samples[0].rewards]
    extra = list(dict.fromkeys(name for s in samples for name in s.extra))
    total = ["reward"] if len(functions) != 1 else []
    numbers = [*short_names(functions, taken=("advantage", "reward")), *total, "advantage"]
    texts = 2 * 20 + 12 * len(extra)  # the smallest width of the other columns, with borders
    numbers = fitted(numbers, console.width - texts, gap=4)
    needed = texts + sum(max(len(name), 6) + 3 for name in numbers)
    table = Table(
        title=f"completions of step {step + 1}",
        show_lines=True,
        width=needed if needed > console.width else None,  # rich would drop columns
    )
    for name in ("prompt", "completion"):
        table.add_column(name, ratio=1, min_width=16, overflow="fold")
    for name in numbers:
        table.add_column(_cell(name), justify="right", no_wrap=True)
    for name in extra:
        table.add_column(_cell(name), overflow="fold")
    for s in samples:
        prompt = _spoken(s.prompt.text)
        prompt = prompt if isinstance(prompt, str) else prompt[-1]["content"]
        rewards = [*(s.rewards.get(name) for name in functions), *([s.reward] if total else [])]
        table.add_row(
            _cell(prompt, 200),
            _cell(s.text, 400),
            *(number(value) for value in rewards),
            f"{s.advantage:+.2f}",
            *(_cell(s.extra.get(name)) for name in extra),
        )
    console.print(table, crop=False)


def _cell(value: Any, length: int = 100) -> Text:
    """Return the end of a value as text, after an ellipsis if it is cut."""
    text = number(value) if value is None or isinstance(value, float) else str(value)
    text = text if len(text) <= length else "…" + text[1 - length :]
    return plain(text)


def plain(text: str, style: str = "") -> Text:
    """Replace control characters: a model may write them, and a terminal would interpret them."""
    return Text("".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text), style)
