"""The log of a run: `output_dir/metrics.jsonl`, a row on the console, and `--report-to`.

In: the metrics of a step (logs/metrics.py). Out: one JSON object per line. The first is the header,
with the options, versions and commit that produced the numbers; the steps and evaluations follow. A
killed run leaves at most a half-written last line. A resumed run continues in the same file and
logs no step twice. Read next: logs/progress.py (the console), logs/completions.py, logs/plot.py.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from nanogrpo import __version__
from nanogrpo.config import Config
from nanogrpo.distributed.world import World
from nanogrpo.errors import UserError
from nanogrpo.logs import metrics
from nanogrpo.logs.completions import Completions
from nanogrpo.logs.files import read_records, replace, set_aside, writing
from nanogrpo.logs.metrics import Clock, Facts
from nanogrpo.logs.no_signal import NoSignal
from nanogrpo.logs.progress import Progress, print_line
from nanogrpo.logs.report import REPORTERS
from nanogrpo.logs.tokens import TokenLog
from nanogrpo.types import Sample

logger = logging.getLogger(__name__)
ROOT = Path(__file__).resolve().parents[2]


def commit() -> str:
    """Return the commit of this checkout, or "unknown" if the package was installed elsewhere.

    An installed package may lie inside the repository of another project, whose commit must not be
    reported. So git is given the path of our own repository.
    """
    git = ["git", "--git-dir", str(ROOT / ".git"), "rev-parse", "HEAD"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):  # no git, no repository, or no commit
        return "unknown"


def provenance(cfg: Config, world: World) -> dict:
    """Return the header of a log: the options, versions, machine and commit behind the numbers."""
    return {
        "run": dataclasses.asdict(cfg),
        "commit": commit(),
        "versions": {
            "nanogrpo": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine(),
        "processes": world.size,
    }


class Log:
    """Write the log on the main rank. On the other ranks the methods do nothing."""

    def __init__(self, cfg: Config, world: World, start: int):
        self.cfg, self.main, self.path = cfg, world.main, Path(cfg.output_dir) / "metrics.jsonl"
        self.tokens = 0
        self.completions = Completions(cfg, world, start)
        self.token_log = TokenLog(cfg, world)  # in the same folder
        self.progress, self.no_signal = Progress(cfg, world, start), NoSignal(cfg, start)
        self.reporters: list = []
        if self.main:
            logged = self._truncate(start) if self.path.exists() else set()
            if missing := sorted(set(range(start)) - logged):
                logger.warning(
                    "%s has no record of %s, which the checkpoint has finished: the curves have a "
                    "gap there, and num_tokens leaves them out",
                    *(self.path, _ranges(missing)),
                )
            head = provenance(cfg, world)
            self._append(head, mode="a")
            self.reporters = [
                REPORTERS[name](cfg, head, start) for name in cfg.report_to if name != "none"
            ]

    def _truncate(self, start: int) -> set[int]:
        """Truncate the existing log to `start` steps, so a resumed run never logs a step twice.
        Return the steps that it has.

        A run that starts over keeps the old log under another name.
        """
        with writing(self.path):
            if start == 0 and b'"step"' in self.path.read_bytes():
                logger.warning(
                    "nothing to resume in %s: starting over, the old log is %s",
                    self.cfg.output_dir,
                    set_aside(self.path),
                )
                return set()
        kept, steps = [], set()
        for line, record in read_records(self.path):
            if "run" in record or record["step"] < start:
                kept.append(line + b"\n")
                self.tokens = record.get("num_tokens", self.tokens)
            if "run" not in record and "eval/after" not in record:
                steps.add(record["step"])
        replace(self.path, b"".join(kept), durable=True)
        return steps

    def step(
        self,
        step: int,
        samples: Sequence[Facts],
        record: Mapping[str, float],
        clock: Clock,
        logged: Mapping[str, float],
        advantages: Sequence[float],
    ) -> None:
        """Log a step.

        record: metrics other than tokens and times; logged: metrics of reward functions;
        advantages: of all samples.
        """
        if not self.main:
            return
        self.tokens += sum(s.length + s.prompt_length for s in samples)
        row = {**record, "num_tokens": self.tokens, **metrics.of_time(samples, clock)}
        self._log(step + 1, {"step": step}, row, logged)
        self.progress.step(step, row, [*samples[0].rewards])
        self.no_signal.step(samples, row, advantages)

    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Print and write the completions of a step if requested. Every rank must call."""
        records = self.completions.log(step, samples)
        if self.cfg.num_completions_to_print:
            self.progress.rows = 0  # the next row is far from the last header
        for reporter in self.reporters if records else ():
            reporter.completions(records, step + 1)

    def evaluation(self, step: int, samples: Sequence[Facts], logged: Mapping[str, float]) -> None:
        """Log the completions of the held-out prompts after `step` steps."""
        if not self.main:
            return
        n, temperature = self.cfg.num_generations_eval, self.cfg.eval_temperature
        row = metrics.of_evaluation(samples, n)
        logged = {f"eval/{name}": value for name, value in logged.items()}
        self._log(step, {"step": step - 1, "eval/after": step}, row, logged)
        names = [name for name in row if name != "eval/reward"]
        shown = [f"{n.removeprefix('eval/').removeprefix('rewards/')} {row[n]:.3f}" for n in names]
        how = f"{n} samples at temperature {temperature:g}" if temperature else "greedy"
        print_line(f"held-out, {how}, after {step} steps:  {'  '.join(shown)}")

    def _log(self, done: int, place: dict, row: dict, logged: Mapping[str, float]) -> None:
        """Append a record to the file, and send its metrics to the reporters for step `done`."""
        for name in logged.keys() & row.keys():
            raise UserError(
                f"log_metric({name.removeprefix('eval/')!r}, …): the log already uses this name; "
                "choose another"
            )
        self._append({**place, **row, **logged})
        for reporter in self.reporters:
            reporter.log({**row, **logged}, done)

    def _append(self, record: dict, mode: str = "r+") -> None:
        # "r+" does not create the file: if it was removed, its records are lost, and the run ends
        with writing(self.path), self.path.open(mode) as f:
            f.seek(0, os.SEEK_END)
            f.write(json.dumps(record) + "\n")

    def close(self) -> None:
        """Let the reporters send the records that they have not sent yet."""
        for reporter in self.reporters:
            reporter.close()


def _ranges(steps: Sequence[int]) -> str:
    """Return "step 3, steps 7 to 9" for [3, 7, 8, 9]; of many ranges, the first three."""
    starts = [n for i, n in enumerate(steps) if i == 0 or steps[i - 1] != n - 1]
    ends = [n for i, n in enumerate(steps) if i + 1 == len(steps) or steps[i + 1] != n + 1]
    names = [f"step {a}" if a == b else f"steps {a} to {b}" for a, b in zip(starts, ends)]
    return ", ".join(names[:3] + (["…"] if names[3:] else []))
