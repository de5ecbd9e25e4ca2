"""Show completions on the console (`--num-completions-to-print`), and write one file per step
(`--log-completions`).

In: the samples of a step. Out: `output_dir/completions/completions_00001.jsonl` and so on. The
number in a file's name counts finished steps, as in checkpoint-N. An evaluation writes
eval_00001.jsonl. Each line is one completion with TRL's columns: step, prompt, completion, one
column per reward function, reward, advantage, and then the columns of `log_extra`. Further columns
are `stopped`, and the texts and numbers of the data, such as the reference answer.
`pandas.read_json(path, lines=True)` reads a file. If a prompt has pictures, small copies of the
pictures are written into the folder, and a column contains the names of the copies. Read before:
logs/console.py. Read next: view/ (the page that shows the files).
"""

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from nanogrpo.errors import CONTROL
from nanogrpo.extras.options import Config
from nanogrpo.feature import Feature
from nanogrpo.logs.files import replace, set_aside
from nanogrpo.logs.progress import number
from nanogrpo.rewards.scorer import COLUMNS
from nanogrpo.run.setup import Run
from nanogrpo.types import Sample

# Print Text objects only, because rich treats brackets in a str, as in "[/INST]", as markup.
console = Console(
    stderr=True, force_jupyter=False, width=None if sys.stderr and sys.stderr.isatty() else 120
)


# in the folder; the last part is the name of a temporary file (logs/files.py)
NAME = r"(?:completions|eval|tokens)_(\d+)\.(?:jsonl|jsonl\.gz|.*\d\.(tmp))"


class Completions(Feature):
    """The files contain the samples of all ranks; the console shows some samples of rank 0."""

    def __init__(self, cfg: Config):
        self.cfg, self.folder = cfg, Path(cfg.output_dir) / "completions"

    def running(self, run: Run) -> None:
        """Prepare the folder.

        A resumed run repeats the steps after its checkpoint, so their files are deleted. Files that
        a killed run was writing are deleted, too. A run that starts over renames the old folder.
        """
        if run.world.main:
            if run.start == 0 and self.folder.exists():
                set_aside(self.folder)
            for path in self.folder.glob("*"):
                name = re.fullmatch(NAME, path.name)
                if name and (name[2] or int(name[1]) > run.start):
                    path.unlink()

    def step(self, run: Run, step: int, samples: list[Sample]) -> None:
        self._write(run, f"completions_{step + 1:05d}.jsonl", step, samples)
        if run.world.main and (count := self.cfg.num_completions_to_print):
            # the first completion of each prompt, then the second of each prompt, and so on
            show([record(step, s) for s in sorted(samples, key=lambda s: s.index)[:count]])
            run.log.progress.rows = 0  # print the header again, because the last one is far above

    def evaluated(self, run: Run, samples: list[Sample]) -> None:
        self._write(run, f"eval_{run.done:05d}.jsonl", run.done, samples)

    def _write(self, run: Run, name: str, step: int, samples: list[Sample]) -> None:
        if self.cfg.log_completions:
            records = run.world.concat([record(step, s, self.folder) for s in samples])
            if run.world.main:
                write(self.folder / name, records)


def write(path: Path, records: Sequence[dict]) -> None:
    """Write one record per line."""
    lines = [json.dumps(r, ensure_ascii=False, default=str) + "\n" for r in records]
    # A lone surrogate cannot be encoded in UTF-8, so it is written as a JSON escape.
    replace(path, "".join(lines).encode("utf-8", "backslashreplace"))


def record(step: int, sample: Sample, folder: Path | None = None) -> dict:
    """Return a line of the table. Copies of the prompt's pictures are written to `folder`.

    rewards/scorer.py makes sure that the columns of `log_extra` have unique names. A reward
    function that has the name of one of our columns, such as `step`, gets the column `step_reward`.
    """
    inputs, given = sample.prompt.inputs, sample.prompt.columns
    own = {
        "step": step,
        "prompt": texts(sample.prompt.text),
        "completion": sample.text,
        **{f"{n}_reward" if n in COLUMNS else n: value for n, value in sample.rewards.items()},
        "reward": sample.reward,
        "advantage": sample.advantage,
        "stopped": sample.stopped,
        **sample.extra,
        **(inputs.write(folder) if inputs is not None and folder else {}),
    }
    short = {name: str(x)[:200] for name, x in given.items() if isinstance(x, str | int | float)}
    return own | short | own  # our own columns come first, and take precedence


def texts(prompt: str | list[dict]) -> str | list[dict]:
    """Return a prompt in which the content of each message is one string, even if it had parts."""
    if isinstance(prompt, str):
        return prompt
    return [
        m
        if isinstance(m["content"], str)
        else {**m, "content": "".join(str(part[part["type"]]) for part in m["content"])}
        for m in prompt
    ]


def show(records: Sequence[dict]) -> None:
    """Print a table: the ends of the prompt and the completion, the rewards, and other numbers."""
    table = Table(title=f"completions of step {records[0]['step'] + 1}", show_lines=True)
    for name, share in (("prompt", 3), ("completion", 4), ("rewards", 2)):
        table.add_column(name, ratio=share, overflow="fold")
    for r in records:
        prompt = r["prompt"] if isinstance(r["prompt"], str) else r["prompt"][-1]["content"]
        lines = [
            f"{name} {number(x) if x is None or isinstance(x, float) else str(x)[:100]}"
            for name, x in r.items()
            if name not in ("step", "prompt", "completion", "stopped")
        ]
        cells = prompt[-200:], r["completion"][-400:], "\n".join(lines)
        table.add_row(*map(plain, cells))
    console.print(table)


def plain(text: str) -> Text:
    """Replace control characters: a model may write them, and a terminal would interpret them."""
    return Text(CONTROL.sub("\ufffd", text))
