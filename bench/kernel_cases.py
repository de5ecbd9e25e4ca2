"""The operations that bench/kernel_speed.py times: inputs, sides, float64 results, and lower bounds
on the time.

In: a device, and whether the shapes are small. Out: one `Case` per operation, created when it is
needed. Each implementation of an operation is called a side. This file defines nanogrpo's side.
kernel_peers.py defines the sides of other libraries. Read next: kernel_speed.py, which measures the
times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from nanogrpo.kernels.reference.policy import Clip, LossInputs
from torch import Tensor

from bench import kernel_peers
from nanogrpo.extras.lora import nf4, nf4_reference
from nanogrpo.extras.lora.lora import LoRALinear
from nanogrpo.extras.lora.nf4_reference import Quantized
from nanogrpo.extras.options import Config
from nanogrpo.kernels import reference
from nanogrpo.model import head as ops
from nanogrpo.model.dispatch import functions_for

EPSILON, TEMPERATURE, EPS = 0.2, 0.7, 1e-6
CLIP = Clip(EPSILON, EPSILON)
OPERATIONS = ("logits", "head", "nf4", "decoder", "lora")  # kinds of operations
# Only rows that every side computes can be compared with float64.
# These are the first ROWS rows of the first sequence.
ROWS = 15

Results = dict[str, Tensor]  # results by name


@dataclass
class Case:
    """An operation with inputs of one shape, its sides, and float64 results for comparison. A side
    is a function that takes the inputs and returns a dict of results. `truth` returns the first
    rows of some of these results in float64.
    """

    name: str
    inputs: dict[str, Tensor]
    # a string instead of a function gives the reason why a side cannot run here
    sides: dict[str, Callable[..., Results] | str]
    truth: Callable[..., Results]
    bytes: float = 0  # bytes that must be read or written at least once
    flop: float = 0  # FLOP of the matrix products
    overwritten: Sequence[str] = ()  # inputs that a side may overwrite
    shape: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._originals = {name: self.inputs[name].clone() for name in self.overwritten}

    def restore(self) -> None:
        """Reset the overwritten inputs to their original values."""
        for name, value in self._originals.items():
            self.inputs[name].copy_(value)


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

    def compute(functions: ModuleType, logits: Tensor, targets: Tensor) -> Results:
        logp, entropy, _ = functions.log_softmax_forward(logits, targets, TEMPERATURE)
        return {"logp": logp, "entropy": entropy}

    def ours(logits: Tensor, targets: Tensor) -> Results:
        return compute(functions_for(logits.device), logits, targets)

    def truth(logits: Tensor, targets: Tensor) -> Results:
        return compute(reference, logits[:ROWS].double(), targets[:ROWS])

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
        overwritten=("logits",),
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


# --- operations with gradients: of the decoder, which are limited by memory, and of LoRA ---


def both_ways(function: Callable[..., tuple[Tensor, ...]]) -> Callable[..., Results]:
    """Return a side that computes the function and its gradients. The results of the function are
    also used as its upstream gradients, because they have the right shapes.
    """

    def side(**inputs: Tensor) -> Results:
        out = function(**inputs)
        leaves = {name: v for name, v in inputs.items() if v.requires_grad}
        grads = torch.autograd.grad(out, list(leaves.values()), [o.detach() for o in out])
        return {"out": out[0], **{f"d{name}": g for name, g in zip(leaves, grads)}}

    return side


def differentiable(
    name: str,
    ours: Callable[..., tuple[Tensor, ...]],
    eager: Callable[..., tuple[Tensor, ...]],
    inputs: dict[str, Tensor],
    device: str,
    **figures: Any,
) -> Case:
    """Return a case that computes a function and its gradients. The sides are nanogrpo, eager
    PyTorch and torch.compile.
    """

    def truth(**values: Tensor) -> Results:
        wide = {k: v.detach().double().requires_grad_(v.requires_grad) for k, v in values.items()}
        return both_ways(eager)(**wide)

    sides = {
        "nanogrpo": both_ways(ours),
        "torch eager": both_ways(eager),
        "torch.compile": both_ways(torch.compile(eager)) if device == "cuda" else "needs a GPU",
    }
    return Case(name, inputs, sides, truth, **figures)


def decoder_cases(device: str, small: bool) -> list[Callable[[], Case]]:
    """Return functions that create the cases of the decoder: RMSNorm with residual, QK-norm with
    RoPE, and SwiGLU.
    """
    dtype = torch.float32 if small else torch.bfloat16
    # the sizes of Qwen3-8B
    T, D, H, K, E, W = (16, 48, 3, 1, 16, 80) if small else (8192, 4096, 32, 8, 128, 12_288)
    functions = functions_for(torch.device(device))

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device).to(dtype).requires_grad_()

    def norm() -> Case:
        def eager(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
            h = x + residual
            return F.rms_norm(h, weight.shape, weight, EPS), h

        return differentiable(
            "residual add and RMSNorm",
            lambda **inputs: functions.add_rms_norm(**inputs, eps=EPS),
            eager,
            {"x": draw(T, D), "residual": draw(T, D), "weight": draw(D)},
            device,
            bytes=8 * T * D * dtype.itemsize,
            shape={"T": T, "D": D},
        )

    def rope() -> Case:
        angles = torch.randn(T, 1, E // 2, device=device).repeat(1, 1, 2)
        heads = {"q": draw(T, H, E), "k": draw(T, K, E), "q_weight": draw(E), "k_weight": draw(E)}
        return differentiable(
            "QK-norm and RoPE",
            lambda **inputs: functions.norm_rope(**inputs, eps=EPS),
            lambda **inputs: reference.norm_rope(**inputs, eps=EPS),
            {**heads, "cos": angles.cos(), "sin": angles.sin()},
            device,
            bytes=5 * T * (H + K) * E * dtype.itemsize,
            shape={"T": T, "H": H, "K": K, "E": E},
        )

    def swiglu() -> Case:
        return differentiable(
            "SwiGLU",
            lambda gate, up: (functions.swiglu(gate, up),),
            lambda gate, up: (reference.swiglu(gate, up),),
            {"gate": draw(T, W), "up": draw(T, W)},
            device,
            bytes=8 * T * W * dtype.itemsize,
            shape={"T": T, "F": W},
        )

    return [norm, rope, swiglu]


def lora_case(count: int, width: int, device: str, dtype: torch.dtype) -> Case:
    """Return a square layer with adapters of rank 16, forward and backward. Only x, A and
    B have gradients, because the weight is frozen.
    """
    g = torch.Generator(device).manual_seed(5)

    def draw(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=g, device=device) * shape[-1] ** -0.5).to(dtype)

    x, A, B = draw(count, width) * width**0.5, draw(16, width), draw(width, 16)
    inputs = {name: v.requires_grad_() for name, v in {"x": x, "A": A, "B": B}.items()}
    inputs["weight"] = draw(width, width)
    base = torch.nn.Linear(width, width, bias=False, device="meta")
    layer = LoRALinear(base, Config(lora_r=16, lora_alpha=32))

    def ours(x: Tensor, A: Tensor, B: Tensor, weight: Tensor) -> tuple[Tensor]:
        tensors = {"weight": weight, "lora_A": A, "lora_B": B}
        return (torch.func.functional_call(layer, tensors, x),)

    def eager(x: Tensor, A: Tensor, B: Tensor, weight: Tensor) -> tuple[Tensor]:
        return (F.linear(x, weight) + F.linear(F.linear(x, A), B) * 2.0,)  # as in PEFT

    return differentiable(
        "LoRA, layer and gradients",
        ours,
        eager,
        inputs,
        device,
        flop=4 * count * width * (width + 3 * 16),
        shape={"T": count, "D": width, "r": 16},
    )


def cases(device: str, small: bool) -> dict[str, list[Callable[[], Case]]]:
    """Return functions that create the cases, by kind of operation. The inputs of all cases
    together would not fit into memory.
    """
    dtype, count, vocab, widths = torch.bfloat16, 8192, 151_936, (1024, 2048, 4096)
    matrix = 4096, 12_288
    if small:
        dtype, count, vocab, widths, matrix = torch.float32, 128, 301, (32,), (48, 320)
    return {
        "logits": [
            lambda: log_softmax_case(count, vocab, device, dtype),
            lambda: rows_case(count, vocab, device, dtype),
        ],
        "head": [lambda width=w: head_case(count, vocab, width, device, dtype) for w in widths],
        "nf4": [
            lambda rows=r: nf4_case(rows, *matrix, device, dtype) for r in (None, 1, 16, 64, 128)
        ],
        "decoder": decoder_cases(device, small),
        "lora": [lambda width=w: lora_case(count, width, device, dtype) for w in widths],
    }
