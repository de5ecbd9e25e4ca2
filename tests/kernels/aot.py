"""Replacements for a GPU in the kernel tests: compiling ahead of time, counting instructions, and
an exact fma.

`contracts` calls the functions that launch kernels on meta tensors, and records the launches.
`compiled` turns one of them into machine code for a GPU that is not here, with Triton's own launch
code and the assembler that it ships. `report` lists the facts that the compile contracts check:
registers, spills, and the instructions of the inner loops. Triton decides at import whether it
interprets, so contracts run in a process of their own: `TRITON_INTERPRET=0 python
tests/kernels/aot.py` prints one JSON line per kernel. Read next: test_contracts.py.
"""

import functools
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

if __name__ == "__main__":  # run as a script: the checkout is not on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


def exact_fma() -> None:
    """Give the interpreter the GPU's fused multiply-add: one rounding instead of two.

    Triton's interpreter multiplies, rounds, then adds. The log-softmax kernels rely on the single
    rounding of `tl.fma`. float32 products are exact in float64, so computing there and rounding
    once equals the hardware.
    """
    import numpy as np
    from triton.runtime import interpreter

    def create_fma(self, x, y, z):
        wide = x.data.astype(np.float64) * y.data.astype(np.float64) + z.data.astype(np.float64)
        return interpreter.TensorHandle(wide.astype(z.data.dtype), z.dtype.scalar)

    interpreter.InterpreterBuilder.create_fma = create_fma


@dataclass
class Launch:
    """A kernel with the arguments of a launch; the tensors are on the meta device."""

    kernel: Any
    args: tuple
    options: dict[str, Any]  # constants, and the number of warps

    @property
    def warps(self) -> int:
        return self.options.get("num_warps", 4)


def launches(call: Callable[[], object]) -> list[Launch]:
    """Return the launches of a call on meta tensors, in order. No kernel runs."""
    from triton.runtime.jit import JITFunction

    found = []

    def record(kernel, *args, grid, warmup, **options):
        found.append(Launch(kernel, args, options))

    with mock.patch.object(JITFunction, "run", record):
        call()
    return found


# the sizes of Qwen3-8B and its vocabulary, and of a strip
T, D, H, K, E, F, V = 8192, 4096, 32, 8, 128, 12_288, 151_936


