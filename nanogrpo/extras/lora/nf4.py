"""Frozen linear layers in four bits (QLoRA, Dettmers et al. 2023, 2305.14314): y = W x + b. W is
stored in the format of bitsandbytes, and dequantized in each forward and backward pass.

In: a block's linear layers before they have weights (lora.py), and then a checkpoint's matrices
(checkpoint.py). The matrices are floats, or quantized by bitsandbytes. Out: layers with 0.52 bytes
per weight. The n weights of a matrix, row by row, are divided into blocks of 64:

* weight [n/64, 32] has two 4-bit codes per byte. A row is a block.
* absmax [n/64, 1] is the largest absolute value of each block, as an 8-bit code.
* nested [k+1, 4] has k+1 float32 numbers of 4 bytes each. Each of the first k numbers is the scale
  of 256 codes of absmax. The last number is the mean of all values of absmax.

The three tensors are stored as bytes, because FSDP would cast floats to another dtype. FSDP shards
each tensor by rows, and gathers the tensor before the layer runs.

The forward pass dequantizes a matrix, multiplies by it and frees it. The backward pass does the
same, so no more than one full matrix exists at a time. Read next: nf4_kernels.py (the code book and
the equations), lora.py (the adapters).
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from nanogrpo.errors import UserError, check, reading
from nanogrpo.extras.lora import nf4_reference
from nanogrpo.extras.lora.nf4_reference import BLOCK, NESTED, Quantized, quantize_absmax
from nanogrpo.kernels.linear import linear, product
from nanogrpo.model import checkpoint, dispatch
from nanogrpo.model.decoder import Decoder
from nanogrpo.model.hf_config import ModelConfig
from nanogrpo.model.weights import gathered, parameters

# The quantization_config of checkpoints that can be read: bitsandbytes in four bits.
FOUR_BITS: dict[str, Any] = {
    "quant_method": "bitsandbytes",
    "load_in_4bit": True,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True,
}
FEW = 128  # up to this many rows of x, one kernel dequantizes W and multiplies
PARTS = ("weight", "absmax", "nested")


def functions_for(device: torch.device) -> ModuleType:
    """Return the module for tensors on a device: nf4_kernels.py or nf4_reference.py."""
    if not dispatch.uses_triton(device):
        return nf4_reference
    from nanogrpo.extras.lora import nf4_kernels

    return nf4_kernels


class Linear4bit(nn.Module):
    """A frozen linear layer with four bits per weight. `Matrix` gives it its weights."""

    internal: tuple[str, ...] = PARTS[1:]

    def __init__(self, base: nn.Linear):
        super().__init__()
        self.in_features, self.out_features = base.in_features, base.out_features
        self.dtype = base.weight.dtype  # the dtype of the computation
        blocks, rest = divmod(base.weight.numel(), BLOCK)
        if rest:
            raise UserError(
                f"--load-in-4bit needs matrices with a multiple of {BLOCK} weights, but one layer "
                f"has {self.out_features} × {self.in_features} weights: leave the option out."
            )
        shapes = (blocks, BLOCK // 2), (blocks, 1), (-(-blocks // NESTED) + 1, 4)
        for name, shape in zip(PARTS, shapes):
            empty = base.weight.new_empty(shape, dtype=torch.uint8)
            self.register_parameter(name, nn.Parameter(empty, requires_grad=False))
        self.bias = base.bias

    @property
    def stored(self) -> "Matrix":
        return Matrix(self)

    # LoRALinear takes over this layer's parts, and passes itself as `self` to the next two methods.

    def full_weight(self: Any) -> Tensor:
        """Return the dequantized matrix [out, in] of a layer whose parts may be sharded."""
        parts = [gathered(getattr(self, name)) for name in PARTS]
        return dequantized(shape_of(self), parts, self.dtype)

    def forward(self: Any, x: Tensor) -> Tensor:
        """Return x Wᵀ + b [T, out]."""
        parts = [getattr(self, name) for name in PARTS]
        if torch.is_grad_enabled() or len(x) > FEW or self.in_features % BLOCK:
            return _Product.apply(x, self.bias, shape_of(self), *parts)
        y = functions_for(x.device).nf4_matmul(x, _quantized(shape_of(self), parts))  # [T, out]
        return y if self.bias is None else y + self.bias


class _Product(torch.autograd.Function):
    """x Wᵀ + b. Only the four-bit W is saved for the backward pass, not the dequantized W."""

    @staticmethod
    def forward(ctx, x, bias, shape, *parts):
        ctx.save_for_backward(*parts)
        ctx.shape = shape
        return linear(x, dequantized(shape, parts, x.dtype), bias)  # [T, out]

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        weight = dequantized(ctx.shape, ctx.saved_tensors, dy.dtype)
        return product(dy, weight.T), None, None, None, None, None  # [T, in]


def shard_bytes() -> None:
    """Let FSDP2 shard uint8 tensors with torch 2.11. FSDP2 first makes every new shard require a
    gradient, which is not possible for a uint8 tensor.
    """
    plain: Any = DTensor.requires_grad_
    if plain.__name__ == "floats_only":
        return

    def floats_only(self: DTensor, requires_grad: bool = True) -> Tensor:
        return plain(self, requires_grad and self.is_floating_point())

    # mypy does not allow replacing a method
    DTensor.requires_grad_ = floats_only  # type: ignore[assignment, method-assign]


def shape_of(layer: Any) -> torch.Size:
    return torch.Size((layer.out_features, layer.in_features))


def _quantized(shape: torch.Size, parts: Sequence[Tensor]) -> Quantized:
    # FSDP of torch 2.11 also casts bytes to bfloat16, which represents 0 to 255 exactly
    weight, absmax, nested = (p.to(torch.uint8) for p in parts)
    floats = nested.view(torch.float32).squeeze(1)  # [k+1]
    return Quantized(weight, absmax, floats[:-1], floats[-1], shape)


def quantized(weight: Tensor) -> Quantized:
    """Quantize a weight whose size is a multiple of BLOCK, and then the absmax of its blocks. If
    any block has an inf or NaN, none of the quantized weights is finite.
    """
    packed, absmax = nf4_reference.nf4_quantize(weight)
    return Quantized(packed, *quantize_absmax(absmax), weight.shape)


def dequantized(shape: torch.Size, parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Return a matrix [out, in]. `parts` are the unsharded PARTS of a layer."""
    return functions_for(parts[0].device).nf4_dequantize(_quantized(shape, parts), dtype)


