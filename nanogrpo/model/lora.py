"""Low-rank adapters (Hu et al. 2021, 2106.09685): y = W x + scale · B A x, where only A [r, in] and
B [out, r] are trained. The scale is alpha/r, or alpha/√r with --use-rslora (Kalajdzievski 2023,
2312.03732).

In: a Decoder. Its chosen layers are replaced by `LoRALinear`; parameter names do not change. Out:
the same model, which can be used in two ways:

    merged      W + scale · B A as a new tensor: engines sample with it and transformers loads it.
                W itself is never overwritten.
    disabled    the base model: the reference policy when beta > 0, so no second model is kept

B starts at zero, so the initial policy equals the base model. The adapters are trained in float32.
The frozen weights are stored in the dtype they compute in, which is bfloat16 on a GPU: the same
numbers, in half the memory.

With --lora-dropout, A x becomes A dropout(x), but only in forward passes that compute a gradient.
Engines sample with the merged weights, so the log-probs of the policy that sampled (old_logp), like
those of the reference model, are computed without dropout. Read next: adapters.py (PEFT's files),
vllm/sync.py (how the merged weights reach a server).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanogrpo.config import LORA_TARGETS, Config
from nanogrpo.kernels.linear import linear
from nanogrpo.model.decoder import Decoder


class LoRALinear(nn.Module):
    """A linear layer with frozen weight and bias, and its adapters, which `adapters.initialize`
    initializes.
    """

    def __init__(self, base: nn.Linear, cfg: Config):
        super().__init__()
        r = cfg.lora_r
        self.weight, self.bias = base.weight, base.bias
        new = functools.partial(base.weight.new_empty, dtype=_exact(base.weight))
        self.lora_A = nn.Parameter(new((r, base.in_features)))
        self.lora_B = nn.Parameter(new((base.out_features, r)))
        self.scale = cfg.lora_alpha / (r**0.5 if cfg.use_rslora else r)
        self.dropout = cfg.lora_dropout
        self.enabled = True

    def forward(self, x: Tensor) -> Tensor:
        y = linear(x, self.weight, self.bias)  # [T, out]
        if not self.enabled:
            return y
        if self.dropout and torch.is_grad_enabled():
            x = F.dropout(x, self.dropout)
        A, B = self.lora_A.to(x.dtype), self.lora_B.to(x.dtype)  # FSDP has cast them already
        return y + self.scale * linear(linear(x, A), B)


def targets(cfg: Config) -> list[str]:
    """Return the names of the adapted layers, in the model's order."""
    return [name for name in LORA_TARGETS if name in (cfg.lora_target_modules or LORA_TARGETS)]


def _exact(weight: Tensor) -> torch.dtype:
    """Return the dtype of a weight's adapters: at least float32."""
    return torch.promote_types(weight.dtype, torch.float32)


def attach(model: Decoder, cfg: Config, device: str = "cpu") -> None:
    """Freeze the model and add adapters to the chosen layers, unless --lora-r is 0. Call this
    before the model is loaded and sharded. device: the type of device that it will be on.
    """
    if not cfg.lora_r:
        return
    model.requires_grad_(False)
    auto = "bfloat16" if device == "cuda" else "float32"
    if (auto if cfg.lora_base_dtype == "auto" else cfg.lora_base_dtype) == "bfloat16":
        model.to(torch.bfloat16)
    for block in model.model.layers:
        for parent in (block.self_attn, block.mlp):
            for name in targets(cfg):
                if isinstance(layer := getattr(parent, name, None), nn.Linear):
                    setattr(parent, name, LoRALinear(layer, cfg))


@contextlib.contextmanager
def disabled(model: nn.Module) -> Iterator[None]:
    """Disable the model's adapters, if it has any, within a `with` block."""
    adapted = [m for m in model.modules() if isinstance(m, LoRALinear)]
    for m in adapted:
        m.enabled = False
    try:
        yield
    finally:
        for m in adapted:
            m.enabled = True


def is_adapter(name: str) -> bool:
    return name.endswith((".lora_A", ".lora_B"))


def base_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield (name, parameter) for each parameter that a checkpoint contains, each one once."""
    return ((name, p) for name, p in model.named_parameters() if not is_adapter(name))


def gathered(p: Tensor) -> Tensor:
    """Return a parameter, detached. If it is sharded, a collective gathers the shards."""
    p = p.detach()
    return p.full_tensor() if hasattr(p, "full_tensor") else p  # only a DTensor has it


def full_parameters(model: nn.Module, computed: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, full tensor) for each parameter that a checkpoint has, with the adapters merged.

    Under FSDP2 every rank must consume the generator to its end, because shards are gathered by
    collectives. By default it yields the master weights, gathered one by one. With `computed`, FSDP
    gathers each of its units in one collective, on the device and in the dtype of training, so the
    values are exactly those that the model computes with. Such a tensor is only valid until the
    next one is requested.
    """
    names = {name for name, _ in base_parameters(model)}  # without a tied parameter's second name

    def walk(module: nn.Module, prefix: str) -> Iterator[tuple[str, Tensor]]:
        unit: Any = module if computed and hasattr(module, "unshard") else None  # an FSDPModule
        if unit:
            unit.unshard()
        for name, p in module.named_parameters(recurse=False):
            if prefix + name in names:
                yield prefix + name, _merged(module, name, p)
        for name, child in module.named_children():
            yield from walk(child, f"{prefix}{name}.")
        if unit:
            unit.reshard()

    return walk(model, "")


def _merged(layer: nn.Module, name: str, p: Tensor) -> Tensor:
    """Return a full parameter. Adapters are added in float32, and the sum is rounded once, or not
    at all if the adapters have a higher precision than the weight.
    """
    w = gathered(p)
    if not (isinstance(layer, LoRALinear) and name == "weight"):
        return w
    exact, a, b = _exact(w), gathered(layer.lora_A), gathered(layer.lora_B)
    delta = b.to(exact) @ a.to(exact)  # [out, in]
    return (w.to(exact) + layer.scale * delta).to(torch.promote_types(w.dtype, a.dtype))
