"""List runs with their results and the checkpoint to use.

    nanogrpo runs [FOLDER …]

In: the metrics.jsonl of all runs in each FOLDER (runs). Out: a line for each run, with the best
checkpoint if the run keeps it, and otherwise the last. A summary has the steps, time and tokens of
a run. It also has the first, last and best value of the metric that chooses the best checkpoint
(--metric-for-best-model, by default the reward). The values come from the evaluations or, if there
are none, from the training steps. A run also prints its summary at its end. Read next: best.py.
"""

import contextlib
import math
import re
from collections import ChainMap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from nanogrpo.errors import UserError
from nanogrpo.feature import Feature
from nanogrpo.logs.files import checkpoints, read_records
from nanogrpo.logs.progress import duration, number, print_line


class Summary(NamedTuple):
    options: dict[str, Any]  # of the run
    metric: str  # such as "held-out accuracy_reward"
    values: dict[int, float]  # finished steps → value
    steps: int
    seconds: float  # time of the steps, without evaluations and saving
    tokens: int  # of prompts and completions

    def rank(self, path: Path) -> float:
        """Return a number for a checkpoint. The checkpoint to use has the highest number.

        If the run keeps the best checkpoint, the number is the result of the checkpoint's
        evaluation. Otherwise, it is the step of the checkpoint.
        """
        step = int(path.name[11:])
        best = self.options.get("load_best_model_at_end")
        return self.values.get(step, -math.inf) if best else step

    def __str__(self) -> str:
        text = f"{self.steps} steps in {duration(self.seconds)}, {self.tokens:,} tokens"
        if not self.values:
            return text
        values = [*self.values.values()]
        step = max(self.values, key=self.values.__getitem__)
        learned = f"{number(values[0])} → {number(values[-1])}, best {number(self.values[step])}"
        return f"{self.metric} {learned} after step {step}; {text}"


def plain(metric: str) -> str:
    """Return a metric's name without the prefixes and suffixes of the log or of TRL (eval/,
    rewards/, /mean).
    """
    return re.sub(r"^(eval[/_])?(rewards/)?|/mean$", "", metric)


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
    logs: list[Path] = []
    for folder in argv or ["runs"]:
        found = sorted(Path(folder).rglob("metrics.jsonl"))
        if not found:
            raise UserError(f"{folder} contains no run: name the folder of one or several runs.")
        logs += found
    print(f"{'checkpoint':32}  {'from':32}  summary")
    for log in logs:
        run = summarize(read_records(log))
        best = max(checkpoints(log.parent), key=run.rank, default=log.parent)
        print(f"{best!s:32}  {run.options.get('model', '-'):32}  {run}")
