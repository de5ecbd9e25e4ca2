"""Run the rungs of the kernel ladder (kernels/README.md) on a small vocabulary, without a GPU.

    python -m examples.ladder 2                 # rung 2: triton/log_softmax.py
    python -m examples.ladder                   # all rungs
    python -m examples.ladder --out roof.png    # the roofline as a picture; needs matplotlib

In: the numbers of rungs. Out: for each rung, its largest errors relative to float64, the bytes that
it moves, and how often it passes over the logits. After the rungs, the roofline of an H100 is
printed.

Rungs 1 to 4 run in Triton's interpreter, which makes it possible to count every load and store of a
kernel. For rung 0 and for matrix products, torch's operations are counted. Times are not measured.
The printed times are lower bounds, calculated from the bytes. Read next:
kernels/README.md.
"""

from __future__ import annotations

import os

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads this variable when a kernel is defined

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import numpy as np
import torch
from nanogrpo.kernels.head import HeadLogp, HeadPolicyLoss
from nanogrpo.kernels.reference.policy import Clip, LossInputs, clipped, exp, policy_terms
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime import interpreter

from examples import textbook
from nanogrpo.errors import UserError
from nanogrpo.kernels import reference, triton

ROWS, VOCAB = 8, 20_000  # shape of the logits for rungs 0 to 3
# rung 4: tokens, vocabulary, width, and the rows of a chunk
M, WORDS, WIDTH, CHUNK = 64, 5_000, 8, 16
CLIP = Clip(epsilon=0.2, epsilon_high=0.28)

# For the lower bounds in kernels/README.md: an H100, and the head of Qwen3-0.6B.
BANDWIDTH, TENSOR_CORES = 2.97e12, 791e12  # bytes and FLOP per second
# instructions per second: 132 multiprocessors · 4 schedulers · 32 lanes, one per cycle
INSTRUCTIONS = 132 * 4 * 32 * 1.76e9
N, V, D = 8192, 151_936, 1024
FORWARD, GRADIENT = 5, 6  # FLOP per logit, from the docstring of log_softmax.py


# --- counting ---


@dataclass
class Work:
    """The bytes, FLOP and reductions of one part of a rung. `cached` is the number of bytes that
    the same program reads again."""

    name: str
    read: int = 0
    cached: int = 0
    written: int = 0
    merges: int = 0  # reductions over all lanes of a program: threads exchange data and wait
    flop: int = 0  # of matrix products
    largest: int = 0  # elements of the largest tensor that torch allocated
    shapes: list[str] = field(default_factory=list)  # of the matrix products

    @property
    def moved(self) -> int:
        """The bytes that are moved between the GPU and its memory if repeated reads come from the
        cache."""
        return self.read - self.cached + self.written


@contextlib.contextmanager
def kernels(name: str, logits: Tensor) -> Iterator[Work]:
    """Count the loads and stores of all Triton kernels that run in this block."""
    work, program = Work(name), [0]
    builder, reductions = interpreter.InterpreterBuilder, interpreter.ReduceOps
    load, store = builder.create_masked_load, builder.create_masked_store
    begin, reduce = builder.set_grid_idx, reductions.apply_impl
    first, size = logits.data_ptr(), logits.itemsize
    last_reader = np.zeros(logits.numel(), dtype=np.int64)  # the last program that read each logit

    def size_of(ptrs) -> int:
        return ptrs.get_element_ty().primitive_bitwidth // 8

    def begun(self, *index):
        program[0] += 1
        return begin(self, *index)

    def loaded(self, ptrs, mask, *rest):
        addresses = ptrs.data[mask.data.astype(bool)].astype(np.int64)
        work.read += addresses.size * size_of(ptrs)
        place = (addresses - first) // size
        place = place[(place >= 0) & (place < logits.numel())]
        work.cached += size * int((last_reader[place] == program[0]).sum())
        last_reader[place] = program[0]
        return load(self, ptrs, mask, *rest)

    def stored(self, ptrs, value, mask, *rest):
        work.written += int(mask.data.astype(bool).sum()) * size_of(ptrs)
        return store(self, ptrs, value, mask, *rest)

    def reduced(self, input):
        work.merges += self.axis in (0, None)  # a reduction over axis 1 stays within a lane
        return reduce(self, input)

    with contextlib.ExitStack() as stack:
        for owner, method, counted in (
            (builder, "set_grid_idx", begun),
            (builder, "create_masked_load", loaded),
            (builder, "create_masked_store", stored),
            (reductions, "apply_impl", reduced),
        ):
            stack.enter_context(mock.patch.object(owner, method, counted))
        yield work


