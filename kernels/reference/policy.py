"""The GRPO loss of each token and its derivative. A run on a CPU computes its loss with this code.

In: log-probs and `LossInputs` [M]. Out: the loss, its derivative with respect to each log-prob, the
clip flags and the KL. Start with `policy_terms`, which has an equation above each computation.
These functions are called between train.py and `policy_terms`:

    objective (nanogrpo/grpo/loss.py)          picks the vectors of the batch and the constants
    └─ head_policy_loss (nanogrpo/model/head.py) and HeadPolicyLoss (kernels/head.py)
       │                                       multiply hidden states by the output head, in chunks
       └─ policy_rows_ (fused_rows.py)         turns a chunk of logits into log-probs and gradients
          └─ policy_terms (below)              the loss of each token, and its derivative

The derivatives are written as formulas, without autograd. The formulas specify what the kernels
compute, and the fused head needs the derivatives during its forward pass. A test compares the
derivatives with autograd in float64 (tests/model/test_head.py). Read next: log_softmax.py.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

# Log-ratios are clamped to ±20 before exp.
# So a ratio is at most e^20, and the KL, a product of two such factors, is about e^40 at most.
# Both e^20 and e^40 are finite in float32.
LOG_RATIO_MAX = 20.0


class Clip(NamedTuple):
    """Constants for clipping and for the KL."""

    epsilon: float
    epsilon_high: float
    delta: float = math.inf  # upper bound of the ratio for any advantage
    beta: float = 0.0  # factor of the KL


class LossInputs(NamedTuple):
    """The per-token inputs of the loss, all [M] float32."""

    advantage: Tensor
    weight: Tensor  # computed by `token_weight` in nanogrpo/grpo/loss.py
    old_logp: Tensor | None = None  # None: the samples are on policy, so the ratio is 1
    ref_logp: Tensor | None = None  # None: no KL
    importance: Tensor | None = None  # factor of the clipped term, but not of the KL
    entropy_weight: Tensor | None = None  # None: no entropy bonus

    def map(self, function: Callable[[Tensor], Tensor]) -> "LossInputs":
        """Apply a function to every vector that is not None."""
        return LossInputs._make(None if v is None else function(v) for v in self)

    def at(self, part: slice | Tensor) -> "LossInputs":
        """Return the vectors of some of the tokens."""
        return self.map(lambda v: v[part])


def exp(log_ratio: Tensor) -> Tensor:
    """Return e^x with x clamped to ±20."""
    return log_ratio.clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX).exp()


def k3(x: Tensor) -> Tensor:
    """Return e^x - x - 1 with x clamped to ±20. The result is never negative, and it is 0 where x =
    0.

    Near 0, expm1(x) - x is more precise than e^x - x - 1, which suffers from cancellation.
    """
    x = x.clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX)
    return torch.expm1(x) - x


def clipped(ratio: Tensor, advantage: Tensor, c: Clip) -> tuple[Tensor, Tensor, Tensor]:
    """PPO's clipped surrogate: l = -min(min(r, δ)·A, clamp(r, 1 - ε, 1 + ε_high)·A).

    Sources: Schulman et al. 2017 (1707.06347), equation 7, with ε_high from DAPO (2503.14476) and δ
    from INTELLECT-2 (2505.07291). Returns l, whether l is constant in r (so that its gradient is
    zero), and the clip flag (int8). The flag is -1 if r < 1 - ε and A < 0, +1 if r > 1 + ε_high and
    A > 0, else 0.
    """
    low, high = 1.0 - c.epsilon, 1.0 + c.epsilon_high
    capped = ratio.clamp(max=c.delta)
    free, held = capped * advantage, ratio.clamp(low, high) * advantage
    constant = torch.where(free < held, ratio > c.delta, (ratio < low) | (ratio > high))
    too_high, too_low = (capped > high) & (advantage > 0), (capped < low) & (advantage < 0)
    return -torch.minimum(free, held), constant, too_high.to(torch.int8) - too_low.to(torch.int8)


def policy_terms(
    logp: Tensor, inputs: LossInputs, c: Clip
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return for each token the loss, its derivative d/dlogp, the clip flag (int8) and the KL (or
    None).

    loss = l · importance + β · KL, where l is the clipped term below. If a log-prob is NaN, loss
    and gradient must be NaN, so that the trainer detects the error. Therefore, all comparisons
    (also in `clipped`) test whether the derivative is zero. A comparison with NaN is false, so NaN
    is kept.
    """
    # ratio: r = π(token) / π_old(token) = exp(logp - old_logp), so dr/dlogp = r, or 0 if clamped
    log_ratio = torch.zeros_like(logp) if inputs.old_logp is None else logp - inputs.old_logp
    ratio = exp(log_ratio)
    dratio = torch.where(log_ratio.abs() > LOG_RATIO_MAX, 0.0, ratio)

    # clip: l = -min(min(r, δ)·A, clamp(r, 1 - ε, 1 + ε_high)·A), so dl/dr = -A, or 0 if clipped
    l, constant, clip = clipped(ratio, inputs.advantage, c)
    dl = -torch.where(constant, 0.0, dratio * inputs.advantage)
    if inputs.importance is not None:
        l, dl = l * inputs.importance, dl * inputs.importance
    if inputs.ref_logp is None:
        return l, dl, clip, None

    # KL = r·k3 and k3 = e^x - x - 1, with x = ref_logp - logp, so dk3/dlogp = 1 - e^x.
    # So dKL = r·dk3 + dr·k3.
    # Because of the factor r (1 on policy), dKL is the gradient of the true KL.
    x = inputs.ref_logp - logp
    kl, dkl = k3(x), torch.where(x.abs() > LOG_RATIO_MAX, 0.0, -torch.expm1(x))
    kl, dkl = ratio * kl, ratio * dkl + dratio * kl
    return l + c.beta * kl, dl + c.beta * dkl, clip, kl
