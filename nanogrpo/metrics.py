"""What a step was like: TRL's metric names, one JSON line and one console line a step. docs/metrics.md says what each means.

In: the step's samples, and each micro-batch with what its loss gave (`Meter.add`). Out: `metrics.jsonl`, the console, a table of
completions on request. Means are over tokens or completions of the whole step, never means of means. Read next: plot.py.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import platform
import statistics
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor

from nanogrpo import __version__, mismatch
from nanogrpo.batch import PackedBatch, Sample
from nanogrpo.config import Config
from nanogrpo.errors import UserError
from nanogrpo.ops import PolicyOut
from nanogrpo.world import World

console = Console(stderr=True)  # is given Text: a str's brackets would be read as markup, "[/INST]" as an end of nothing
logger = logging.getLogger(__name__)


class Clock:
    """Seconds by phase: `with clock("sample"): …`. On a GPU each phase waits for its kernels, so that the time is its own."""

    def __init__(self):
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds[phase] += time.perf_counter() - start


class Meter:
    """Per-token results of a step's updates, kept as they come and reduced once at the end: no wait for the GPU in between."""

    def __init__(self):
        self.parts: list[dict[str, Tensor]] = []
        self.loss: Tensor | float = 0.0
        self.bonus: Tensor | None = None  # what the entropy took off the loss; None: no such term
        self.norms: list[float] = []
        self.updates = 0
        self.first: int | None = None  # the first update with tokens

    def add(self, batch: PackedBatch, out: PolicyOut) -> None:
        part = {"sample": batch.sample, "entropy": out.entropy}
        level = "sequence" if out.by_sequence else "token"
        part |= {f"{level}:{name}": x for name, x in {"clip": out.clip, **(out.seen or {})}.items() if x is not None}
        if out.kl is not None:
            part["kl"] = out.kl
        self.first = self.updates if self.first is None else self.first
        if self.updates == self.first:  # the weights are still those that sampled: what differs is trainer against engine
            part["delta"] = out.logp - batch.sampling_logp
            if batch.importance is not None:
                part["importance"] = batch.importance
        part["update"] = torch.full_like(batch.sample, self.updates)
        self.parts.append(part)
        self.loss = self.loss + out.loss.detach()
        if batch.entropy_weight is not None:
            bonus = (batch.entropy_weight * out.entropy).sum()
            self.bonus = bonus if self.bonus is None else self.bonus + bonus

    def end_update(self, norm: float) -> None:
        self.norms.append(norm)
        self.updates += 1

    def summary(self, world: World) -> dict[str, float]:
        """The step's metrics over all ranks; every rank must call, and gets the same."""
        loss = sum(world.gather(float(self.loss)))
        out = {"loss": loss / max(self.updates, 1), "grad_norm": statistics.fmean(self.norms) if self.norms else 0.0}
        if self.bonus is not None:
            out["policy_loss"] = out["loss"] + sum(world.gather(float(self.bonus))) / max(self.updates, 1)
        parts = world.concat([{name: t.float().cpu() for name, t in part.items()} for part in self.parts])
        if not sum(len(part["sample"]) for part in parts):  # every completion was masked
            return out

        def joined(name: str) -> Tensor:
            return torch.cat([part[name] for part in parts if name in part])

        out["entropy"] = joined("entropy").mean().item()
        if "kl" in parts[0]:
            out["kl"] = joined("kl").mean().item()
        ids = torch.stack([joined("update"), joined("sample")]).long()
        _, index, count = ids.unique(dim=1, return_inverse=True, return_counts=True)  # one id a completion and update

        def by_sample(values: Tensor) -> Tensor:
            return torch.zeros(len(count)).index_add_(0, index, values) / count

        for level, name in (key.split(":", 1) for key in parts[0] if ":" in key):
            values = joined(f"{level}:{name}")
            mean = (lambda x: by_sample(x).mean().item()) if level == "sequence" else (lambda x: x.mean().item())
            if name != "clip":
                out[name] = mean(values)
                continue
            low, high = (values == -1).float(), (values == 1).float()
            out |= {
                "clip_ratio/low_mean": mean(low),
                "clip_ratio/low_min": by_sample(low).min().item(),
                "clip_ratio/high_mean": mean(high),
                "clip_ratio/high_max": by_sample(high).max().item(),
                "clip_ratio/region_mean": mean(low + high),
            }
        corrected = any("importance" in part for part in parts)
        return out | mismatch.compare(joined("delta"), joined("importance") if corrected else None)


def _mean_std(values: Sequence[float]) -> tuple[float, float]:
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0


class Facts(NamedTuple):
    """What the metrics need of a sample: the ranks share these, not the tokens."""

    length: int
    prompt_length: int
    stopped: bool
    rewards: dict[str, float | None]
    reward: float | None


def facts(samples: Sequence[Sample], world: World) -> list[Facts]:
    """Of the samples of all ranks; every rank must call."""
    return world.concat([Facts(len(s.token_ids), len(s.prompt.token_ids), s.stopped, s.rewards, s.reward) for s in samples])


def of_samples(samples: Sequence[Facts], std: Tensor) -> dict[str, float]:
    """Metrics of a generation: lengths, rewards, and how many groups carry no signal (`std`: of grpo.advantages)."""
    out: dict[str, float] = {}
    lengths = [s.length for s in samples]
    ended = [n for n, s in zip(lengths, samples) if s.stopped] or [0]
    for name, values in (("length", lengths), ("terminated_length", ended)):
        out |= {f"completions/{how.__name__}_{name}": how(values) for how in (min, max)}
        out[f"completions/mean_{name}"] = statistics.fmean(values)
    out["completions/clipped_ratio"] = statistics.fmean(not s.stopped for s in samples)
    for name in samples[0].rewards:
        given = [r for s in samples if (r := s.rewards[name]) is not None]
        if given:
            out[f"rewards/{name}/mean"], out[f"rewards/{name}/std"] = _mean_std(given)
    given = [s.reward for s in samples if s.reward is not None]
    if given:
        out["reward"], out["reward_std"] = _mean_std(given)
    out["frac_reward_zero_std"] = torch.isclose(std, torch.zeros_like(std)).float().mean().item()
    return out


