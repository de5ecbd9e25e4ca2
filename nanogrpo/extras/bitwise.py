"""`--bitwise`: the engine and the trainer compute the same bits.

Sampling and training then use the same policy. For each token, the engine's log-prob is equal to
the trainer's, so the logged `sampling/k3` is exactly 0. The bits depend neither on the other
completions in the batch nor on the number of ranks or slots. The file kernels/exact.py contains the
forward passes, and explains why bits would differ without them. The backward passes are not
changed. Read before: engine/local.py. Read next: kernels/exact.py, docs/precision.md.
"""

import functools
from collections.abc import Callable
from contextlib import ExitStack
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from nanogrpo import kernels
from nanogrpo.engine.local import LocalEngine
from nanogrpo.errors import UserError
from nanogrpo.feature import Feature
from nanogrpo.kernels import exact, linear
from nanogrpo.kernels.reference.attention import Strip
from nanogrpo.model import dispatch, gpu_attention
from nanogrpo.model.decoder import Decoder, Linear
from nanogrpo.run.setup import Inputs, Run, of_engine


class Bitwise(Feature):
    def settings(self, cfg: Any, inputs: Inputs) -> None:
        model = inputs.model
        if type(model) is not Decoder or model.cfg.layers:
            raise UserError(
                "--bitwise supports text models in which each token attends to all tokens before "
                "it: leave it out, or use another model."
            )
        use_exact_products(model, functions(inputs.world.device))

    def engine(self, run: Run) -> LocalEngine:
        return ExactEngine(**of_engine(run), paged=True)

    def running(self, run: Run) -> ExitStack:
        ours = functions(run.world.device)
        usual = gpu_attention.backend

        def backend(*how: Any) -> gpu_attention.Backend:
            # a reward or reference model may have windows, although the policy may not
            return usual(*how) if how[3:] > (0,) else ours.attention

        return swapped(run.world.device, ours, (gpu_attention, "backend", backend))


class ExactEngine(LocalEngine):
    """The local engine with exact products. It needs the paged cache, also on a CPU."""

    def load(self, model: nn.Module, version: int) -> None:
        super().load(model, version)
        ours = dispatch.functions_for(self.device)  # `swapped` has replaced them
        use_exact_products(self.model, ours)
        self.runner.head = ours.product
        for block in self.model.model.layers:
            for module in (block.self_attn, block.mlp):
                vars(module).pop("project", None)  # the joint product of `join_layers`


def use_exact_products(model: nn.Module, ours: Any) -> None:
    for module in model.modules():
        if isinstance(module, Linear):
            module.product = ours.linear


def swapped(
    device: torch.device, ours: SimpleNamespace, *more: tuple[ModuleType, str, Any]
) -> ExitStack:
    """Replace kernels/reference/ or kernels/triton/ by `ours`, until the returned stack is closed.
    `more` lists further replacements: a module, a name in it, and the value.
    """
    stack = ExitStack()
    where = (kernels, "triton") if dispatch.uses_triton(device) else (dispatch, "reference")
    for module, name, value in ((*where, ours), *more):
        stack.callback(setattr, module, name, getattr(module, name))
        setattr(module, name, value)
    return stack


def functions(device: torch.device) -> SimpleNamespace:
    """Return exact versions of the functions of kernels/reference/ or kernels/triton/. Two
    differentiable functions are added: `linear`, and the `attention` of a strip.
    """
    base, backend = dispatch.functions_for(device), gpu_attention.backend
    how: ModuleType = exact
    swiglu = exact.swiglu
    if dispatch.uses_triton(device):
        from nanogrpo.kernels.triton import exact as how

        swiglu = base.swiglu  # is exact

    def sample_tokens(logits: Tensor, key: Tensor, counter: Tensor, temperature: float):
        """Sample as the base class does, and return the log-prob that training computes."""
        token, _ = base.sample_tokens(logits, key, counter, temperature)
        return token, base.log_softmax_forward(logits, token, temperature)[0]

    def attention(q: Tensor, k: Tensor, v: Tensor, strip: Strip) -> Tensor:
        usual = backend(q.device.type, q.dtype, q.shape[2])
        return _Attention.apply(q, k, v, strip, how.attend, usual)

    ours = {
        "swiglu": swiglu,
        "product": how.product,
        "sample_tokens": sample_tokens,
        "paged_attention": functools.partial(paged_attention, how.attend),
        "linear": lambda x, weight, bias=None: _Linear.apply(x, weight, bias, how.product),
        "attention": attention,
    }
    return SimpleNamespace(**vars(base) | ours)