class _Operations(TorchDispatchMode):
    def __init__(self, work: Work):
        super().__init__()
        self.work = work

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if func.is_view or "empty" in name or name in ("detach", "set_"):
            return out
        made = [x for x in tree_leaves(out) if isinstance(x, Tensor) and x.is_floating_point()]
        # copy_ and an addmm with beta=0 do not read what they overwrite
        unread = name == "copy_" or (kwargs or {}).get("beta") == 0
        used = [x for x in tree_leaves(args[unread:]) if isinstance(x, Tensor)]
        self.work.read += sum(x.numel() * x.itemsize for x in used)
        self.work.written += sum(x.numel() * x.itemsize for x in made)
        self.work.largest = max([self.work.largest, *(x.numel() for x in made)])
        if name in ("mm", "addmm"):
            a, b = args[-2:]
            self.work.flop += 2 * a.shape[0] * a.shape[1] * b.shape[1]
            self.work.shapes.append(f"[{a.shape[0]}, {a.shape[1]}] × [{b.shape[0]}, {b.shape[1]}]")
        return out


@contextlib.contextmanager
def operations(name: str, logits: Tensor | None = None) -> Iterator[Work]:
    """Count the bytes that torch's operations in this block read and write, and the FLOP of matrix
    products.
    """
    work = Work(name)
    with _Operations(work):
        yield work


# --- the rungs ---


class Result(NamedTuple):
    values: dict[str, Tensor]  # log-prob, entropy, gradient, as far as computed
    work: list[Work]
    notes: list[str]


def inputs_of(rows: int, seed: int = 0) -> LossInputs:
    """Return the inputs of a loss with a ratio, clipping and an entropy bonus."""
    g = torch.Generator().manual_seed(seed)
    advantage, old = torch.randn(2, rows, generator=g)
    ones = torch.ones(rows)
    return LossInputs(advantage, ones / rows, -9.0 + old, entropy_weight=0.01 * ones)


def draw(rows: int = ROWS, vocab: int = VOCAB) -> tuple[Tensor, Tensor]:
    """Return logits [N, V] in bfloat16 and targets [N]."""
    g = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(rows, vocab, generator=g)
    return logits.bfloat16(), torch.randint(vocab, (rows,), generator=g)


def separate(module, count: Callable) -> Result:
    """Run a forward pass that saves statistics of each row, then a backward pass in place."""
    z, targets = draw()
    inputs = inputs_of(len(z))
    with count("forward", z) as forward:
        logp, entropy, norm = module.log_softmax_forward(z, targets, 1.0)
    dlogp = inputs.weight * policy_terms(logp, inputs, CLIP)[1]
    assert inputs.entropy_weight is not None
    upstream = dlogp, -inputs.entropy_weight
    with count("gradient", z) as gradient:
        module.log_softmax_backward_(z, targets, 1.0, norm, entropy, *upstream)
    values = {"log-prob": logp, "entropy": entropy, "gradient": z}
    return Result(values, [forward, gradient], [])


def rung_0() -> Result:
    return separate(reference, operations)


