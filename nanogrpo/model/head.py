"""The operations on the output head: all that the rest of the project asks of the kernels.

In: hidden states [M, D] and the output head [V, D], or logits [N, V]; per-token vectors [M]. Out:
log-probs, entropies, and the policy loss with its gradient. The `head_*` operations hold the logits
of one chunk of rows, never [M, V].

| operation | in → out | used for |
|---|---|---|
| `head_policy_loss` | hidden [M, D] → loss | the training step: three matrix products |
| `head_logp` | hidden [M, D] → log-prob, entropy [M] | old and reference log-probs |
| `policy_loss` | log-prob [M] → loss | log-probs that exist already: tests, benches |
| `selective_log_softmax` | logits [N, V] → log-prob, entropy [N] | the same for logits |

On CUDA they run the Triton kernels, elsewhere the equations of kernels/reference.py. The
environment variable NANOGRPO_OPS (`triton` or `torch`) forces one of the two. Read next:
kernels/reference.py (the loss), kernels/head.py (the loop over chunks), kernels/README.md.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nanogrpo.errors import UserError
from nanogrpo.kernels import reference
from nanogrpo.kernels.head import HeadLogp, HeadPolicyLoss
from nanogrpo.kernels.reference import LossInputs, Objective

# (hidden [M, D], lm_head [V, D]) → anything: what Decoder.forward_packed applies
HeadOp = Callable[[Tensor, Tensor], Any]


class PolicyOut(NamedTuple):
    """The result of a loss. Only `loss` has a gradient; tokens with weight 0 hold zeros."""

    loss: Tensor  # [] float32: Σ weight · l - entropy_weight · H
    logp: Tensor  # [M] float32
    entropy: Tensor | None  # [M] float32, nats; None from `policy_loss`, which sees no distribution
    kl: Tensor | None  # [M] float32: the KL of kernels/reference.py; None without ref_logp
    # More vectors [M] by the name under which the log shows their mean. "clip" is int8: -1 clipped
    # low, +1 clipped high, else 0.
    metrics: dict[str, Tensor]
    # The metrics hold one value per sequence, repeated for its tokens: their means are over
    # sequences.
    by_sequence: bool = False


def row_functions(device: torch.device) -> ModuleType:
    """Return kernels/fused_rows.py or kernels/reference.py, which have the same functions."""
    return _module(device.type, os.environ.get("NANOGRPO_OPS", ""))


@functools.cache
def _module(device: str, forced: str) -> ModuleType:
    name = forced or ("triton" if device == "cuda" else "torch")
    if name not in ("triton", "torch"):
        raise UserError(
            f"NANOGRPO_OPS is {name!r}: set it to 'triton' or 'torch', or leave it unset to "
            "choose by device."
        )
    logging.getLogger("nanogrpo").info(
        "ops on %s run in %s%s", device, name, " (forced)" if forced else ""
    )
    if name == "torch":
        return reference
    from nanogrpo.kernels import fused_rows  # imports Triton, which a CPU does not need

    return fused_rows


def default_chunk(vocab: int, dtype: torch.dtype, device: torch.device) -> int:
    """Return how many rows of logits a chunk has: 2.5 GB on CUDA (8228 rows of Qwen3 in bfloat16),
    64 MB and at most 512 rows elsewhere.

    The limit of 512 keeps the temporaries of a chunk small, so the allocator reuses their memory.
    Larger ones cost fresh pages of the operating system each time (docs/log.md).
    """
    if device.type == "cuda":
        return max(1, int(2.5e9 // (vocab * dtype.itemsize)))
    return min(512, max(1, int(64e6 // (vocab * dtype.itemsize))))


@torch.compiler.disable  # torch.compile leaves the head alone: its shapes depend on the data
def head_policy_loss(
    hidden: Tensor,
    lm_head: Tensor,
    targets: Tensor,
    inputs: LossInputs,
    objective: Objective,
    *,
    temperature: float = 1.0,
    chunk: int | None = None,
) -> PolicyOut:
    """Compute `policy_loss` of `head_logp` minus Σ entropy_weight · H, in three matrix products.

    hidden [M, D], lm_head [V, D] of the same type, targets [M] int64; chunk: rows at a time. The
    gradients are computed during the forward pass, so the loss must be the root of the graph up to
    a scalar factor, and `inputs.weight` must be known beforehand. Tokens whose weight and
    entropy_weight are 0 are skipped (zeros in the results); tokens without advantage, KL or entropy
    term cost one product. Under `no_grad` every token costs one.
    """
    _check(inputs, objective)
    if not torch.is_grad_enabled():
        hidden, lm_head = hidden.detach(), lm_head.detach()
    chunk = chunk or default_chunk(len(lm_head), hidden.dtype, hidden.device)
    args = targets, inputs, objective, temperature, chunk, row_functions(hidden.device)
    loss, logp, entropy, clip, kl = HeadPolicyLoss.apply(hidden, lm_head, *args)
    return PolicyOut(loss, logp, entropy, kl, {"clip": clip})


@torch.compiler.disable
def head_logp(
    hidden: Tensor,
    lm_head: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    *,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return log-prob and entropy [M] float32 under softmax(hidden @ lm_head.T / temperature).

    hidden [M, D], lm_head [V, D] of the same type, targets [M] int64; chunk: rows at a time.
    Differentiable: the backward computes each chunk's logits again, except for rows with an
    upstream gradient of 0. Logits are rounded to the type of hidden, as inference engines do;
    everything after them is float32.
    """
    chunk = chunk or default_chunk(len(lm_head), hidden.dtype, hidden.device)
    args = targets, temperature, chunk, row_functions(hidden.device)
    return HeadLogp.apply(hidden, lm_head, *args)


