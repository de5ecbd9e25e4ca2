"""Each script in this folder is a benchmark that answers one question. All benchmarks write records
to bench/results/, from which all tables and plots are generated. Read first: common.py.
"""

import os

# Otherwise, transformers prints progress bars and messages between the rows of a table.
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import torch

# The benchmarks that need no GPU run the code for GPUs on meta tensors. In torch 2.11, meta tensors
# lack this product of 16-bit matrices with a float32 result (kernels/head.py).
_META = torch.library.Library("aten", "IMPL")
if torch.__version__.startswith("2.11."):
    _META.impl("addmm.dtype_out", lambda *_, out, **__: out, "Meta", allow_override=True)
