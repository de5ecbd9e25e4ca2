"""The operations that bench/kernel_speed.py times: inputs, sides, float64 results, and lower bounds
on the time.

In: a device, and whether the shapes are small. Out: one `Case` per operation, created when it is
needed. Each implementation of an operation is called a side. This file defines nanogrpo's side.
kernel_peers.py defines the other sides, and kernel_decoder.py the operations of the decoder. Read
next: kernel_speed.py, which measures the times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType

import torch
import torch.nn.functional as F
from nanogrpo.kernels.reference.policy import Clip, LossInputs
from torch import Tensor

from bench import kernel_decoder, kernel_peers
from nanogrpo.extras.lora import nf4, nf4_reference
from nanogrpo.extras.lora.nf4_reference import Quantized
from nanogrpo.kernels import reference
from nanogrpo.model import head as ops
from nanogrpo.model.dispatch import functions_for

EPSILON, TEMPERATURE = 0.2, 0.7
CLIP = Clip(EPSILON, EPSILON)
# The first ROWS rows of the first sequence are compared with float64, because every side computes
# them.
ROWS = 15

Results = dict[str, Tensor]  # results by name


@dataclass
class Case:
    """One operation at one shape, with its inputs, its sides, and float64 results for comparison. A
    side is a function that takes the inputs and returns a dict of results. `truth` returns the
    first rows of some of these results in float64.
    """

    name: str
    inputs: dict[str, Tensor]
    # a string instead of a function gives the reason why a side cannot run here
    sides: dict[str, Callable[..., Results] | str]
    truth: Callable[..., Results]
    bytes: float = 0  # bytes that must be read or written at least once
    flop: float = 0  # FLOP of the matrix products
    restore: Sequence[str] = ()  # inputs that a side may overwrite
    shape: dict[str, int] = field(default_factory=dict)


def _tokens(count: int, device: str) -> dict[str, Tensor]:
    """Return the inputs of an off-policy loss for eight sequences, as vectors [count] with one
    value per token.

    All weights are nonzero.
    """
    g = torch.Generator(device).manual_seed(0)
    per_sequence = torch.randn(8, 1, generator=g, device=device).expand(8, count // 8)
    off = 0.1 * torch.randn(count, generator=g, device=device)
    weight = torch.full((count,), 1.0 / count, device=device)
    return {"advantage": per_sequence.reshape(-1).contiguous(), "off": off, "weight": weight}


def log_softmax_case(count: int, vocab: int, device: str, dtype: torch.dtype) -> Case:
    g = torch.Generator(device).manual_seed(1)
    logits = torch.empty(count, vocab, device=device, dtype=dtype).normal_(0, 3, generator=g)
    targets = torch.randint(vocab, (count,), generator=g, device=device)

    def ours(logits: Tensor, targets: Tensor) -> Results:
        functions = functions_for(logits.device)
        logp, entropy, _ = functions.log_softmax_forward(logits, targets, TEMPERATURE)
        return {"logp": logp, "entropy": entropy}

    def truth(logits: Tensor, targets: Tensor) -> Results:
        logp, entropy, _ = reference.log_softmax_forward(
            logits[:ROWS].double(), targets[:ROWS], TEMPERATURE
        )
        return {"logp": logp, "entropy": entropy}

    sides = {"nanogrpo": ours, **kernel_peers.log_softmax(device, TEMPERATURE)}
    inputs = {"logits": logits, "targets": targets}
    return Case(
        "log-prob and entropy, forward",
        inputs,
        sides,
        truth,
        bytes=count * vocab * dtype.itemsize,
        shape={"N": count, "V": vocab},
    )


def rows_case(count: int, vocab: int, device: str, dtype: torch.dtype) -> Case:
    base = log_softmax_case(count, vocab, device, dtype)
    tokens = _tokens(count, device)
    functions = functions_for(torch.device(device))
    old = functions.log_softmax_forward(**base.inputs, temperature=TEMPERATURE)[0]
    old += tokens.pop("off")
    inputs = {**base.inputs, "old": old, **tokens}

    def ours(logits, targets, old, advantage, weight) -> Results:
        inputs = LossInputs(advantage, weight, old)
        logp, *_ = functions.policy_rows_(logits, targets, TEMPERATURE, inputs, CLIP)
        return {"logp": logp, "grad": logits}

    def truth(logits, targets, old, advantage, weight) -> Results:
        inputs = LossInputs(advantage, weight, old).map(lambda v: v[:ROWS].double())
        grad = logits[:ROWS].double()
        logp, *_ = reference.policy_rows_(grad, targets[:ROWS], TEMPERATURE, inputs, CLIP)
        return {"logp": logp, "grad": grad}

    sides = {"nanogrpo": ours, **kernel_peers.rows(device, TEMPERATURE, EPSILON)}
    return Case(
        "forward, loss and gradient of logits",
        inputs,
        sides,
        truth,
        bytes=2 * base.bytes,
        restore=("logits",),
        shape=base.shape,
    )


def head_case(count: int, vocab: int, width: int, device: str, dtype: torch.dtype) -> Case:
    g = torch.Generator(device).manual_seed(2)
    hidden = torch.randn(count, width, generator=g, device=device).to(dtype).requires_grad_()
    lm_head = torch.randn(vocab, width, generator=g, device=device).mul_(3 * width**-0.5)
    lm_head = lm_head.to(dtype).requires_grad_()
    targets = torch.randint(vocab, (count,), generator=g, device=device)
    tokens = _tokens(count, device)
    with torch.no_grad():
        old, _ = ops.head_logp(hidden, lm_head, targets, TEMPERATURE)
    old += tokens.pop("off")
    inputs = {"hidden": hidden, "lm_head": lm_head, "targets": targets, "old": old, **tokens}

    def ours(hidden, lm_head, targets, old, advantage, weight) -> Results:
        inputs = LossInputs(advantage, weight, old)
        out = ops.head_policy_loss(hidden, lm_head, targets, inputs, CLIP, temperature=TEMPERATURE)
        dhidden, dhead = torch.autograd.grad(out.loss, (hidden, lm_head))
        return {"logp": out.logp, "dhidden": dhidden, "dhead": dhead}

    def truth(hidden, lm_head, targets, old, advantage, weight) -> Results:
        head = lm_head.detach().double()
        logits = hidden[:ROWS].detach().double() @ head.T
        inputs = LossInputs(advantage, weight, old).map(lambda v: v[:ROWS].double())
        logp, *_ = reference.policy_rows_(logits, targets[:ROWS], TEMPERATURE, inputs, CLIP)
        return {"logp": logp, "dhidden": logits @ head}

    sides = {"nanogrpo": ours, **kernel_peers.head(device, TEMPERATURE, EPSILON)}
    return Case(
        "head, hidden to gradients",
        inputs,
        sides,
        truth,
        flop=6 * count * vocab * width,
        shape={"N": count, "V": vocab, "D": width},
    )


def nf4_case(rows: int | None, out: int, width: int, device: str, dtype: torch.dtype) -> Case:
    """Return a case that dequantizes a weight [out, width], or multiplies x [rows, width] by it."""
    g = torch.Generator(device).manual_seed(4)
    q = nf4.quantized(torch.randn(out, width, generator=g, device=device))
    inputs = {name: value for name, value in q._asdict().items() if name != "shape"}
    if rows is not None:
        inputs["x"] = torch.randn(rows, width, generator=g, device=device).to(dtype)
        inputs["dense"] = nf4_reference.nf4_dequantize(q, dtype)

    def compute(functions: ModuleType, dtype: torch.dtype, inputs: dict[str, Tensor]) -> Results:
        q = Quantized(*list(inputs.values())[:4], torch.Size([out, width]))
        if rows is None:
            return {"out": functions.nf4_dequantize(q, dtype)}
        return {"out": functions.nf4_matmul(inputs["x"].to(dtype), q)}

    def ours(**inputs: Tensor) -> Results:
        return compute(nf4.functions_for(torch.device(device)), dtype, inputs)

    def eager(**inputs: Tensor) -> Results:
        return compute(nf4_reference, dtype, inputs)

    def truth(**inputs: Tensor) -> Results:
        if rows is None:
            return compute(nf4_reference, torch.float64, inputs)
        return {"out": inputs["x"].double() @ inputs["dense"].double().T}

    def dense(x: Tensor, dense: Tensor, **quantized: Tensor) -> Results:
        return {"out": F.linear(x, dense)}

    sides: dict[str, Callable[..., Results] | str] = {"nanogrpo": ours, "torch eager": eager}
    sides["bitsandbytes"] = kernel_peers.nf4(device, (out, width), dtype)
    if rows is not None:
        sides["torch, bfloat16 weight"] = dense
    moved = (0.516 + (dtype.itemsize if rows is None else 0)) * out * width
    shape = {"rows": rows} if rows is not None else {}
    shape |= {"out": out, "in": width}
    name = "NF4 weight, dequantize" if rows is None else "NF4 weight, product"
    return Case(name, inputs, sides, truth, bytes=moved, shape=shape)


def cases(device: str, small: bool) -> list[Callable[[], Case]]:
    """Return functions that create the cases. The inputs of all cases together would not fit into
    memory.
    """
    decoder = [lambda make=make: Case(**make()) for make in kernel_decoder.cases(device, small)]
    dtype, count, vocab, widths = torch.bfloat16, 8192, 151_936, (1024, 2048, 4096)
    matrix = 4096, 12_288
    if small:
        dtype, count, vocab, widths, matrix = torch.float32, 128, 301, (32,), (48, 320)
    return [
        lambda: log_softmax_case(count, vocab, device, dtype),
        lambda: rows_case(count, vocab, device, dtype),
        *(lambda width=w: head_case(count, vocab, width, device, dtype) for w in widths),
        *(lambda rows=rows: nf4_case(rows, *matrix, device, dtype) for rows in (None, 1, 16)),
        *decoder,
    ]
