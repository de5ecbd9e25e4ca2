"""Solution of exercise 15.

Masked loads return 0 here, which does not change the sum of squares. The project's kernel is
`forward_kernel` in kernels/triton/norm.py. It computes in float32 whatever the type of x, adds a
residual in the same pass, and stores 1/rms for its backward.
"""

import triton
import triton.language as tl


@triton.jit
def norm_kernel(X, W, Y, D, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    j = tl.arange(0, BLOCK)
    x = tl.load(X + row * D + j, mask=j < D, other=0.0)
    w = tl.load(W + j, mask=j < D, other=0.0)
    rms = tl.sqrt(tl.sum(x * x, 0) / D + eps)
    tl.store(Y + row * D + j, x / rms * w, mask=j < D)