class _Linear(linear._Linear):
    """(x, weight, bias, product) → x Wᵀ + b."""

    @staticmethod
    def forward(ctx, x, weight, bias, product):  # type: ignore[override]
        ctx.save_for_backward(x, weight)
        y = product(x, weight)  # [T, O]
        return y if bias is None else y + bias

    @staticmethod
    def backward(ctx, dy):
        return *linear._Linear.backward(ctx, dy), None


class _Attention(torch.autograd.Function):
    """(q, k, v, strip, attend, usual) → the attention output. The backward pass differentiates
    `usual`, the attention without --bitwise.
    """

    @staticmethod
    def forward(ctx, q, k, v, strip, attend, usual):
        ctx.save_for_backward(q, k, v)
        ctx.again = lambda *args: usual(*args, strip)
        return strip_attention(attend, q, k, v, strip)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        with torch.enable_grad():
            args = [x.detach().requires_grad_() for x in ctx.saved_tensors]
            return *torch.autograd.grad(ctx.again(*args), args, dy), None, None, None


# --- how strips and pages are divided into tiles, for `attend` in kernels/exact.py ----------------


def strip_attention(attend: Callable, q: Tensor, k: Tensor, v: Tensor, strip: Strip) -> Tensor:
    """Return the attention output [T, H, E] of a strip. The host does not wait for the device."""
    k, v, at = k.contiguous(), v.contiguous(), strip.bounds
    counts, keys = at.cu_q.diff().long(), at.cu_k.diff().long()  # [N]
    ends = ((counts + exact.QUERIES - 1) // exact.QUERIES).cumsum(0)  # tiles up to each sequence
    tile = torch.arange(len(q) // exact.QUERIES + len(counts), device=q.device)  # >= ends[-1]
    n = torch.searchsorted(ends, tile, right=True).clamp(max=len(counts) - 1)  # its sequence
    inner = (tile - torch.where(n > 0, ends[n - 1], 0)) * exact.QUERIES  # its first query
    count = (counts[n] - inner).clamp(0, exact.QUERIES)  # 0 for tiles beyond the last one
    seen = keys[n] - counts[n] + inner + 1
    rows = torch.arange(len(k), device=q.device) if strip.kv_rows is None else strip.kv_rows
    tiles = at.cu_q[n] + inner, count, seen, at.cu_k[n].long(), rows * k.stride(0)
    return attend(q, k, v, tiles, k.shape[1], k.stride(1))


def paged_attention(
    attend: Callable,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rotation: tuple[Any, ...],
    positions: Tensor,
    table: Tensor,
    keys: Tensor,
    values: Tensor,
    window: int = 0,  # never used: `Bitwise` refuses windows
) -> Tensor:
    """Do the same as kernels/reference/paged.py, with one tile for each row."""
    q, k = dispatch.functions_for(q.device).norm_rope(q, k, *rotation)
    size, pages = keys.shape[2], table[: len(q)].long()  # [b, pages of a row]
    newest = pages.gather(1, positions[:, None] // size)[:, 0]  # [b]
    keys[newest, :, positions % size] = k
    values[newest, :, positions % size] = v
    slot = torch.arange(size, device=q.device)
    at = (pages[..., None] * keys.stride(0) + slot * keys.stride(2)).flatten(1)  # [b, keys]
    row = torch.arange(len(q), device=q.device)
    tiles = row, torch.ones_like(row), positions + 1, row * at.shape[1], at.flatten()
    return attend(q, keys, values, tiles, keys.shape[1], keys.stride(1))
