"""The peers in bench/kernel_speed.py: PyTorch, TRL, Liger, quack, cut-cross-entropy and
bitsandbytes, called as documented.

In: a device. Out: sides by name. Each implementation, called a side, takes the inputs of a case and
returns a dict of results. If a library cannot run here, the side is a string with the reason. The N
tokens of a case are divided into eight sequences, because some libraries expect sequences. quack
and cut-cross-entropy have no temperature, so they get hidden states that are divided by it.
Operations that start with logits are not measured for these two libraries. Read next:
kernel_cases.py.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable

import torch
from torch import Tensor

from nanogrpo.extras.lora import nf4_reference

Sides = dict[str, "Callable[..., dict[str, Tensor]] | str"]
PACKAGES = (
    *("trl", "liger-kernel", "quack-kernels", "cut-cross-entropy", "bitsandbytes"),
    "nvidia-cutlass-dsl",  # the Hopper kernels of Liger and quack are written in CuTe
)


def missing(module: str, device: str) -> str | None:
    """Return the reason why a library with Triton kernels cannot run here, or None if it can."""
    if device != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return "needs a GPU, or TRITON_INTERPRET=1"
    return None if importlib.util.find_spec(module) else f"{module} is not installed"


def _missing_hopper(module: str, device: str) -> str | None:
    """Return the reason why a library with kernels in CuTe cannot run here, or None if it can."""
    if device != "cuda":
        return "needs a GPU"
    return missing(module, device) or missing("cutlass", device)


def eager_log_softmax(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Return log-prob and entropy in float32, computed in plain PyTorch."""
    logp_all = torch.log_softmax(logits.float() / temperature, -1)
    return logp_all.gather(1, targets[:, None]).squeeze(1), -(logp_all.exp() * logp_all).sum(-1)


