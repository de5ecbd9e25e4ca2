"""Train on one GPU without FSDP2: 16-bit weights next to the float32 master weights. With --dtype,
one process on a CPU does the same.

In: a model with loaded float32 parameters. Out: the same model, which computes in 16 bits.
`named_parameters` still returns the master weights, so the optimizer, checkpoints and engines need
no changes. Each module also has a 16-bit copy under the parameter's name, and Python finds this
copy first: an instance's `__dict__` comes before `nn.Module.__getattr__`.

The copies are refreshed before a forward pass if the version of a master weight has changed, or if
an optimizer has made a step. A fused optimizer makes steps without changing the versions.

The copies of q, k and v are slices of one matrix, and the copies of gate and up are slices of
another matrix. So each input is multiplied once (`Products`). The matrix product itself adds the
gradient of such a matrix to a float32 sum, so no 16-bit gradient is made. The master weights get
slices of this sum. All other gradients are added to float32 sums as soon as they are complete.
FSDP2 on one GPU gives the same results. But its hooks take as much host time as the forward pass,
and it copies each gradient several times. Read before: distributed/fsdp.py.
"""

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.optim.optimizer import register_optimizer_step_post_hook

from nanogrpo.kernels.head import add_product
from nanogrpo.kernels.linear import product
from nanogrpo.model.decoder import MLP, Attention


class Joint:
    """The 16-bit copies of the weights [O, I] of layers with the same input, in one matrix."""

    def __init__(self, layers: Sequence[Any]):
        self.masters = [layer._parameters["weight"] for layer in layers]
        self.sizes = [*map(len, self.masters)]
        self.weight = torch.cat([layer.weight.detach() for layer in layers])  # [ΣO, I]
        self.transposed = self.weight.T  # a view, made once, because a view takes host time
        for layer, part in zip(layers, self.weight.split(self.sizes)):
            layer.weight.data = part

    def accumulate(self, dy: Tensor, x: Tensor) -> None:
        """Add dyᵀ x [ΣO, I] to the gradients of the master weights, which are slices of one sum."""
        grad = self.masters[0].grad
        if grad is not None:
            add_product(grad._base, dy, x)  # in place: the masters' gradients are slices of it
            return
        total = add_product(None, dy, x)
        for master, part in zip(self.masters, total.split_with_sizes(self.sizes)):
            master.grad = part


class Products(torch.autograd.Function):
    """(Joint, x [T, I]) → x Wᵀ [T, O] for each W. The backward pass returns only the gradient of x,
    and adds the other gradients to those of the master weights.
    """

    @staticmethod
    def forward(ctx, joint, x):
        ctx.save_for_backward(x)
        ctx.joint = joint
        return product(x, joint.weight).split_with_sizes(joint.sizes, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx, *dys):
        dy = adjoined(dys)
        ctx.joint.accumulate(dy, *ctx.saved_tensors)
        return None, product(dy, ctx.joint.transposed)


def adjoined(parts: tuple[Tensor, ...]) -> Tensor:
    """Return matrices [T, n] next to each other, [T, Σn].

    Triton kernels write the gradients of gate and up next to each other. They also write the
    gradients of q and k next to each other, with space for the gradient of v. This function then
    copies the gradient of v into this space.
    """
    (first, *others), sizes = parts, [part.shape[1] for part in parts]
    if not others:
        return first
    base, shape = first._base, (first.shape[0], sum(sizes))
    if base is None or (base.numel(), first.stride(0)) != (math.prod(shape), shape[1]):
        return torch.cat(parts, dim=1)
    out = base.view(shape)
    for place, part in zip(out.split_with_sizes(sizes, 1), parts):
        if part._base is not base:
            place.copy_(part)
    return out


def copy_weights(model: Any, dtype: torch.dtype = torch.bfloat16) -> None:
    """Make the model compute with copies of its parameters in another dtype."""
    copies: dict[Tensor, Tensor] = {}  # copies by master weight; a tied weight has one copy
    for module in model.modules():
        for name, p in module.named_parameters(recurse=False):
            if p not in copies:
                copies[p] = p.detach().to(dtype, copy=True).requires_grad_(p.requires_grad)
                if p.requires_grad:
                    copies[p].register_post_accumulate_grad_hook(functools.partial(move, p))
            vars(module)[name] = copies[p]
    for module in model.modules():
        if isinstance(module, (Attention, MLP)):
            *inner, last = (m for m in module.children() if isinstance(m, nn.Linear))
            if "product" in vars(last):
                continue  # an extra has replaced the products of the layers
            if all(m.bias is None and m.weight.requires_grad for m in inner):
                vars(module)["project"] = functools.partial(Products.apply, Joint(inner))
            if last.bias is None and last.weight.requires_grad:
                own = functools.partial(Products.apply, Joint([last]))
                last.forward = lambda x, own=own: own(x)[0]
    versions: list[int] = []
    register_optimizer_step_post_hook(lambda *_: versions.clear())

    @torch.no_grad()
    def refresh(*_: object) -> None:
        now = [p._version for p in copies]
        if now != versions:
            torch._foreach_copy_([*copies.values()], [*copies])
            versions[:] = now

    model.register_forward_pre_hook(refresh)
    model.copies = copies


def fuse(optimizer: Any, copies: dict[Tensor, Tensor]) -> None:
    """Clip, update and copy each weight in one Triton kernel, instead of three of torch's kernels.
    `optimizer` is torch's AdamW, and the form of its state does not change.
    """
    from nanogrpo.kernels.triton import adamw  # a CPU does not need Triton

    def clip(parameters: Iterable[Tensor], limit: float) -> Tensor:
        norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        optimizer.grad_scale = (limit / (norm + 1e-6)).clamp(max=1)
        return norm

    @torch.no_grad()
    def step() -> None:
        skip = optimizer.found_inf
        for group in optimizer.param_groups:
            weights = [p for p in group["params"] if p.grad is not None]
            states = [optimizer.state[p] for p in weights]
            if not weights:
                continue
            steps = [state["step"] for state in states]
            torch._foreach_add_(steps, 1 - skip)
            constants = group["lr"], group["weight_decay"], group["betas"], group["eps"]
            each = adamw.factors(torch.stack(steps), group["lr"], group["betas"]).unbind()
            for p, state, numbers in zip(weights, states, each):
                tensors = p, copies[p], p.grad, state["exp_avg"], state["exp_avg_sq"]
                adamw.adamw_(tensors, (numbers, optimizer.grad_scale, skip), *constants)

    vars(optimizer).update(clip=clip, step=step)  # `clip_and_step` calls them


def move(master: Tensor, copy: Any) -> None:
    """Add the gradient of a copy to the gradient of its master weight, in float32."""
    if master.grad is None:
        master.grad = copy.grad.to(master.dtype)
    else:
        master.grad.add_(copy.grad)
    copy.grad = None
