"""Compile contracts: what must hold of each kernel's machine code, checked without a GPU (tests/aot.py compiles).

Every kernel, for sm_80, sm_90 and sm_100: no register spilled. The log-softmax loop on sm_90: at most 8 instructions an element,
entropy included, no barrier, no shuffle, 16 bytes a load. kernels/README.md prints these counts; its table is held to them.
"""

import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@functools.cache
def _reports(arch: int) -> dict[str, dict]:
    """name → facts of every kernel for sm_<arch>, from one process in which Triton compiles instead of interpreting."""
    command = [sys.executable, ROOT / "tests" / "aot.py", "all", str(arch)]
    out = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "0"}, capture_output=True, text=True, timeout=240)
    assert out.returncode == 0, out.stderr
    return {facts["kernel"]: facts for facts in map(json.loads, out.stdout.splitlines())}


@pytest.mark.parametrize("arch", [80, 90, 100])
def test_no_kernel_spills(arch):
    reports = _reports(arch)
    assert len(reports) >= 10
    for name, facts in reports.items():
        assert (facts["stack"], facts["spills"]) == (0, 0), f"{name} spills on sm_{arch}: {facts}"


@pytest.mark.parametrize(
    ("name", "per_thread"),
    [("log_softmax.forward", 32), ("log_softmax.forward, masked", 32), ("log_softmax.part", 32), ("rows", 16)],
)
def test_the_loop_over_logits_on_sm_90(name, per_thread):
    loop = _reports(90)[name]["loops"][0]
    assert loop["per_element"] <= 8
    assert (loop["barriers"], loop["shuffles"]) == (0, 0)
    assert loop["loads"] == per_thread / 8  # 8 bfloat16 numbers, 16 bytes, a load
    assert loop["exp2"] == per_thread * 9 / 8  # one an element, one a lane


def test_the_readme_prints_what_was_counted():
    table = re.findall(
        r"^\| `([\w.]+)`[^|]*\| (\d+) \| (\d+) \| ([\d.]+|–) \|", (ROOT / "kernels" / "README.md").read_text(), re.M
    )
    assert len(table) >= 6
    for name, registers, instructions, per_element in table:
        facts = _reports(90)[name]
        # Other versions of Triton than the table's allocate a little differently.
        assert abs(facts["registers"] - int(registers)) <= 16, name
        assert abs(facts["instructions"] / int(instructions) - 1) <= 0.15, name
        if per_element != "–":
            assert abs(facts["loops"][0]["per_element"] - float(per_element)) <= 0.5, name
