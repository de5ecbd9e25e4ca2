"""Write the log of a run to `output_dir/metrics.jsonl`, and one row per step to the console.

In: the metrics of a step (logs/metrics.py). Out: one JSON object per line. The first line is a
header with the options, versions and commit of the run. The lines after the header are steps and
evaluations. The features of the run receive each record, too. If a run is killed, at most the last
line of the log is incomplete. A resumed run continues in the same file and logs no step twice. Read
next: logs/progress.py (the console), extras/plot.py, extras/dashboards.py.
"""

import contextlib
import dataclasses
import json
import logging
import platform
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from nanogrpo import __version__
from nanogrpo.config import Config
from nanogrpo.distributed.world import World
from nanogrpo.errors import UserError
from nanogrpo.feature import Feature
from nanogrpo.logs import metrics
from nanogrpo.logs.files import read_records, replace, set_aside, writing
from nanogrpo.logs.metrics import Clock, Facts
from nanogrpo.logs.progress import Progress, print_line

logger = logging.getLogger(__name__)
ROOT = Path(__file__).resolve().parents[2]


def commit() -> str:
    """Return the commit of this checkout, or "unknown" if the package was installed elsewhere.

    An installed package may lie inside the repository of another project. The commit of that
    project must not be reported, so git is given the path of our own repository.
    """
    git = ["git", "--git-dir", str(ROOT / ".git"), "rev-parse", "--verify", "HEAD"]
    with contextlib.suppress(OSError):  # no git
        return subprocess.run(git, capture_output=True, text=True).stdout.strip() or "unknown"
    return "unknown"


def provenance(cfg: Config, world: World) -> dict:
    """Return the header of a log: the options, versions, device and commit of the run."""
    gpu = world.device.type == "cuda"
    return {
        "run": dataclasses.asdict(cfg),
        "commit": commit(),
        "versions": {
            "nanogrpo": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "device": torch.cuda.get_device_name(world.device) if gpu else platform.machine(),
        "processes": world.size,
    }


class Log:
    """Every rank must call each method, but only the main rank writes."""

    def __init__(self, cfg: Config, world: World, start: int, features: Sequence[Feature] = ()):
        self.cfg, self.main, self.path = cfg, world.main, Path(cfg.output_dir) / "metrics.jsonl"
        self.features, self.tokens = features, 0
        self.progress = Progress(cfg, world.device.type, start)
        kept = self._truncate(start) if self.main and self.path.exists() else []
        # whether the log has the evaluation after `start` steps
        self.evaluated = world.any(start in {record.get("eval/after") for record in kept})
        if self.main:
            logged = {record.get("step") for record in kept if "eval/after" not in record}
            if missing := {*range(start)} - logged:
                logger.warning(
                    "%s has no record of %d finished steps, beginning with step %d",
                    self.path,
                    len(missing),
                    min(missing),
                )
            self._append(start, provenance(cfg, world), {})

    def _truncate(self, start: int) -> list[dict]:
        """Truncate the existing log to `start` steps, so a resumed run never logs a step twice.
        Return its records.

        If the run starts over, the old log is kept under another name.
        """
        if start == 0 and b'"step"' in self.path.read_bytes():
            logger.warning(
                "nothing to resume in %s: starting over, the old log is %s",
                self.path.parent,
                set_aside(self.path),
            )
            return []
        # headers have no step
        kept = [r for r in read_records(self.path) if r.get("step", -1) < start]
        for record in kept:
            self.tokens = record.get("num_tokens", self.tokens)
        replace(self.path, "".join(json.dumps(record) + "\n" for record in kept).encode())
        return kept

    def step(
        self,
        step: int,
        facts: Sequence[Facts],
        record: Mapping[str, float],
        clock: Clock,
        logged: Mapping[str, float],
    ) -> None:
        """Log a step.

        `facts` describes the samples of all ranks. `record` holds all metrics except tokens and
        times. `logged` holds the metrics that reward functions have logged.
        """
        if not self.main:
            return
        self.tokens += sum(s.length + s.prompt_length for s in facts)
        row = {"step": step, **record, "num_tokens": self.tokens, **metrics.of_time(facts, clock)}
        self._append(step + 1, row, logged)
        self.progress.step(step, row, [*facts[0].rewards])

    def evaluation(self, done: int, facts: Sequence[Facts], logged: Mapping[str, float]) -> None:
        """Log the metrics of the held-out prompts after `done` steps."""
        if not self.main:
            return
        n, temperature = self.cfg.num_generations_eval, self.cfg.eval_temperature
        row = metrics.of_evaluation(facts, n)
        logged = {f"eval/{name}": value for name, value in logged.items()}
        self._append(done, {"step": done - 1, "eval/after": done, **row}, logged)
        shown = [
            f"{name.removeprefix('eval/').removeprefix('rewards/')} {value:.3f}"
            for name, value in row.items()
            if name != "eval/reward"
        ]
        how = f"{n} samples at temperature {temperature:g}" if temperature else "greedy"
        print_line(f"held-out, {how}, after {done} steps:  {'  '.join(shown)}")

    def _append(self, done: int, record: dict, logged: Mapping[str, float]) -> None:
        """Append a record and the metrics of reward functions to the file, and pass both to the
        features.
        """
        for name in logged.keys() & {"run", *record}:
            raise UserError(
                f"log_metric({name.removeprefix('eval/')!r}, …): the log already uses this name; "
                "choose another"
            )
        record = {**record, **logged}
        with writing(self.path), self.path.open("a") as f:
            f.write(json.dumps(record) + "\n")
        for feature in self.features:
            feature.record(done, record)
