"""The seam between the algorithm and the kernels: four operations, the PyTorch reference of each, and which one runs.

In: logits [N, V], or hidden states [M, D] and the output head [V, D]; per-token vectors [M]. Out: log-probs, entropies and the
policy loss with its gradient. V is never materialised for all M rows by the two `head_*` operations.

| operation | in → out | used for |
|---|---|---|
| `selective_log_softmax` | logits [N, V] → log-prob [N], entropy [N] | logits that exist anyway: the embedded engine, tests |
| `policy_loss` | log-probs [M] → loss | losses in two phases: sequence-level ratios, entropy quantiles |
| `head_logp` | hidden [M, D] → log-prob [M], entropy [M] | old, reference and evaluation log-probs; phase one of two |
| `head_policy_loss` | hidden [M, D] → loss | the training step: three matrix products instead of four |

Every operation is a `torch.library` custom op, so that torch.compile passes it through without a graph break; on CUDA it runs the
Triton kernels of `kernels/`, elsewhere the reference in this file. There is no fall-back from one to the other.
Read next: kernels/README.md (how the kernels come from these references), grpo.py (who calls).
"""

from __future__ import annotations

import logging
import os
from typing import NamedTuple

import torch
from torch import Tensor, nn

from nanogrpo.errors import UserError

LOG_RATIO_MAX = 20.0  # |log-ratio| is clamped here before exp: e^20 is finite in every dtype, and so is its square

# What `PolicyOut.stats` sums over the tokens with weight != 0. ratio: exp(logp - old); kl: k3 to the reference; k1: old - logp.
STATS = ("tokens", "ratio", "clip_low", "clip_high", "kl", "k1")


class PolicyOut(NamedTuple):
    """What the loss operations give back. Only `loss` carries a gradient; rows with weight 0 hold zeros."""

    loss: Tensor  # [] float32: sum_j weight_j * l_j - entropy_weight_j * H_j, the root of the graph up to a scalar
    logp: Tensor  # [M] float32
    entropy: Tensor | None  # [M] float32, nats; None from `policy_loss`, which sees no distribution
    clip: Tensor  # [M] int8: -1 below 1 - epsilon with A < 0, +1 above 1 + epsilon_high with A > 0, else 0
    kl: Tensor | None  # [M] float32: k3 to the reference (times the ratio under bias correction); None without ref_logp
    stats: Tensor  # [len(STATS)] float32: sums over the tokens with weight != 0


# ---------------------------------------------------------------------------------------------------- which implementation

_chosen: str | None = os.environ.get("NANOGRPO_OPS") or None
_told: set[str] = set()


def use(name: str | None) -> None:
    """Forces "triton" or "torch" for every device; None goes back to choosing by device. Also: environment NANOGRPO_OPS."""
    global _chosen
    if name not in (None, "triton", "torch"):
        raise UserError(f"NANOGRPO_OPS is {name!r}: it must be 'triton' or 'torch', or be left unset to choose by device.")
    _chosen = name
    _told.clear()


def implementation(device: torch.device | str) -> str:
    """ "triton" on CUDA, "torch" elsewhere, unless `use` or NANOGRPO_OPS said otherwise; told once in the log."""
    device = torch.device(device)
    name = _chosen or ("triton" if device.type == "cuda" else "torch")
    if name not in ("triton", "torch"):
        raise UserError(f"NANOGRPO_OPS is {name!r}: it must be 'triton' or 'torch', or be left unset to choose by device.")
    if device.type not in _told:
        _told.add(device.type)
        logging.getLogger("nanogrpo").info("ops on %s run in %s%s", device.type, name, " (forced)" if _chosen else "")
    return name


def accumulate(dtype: torch.dtype) -> torch.dtype:
    """The type that statistics and losses are computed in: float32, and float64 for float64 (finite-difference tests)."""
    return torch.float64 if dtype == torch.float64 else torch.float32


# -------------------------------------------------------------------------------------------- the references, in closed form


