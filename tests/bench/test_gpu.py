"""`make gpu` without a GPU ends with one sentence.

Read next: bench/gpu.py.
"""

import os
import subprocess
import sys

import pytest
import torch

from bench import common, gpu, step_large


@pytest.mark.skipif(torch.cuda.is_available(), reason="it would measure")
def test_without_a_gpu_make_and_the_benchmark_end_with_one_sentence(tmp_path, capsys):
    assert gpu.main(["--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err == "bench.gpu needs an NVIDIA GPU, and torch finds none.\n"
    assert not (tmp_path / "out").exists()
    done = subprocess.run(
        ["make", "--silent", "gpu"],
        cwd=common.ROOT,
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    sentence, *rest = done.stderr.splitlines()
    assert sentence == "make gpu needs an NVIDIA GPU, and nvidia-smi finds none."
    assert all(line.startswith("make: ***") for line in rest)


def test_a_bare_machine_collects_the_tests_and_imports_the_benchmarks():
    """It has torch, Triton, transformers, peft, pytest and hypothesis."""
    hidden = ["trl", "bitsandbytes", "datasets", "uvicorn", "fastapi", "math_verify", "vllm"]
    hidden += ["torchao", "liger_kernel"]
    commands = [command.split() for stage in gpu.STAGES.values() for command in stage]
    modules = [m.removeprefix("bench.") for _, m, *_ in commands]
    program = (
        f"import sys; sys.modules.update(dict.fromkeys({hidden})); import importlib, pytest\n"
        f"for m in {sorted({m for m in modules if (common.ROOT / f'bench/{m}.py').exists()})}:\n"
        "    importlib.import_module(f'bench.{m}')\n"
        f"sys.exit(pytest.main(['--collect-only', '-q', '-p', 'no:cacheprovider', *{gpu.TESTS}]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=common.ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "::test_head_in_one_chunk" in done.stdout


def test_a_missing_peer_leaves_its_cell_empty_with_the_reason(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "bench.trl_run", None)
    monkeypatch.delattr("bench.trl_run", raising=False)  # another test has imported it
    case = step_large.Case(2, 4, 8, 16)
    shape = common.small_qwen3(32, 1, case.vocab, 64)
    ours, trl = step_large.measure(
        "tiny", shape, case, 1, ["nanogrpo", "TRL"], tmp_path, [], device="cpu"
    )
    assert ours["tokens_per_second"] > 0
    assert trl["why_not"].startswith("a package is missing: ")
