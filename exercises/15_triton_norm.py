"""Exercise 15: a Triton kernel.

An RMSNorm divides each row of x by its root mean square and multiplies it by a weight:

    y = x / sqrt(mean(x²) + eps) · w

Write it as a Triton kernel in which each program computes one row. A program works on blocks of
BLOCK numbers, a power of two, but a row has D of them: the loads and stores need a mask, and the
mean is over D. You need tl.program_id, tl.arange, tl.load, tl.sum, tl.sqrt and tl.store, and their
use is in `textbook_kernel` in kernels/textbook.py. Triton's interpreter runs the kernel on a CPU.

    python -m exercises.check 15
"""

import triton
import triton.language as tl


@triton.jit
def norm_kernel(X, W, Y, D, eps, BLOCK: tl.constexpr):
    """X and Y: pointers to the first numbers of [T, D]. W: to [D]. BLOCK is at least D."""
    return  # replace this line