# --- loading --------------------------------------------------------------------------------------


class Matrix:
    """The matrix of a four-bit layer, into which a checkpoint's weight can be loaded."""

    dtypes = ("NF4",)

    def __init__(self, layer: nn.Module):
        self.layer, self.shape = layer, shape_of(layer)

    def fill(self, source: Any) -> None:
        """Store a matrix [out, in] in the layer. A matrix that is not quantized yet is quantized
        first.

        The layer may be sharded. The whole matrix is needed, because `nested` depends on all of it.
        """
        mine = [getattr(self.layer, name) for name in PARTS]
        if not isinstance(source, Quantized):
            source = quantized(source[:].to(mine[0].device))
        packed, absmax, factors, mean, _ = source
        nested = torch.cat((factors.flatten(), mean.flatten()))  # [k+1]
        full = packed.view(-1, BLOCK // 2), absmax.view(-1, 1), nested.view(-1, 1).view(torch.uint8)
        for part, values in zip(mine, full):
            checkpoint.fill(part, values)


def joined(parts: dict[str, Tensor]) -> Quantized:
    """Return a matrix of bitsandbytes from its tensors (KEYS). If the tensors do not fit together,
    any exception may be raised.
    """
    state = json.loads(bytes(parts[KEYS[-1]].tolist()))
    if state["blocksize"] != BLOCK:  # not given in config.json
        raise ValueError(f"blocksize is {state['blocksize']} and not {BLOCK}")
    shape, offset = torch.Size(state["shape"]), torch.tensor(float(state["nested_offset"]))
    packed, absmax, factors = (parts[name] for name in ("", ".absmax", ".nested_absmax"))
    if not 2 * packed.numel() == BLOCK * absmax.numel() == shape.numel():
        raise ValueError("its tensors have the wrong sizes")
    return Quantized(packed, absmax, factors, offset, shape)


# A matrix has six tensors. The name of each is the matrix's name with one of these endings.
KEYS = (
    "",
    ".absmax",
    ".quant_map",
    ".nested_absmax",
    ".nested_quant_map",
    ".quant_state.bitsandbytes__nf4",
)


class QuantizedDecoder(Decoder):
    """A model whose checkpoint bitsandbytes has quantized."""

    @classmethod
    def from_config(cls, raw: dict, where: str) -> Decoder:
        raw = {**raw}
        given = raw.pop("quantization_config")
        for name, needed in FOUR_BITS.items():
            check(where, f"quantization_config with {name}", given.get(name), [needed])
        return cls(ModelConfig.from_dict(raw, where))

    def arranged(self, found: Iterable[tuple[str, Any]], where: str) -> Iterator[tuple[str, Any]]:
        """Yield the six tensors of each four-bit matrix as one item, and all other tensors
        unchanged."""
        matrices = {name for name, p in parameters(self) if isinstance(p, Matrix)}
        waiting: dict[str, dict[str, Tensor]] = defaultdict(dict)
        for name, tensor in found:
            layer, _, key = name.partition(".weight")
            matrix = f"{layer}.weight"
            if matrix not in matrices:
                yield name, tensor
                continue
            problem = f"holds the tensor {matrix} in a form that cannot be read"
            with reading(where, "use the original model", problem):
                waiting[matrix][key] = tensor[:]
                if len(waiting[matrix]) < len(KEYS):
                    continue
                stored = joined(waiting.pop(matrix))
            yield matrix, stored
        for matrix, parts in waiting.items():
            key = next(key for key in KEYS if key not in parts)
            raise UserError(
                f"{where}: the tensor {matrix}{key} is missing, although config.json says that the "
                "matrices are stored in 4 bits; use the original model."
            )
