"""The result of a run in Python: the records of its steps, its evaluations and its checkpoints.

    rows = nanogrpo.train(…)       # or Result("runs/a"), for an earlier run
    rows                           # Result('runs/a'): reward 0.250 → 0.875, best 0.906 after …
    rows[-1]["reward"], rows.steps[-1], rows.evals, rows.best.value, rows.checkpoint
    rows.plot("reward", "rewards/*")

In: an output folder. Out: a list of dicts, as in metrics.jsonl. `OnStep` calls a function with each
record while the run trains. Read next: summary.py (first, last and best value), plot.py.
"""

import fnmatch
from collections.abc import Callable
from os.path import relpath
from pathlib import Path
from typing import Any, NamedTuple

from nanogrpo.distributed.failure import asked
from nanogrpo.extras import plot
from nanogrpo.extras.summary import summarize
from nanogrpo.feature import Feature
from nanogrpo.logs.files import checkpoints, read_records


class Best(NamedTuple):
    checkpoint: Path | None  # None if there is no checkpoint of this step
    value: float
    step: int  # finished steps


class Result(list[dict]):
    """The records of the steps, one dict each. The most important metrics come first.

    `evals` are the records of the evaluations; `eval/after` is the number of finished steps.
    `folder` is the output folder. `summary` is what __repr__ shows (summary.py).
    """

    def __init__(self, folder: str | Path):
        """Read the log in an output folder. Raises UserError if there is none."""
        self.folder = Path(folder)
        records = [*read_records(self.folder / "metrics.jsonl")]
        self.summary = summarize(records)
        self.evals = [record for record in records if "eval/after" in record]
        super().__init__(_ordered(r) for r in records if not r.keys() & {"eval/after", "run"})

    def __repr__(self) -> str:
        return f"Result({relpath(self.folder)!r}): {self.summary}"

    @property
    def steps(self) -> list[int]:
        """The numbers of the steps, as on the console: the first step is 1. In a record, `step` is
        the number of earlier steps, as in metrics.jsonl.
        """
        return [row["step"] + 1 for row in self]

    @property
    def checkpoint(self) -> Path | None:
        """The folder of the last checkpoint, or None if there is no checkpoint."""
        return [None, *checkpoints(self.folder)][-1]

    @property
    def best(self) -> Best | None:
        """The highest value of metric_for_best_model (by default the reward) in the evaluations.
        Without evaluations, the highest value in the steps. None if there is no value.
        """
        values = self.summary.values
        if not values:
            return None
        step = max(values, key=values.__getitem__)
        folder = self.folder / f"checkpoint-{step}"
        return Best(folder if folder.exists() else None, values[step], step)

    def plot(self, *metrics: str) -> Any:
        """Return a matplotlib Figure of `metrics`, such as "rewards/*". Without metrics, the figure
        shows the usual ones.
        """
        return plot.figure([Path(relpath(self.folder))], metrics)


def _ordered(record: dict) -> dict:
    """Return a record with its most important metrics first."""
    patterns = ["step", *plot.METRICS.split()]
    first = [name for pattern in patterns for name in fnmatch.filter(record, pattern)]
    return {name: record[name] for name in (*first, *record)}


class OnStep(Feature):
    """Call a function with the record of each step and the metrics of the last evaluation. If the
    function returns `True`, the run saves and ends.
    """

    def __init__(self, function: Callable):
        self.function = function
        self.row: dict = {}

    def record(self, done: int, record: dict) -> None:
        self.row |= {} if "run" in record else record
        if "loss" in record and self.function({**self.row}):
            asked.set()  # all ranks agree to stop at the end of this step
