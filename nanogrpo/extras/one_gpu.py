"""Train on one GPU without FSDP2: 16-bit weights next to the float32 master weights.

In: a model with loaded float32 parameters. Out: the same model, which computes in bfloat16.
`named_parameters` still returns the master weights, so the optimizer, checkpoints and engines need
no changes. Each module also has a 16-bit copy under the parameter's name, and Python finds this
copy first: an instance's `__dict__` comes before `nn.Module.__getattr__`.

The copies are refreshed before a forward pass if a master weight has changed: its version has, or
an optimizer has made a step. A fused optimizer does not count up the versions. If
every parameter is trained and there are no biases, the gradients of the blocks' matrices are
accumulated in float32 by the matrix product itself (`Products`), without a 16-bit gradient in
between. All other gradients are added to float32 sums as soon as they are
complete. FSDP2 on one GPU computes the same, but its hooks take as much host time as the forward
pass, and it copies each gradient several times. Read before: distributed/fsdp.py.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.optim.optimizer import register_optimizer_step_post_hook

from nanogrpo.kernels.head import add_product
from nanogrpo.model.decoder import MLP, Attention


class Products(torch.autograd.Function):
    """([(W, its master weight), …], x [T, I]) → x Wᵀ [T, O] for each W. The backward returns only
    the gradient of x, and adds the other gradients to those of the master weights.
    """

    @staticmethod
    def forward(ctx, pairs, x):
        ctx.save_for_backward(x)
        ctx.pairs = pairs
        return tuple(torch.mm(x, copy.T) for copy, _ in pairs)

    @staticmethod
    @once_differentiable
    def backward(ctx, *dys):
        (x,), dx = ctx.saved_tensors, None
        for (copy, master), dy in zip(ctx.pairs, dys):
            dx = torch.mm(dy, copy) if dx is None else dx.addmm_(dy, copy)  # [T, I]
            master.grad = add_product(master.grad, dy, x)
        return None, dx


def copy_weights(model: Any, dtype: torch.dtype = torch.bfloat16) -> None:
    """Let the model compute with copies of its float32 parameters in another dtype."""
    copies: dict[Tensor, Tensor] = {}  # by master weight; a tied weight has one copy
    for module in model.modules():
        for name, p in module.named_parameters(recurse=False):
            if p.dtype == torch.float32:
                if p not in copies:
                    copies[p] = p.detach().to(dtype).requires_grad_(p.requires_grad)
                    if p.requires_grad:
                        copies[p].register_post_accumulate_grad_hook(functools.partial(move, p))
                vars(module)[name] = copies[p]
    joined = all(p.requires_grad and "bias" not in name for name, p in model.named_parameters())
    for module in model.modules() if joined else ():
        if isinstance(module, (Attention, MLP)):
            layers: Any = [m for m in module.children() if isinstance(m, nn.Linear)]
            *inner, last = ((m.weight, m._parameters["weight"]) for m in layers)
            vars(module)["project"] = functools.partial(Products.apply, inner)
            layers[-1].forward = lambda x, pair=last: Products.apply([pair], x)[0]
    versions: list[int] = []
    register_optimizer_step_post_hook(lambda *_: versions.clear())

    @torch.no_grad()
    def refresh(*_: object) -> None:
        now = [p._version for p in copies]
        if now != versions:
            torch._foreach_copy_([*copies.values()], [*copies])
            versions[:] = now

    model.register_forward_pre_hook(refresh)


def move(master: Tensor, copy: Any) -> None:
    """Add the gradient of a copy to that of its master weight, in float32."""
    master.grad = copy.grad.float() if master.grad is None else master.grad.add_(copy.grad)
    copy.grad = None
