"""NF4 weights (four bits each) in plain PyTorch. This file quantizes weights once per run, on any
device. All other functions run on a CPU, and nf4_kernels.py must give the same results.

In: a weight of any float type, with a multiple of 64 elements. Out: a `Quantized`, or the weight
computed from it, or the product of x [rows, in] and the weight. Read next: nf4_kernels.py (the
equations).
"""

import functools
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nanogrpo.kernels.reference.log_softmax import blocks

# NF4: quantiles of N(0, 1), divided by the largest quantile.
# The probabilities form seven equal steps from 1 - δ to 1/2, and eight equal steps from 1/2 to δ.
# In these formulas, δ = 1 - (1/32 + 1/30) / 2.
# So normally distributed weights use all codes about equally often, and 0 and ±1 are exact.
# Dettmers et al. 2023, arXiv 2305.14314, appendix E. The digits are the same as in bitsandbytes.
NF4 = torch.tensor(
    [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453]
    + [-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0]
    + [0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224]
    + [0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0],
    dtype=torch.float32, device="cpu",
)  # fmt: skip


def midpoints(x: Tensor) -> Tensor:
    return (x[:-1] + x[1:]) / 2


def dynamic_codes() -> Tensor:
    """Return the 256 values of the 8-bit code for absmax: 0, 1, and further positive and negative
    values. There are twice as many values from 0.1 to 1 as from 0.01 to 0.1, and so on (Dettmers
    2015, arXiv 1511.04561).
    """
    ends = [torch.linspace(0.1, 1, 2**i + 1, dtype=NF4.dtype, device="cpu") for i in range(7)]
    positive = torch.cat([10.0 ** (i - 6) * midpoints(ends[i]) for i in range(7)])
    return torch.cat([-positive, positive, NF4[[7, 15]]]).sort().values


DYNAMIC = dynamic_codes()
BLOCK, NESTED = 64, 256  # weights for each absmax, absmax values for each nested_absmax


@functools.cache
def nf4_tables(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return NF4 and DYNAMIC on a device. They are cached, because they cannot be copied during the
    capture of a CUDA graph.
    """
    return NF4.to(device), DYNAMIC.to(device)


class Quantized(NamedTuple):
    """A weight in NF4. The tensors have the values and names that bitsandbytes stores. The tensors
    may be reshaped, but their numbers must stay in the same order. When a checkpoint is read, the
    methods are those of a tensor in a safetensors file.
    """

    packed: Tensor  # uint8, two codes per byte, the first in the upper four bits
    absmax: Tensor  # uint8, the code of each block's largest absolute value
    nested_absmax: Tensor  # float32, the largest |absmax - offset| of every 256 blocks
    nested_offset: Tensor  # [] float32, the mean of absmax
    shape: torch.Size

    def get_shape(self) -> list[int]:
        return [*self.shape]

    def get_dtype(self) -> str:
        return "NF4"


def in_blocks(x: Tensor) -> Tensor:
    """Return x [n] as [blocks, 256], padded with zeros."""
    return F.pad(x, (0, -len(x) % NESTED)).view(-1, NESTED)


def quantize_absmax(absmax: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize absmax [blocks], too. Return the codes [blocks], nested_absmax and
    nested_offset.

    Like bitsandbytes on a CPU, this function rounds x/nested_absmax to the nearest of 2¹⁶ points in
    [-1, 1], and then the point to the nearest code.
    """
    offset = absmax.mean()
    x = in_blocks(absmax - offset)
    nested_absmax = x.abs().amax(1)
    # a block of zeros gives 0/0; any code is right, and bitsandbytes takes the first
    x = (x * (1.0 / nested_absmax)[:, None]).nan_to_num(nan=-1.0).clamp(-1, 1)
    point = ((x + 1.0) * 0.5 * 65_535 + 0.5).int()
    # a tensor, because CUDA divides by a Python number inexactly: it multiplies by the reciprocal
    x = 2 * point / x.new_tensor(65_535.0) - 1.0
    codes = torch.bucketize(x, midpoints(DYNAMIC).to(x.device)).to(torch.uint8)
    return codes.flatten()[: len(absmax)], nested_absmax, offset


def nf4_absmax(q: Quantized) -> Tensor:
    """Return absmax [blocks] in float32."""
    _, dynamic = nf4_tables(q.absmax.device)
    x = in_blocks(dynamic[q.absmax.flatten().int()]) * q.nested_absmax.view(-1, 1)
    return x.flatten()[: q.absmax.numel()] + q.nested_offset


def nf4_quantize(w: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize n weights, where n is a multiple of 64. Return `packed` [n/2], and absmax
    [n/64] in float32. If a block contains inf or NaN, none of its quantized weights is finite.
    """
    x = w.detach().float().reshape(-1, BLOCK)  # [blocks, 64]
    absmax = x.abs().amax(1)  # [blocks]
    scaled = x * (1.0 / absmax.clamp(min=1e-38))[:, None]
    codes = torch.full_like(x, 15, dtype=torch.uint8)
    for middle in midpoints(NF4).tolist():  # faster on a CPU than torch.bucketize
        codes -= (scaled <= middle).view(torch.uint8)
    return (codes[:, ::2] << 4 | codes[:, 1::2]).flatten(), absmax


def nf4_dequantize(q: Quantized, dtype: torch.dtype) -> Tensor:
    """Return the weight NF4[code] · absmax [*shape], rounded once from float32 to dtype."""
    nf4, _ = nf4_tables(q.packed.device)
    pairs = torch.cartesian_prod(nf4, nf4)  # [256, 2], the two weights of each byte
    packed, absmax = q.packed.view(-1, BLOCK // 2), nf4_absmax(q)[:, None]
    w = packed.new_empty(len(packed), BLOCK, dtype=dtype)
    for rows in blocks(w) if w.device.type == "cpu" else [slice(None)]:
        x = pairs.index_select(0, packed[rows].flatten().int())  # [bytes, 2]
        w[rows] = x.view(-1, BLOCK) * absmax[rows]
    return w.view(q.shape)


def nf4_matmul(x: Tensor, q: Quantized) -> Tensor:
    """Return x Wᵀ [..., out] for x [..., in] and a quantized weight W [out, in]."""
    return F.linear(x, nf4_dequantize(q, x.dtype))
