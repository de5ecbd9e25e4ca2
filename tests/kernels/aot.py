"""Replacements for a GPU in the kernel tests: compiling ahead of time, counting instructions, and
an exact fma.

`compile_contract` turns a kernel into machine code for a GPU that is not here, with the assembler
that Triton ships. `report` lists the facts that the compile contracts check: spills, and the
instructions of the inner loops. Triton decides at import whether it interprets, so contracts run in
a process of their own: `TRITON_INTERPRET=0 python tests/kernels/aot.py` prints one JSON line per
kernel. Read next: test_contracts.py.
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


# Types of the run-time arguments by name; all other pointers (upper case) are *fp32.
KINDS = {
    **dict.fromkeys(
        [
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
            "LOGITS",
        ],
        "*{}",
    ),
    **{"TARGETS": "*i64", "CLIP": "*i8", "stride": "i64"},
    **dict.fromkeys(["N", "V", "M", "T", "D", "blocks", "count", "heads"], "i32"),
}
# multiples of 16 for Qwen3's sizes, as Triton finds at a launch; pointers always are
ALIGNED = ("stride", "V", "D")
ODD = ("D",)  # where rows start at odd places


@dataclass
class Contract:
    """A kernel as it is launched. Arguments that `constants` does not mention are run-time ones."""

    kernel: Any
    constants: dict
    warps: int
    dtype: str = "bf16"  # of logits and activations
    aligned: tuple[str, ...] = ALIGNED


def contracts() -> dict[str, Contract]:
    """Return every kernel by name, with the shapes of its launches."""
    import torch

    from nanogrpo.kernels import fused_rows, log_softmax, norm, policy, rope, swiglu, textbook

    table = {}
    absent = dict(OLD=None, REF=None, IMP=None)
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)):
        end = "" if name == "bf16" else f", {name}"
        lanes = dict(WIDE=True, R=log_softmax.LANES, C=16 // dtype.itemsize)
        forward = Contract(log_softmax.forward_kernel, lanes, log_softmax.WARPS, name)
        visit = lanes | dict(BIAS=True, R=fused_rows.LANES)
        rows = Contract(fused_rows.row_kernel, visit, fused_rows.WARPS, name)
        narrow = dict(WIDE=False, C=4)
        table |= {
            f"log_softmax.forward{end}": forward,
            f"log_softmax.forward, odd stride{end}": replace(
                forward, constants=lanes | dict(WIDE=False), aligned=ODD
            ),
            f"rows{end}": rows,
            f"rows, odd stride{end}": replace(rows, constants=visit | narrow, aligned=ODD),
        }
        if end:  # the others differ from bfloat16 in nothing but their loads
            continue
        table["rows, on policy"] = replace(
            rows, constants=dict(ENTROPY_WEIGHT=None, **absent, **visit)
        )
        block = dict(BLOCK=log_softmax.BLOCK)
        backward = Contract(log_softmax.backward_kernel, block, log_softmax.WARPS)
        table |= {
            "log_softmax.backward": backward,
            "log_softmax.backward, odd stride": replace(backward, aligned=ODD),
        }
    policies = dict(BIAS=True, BLOCK=policy.BLOCK)
    block, warps = norm.shape_of_block(4096)
    return table | {
        "textbook": Contract(textbook.textbook_kernel, dict(BLOCK=textbook.BLOCK), 4),
        "policy": Contract(policy.policy_kernel, policies, policy.WARPS),
        "policy, on policy": Contract(
            policy.policy_kernel, dict(KL=None, **policies, **absent), policy.WARPS
        ),
        "policy.sum": Contract(policy.sum_kernel, dict(BLOCK=128), 1),
        "norm.forward": Contract(norm.forward_kernel, dict(BLOCK=block), warps),
        "norm.backward": Contract(norm.backward_kernel, dict(BLOCK=block), warps),
        "rope.forward": Contract(rope.forward_kernel, dict(HALF=64, ROWS=16), 4),
        "rope.backward": Contract(rope.backward_kernel, dict(HALF=64, ROWS=16), 4),
        "swiglu.forward": Contract(swiglu.forward_kernel, dict(BLOCK=4096), 8),
        "swiglu.backward": Contract(swiglu.backward_kernel, dict(BLOCK=4096), 8),
    }


def compile_contract(contract: Contract, arch: int):
    """Compile a kernel for sm_<arch>."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    fn, signature, constants, hints = contract.kernel, {}, {}, {}
    for i, name in enumerate(fn.arg_names):
        kind = KINDS.get(name, "*fp32" if name.isupper() else "fp32").format(contract.dtype)
        # Constants are written in upper case too; an absent pointer is a constant None.
        if name in contract.constants:
            kind, constants[name] = "constexpr", contract.constants[name]
        elif name in contract.aligned or kind.startswith("*"):
            hints[(i,)] = [["tt.divisibility", 16]]
        signature[name] = kind
    source = ASTSource(fn, signature, constants, hints)
    target, options = GPUTarget("cuda", arch, 32), {"num_warps": contract.warps}
    return triton.compile(source, target=target, options=options)


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


def report(name: str, contract: Contract, arch: int, code: bool = True) -> dict:
    """Return the facts about a kernel that the contracts check; code: its instructions too.

    Disassembling takes twice as long as compiling.
    """
    compiled = compile_contract(contract, arch)
    usage = tool("cuobjdump", "-res-usage", compiled.asm["cubin"])
    facts: dict[str, Any] = {"kernel": name, "arch": arch}
    for word in ("REG", "STACK", "LOCAL"):  # spilled registers go to the stack, in local memory
        facts[word] = int(re.search(rf"\b{word}:(\d+)", usage).group(1))  # type: ignore[union-attr]
    # min and max that lose a NaN
    facts["drops_nan"] = len(re.findall(r"\b(?:min|max)\.f32", compiled.asm["ptx"]))
    if not code:
        return facts
    instructions, loops = disassemble(compiled.asm["cubin"])
    block = contract.constants.get("R", 1) * contract.constants.get("C", 1)
    block = contract.constants.get("BLOCK", block)
    facts |= {"instructions": len(instructions), "loops": []}
    for loop in loops:
        names = Counter(operation(i).split(".")[0] for i in loop)
        facts["loops"].append(
            {
                "per_element": round(len(loop) * contract.warps * 32 / block, 4),
                "barriers": names["BAR"],
                "exp2": names["MUFU"],
                "shuffles": names["SHFL"],
                "loads": names["LDG"],
            }
        )
    return facts


# Kernels at the limit of registers (32 warps leave 64 per thread), and the largest of the others.
WIDEST = ("rows", "rows, fp32", "rows, odd stride", "rows, odd stride, fp32")
WIDEST += ("policy", "policy, on policy", "norm.backward", "rope.backward", "swiglu.backward")


def main() -> None:
    """Print the facts of every kernel on sm_90, and of the widest on sm_80 and sm_100."""
    table = contracts()
    for name, contract in table.items():
        print(json.dumps(report(name, contract, 90)), flush=True)
    for arch in (80, 100):
        for name in WIDEST:
            print(json.dumps(report(name, table[name], arch, code=False)), flush=True)


if __name__ == "__main__":
    main()