def contracts() -> dict[str, Launch]:
    """Return a launch of every kernel by name, with the arguments that the model passes."""
    import torch
    from nanogrpo.kernels.reference.attention import Strip
    from nanogrpo.kernels.reference.policy import Clip, LossInputs
    from nanogrpo.kernels.triton import adamw, exact

    from examples import textbook
    from nanogrpo.extras import bitwise
    from nanogrpo.extras.lora import nf4_kernels, nf4_reference
    from nanogrpo.kernels import triton as kernels
    from tests.kernels.terms import kernel_terms

    table: dict[str, Launch] = {}

    def add(names: str, function: Callable, *args: Any) -> None:
        found = launches(lambda: function(*args))
        table.update(zip(names.split("; "), found, strict=True))

    def meta(*shape: int, dtype=torch.bfloat16, frozen: bool = False) -> torch.Tensor:
        grad = dtype.is_floating_point and not frozen
        return torch.empty(*shape, dtype=dtype, device="meta", requires_grad=grad)

    def vector(dtype=torch.float32) -> torch.Tensor:
        return meta(T, dtype=dtype, frozen=True)

    def both_ways(function: Callable, *inputs: Any) -> None:
        out = function(*inputs)
        out = out if isinstance(out, tuple) else (out,)
        leaves = [x for x in inputs if isinstance(x, torch.Tensor) and x.requires_grad]
        torch.autograd.grad(out, leaves, out)

    targets, clip = vector(torch.int64), Clip(0.2, 0.28, beta=0.1)
    backward = kernels.log_softmax_backward_
    every = LossInputs(*(vector() for _ in range(6)))
    on_policy = LossInputs(vector(), vector())
    for dtype, end in ((torch.bfloat16, ""), (torch.float16, ", fp16"), (torch.float32, ", fp32")):
        wide = meta(T, V, dtype=dtype, frozen=True)
        odd = meta(T, V + 1, dtype=dtype, frozen=True)[:, : V - 1]  # rows start at odd places
        for logits, name in ((wide, end), (odd, f", odd stride{end}")):
            args = logits, targets, 0.7
            add(f"log_softmax.forward{name}", kernels.log_softmax_forward, *args)
            add(f"rows{name}", kernels.policy_rows_, *args, every, clip)
            if not end:  # the others differ from bfloat16 in nothing but their loads
                rest = meta(2, T, dtype=torch.float32, frozen=True), *(vector() for _ in range(3))
                add(f"log_softmax.backward{name}", backward, *args, *rest)
    half = meta(T, V, frozen=True), targets, 0.7
    full, out = meta(T, V, dtype=torch.float32, frozen=True), meta(T, V, frozen=True)
    add("rows, fp32 logits", kernels.policy_rows_, full, targets, 0.7, every, clip, out)
    add("log_softmax.backward, fp32 logits", backward, full, targets, 0.7, *rest, out)
    add("rows, on policy", kernels.policy_rows_, *half, on_policy, clip)
    add("textbook", textbook.textbook_log_softmax, *half)
    # the number of tokens with a loss is rarely a multiple of 16
    logp = meta(T - 1, dtype=torch.float32, frozen=True)
    for inputs, name in ((every, ""), (on_policy, ", on policy")):
        vectors = inputs.map(lambda v: torch.empty_like(logp))
        add(f"terms{name}", kernel_terms, logp, vectors, clip)

    x, weight, eps = meta(T, D), meta(D), 1e-6
    names = "norm.forward{0}; norm.backward{0}"
    add(names.format(""), both_ways, kernels.add_rms_norm, x, meta(T, D), weight, eps)
    add(names.format(", no residual"), both_ways, kernels.rms_norm, x, weight, eps)
    names = "rope.forward{0}; rope.backward{0}"
    angles = [meta(T, 1, E, dtype=torch.float32, frozen=True) for _ in range(2)]
    k, norms = meta(T, K, E), (meta(E), meta(E))
    for heads, end in ((H, ""), (2 * H, ", 64 heads")):
        q = meta(T, heads, E)
        add(names.format(end), both_ways, kernels.norm_rope, q, k, *norms, *angles, eps)
    add(names.format(", no norm"), both_ways, kernels.norm_rope, q, k, None, None, *angles, eps)
    gate, up = meta(T, F), meta(T, F)
    add("swiglu.forward; swiglu.backward", both_ways, kernels.swiglu, gate, up)
    w, m, v, grad = (meta(D, F, dtype=torch.float32, frozen=True) for _ in range(4))
    numbers = vector()[:2], vector()[0], vector()[0]
    tensors = w, meta(D, F), grad, m, v
    add("adamw.update", adamw.adamw_, tensors, numbers, 1e-6, 0.1, (0.9, 0.999), 1e-8)
    order = meta(4 * T, dtype=torch.int64), meta(T + 1, dtype=torch.int64)
    add("gather.sum", both_ways, kernels.gather_rows, k, order[0], order)
    # a decode step; q, k and v are parts of one product
    exactly = torch.no_grad()(functools.partial(bitwise.paged_attention, exact.attend))
    for names, function, rows in (
        ("paged.attend", kernels.paged_attention, 64),
        ("paged.attend, one part", kernels.paged_attention, 128),
        ("exact.attend", exactly, 64),
    ):
        keys, table_of = meta(rows, dtype=torch.int64), meta(rows, 128, dtype=torch.int32)
        joint = meta(rows, (H + 2 * K) * E).split([H * E, K * E, K * E], dim=1)
        angles = [meta(rows, 1, E, dtype=torch.float32, frozen=True) for _ in range(2)]
        rest = (*norms, *angles, eps), keys, table_of, meta(999, K, 32, E), meta(999, K, 32, E)
        add(names, function, *(y.unflatten(1, (-1, E)) for y in joint), *rest)
    for out, name in ((None, ""), (meta(T, F, dtype=torch.float32), ", fp32")):
        add(f"exact.product{name}", exact.product, x, meta(F, D, frozen=True), out)
    names = "sample.totals; sample.counts; sample.pick"
    keys = meta(64, dtype=torch.int64)
    add(names, kernels.sample_tokens, meta(64, V), keys, keys, 0.7)
    strip = Strip(meta(65, dtype=torch.int32), 1024)
    names = "attention.forward; attention.queries; attention.keys"
    qkv = meta(T, H, E), meta(T, K, E), meta(T, K, E)
    add(names, both_ways, lambda *qkv: kernels.attention(*qkv, strip), *qkv)
    for name in names.split("; "):  # as on GPUs other than H100 and B200
        options = table[name].options
        narrow = replace(table[name], options={**options, "KEYS": options["KEYS"] // 2})
        table[f"{name}, narrow"] = narrow
    weight = meta(D, F, frozen=True)
    sizes = D * F // 2, D * F // 64, D * F // 64 // 256
    packed, codes, least = (meta(n, dtype=torch.uint8) for n in sizes)
    q = nf4_reference.Quantized(packed, codes, least.float(), least[0].float(), weight.shape)
    add("nf4.dequantize", nf4_kernels.nf4_dequantize, q, weight.dtype)
    for rows, name in FOUR_BITS.items():
        add(f"{name}; nf4.sum, {rows} rows", nf4_kernels.nf4_matmul, meta(rows, F), q)
    return table


class _Absent:
    """Stands in for the driver of a GPU that is not here, for Triton's own launch code."""

    def __init__(self, arch: int):
        self.arch = arch

    def get_current_device(self) -> int:
        return self.arch  # kernels are cached by device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.arch, 32)


def compiled(launch: Launch, arch: int):
    """Compile a kernel for sm_<arch> as a launch would, without running it."""
    from triton.runtime.driver import driver

    driver.set_active(_Absent(arch))
    return launch.kernel.warmup(*launch.args, grid=(1,), **launch.options)


def tool(name: str, option: str, cubin: bytes) -> str:
    """Run one of the CUDA tools that Triton ships on machine code."""
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [path, option, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def operation(instruction: str) -> str:
    """Return the name of an instruction, without its predicate."""
    return re.sub(r"^@!?U?P\w+\s+", "", instruction).split()[0]


def disassemble(cubin: bytes) -> tuple[list[str], list[list[str]]]:
    """Return the instructions, and the body of each backward branch in order of their ends."""
    code, labels, loops = [], {}, []
    for line in tool("nvdisasm", "-c", cubin).splitlines():
        if label := re.match(r"\s*(\.L_\w+):", line):
            labels[label.group(1)] = len(code)
        elif instruction := re.match(r"\s*/\*[0-9a-f]+\*/\s+(.*?)\s*;", line):
            code.append(instruction.group(1))
            target = re.search(r"BRA.*`\((\.L_\w+)\)", code[-1])
            if target and target.group(1) in labels:
                loops.append(code[labels[target.group(1)] :])
    return code, loops


def report(name: str, launch: Launch, arch: int, code: bool = True) -> dict:
    """Return the facts about a kernel that the contracts check; code: its instructions too.

    Disassembling takes twice as long as compiling.
    """
    asm = compiled(launch, arch).asm
    usage = tool("cuobjdump", "-res-usage", asm["cubin"])
    facts: dict[str, Any] = {"kernel": name, "arch": arch, "threads": 32 * launch.warps}
    for word in ("REG", "STACK", "LOCAL"):  # spilled registers go to the stack, in local memory
        facts[word] = int(re.search(rf"\b{word}:(\d+)", usage).group(1))  # type: ignore[union-attr]
    facts["shared"] = compiled(launch, arch).metadata.shared  # bytes
    products = r"\b(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)"
    facts["products"] = len(re.findall(products, asm["ptx"]))
    facts["atomics"] = len(re.findall(r"\b(?:atom|red)\.", asm["ptx"]))
    # min and max that lose a NaN
    facts["drops_nan"] = len(re.findall(r"\b(?:min|max)\.f32", asm["ptx"]))
    if not code:
        return facts
    instructions, loops = disassemble(asm["cubin"])
    block = launch.options.get("R", 1) * launch.options.get("C", 1)
    block *= launch.options.get("ROWS", 1) * launch.options.get("KEYS", 1)
    block = launch.options.get("BLOCK", block)
    facts |= {"instructions": len(instructions), "loops": []}
    facts["fused"] = sum(operation(i).startswith("FFMA") for i in instructions)
    for loop in loops:
        names = Counter(operation(i).split(".")[0] for i in loop)
        facts["loops"].append(
            {
                "per_element": round(len(loop) * launch.warps * 32 / block, 4),
                "barriers": names["BAR"],
                "exp2": names["MUFU"],
                "shuffles": names["SHFL"],
                "loads": names["LDG"],
            }
        )
    return facts


# Kernels at the limit of registers (32 warps leave 64 per thread), and the largest of the others.
WIDEST = ("rows", "rows, fp32", "rows, odd stride", "rows, odd stride, fp32")
WIDEST += ("terms", "terms, on policy", "norm.backward", "rope.backward", "swiglu.backward")
WIDEST += ("rope.backward, 64 heads", "gather.sum", "paged.attend")
WIDEST += ("paged.attend, one part",)
WIDEST += ("sample.totals", "sample.counts", "sample.pick")
FOUR_BITS = {rows: f"nf4.matmul, {rows} rows" for rows in (16, 32, 64, 128)}
WIDEST += ("nf4.dequantize", *FOUR_BITS.values())
WIDEST += ("exact.product", "exact.attend", "adamw.update")
ARCHS = (80, 86, 89, 90, 100, 120)  # A100, RTX 3090, RTX 4090, H100, B200, RTX 5090
ATTENTION = ("attention.forward", "attention.queries", "attention.keys")


def main() -> None:
    """Print the facts of every kernel on sm_90, and of the widest on the other architectures."""
    table = contracts()
    for name, launch in table.items():
        print(json.dumps(report(name, launch, 90)), flush=True)
    for arch in ARCHS:
        own = ATTENTION if arch == 100 else tuple(f"{name}, narrow" for name in ATTENTION)
        for name in own + WIDEST if arch != 90 else ():
            print(json.dumps(report(name, table[name], arch, code=False)), flush=True)


if __name__ == "__main__":
    main()
