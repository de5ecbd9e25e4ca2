"""Where a run's numbers go: `output_dir/metrics.jsonl`, a line on the console, and what
`--report-to` names (report.py).

In: the metrics of a step (metrics.py). Out: one JSON object a line: first what made the numbers
(options, versions, commit), then the steps and evaluations. A run that is killed leaves at most a
half-written last line; one that is resumed goes on in the same file, in which each step stands
once. Read next: completions.py, plot.py.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import platform
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.text import Text

from nanogrpo import __version__
from nanogrpo.config import Config
from nanogrpo.distributed.world import World
from nanogrpo.errors import UserError
from nanogrpo.logs import metrics
from nanogrpo.logs.completions import Completions, console
from nanogrpo.logs.metrics import Clock, Facts
from nanogrpo.logs.report import reporters

logger = logging.getLogger(__name__)
ROOT = Path(__file__).resolve().parents[2]

# On the console, in this order: the word shown and the metric.
SHOWN = {
    "reward": "reward",
    "accuracy": "rewards/accuracy_reward/mean",
    "length": "completions/mean_length",
    "entropy": "entropy",
    "kl": "kl",
    "clip": "clip_ratio/region_mean",
    "gap": "sampling/sampling_logp_difference/mean",
}


def commit() -> str:
    """The commit of this checkout, or "unknown": installed elsewhere, the package may lie inside a
    repository that is not its.
    """
    try:
        git = ["git", "rev-parse", "--show-toplevel", "HEAD"]
        answer = subprocess.run(
            git, capture_output=True, text=True, cwd=ROOT, check=False
        ).stdout.splitlines()
    except OSError:  # no git here
        return "unknown"
    return answer[1] if len(answer) == 2 and Path(answer[0]).resolve() == ROOT else "unknown"


def provenance(cfg: Config, world: World) -> dict:
    """What heads every log: the resolved options, versions, machine and commit that made the
    numbers below it.
    """
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


def joined(row: dict[str, float], more: dict[str, float]) -> dict[str, float]:
    """A row and what the rewards report. UserError where log_metric was given a name of ours: one
    of the two would be lost.
    """
    for name in more.keys() & row.keys():
        raise UserError(
            f"log_metric({name.removeprefix('eval/')!r}, …): the log already uses this name; choose another"
        )
    return row | more


class Log:
    """The main rank's alone; the others' calls do nothing."""

    def __init__(self, cfg: Config, world: World, start: int):
        self.cfg, self.main, self.path = cfg, world.main, Path(cfg.output_dir) / "metrics.jsonl"
        self.began, self.start, self.tokens = time.perf_counter(), start, 0
        self.completions = Completions(cfg, world, start)
        if self.main:
            self._keep_before(start)
            head = provenance(cfg, world)
            self._write(head)
            self.reporters = reporters(cfg, head, start)

    def _keep_before(self, start: int) -> None:
        """Makes an earlier log ready to be gone on with from step `start`, so that each step stands
        once in it.

        A resumed run repeats the steps after its checkpoint: their lines are dropped. Without one
        everything is repeated, and the old log is kept beside the new one.
        """
        with self._guarded():
            if not self.path.exists():
                return
            lines = self.path.read_bytes().splitlines()
            if start == 0 and any(b'"step"' in line for line in lines):
                aside = next(
                    p
                    for i in itertools.count(1)
                    if not (p := self.path.with_name(f"metrics-{i}.jsonl")).exists()
                )
                self.path.rename(aside)
                logger.warning(
                    "nothing to resume in %s: starting over, the old log is %s",
                    self.cfg.output_dir,
                    aside,
                )
                return
            kept = []
            for line, row in self._rows(lines):
                if "run" in row or row["step"] < start:
                    kept.append(line + b"\n")
                    self.tokens = row.get("num_tokens", self.tokens)
            aside = self.path.with_suffix(".tmp")
            aside.write_bytes(b"".join(kept))
            aside.replace(self.path)

    def _rows(self, lines: list[bytes]) -> Iterator[tuple[bytes, dict]]:
        for number, line in enumerate(lines, start=1):
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):  # not JSON, or not UTF-8, or brackets without end
                if number == len(lines):
                    return  # the last line of a killed run, half written
                row = None
            if not isinstance(row, dict) or not ("run" in row or isinstance(row.get("step"), int)):
                # What follows may be good, and what stood here is unknown: dropping either in
                # silence would falsify the log.
                raise UserError(
                    f"{self.path}:{number} is no line of a log: mend or remove it, then resume."
                )
            yield line, row

    def _write(self, row: dict) -> None:
        with self._guarded(), self.path.open("a") as f:
            f.write(json.dumps(row) + "\n")

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except OSError as e:
            raise UserError(
                f"{self.path} could not be written ({e.strerror}): make room; what it holds so far is whole."
            ) from e

    def step(
        self,
        step: int,
        samples: Sequence[Facts],
        row: dict[str, float],
        clock: Clock,
        more: dict[str, float] | None = None,
    ) -> None:
        """Writes one step. `row`: everything but tokens, times, and what the rewards report, which
        is `more`.
        """
        if not self.main:
            return
        self.tokens += sum(s.length + s.prompt_length for s in samples)
        row = joined(
            {**row, "num_tokens": self.tokens, **metrics.of_time(samples, clock)}, more or {}
        )
        self._report(step + 1, {"step": step, **row}, row)
        left = (
            (time.perf_counter() - self.began)
            / (step + 1 - self.start)
            * (self.cfg.max_steps - step - 1)
        )
        values = "  ".join(f"{k} {row[name]:.3g}" for k, name in SHOWN.items() if name in row)
        speed = (
            f"{row['tokens_per_second']:,.0f} tok/s  {int(left) // 60}:{int(left) % 60:02d} left"
        )
        console.print(
            Text(f"step {step + 1:>4}/{self.cfg.max_steps}  {values}  {speed}"), soft_wrap=True
        )

    def evaluation(
        self, step: int, samples: Sequence[Facts], more: dict[str, float] | None = None
    ) -> None:
        """Writes what greedy decoding of the held-out prompts gave after `step` steps; more:
        metrics beside the rewards.
        """
        if not self.main:
            return
        found = metrics.of_evaluation(samples)
        row = joined(found, {f"eval/{name}": value for name, value in (more or {}).items()})
        self._report(step, {"step": step - 1, "eval/after": step, **row}, row)
        shown = {
            n.removeprefix("eval/").removeprefix("rewards/"): value
            for n, value in found.items()
            if n != "eval/reward"
        }
        values = "  ".join(f"{name} {value:.3f}" for name, value in shown.items())
        console.print(
            Text.assemble((f"held-out, greedy, after {step} steps:", "bold"), f"  {values}"),
            soft_wrap=True,
        )

    def _report(self, done: int, line: dict, row: dict[str, float]) -> None:
        """To the file, and to the reporters as the state after `done` steps: rewards begin at 1,
        evaluations at 0.
        """
        self._write(line)
        for reporter in self.reporters:
            reporter.log(row, done)

    def close(self) -> None:
        """Lets the reporters send what they have kept."""
        for reporter in self.reporters if self.main else ():
            reporter.close()
