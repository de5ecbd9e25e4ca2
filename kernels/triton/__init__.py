"""The Triton kernels that the model uses on a GPU. The functions have the same names as in
reference/.

nanogrpo/model/dispatch.py chooses between the two packages. Each file contains kernels, with their
equation, their derivation and the bytes that they move. Read next: log_softmax.py and policy.py
(kernels of the output head), norm.py (kernels of a decoder block).
"""

from ..linear import product
from .attention import attention
from .fused_rows import policy_rows_
from .gather import gather_rows, row_order
from .log_softmax import log_softmax_backward_, log_softmax_forward
from .norm import add_rms_norm, rms_norm
from .paged import paged_attention
from .rope import norm_rope
from .sample import sample_tokens
from .swiglu import swiglu
