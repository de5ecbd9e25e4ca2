"""What stands in for a GPU in the kernel tests: compiling ahead of time and counting instructions,
and an exact fma.

`compile_kernel` turns a `@triton.jit` function into machine code for a GPU that is not here, with
the assembler that Triton ships; `Machine` answers the questions of the compile contracts: does it
spill, how many instructions has its inner loop. Triton decides when it is imported whether it
interprets; so contracts run in a process of their own with TRITON_INTERPRET=0: `python
tests/kernels/aot.py NAME ARCH` prints one JSON line a kernel. Read next: test_kernels_contracts.py.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # run as a script: the checkout is not on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


@dataclass
class Machine:
    """A compiled kernel: registers, bytes of stack, and its instructions as text, in order."""

    registers: int
    stack: int  # bytes; more than 0 means that registers were spilled to memory
    code: list[str]
    loops: list[list[str]]  # the body of each backward branch, in order of their ends

    def count(self, name: str) -> int:
        """Instructions whose name starts so (LDL and STL are the spills, BAR the barriers)."""
        return sum(_name(line).startswith(name) for line in self.code)


def _name(instruction: str) -> str:
    return re.sub(r"^@!?U?P\w+\s+", "", instruction).split()[0]


def compile_kernel(
    fn,
    arch: int,
    signature: dict[str, str],
    constants: dict,
    warps: int,
    aligned: tuple[str, ...] = (),
) -> Machine:
    """fn compiled for sm_<arch>. signature names the run-time arguments; the rest are constants
    (None for absent pointers).

    Arguments in `aligned` are multiples of 16, as Triton finds at a launch: without it loads are
    not of 16 bytes.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = {name: signature.get(name, "constexpr") for name in fn.arg_names}
    constants = {name: constants.get(name) for name, kind in types.items() if kind == "constexpr"}
    hints = {
        (i,): [["tt.divisibility", 16]] for i, name in enumerate(fn.arg_names) if name in aligned
    }
    source = ASTSource(fn, types, constants, hints)
    compiled = triton.compile(
        source, target=GPUTarget("cuda", arch, 32), options={"num_warps": warps}
    )
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "kernel.cubin")
        cubin.write_bytes(compiled.asm["cubin"])
        usage = subprocess.run(
            [tools / "cuobjdump", "-res-usage", cubin], capture_output=True, text=True, check=True
        ).stdout
        sass = subprocess.run(
            [tools / "nvdisasm", "-c", cubin], capture_output=True, text=True, check=True
        ).stdout
    registers, stack = (
        int(re.search(rf"\b{word}:(\d+)", usage).group(1)) for word in ("REG", "STACK")
    )
    return Machine(registers, stack, *_parse(sass))


def _parse(sass: str) -> tuple[list[str], list[list[str]]]:
    code, labels, loops = [], {}, []
    for line in sass.splitlines():
        if label := re.match(r"\s*(\.L_\w+):", line):
            labels[label.group(1)] = len(code)
        elif instruction := re.match(r"\s*/\*[0-9a-f]+\*/\s+(.*?)\s*;", line):
            code.append(instruction.group(1))
            target = re.search(r"BRA.*`\((\.L_\w+)\)", code[-1])
            if target and target.group(1) in labels:
                loops.append(code[labels[target.group(1)] :])
    return code, loops


def exact_fma() -> None:
    """Gives the interpreter the GPU's fused multiply-add: one rounding instead of two.

    Triton's interpreter multiplies, rounds, then adds; the log-softmax kernels rely on the single
    rounding that `tl.fma` promises. float32 products are exact in float64, so computing there and
    rounding once is what the hardware does.
    """
    import numpy as np
    from triton.runtime import interpreter

    def create_fma(self, x, y, z):
        wide = x.data.astype(np.float64) * y.data.astype(np.float64) + z.data.astype(np.float64)
        return interpreter.TensorHandle(wide.astype(z.data.dtype), z.dtype.scalar)

    interpreter.InterpreterBuilder.create_fma = create_fma


LOGITS_LIKE = [
    "LOGITS",
    "OUT",
    "X",
    "RESIDUAL",
    "Y",
    "SUM",
    "H",
    "DY",
    "DSUM",
    "DX",
    "GATE",
    "UP",
    "DGATE",
    "DUP",
]
POINTERS = {"TARGETS": "*i64", "MASK": "*i8", "CLIP": "*i8"}  # all but these and the above: *fp32
NUMBERS = dict.fromkeys(
    ["N", "V", "M", "T", "D", "parts", "slice", "blocks", "rows", "count", "heads"], "i32"
)
NUMBERS |= {"stride": "i64", "stride_out": "i64"}
# multiples of 16 for Qwen3's sizes; pointers always are
ALIGNED = ("stride", "stride_out", "V", "slice", "D")
QWEN3 = 151_936  # words


@dataclass
class Contract:
    """A kernel as it is launched: what its constants do not mention is a run-time argument, typed
    by its name.
    """

    kernel: Any
    constants: dict
    warps: int
    dtype: str = "bf16"  # of logits and activations
    aligned: tuple[str, ...] = ALIGNED


