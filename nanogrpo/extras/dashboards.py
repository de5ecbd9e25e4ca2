"""Send the log to dashboards (`--report-to tensorboard trackio wandb`, optional packages).

In: the records of the log and, with `--log-completions`, the completions of each step. The
completions become a table, except in TensorBoard, which has no tables. Out: for TensorBoard, event
files in output_dir/dashboards; for Trackio, a database on this machine; for Weights & Biases (W&B),
a run. `tensorboard --logdir RUNS` and `trackio show` display the files and the database.
Environment variables such as $TRACKIO_PROJECT and $WANDB_PROJECT configure Trackio and W&B. Read
before: logs/console.py.

A resumed run continues the same curves. TensorBoard drops the values after the checkpoint. W&B gets
the id of the earlier run, and keeps the old values. Trackio continues the last run of the same
name.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanogrpo.config import Config, free_option
from nanogrpo.errors import UserError, first_sentence
from nanogrpo.feature import Feature
from nanogrpo.logs.files import read_records


@dataclass(frozen=True)
class DashboardOptions(Config):
    """Dashboards."""

    report_to: tuple[str, ...] = free_option(
        ("none",),
        "log to TensorBoard (files in output_dir), Trackio (on this machine) or Weights & Biases,"
        " as well as to metrics.jsonl",
        choices=("none", "tensorboard", "trackio", "wandb"),
    )
    run_name: str = free_option(
        "", "name of the run in trackio and wandb; empty: that of output_dir"
    )

    def problems(self) -> Iterator[str]:
        if "none" in self.report_to and len(self.report_to) > 1:
            yield "--report-to lists 'none' together with others: remove 'none'."


class Dashboards(Feature):
    def __init__(self, cfg: Any):
        self.cfg, self.folder = cfg, Path(cfg.output_dir)
        self.own = self.folder / "dashboards"
        # on the main rank: name → object with methods `log(row, step=)` and `finish()`
        self.runs: dict[str, Any] = {}

    def record(self, done: int, record: dict) -> None:
        if "run" in record:  # the header, the first record of a log
            for name in self.cfg.report_to:
                self.runs[name] = self._open(name, record["run"], done)
            return
        row = {name: x for name, x in record.items() if name not in ("step", "eval/after")}
        for run in self.runs.values():
            run.log(row, step=done)
        if self.cfg.log_completions and "eval/after" not in record:
            self._completions(done)

    def _open(self, name: str, options: dict, start: int) -> Any:
        try:
            if name == "tensorboard":
                return TensorBoard(self.own / name, start)
            module = importlib.import_module(name)
        except ImportError as e:
            raise UserError(
                f"--report-to {name} needs its package: pip install 'nanogrpo[{name}]'"
            ) from e
        how: dict[str, Any] = {"resume": "allow" if start else "never", "embed": False}
        if name == "wandb":
            id_file = self.own / "wandb-id"
            self.own.mkdir(exist_ok=True)
            if not (start and id_file.exists()):
                id_file.write_text(uuid.uuid4().hex)
            how = {"resume": "allow", "id": id_file.read_text(), "dir": self.own}
        project = os.environ.get(f"{name.upper()}_PROJECT", "nanogrpo")
        label = self.cfg.run_name or self.folder.name
        try:
            module.init(project=project, name=label, config=options, **how)
            return module
        except Exception as e:  # without network or login, many kinds of errors are raised
            raise UserError(
                f"--report-to {name}: {first_sentence(e)}: log in, correct the {name.upper()}_… "
                "environment variables, or leave it out."
            ) from e

    def _completions(self, done: int) -> None:
        """Send the completions of a step as a table."""
        records = [*read_records(self.folder / f"completions/completions_{done:05d}.jsonl")]
        columns = list(dict.fromkeys(name for record in records for name in record))
        data = [[_cell(record.get(name)) for name in columns] for record in records]
        for name in self.runs.keys() - {"tensorboard"}:
            module = self.runs[name]
            table = module.Table(columns=columns, data=data, allow_mixed_types=True)
            module.log({"completions": table}, step=done)

    @contextlib.contextmanager
    def running(self, run: object) -> Iterator[None]:
        """Let the dashboards send the remaining data at the end of the run, even after an error."""
        try:
            yield
        finally:
            for opened in self.runs.values():
                opened.finish()


class TensorBoard:
    """A writer of event files, with the same methods as the other dashboards."""

    def __init__(self, folder: Path, start: int):
        from torch.utils.tensorboard import SummaryWriter

        # If a resumed run repeats steps, hide the old values of these steps.
        # A run that starts over repeats every step, and the evaluation at step 0.
        self.writer = SummaryWriter(folder, purge_step=start + 1 if start else 0)

    def log(self, row: dict[str, float], step: int) -> None:
        for name, value in row.items():
            self.writer.add_scalar(name, value, step)

    def finish(self) -> None:
        self.writer.close()


def _cell(value: Any) -> Any:
    """Return a value for a table: messages become text, and lone surrogates are escaped."""
    if isinstance(value, str | list):
        return str(value).encode(errors="backslashreplace").decode()
    return value
