"""Numbers to a dashboard beside metrics.jsonl: `--report-to tensorboard wandb`, each an optional
package.

In: the metrics of a step, a dict of name → number, and how many steps are done. Out: event files in
output_dir/tensorboard, or a run of Weights & Biases, which takes project, name and offline mode
from its own WANDB_ variables. Read before: log.py.

A resumed run goes on with the same curves: TensorBoard drops what came after the checkpoint, W&B is
given the same run's id.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from nanogrpo.config import Config
from nanogrpo.errors import UserError


class Reporter(Protocol):
    def log(self, row: Mapping[str, float], done: int) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """`tensorboard --logdir RUNS` shows it; the options are among its texts."""

    def __init__(self, cfg: Config, head: dict, start: int):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as e:
            raise UserError(
                "--report-to tensorboard needs its package: pip install -e .[tensorboard]"
            ) from e
        # What a resumed run repeats is hidden in the old files. Step 0 holds an evaluation, which a
        # new run has too.
        self.writer = SummaryWriter(
            str(Path(cfg.output_dir) / "tensorboard"), purge_step=start + 1 if start else 0
        )
        self.writer.add_text(
            "options",
            "\n".join(f"    {name} = {value!r}" for name, value in head["run"].items()),
            start,
        )

    def log(self, row: Mapping[str, float], done: int) -> None:
        for name, value in row.items():
            self.writer.add_scalar(name, value, done)

    def close(self) -> None:
        self.writer.close()


class Wandb:
    """One run of Weights & Biases for each output folder."""

    def __init__(self, cfg: Config, head: dict, start: int):
        try:
            import wandb
        except ImportError as e:
            raise UserError("--report-to wandb needs its package: pip install -e .[wandb]") from e
        folder = Path(cfg.output_dir)
        name = folder / "wandb-id"
        if start == 0 or not name.exists():
            name.write_text(uuid.uuid4().hex[:8])
        about = {"id": name.read_text(), "resume": "allow", "dir": str(folder), "name": folder.name}
        try:
            self.run = wandb.init(
                config={**head["run"], **{k: v for k, v in head.items() if k != "run"}}, **about
            )
        except Exception as e:  # no network, no login: its client raises from several libraries
            reason = (str(e).strip().splitlines() or [type(e).__name__])[0].rstrip(".")
            raise UserError(
                f"--report-to wandb: {reason}: log in, set WANDB_MODE=offline, or leave it out."
            ) from e
        # not its own counter, which refuses steps that a resumed run repeats
        self.run.define_metric("*", step_metric="done")

    def log(self, row: Mapping[str, float], done: int) -> None:
        self.run.log({**row, "done": done})

    def close(self) -> None:
        self.run.finish()


REPORTERS = {"tensorboard": TensorBoard, "wandb": Wandb}


def reporters(cfg: Config, head: dict, start: int) -> list[Reporter]:
    """Those that the options ask for, ready to be logged to."""
    return [REPORTERS[name](cfg, head, start) for name in cfg.report_to if name != "none"]
