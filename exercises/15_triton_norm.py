"""Exercise 15: a Triton kernel.

An RMSNorm divides each row of x by its root mean square and multiplies it by a weight:

    y = x / sqrt(mean(x²) + eps) · w

Write it as a Triton kernel. A kernel is started as several programs: here T of them, one for each
row of x. A program loads BLOCK numbers at once. BLOCK must be a power of two, but a row has only D
numbers: so each load and store needs a mask, and the mean is over D. You need tl.program_id,
tl.arange, tl.load, tl.sum, tl.sqrt and tl.store. `textbook_kernel` in examples/textbook.py shows
how to use them (all but tl.sqrt). Triton's interpreter runs the kernel on a CPU.

    python -m exercises.check 15
"""

import triton
import triton.language as tl


@triton.jit
def norm_kernel(X, W, Y, D, eps, BLOCK: tl.constexpr):
    """X and Y: pointers to the first numbers of [T, D]. W: to [D]. BLOCK is at least D."""
    return  # replace this line
