"""How the operations of ops.py are registered with torch, and which implementation of each runs.

In: what ops.py takes, with the settings as positional numbers. Out: tensors only, which is all that a custom op may return: an
empty one where ops.py says None, and behind the results whatever the backward needs (softmax norms, gradients taken early).

On CUDA the Triton kernels of `kernels/` run, elsewhere the equations of kernels/reference.py: chosen by device, said once in the
log, never changed behind your back. Each is a `torch.library` custom op with a fake (the shapes alone), so torch.compile passes
it without a graph break. Read next: ops.py, the functions that everybody calls.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from nanogrpo.errors import UserError
from nanogrpo.kernels import head, reference
from nanogrpo.kernels.reference import Objective, accumulate

# What `PolicyOut.stats` sums over the tokens with weight != 0. ratio: exp(logp - old); kl: k3 to the reference; k1: old - logp.
STATS = ("tokens", "ratio", "clip_low", "clip_high", "kl", "k1")


# ---------------------------------------------------------------------------------------------------- which implementation

_NAMES = ("triton", "torch")
_chosen: str | None = os.environ.get("NANOGRPO_OPS") or None
_told: set[str] = set()


def use(name: str | None) -> None:
    """Forces "triton" or "torch" on every device; None: by device again. The environment's NANOGRPO_OPS does it from outside."""
    global _chosen
    _chosen = name
    _told.clear()


def implementation(device: torch.device | str) -> str:
    """ "triton" on CUDA, "torch" elsewhere, unless `use` or NANOGRPO_OPS said otherwise; told once in the log."""
    kind = torch.device(device).type
    name = _chosen or ("triton" if kind == "cuda" else "torch")
    if name not in _NAMES:
        raise UserError(f"NANOGRPO_OPS is {name!r}: set it to 'triton' or 'torch', or leave it unset to choose by device.")
    if kind not in _told:
        _told.add(kind)
        logging.getLogger("nanogrpo").info("ops on %s run in %s%s", kind, name, " (forced)" if _chosen else "")
    return name


def rows_for(device: torch.device) -> ModuleType:
    """The module of row functions for a device. Triton is imported here, so that a machine without it can use the reference."""
    if implementation(device) == "torch":
        return reference
    from nanogrpo.kernels import rows

    return rows


# ---------------------------------------------------------------------------------------------------------- registered ops
# One pattern for all: a custom op computes, `setup` keeps what the backward needs, and the backward is a custom op too. Ops
# without a derivative raise when differentiated, so that a double backward is an error and not a wrong number.
# torch.library knows arguments by position. A new one touches, together: the op, its fake, its `setup` (which unpacks inputs and
# outputs by place), the caller in ops.py, and the op's counterpart in kernels/ (reference.py and the Triton file, or head.py).


@torch.library.custom_op("nanogrpo::scaled", mutates_args=())
def _scaled(grad: Tensor, upstream: Tensor, of: Tensor) -> Tensor:
    """grad · upstream in the type of `of`, the input whose gradient it is. upstream stays on the device: no host sync."""
    return torch.mul(grad, upstream, out=torch.empty_like(of))


@_scaled.register_fake
def _(grad: Tensor, upstream: Tensor, of: Tensor) -> Tensor:
    return torch.empty_like(of)


