"""The seam between the algorithm and the kernels: five operations, which is all that the rest of
the project computes with.

In: logits [N, V], or hidden states [M, D] and the output head [V, D]; per-token vectors [M]. Out:
log-probs, entropies and the policy loss with its gradient. The `head_*` operations hold logits for
a chunk of rows only, never [M, V].

| operation | in → out | used for |
|---|---|---|
| `selective_log_softmax` | logits [N, V] → log-prob [N], entropy [N] | logits that exist anyway: benches and tests |
| `policy_loss` | log-probs [M] → loss | the clip on log-probs that exist anyway: benches and tests |
| `head_logp` | hidden [M, D] → log-prob [M], entropy [M] | old, reference and evaluation log-probs; phase one of two |
| `head_policy_loss` | hidden [M, D] → loss | the training step: three matrix products instead of four |
| `linear` | [T, I] → [T, O] | the decoder's layers: on a CPU by the faster of two libraries (kernels/linear.py) |

On CUDA the first four run the Triton kernels of `kernels/`, elsewhere the equations of
kernels/reference.py; `use` forces one. Read next: custom_ops.py (how torch knows them),
kernels/README.md (how kernels come from the equations), grpo.py (who calls).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nanogrpo.errors import UserError
from nanogrpo.kernels import head, reference
from nanogrpo.kernels.reference import Objective

# The four operations as autograd Functions, the way norm.py, rope.py and swiglu.py already do it.

STATS = ("tokens", "ratio", "clip_low", "clip_high", "kl", "k1")  # the sums in PolicyOut.stats

_chosen: str | None = os.environ.get("NANOGRPO_OPS") or None
_told: set[str] = set()


def use(name: str | None) -> None:
    """Force "triton" or "torch" on every device; None: choose by device. Same as setting
    NANOGRPO_OPS.
    """
    global _chosen
    _chosen = name
    _told.clear()


def implementation(device: torch.device | str) -> str:
    """ "triton" on CUDA, "torch" elsewhere, unless forced; logged once."""
    kind = torch.device(device).type
    name = _chosen or ("triton" if kind == "cuda" else "torch")
    if name not in ("triton", "torch"):
        raise UserError(
            f"NANOGRPO_OPS is {name!r}: set it to 'triton' or 'torch', or leave it unset to choose by device."
        )
    if kind not in _told:
        _told.add(kind)
        logging.getLogger("nanogrpo").info(
            "ops on %s run in %s%s", kind, name, " (forced)" if _chosen else ""
        )
    return name


def rows_for(device: torch.device) -> ModuleType:
    if implementation(device) == "torch":
        return reference
    from nanogrpo.kernels import rows  # Triton is imported only where it runs

    return rows


class _LogSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, temperature, mask):
        logp, entropy, norm = rows_for(logits.device).log_softmax_forward(
            logits, targets, temperature, mask
        )
        ctx.save_for_backward(logits, targets, norm, entropy, mask)
        ctx.temperature = temperature
        return logp, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, dlogp, dentropy):
        logits, targets, norm, entropy, mask = ctx.saved_tensors
        args = ctx.temperature, norm, entropy, dlogp.contiguous(), dentropy.contiguous(), mask
        return (
            rows_for(logits.device).log_softmax_backward(logits, targets, *args),
            None,
            None,
            None,
        )


class _HeadLogp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, lm_head, targets, temperature, chunk):
        logp, entropy, norm = head.logp_forward(
            rows_for(hidden.device), hidden, lm_head, targets, temperature, chunk
        )
        ctx.save_for_backward(hidden, lm_head, targets, norm, entropy)
        ctx.settings = temperature, chunk
        return logp, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, dlogp, dentropy):
        hidden, lm_head, targets, norm, entropy = ctx.saved_tensors
        args = hidden, lm_head, targets, *ctx.settings, norm, entropy, dlogp, dentropy
        return *head.logp_backward(rows_for(hidden.device), *args), None, None, None


class _Policy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logp, vectors, objective):
        out = rows_for(logp.device).policy_forward(logp, *vectors, objective)
        ctx.save_for_backward(out[1])
        ctx.mark_non_differentiable(*out[2:])
        return out[0], *out[2:]

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream, *_):
        (grad,) = ctx.saved_tensors
        return grad * upstream, None, None


class _HeadPolicy(torch.autograd.Function):
    """The gradients are taken in the forward, while the chunk's logits exist; the backward only
    scales them.
    """

    @staticmethod
    def forward(
        ctx, hidden, lm_head, targets, temperature, vectors, entropy_weight, objective, chunk, grad
    ):
        rows, need = rows_for(hidden.device), [grad and x for x in ctx.needs_input_grad[:2]]
        args = (
            hidden,
            lm_head,
            targets,
            temperature,
            *vectors,
            entropy_weight,
            objective,
            chunk,
            *need,
        )
        logp, entropy, dhidden, dhead = head.policy_forward(rows, *args)
        loss, _, clip, kl, stats = rows.policy_forward(logp, *vectors, objective)
        if entropy_weight is not None:
            loss = loss - (entropy_weight * entropy).sum()
        ctx.save_for_backward(dhidden, dhead)
        ctx.types = hidden.dtype, lm_head.dtype
        ctx.mark_non_differentiable(logp, entropy, clip, kl, stats)
        return loss, logp, entropy, clip, kl, stats

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream, *_):
        grads = (
            None if g is None else (g * upstream).to(t)
            for g, t in zip(ctx.saved_tensors, ctx.types)
        )
        return *grads, *(None,) * 7


# (hidden [M, D], lm_head [V, D]) → anything: what Decoder.forward_packed applies
HeadOp = Callable[[Tensor, Tensor], object]


class PolicyOut(NamedTuple):
    """What the loss operations give back. Only `loss` carries a gradient; rows with weight 0 hold
    zeros.
    """

    # [] float32: sum_j weight_j * l_j - entropy_weight_j * H_j, the root of the graph up to a
    # scalar
    loss: Tensor
    logp: Tensor  # [M] float32
    entropy: Tensor | None  # [M] float32, nats; None from `policy_loss`, which sees no distribution
    # [M] int8: -1 below 1 - epsilon with A < 0, +1 above 1 + epsilon_high with A > 0, else 0; None:
    # no clip
    clip: Tensor | None
    # [M] float32: k3 to the reference (times the ratio under bias correction); None without
    # ref_logp
    kl: Tensor | None = None
    stats: Tensor | None = None  # [len(STATS)] float32: sums over the tokens with weight != 0
    # more figures [M] to log the mean of, by their name in the log
    seen: dict[str, Tensor] | None = None
    # clip and seen hold one value a sequence, repeated for its tokens: their means are over
    # sequences
    by_sequence: bool = False


def default_chunk(vocab: int, dtype: torch.dtype, device: torch.device) -> int:
    """Rows whose logits fit the memory of a chunk: 2.5 GB on CUDA (8228 rows of Qwen3 in bfloat16),
    64 MB elsewhere.

    Elsewhere at most 512 rows, too: a dozen tensors of this size come and go, and small ones get
    the memory of those before, where large ones cost fresh pages of the operating system each time
    (docs/log.md; with a large vocabulary they still do).
    """
    if device.type == "cuda":
        return max(1, int(2.5e9 // (vocab * dtype.itemsize)))
    return min(512, max(1, int(64e6 // (vocab * dtype.itemsize))))


def _same_type(hidden: Tensor, lm_head: Tensor) -> None:
    if hidden.dtype != lm_head.dtype:
        raise ValueError(
            f"hidden is {hidden.dtype} and lm_head {lm_head.dtype}: the head multiplies them, cast one to the other."
        )


def selective_log_softmax(
    logits: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    *,
    entropy: bool = False,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """log softmax(logits / temperature)[targets] without writing the softmax; differentiable
    through both results.

    logits [N, V] (bf16, fp16, fp32; fp64 for finite differences; rows may be strided), targets [N]
    int64 → log-prob [N] float32, entropy [N] float32 in nats or None. Rows where mask [N] (bool) is
    False give 0 and no gradient, whatever they hold.
    """
    logp, h = _LogSoftmax.apply(logits, targets, float(temperature), mask)
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
    """Σ_j weight_j l_j over [M] tokens, l as in `kernels.reference.policy_terms`; the gradient
    flows to logp alone.

    All vectors [M] float32. old_logp None: on policy, the ratio is 1 in value and carries the
    gradient. Tokens with weight 0 count for nothing even where they hold nan. importance multiplies
    the clipped term, never the KL.
    """
    objective = _objective(epsilon, epsilon_high, delta, beta, use_bias_correction_kl, ref_logp)
    vectors = old_logp, advantage, weight, ref_logp, importance
    loss, clip, kl, stats = _Policy.apply(logp, vectors, objective)
    return PolicyOut(loss, logp.detach(), None, clip, None if ref_logp is None else kl, stats)


def _objective(
    epsilon: float,
    epsilon_high: float,
    delta: float | None,
    beta: float,
    use_bias_correction_kl: bool,
    ref_logp: Tensor | None,
) -> Objective:
    if beta != 0.0 and ref_logp is None:
        raise ValueError(
            f"beta is {beta} but ref_logp is None: the KL needs the reference model's log-probs."
        )
    numbers = (
        epsilon,
        epsilon_high,
        float("inf") if delta is None else delta,
        beta,
        use_bias_correction_kl,
    )
    return Objective(*map(float, numbers))


def head_logp(
    hidden: Tensor,
    lm_head: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    *,
    entropy: bool = False,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Log-prob (and entropy) of targets under softmax(hidden @ lm_head.T / temperature), logits
    never more than a chunk.

    hidden [M, D], lm_head [V, D] of one type, targets [M] int64 → [M] float32 each. Differentiable:
    the backward computes each chunk's logits again (four matrix products in all), except for rows
    whose upstream gradient is 0. chunk: rows at a time. Logits are rounded to the type of hidden,
    as inference engines do; everything after them is float32.
    """
    _same_type(hidden, lm_head)
    chunk = chunk or default_chunk(lm_head.shape[0], hidden.dtype, hidden.device)
    logp, h = _HeadLogp.apply(hidden, lm_head, targets, float(temperature), chunk)
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
    """`policy_loss` of `head_logp`, minus Σ entropy_weight · H, with the gradients computed in the
    forward pass: three products.

    hidden [M, D], lm_head [V, D] of one type; vectors [M]. The loss must be the root of the graph
    up to a scalar factor, and weight known beforehand (kernels/head.py says why). Tokens whose
    weight and entropy_weight are 0 are not computed (zeros in the results); tokens without
    advantage, KL or entropy term cost one product. Under `no_grad` every token costs one.
    """
    _same_type(hidden, lm_head)
    objective = _objective(epsilon, epsilon_high, delta, beta, use_bias_correction_kl, ref_logp)
    chunk = chunk or default_chunk(lm_head.shape[0], hidden.dtype, hidden.device)
    vectors = old_logp, advantage, weight, ref_logp, importance
    args = (
        targets,
        float(temperature),
        vectors,
        entropy_weight,
        objective,
        chunk,
        torch.is_grad_enabled(),
    )
    loss, logp, entropy, clip, kl, stats = _HeadPolicy.apply(hidden, lm_head, *args)
    return PolicyOut(loss, logp, entropy, clip, None if ref_logp is None else kl, stats)