def trl_log_softmax(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Return log-prob and entropy, computed by TRL's kernel for eight sequences."""
    from trl.kernels import selective_log_softmax_and_entropy

    logp, entropy = selective_log_softmax_and_entropy(
        logits.view(8, -1, logits.shape[-1]), targets.view(8, -1), temperature
    )
    return logp.flatten(), entropy.flatten()


def textbook_log_softmax(
    logits: Tensor, targets: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    from examples import textbook

    return textbook.textbook_log_softmax(logits, targets, temperature)


def eager_loss(
    logp: Tensor, old: Tensor, advantage: Tensor, weight: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    """Return the clipped loss and the clip flags, computed as in TRL's trainer."""
    ratio = torch.exp(logp - old)
    clipped = torch.clamp(ratio, 1 - epsilon, 1 + epsilon)
    loss = (-torch.min(ratio * advantage, clipped * advantage) * weight).sum()
    with torch.no_grad():
        low = (ratio < 1 - epsilon) & (advantage < 0)
        high = (ratio > 1 + epsilon) & (advantage > 0)
    return loss, high.to(torch.int8) - low.to(torch.int8)


def log_softmax(device: str, temperature: float) -> Sides:
    def named(function: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., dict[str, Tensor]]:
        def side(logits: Tensor, targets: Tensor) -> dict[str, Tensor]:
            logp, entropy = function(logits, targets, temperature)
            return {"logp": logp, "entropy": entropy}

        return side

    def liger(logits: Tensor, targets: Tensor) -> dict[str, Tensor]:
        from liger_kernel.ops.grpo_loss import fused_selective_log_softmax

        # Liger does not score the last position of a sequence.
        # All rows are passed to Liger as one sequence.
        logp = fused_selective_log_softmax(logits[None], targets[None, :-1], temperature)
        return {"logp": logp.flatten()}

    compiled = named(torch.compile(eager_log_softmax))
    return {
        "textbook online softmax": missing("triton", device) or named(textbook_log_softmax),
        "torch eager": named(eager_log_softmax),
        "torch.compile": "needs a GPU" if device != "cuda" else compiled,
        "TRL fused": missing("trl", device) or named(trl_log_softmax),
        "Liger (no entropy)": missing("liger_kernel", device) or liger,
    }


def rows(device: str, temperature: float, epsilon: float) -> Sides:
    def with_grad(function: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., dict]:
        def side(
            logits: Tensor, targets: Tensor, old: Tensor, advantage: Tensor, weight: Tensor
        ) -> dict[str, Tensor]:
            leaf = logits.detach().requires_grad_()
            logp, _ = function(leaf, targets, temperature)
            loss, _ = eager_loss(logp, old, advantage, weight, epsilon)
            return {"logp": logp, "grad": torch.autograd.grad(loss, leaf)[0]}

        return side

    def liger(
        logits: Tensor, targets: Tensor, old: Tensor, advantage: Tensor, weight: Tensor
    ) -> dict[str, Tensor]:
        from liger_kernel.transformers.grpo_loss import triton_grpo_loss

        # Liger takes one advantage per sequence, and does not score the last token of a sequence.
        leaf = logits.detach().view(8, -1, logits.shape[-1]).requires_grad_()
        old, targets = (v.view(8, -1)[:, :-1].contiguous() for v in (old, targets))
        per_token = triton_grpo_loss(
            leaf,
            old,
            None,
            targets,
            advantage.view(8, -1)[:, 0].contiguous(),
            temperature=temperature,
            beta=0.0,
            eps_low=epsilon,
            eps_high=epsilon,
            inplace=True,
        )[0]
        loss = (per_token * weight.view(8, -1)[:, :-1]).sum()
        return {"grad": torch.autograd.grad(loss, leaf)[0].view(logits.shape)}

    return {
        "torch eager": with_grad(eager_log_softmax),
        "TRL fused + eager loss": missing("trl", device) or with_grad(trl_log_softmax),
        "Liger grpo_loss": missing("liger_kernel", device) or liger,
    }


def head(device: str, temperature: float, epsilon: float) -> Sides:
    def with_loss(
        score: Callable[[Tensor, Tensor, Tensor], Tensor],
    ) -> Callable[..., dict[str, Tensor]]:
        def side(hidden, lm_head, targets, old, advantage, weight) -> dict[str, Tensor]:
            logp = score(hidden, lm_head, targets)
            loss, _ = eager_loss(logp, old, advantage, weight, epsilon)
            dhidden, dhead = torch.autograd.grad(loss, (hidden, lm_head))
            return {"logp": logp, "dhidden": dhidden, "dhead": dhead}

        return side

    def plain(hidden: Tensor, lm_head: Tensor, targets: Tensor) -> Tensor:
        return (
            torch.log_softmax((hidden @ lm_head.T).float() / temperature, -1)
            .gather(1, targets[:, None])
            .squeeze(1)
        )

    def trl(hidden: Tensor, lm_head: Tensor, targets: Tensor) -> Tensor:
        from trl.kernels import ChunkedLogProbFunction
        from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE

        outputs = ("entropy",)  # what TRL's GRPO trainer requests
        return ChunkedLogProbFunction.apply(
            hidden,
            lm_head,
            None,
            targets,
            temperature,
            _CHUNKED_LOGPROB_CHUNK_SIZE,
            None,
            1.0,
            outputs,
        )[0]

    def liger_sm90(hidden: Tensor, lm_head: Tensor, targets: Tensor) -> Tensor:
        from liger_kernel.ops.cutedsl.ops.fused_scaled_cross_entropy_sm90 import (
            LigerFusedScaledCrossEntropySM90Function,
        )

        return -LigerFusedScaledCrossEntropySM90Function.apply(
            hidden, lm_head, targets, temperature
        )

    def quack(hidden: Tensor, lm_head: Tensor, targets: Tensor) -> Tensor:
        from quack.linear_cross_entropy import linear_cross_entropy_func

        # If quack does not store the logits, it returns only the mean or the sum of the losses.
        return -linear_cross_entropy_func(
            hidden / temperature, lm_head, None, targets, reduction="none", inplace_backward=True
        )

    def cut(hidden: Tensor, lm_head: Tensor, targets: Tensor) -> Tensor:
        from cut_cross_entropy import linear_cross_entropy

        return -linear_cross_entropy(hidden / temperature, lm_head, targets, reduction="none")

    def liger(hidden, lm_head, targets, old, advantage, weight) -> dict[str, Tensor]:
        from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

        function = LigerFusedLinearGRPOLoss(
            loss_type="bnpo",
            beta=0.0,
            use_ref_model=False,
            epsilon_low=epsilon,
            epsilon_high=epsilon,
            temperature=temperature,
        )
        shape = 8, -1
        out = function(
            hidden.view(*shape, hidden.shape[-1]),
            lm_head,
            targets.view(shape),
            torch.ones_like(targets).view(shape),
            advantage.view(shape)[:, 0].contiguous(),
            old_per_token_logps=old.view(shape),
        )
        dhidden, dhead = torch.autograd.grad(out[0], (hidden, lm_head))
        return {"dhidden": dhidden, "dhead": dhead}

    return {
        "torch plain": with_loss(plain),
        "TRL chunked head": missing("trl", device) or with_loss(trl),
        "Liger fused linear GRPO": missing("liger_kernel", device) or liger,
        "Liger, Hopper (no entropy)": _missing_hopper("liger_kernel", device)
        or with_loss(liger_sm90),
        "quack (no entropy)": _missing_hopper("quack", device) or with_loss(quack),
        "cut-cross-entropy (no entropy)": missing("cut_cross_entropy", device) or with_loss(cut),
    }


def nf4(
    device: str, shape: tuple[int, int], dtype: torch.dtype
) -> Callable[..., dict[str, Tensor]] | str:
    """Return the side of bitsandbytes, which dequantizes the weight or, if x is given, multiplies x
    by it.
    """

    def side(packed, absmax, nested_absmax, nested_offset, x=None, dense=None) -> dict[str, Tensor]:
        import bitsandbytes
        from bitsandbytes.functional import QuantState

        books = nf4_reference.nf4_tables(packed.device)
        nested = QuantState(nested_absmax, code=books[1], blocksize=256, dtype=torch.float32)
        state = QuantState(absmax, shape, books[0], 64, "nf4", dtype, nested_offset, nested)
        packed = packed[:, None]  # [n/2, 1], the shape that bitsandbytes uses
        if x is None:
            return {"out": bitsandbytes.functional.dequantize_4bit(packed, state)}
        return {"out": bitsandbytes.matmul_4bit(x, packed, state)}

    return missing("bitsandbytes", device) or side
