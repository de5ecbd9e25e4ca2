"""Low-rank adapters (Hu et al. 2021, 2106.09685): y = W x + scale · B A x, where only A [r, in] and
B [out, r] are trained. The scale is alpha/r.

In: a Decoder. `LoRALinear` replaces the chosen layers; parameter names do not change. Out: the same
model, which can be used in two ways:

* With adapters merged: engines and checkpoints use W + scale · B A, which is a new tensor. W itself
  is never overwritten.
* With adapters disabled: the base model is the reference policy when beta > 0, so no second model
  is kept.

B starts at zero, so the initial policy equals the base model. The adapters are trained in float32.
The frozen weights are stored in the dtype of the computation, such as bfloat16 on a GPU. This
halves their memory, and does not change the results. With --load-in-4bit, the matrices of the
blocks are stored in four bits (nf4.py).

Read next: adapters.py (PEFT's files), feature.py (how a run uses this).
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from nanogrpo.errors import UserError
from nanogrpo.extras.lora import nf4
from nanogrpo.extras.lora.options import LORA_TARGETS, VISION_LORA_TARGETS
from nanogrpo.extras.options import Config
from nanogrpo.extras.sharding import compute_dtype
from nanogrpo.kernels.linear import linear
from nanogrpo.model.decoder import Decoder
from nanogrpo.model.weights import Stored, gathered


class LoRALinear(nn.Module):
    """A linear layer with frozen parameters and with adapters. `adapters.initialize` sets the
    adapters.
    """

    weight: Any  # the frozen matrix, as floats or in four bits
    bias: Any

    def __init__(self, base: nn.Linear | nf4.Linear4bit, cfg: Config):
        super().__init__()
        r = cfg.lora_r
        vars(self).update(vars(base))  # its parameters keep the names that checkpoints contain
        self.internal = ("lora_A", "lora_B", *getattr(base, "internal", ()))
        self.dtype: torch.dtype = getattr(base, "dtype", self.weight.dtype)
        self.four_bits = isinstance(base, nf4.Linear4bit)
        new = functools.partial(self.weight.new_empty, dtype=_exact(self.dtype))
        self.lora_A = nn.Parameter(new((r, base.in_features)))
        self.lora_B = nn.Parameter(new((base.out_features, r)))
        self.scale = cfg.lora_alpha / r
        self.enabled = True

    @property
    def stored(self) -> Tensor | Stored:
        found: Any = nf4.Matrix(self) if self.four_bits else self.weight
        return found

    def full_weight(self) -> Tensor:
        """Return W + scale · B A. The sum is computed in float32. It is then rounded, unless the
        weight or the adapters are float32.
        """
        w = nf4.Linear4bit.full_weight(self) if self.four_bits else gathered(self.weight)
        exact, a, b = _exact(w.dtype), gathered(self.lora_A), gathered(self.lora_B)
        delta = b.to(exact) @ a.to(exact)  # [out, in]
        return (w.to(exact) + self.scale * delta).to(torch.promote_types(w.dtype, a.dtype))

    def forward(self, x: Tensor) -> Tensor:
        # [T, out]
        y = nf4.Linear4bit.forward(self, x) if self.four_bits else linear(x, self.weight, self.bias)
        if not self.enabled:
            return y
        A, B = self.lora_A.to(x.dtype), self.lora_B.to(x.dtype)  # FSDP has cast A and B
        return torch.addmm(y, linear(x, A), B.T, alpha=self.scale)


def targets(cfg: Config) -> list[str]:
    """Return the names of the adapted layers, in the model's order."""
    chosen = cfg.lora_target_modules or LORA_TARGETS
    return [name for name in (*LORA_TARGETS, *VISION_LORA_TARGETS) if name in chosen]


def _exact(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a weight's adapters: at least float32."""
    return torch.promote_types(dtype, torch.float32)


def attach(model: Decoder, cfg: Config, device: str = "cpu") -> None:
    """Freeze the model and add adapters to the chosen layers, unless --lora-r is 0. Call this
    function before the weights are loaded and sharded. With --load-in-4bit, all linear layers of
    the blocks also become four-bit layers. `device` is the type of device for the model.
    """
    if not cfg.lora_r:
        return
    model.requires_grad_(False)
    if cfg.load_in_4bit:
        nf4.shard_bytes()
    if (dtype := compute_dtype(cfg, device)) != torch.float32:
        model.to(dtype)
    body: Any = model.model
    names = {name.removeprefix("attn.") for name in targets(cfg)}
    decoder = [parent for block in body.layers for parent in (block.self_attn, block.mlp)]
    encoder = [*body.visual.modules()] if hasattr(body, "visual") else []
    visual = [name for name in cfg.lora_target_modules if name in VISION_LORA_TARGETS]
    if visual and not encoder:
        raise UserError(
            f"--lora-target-modules {visual[0]} is for a vision encoder, which the model does not "
            "have: leave it out."
        )
    for parent in (*decoder, *encoder):
        for name, layer in [*parent.named_children()]:
            if not isinstance(layer, nn.Linear):
                continue
            frozen = nf4.Linear4bit(layer) if cfg.load_in_4bit and parent not in encoder else layer
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
