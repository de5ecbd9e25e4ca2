"""Load numbers as float32. All kernels compute in float32, whatever the dtype of their inputs.

In: pointers, and a mask of the numbers to load. Out: the numbers. (`tl.store` converts float32 to
the dtype of the output by itself.) Read next: log_softmax.py.
"""

import triton
import triton.language as tl


@triton.jit
def load(X, here):
    """Return the numbers at X in float32, and 0 where `here` is False."""
    return tl.load(X, mask=here, other=0.0).to(tl.float32)
