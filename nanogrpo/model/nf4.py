"""Frozen linear layers in four bits (QLoRA, Dettmers et al. 2023, 2305.14314): y = W x + b, where W
is stored as bitsandbytes stores it and dequantized whenever a layer computes.

In: the linear layers of a block, before they have weights (lora.py), and then the matrices of a
checkpoint: floats, or what bitsandbytes has stored in four bits (checkpoint.py). Out: layers with
0.52 bytes per weight. With n weights, in blocks of 64 that follow each other in the flat matrix:

    weight  [n/64, 32]  two 4-bit codes per byte; a row is a block
    absmax  [n/64, 1]   the largest absolute value of each block, as an 8-bit code
    nested  [k+1, 4]    float32 numbers as bytes: the factor of each 256 of those codes, and the
                        mean of all values that they stand for

All three are bytes, because FSDP casts parameters that are floats. It shards each of them by rows,
and gathers them before a layer computes.

The forward pass dequantizes the matrix, multiplies and forgets it, and the backward pass does the
same, so no more than one full matrix exists at a time. Read next: kernels/nf4.py (the code book and
the equations), lora.py (the adapters).
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from nanogrpo.errors import UserError, reading
from nanogrpo.kernels.linear import linear, product
from nanogrpo.kernels.reference import DYNAMIC, NF4, Quantized
from nanogrpo.model.dispatch import functions_for

BLOCK, NESTED = 64, 256  # weights per block, and blocks per nested block, as in bitsandbytes
FEW = 16  # rows up to which a kernel dequantizes while it multiplies
PARTS = ("weight", "absmax", "nested")


class Linear4bit(nn.Module):
    """A frozen linear layer in four bits. `Matrix` gives it its weights."""

    def __init__(self, base: nn.Linear):
        super().__init__()
        self.in_features, self.out_features = base.in_features, base.out_features
        self.dtype = base.weight.dtype  # which training computes in
        if base.weight.numel() % BLOCK:
            raise UserError(
                f"--load-in-4bit stores blocks of {BLOCK} weights, but a layer has a matrix of "
                f"{self.out_features} × {self.in_features}: leave it out."
            )
        blocks = base.weight.numel() // BLOCK
        for name, shape in (
            ("weight", (blocks, BLOCK // 2)),
            ("absmax", (blocks, 1)),
            ("nested", (-(-blocks // NESTED) + 1, 4)),
        ):
            empty = base.weight.new_empty(shape, dtype=torch.uint8)
            self.register_parameter(name, nn.Parameter(empty, requires_grad=False))
        self.bias = base.bias

    def forward(self, x: Tensor) -> Tensor:
        parts = [getattr(self, name) for name in PARTS]
        if torch.is_grad_enabled() or len(x) > FEW:
            return _Product.apply(x, self.bias, shape_of(self), *parts)
        y = functions_for(x.device).nf4_matmul(x, _quantized(shape_of(self), parts))  # [T, out]
        return y if self.bias is None else y + self.bias


class _Product(torch.autograd.Function):
    """x Wᵀ + b, where only the four bits of W are saved for the backward pass."""

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


def is_packed(layer: nn.Module) -> bool:
    """Return whether the layer's matrix is in four bits, with adapters or without."""
    return hasattr(layer, "nested")


def shape_of(layer: Any) -> torch.Size:
    return torch.Size((layer.out_features, layer.in_features))


def _quantized(shape: torch.Size, parts: Sequence[Tensor]) -> Quantized:
    # FSDP of torch 2.11 casts bytes, too, to bfloat16, which represents them exactly
    weight, absmax, nested = (p.to(torch.uint8) for p in parts)
    floats = nested.view(torch.float32).squeeze(1)  # [k+1]
    return Quantized(weight, absmax, floats[:-1], floats[-1], shape)


