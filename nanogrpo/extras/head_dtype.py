"""`--head-dtype float32`: logits that are not rounded to 16 bits, in the engine and in the trainer.

In the output head, a GPU multiplies 16-bit hidden states by 16-bit weights. It adds up the products
in float32. Each sum is a logit, which is rounded to 16 bits by default. No other rounding changes a
log-prob as much (docs/precision.md). With this option, logits stay float32. Their gradient is still
rounded to 16 bits, because it is an input of two 16-bit matrix products. If weights are float32, as
in most runs on a CPU, the option changes nothing.

In: a run. Out: the same run, whose engine and trainer use the products below. A vLLM server needs
a separate option (vllm/feature.py).

Bytes.      For N rows of logits, the product writes 4·N·V bytes, and the kernel reads them twice.
            The kernel writes a gradient of 2·N·V bytes, which two products read once each. The
            total is 18·N·V bytes, or 12·N·V bytes without this option. With this option, an engine
            writes and reads twice as many bytes of logits.
Memory.     A chunk of C rows takes 6·C·V bytes: 4·C·V for the logits, and 2·C·V for their gradient.
            The gradient is stored in the buffer that kernels/head.py otherwise uses for 16-bit
            logits.

Read before: kernels/head.py, bitwise.py (`swapped`).
"""

from collections.abc import Callable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from nanogrpo.engine.local import LocalEngine
from nanogrpo.extras.bitwise import ExactEngine, swapped
from nanogrpo.extras.wrapper import Wrapper
from nanogrpo.feature import Feature
from nanogrpo.kernels import linear
from nanogrpo.model import dispatch, head
from nanogrpo.run.setup import Run


class HeadDtype(Feature):
    def wrap(self, engine: Any, run: Run) -> None:
        while isinstance(engine, Wrapper):
            engine = engine.engine
        # the head of an ExactEngine is the `product` that `functions` returns
        if isinstance(engine, LocalEngine) and not isinstance(engine, ExactEngine):
            matrix: Any = engine.model.lm_head
            if engine.dtype != torch.float32:
                matrix.forward = lambda hidden, op: product(hidden, matrix.weight)

    def running(self, run: Run) -> ExitStack:
        device, chunk = run.world.device, head.default_chunk
        rows = head, "default_chunk", lambda vocab, _, device: chunk(vocab, torch.float32, device)
        return swapped(device, functions(device), rows)


def product(a: Tensor, b: Tensor, of: Callable[..., Tensor] = linear.product) -> Tensor:
    """Return a bᵀ: [N, D], [V, D] → [N, V] float32. If `of` is the product of kernels/exact.py, a
    row of the result has the same bits in every batch.
    """
    if a.is_cpu:  # on a CPU, torch cannot multiply 16-bit matrices into a float32 result
        return of(a.float(), b.float())
    if of is linear.product:
        return torch.mm(a, b.T, out_dtype=torch.float32)
    return of(a, b, a.new_empty(len(a), len(b), dtype=torch.float32))


def functions(device: torch.device) -> SimpleNamespace:
    """Return the functions for a device. Their `product` returns float32 logits, also for 16-bit
    matrices. The gradient of these logits is later stored in the 16-bit buffer that `product` gets.
    """
    base = dispatch.functions_for(device)

    def logits(a: Tensor, b: Tensor, buffer: Tensor | None = None) -> Tensor:
        if a.dtype == torch.float32:
            return base.product(a, b, buffer)
        out: Any = product(a, b, base.product)
        out.gradient = None if buffer is None else buffer[: len(a)]
        return out

    def with_gradient(function: Callable) -> Callable:
        return lambda x, *args: function(x, *args, out=getattr(x, "gradient", None))

    names = "policy_rows_", "log_softmax_backward_"
    own = {name: with_gradient(getattr(base, name)) for name in names}
    return SimpleNamespace(**vars(base) | own | {"product": logits})