def contracts() -> dict[str, Contract]:
    """name → every kernel, for Qwen3's vocabulary; shapes of blocks are those that the launching
    code itself computes.
    """
    import torch
    import triton
    import triton.language as tl

    from nanogrpo.kernels import fused_rows, log_softmax, norm, policy, rope, swiglu, textbook

    acc = dict(ACC=tl.float32)
    plain = dict(OLD=None, REF=None, IMP=None)
    table = {}
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)):
        end = "" if name == "bf16" else f", {name}"
        R, C, warps = log_softmax.shape_of_block(QWEN3, dtype)
        (VR, VC, visit_warps), (_, narrow_c, _) = (
            fused_rows.shape_of_visit(QWEN3, dtype, wide) for wide in (True, False)
        )
        lanes, visit = (
            dict(WIDE=True, R=R, C=C, **acc),
            dict(BIAS=True, WIDE=True, R=VR, C=VC, **acc),
        )
        parts = triton.next_power_of_2(triton.cdiv(QWEN3, log_softmax.columns_of_part(R, C)))
        block, block_warps = log_softmax.shape_of_gradient(QWEN3)
        backward = dict(BLOCK=block, MASK=None, **acc)
        odd, narrow = (
            tuple(n for n in ALIGNED if n != "V" and not n.startswith("stride")),
            dict(WIDE=False),
        )
        here = {
            "log_softmax.forward": Contract(
                log_softmax.forward_kernel, dict(MASK=None, **lanes), warps
            ),
            "log_softmax.forward, masked": Contract(log_softmax.forward_kernel, lanes, warps),
            "log_softmax.forward, odd stride": Contract(
                log_softmax.forward_kernel, lanes | narrow, warps, aligned=odd
            ),
            "log_softmax.part, odd stride": Contract(
                log_softmax.part_kernel, lanes | narrow, warps, aligned=odd
            ),
            "log_softmax.part": Contract(log_softmax.part_kernel, lanes, warps),
            "log_softmax.join": Contract(
                log_softmax.join_kernel, dict(PARTS_2=parts, MASK=None, **acc), 1
            ),
            "log_softmax.backward": Contract(log_softmax.backward_kernel, backward, block_warps),
            "log_softmax.backward, odd stride": Contract(
                log_softmax.backward_kernel, backward, block_warps, aligned=odd
            ),
            "rows": Contract(fused_rows.row_kernel, visit, visit_warps),
            "rows, on policy": Contract(
                fused_rows.row_kernel, dict(ENTROPY_WEIGHT=None, **plain, **visit), visit_warps
            ),
            "rows, odd stride": Contract(
                fused_rows.row_kernel, visit | narrow | dict(C=narrow_c), visit_warps, aligned=odd
            ),
        }
        if end:  # what differs from bfloat16 in nothing but its loads is compiled once
            here = {
                key: here[key]
                for key in here
                if key.split(",")[-1] not in (" masked", " on policy", "log_softmax.join")
            }
        table |= {f"{key}{end}": replace(contract, dtype=name) for key, contract in here.items()}
    policies = dict(BIAS=True, BLOCK=policy.BLOCK)
    block, warps = norm.shape_of_block(4096)
    table |= {
        "textbook": Contract(textbook.textbook_kernel, dict(BLOCK=1024), 4),
        "policy": Contract(policy.policy_kernel, policies, policy.WARPS),
        "policy, on policy": Contract(
            policy.policy_kernel, dict(KL=None, **policies, **plain), policy.WARPS
        ),
        "policy.sum": Contract(policy.sum_kernel, dict(ROWS=32), 1),
        "norm.forward": Contract(norm.forward_kernel, dict(BLOCK=block), warps),
        "norm.backward": Contract(norm.backward_kernel, dict(BLOCK=block), warps),
        "rope.forward": Contract(rope.forward_kernel, dict(HALF=64, ROWS=16), 4),
        "rope.backward": Contract(rope.backward_kernel, dict(HALF=64, ROWS=16), 4),
        "swiglu.forward": Contract(swiglu.forward_kernel, dict(BLOCK=4096), 8),
        "swiglu.backward": Contract(swiglu.backward_kernel, dict(BLOCK=4096), 8),
    }
    return table


def compile_contract(name: str, arch: int) -> Machine:
    contract = contracts()[name]
    kernel, constants = contract.kernel, contract.constants
    kinds = POINTERS | dict.fromkeys(LOGITS_LIKE, f"*{contract.dtype}") | NUMBERS
    kinds = {n: kinds.get(n, "*fp32" if n.isupper() else "fp32") for n in kernel.arg_names}
    signature = {n: kinds[n] for n in kernel.arg_names if n not in constants}
    aligned = tuple(n for n in signature if n in contract.aligned or signature[n].startswith("*"))
    return compile_kernel(kernel, arch, signature, constants, contract.warps, aligned)


def report(name: str, arch: int) -> dict:
    """One line of facts about a kernel: what the contracts are held against."""
    constants, warps = contracts()[name].constants, contracts()[name].warps
    machine = compile_contract(name, arch)
    spills = machine.count("LDL") + machine.count("STL")
    facts = {
        "kernel": name,
        "arch": arch,
        "registers": machine.registers,
        "stack": machine.stack,
        "spills": spills,
    }
    # min and max that lose a nan
    facts["drops_nan"] = sum("FMNMX" in line and ".NAN" not in line for line in machine.code)
    loops = [
        {"length": len(loop), "barriers": sum(_name(i).startswith("BAR") for i in loop)}
        for loop in machine.loops
    ]
    for facts_of, loop in zip(loops, machine.loops):
        names = Counter(_name(i).split(".")[0] for i in loop)
        facts_of.update(
            exp2=names["MUFU"], shuffles=names["SHFL"], loads=names["LDG"], fma=names["FFMA"]
        )
        block = constants["R"] * constants["C"] if "R" in constants else constants.get("BLOCK", 0)
        if block:
            facts_of["per_element"] = round(len(loop) * warps * 32 / block, 2)
    return {**facts, "loops": loops, "instructions": len(machine.code)}


if __name__ == "__main__":
    chosen, arch = sys.argv[1], int(sys.argv[2])
    for each in contracts() if chosen == "all" else [chosen]:
        print(json.dumps(report(each, arch)), flush=True)