def policy_loss(logp: Tensor, inputs: LossInputs, objective: Objective) -> PolicyOut:
    """Return Σ weight · l over [M] log-probs, with l as in `kernels.reference.policy_terms`.

    The gradient flows to logp alone. Tokens with weight 0 count for nothing, even where they hold
    NaN. There is no entropy term: a log-prob does not determine an entropy.
    """
    _check(inputs, objective)
    loss, clip, kl = _PolicyLoss.apply(logp, inputs, objective)
    return PolicyOut(loss, logp.detach(), None, kl, {"clip": clip})


def selective_log_softmax(
    logits: Tensor, targets: Tensor, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return log softmax(logits / temperature)[targets] [N] and the entropy [N], float32.

    logits [N, V] (bf16, fp16, fp32; fp64 for finite differences; rows may be strided), targets [N]
    int64. The softmax is never written to memory. Differentiable through both results.
    """
    return _LogSoftmax.apply(logits, targets, temperature)


def _check(inputs: LossInputs, objective: Objective) -> None:
    if objective.beta != 0.0 and inputs.ref_logp is None:
        raise ValueError(
            f"beta is {objective.beta} but ref_logp is None: the KL needs the reference model's "
            "log-probs."
        )


class _PolicyLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logp, inputs, objective):
        loss, dlogp, clip, kl = row_functions(logp.device).policy_forward(logp, inputs, objective)
        ctx.save_for_backward(dlogp)
        ctx.mark_non_differentiable(*(x for x in (clip, kl) if x is not None))
        return loss, clip, kl

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream, *_):
        (dlogp,) = ctx.saved_tensors
        return dlogp * upstream, None, None


class _LogSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, temperature):
        rows = row_functions(logits.device)
        logp, entropy, norm = rows.log_softmax_forward(logits, targets, temperature)
        ctx.save_for_backward(logits, targets, norm, entropy)
        ctx.settings = rows, temperature
        return logp, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, dlogp, dentropy):
        logits, targets, norm, entropy = ctx.saved_tensors
        rows, temperature = ctx.settings
        args = logits, targets, temperature, norm, entropy, dlogp, dentropy
        return rows.log_softmax_backward(*args), None, None
