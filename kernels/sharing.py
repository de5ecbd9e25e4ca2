"""Find the rows of the prompts that the sequences of a strip share.

In: the sequences (`Strip` in reference/attention.py). A prompt is a sequence that attends only to
itself, and its completions follow it directly. Out: `prompts` [N, 2] and `reach` [N], both int32.
For sequence n, prompts[n] contains the first row and the end of its prompt, and reach[n] is the end
of the last sequence that attends to sequence n. In this example, the prompt pqr has the completions
a and de, and xy is alone:

    tokens        p q r   │ a       │ d e       │ x y
    row           0 1 2     3         4 5         6 7
    cu_seqlens    0         3         4           6        8
    kv_rows       0 1 2   │ 0 1 2 3 │ 0 1 2 4 5 │ 6 7
    prompts       0:0       0:3       0:3         0:0
    reach         6         4         6           8

So the query e in row 5 attends to the keys in the rows 0 … 2 and 4 … 5. The key r in row 2 is
visible to the queries in the rows 2 … 5. Read next: triton/attention.py.
"""

import functools

import torch
from torch import Tensor

from .reference.attention import Strip


@functools.lru_cache(maxsize=1)  # for all layers
def sharing(strip: Strip) -> tuple[Tensor, Tensor]:
    """Return `prompts` and `reach`, without waiting for the device."""
    starts, ends = strip.cu_seqlens[:-1], strip.cu_seqlens[1:]
    if strip.kv_rows is None or strip.kv_cu_seqlens is None:
        return ends.new_zeros(len(ends), 2), ends
    length = strip.kv_cu_seqlens.diff() - (ends - starts)  # [N]
    first = strip.kv_rows[strip.kv_cu_seqlens[:-1].clamp(max=len(strip.kv_rows) - 1)]  # [N]
    prompt = torch.searchsorted(strip.cu_seqlens, first, right=True) - 1
    prompt = torch.where(length > 0, prompt, torch.arange(len(ends), device=ends.device))
    reach = ends.scatter_reduce(0, prompt, ends, "amax")
    first = torch.where(length > 0, first, 0)
    return torch.stack((first, first + length), 1).int(), reach
