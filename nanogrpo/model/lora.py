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
numbers, in half the memory. With --load-in-4bit, the matrices of the blocks are stored in four bits
(nf4.py).

With --lora-dropout, A x becomes A dropout(x), but only in forward passes that compute a gradient.
Engines sample with the merged weights, so the log-probs of the policy that sampled (old_logp), like
those of the reference model, are computed without dropout. Read next: adapters.py (PEFT's files),
vllm/sync.py (how the merged weights reach a server).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanogrpo.config import LORA_TARGETS, VISION_LORA_TARGETS, Config
from nanogrpo.kernels.linear import linear
from nanogrpo.model import nf4
from nanogrpo.model.decoder import Decoder


class LoRALinear(nn.Module):
    """A linear layer with its own frozen parameters, and its adapters, which `adapters.initialize`
    initializes.
    """

    def __init__(self, base: nn.Linear | nf4.Linear4bit, cfg: Config):
        super().__init__()
        r = cfg.lora_r
        self.in_features, self.out_features = base.in_features, base.out_features
        self.bias = None
        for name, p in base.named_parameters():  # under their names, which files have too
            setattr(self, name, p)
        weight: Any = base.weight
        self.dtype: torch.dtype = getattr(base, "dtype", weight.dtype)
        self.frozen: Any = type(base).forward  # computes W x + b with these parameters
        new = functools.partial(weight.new_empty, dtype=_exact(self.dtype))
        self.lora_A = nn.Parameter(new((r, base.in_features)))
        self.lora_B = nn.Parameter(new((base.out_features, r)))
        self.scale = cfg.lora_alpha / (r**0.5 if cfg.use_rslora else r)
        self.dropout = cfg.lora_dropout
        self.enabled = True

    def forward(self, x: Tensor) -> Tensor:
        y = self.frozen(self, x)  # [T, out]
        if not self.enabled:
            return y
        if self.dropout and torch.is_grad_enabled():
            x = F.dropout(x, self.dropout)
        A, B = self.lora_A.to(x.dtype), self.lora_B.to(x.dtype)  # FSDP has cast them already
        return y + self.scale * linear(linear(x, A), B)


def targets(cfg: Config) -> list[str]:
    """Return the names of the adapted layers, in the model's order."""
    chosen = cfg.lora_target_modules or LORA_TARGETS
    return [name for name in (*LORA_TARGETS, *VISION_LORA_TARGETS) if name in chosen]


def _exact(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a weight's adapters: at least float32."""
    return torch.promote_types(dtype, torch.float32)


def base_dtype(cfg: Config, device: str) -> str:
    """Return the dtype in which frozen weights are stored, or dequantized, on a type of device."""
    auto = "bfloat16" if device == "cuda" else "float32"
    return auto if cfg.lora_base_dtype == "auto" else cfg.lora_base_dtype


def attach(model: Decoder, cfg: Config, device: str = "cpu") -> None:
    """Freeze the model and add adapters to the chosen layers, unless --lora-r is 0. Call this
    before the model is loaded and sharded. With --load-in-4bit, all layers of the blocks are then
    in four bits. device: the type of device that it will be on.
    """
    if not cfg.lora_r:
        return
    model.requires_grad_(False)
    if base_dtype(cfg, device) == "bfloat16":
        model.to(torch.bfloat16)
    body: Any = model.model
    names = {name.removeprefix("attn.") for name in targets(cfg)}
    decoder = [parent for block in body.layers for parent in (block.self_attn, block.mlp)]
    encoder = [*body.visual.modules()] if model.cfg.vision else []
    for parent in (*decoder, *encoder):
        for name, layer in [*parent.named_children()]:
            if not isinstance(layer, nn.Linear):
                continue
            in_four_bits = cfg.load_in_4bit and parent not in encoder
            frozen = nf4.Linear4bit(layer) if in_four_bits else layer
            setattr(parent, name, LoRALinear(frozen, cfg) if name in names else frozen)


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


def base_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter | nf4.Matrix]]:
    """Yield (name, parameter) for each parameter that a checkpoint contains, each one once. The
    three parameters of a matrix in four bits are one `nf4.Matrix`.
    """
    packed = {name: m for name, m in model.named_modules() if nf4.is_packed(m)}
    for name, p in model.named_parameters():
        layer, _, own = name.rpartition(".")
        if layer in packed and own == "weight":
            yield name, nf4.Matrix(packed[layer])
        elif not is_adapter(name) and not (layer in packed and own in nf4.PARTS):
            yield name, p


def sizes(model: nn.Module) -> tuple[int, int]:
    """Return the number of trained weights, and of all."""
    adapters = sum(p.numel() for n, p in model.named_parameters() if is_adapter(n))
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return trained, adapters + sum(p.shape.numel() for _, p in base_parameters(model))


def gathered(p: Tensor) -> Tensor:
    """Return a parameter, detached. If it is sharded, a collective gathers the shards, unless one
    rank has all of them.
    """
    whole: Any = p.detach()
    if not hasattr(whole, "full_tensor"):  # only a DTensor has it
        return whole
    return whole.to_local() if whole.device_mesh.size() == 1 else whole.full_tensor()


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
    """Return a full parameter. A matrix in four bits is dequantized. Adapters are added in float32,
    and the sum is rounded once, or not at all if the adapters have a higher precision than the
    weight.
    """
    w = gathered(p)
    if name == "weight" and nf4.is_packed(layer):
        others = (gathered(getattr(layer, part)) for part in nf4.PARTS[1:])
        w = nf4.dequantized(nf4.shape_of(layer), (w, *others), cast(Any, layer).dtype)
    if not (isinstance(layer, LoRALinear) and name == "weight"):
        return w
    exact, a, b = _exact(w.dtype), gathered(layer.lora_A), gathered(layer.lora_B)
    delta = b.to(exact) @ a.to(exact)  # [out, in]
    return (w.to(exact) + layer.scale * delta).to(torch.promote_types(w.dtype, a.dtype))
