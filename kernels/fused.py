"""The Triton kernels that the model uses, under the names that they have in reference.py.

nanogrpo/model/dispatch.py picks this file or reference.py. Read next: log_softmax.py (the head's
kernels), norm.py (those of a decoder block).
"""

from .fused_rows import policy_rows_
from .gather import gather_rows, row_order
from .log_softmax import log_softmax_backward_, log_softmax_forward
from .nf4 import nf4_dequantize, nf4_matmul, nf4_quantize
from .norm import add_rms_norm, rms_norm
from .paged import paged_attention
from .policy import policy_forward
from .rope import norm_rope
from .sample import sample_tokens
from .swiglu import swiglu

__all__ = [
    "add_rms_norm",
    "gather_rows",
    "log_softmax_backward_",
    "log_softmax_forward",
    "nf4_dequantize",
    "nf4_matmul",
    "nf4_quantize",
    "norm_rope",
    "paged_attention",
    "policy_forward",
    "policy_rows_",
    "rms_norm",
    "row_order",
    "sample_tokens",
    "swiglu",
]
