"""Causal attention over packed sequences.

In: queries `[T, H, E]`, keys and values `[T, K, E]` of packed sequences (H is a multiple of K:
grouped-query attention). Out: `[T, H, E]`. A decoder block calls `attend(layer, q, k, v, window)`.
The object `attend` is of one of two kinds:

* `StripAttention` is for training, scoring and prefill. Each sequence attends to itself and to the
  prompt that it shares. There is no padding.
* A cache (engine/cache.py) is for decoding. Each row of q, k and v is the next token of one
  sequence. The token's key and value are written to the cache. Then the token attends to all cached
  tokens of its sequence.

On a CPU, `StripAttention` calls the reference (kernels/reference/attention.py). On a GPU, it
usually calls a fused kernel with the same signature (gpu_attention.py). No implementation repeats
keys for grouped queries. The forward passes are deterministic. As in torch, the backward passes are
deterministic if `torch.use_deterministic_algorithms(True)` was called. Read next: decoder.py (which
calls `attend`), engine/runner.py (which calls the decoder).
"""

from torch import Tensor

from nanogrpo.kernels.reference.attention import Strip
from nanogrpo.kernels.reference.gather import Order
from nanogrpo.model import gpu_attention
from nanogrpo.model.dispatch import functions_for


class StripAttention(Strip):
    """Compute attention over packed sequences, which `Strip` describes.

    Implementations that cannot attend to a shared prompt in place call `gathered`, which copies the
    keys of the prompt once per completion. The backward pass of `gathered` adds up the gradients of
    all completions, in float32 and in a fixed order.
    """

    order: Order = None  # how `gather_rows` sums gradients

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int = 0) -> Tensor:
        return gpu_attention.backend(q.device.type, q.dtype, q.shape[2], window)(q, k, v, self)

    def gathered(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if self.kv_rows is None:
            return k, v
        functions = functions_for(k.device)
        if self.order is None:  # the first layer
            self.order = functions.row_order(self.kv_rows, len(k))
        k, v = (functions.gather_rows(x, self.kv_rows, self.order) for x in (k, v))
        return k, v  # [Tk, K, E] each
