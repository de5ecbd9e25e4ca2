"""The equations in plain PyTorch: what every kernel of this folder is tested against, and what runs
where there is no GPU.

In: logits [N, V] or per-token vectors [M], any float type. Out: float32 (float64 for float64
inputs, for finite differences). Four functions, whose Triton counterparts have the same names and
arguments:

| here | kernel |
|---|---|
| `log_softmax_forward`, `log_softmax_backward` | log_softmax.py |
| `policy_forward` (and `policy_terms`, its maths for one token) | policy.py |
| `policy_rows_` | rows.py |

Derivatives are written out, not left to autograd: they are the specification of the kernels, and
the fused head needs them in its forward pass. tests/model/test_head.py checks them against autograd
and finite differences. Read next: log_softmax.py.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# |log-ratio| is clamped here before exp: e^20 is finite in every float type, and so is its square
LOG_RATIO_MAX = 20.0


class Objective(NamedTuple):
    """The numbers of the loss; all floats, so that it passes through torch.library as a list."""

    epsilon: float
    epsilon_high: float
    # upper cap of the ratio for either sign of the advantage; inf: none
    delta: float = float("inf")
    beta: float = 0.0  # factor of the KL
    bias_correction: float = 1.0  # 1: KL = ratio · k3, differentiated through both; 0: KL = k3


def accumulate(dtype: torch.dtype) -> torch.dtype:
    """The type that statistics and losses are computed in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def log_softmax_forward(
    logits: Tensor, targets: Tensor, temperature: float, mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """[N, V], [N] → log-prob of the target [N], entropy [N] in nats, and (Q, log S) [2, N] for the
    backward.

    Q = max_j x_j;  t_j = (x_j - Q) / T;  S = Σ_j e^{t_j};  logp = t_y - log S;  H = log S - Σ_j
    e^{t_j} t_j / S. Everything is relative to Q, so that a row around -10,000 is as exact as one
    around 0. An entry of -inf has probability 0 and adds 0 to H. Rows whose mask is False give 0.
    """
    x = logits.to(accumulate(logits.dtype))  # [N, V]
    if mask is not None:
        x = x.masked_fill(~mask[:, None], 0.0)  # such a row may hold anything, nan included
    q = x.amax(-1) if x.numel() else x.new_zeros(x.shape[0])  # [N]
    t = (x - q[:, None]) / temperature
    e = t.exp()
    s = e.sum(-1)  # [N]
    # 0 · -inf is nan: chosen by where, not multiplied away
    entropy = s.log() - torch.where(e > 0, e * t, 0.0).sum(-1) / s
    logp = t.gather(1, targets[:, None]).squeeze(1) - s.log()
    if mask is not None:
        logp, entropy = logp.masked_fill(~mask, 0.0), entropy.masked_fill(~mask, 0.0)
    return logp, entropy, torch.stack([q, s.log()])


def log_softmax_backward(
    logits: Tensor,
    targets: Tensor,
    temperature: float,
    norm: Tensor,
    entropy: Tensor,
    dlogp: Tensor,
    dentropy: Tensor | None,
    mask: Tensor | None = None,
    *,
    in_place: bool = False,
) -> Tensor:
    """dlogits [N, V] in the type of logits; in_place writes it over them (for a caller that owns
    the buffer).

    logp = z_y - lse and dlse/dz_j = p_j give dlogp/dz_j = 1[j = y] - p_j. H = -Σ p log p with
    dp_i/dz_j = p_i (1[i = j] - p_j) gives dH/dz_j = -p_j (log p_j + H). dlogits = dz / T.
    """
    if mask is not None:
        logits_seen = logits.masked_fill(~mask[:, None], 0.0)
        dlogp, dentropy = (
            dlogp.masked_fill(~mask, 0.0),
            None if dentropy is None else dentropy.masked_fill(~mask, 0.0),
        )
    else:
        logits_seen = logits
    # [N, V]
    logp_all = (logits_seen.to(norm.dtype) - norm[0][:, None]) / temperature - norm[1][:, None]
    p = logp_all.exp()
    dz = -dlogp[:, None] * p
    if dentropy is not None:
        dz -= dentropy[:, None] * torch.where(p > 0, p * (logp_all + entropy[:, None]), 0.0)
    dz.scatter_add_(1, targets[:, None], dlogp[:, None])
    dz /= temperature
    return logits.copy_(dz) if in_place else dz.to(logits.dtype)


def policy_terms(
    logp: Tensor,
    old_logp: Tensor | None,
    advantage: Tensor,
    ref_logp: Tensor | None,
    importance: Tensor | None,
    o: Objective,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    """Per token, all [M]: the loss l, its derivative dl/dlogp, the clip flag (int8), the KL (or
    None) and the ratio.

    PPO's clipped surrogate (arXiv 1707.06347, eq. 7) with an upper cap delta on the ratio (arXiv
    2505.07291):
        r = exp(logp - old);  l = -min(min(r, delta) A, clamp(r, 1 - epsilon, 1 + epsilon_high) A) · importance + beta · KL
    with k3 = e^x - x - 1, x = ref - logp (http://joschu.net/blog/kl-approx.html). dr/dlogp = r, and
    dk3/dlogp = 1 - e^x. old_logp None: r = 1.
    """
    d = torch.zeros_like(logp) if old_logp is None else logp - old_logp
    r = d.clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX).exp()
    # Beyond the clamp the ratio is a constant. Asked this way round, here and below, a nan stays
    # nan: it must be seen.
    dr = torch.where(d.abs() > LOG_RATIO_MAX, 0.0, r)
    low, high = 1.0 - o.epsilon, 1.0 + o.epsilon_high
    capped = r.clamp(max=o.delta)
    # the two arms of the min, and their derivatives
    free, held = capped * advantage, r.clamp(low, high) * advantage
    dfree = torch.where(r > o.delta, 0.0, dr * advantage)
    dheld = torch.where((r < low) | (r > high), 0.0, dr * advantage)
    l = -torch.minimum(free, held)
    # where they are equal, within the range, so are their derivatives
    dl = -torch.where(free < held, dfree, dheld)
    if importance is not None:
        l, dl = l * importance, dl * importance
    clip = ((capped > high) & (advantage > 0)).to(torch.int8) - (
        (capped < low) & (advantage < 0)
    ).to(torch.int8)
    if ref_logp is None:
        return l, dl, clip, None, r
    x = ref_logp - logp
    outside = x.abs() > LOG_RATIO_MAX
    x = x.clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX)
    growth = torch.expm1(x)  # e^x - 1, exact near 0, where e^x - x - 1 would cancel
    kl, dkl = growth - x, torch.where(outside, 0.0, -growth)
    if o.bias_correction:
        kl, dkl = r * kl, r * dkl + dr * kl
    if o.beta != 0.0:
        l, dl = l + o.beta * kl, dl + o.beta * dkl
    return l, dl, clip, kl, r