def log_softmax_rows(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """[N, V], [N] → log-prob of the target, entropy in nats, and log-sum-exp of logits / temperature, each [N].

    z = logits / T;  lse = log Σ_j e^{z_j};  logp = z_y - lse;  H = lse - Σ_j p_j z_j.  An entry of -inf has p = 0 and adds 0.
    """
    z = logits.to(accumulate(logits.dtype)) / temperature  # [N, V]
    lse = torch.logsumexp(z, -1)  # [N]
    logp_all = z - lse[:, None]
    p = logp_all.exp()
    entropy = -torch.where(p > 0, p * logp_all, 0.0).sum(-1)  # 0 · -inf is nan: chosen by where, not multiplied away
    return logp_all.gather(1, targets[:, None]).squeeze(1), entropy, lse


def log_softmax_rows_grad(
    logits: Tensor,
    targets: Tensor,
    temperature: float,
    lse: Tensor,
    entropy: Tensor | None,
    dlogp: Tensor,
    dentropy: Tensor | None,
) -> Tensor:
    """The gradient of logits [N, V] from that of the log-prob and, where given, of the entropy; in the dtype of logits.

    dz_j = dlogp (1[j = y] - p_j) - dentropy p_j (log p_j + H);  dlogits = dz / T.
    """
    logp_all = logits.to(lse.dtype) / temperature - lse[:, None]  # [N, V]
    p = logp_all.exp()
    dz = -dlogp[:, None] * p
    if dentropy is not None:
        dz -= dentropy[:, None] * torch.where(p > 0, p * (logp_all + entropy[:, None]), 0.0)
    dz.scatter_add_(1, targets[:, None], dlogp[:, None])
    return (dz / temperature).to(logits.dtype)


def policy_terms(
    logp: Tensor,
    old_logp: Tensor | None,
    advantage: Tensor,
    ref_logp: Tensor | None,
    importance: Tensor | None,
    epsilon: float,
    epsilon_high: float,
    delta: float | None,
    beta: float,
    use_bias_correction_kl: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    """Per token, all [M]: the loss l, its derivative dl/dlogp, the clip flag (int8), the KL (or None) and the ratio.

    PPO's clipped surrogate (arXiv 1707.06347, eq. 7) with an upper cap `delta` on the ratio (arXiv 2505.07291):
        r = exp(logp - old);  l = -min(min(r, delta) A, clamp(r, 1 - epsilon, 1 + epsilon_high) A) · importance + beta · KL
    with k3 = e^x - x - 1, x = ref - logp (http://joschu.net/blog/kl-approx.html); KL = k3, or r · k3 (differentiated through
    r) under bias correction. Where both arms of the min are equal each gives half of the derivative, as torch.min does.
    """
    d = torch.zeros_like(logp) if old_logp is None else logp - old_logp
    r = d.clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX).exp()
    dr = torch.where(d.abs() <= LOG_RATIO_MAX, r, 0.0)  # dr/dlogp
    capped = r if delta is None else r.clamp(max=delta)
    low, high = 1.0 - epsilon, 1.0 + epsilon_high
    free, held = capped * advantage, r.clamp(low, high) * advantage
    dfree = torch.where(r <= delta, dr * advantage, 0.0) if delta is not None else dr * advantage
    dheld = torch.where((r >= low) & (r <= high), dr * advantage, 0.0)
    l = -torch.minimum(free, held)
    dl = -torch.where(free < held, dfree, torch.where(held < free, dheld, 0.5 * (dfree + dheld)))
    if importance is not None:
        l, dl = l * importance, dl * importance
    clip = ((capped > high) & (advantage > 0)).to(torch.int8) - ((capped < low) & (advantage < 0)).to(torch.int8)
    if ref_logp is None:
        return l, dl, clip, None, r
    x = ref_logp - logp
    inside = x.abs() <= LOG_RATIO_MAX
    x = x.clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX)
    growth = torch.expm1(x)  # e^x - 1, exact near 0, where e^x - x - 1 would cancel
    kl, dkl = growth - x, torch.where(inside, -growth, 0.0)
    if use_bias_correction_kl:
        kl, dkl = r * kl, r * dkl + dr * kl
    if beta != 0.0:
        l, dl = l + beta * kl, dl + beta * dkl
    return l, dl, clip, kl, r


# ---------------------------------------------------------------------------------------------------------- registered ops
# One rule for all: the op returns the gradient next to the value, `setup` keeps it, `backward` multiplies it by the upstream
# scalar. `scaled` has no derivative of its own, so that differentiating twice raises instead of giving a wrong number.


@torch.library.custom_op("nanogrpo::scaled", mutates_args=())
def scaled(grad: Tensor, upstream: Tensor, of: Tensor) -> Tensor:
    """grad · upstream in the dtype of `of`, the input it is the gradient of; upstream is a scalar on the device: no host sync."""
    return (grad * upstream).to(of.dtype)


