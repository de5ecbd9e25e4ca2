"""Two uses of the policy's entropy: training only the tokens where it was least certain, and a
bonus for staying uncertain.

In: the micro-batches of an optimizer step on this rank. Out: their `entropy_mask` and
`entropy_weight` [M], which grpo.loss reads. Both are of the whole optimizer step over all ranks, so
that no split into micro-batches changes the gradient. Read before: grpo.py. Read next:
experience.py (which calls `keep_top`), train.py (which calls `Bonus`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from nanogrpo.config import Config
from nanogrpo.distributed.world import World
from nanogrpo.model.head import PolicyOut
from nanogrpo.types import PackedBatch


def order(values: Tensor) -> Tensor:
    """float32 → integers from 0 to 2³² - 1 in the same order: of a float's bits, those of the
    negatives run backwards.
    """
    bits = values.float().view(torch.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() + 2**31


def kth(values: Tensor, k: int, world: World) -> float:
    """The k-th smallest (from 0) of the values of all ranks, float32. Exact for any number of them,
    and none is sent.

    Its bits are found from the highest byte down: in each round the ranks add up how many values,
    among those that agree so far, have which next byte. Every rank must call.
    """
    keys, found = order(values), 0
    for shift in (24, 16, 8, 0):
        counts = torch.bincount((keys >> shift) & 255, minlength=256)  # [256]
        below = torch.tensor(world.gather(counts.tolist())).sum(0).cumsum(0)  # [256]
        byte = int((below > k).nonzero()[0])
        k -= int(below[byte - 1]) if byte else 0
        keys = keys[(keys >> shift) & 255 == byte]
        found = found << 8 | byte
    bits = torch.tensor(found - 2**31, dtype=torch.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).view(torch.float32).item()


def quantile(values: Tensor, q: float, world: World) -> float:
    """torch.quantile (linear interpolation) of the values of all ranks, without its limit of 2²⁴.
    Every rank must call.
    """
    count = sum(world.gather(len(values)))
    if not count:
        return math.inf
    place = q * (count - 1)
    low, high = (kth(values, k, world) for k in (math.floor(place), math.ceil(place)))
    return low + (high - low) * (place - math.floor(place))


def keep_top(
    batches: Sequence[PackedBatch], entropies: Sequence[Tensor], share: float, world: World
) -> None:
    """Sets `entropy_mask`: the `share` of an optimizer step's tokens where the policy was least
    certain. Every rank must call.

    Wang et al. 2025 (2506.01939). entropies: [M] of each micro-batch, under the weights that
    sampled.
    """
    values = [h.float().cpu() for h in entropies]
    trained = [h[b.weight.cpu() != 0] for h, b in zip(values, batches)]
    # rounded to float32, as they are
    least = torch.tensor(quantile(torch.cat([torch.empty(0), *trained]), 1 - share, world))
    for batch, h in zip(batches, values):
        batch.entropy_mask = (h >= least).to(batch.weight.device)


class Bonus:
    """-coef · mean H, the mean over the trained tokens of an optimizer step, and the adaptive
    coefficient of Skywork-OR1 (2505.22312): after each optimizer step up by `entropy_coef_delta` if
    the entropy was at or below the target, else down. There is no bonus in a step after one whose
    entropy was above it.

        bonus.weigh(batches) → each batch: loss, bonus.add(batch, out) → bonus.end_update()

    What it knows between steps is two numbers, `state`, which a checkpoint keeps.
    """

    def __init__(self, cfg: Config, world: World, state: dict | None = None):
        self.cfg, self.world = cfg, world
        self.on = cfg.entropy_coef != 0 or cfg.use_adaptive_entropy
        # None: none was measured
        self.state = state or {"entropy_coef": cfg.entropy_coef, "last_entropy": None}
        self.sums = [0.0, 0.0]  # of the entropy, and of the tokens

    @staticmethod
    def tokens(batch: PackedBatch) -> Tensor:
        """[M] bool: those that the bonus is of."""
        trained = batch.weight != 0
        return trained if batch.entropy_mask is None else trained & batch.entropy_mask

    def weigh(self, batches: Sequence[PackedBatch]) -> None:
        """Sets `entropy_weight` for the next update. Every rank must call."""
        if not self.on:
            return
        count = sum(self.world.gather(sum(int(self.tokens(b).sum()) for b in batches)))
        last = self.state["last_entropy"]
        held = self.cfg.use_adaptive_entropy and (last is None or last > self.cfg.entropy_target)
        factor = 0.0 if held else self.state["entropy_coef"] / max(count, 1)
        for batch in batches:
            batch.entropy_weight = self.tokens(batch) * torch.tensor(
                factor, dtype=batch.weight.dtype
            )

    def add(self, batch: PackedBatch, out: PolicyOut) -> None:
        if self.cfg.use_adaptive_entropy:
            tokens = self.tokens(batch)
            self.sums = [
                self.sums[0] + out.entropy[tokens].double().sum(),
                self.sums[1] + tokens.sum(),
            ]

    def end_update(self) -> None:
        """Moves the coefficient. Every rank must call."""
        if not self.cfg.use_adaptive_entropy:
            return
        total, count = (sum(x) for x in zip(*self.world.gather([float(x) for x in self.sums])))
        self.sums = [0.0, 0.0]
        if not count:  # every completion was masked: nothing was measured
            return
        entropy, cfg = total / count, self.cfg
        step = cfg.entropy_coef_delta if entropy <= cfg.entropy_target else -cfg.entropy_coef_delta
        coef = min(
            max(self.state["entropy_coef"] + step, cfg.entropy_coef_min), cfg.entropy_coef_max
        )
        self.state = {"entropy_coef": coef, "last_entropy": entropy}

    def metrics(self) -> dict[str, float]:
        return {"entropy_coef": self.state["entropy_coef"]} if self.on else {}