def dequantized(shape: torch.Size, parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Return a full matrix [out, in] from the full values of a layer's PARTS."""
    return functions_for(parts[0].device).nf4_dequantize(_quantized(shape, parts), dtype)


# --- loading --------------------------------------------------------------------------------------


class Matrix:
    """The matrix of a layer in four bits, as a place where `checkpoint.fill` puts weights."""

    def __init__(self, layer: nn.Module):
        self.layer, self.shape = layer, shape_of(layer)

    def parts(self, source: Tensor | Quantized) -> Iterator[tuple[Tensor, Tensor]]:
        """Quantize a full matrix [out, in], unless it is quantized. Yield each of the layer's
        parameters with its new full value.

        The parameters may be sharded. The whole matrix is needed, because `nested` depends on it.
        """
        mine: list[Any] = [getattr(self.layer, name) for name in PARTS]
        if not isinstance(source, Quantized):
            source = source.to(mine[0].device)
            source = functions_for(source.device).nf4_quantize(source)
        packed, absmax, factors, mean, _ = source
        assert factors is not None  # both are None only without double quantization
        assert mean is not None
        nested = torch.cat((factors.flatten(), mean.flatten()))  # [k+1]
        full = packed.view(-1, BLOCK // 2), absmax.view(-1, 1), nested.view(-1, 1).view(torch.uint8)
        yield from zip(mine, full)


class _Stored:
    """A matrix that bitsandbytes has stored in four bits, with the methods of a slice of a file."""

    def __init__(self, parts: dict[str, Tensor]):
        """Raises an exception of any type if the parts do not fit together."""
        state = json.loads(bytes(parts["quant_state.bitsandbytes__nf4"].tolist()))
        for name, expected in (
            ("quant_type", "nf4"),
            ("blocksize", BLOCK),
            ("nested_blocksize", NESTED),
        ):
            if state[name] != expected:
                raise ValueError(f"{name} is {state[name]!r:.60} and not {expected!r}")
        for name, book in (("quant_map", NF4), ("nested_quant_map", DYNAMIC)):
            if not torch.equal(parts[name], book.cpu()):
                raise ValueError(f"{name} is not that of bitsandbytes")
        rows, columns = state["shape"]
        blocks = rows * columns // BLOCK
        kinds = {
            "weight": (rows * columns / 2, torch.uint8),
            "absmax": (blocks, torch.uint8),
            "nested_absmax": (-(-blocks // NESTED), torch.float32),
        }
        for name, kind in kinds.items():
            if (parts[name].numel(), parts[name].dtype) != kind:
                raise ValueError(f"{name} has another size or type than its matrix needs")
        offset = torch.tensor(float(state["nested_offset"]))
        packed, absmax, factors = (parts[name] for name in kinds)
        self.value = Quantized(packed, absmax, factors, offset, torch.Size((rows, columns)))

    def get_shape(self) -> list[int]:
        return [*self.value.shape]

    def get_dtype(self) -> str:
        return "NF4"

    def __getitem__(self, _: slice) -> Quantized:
        return self.value


KEYS = (
    "weight",
    "absmax",
    "quant_map",
    "nested_absmax",
    "nested_quant_map",
    "quant_state.bitsandbytes__nf4",
)


def assembled(
    found: Iterable[tuple[str, Any]], matrices: set[str], where: str
) -> Iterator[tuple[str, Any]]:
    """Yield the tensors of a checkpoint that bitsandbytes has quantized: the six tensors of each
    matrix as one, and all others as they are.

    matrices: the names of the layers' matrices that must be in four bits.
    """
    waiting: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for name, tensor in found:
        layer, _, key = name.partition(".weight")
        matrix, key = f"{layer}.weight", key.lstrip(".") or "weight"
        if key not in KEYS or (name == matrix and tensor.get_dtype() != "U8"):
            if name in matrices:
                raise UserError(
                    f"{where}: the tensor {name} is stored as {tensor.get_dtype()}, although "
                    "config.json says that it is in 4 bits; use the original model."
                )
            yield name, tensor
            continue
        problem = f"holds the tensor {matrix} in a form that cannot be read"
        with reading(where, "use the original model", problem):
            waiting[matrix][key] = tensor[:]
            if len(waiting[matrix]) < len(KEYS):
                continue
            stored = _Stored(waiting.pop(matrix))
        yield matrix, stored
    for matrix, parts in waiting.items():
        key = next(key for key in KEYS if key not in parts)
        raise UserError(
            f"{where}: the tensor {matrix}{'' if key == 'weight' else '.' + key} is missing; use "
            "the original model."
        )
