"""Leave out a completion if the policy has moved too far from it. The distance is measured by the
mean ratio of the completion's tokens, or by their worst ratio.

Δ_t = log π(y_t) - log μ(y_t) compares the current policy π with the engine μ that sampled token t.
A completion is kept only under this condition:

    geometric:  |mean_t Δ_t| ≤ log c      the geometric mean of the ratios is in [1/c, c]
    worst:      max_t |Δ_t| ≤ log c       all ratios are in [1/c, c]

All tokens of the other completions get the factor 0. Each update decides again which completions
are kept. The KL keeps its weight. The geometric mean does not depend on the length (Liu et al.
2025, "When Speed Kills Stability"). With the other rule, one very unlikely token is enough to leave
out a completion, as in the veto of verl. train.py has options for two other masks. One mask uses
the ratio of each token (--vllm-importance-sampling-mode token_mask), and the other uses the product
of the ratios (sequence_mask). The ratio differs from 1 if a step has several updates, if samples
are stale, or if engine and trainer round differently.

    python examples/recipes/rejection.py --model runs/base --data arithmetic --output-dir runs/r \\
        --num-iterations 4 --rejection worst --rejection-bound 3
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from nanogrpo.config import option
from nanogrpo.extras.options import Config
from nanogrpo.extras.recipe import main
from nanogrpo.feature import Feature
from nanogrpo.grpo import loss


@dataclass(frozen=True)
class Options(Config):
    rejection: str = option(
        "geometric", "ratio that rejects a completion", choices=("geometric", "worst")
    )
    rejection_bound: float = option(2.0, "c: keep completions with a ratio in [1/c, c]", "> 1")


class Rejection(Feature):
    def model(self, model, inputs):
        self.features = inputs.features
        self.features.sort(key=lambda feature: feature is not self)  # see `objective`

    def objective(self, batch, cfg):
        """Mask the importance, and then use the loss that the next feature, or the core,
        computes."""

        def masked(hidden, lm_head):
            with torch.no_grad():
                logp, _ = loss.logp_of(batch, cfg)(hidden, lm_head)  # [M]
            keep = kept(logp - batch.sampling_logp, batch.sample, cfg).float()  # [M]
            if not hasattr(batch, "given"):  # the same in each update
                batch.given = batch.importance
            # in place, because --log-tokens reads the batch, too
            batch.importance = keep if batch.given is None else keep * batch.given
            out = loss.objective(batch, cfg, self.features[1:])(hidden, lm_head)
            return out._replace(metrics=out.metrics | {"rejected": 1 - keep})

        return masked


def kept(delta, sample, cfg):
    """Return which tokens belong to completions that are kept. `delta` and `sample` are [M]."""
    _, member = sample.unique(return_inverse=True)
    start = delta.new_zeros(int(member.max()) + 1 if len(member) else 0)
    if cfg.rejection == "geometric":
        far = start.scatter_reduce(0, member, delta, "mean", include_self=False).abs()
    else:
        far = start.scatter_reduce(0, member, delta.abs(), "amax")
    return (far <= math.log(cfg.rejection_bound))[member]


def features(cfg):
    return [Rejection()]


if __name__ == "__main__":
    raise SystemExit(main(Options, features))
