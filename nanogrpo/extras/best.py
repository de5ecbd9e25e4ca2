"""Also keep the checkpoint with the best evaluation: `--load-best-model-at-end`.

In: the evaluations in the log. Out: a checkpoint that --save-total-limit never removes. The run
names this checkpoint at its end. A resumed run reads the earlier evaluations from the log, so a
checkpoint need not contain them. Read before: run/state.py (which saves and removes checkpoints).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nanogrpo.config import Config, free_option
from nanogrpo.errors import UserError
from nanogrpo.extras.summary import plain, summarize
from nanogrpo.feature import Feature
from nanogrpo.logs.files import read_records
from nanogrpo.model.checkpoint import checkpoints

if TYPE_CHECKING:
    from nanogrpo.run.setup import Inputs
    from nanogrpo.run.state import Saver


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


class Best(Feature):
    cfg: Any

    def __init__(self, cfg: BestOptions):
        self.cfg = cfg

    def settings(self, cfg: Config, inputs: Inputs) -> None:
        """Check that --metric-for-best-model is a metric of this run's evaluations."""
        known = ["mean_length", "reward", *inputs.rewards.calls]
        given = self.cfg.metric_for_best_model
        if re.sub(r"^pass@\d+/", "", plain(given)) not in known:
            raise UserError(
                f"--metric-for-best-model {given} is not a metric of the evaluation: choose one of "
                f"{', '.join(sorted(known))}."
            )

    def files(self, saver: Saver) -> None:
        """Keep the best checkpoint. The checkpoint that is being written counts, too."""
        folder = saver.final.parent
        if saver.world.main:
            run = summarize(read_records(folder / "metrics.jsonl"))
            saver.keep = {max([*checkpoints(folder), saver.final], key=run.rank).name}
