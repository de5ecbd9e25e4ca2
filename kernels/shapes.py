"""How a row kernel is laid over a row: lanes, numbers per lane, warps, and the type that sums are
kept in.

In: the length of a row and its type. Out: the compile-time constants of a launch. A table, not an
autotuner: no first call that stalls, and the interpreter and the compile contracts
(tests/kernels/aot.py) see the shapes that run. Read next: log_softmax.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

SLICE = 8192  # columns of a part when it is


def shape_of_block(vocab: int, dtype: torch.dtype, lanes: int = 1024) -> tuple[int, int, int]:
    """Lanes, numbers a lane (16 bytes: one load), warps."""
    per_lane = 16 // dtype.itemsize
    lanes = min(lanes, triton.next_power_of_2(triton.cdiv(vocab, per_lane)))
    return lanes, per_lane, max(1, min(8, lanes // 128))


def wide(logits: Tensor) -> bool:
    """Whether every row begins at a multiple of 16 bytes, as Triton will find: it asks the same of
    pointer and stride.
    """
    return logits.data_ptr() % 16 == 0 and logits.stride(0) % 16 == 0


def shape_of_gradient(vocab: int, block: int = 4096) -> tuple[int, int]:
    """Columns and warps of a program of the backward."""
    block = min(block, triton.next_power_of_2(vocab))
    return block, max(1, min(8, block // 512))


def columns_of_part(lanes: int, per_lane: int) -> int:
    """Columns of a part of a split row: of V and the type alone, so that a row's result is not a
    matter of its neighbours.
    """
    return max(SLICE if lanes == 1024 else 0, lanes * per_lane)


def accumulator(dtype: torch.dtype) -> tuple[torch.dtype, tl.dtype]:
    return (torch.float64, tl.float64) if dtype == torch.float64 else (torch.float32, tl.float32)