@scaled.register_fake
def _(grad: Tensor, upstream: Tensor, of: Tensor) -> Tensor:
    return torch.empty_like(grad, dtype=of.dtype)


@torch.library.custom_op("nanogrpo::log_softmax_rows", mutates_args=())
def _log_softmax_rows(logits: Tensor, targets: Tensor, temperature: float, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    if mask is not None:  # rows that do not count may hold anything, nan included
        logits = logits.masked_fill(~mask[:, None], 0.0)
    logp, entropy, lse = log_softmax_rows(logits, targets, temperature)
    if mask is not None:
        logp, entropy = logp.masked_fill(~mask, 0.0), entropy.masked_fill(~mask, 0.0)
    return logp, entropy, lse


@_log_softmax_rows.register_fake
def _(logits: Tensor, targets: Tensor, temperature: float, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    out = logits.new_empty(logits.shape[0], dtype=accumulate(logits.dtype))
    return out, torch.empty_like(out), torch.empty_like(out)


@torch.library.custom_op("nanogrpo::log_softmax_rows_backward", mutates_args=())
def _log_softmax_rows_backward(
    logits: Tensor,
    targets: Tensor,
    temperature: float,
    mask: Tensor | None,
    lse: Tensor,
    entropy: Tensor,
    dlogp: Tensor,
    dentropy: Tensor,
) -> Tensor:
    if mask is not None:
        logits, dlogp, dentropy = logits.masked_fill(~mask[:, None], 0.0), dlogp * mask, dentropy * mask
    return log_softmax_rows_grad(logits, targets, temperature, lse, entropy, dlogp, dentropy)


@_log_softmax_rows_backward.register_fake
def _(logits: Tensor, *_: object) -> Tensor:
    return torch.empty_like(logits)


def _rows_setup(ctx, inputs, output) -> None:
    logits, targets, ctx.temperature, mask = inputs
    ctx.save_for_backward(logits, targets, mask, output[2], output[1])
    ctx.mark_non_differentiable(output[2])


def _rows_backward(ctx, dlogp: Tensor, dentropy: Tensor, _dlse: Tensor) -> tuple:
    logits, targets, mask, lse, entropy = ctx.saved_tensors
    return _log_softmax_rows_backward(logits, targets, ctx.temperature, mask, lse, entropy, dlogp, dentropy), None, None, None


_log_softmax_rows.register_autograd(_rows_backward, setup_context=_rows_setup)


@torch.library.custom_op("nanogrpo::policy_rows", mutates_args=())
def _policy_rows(
    logp: Tensor,
    old_logp: Tensor | None,
    advantage: Tensor,
    weight: Tensor,
    ref_logp: Tensor | None,
    importance: Tensor | None,
    epsilon: float,
    epsilon_high: float,
    delta: float | None,
    beta: float,
    use_bias_correction_kl: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """loss [], dloss/dlogp [M], clip [M] int8, kl [M] (or [0]), stats [6]."""
    l, dl, clip, kl, ratio = policy_terms(
        logp, old_logp, advantage, ref_logp, importance, epsilon, epsilon_high, delta, beta, use_bias_correction_kl
    )
    on = weight != 0
    l, dl, ratio = (torch.where(on, x, 0.0) for x in (l, dl, ratio))  # what is masked may be nan: where, never times
    clip = torch.where(on, clip, torch.zeros_like(clip))
    kl = l.new_empty(0) if kl is None else torch.where(on, kl, 0.0)
    k1 = torch.zeros_like(l) if old_logp is None else torch.where(on, old_logp - logp, 0.0)
    stats = torch.stack([on.sum().to(l.dtype), ratio.sum(), (clip < 0).sum(), (clip > 0).sum(), kl.sum(), k1.sum()])
    return (l * weight).sum(), dl * weight, clip, kl, stats


@_policy_rows.register_fake
def _(logp: Tensor, old_logp, advantage, weight, ref_logp, *_: object) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    clip = torch.empty_like(logp, dtype=torch.int8)
    kl = torch.empty_like(logp) if ref_logp is not None else logp.new_empty(0)
    return logp.new_empty(()), torch.empty_like(logp), clip, kl, logp.new_empty(len(STATS))


def _policy_setup(ctx, inputs, output) -> None:
    ctx.save_for_backward(output[1], inputs[0])
    ctx.mark_non_differentiable(*output[1:])


def _policy_backward(ctx, upstream: Tensor, *_: Tensor) -> tuple:
    grad, logp = ctx.saved_tensors
    return scaled(grad, upstream, logp), *(None,) * 10


_policy_rows.register_autograd(_policy_backward, setup_context=_policy_setup)


@torch.library.custom_op("nanogrpo::head_logp", mutates_args=())
def _head_logp(hidden: Tensor, lm_head: Tensor, targets: Tensor, temperature: float, chunk: int) -> tuple[Tensor, Tensor, Tensor]:
    """log-prob, entropy, lse, each [M]."""
    out = hidden.new_empty(3, hidden.shape[0], dtype=accumulate(hidden.dtype))
    for start in range(0, hidden.shape[0], chunk):
        part = slice(start, start + chunk)
        rows = log_softmax_rows(hidden[part] @ lm_head.T, targets[part], temperature)
        for vector, value in zip(out, rows):
            vector[part] = value
    return out[0].clone(), out[1].clone(), out[2].clone()


@_head_logp.register_fake
def _(hidden: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    out = hidden.new_empty(hidden.shape[0], dtype=accumulate(hidden.dtype))
    return out, torch.empty_like(out), torch.empty_like(out)


@torch.library.custom_op("nanogrpo::head_logp_backward", mutates_args=())
def _head_logp_backward(
    hidden: Tensor,
    lm_head: Tensor,
    targets: Tensor,
    temperature: float,
    chunk: int,
    lse: Tensor,
    entropy: Tensor,
    dlogp: Tensor,
    dentropy: Tensor,
) -> tuple[Tensor, Tensor]:
    dhidden, dhead = torch.zeros_like(hidden), torch.zeros_like(lm_head, dtype=accumulate(hidden.dtype))
    live = torch.nonzero((dlogp != 0) | (dentropy != 0)).squeeze(1)
    for index in live.split(chunk):
        h = hidden[index]  # [C, D]
        dlogits = log_softmax_rows_grad(
            h @ lm_head.T, targets[index], temperature, lse[index], entropy[index], dlogp[index], dentropy[index]
        )
        dhidden[index] = dlogits @ lm_head
        dhead += dlogits.to(dhead.dtype).T @ h.to(dhead.dtype)
    return dhidden, dhead.to(lm_head.dtype)


@_head_logp_backward.register_fake
def _(hidden: Tensor, lm_head: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return torch.empty_like(hidden), torch.empty_like(lm_head)


def _head_logp_setup(ctx, inputs, output) -> None:
    hidden, lm_head, targets, ctx.temperature, ctx.chunk = inputs
    ctx.save_for_backward(hidden, lm_head, targets, output[2], output[1])
    ctx.mark_non_differentiable(output[2])


def _head_logp_grad(ctx, dlogp: Tensor, dentropy: Tensor, _dlse: Tensor) -> tuple:
    hidden, lm_head, targets, lse, entropy = ctx.saved_tensors
    return (
        *_head_logp_backward(hidden, lm_head, targets, ctx.temperature, ctx.chunk, lse, entropy, dlogp, dentropy),
        None,
        None,
        None,
    )


_head_logp.register_autograd(_head_logp_grad, setup_context=_head_logp_setup)


@torch.library.custom_op("nanogrpo::head_policy_loss", mutates_args=())
def _head_policy_loss(
    hidden: Tensor,
    lm_head: Tensor,
    targets: Tensor,
    old_logp: Tensor | None,
    advantage: Tensor,
    weight: Tensor,
    ref_logp: Tensor | None,
    importance: Tensor | None,
    entropy_weight: Tensor | None,
    temperature: float,
    epsilon: float,
    epsilon_high: float,
    delta: float | None,
    beta: float,
    use_bias_correction_kl: bool,
    chunk: int,
    need_dhidden: bool,
    need_dhead: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """loss, logp, entropy, clip, kl (or [0]), stats, dhidden (or [0]), dhead (or [0], in the accumulator's type)."""
    acc = accumulate(hidden.dtype)
    logp, entropy = (torch.zeros(hidden.shape[0], dtype=acc, device=hidden.device) for _ in range(2))
    dhidden = torch.zeros_like(hidden) if need_dhidden else hidden.new_empty(0)
    dhead = torch.zeros_like(lm_head, dtype=acc) if need_dhead else hidden.new_empty(0, dtype=acc)
    live = weight != 0
    hot = live & ((advantage if importance is None else advantage * importance) != 0)
    if beta != 0.0 and ref_logp is not None:
        hot = live
    if entropy_weight is not None:
        live, hot = live | (entropy_weight != 0), hot | (entropy_weight != 0)
    if not (need_dhidden or need_dhead):
        hot = torch.zeros_like(hot)
    rest = (beta, use_bias_correction_kl)

    def pick(vector: Tensor | None, index: Tensor) -> Tensor | None:
        return None if vector is None else vector[index]

    for rows, with_grad in ((hot, True), (live & ~hot, False)):
        for index in torch.nonzero(rows).squeeze(1).split(chunk):
            h = hidden[index]  # [C, D]
            logits = h @ lm_head.T  # [C, V]
            logp[index], entropy[index], lse = log_softmax_rows(logits, targets[index], temperature)
            if not with_grad:
                continue
            per_token = (pick(x, index) for x in (logp, old_logp, advantage, ref_logp, importance))
            dlogp = policy_terms(*per_token, epsilon, epsilon_high, delta, *rest)[1] * weight[index]
            dentropy = None if entropy_weight is None else -entropy_weight[index]
            dlogits = log_softmax_rows_grad(logits, targets[index], temperature, lse, entropy[index], dlogp, dentropy)
            if need_dhidden:
                dhidden[index] = dlogits @ lm_head
            if need_dhead:
                dhead += dlogits.to(acc).T @ h.to(acc)

    loss, _, clip, kl, stats = _policy_rows(
        logp, old_logp, advantage, weight, ref_logp, importance, epsilon, epsilon_high, delta, *rest
    )
    if entropy_weight is not None:
        loss = loss - (entropy_weight * entropy).sum()
    return loss, logp, entropy, clip, kl, stats, dhidden, dhead


@_head_policy_loss.register_fake
def _(hidden, lm_head, targets, old_logp, advantage, weight, ref_logp, *rest: object):
    need_dhidden, need_dhead = rest[-2:]
    out = hidden.new_empty(hidden.shape[0], dtype=accumulate(hidden.dtype))
    dhidden = torch.empty_like(hidden) if need_dhidden else hidden.new_empty(0)
    dhead = torch.empty_like(lm_head, dtype=out.dtype) if need_dhead else out.new_empty(0)
    kl = torch.empty_like(out) if ref_logp is not None else out.new_empty(0)
    clip = torch.empty_like(out, dtype=torch.int8)
    return out.new_empty(()), torch.empty_like(out), torch.empty_like(out), clip, kl, out.new_empty(len(STATS)), dhidden, dhead


def _head_setup(ctx, inputs, output) -> None:
    ctx.need = inputs[-2:]
    ctx.save_for_backward(*output[-2:], *inputs[:2])
    ctx.mark_non_differentiable(*output[1:])


def _head_backward(ctx, upstream: Tensor, *_: Tensor) -> tuple:
    dhidden, dhead, hidden, lm_head = ctx.saved_tensors
    first = scaled(dhidden, upstream, hidden) if ctx.need[0] else None
    second = scaled(dhead, upstream, lm_head) if ctx.need[1] else None
    return first, second, *(None,) * 16


_head_policy_loss.register_autograd(_head_backward, setup_context=_head_setup)


# ------------------------------------------------------------------------------------------------------- public functions


def default_chunk(vocab: int, dtype: torch.dtype, device: torch.device) -> int:
    """Rows whose logits fit the chunk's memory: 2.5 GB on CUDA (8192 rows of Qwen3 in bfloat16), 64 MB on CPU."""
    budget = 2.5e9 if device.type == "cuda" else 64e6
    return max(1, int(budget // (vocab * dtype.itemsize)))


def selective_log_softmax(
    logits: Tensor, targets: Tensor, temperature: float = 1.0, *, entropy: bool = False, mask: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """log softmax(logits / temperature)[targets] without writing the softmax; differentiable through both results.

    logits [N, V] (bf16, fp16, fp32; fp64 for tests), targets [N] int64 → log-prob [N] float32, entropy [N] float32 in nats or
    None. Rows where mask [N] is False give 0 and take no gradient, whatever they hold.
    """
    logp, h, _ = _log_softmax_rows(logits, targets, float(temperature), mask)
    return logp, h if entropy else None


def policy_loss(
    logp: Tensor,
    old_logp: Tensor | None,
    advantage: Tensor,
    weight: Tensor,
    *,
    epsilon: float,
    epsilon_high: float,
    delta: float | None = None,
    ref_logp: Tensor | None = None,
    beta: float = 0.0,
    use_bias_correction_kl: bool = True,
    importance: Tensor | None = None,
) -> PolicyOut:
    """Σ_j weight_j l_j over [M] tokens, l as in `policy_terms`; the gradient flows to logp alone.

    All vectors [M] float32. old_logp None: on policy, the ratio is 1 in value and carries the gradient. Tokens with weight 0
    count for nothing even where they hold nan. importance multiplies the clipped term, never the KL.
    """
    loss, _, clip, kl, stats = _policy_rows(
        logp,
        old_logp,
        advantage,
        weight,
        ref_logp,
        importance,
        float(epsilon),
        float(epsilon_high),
        delta,
        float(beta),
        use_bias_correction_kl,
    )
    return PolicyOut(loss, logp.detach(), None, clip, None if ref_logp is None else kl, stats)


def head_logp(
    hidden: Tensor, lm_head: Tensor, targets: Tensor, temperature: float = 1.0, *, entropy: bool = False, chunk: int | None = None
) -> tuple[Tensor, Tensor | None]:
    """Log-prob (and entropy) of targets under softmax(hidden @ lm_head.T / temperature), logits never more than a chunk.

    hidden [M, D], lm_head [V, D] of one dtype, targets [M] int64 → [M] float32 each. Differentiable: the backward computes each
    chunk's logits again (four matrix products); rows whose upstream gradient is 0 are skipped there.
    """
    chunk = chunk or default_chunk(lm_head.shape[0], hidden.dtype, hidden.device)
    logp, h, _ = _head_logp(hidden, lm_head, targets, float(temperature), chunk)
    return logp, h if entropy else None


def head_policy_loss(
    hidden: Tensor,
    lm_head: Tensor,
    targets: Tensor,
    old_logp: Tensor | None,
    advantage: Tensor,
    weight: Tensor,
    *,
    temperature: float = 1.0,
    epsilon: float,
    epsilon_high: float,
    delta: float | None = None,
    ref_logp: Tensor | None = None,
    beta: float = 0.0,
    use_bias_correction_kl: bool = True,
    importance: Tensor | None = None,
    entropy_weight: Tensor | None = None,
    chunk: int | None = None,
) -> PolicyOut:
    """`policy_loss` of `head_logp`, with the gradients computed in the forward pass: three matrix products, not four.

    That is right because a token's dloss/dlogp depends on that token alone and `weight` is known beforehand; the loss must be the
    root of the graph up to a scalar factor. hidden [M, D], lm_head [V, D] of one dtype; vectors [M]. Tokens whose weight and
    entropy_weight are 0 are not computed (zeros in the result); tokens without advantage, KL or entropy term have no gradient
    and cost the forward product only. Under `no_grad` nothing but the forward is computed.
    """
    grad = torch.is_grad_enabled()
    chunk = chunk or default_chunk(lm_head.shape[0], hidden.dtype, hidden.device)
    loss, logp, entropy, clip, kl, stats, _, _ = _head_policy_loss(
        hidden,
        lm_head,
        targets,
        old_logp,
        advantage,
        weight,
        ref_logp,
        importance,
        entropy_weight,
        float(temperature),
        float(epsilon),
        float(epsilon_high),
        delta,
        float(beta),
        use_bias_correction_kl,
        chunk,
        grad and hidden.requires_grad,
        grad and lm_head.requires_grad,
    )
    return PolicyOut(loss, logp, entropy, clip, None if ref_logp is None else kl, stats)


class PolicyHead(nn.Module):
    """The output head as a module whose forward gives the loss, so that FSDP2 gathers and scatters its weight once a step."""

    def __init__(self, vocab: int, hidden: int, dtype: torch.dtype | None = None):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab, hidden, dtype=dtype))  # [V, D]
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, hidden: Tensor, targets: Tensor, *args, **kwargs) -> PolicyOut:
        """The arguments of `head_policy_loss` without the head."""
        return head_policy_loss(hidden, self.weight, targets, *args, **kwargs)
