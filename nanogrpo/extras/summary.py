"""Summarize runs: one line at the end of a run, and the list of `nanogrpo runs [FOLDER]`.

In: the records of metrics.jsonl. Out: the first, last and best value of the metric that chooses the
best checkpoint (--metric-for-best-model, by default the reward), and the steps, time and tokens of
the run. The values come from the evaluations or, if there are none, from the training steps. Read
before: best.py.
"""

from __future__ import annotations

import argparse
import contextlib
import re
from collections import ChainMap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from nanogrpo.errors import UserError
from nanogrpo.extras.best import plain
from nanogrpo.feature import Feature
from nanogrpo.logs.files import read_records
from nanogrpo.logs.progress import duration, number, print_line
from nanogrpo.model import checkpoint


class Summary(NamedTuple):
    options: dict[str, Any]  # of the run
    metric: str  # such as "held-out accuracy_reward"
    values: dict[int, float]  # finished steps → value
    steps: int
    seconds: float  # of the steps, without evaluations and saving
    tokens: int  # of prompts and completions

    @property
    def best(self) -> int:
        """The finished steps at the highest value. If several are equal, the first counts."""
        return max(self.values, key=self.values.__getitem__)

    def __str__(self) -> str:
        text = f"{self.steps} steps in {duration(self.seconds)}, {self.tokens:,} tokens"
        if not self.values:
            return text
        values = [*self.values.values()]
        learned = f"{number(values[0])} → {number(values[-1])}, best {number(max(values))}"
        return f"{self.metric} {learned} after step {self.best}; {text}"


def summarize(records: Iterable[dict]) -> Summary:
    """Return the summary of a run from the records of its log."""
    records = [*records]
    newest = ChainMap(*reversed(records))  # the last value of each name
    options = newest.get("run", {})
    metric = plain(options.get("metric_for_best_model", "reward"))
    names = f"eval/{metric}", f"eval/rewards/{metric}", "reward"
    name = next(filter(newest.__contains__, names), "")
    return Summary(
        options,
        re.sub("eval/(rewards/)?", "held-out ", name),
        {record["step"] + 1: record[name] for record in records if name in record},
        newest.get("step", -1) + 1,
        sum(record.get("step_time", 0) for record in records),
        newest.get("num_tokens", 0),
    )


class Closing(Feature):
    """Print the summary at the end of a run."""

    @contextlib.contextmanager
    def running(self, run: Any) -> Iterator[None]:
        yield
        if run.world.main:
            print_line(f"{summarize(read_records(run.log.path))}")


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="nanogrpo runs",
        description="List runs with the checkpoint to use: the best one if the "
        "run keeps it, and otherwise the last.",
    )
    text = "a run, or a folder with runs (default: runs)"
    parser.add_argument("folder", nargs="?", type=Path, default="runs", help=text)
    folder = parser.parse_args(argv).folder
    logs = sorted(folder.rglob("metrics.jsonl"))
    if not logs:
        raise UserError(f"{folder} contains no run: name a folder above a metrics.jsonl.")
    print(f"{'checkpoint':32}  {'from':32}  summary")
    for log in logs:
        run = summarize(read_records(log))
        saved = checkpoint.checkpoints(log.parent)[::-1]
        values = run.values if run.options.get("load_best_model_at_end") else {}
        best = max(saved, key=lambda p: values.get(int(p.name[11:]), -1e9), default=log.parent)
        print(f"{best!s:32}  {run.options.get('model', '-'):32}  {run}")
