"""Two uses of the policy's entropy: training only on uncertain tokens, and a bonus for uncertainty.

In: the micro-batches of an optimizer step on this rank. Out: their `entropy_mask` and
`entropy_weight` [M], which the loss reads. Both are computed over the full optimizer step and all
ranks, so the gradient does not depend on the split into micro-batches. Both are off by default.
Read before: grpo/loss.py.
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


def quantile(values: Tensor, q: float, world: World) -> float:
    """Return the q-quantile of the values [n] of all ranks, interpolated linearly.

    Like torch.quantile, but without its limit of 2²⁴ values; inf if there are no values. Every rank
    must call.
    """
    together = torch.cat(world.gather(values))
    if not len(together):
        return math.inf
    position = q * (len(together) - 1)
    low, high = (
        together.kthvalue(1 + round_(position)).values.item() for round_ in (math.floor, math.ceil)
    )
    return low + (high - low) * (position - math.floor(position))


def keep_top(
    batches: Sequence[PackedBatch], entropies: Sequence[Tensor], share: float, world: World
) -> None:
    """Set `entropy_mask`, which keeps the `share` of the trained tokens with the highest entropy.

    Wang et al. 2025 (2506.01939). entropies: [M] per micro-batch, computed with the weights that
    sampled the tokens. The share is that of the tokens of the optimizer step on all ranks. Every
    rank must call.
    """
    values = [h.float().cpu() for h in entropies]
    trained = [h[b.weight.cpu() != 0] for h, b in zip(values, batches)]
    # As a tensor, the threshold is rounded to float32, as the values are.
    threshold = torch.tensor(quantile(torch.cat([torch.empty(0), *trained]), 1 - share, world))
    for batch, h in zip(batches, values):
        batch.entropy_mask = (h >= threshold).to(batch.weight.device)


class Bonus:
    """The entropy bonus: a loss term -coef · H, where H is the mean over the step's trained tokens.

    The coefficient can be adaptive, as in Skywork-OR1 (2505.22312): after each optimizer step it
    rises by `entropy_coef_delta` if the entropy is at or below the target, and falls otherwise. The
    bonus then applies only if the entropy of the previous optimizer step was at or below the
    target.

        bonus.weigh(batches) → for each batch: loss, bonus.add(batch, out) → bonus.end_update()

    step.pack calls `weigh`; metrics.Meter calls the others. Only `state` is kept from step to step,
    and checkpoints store it.
    """

    def __init__(self, cfg: Config, world: World, state: dict | None = None):
        self.cfg, self.world = cfg, world
        self.on = cfg.entropy_coef != 0 or cfg.use_adaptive_entropy
        # last_entropy is None until it has been measured
        self.state = state or {"entropy_coef": cfg.entropy_coef, "last_entropy": None}
        self.sums: list = [0.0, 0]  # entropy and number of tokens since the last update

    @staticmethod
    def tokens(batch: PackedBatch) -> Tensor:
        """Return a mask [M] bool of the tokens that get the bonus."""
        trained = batch.weight != 0
        return trained if batch.entropy_mask is None else trained & batch.entropy_mask

    def weigh(self, batches: Sequence[PackedBatch]) -> None:
        """Set `entropy_weight` for the next update. Every rank must call."""
        if not self.on:
            return
        count = sum(self.world.gather(sum(int(self.tokens(b).sum()) for b in batches)))
        last, coef = self.state["last_entropy"], self.state["entropy_coef"]
        if self.cfg.use_adaptive_entropy and (last is None or last > self.cfg.entropy_target):
            coef = 0.0
        for batch in batches:
            weight = torch.tensor(coef / max(count, 1), dtype=batch.weight.dtype)
            batch.entropy_weight = self.tokens(batch) * weight

    def add(self, batch: PackedBatch, out: PolicyOut) -> None:
        """Add the entropies of one micro-batch to the running mean."""
        if self.cfg.use_adaptive_entropy:
            tokens = self.tokens(batch)
            self.sums[0] = self.sums[0] + out.entropy[tokens].double().sum()
            self.sums[1] = self.sums[1] + tokens.sum()

    def end_update(self) -> None:
        """Adapt the coefficient after an optimizer step. Every rank must call."""
        cfg = self.cfg
        if not cfg.use_adaptive_entropy:
            return
        total, count = (sum(x) for x in zip(*self.world.gather([float(x) for x in self.sums])))
        self.sums = [0.0, 0]
        if not count:  # all completions were masked, so there is no entropy to compare
            return
        entropy = total / count
        step = cfg.entropy_coef_delta if entropy <= cfg.entropy_target else -cfg.entropy_coef_delta
        coef = self.state["entropy_coef"] + step
        coef = min(max(coef, cfg.entropy_coef_min), cfg.entropy_coef_max)
        self.state = {"entropy_coef": coef, "last_entropy": entropy}

    def metrics(self) -> dict[str, float]:
        return {"entropy_coef": self.state["entropy_coef"]} if self.on else {}
