"""Compute the metrics of a step. The metrics have the same names as in TRL, and docs/metrics.md
explains them.

In: the samples, each micro-batch with the output of its loss (`Meter.add`), and the seconds of each
phase (`Clock`). Out: dicts that map names to numbers. Each mean, except for `loss` and `grad_norm`,
is computed directly over all tokens or all completions of the step. It is never a mean of means.
Read next: console.py, which writes the metrics.
"""

import math
import resource
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from nanogrpo.distributed.world import World
from nanogrpo.feature import Feature
from nanogrpo.grpo import mismatch
from nanogrpo.model.head import PolicyOut
from nanogrpo.types import Facts, PackedBatch, Sample


class Clock:
    """Measure the seconds of each phase of a step: `with clock("sample"): …`.

    On a GPU, a phase ends when all kernels that it launched have finished.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        with torch.profiler.record_function(phase):  # names the phase in a profile
            yield
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.seconds[phase] += time.perf_counter() - start


class Meter:
    """Collect the per-token results of a step's updates, and reduce them once, at the step's end.

    `add` does not make the host wait for the GPU.
    """

    def __init__(self, features: Sequence[Feature] = ()):
        self.features = features
        self.parts: list[dict[str, Tensor]] = []
        self.loss: Tensor | float = 0.0
        self.norms: list[float] = []
        self.updates = 0

    def add(self, batch: PackedBatch, out: PolicyOut) -> None:
        """Add the loss and the per-token results of one micro-batch."""
        for feature in self.features:
            feature.measured(batch, out, self.updates)
        update = torch.full_like(batch.sample, self.updates)
        part = {"sample": batch.sample, "update": update, "entropy": out.entropy}
        if out.kl is not None:
            part["kl"] = out.kl
        part |= out.metrics
        # In the first update, trainer and engine have the same weights.
        # So if log-probs differ, the reason is how trainer and engine compute them.
        if not self.updates:
            part["delta"] = out.logp - batch.sampling_logp
        self.parts.append(part)
        self.by_sequence = out.metrics if out.by_sequence else {}
        self.loss = self.loss + out.loss.detach()

    def end_update(self, norm: float) -> None:
        """Count an optimizer step and keep its gradient norm. Every rank must call this method."""
        self.norms.append(norm)
        self.updates += 1

    def summary(self, world: World) -> dict[str, float]:
        """Return the metrics of the step over all ranks. Every rank must call this method."""
        out = {
            "loss": sum(world.gather(float(self.loss))) / self.updates,
            "grad_norm": statistics.fmean(self.norms),
        }
        for name, spread in world.spreads(self._vectors()).items():
            out[name] = getattr(spread, name[-3:], spread.mean)  # .min, .max, or the mean
        if "clip_ratio/low_mean" in out:
            out["clip_ratio/region_mean"] = out["clip_ratio/low_mean"] + out["clip_ratio/high_mean"]
        return out

    def _joined(self, name: str) -> Tensor:
        """Return this rank's values of one metric, joined over all micro-batches."""
        return torch.cat([part[name].cpu() for part in self.parts if name in part])

    def _vectors(self) -> dict[str, Tensor]:
        """Return this rank's values of each metric: one value per token or per completion.

        In each update, all tokens of a completion are on the same rank, so this rank can average
        them.
        """
        sample, update = self._joined("sample"), self._joined("update")
        # Each pair of an update and a completion gets its own number.
        pair = update * (int(sample.max()) + 1) + sample if len(sample) else sample
        count = pair.bincount()

        def by_completion(values: Tensor) -> Tensor:
            return (pair.bincount(values.double()) / count)[count > 0]

        out = {}
        for name in self.parts[0]:
            if name in ("sample", "update", "delta"):
                continue
            values = self._joined(name)
            view = by_completion if name in self.by_sequence else torch.Tensor.double
            if name != "clip":
                out[name] = view(values)
                continue
            low, high = values == -1, values == 1
            out |= {
                "clip_ratio/low_mean": view(low),
                "clip_ratio/low_min": by_completion(low),
                "clip_ratio/high_mean": view(high),
                "clip_ratio/high_max": by_completion(high),
            }
        return out | mismatch.vectors(self._joined("delta"))


