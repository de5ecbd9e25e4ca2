"""Kernels for 4-bit NF4 weights: dequantize, and multiply up to 128 rows of x by a weight.

In: a `Quantized` with two codes per byte, which nf4_reference.py makes on any device. Out: the
weight in bf16, fp16 or fp32, or the product of x [rows, in] and the weight. Four-bit weights are
frozen (QLoRA, Dettmers et al. 2023, arXiv 2305.14314), so there is no backward pass. Read next:
nf4.py.

Equation.   For each block of 64 weights: a = max |w|;  c = argmin_c |w/a - NF4[c]|;  ŵ = NF4[c] a
            The a of 256 blocks are themselves quantized, in PyTorch: a' = max |a - ā|, with the
            mean ā of all a;  d = argmin_d |(a - ā)/a' - DYNAMIC[d]|;  â = DYNAMIC[d] a' + ā
Code.       c is the number of midpoints between neighbors in NF4 that are below w/a.
Exactness.  The weights equal those of bitsandbytes on a CPU, bit for bit. So ŵ is rounded once,
            from float32. DYNAMIC[d] a' + ā is rounded twice, without a fused multiply-add.
Product.    y = x Ŵᵀ. Each ŵ is rounded to the dtype of x, as when W is dequantized separately. The
            rows of x are padded to 16, 32, 64 or 128, so each weight is loaded and dequantized
            once. With one program per 64 rows of W, most of the GPU would be idle. So several
            programs divide the columns, and `sum` adds up their products. A program loads the next
            blocks while it dequantizes the current ones. A program with 128 rows needs so many
            registers that only one other program can run next to it. One of the two can compute
            while the other waits for memory.
Bytes.      A weight takes 1/2 + 1/64 + 4/2¹⁴ = 0.516 bytes. Dequantizing to bfloat16 moves 2.516
            bytes per weight, and this product moves 0.516 bytes. A product with a bfloat16 weight
            moves 2 bytes.
            For 4096 · 12,288 weights at 4.3 TB/s, these three operations take 29 µs, 6 µs and 23
            µs.
Reference.  `nf4_dequantize` and `nf4_matmul` in nf4_reference.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanogrpo.extras.lora import nf4_reference
from nanogrpo.extras.lora.nf4_reference import Quantized

BLOCKS, WARPS = 16, 4  # weights per program; each thread then reads 4 bytes and writes 8 weights
OUT, STEP = 64, 2  # rows of W per program, and the blocks of each row that it reads at a time
# Desired number of programs per product: four per multiprocessor of a large GPU. Programs with more
# than 16 rows need more registers, so there are half as many.
PROGRAMS = 512
SIZE = 128  # sums per program of `sum`

# Weights and bytes per block (nf4_reference.py). A row of a tile is a block.
BLOCK = tl.constexpr(64)
BYTES = tl.constexpr(32)
NESTED_BLOCK = tl.constexpr(256)


@triton.jit
def load_absmax(ABSMAX, NESTED, OFFSET, DYNAMIC, block, here):
    """Return absmax of blocks in float32."""
    code = tl.load(ABSMAX + block, mask=here, other=0).to(tl.int32)
    nested = tl.load(NESTED + block // NESTED_BLOCK, mask=here, other=0.0)
    return tl.load(DYNAMIC + code) * nested + tl.load(OFFSET)


@triton.jit
def load_tile(PACKED, ABSMAX, NESTED, OFFSET, DYNAMIC, out, column, outs, end, blocks):
    """Return the codes [OUT, STEP, 32] and absmax [OUT, STEP, 1] of blocks in a tile of W."""
    here = (out < outs)[:, None] & (column < end)[None, :]
    block = out.to(tl.int64)[:, None] * blocks + column[None, :]
    absmax = load_absmax(ABSMAX, NESTED, OFFSET, DYNAMIC, block, here)[:, :, None]
    at = block[:, :, None] * BYTES + tl.arange(0, BYTES)[None, None, :]
    return tl.load(PACKED + at, mask=here[:, :, None], other=0), absmax


@triton.jit
def unpack(byte, absmax, NF4):
    """Return the two weights of each byte next to each other, in float32."""
    table = tl.load(NF4 + tl.arange(0, 16))
    code = tl.interleave(byte >> 4, byte & 15).to(tl.int32)
    return tl.gather(table, code.reshape(code.numel), 0).reshape(code.shape) * absmax


@triton.jit
def dequantize_kernel(
    PACKED, ABSMAX, NESTED, OFFSET, NF4, DYNAMIC, W, blocks, BLOCKS: tl.constexpr
):  # fmt: skip
    """Each program dequantizes BLOCKS blocks."""
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    here = block < blocks
    absmax = load_absmax(ABSMAX, NESTED, OFFSET, DYNAMIC, block, here)[:, None]
    at = block[:, None] * BYTES + tl.arange(0, BYTES)[None, :]
    w = unpack(tl.load(PACKED + at, mask=here[:, None], other=0), absmax, NF4)
    at = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    tl.store(W + at, w.to(W.dtype.element_ty), mask=here[:, None])


@triton.jit
def matmul_kernel(
    X, PACKED, ABSMAX, NESTED, OFFSET, NF4, DYNAMIC, PARTS, rows, outs, blocks, share,
    ROWS: tl.constexpr, OUT: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Program (o, p) multiplies x by OUT rows of W, but uses only part p of the columns.

    The products go to PARTS [parts, rows, outs].
    """
    out = tl.program_id(0) * OUT + tl.arange(0, OUT)
    row = tl.arange(0, ROWS)[None, :]
    dtype = X.dtype.element_ty
    first = tl.program_id(1) * share
    end = tl.minimum(first + share, blocks)
    y = tl.zeros((OUT, ROWS), tl.float32)
    column = first + tl.arange(0, STEP)
    tile = load_tile(PACKED, ABSMAX, NESTED, OFFSET, DYNAMIC, out, column, outs, end, blocks)
    for start in range(first, end, STEP):
        byte, absmax = tile
        column += STEP
        tile = load_tile(PACKED, ABSMAX, NESTED, OFFSET, DYNAMIC, out, column, outs, end, blocks)
        j = start * BLOCK + tl.arange(0, STEP * BLOCK)[:, None]
        mine = (row < rows) & (j < end * BLOCK)
        x = tl.load(X + row * (blocks * BLOCK) + j, mask=mine, other=0.0)
        w = unpack(byte, absmax, NF4).to(dtype).reshape(OUT, STEP * BLOCK)
        y = tl.dot(w, x, y, input_precision="ieee")
    at = (tl.program_id(1) * rows + row) * outs + out[:, None]
    tl.store(PARTS + at, y, mask=(row < rows) & (out < outs)[:, None])


