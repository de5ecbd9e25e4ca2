"""The metrics of a step, under TRL's names. docs/metrics.md explains each one.

In: the samples, each micro-batch with the output of its loss (`Meter.add`), and the seconds of each
phase (`Clock`). Out: dicts that map names to numbers. Each mean is taken over all tokens or all
completions of the step and is never a mean of means. Read next: console.py, which writes them.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from nanogrpo.config import Config
from nanogrpo.distributed.world import World
from nanogrpo.grpo import mismatch
from nanogrpo.grpo.entropy import Bonus
from nanogrpo.grpo.spread import spreads
from nanogrpo.logs.tokens import TokenMeter
from nanogrpo.model.head import PolicyOut
from nanogrpo.types import PackedBatch, Sample


class Clock:
    """Measure the seconds of each phase of a step: `with clock("sample"): …`.

    On a GPU the end of a phase waits for the kernels that the phase launched.
    """

    def __init__(self):
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        with torch.profiler.record_function(phase):  # names the phase in a trace (--trace-step)
            yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds[phase] += time.perf_counter() - start


class Meter:
    """Collect the per-token results of a step's updates and reduce them once, at its end.

    Nothing waits for the GPU in between. bonus: the run's entropy bonus, whose coefficient may
    change after each update.
    """

    def __init__(self, cfg: Config, bonus: Bonus):
        self.cfg, self.entropy_bonus = cfg, bonus
        self.parts: list[dict[str, Tensor]] = []
        self.loss: Tensor | float = 0.0
        self.entropy_term: Tensor | float = 0.0  # its part of the loss
        self.norms: list[float] = []
        self.updates = 0
        self.first: int | None = None  # the first update with tokens
        self.tokens = TokenMeter(cfg) if cfg.log_tokens else None

    def add(self, batch: PackedBatch, out: PolicyOut) -> None:
        """Add the loss of one micro-batch."""
        self.entropy_bonus.add(batch, out)
        if self.tokens:
            self.tokens.add(batch, out, self.updates)
        part = {"sample": batch.sample, "entropy": out.entropy}
        level = "sequence" if out.by_sequence else "token"
        part |= {f"{level}:{name}": x for name, x in out.metrics.items()}
        if out.kl is not None:
            part["kl"] = out.kl
        self.first = self.updates if self.first is None else self.first
        # In the first update the weights are still those used for sampling, so any difference in
        # log-probs is a difference between trainer and engine.
        logp = self._without_dropout(batch, out)
        if self.updates == self.first and logp is not None:
            part["delta"] = logp - batch.sampling_logp
            if batch.importance is not None:
                part["importance"] = batch.importance
        part["update"] = torch.full_like(batch.sample, self.updates)
        self.parts.append(part)
        self.loss = self.loss + out.loss.detach()
        if batch.entropy_weight is not None:
            self.entropy_term = self.entropy_term + (batch.entropy_weight * out.entropy).sum()

    def _without_dropout(self, batch: PackedBatch, out: PolicyOut) -> Tensor | None:
        """Return the trainer's log-probs [M]. With --lora-dropout, those of the loss would add the
        dropout to the gap, so take the old ones, if the trainer has computed any.
        """
        if not self.cfg.lora_dropout:
            return out.logp
        return None if self.cfg.old_from_engine else batch.old_logp

    def end_update(self, norm: float) -> None:
        """End an optimizer step with this gradient norm. Every rank must call."""
        self.entropy_bonus.end_update()
        self.norms.append(norm)
        self.updates += 1

    def summary(self, world: World) -> dict[str, float]:
        """Return the metrics of the step over all ranks. Every rank must call."""
        loss = sum(world.gather(float(self.loss)))
        out = {
            "loss": loss / self.updates,
            "grad_norm": statistics.fmean(self.norms),
            **self.entropy_bonus.metrics(),
        }
        if self.entropy_bonus.on:
            bonus = sum(world.gather(float(self.entropy_term)))
            out["policy_loss"] = out["loss"] + bonus / self.updates
        found = spreads(self._vectors(), world.gather)
        if not found:  # every completion was masked
            return out
        out |= {name: spread.mean for name, spread in found.items() if not name.startswith("clip_")}
        if "clip_low" in found:
            out |= {
                "clip_ratio/low_mean": found["clip_low"].mean,
                "clip_ratio/low_min": found["clip_low by completion"].least,
                "clip_ratio/high_mean": found["clip_high"].mean,
                "clip_ratio/high_max": found["clip_high by completion"].most,
                "clip_ratio/region_mean": found["clip_low"].mean + found["clip_high"].mean,
            }
        if not any("delta" in part for part in self.parts):  # see _without_dropout
            return out
        corrected = any("importance" in part for part in self.parts)
        weight = self._joined("importance") if corrected else None
        return out | mismatch.compare(self._joined("delta"), weight, world.gather)

    def _joined(self, name: str) -> Tensor:
        """Return this rank's values of all micro-batches that have any."""
        return torch.cat([part[name].cpu() for part in self.parts if name in part])

    def _vectors(self) -> dict[str, Tensor]:
        """Return this rank's values by the name of their metric: one per token or completion.

        A rank has all tokens of an update that belong to one completion, so it can average them.
        """
        if not self.parts:
            return {}
        sample, update = self._joined("sample"), self._joined("update")
        # One number for each pair of completion and update.
        pair = update * (int(sample.max()) + 1) + sample if len(sample) else sample
        count = pair.bincount()

        def by_completion(values: Tensor) -> Tensor:
            return (pair.bincount(values.double()) / count)[count > 0]

        names = [name for name in self.parts[0] if name in ("entropy", "kl")]
        out = {name: self._joined(name) for name in names}
        for level, name in (key.split(":", 1) for key in self.parts[0] if ":" in key):
            values = self._joined(f"{level}:{name}")
            view = by_completion if level == "sequence" else torch.Tensor.double
            if name != "clip":
                out[name] = view(values)
                continue
            for side, bound in (("clip_low", -1), ("clip_high", 1)):
                clipped = values == bound
                out[side] = view(clipped)
                out[f"{side} by completion"] = by_completion(clipped)
        return out