def policy_forward(
    logp: Tensor,
    old_logp: Tensor | None,
    advantage: Tensor,
    weight: Tensor,
    ref_logp: Tensor | None,
    importance: Tensor | None,
    o: Objective,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Loss [] = Σ weight · l, dloss/dlogp [M], clip [M] int8, KL [M] (or [0]) and six sums, over
    the tokens with weight != 0.

    The sums: tokens, ratio, clipped low, clipped high, KL, and k1 = old - logp (the other estimate
    of the KL to the old policy).
    """
    l, dl, clip, kl, r = policy_terms(logp, old_logp, advantage, ref_logp, importance, o)
    on = weight != 0
    # what is masked may be nan: where, never times
    l, dl, r = (torch.where(on, x, 0.0) for x in (l, dl, r))
    clip = torch.where(on, clip, torch.zeros_like(clip))
    kl = l.new_empty(0) if kl is None else torch.where(on, kl, 0.0)
    k1 = torch.zeros_like(l) if old_logp is None else torch.where(on, old_logp - logp, 0.0)
    stats = torch.stack(
        [on.sum().to(l.dtype), r.sum(), (clip < 0).sum(), (clip > 0).sum(), kl.sum(), k1.sum()]
    )
    return (l * weight).sum(), dl * weight, clip, kl, stats


def policy_rows_(
    logits: Tensor,
    targets: Tensor,
    temperature: float,
    old_logp: Tensor | None,
    advantage: Tensor,
    weight: Tensor,
    ref_logp: Tensor | None,
    importance: Tensor | None,
    entropy_weight: Tensor | None,
    o: Objective,
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-prob, entropy and loss [N] of each row of logits [N, V], which are overwritten by the
    gradient of Σ loss.

    loss = weight · l - entropy_weight · H. Rows without either weight give zeros and a gradient of
    zero.
    """
    on = weight != 0 if entropy_weight is None else (weight != 0) | (entropy_weight != 0)
    logp, entropy, norm = log_softmax_forward(logits, targets, temperature, on)
    l, dl, *_ = policy_terms(logp, old_logp, advantage, ref_logp, importance, o)
    loss, dlogp = (
        torch.where(weight != 0, weight * l, 0.0),
        torch.where(weight != 0, weight * dl, 0.0),
    )
    dentropy = None if entropy_weight is None else -entropy_weight
    if entropy_weight is not None:
        loss = loss - entropy_weight * entropy
    log_softmax_backward(
        logits, targets, temperature, norm, entropy, dlogp, dentropy, on, in_place=True
    )
    return logp, entropy, loss