def _given(samples: Sequence[Facts]) -> dict[str, list[float]]:
    """Return the rewards of each function and their sums. Rewards that do not apply are left out.
    Leave out empty lists.
    """
    out = {f"rewards/{name}": [s.rewards[name] for s in samples] for name in samples[0].rewards}
    out["reward"] = [s.reward for s in samples]
    return {
        name: given
        for name, values in out.items()
        if (given := [r for r in values if r is not None])
    }


def facts(samples: Sequence[Sample], world: World) -> list[Facts]:
    """Return the facts about the samples of all ranks. Every rank must call this function."""
    return world.concat([sample.facts for sample in samples])


def of_samples(samples: Sequence[Facts], std: Tensor) -> dict[str, float]:
    """Return metrics of the samples: lengths, rewards, and the fraction of groups with equal
    rewards.

    `std` holds the standard deviations that grpo/advantages.py returns.
    """
    out: dict[str, float] = {}
    for name, values in (
        ("length", [s.length for s in samples]),
        ("terminated_length", [s.length for s in samples if s.stopped] or [0]),
    ):
        for how, reduce in (("min", min), ("max", max), ("mean", statistics.fmean)):
            out[f"completions/{how}_{name}"] = reduce(values)
    out["completions/clipped_ratio"] = statistics.fmean(not s.stopped for s in samples)
    for name, given in _given(samples).items():
        mean, deviation = ("", "_std") if name == "reward" else ("/mean", "/std")
        out[name + mean] = statistics.fmean(given)
        out[name + deviation] = statistics.stdev(given) if len(given) > 1 else 0.0
    out["frac_reward_zero_std"] = (std <= 1e-8).float().mean().item()  # as torch.isclose decides
    return out


def of_memory(world: World) -> dict[str, float]:
    """Return the peak memory in GiB. Every rank must call this function.

    The peak on the host is the highest peak of any process so far. The peak on a GPU is the highest
    peak of any rank's tensors since the last call.
    """
    # the unit of ru_maxrss is KiB
    peaks = {"memory/host_peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}
    if world.device.type == "cuda":
        peaks["memory/peak_gib"] = torch.cuda.max_memory_allocated(world.device) / 2**30
        torch.cuda.reset_peak_memory_stats(world.device)
    return {name: max(world.gather(gib)) for name, gib in peaks.items()}


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
    """Return the metrics of an evaluation. `samples` holds n consecutive completions per prompt.

    A reward that does not apply is left out and does not count as 0. The mean of a reward is the
    metric mean@n. If all rewards of a function are 0 or 1, pass@k is the chance that at least one
    of k completions has reward 1. The metric pass@k is computed for k = 1, 2, 4, … up to n.
    """
    out = {f"eval/{name}": statistics.fmean(given) for name, given in _given(samples).items()}
    groups = [samples[i : i + n] for i in range(0, len(samples), n)]
    for name in samples[0].rewards if n > 1 else ():
        table = [[s.rewards[name] for s in group] for group in groups]  # [prompts, n]
        if {r for row in table for r in row} <= {0.0, 1.0}:
            for k in sorted({n, *(2**i for i in range(n.bit_length()))}):
                out[f"eval/pass@{k}/{name}"] = statistics.fmean(
                    pass_at_k(n, sum(map(bool, row)), k) for row in table
                )
    return {**out, "eval/mean_length": statistics.fmean(s.length for s in samples)}


def pass_at_k(n: int, c: int, k: int) -> float:
    """Return the chance that at least one of k completions is correct, if c of n are correct.

    The estimate 1 - C(n-c, k) / C(n, k) is unbiased, because it averages over all ways to choose k
    of the n completions (Chen et al. 2021, 2107.03374, equation 1).
    """
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)