@triton.jit
def sum_kernel(PARTS, Y, n, parts, SIZE: tl.constexpr):
    """Add up PARTS [parts, n] in order."""
    i = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    y = tl.zeros((SIZE,), tl.float32)
    for part in range(parts):
        y += tl.load(PARTS + part * n + i, mask=i < n, other=0.0)
    tl.store(Y + i, y.to(Y.dtype.element_ty), mask=i < n)


def nf4_dequantize(q: Quantized, dtype: torch.dtype) -> Tensor:
    """Return the weight [*shape]; dtype: bf16, fp16 or fp32."""
    w = q.packed.new_empty(q.shape, dtype=dtype)
    blocks = w.numel() // BLOCK.value
    args = *q[:4], *nf4_reference.nf4_tables(w.device), w, blocks
    shape = dict(BLOCKS=BLOCKS, num_warps=WARPS, enable_fp_fusion=False)
    dequantize_kernel[(triton.cdiv(blocks, BLOCKS),)](*args, **shape)
    return w


def nf4_matmul(x: Tensor, q: Quantized) -> Tensor:
    """Return x Wᵀ [rows, out] for at most 128 rows of x [rows, in] and a quantized weight W [out,
    in], whose rows are whole blocks.
    """
    rows, (outs, width) = len(x), q.shape
    blocks, programs = width // BLOCK.value, triton.cdiv(outs, OUT)
    padded = max(16, triton.next_power_of_2(rows))
    share = triton.cdiv(blocks, max(1, PROGRAMS // (1 + (rows > 16)) // programs))
    share = triton.cdiv(share, STEP) * STEP
    parts = triton.cdiv(blocks, share)
    sums = x.new_empty(parts, rows, outs, dtype=torch.float32)
    tables = nf4_reference.nf4_tables(x.device)
    args = x.contiguous(), *q[:4], *tables, sums, rows, outs, blocks, share
    shape = dict(ROWS=padded, OUT=OUT, STEP=STEP, num_warps=WARPS, num_stages=1)
    matmul_kernel[(programs, parts)](*args, **shape, enable_fp_fusion=False)
    y = x.new_empty(rows, outs)
    sum_kernel[(triton.cdiv(y.numel(), SIZE),)](sums, y, y.numel(), parts, SIZE=SIZE, num_warps=1)
    return y
