"""Plain PyTorch: the code that runs on a CPU, and the results that kernels must match.

The package triton/ has the same files and functions. The functions of a decoder block keep the
dtype of their input; all others return float32 (float64 for float64 inputs). Read next: policy.py,
the GRPO loss of a token.
"""

from .fused_rows import policy_rows_
from .gather import gather_rows, row_order
from .log_softmax import log_softmax_backward_, log_softmax_forward
from .norm import add_rms_norm, rms_norm
from .paged import paged_attention
from .rope import norm_rope
from .sample import sample_tokens
from .swiglu import swiglu