def rung_1() -> Result:
    z, targets = draw()
    with kernels("forward", z) as forward:
        logp, entropy = textbook.textbook_log_softmax(z, targets, 1.0)
    blocks = -(-VOCAB // textbook.BLOCK)
    note = f"merges: three in each of the {blocks} blocks of a row"
    return Result({"log-prob": logp, "entropy": entropy}, [forward], [note])


def rung_2() -> Result:
    return separate(triton, kernels)


def rung_3() -> Result:
    z, targets = draw()
    with kernels("forward and gradient", z) as work:
        logp, entropy, *_ = triton.policy_rows_(z, targets, 1.0, inputs_of(len(z)), CLIP)
    again = work.cached / (z.numel() * z.itemsize)
    note = f"reads each logit {again:.0f} more time, just after the first: from the L2 cache"
    return Result({"log-prob": logp, "entropy": entropy, "gradient": z}, [work], [note])


def draw_head() -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden states [M, D], a head [V, D] and targets [M], all float32."""
    g = torch.Generator().manual_seed(0)
    hidden, head = torch.randn(M, WIDTH, generator=g), torch.randn(WORDS, WIDTH, generator=g)
    return hidden, head, torch.randint(WORDS, (M,), generator=g)


def rung_4() -> Result:
    """Run the fused head in float32, so that the logits are not rounded to bfloat16."""
    hidden, head, targets = draw_head()
    hidden.requires_grad_(), head.requires_grad_()
    with operations("one phase") as one:
        out = HeadPolicyLoss.apply(hidden, head, targets, inputs_of(M), CLIP, 1.0, CHUNK, triton)
        out[0].backward()
    values = {"log-prob": out[1], "entropy": out[2], "gradient": _grad(hidden, head)}
    with operations("two phases") as two:
        logp, _ = HeadLogp.apply(hidden, head, targets, 1.0, CHUNK, triton)
        logp.sum().backward()
    product = 2 * M * WORDS * WIDTH
    notes = [
        f"{one.flop / product:.0f} products of 2·N·V·D FLOP; with the log-probs first and the loss"
        f" second there are {two.flop / product:.0f}",
        f"those of the first of {M // CHUNK} chunks: {', '.join(one.shapes[:3])}",
        f"largest tensor: {one.largest:,} numbers, a chunk of logits; all logits would be"
        f" {M * WORDS:,}",
    ]
    return Result(values, [], notes)


def _grad(hidden: Tensor, head: Tensor) -> Tensor:
    """Return the gradients of both tensors as one vector, and reset them to None."""
    assert hidden.grad is not None
    assert head.grad is not None
    grad = torch.cat([hidden.grad.flatten(), head.grad.flatten()])
    hidden.grad = head.grad = None
    return grad


def truth(rung: int) -> dict[str, Tensor]:
    """Return a rung's exact values in float64, from kernels/reference/ or, for rung 4, from
    autograd.
    """
    if rung < 4:
        z, targets = draw()
        z, inputs = z.double(), inputs_of(ROWS).map(Tensor.double)
        logp, entropy, *_ = reference.policy_rows_(z, targets, 1.0, inputs, CLIP)
        return {"log-prob": logp, "entropy": entropy, "gradient": z}
    hidden, head, targets = draw_head()
    hidden, head = hidden.double().requires_grad_(), head.double().requires_grad_()
    inputs = inputs_of(M).map(Tensor.double)
    assert inputs.old_logp is not None
    assert inputs.entropy_weight is not None
    logp_all = torch.log_softmax(hidden @ head.T, -1)  # [M, V]
    logp = logp_all.gather(1, targets[:, None])[:, 0]
    entropy = -(logp_all.exp() * logp_all).sum(1)
    l = clipped(exp(logp - inputs.old_logp), inputs.advantage, CLIP)[0]
    ((inputs.weight * l).sum() - (inputs.entropy_weight * entropy).sum()).backward()
    gradient = _grad(hidden, head)
    return {"log-prob": logp.detach(), "entropy": entropy.detach(), "gradient": gradient}


class Rung(NamedTuple):
    file: str
    change: str
    run: Callable[[], Result]


RUNGS = [
    Rung(
        "kernels/reference/log_softmax.py",
        "PyTorch: each operation reads and writes all logits",
        rung_0,
    ),
    Rung(
        "examples/textbook.py", "one pass over the logits, with a merge after every block", rung_1
    ),
    Rung(
        "kernels/triton/log_softmax.py",
        "each lane has its own statistics, merged once per row",
        rung_2,
    ),
    Rung(
        "kernels/triton/fused_rows.py", "one kernel per row, overwritten with its gradient", rung_3
    ),
    Rung("kernels/head.py", "the head too: three matrix products, logits in chunks", rung_4),
]


def errors(found: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    """Return the largest errors. The error of the gradient is relative to the largest element of
    the gradient.
    """
    out = {}
    for name, values in found.items():
        scale = exact[name].abs().max() if name == "gradient" else 1.0
        out[name] = float((values.double() - exact[name]).abs().max() / scale)
    return out


def seconds(work: Work) -> float:
    """Return the minimum time of a rung for the output head of Qwen3-0.6B, if memory bandwidth is
    the only limit.
    """
    return work.moved / (ROWS * VOCAB) * N * V / BANDWIDTH


def lines(number: int) -> list[str]:
    """Run a rung and return what to print. Raises UserError if a result is not accurate enough."""
    rung = RUNGS[number]
    result = rung.run()
    found = errors(result.values, truth(number))
    size = f"{M} rows of {WORDS:,} logits from states of {WIDTH} numbers, in float32"
    if number < 4:
        size = f"{ROWS} rows of {VOCAB:,} logits in bfloat16"
    out = [f"rung {number}, {rung.file}: {rung.change}", f"  on {size}"]
    if result.work:
        out.append(f"  {'':22}{'bytes per logit':>17}{'passes':>9}{'merges per row':>17}")
    for work in result.work:
        each = work.moved / (ROWS * VOCAB)
        merges = f"{work.merges / ROWS:.0f}" if number else "–"
        out.append(f"  {work.name:22}{each:17.2f}{each / 2:9.1f}{merges:>17}")
    out += [f"  {note}" for note in result.notes]
    shown = ", ".join(f"{name} {error:.1e}" for name, error in found.items())
    out.append(f"  largest error against float64: {shown}")
    if result.work:
        floor = 1e3 * sum(map(seconds, result.work))
        out.append(f"  floor on an H100 for {N:,} rows of {V:,}: {floor:.2f} ms for the bytes")
    else:
        floor = 1e3 * 6 * N * V * D / TENSOR_CORES
        size = f"{N:,} rows of {V:,}, {D:,} wide"
        out.append(f"  floor on an H100 for {size}: {floor:.1f} ms for 6·N·V·D FLOP")
    for name, error in found.items():
        if not error < (2e-2 if name == "gradient" and number < 4 else 1e-4):
            raise UserError(f"rung {number} is wrong: its {name} is off by {error:.1e}.")
    return out


# --- the roofline ---


def points() -> dict[int, tuple[float, float]]:
    """Return (FLOP per byte, FLOP per second that the roof allows) of each rung. Rungs 0 to 3
    perform the same computation, so a rung that moves fewer bytes is further to the right in the
    roofline.
    """
    out = {}
    for number, rung in enumerate(RUNGS[:4]):
        moved = sum(work.moved for work in rung.run().work) / (ROWS * VOCAB)
        flop = FORWARD + (GRADIENT if number != 1 else 0)
        out[number] = (flop / moved, min(flop / moved * BANDWIDTH, INSTRUCTIONS))
    # Bytes of rung 4: the products write the logits once and read their gradients twice.
    # After the first product, a kernel reads the logits and writes their gradients.
    # The head is read twice in bfloat16, and its gradient is written in float32.
    moved = (2 + 2 * 2 + 4) * N * V + (2 * 2 + 4) * V * D
    intensity = 6 * N * V * D / moved
    return out | {4: (intensity, min(intensity * BANDWIDTH, TENSOR_CORES))}


def drawn(found: dict[int, tuple[float, float]], columns: int = 64, rows: int = 13) -> list[str]:
    """Return the roofline as text, with the number of each rung. Both axes are logarithmic."""
    left, right, low, high = -5.0, 11.0, 36.0, 50.0  # powers of two
    canvas = [[" "] * columns for _ in range(rows)]

    def put(x: float, y: float, mark: str) -> None:
        column = round((np.log2(x) - left) / (right - left) * (columns - 1))
        row = round((high - np.log2(y)) / (high - low) * (rows - 1))
        while column < columns and canvas[row][column].isdigit():  # two rungs are close
            column += 1
        if 0 <= row < rows and 0 <= column < columns:
            canvas[row][column] = mark

    for step in range(columns):
        x = 2 ** (left + (right - left) * step / (columns - 1))
        put(x, min(x * BANDWIDTH, TENSOR_CORES), "/" if x * BANDWIDTH < TENSOR_CORES else "=")
        if x * BANDWIDTH > INSTRUCTIONS:
            put(x, INSTRUCTIONS, "-")
    for number, point in found.items():
        put(*point, str(number))
    return [
        "the roofline of an H100: FLOP per second, against FLOP per byte (both logarithmic)",
        *("  " + "".join(row).rstrip() for row in canvas),
        "  / memory, 3.0 TB/s   - one instruction per lane and cycle   = tensor cores, 791 TFLOP/s",
        "  0-4: the most that each rung can reach, calculated from its bytes, not measured",
    ]


def draw_roofline(found: dict[int, tuple[float, float]], out: Path) -> None:
    """Write the roofline as a picture."""
    try:
        from matplotlib.figure import Figure
    except ImportError as e:
        raise UserError("--out needs matplotlib: pip install 'nanogrpo[plot]'") from e
    figure = Figure(figsize=(8, 4.5), layout="tight")
    axis = figure.add_subplot()
    x = np.logspace(-5, 11, 200, base=2)
    axis.loglog(x, np.minimum(x * BANDWIDTH, TENSOR_CORES), "k-")
    beyond = x[x * BANDWIDTH > INSTRUCTIONS]
    axis.loglog(beyond, np.full_like(beyond, INSTRUCTIONS), "k--")
    axis.text(0.035, 3e11, "memory: 3.0 TB/s", rotation=29)
    axis.text(2000, INSTRUCTIONS * 1.15, "one instruction per lane and cycle", ha="right")
    axis.text(3, TENSOR_CORES * 0.8, "tensor cores: 791 TFLOP/s")
    offsets = {1: (-14, 6), 2: (6, -12), 3: (6, -6)}  # keeps the labels of close rungs apart
    for number, (intensity, speed) in found.items():
        axis.plot(intensity, speed, "o", color=f"C{number}", label=_label(number))
        axis.annotate(
            str(number),
            (intensity, speed),
            xytext=offsets.get(number, (6, -12)),
            textcoords="offset points",
            color=f"C{number}",
            weight="bold",
        )
    axis.set(xlabel="FLOP per byte", ylabel="FLOP per second", ylim=(5e10, 2e15))
    axis.set_title("The most that each rung can reach on an H100 (calculated, not measured)")
    axis.legend(loc="lower right", fontsize="small")
    axis.grid(alpha=0.3)
    try:
        figure.savefig(out, dpi=110)
    except (OSError, ValueError) as e:  # ValueError: an unknown suffix
        raise UserError(f"--out {out} cannot be written: {e}; choose another file.") from e


def _label(number: int) -> str:
    return f"{number}: {RUNGS[number].file}" + (" (forward only)" if number == 1 else "")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m examples.ladder",
        description="Run rungs of the ladder in kernels/README.md.",
    )
    parser.add_argument(
        "rungs",
        nargs="*",
        type=int,
        metavar="RUNG",
        help=f"0 to {len(RUNGS) - 1} (default: all of them, and the roofline)",
    )
    parser.add_argument(
        "--out", type=Path, help="draw the roofline into this file, such as roof.png"
    )
    args = parser.parse_args(argv)
    try:
        for number in args.rungs:
            if number not in range(len(RUNGS)):
                raise UserError(f"there is no rung {number}: choose from 0 to {len(RUNGS) - 1}.")
        for number in args.rungs or range(len(RUNGS)):
            print(*lines(number), "", sep="\n")
        found = points()
        print(*drawn(found), sep="\n")
        if args.out:
            draw_roofline(found, args.out)
            print(args.out)
    except UserError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
