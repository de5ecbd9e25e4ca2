"""Also keep the checkpoint with the best evaluation: `--load-best-model-at-end`.

In: the evaluations in the log. Out: a checkpoint that --save-total-limit never removes. When
the run ends, it prints the path of this checkpoint. A resumed run reads the earlier evaluations
from the log, so a checkpoint need not contain them. Read before: run/state.py (which saves and
removes checkpoints).
"""

import contextlib
import re
from collections.abc import Iterator
from typing import Any

from nanogrpo.errors import UserError
from nanogrpo.extras.summary import plain, summarize
from nanogrpo.feature import Feature
from nanogrpo.logs.files import checkpoints, read_records
from nanogrpo.run.setup import Inputs, Run
from nanogrpo.run.state import Saver


class Best(Feature):
    def settings(self, cfg: Any, inputs: Inputs) -> None:
        """Check that --metric-for-best-model is a metric of this run's evaluations."""
        known = ["mean_length", "reward", *inputs.rewards.calls]
        given = cfg.metric_for_best_model
        if re.sub(r"^pass@\d+/", "", plain(given)) not in known:
            raise UserError(
                f"--metric-for-best-model {given} is not a metric of the evaluation: choose one of "
                f"{', '.join(sorted(known))}."
            )

    @contextlib.contextmanager
    def running(self, run: Run) -> Iterator[None]:
        """Find the best checkpoint of a resumed run that ends without saving another one."""
        yield
        if run.done == run.start:
            self.files(run.saver)

    def files(self, saver: Saver) -> None:
        """Keep the best checkpoint. The checkpoint that is being written is included."""
        folder = saver.final.parent
        if saver.world.main:
            run = summarize(read_records(folder / "metrics.jsonl"))
            saver.keep = {max([*checkpoints(folder), saver.final], key=run.rank).name}
