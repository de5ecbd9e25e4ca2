"""Send the metrics to a dashboard: `--report-to tensorboard trackio wandb`, all optional packages.

In: the metrics of a step, and the number of finished steps; with `--log-completions`, also the
completions, which become a table with their pictures (not in TensorBoard, which has none). Out:
event files in output_dir/tensorboard; a database on this machine (trackio), in $TRACKIO_DIR under
the project $TRACKIO_PROJECT; or a run of Weights & Biases, which reads its project and offline mode
from the WANDB_… environment variables. Read before: logs/console.py.

A resumed run continues the same curves: TensorBoard drops the values after the checkpoint, W&B gets
the id of the earlier run, and Trackio continues the last run of that name.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nanogrpo.config import Config
from nanogrpo.errors import UserError, first_sentence


class TensorBoard:
    """`tensorboard --logdir RUNS` shows the curves; its text tab shows the options."""

    def __init__(self, cfg: Config, head: dict, start: int):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as e:
            raise UserError(
                "--report-to tensorboard needs its package: pip install 'nanogrpo[tensorboard]'"
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

    def completions(self, records: Sequence[dict], done: int) -> None:
        """Do nothing: TensorBoard has no tables."""

    def close(self) -> None:
        self.writer.close()


class Trackio:
    """`trackio show` opens the curves and tables in a browser. Nothing leaves this machine."""

    def __init__(self, cfg: Config, head: dict, start: int):
        try:
            import trackio
        except ImportError as e:
            raise UserError(
                "--report-to trackio needs its package: pip install 'nanogrpo[trackio]'"
            ) from e
        self.trackio, self.unique = trackio, cfg.log_unique_prompts
        self.folder = Path(cfg.output_dir) / "completions"
        config = dict(head)
        try:
            self.run = trackio.init(
                project=os.environ.get("TRACKIO_PROJECT", "nanogrpo"),
                name=cfg.run_name or Path(cfg.output_dir).name,
                config=config.pop("run") | config,
                resume="allow" if start else "never",
                embed=False,
            )
        except Exception as e:  # the user may have named a remote server, which may not answer
            raise UserError(
                f"--report-to trackio: {first_sentence(e)}: correct the TRACKIO_… environment "
                "variables, or leave it out."
            ) from e

    def log(self, row: Mapping[str, float], done: int) -> None:
        self.run.log(dict(row), step=done)

    def completions(self, records: Sequence[dict], done: int) -> None:
        columns, data = table(records, self.unique, self.trackio.Image, self.folder)
        self.run.log({"completions": self.trackio.Table(columns=columns, data=data)}, step=done)

    def close(self) -> None:
        self.trackio.finish()


class Wandb:
    """One run of Weights & Biases per output folder."""

    def __init__(self, cfg: Config, head: dict, start: int):
        try:
            import wandb
        except ImportError as e:
            raise UserError(
                "--report-to wandb needs its package: pip install 'nanogrpo[wandb]'"
            ) from e
        self.wandb, self.unique = wandb, cfg.log_unique_prompts
        folder, config = Path(cfg.output_dir), dict(head)
        self.folder = folder / "completions"
        id_file = folder / "wandb-id"
        if start == 0 or not id_file.exists():
            id_file.write_text(uuid.uuid4().hex[:8])
        try:
            self.run = wandb.init(
                config=config.pop("run") | config,
                id=id_file.read_text(),
                resume="allow",
                dir=str(folder),
                name=cfg.run_name or folder.name,
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

    def completions(self, records: Sequence[dict], done: int) -> None:
        columns, data = table(records, self.unique, self.wandb.Image, self.folder)
        shown = self.wandb.Table(columns=columns, data=data, allow_mixed_types=True)
        self.run.log({"completions": shown, "done": done})

    def close(self) -> None:
        self.run.finish()


REPORTERS = {"tensorboard": TensorBoard, "trackio": Trackio, "wandb": Wandb}


def table(
    records: Sequence[dict], unique: bool, image: Callable[[str], Any], folder: Path
) -> tuple[list[str], list[list]]:
    """Return the columns and rows of a table of completions (logs/completions.py).

    unique: keep only the first completion of each prompt. image: makes a picture of a dashboard
    from the path of a file; folder: the files' folder.
    """

    def cell(name: str, value: Any) -> Any:
        if name == "images" and isinstance(value, list):
            files = [str(folder / file) for file in value if (folder / file).exists()]
            # a picture alone, because W&B documents no lists of them
            return image(files[0]) if len(files) == 1 else [image(file) for file in files]
        if isinstance(value, list):  # the messages of a prompt
            value = json.dumps(value, ensure_ascii=False)
        if isinstance(value, str):  # UTF-8 cannot represent a lone surrogate
            value = value.encode("utf-8", "backslashreplace").decode()
        return value

    columns = list(dict.fromkeys(name for record in records for name in record))
    if unique:
        first: dict[str, dict] = {}
        for r in records:
            first.setdefault(json.dumps([r["prompt"], r.get("images")], default=str), r)
        records = [*first.values()]
    return columns, [[cell(name, record.get(name)) for name in columns] for record in records]
