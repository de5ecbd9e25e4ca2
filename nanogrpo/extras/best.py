"""Also keep the checkpoint with the best evaluation: `--load-best-model-at-end`.

In: the evaluations in the log. Out: a checkpoint that --save-total-limit never removes. The run
names it at the end. A resumed run reads the earlier evaluations from the log, so a checkpoint need
not contain them. Read before: run/state.py (which saves and removes checkpoints).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanogrpo.config import Config, free_option
from nanogrpo.errors import UserError
from nanogrpo.feature import Feature
from nanogrpo.logs.files import read_records

if TYPE_CHECKING:
    from nanogrpo.run.setup import Inputs, Run


@dataclass(frozen=True)
class BestOptions(Config):
    """The best checkpoint."""

    load_best_model_at_end: bool = free_option(
        False,
        "also keep the best checkpoint by evaluation, and name it at the end",
        needs="eval_steps",
    )
    metric_for_best_model: str = free_option(
        "reward",
        "name of the evaluation metric that should be highest, such as accuracy_reward",
    )

    def problems(self) -> Iterator[str]:
        every = self.save_steps % self.eval_steps if self.eval_steps else 0
        if self.load_best_model_at_end and self.eval_steps and (not self.save_steps or every):
            yield (
                "--load-best-model-at-end compares checkpoints that were evaluated, but"
                f" --save-steps {self.save_steps} is not a multiple of --eval-steps"
                f" {self.eval_steps}: choose a multiple."
            )


def plain(metric: str) -> str:
    """Return a metric's name without the affixes of the log or of TRL (eval/, rewards/, /mean)."""
    return re.sub(r"^(eval[/_])?(rewards/)?|/mean$", "", metric)


class Best(Feature):
    cfg: Any

    def __init__(self, cfg: BestOptions):
        self.cfg = cfg
        self.best: tuple[float, int] | None = None  # on the main rank: (value, steps)
        self.name = plain(cfg.metric_for_best_model)

    def settings(self, cfg: Config, inputs: Inputs) -> None:
        """Check that --metric-for-best-model is a metric of this run's evaluations."""
        known = ["mean_length", "reward", *inputs.rewards.calls]
        if re.sub(r"^pass@\d+/", "", self.name) not in known:
            raise UserError(
                f"--metric-for-best-model {self.cfg.metric_for_best_model} is not a metric of the "
                f"evaluation: choose one of {', '.join(sorted(known))}."
            )

    @contextlib.contextmanager
    def running(self, run: Run) -> Iterator[None]:
        self.cfg, self.keep = run.cfg, run.saver.keep
        for record in read_records(run.log.path) if run.world.main else ():
            done = record.get("eval/after", 0)
            if Path(run.cfg.output_dir, f"checkpoint-{done}").exists():
                self.record(done, record)
        yield

    def record(self, done: int, record: dict) -> None:
        names = f"eval/{self.name}", f"eval/rewards/{self.name}"
        values = [record[name] for name in names if name in record]
        saved = done > 0 and (done % self.cfg.save_steps == 0 or done == self.cfg.max_steps)
        if not values or not saved:
            return
        if self.best is None or values[0] > self.best[0]:
            self.best = values[0], done
            self.keep.clear()
            self.keep.add(f"checkpoint-{done}")