def provenance(cfg: Config, world: World) -> dict:
    """What heads every log: the resolved options, versions, machine and commit that made the numbers below it."""
    try:
        git = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent)
        commit = git.stdout.strip() if git.returncode == 0 else "unknown"
    except OSError:  # no git here
        commit = "unknown"
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    return {
        "run": dataclasses.asdict(cfg),
        "commit": commit,
        "versions": {"nanogrpo": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "device": device,
        "processes": world.size,
    }


class Log:
    """`output_dir/metrics.jsonl` and the console: the main rank's alone, the others' calls do nothing."""

    def __init__(self, cfg: Config, world: World, start: int):
        self.cfg, self.main, self.path = cfg, world.main, Path(cfg.output_dir) / "metrics.jsonl"
        self.began, self.start, self.tokens = time.perf_counter(), start, 0
        if self.main:
            self._keep_before(start)
            self._write(provenance(cfg, world))

    def _keep_before(self, start: int) -> None:
        """Makes an earlier log ready to be gone on with from step `start`, so that each step stands once in it.

        A resumed run repeats the steps after its checkpoint: their lines are dropped. Without one everything is repeated,
        and the old log is kept beside the new one.
        """
        with self._guarded():
            if not self.path.exists():
                return
            lines = self.path.read_bytes().splitlines()
            if start == 0 and any(b'"step"' in line for line in lines):
                aside = next(p for i in itertools.count(1) if not (p := self.path.with_name(f"metrics-{i}.jsonl")).exists())
                self.path.rename(aside)
                logger.warning("nothing to resume in %s: starting over, the old log is %s", self.cfg.output_dir, aside)
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
                # What follows may be good, and what stood here is unknown: dropping either in silence would falsify the log.
                raise UserError(f"{self.path}:{number} is no line of a log: mend or remove it, then resume.")
            yield line, row

    def _write(self, row: dict) -> None:
        with self._guarded(), self.path.open("a") as f:
            f.write(json.dumps(row) + "\n")

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except OSError as e:
            raise UserError(f"{self.path} could not be written ({e.strerror}): make room; what it holds so far is whole.") from e

    def step(self, step: int, samples: Sequence[Facts], row: dict[str, float], clock: Clock) -> None:
        """Writes one step. `row`: everything but tokens and times."""
        if not self.main:
            return
        tokens = sum(s.length for s in samples)
        self.tokens += tokens + sum(s.prompt_length for s in samples)
        total = sum(clock.seconds.values())
        times = {f"time/{phase}": seconds for phase, seconds in clock.seconds.items()}
        row = {"step": step, **row, "num_tokens": self.tokens, "tokens_per_second": tokens / total, "step_time": total, **times}
        self._write(row)
        left = (time.perf_counter() - self.began) / (step + 1 - self.start) * (self.cfg.max_steps - step - 1)
        shown = {"reward": "reward", "accuracy": "rewards/accuracy_reward/mean", "length": "completions/mean_length"}
        shown |= {
            "entropy": "entropy",
            "kl": "kl",
            "clip": "clip_ratio/region_mean",
            "gap": "sampling/sampling_logp_difference/mean",
        }
        values = "  ".join(f"{k} {row[name]:.3g}" for k, name in shown.items() if name in row)
        speed = f"{row['tokens_per_second']:,.0f} tok/s  {int(left) // 60}:{int(left) % 60:02d} left"
        console.print(Text(f"step {step + 1:>4}/{self.cfg.max_steps}  {values}  {speed}"), soft_wrap=True)

    def evaluation(self, step: int, samples: Sequence[Facts], more: dict[str, float] | None = None) -> None:
        """Writes what greedy decoding of the held-out prompts gave after `step` steps; more: metrics beside the rewards."""
        if not self.main:
            return
        row: dict[str, float] = {f"eval/{name}": value for name, value in (more or {}).items()}
        for name in samples[0].rewards:
            given = [r for s in samples if (r := s.rewards[name]) is not None]  # as in training: None is not a 0
            if given:
                row[f"eval/rewards/{name}"] = statistics.fmean(given)
        row["eval/mean_length"] = statistics.fmean(s.length for s in samples)
        self._write({"step": step - 1, "eval/after": step, **row})
        names = [name.removeprefix("eval/").removeprefix("rewards/") for name in row]
        values = "  ".join(f"{name} {value:.3f}" for name, value in zip(names, row.values()))
        console.print(Text.assemble((f"held-out, greedy, after {step} steps:", "bold"), f"  {values}"), soft_wrap=True)


def print_completions(samples: Sequence[Sample], count: int) -> None:
    """A table of the first `count` completions with their rewards, as TRL's log_completions shows."""
    table = Table("prompt", "completion", "reward", "advantage", show_lines=True)
    for s in samples[:count]:
        prompt = s.prompt.text if isinstance(s.prompt.text, str) else s.prompt.text[-1]["content"]
        reward = "-" if s.reward is None else f"{s.reward:.2f}"
        table.add_row(_plain(prompt[-200:]), _plain(s.text[-400:]), reward, f"{s.advantage:+.2f}")
    console.print(table)


def _plain(text: str) -> Text:
    """As it is, but for the characters that would command the terminal: a model may write those, too."""
    return Text("".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text))
