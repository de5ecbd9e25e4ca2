"""Send the metrics to a dashboard: `--report-to tensorboard wandb`, each an optional package.

In: the metrics of a step, and the number of finished steps. Out: event files in
output_dir/tensorboard, or a run of Weights & Biases, which reads its project, name and offline mode
from the WANDB_… environment variables. Read before: logs/console.py.

A resumed run continues the same curves: TensorBoard drops the values after the checkpoint, and W&B
gets the id of the earlier run.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from pathlib import Path

from nanogrpo.config import Config
from nanogrpo.distributed.failure import first_sentence
from nanogrpo.errors import UserError


class TensorBoard:
    """`tensorboard --logdir RUNS` shows the curves; its text tab shows the options."""

    def __init__(self, cfg: Config, head: dict, start: int):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as e:
            raise UserError(
                "--report-to tensorboard needs its package: pip install -e .[tensorboard]"
            ) from e
        # Steps in the old files that a resumed run repeats are hidden. Step 0 contains an
        # evaluation, which a run that starts over also repeats.
        self.writer = SummaryWriter(
            str(Path(cfg.output_dir) / "tensorboard"), purge_step=start + 1 if start else 0
        )
        options = "\n".join(f"    {name} = {value!r}" for name, value in head["run"].items())
        self.writer.add_text("options", options, start)

    def log(self, row: Mapping[str, float], done: int) -> None:
        for name, value in row.items():
            self.writer.add_scalar(name, value, done)

    def close(self) -> None:
        self.writer.close()


class Wandb:
    """One run of Weights & Biases per output folder."""

    def __init__(self, cfg: Config, head: dict, start: int):
        try:
            import wandb
        except ImportError as e:
            raise UserError("--report-to wandb needs its package: pip install -e .[wandb]") from e
        folder, config = Path(cfg.output_dir), dict(head)
        id_file = folder / "wandb-id"
        if start == 0 or not id_file.exists():
            id_file.write_text(uuid.uuid4().hex[:8])
        try:
            self.run = wandb.init(
                config=config.pop("run") | config,
                id=id_file.read_text(),
                resume="allow",
                dir=str(folder),
                name=folder.name,
            )
        except Exception as e:  # without network or login, wandb raises many kinds of errors
            raise UserError(
                f"--report-to wandb: {first_sentence(e)}: log in, set WANDB_MODE=offline, or leave "
                "it out."
            ) from e
        # W&B's own step counter would reject the steps that a resumed run repeats.
        self.run.define_metric("*", step_metric="done")

    def log(self, row: Mapping[str, float], done: int) -> None:
        self.run.log({**row, "done": done})

    def close(self) -> None:
        self.run.finish()


REPORTERS = {"tensorboard": TensorBoard, "wandb": Wandb}
