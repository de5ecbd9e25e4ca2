"""Two uses of the policy's entropy: training only on uncertain tokens, and a bonus for uncertainty.

In: the micro-batches of an optimizer step on this rank. Out: the `importance` and the
`entropy_weight` [M] of each micro-batch, for the loss. The importance is 0 for tokens that are not
trained on. `importance` and `entropy_weight` are computed over the full optimizer step and all
ranks, so the gradient does not depend on the split into micro-batches. Read before: grpo/loss.py.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanogrpo.distributed.world import World
from nanogrpo.extras.options import EntropyOptions
from nanogrpo.feature import Feature
from nanogrpo.grpo.loss import logp_of
from nanogrpo.model.head import PolicyOut
from nanogrpo.run.setup import Run
from nanogrpo.types import PackedBatch


class Entropy(Feature):
    # The bonus does not depend on the advantage, so it also applies where the advantage is 0.
    # A completion's entropies also affect which tokens of other completions are trained on.
    all_gradients = True

    loss: Tensor | float = 0.0  # since the last step
    bonus: Tensor | float = 0.0  # the bonus, as a part of the loss

    @torch.no_grad()
    def batches(self, run: Run, batches: Sequence[PackedBatch]) -> None:
        cfg: Any = run.cfg
        entropies = []
        for batch in batches if cfg.top_entropy_quantile < 1 else ():
            logp, entropy = run.model.forward_strip(batch, logp_of(batch, cfg))
            entropies.append(entropy)
            if cfg.updates_per_step > 1 and batch.old_logp is None:
                batch.old_logp = logp
        prepare(batches, entropies, cfg, run.world)

    def measured(self, batch: PackedBatch, out: PolicyOut, update: int) -> None:
        if batch.entropy_weight is not None:
            self.loss = self.loss + out.loss.detach()
            self.bonus = self.bonus + (batch.entropy_weight * out.entropy).sum()

    def step(self, run: Run, *_: Any) -> dict[str, float]:
        cfg: Any = run.cfg
        if not cfg.entropy_coef:
            return {}
        loss, bonus = (sum(run.world.gather(float(x))) for x in (self.loss, self.bonus))
        self.loss = self.bonus = 0.0
        policy_loss = (loss + bonus) / cfg.updates_per_step
        return {"entropy_coef": cfg.entropy_coef, "policy_loss": policy_loss}


def prepare(
    batches: Sequence[PackedBatch], entropies: Sequence[Tensor], cfg: EntropyOptions, world: World
) -> None:
    """Set `importance` and `entropy_weight` of a step's micro-batches. Every rank must call this
    function.

    `entropies` has a vector [M] per micro-batch, computed with the weights that sampled the tokens.
    They are needed if only a fraction of the tokens is trained on.
    """
    masks = [batch.weight != 0 for batch in batches]  # [M]
    if cfg.top_entropy_quantile < 1:
        kept = most_uncertain(masks, entropies, cfg.top_entropy_quantile, world)
        masks = [mask & keep for mask, keep in zip(masks, kept)]
        for batch, keep in zip(batches, kept):
            factor = keep.to(batch.weight.dtype)
            batch.importance = factor if batch.importance is None else batch.importance * factor
    if cfg.entropy_coef:
        # a loss term -coef · H, where H is the mean entropy of the step's trained tokens
        count = sum(world.gather(sum(int(mask.sum()) for mask in masks)))
        for batch, mask in zip(batches, masks):
            weight = torch.tensor(cfg.entropy_coef / max(count, 1), dtype=batch.weight.dtype)
            batch.entropy_weight = mask * weight


def most_uncertain(
    trained: Sequence[Tensor], entropies: Sequence[Tensor], share: float, world: World
) -> list[Tensor]:
    """Return masks [M] bool that keep only the trained tokens with the highest entropy.

    Wang et al. 2025 (2506.01939). The masks keep the fraction `share` of all trained tokens
    of the optimizer step, counted over all ranks. Every rank must call this function.
    """
    values = [h.float().cpu() for h in entropies]
    chosen = [h[mask.cpu()] for h, mask in zip(values, trained)]
    # The threshold becomes a float32 tensor, so that it is rounded like the entropies.
    threshold = torch.tensor(quantile(torch.cat([torch.empty(0), *chosen]), 1 - share, world))
    return [(h >= threshold).to(mask.device) for h, mask in zip(values, trained)]


def quantile(values: Tensor, q: float, world: World) -> float:
    """Return the q-quantile of the values [n] of all ranks, interpolated linearly, or inf if no
    rank has values. Every rank must call this function.
    """
    together = torch.cat(world.gather(values)).double().numpy()
    # torch.quantile has a size limit
    return float(np.quantile(together, q)) if len(together) else math.inf
