"""The PyTorch functions that run on a CPU and define what the kernels must compute. The package
triton/ has the same files and functions (`policy_terms` is called `terms` there). The functions of
a decoder block return the dtype of their input. The functions of the output head return float32, or
float64 for float64 inputs. Read next: policy.py, the GRPO loss of a token.
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
