"""`make gpu` without a GPU ends with one sentence.

Read next: bench/gpu.py.
"""

import os
import subprocess

import pytest
import torch

from bench import common, gpu


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
        check=False,
    )
    assert done.returncode == 2
    sentence, *rest = done.stderr.splitlines()
    assert sentence == "make gpu needs an NVIDIA GPU, and nvidia-smi finds none."
    assert all(line.startswith("make: ***") for line in rest)
