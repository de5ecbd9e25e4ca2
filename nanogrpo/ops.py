"""The seam between the algorithm and the kernels: four operations, and which implementation of each runs.

In: logits [N, V], or hidden states [M, D] and the output head [V, D]; per-token vectors [M]. Out: log-probs, entropies and the
policy loss with its gradient. The `head_*` operations hold logits for a chunk of rows only, never [M, V].

| operation | in → out | used for |
|---|---|---|
| `selective_log_softmax` | logits [N, V] → log-prob [N], entropy [N] | logits that exist anyway: the embedded engine, tests |
| `policy_loss` | log-probs [M] → loss | losses in two phases: sequence-level ratios, entropy quantiles |
| `head_logp` | hidden [M, D] → log-prob [M], entropy [M] | old, reference and evaluation log-probs; phase one of two |
| `head_policy_loss` | hidden [M, D] → loss | the training step: three matrix products instead of four |

On CUDA they run the Triton kernels of `kernels/`, elsewhere the equations of kernels/reference.py: chosen by device, said once
in the log, never changed behind your back. Each is a `torch.library` custom op: torch.compile passes it without a graph break.
Read next: kernels/README.md (how the kernels come from the equations), grpo.py (who calls).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor, nn

from nanogrpo.errors import UserError
from nanogrpo.kernels import head, reference
from nanogrpo.kernels.reference import Objective, accumulate

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


def _rows(device: torch.device) -> ModuleType:
    """The module of row functions for a device. Triton is imported here, so that a machine without it can use the reference."""
    if implementation(device) == "torch":
        return reference
    from nanogrpo.kernels import rows

    return rows


# ---------------------------------------------------------------------------------------------------------- registered ops
# One pattern for all: a custom op computes, `setup` keeps what the backward needs, and the backward is a custom op too. Ops
# without a derivative raise when differentiated, so that a double backward is an error and not a wrong number.


@torch.library.custom_op("nanogrpo::scaled", mutates_args=())
def _scaled(grad: Tensor, upstream: Tensor, of: Tensor) -> Tensor:
    """grad · upstream in the type of `of`, the input whose gradient it is. upstream stays on the device: no host sync."""
    return torch.mul(grad, upstream, out=torch.empty_like(of))


@_scaled.register_fake
def _(grad: Tensor, upstream: Tensor, of: Tensor) -> Tensor:
    return torch.empty_like(of)


@torch.library.custom_op("nanogrpo::log_softmax", mutates_args=())
def _log_softmax(logits: Tensor, targets: Tensor, temperature: float, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    return _rows(logits.device).log_softmax_forward(logits, targets, temperature, mask)


@_log_softmax.register_fake
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
    return _rows(logits.device).log_softmax_backward(logits, *args)


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


_log_softmax.register_autograd(_log_softmax_grad, setup_context=_log_softmax_setup)


@torch.library.custom_op("nanogrpo::policy", mutates_args=())
def _policy(
    logp: Tensor,
    old_logp: Tensor | None,
    advantage: Tensor,
    weight: Tensor,
    ref_logp: Tensor | None,
    importance: Tensor | None,
    objective: Sequence[float],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    args = logp, old_logp, advantage, weight, ref_logp, importance
    return _rows(logp.device).policy_forward(*args, Objective(*objective))


@_policy.register_fake
def _(
    logp: Tensor, old_logp, advantage, weight, ref_logp, importance, objective
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    clip = torch.empty_like(logp, dtype=torch.int8)
    kl = torch.empty_like(logp) if ref_logp is not None else logp.new_empty(0)
    return logp.new_empty(()), torch.empty_like(logp), clip, kl, logp.new_empty(len(STATS))


def _policy_setup(ctx, inputs, output) -> None:
    ctx.save_for_backward(output[1], inputs[0])
    ctx.mark_non_differentiable(*output[1:])


def _policy_grad(ctx, upstream: Tensor, *_: Tensor) -> tuple:
    grad, logp = ctx.saved_tensors
    return _scaled(grad, upstream, logp), *(None,) * 6


_policy.register_autograd(_policy_grad, setup_context=_policy_setup)


@torch.library.custom_op("nanogrpo::head_logp", mutates_args=())
def _head_logp(hidden: Tensor, lm_head: Tensor, targets: Tensor, temperature: float, chunk: int) -> tuple[Tensor, Tensor, Tensor]:
    return head.logp_forward(_rows(hidden.device), hidden, lm_head, targets, temperature, chunk)


@_head_logp.register_fake
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
    return head.logp_backward(_rows(hidden.device), *args)


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


_head_logp.register_autograd(_head_logp_grad, setup_context=_head_logp_setup)


@torch.library.custom_op("nanogrpo::head_policy", mutates_args=())
def _head_policy(
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
    rows, o = _rows(hidden.device), Objective(*objective)
    vectors = old_logp, advantage, weight, ref_logp, importance
    args = rows, hidden, lm_head, targets, temperature, *vectors, entropy_weight, o, chunk, need_dhidden, need_dhead
    logp, entropy, dhidden, dhead = head.policy_forward(*args)
    loss, _, clip, kl, stats = rows.policy_forward(logp, *vectors, o)
    if entropy_weight is not None:
        loss = loss - (entropy_weight * entropy).sum()
    dhidden = hidden.new_empty(0) if dhidden is None else dhidden
    dhead = logp.new_empty(0) if dhead is None else dhead
    return loss, logp, entropy, clip, kl, stats, dhidden, dhead


@_head_policy.register_fake
def _(hidden, lm_head, targets, temperature, old_logp, advantage, weight, ref_logp, *rest: object) -> tuple[Tensor, ...]:
    need_dhidden, need_dhead = rest[-2:]
    logp = hidden.new_empty(hidden.shape[0], dtype=accumulate(hidden.dtype))
    kl = torch.empty_like(logp) if ref_logp is not None else logp.new_empty(0)
    dhidden = torch.empty_like(hidden) if need_dhidden else hidden.new_empty(0)
    dhead = torch.empty_like(lm_head, dtype=logp.dtype) if need_dhead else logp.new_empty(0)
    clip = torch.empty_like(logp, dtype=torch.int8)
    return logp.new_empty(()), logp, torch.empty_like(logp), clip, kl, logp.new_empty(len(STATS)), dhidden, dhead


def _head_policy_setup(ctx, inputs, output) -> None:
    ctx.need = inputs[-2:]
    ctx.save_for_backward(*output[-2:], *inputs[:2])
    ctx.mark_non_differentiable(*output[1:])


def _head_policy_grad(ctx, upstream: Tensor, *_: Tensor) -> tuple:
    dhidden, dhead, hidden, lm_head = ctx.saved_tensors
    first = _scaled(dhidden, upstream, hidden) if ctx.need[0] else None
    second = _scaled(dhead, upstream, lm_head) if ctx.need[1] else None
    return first, second, *(None,) * 12


_head_policy.register_autograd(_head_policy_grad, setup_context=_head_policy_setup)


# ------------------------------------------------------------------------------------------------------- public functions


def default_chunk(vocab: int, dtype: torch.dtype, device: torch.device) -> int:
    """Rows whose logits fit the memory of a chunk: 2.5 GB on CUDA (8228 rows of Qwen3 in bfloat16), 64 MB elsewhere."""
    budget = 2.5e9 if device.type == "cuda" else 64e6
    return max(1, int(budget // (vocab * dtype.itemsize)))


def _same_type(hidden: Tensor, lm_head: Tensor) -> None:
    if hidden.dtype != lm_head.dtype:
        raise ValueError(
            f"hidden is {hidden.dtype} and lm_head {lm_head.dtype}: the head multiplies them, cast one to the other."
        )


def selective_log_softmax(
    logits: Tensor, targets: Tensor, temperature: float = 1.0, *, entropy: bool = False, mask: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """log softmax(logits / temperature)[targets] without writing the softmax; differentiable through both results.

    logits [N, V] (bf16, fp16, fp32; fp64 for finite differences; rows may be strided), targets [N] int64 → log-prob [N] float32,
    entropy [N] float32 in nats or None. Rows where mask [N] (bool) is False give 0 and no gradient, whatever they hold.
    """
    logp, h, _ = _log_softmax(logits, targets, float(temperature), mask)
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
    """Σ_j weight_j l_j over [M] tokens, l as in `kernels.reference.policy_terms`; the gradient flows to logp alone.

    All vectors [M] float32. old_logp None: on policy, the ratio is 1 in value and carries the gradient. Tokens with weight 0
    count for nothing even where they hold nan. importance multiplies the clipped term, never the KL.
    """
    objective = _objective(epsilon, epsilon_high, delta, beta, use_bias_correction_kl, ref_logp)
    loss, _, clip, kl, stats = _policy(logp, old_logp, advantage, weight, ref_logp, importance, objective)
    return PolicyOut(loss, logp.detach(), None, clip, None if ref_logp is None else kl, stats)


def _objective(
    epsilon: float, epsilon_high: float, delta: float | None, beta: float, use_bias_correction_kl: bool, ref_logp: Tensor | None
) -> list[float]:
    if beta != 0.0 and ref_logp is None:
        raise ValueError(f"beta is {beta} but ref_logp is None: the KL needs the reference model's log-probs.")
    numbers = epsilon, epsilon_high, float("inf") if delta is None else delta, beta, use_bias_correction_kl
    return [float(x) for x in numbers]  # the fields of Objective, in its order


def head_logp(
    hidden: Tensor, lm_head: Tensor, targets: Tensor, temperature: float = 1.0, *, entropy: bool = False, chunk: int | None = None
) -> tuple[Tensor, Tensor | None]:
    """Log-prob (and entropy) of targets under softmax(hidden @ lm_head.T / temperature), logits never more than a chunk.

    hidden [M, D], lm_head [V, D] of one type, targets [M] int64 → [M] float32 each. Differentiable: the backward computes each
    chunk's logits again (four matrix products in all), except for rows whose upstream gradient is 0. chunk: rows at a time.
    Logits are rounded to the type of hidden, as inference engines do; everything after them is float32.
    """
    _same_type(hidden, lm_head)
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
    """`policy_loss` of `head_logp`, minus Σ entropy_weight · H, with the gradients computed in the forward pass: three products.

    hidden [M, D], lm_head [V, D] of one type; vectors [M]. The loss must be the root of the graph up to a scalar factor, and
    weight known beforehand (kernels/head.py says why). Tokens whose weight and entropy_weight are 0 are not computed (zeros in
    the results); tokens without advantage, KL or entropy term cost one product. Under `no_grad` every token costs one.
    """
    _same_type(hidden, lm_head)
    grad = torch.is_grad_enabled()
    objective = _objective(epsilon, epsilon_high, delta, beta, use_bias_correction_kl, ref_logp)
    chunk = chunk or default_chunk(lm_head.shape[0], hidden.dtype, hidden.device)
    vectors = old_logp, advantage, weight, ref_logp, importance, entropy_weight
    need = grad and hidden.requires_grad, grad and lm_head.requires_grad
    out = _head_policy(hidden, lm_head, targets, float(temperature), *vectors, objective, chunk, *need)
    loss, logp, entropy, clip, kl, stats, _, _ = out
    return PolicyOut(loss, logp, entropy, clip, None if ref_logp is None else kl, stats)


class PolicyHead(nn.Module):
    """The output head as a module whose forward gives the loss: FSDP2 then gathers its weight once and reduces its gradient once.

    `fully_shard` it as a unit of its own (or with the embedding, when the two are tied) and call the module; reading `.weight`
    outside of forward would meet a shard.
    """

    def __init__(self, weight: nn.Parameter):
        super().__init__()
        self.weight = weight  # [V, D]

    def forward(self, hidden: Tensor, targets: Tensor, *vectors: Tensor | None, **settings) -> PolicyOut:
        """`head_policy_loss` without its second argument."""
        return head_policy_loss(hidden, self.weight, targets, *vectors, **settings)
