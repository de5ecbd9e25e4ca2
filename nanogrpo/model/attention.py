"""Causal attention over packed sequences.

In: queries `[T, H, E]`, keys and values `[T, K, E]` of packed sequences (H is a multiple of K:
grouped-query attention). Out: `[T, H, E]`. A decoder block calls `attend(layer, q, k, v)`. The
object `attend` is of one of two kinds:

* `StripAttention` is for training, scoring and prefill. Each sequence attends to itself and to the
  prompt that it shares. There is no padding.
* A cache (engine/cache.py) is for decoding. Each row of q, k and v is the next token of one
  sequence. The token's key and value are written to the cache. Then the token attends to all cached
  tokens of its sequence.

`StripAttention` calls `sdpa` (sdpa.py) on a CPU, and on a GPU usually a fused kernel with the same
signature (gpu_attention.py). No implementation repeats keys for grouped queries. The forward passes
are deterministic. As in torch, the backward passes are deterministic if
`torch.use_deterministic_algorithms(True)` was called. Read next: decoder.py (which calls this),
engine/runner.py (which calls the decoder).
"""

from torch import Tensor

from nanogrpo.kernels.reference.gather import Order
from nanogrpo.model.dispatch import functions_for
from nanogrpo.model.sdpa import Bounds, sdpa


class StripAttention:
    """Compute attention over packed sequences.

    The queries of sequence n are the rows cu_seqlens[n] … cu_seqlens[n+1]. The queries attend
    causally to the keys of the same rows. With `kv_rows`, the queries attend to the keys of the
    rows kv_rows[kv_cu_seqlens[n]] …, which end with the sequence's own rows. So completions share
    one copy of their prompt. The keys of the prompt are gathered once per completion. The backward
    pass of this gather sums the gradients of all completions, in float32 and in a fixed order.
    """

    def __init__(
        self,
        cu_seqlens: Tensor,  # [N+1] int32
        max_len: int,
        kv_rows: Tensor | None = None,  # [Tk] int64
        kv_cu_seqlens: Tensor | None = None,  # [N+1] int32
        kv_max_len: int = 0,
        causal: bool = True,  # False: each token attends to the whole sequence
    ):
        self.kv_rows = kv_rows
        self.kv_order: Order = None  # how `gather_rows` sums gradients
        keys = (cu_seqlens, max_len) if kv_cu_seqlens is None else (kv_cu_seqlens, kv_max_len)
        self.bounds = Bounds(cu_seqlens, max_len, *keys, causal)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.kv_rows is not None:
            functions = functions_for(k.device)
            if self.kv_order is None:  # the first layer
                self.kv_order = functions.row_order(self.kv_rows, len(k))
            # [Tk, K, E] each
            k, v = (functions.gather_rows(x, self.kv_rows, self.kv_order) for x in (k, v))
        if q.device.type == "cpu":
            return sdpa(q, k, v, self.bounds)
        from nanogrpo.model import gpu_attention  # not needed on a CPU

        return gpu_attention.backend(q.device.type, q.dtype, q.shape[2])(q, k, v, self.bounds)