@torch.library.custom_op("nanogrpo::log_softmax", mutates_args=())
def log_softmax(logits: Tensor, targets: Tensor, temperature: float, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """logp [N], entropy [N], and norm [2, N], which spares the backward a visit: opaque, of the implementation that made it."""
    return rows_for(logits.device).log_softmax_forward(logits, targets, temperature, mask)


@log_softmax.register_fake
def _(logits: Tensor, targets: Tensor, temperature: float, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    norm = logits.new_empty(2, logits.shape[0], dtype=accumulate(logits.dtype))
    return torch.empty_like(norm[0]), torch.empty_like(norm[0]), norm


@torch.library.custom_op("nanogrpo::log_softmax_backward", mutates_args=())
def _log_softmax_backward(
    logits: Tensor,
    targets: Tensor,
    temperature: float,
    norm: Tensor,
    entropy: Tensor,
    dlogp: Tensor,
    dentropy: Tensor,
    mask: Tensor | None,
) -> Tensor:
    args = targets, temperature, norm, entropy, dlogp.contiguous(), dentropy.contiguous(), mask
    return rows_for(logits.device).log_softmax_backward(logits, *args)


@_log_softmax_backward.register_fake
def _(logits: Tensor, *_: object) -> Tensor:
    return logits.new_empty(logits.shape)


def _log_softmax_setup(ctx, inputs, output) -> None:
    logits, targets, ctx.temperature, mask = inputs
    _, entropy, norm = output
    ctx.save_for_backward(logits, targets, norm, entropy, mask)
    ctx.mark_non_differentiable(norm)


def _log_softmax_grad(ctx, dlogp: Tensor, dentropy: Tensor, _dnorm: Tensor) -> tuple:
    logits, targets, norm, entropy, mask = ctx.saved_tensors
    grad = _log_softmax_backward(logits, targets, ctx.temperature, norm, entropy, dlogp, dentropy, mask)
    return grad, None, None, None


log_softmax.register_autograd(_log_softmax_grad, setup_context=_log_softmax_setup)


@torch.library.custom_op("nanogrpo::policy", mutates_args=())
def policy(
    logp: Tensor,
    old_logp: Tensor | None,
    advantage: Tensor,
    weight: Tensor,
    ref_logp: Tensor | None,
    importance: Tensor | None,
    objective: Sequence[float],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """loss [], dloss/dlogp [M], clip [M], kl [M] (or [0]), stats [len(STATS)]."""
    args = logp, old_logp, advantage, weight, ref_logp, importance
    return rows_for(logp.device).policy_forward(*args, Objective(*objective))


@policy.register_fake
def _(
    logp: Tensor, old_logp, advantage, weight, ref_logp, importance, objective
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    clip = torch.empty_like(logp, dtype=torch.int8)
    kl = torch.empty_like(logp) if ref_logp is not None else logp.new_empty(0)
    return logp.new_empty(()), torch.empty_like(logp), clip, kl, logp.new_empty(len(STATS))


def _policy_setup(ctx, inputs, output) -> None:
    ctx.others = len(inputs) - 1  # arguments without a gradient
    ctx.save_for_backward(output[1], inputs[0])
    ctx.mark_non_differentiable(*output[1:])


def _policy_grad(ctx, upstream: Tensor, *_: Tensor) -> tuple:
    grad, logp = ctx.saved_tensors
    return _scaled(grad, upstream, logp), *(None,) * ctx.others


policy.register_autograd(_policy_grad, setup_context=_policy_setup)


@torch.library.custom_op("nanogrpo::head_logp", mutates_args=())
def head_logp(hidden: Tensor, lm_head: Tensor, targets: Tensor, temperature: float, chunk: int) -> tuple[Tensor, Tensor, Tensor]:
    """logp [M], entropy [M], norm [2, M] as of `log_softmax`; the backward computes each chunk's logits again."""
    return head.logp_forward(rows_for(hidden.device), hidden, lm_head, targets, temperature, chunk)


@head_logp.register_fake
def _(hidden: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    norm = hidden.new_empty(2, hidden.shape[0], dtype=accumulate(hidden.dtype))
    return torch.empty_like(norm[0]), torch.empty_like(norm[0]), norm


@torch.library.custom_op("nanogrpo::head_logp_backward", mutates_args=())
def _head_logp_backward(
    hidden: Tensor,
    lm_head: Tensor,
    targets: Tensor,
    temperature: float,
    chunk: int,
    norm: Tensor,
    entropy: Tensor,
    dlogp: Tensor,
    dentropy: Tensor,
) -> tuple[Tensor, Tensor]:
    args = hidden, lm_head, targets, temperature, chunk, norm, entropy, dlogp, dentropy
    return head.logp_backward(rows_for(hidden.device), *args)


@_head_logp_backward.register_fake
def _(hidden: Tensor, lm_head: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return torch.empty_like(hidden), torch.empty_like(lm_head)


def _head_logp_setup(ctx, inputs, output) -> None:
    hidden, lm_head, targets, ctx.temperature, ctx.chunk = inputs
    _, entropy, norm = output
    ctx.save_for_backward(hidden, lm_head, targets, norm, entropy)
    ctx.mark_non_differentiable(norm)


def _head_logp_grad(ctx, dlogp: Tensor, dentropy: Tensor, _dnorm: Tensor) -> tuple:
    hidden, lm_head, targets, norm, entropy = ctx.saved_tensors
    settings = ctx.temperature, ctx.chunk
    return *_head_logp_backward(hidden, lm_head, targets, *settings, norm, entropy, dlogp, dentropy), None, None, None


head_logp.register_autograd(_head_logp_grad, setup_context=_head_logp_setup)


@torch.library.custom_op("nanogrpo::head_policy", mutates_args=())
def head_policy(
    hidden: Tensor,
    lm_head: Tensor,
    targets: Tensor,
    temperature: float,
    old_logp: Tensor | None,
    advantage: Tensor,
    weight: Tensor,
    ref_logp: Tensor | None,
    importance: Tensor | None,
    entropy_weight: Tensor | None,
    objective: Sequence[float],
    chunk: int,
    need_dhidden: bool,
    need_dhead: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """loss, logp, entropy, clip, kl (or [0]), stats, dhidden (or [0]), dhead (or [0], in the accumulator's type)."""
    rows, o = rows_for(hidden.device), Objective(*objective)
    vectors = old_logp, advantage, weight, ref_logp, importance
    args = rows, hidden, lm_head, targets, temperature, *vectors, entropy_weight, o, chunk, need_dhidden, need_dhead
    logp, entropy, dhidden, dhead = head.policy_forward(*args)
    loss, _, clip, kl, stats = rows.policy_forward(logp, *vectors, o)
    if entropy_weight is not None:
        loss = loss - (entropy_weight * entropy).sum()
    dhidden = hidden.new_empty(0) if dhidden is None else dhidden
    dhead = logp.new_empty(0) if dhead is None else dhead
    return loss, logp, entropy, clip, kl, stats, dhidden, dhead


@head_policy.register_fake
def _(hidden, lm_head, targets, temperature, old_logp, advantage, weight, ref_logp, *rest: object) -> tuple[Tensor, ...]:
    need_dhidden, need_dhead = rest[-2:]
    logp = hidden.new_empty(hidden.shape[0], dtype=accumulate(hidden.dtype))
    kl = torch.empty_like(logp) if ref_logp is not None else logp.new_empty(0)
    dhidden = torch.empty_like(hidden) if need_dhidden else hidden.new_empty(0)
    dhead = torch.empty_like(lm_head, dtype=logp.dtype) if need_dhead else logp.new_empty(0)
    clip = torch.empty_like(logp, dtype=torch.int8)
    return logp.new_empty(()), logp, torch.empty_like(logp), clip, kl, logp.new_empty(len(STATS)), dhidden, dhead


def _head_policy_setup(ctx, inputs, output) -> None:
    ctx.need, ctx.others = inputs[-2:], len(inputs) - 2
    ctx.save_for_backward(*output[-2:], *inputs[:2])
    ctx.mark_non_differentiable(*output[1:])


def _head_policy_grad(ctx, upstream: Tensor, *_: Tensor) -> tuple:
    dhidden, dhead, hidden, lm_head = ctx.saved_tensors
    first = _scaled(dhidden, upstream, hidden) if ctx.need[0] else None
    second = _scaled(dhead, upstream, lm_head) if ctx.need[1] else None
    return first, second, *(None,) * ctx.others


head_policy.register_autograd(_head_policy_grad, setup_context=_head_policy_setup)