def _given(samples: Sequence[Facts]) -> dict[str, list[float]]:
    """Return the rewards that apply, by function, and their sums. Leave out empty lists."""
    out = {f"rewards/{name}": [s.rewards[name] for s in samples] for name in samples[0].rewards}
    out["reward"] = [s.reward for s in samples]
    given = {name: [r for r in values if r is not None] for name, values in out.items()}
    return {name: values for name, values in given.items() if values}


def _mean_std(values: Sequence[float]) -> tuple[float, float]:
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0


class Facts(NamedTuple):
    """The facts about a sample that the metrics need. Ranks exchange these instead of tokens."""

    length: int  # tokens that the model wrote
    prompt_length: int
    stopped: bool
    rewards: dict[str, float | None]
    reward: float | None
    calls: int | None = None  # tool calls; None: there are no tools
    failures: int = 0  # of these calls


def facts(samples: Sequence[Sample], world: World) -> list[Facts]:
    """Return the facts about the samples of all ranks. Every rank must call."""

    def fact(s: Sample) -> Facts:
        length, prompt_length = len(s.model_token_indices), len(s.prompt.token_ids)
        calls = (s.conversation.calls, s.conversation.failures) if s.conversation else ()
        return Facts(length, prompt_length, s.stopped, s.rewards, s.reward, *calls)

    return world.concat(list(map(fact, samples)))


def _tools(samples: Sequence[Facts]) -> dict[str, float]:
    """Return the calls per completion, and the fraction of the calls that failed."""
    calls = [s.calls for s in samples if s.calls is not None]
    if not calls:
        return {}
    failed = sum(s.failures for s in samples) / sum(calls) if any(calls) else 0.0
    return {"tools/call_frequency": sum(calls) / len(samples), "tools/failure_frequency": failed}


def of_samples(samples: Sequence[Facts], std: Tensor) -> dict[str, float]:
    """Return the metrics of the samples: lengths, rewards, and the fraction of groups without a
    signal.

    std: the standard deviations that grpo/advantages.py returns.
    """
    out: dict[str, float] = {}
    lengths = [s.length for s in samples]
    ended = [n for n, s in zip(lengths, samples) if s.stopped] or [0]
    for name, values in (("length", lengths), ("terminated_length", ended)):
        out |= {f"completions/{how.__name__}_{name}": how(values) for how in (min, max)}
        out[f"completions/mean_{name}"] = statistics.fmean(values)
    out["completions/clipped_ratio"] = statistics.fmean(not s.stopped for s in samples)
    for name, given in _given(samples).items():
        mean, deviation = ("", "_std") if name == "reward" else ("/mean", "/std")
        out[name + mean], out[name + deviation] = _mean_std(given)
    out["frac_reward_zero_std"] = torch.isclose(std, torch.zeros_like(std)).float().mean().item()
    return out | _tools(samples)


def of_time(samples: Sequence[Facts], clock: Clock) -> dict[str, float]:
    """Return the seconds of each phase, and the speed in completion tokens per second."""
    tokens, total = sum(s.length for s in samples), sum(clock.seconds.values())
    fast = {
        f"throughput/{name}": tokens / clock.seconds[name]
        for name in ("sample", "train")
        if clock.seconds.get(name)
    }
    times = {f"time/{phase}": seconds for phase, seconds in clock.seconds.items()}
    return {"tokens_per_second": tokens / total, **fast, "step_time": total, **times}


def of_evaluation(samples: Sequence[Facts], n: int) -> dict[str, float]:
    """Return the metrics of an evaluation with n consecutive completions for each prompt.

    A reward that does not apply is left out, not 0. The mean of a reward is its mean@n. If a reward
    is 0 or 1, the chance that at least one of k completions has 1 is its pass@k, for k = 1, 2, 4, …
    up to n.
    """
    out = {f"eval/{name}": statistics.fmean(given) for name, given in _given(samples).items()}
    out |= {f"eval/{name}": value for name, value in _tools(samples).items()}
    groups = [samples[i : i + n] for i in range(0, len(samples), n)]
    for name in samples[0].rewards if n > 1 else ():
        table = [[s.rewards[name] for s in group] for group in groups]  # [prompts, n]
        if {r for row in table for r in row} <= {0.0, 1.0}:
            for k in sorted({n, *(2**i for i in range(n.bit_length()))}):
                chances = [pass_at_k(n, sum(map(bool, row)), k) for row in table]
                out[f"eval/pass@{k}/{name}"] = statistics.fmean(chances)
    return {**out, "eval/mean_length": statistics.fmean(s.length for s in samples)}


def pass_at_k(n: int, c: int, k: int) -> float:
    """Return the chance that k completions contain a right one, if c of n are right.

    1 - C(n-c, k) / C(n, k) averages over all choices of k of the n completions, so it is unbiased.
    Chen et al. 2021 (2107.03374), equation 1.
    """
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)
