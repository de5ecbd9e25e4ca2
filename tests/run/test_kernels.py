"""--kernels and --full-determinism: what a run chooses. tests/logs/test_progress.py has the line
that a run logs before it starts.

Read next: tests/model/test_fused.py (the kernels in a model), tests/model/test_attention.py (the
backends of attention).
"""

import importlib.util
import logging

import pytest
import torch

from nanogrpo import Config
from nanogrpo.distributed.world import World
from nanogrpo.extras.sharding import be_deterministic, compute_dtype
from nanogrpo.model import dispatch, gpu_attention
from nanogrpo.run import setup as parts
from tests.conftest import SOLO, refused

GPU = World(0, 1, torch.device("cuda"))
ON_CPU = "attention by sdpa"
ON_GPU = "attention by varlen"


@pytest.fixture(autouse=True)
def unchanged(monkeypatch):
    """Restore the state of the process."""
    monkeypatch.setattr(dispatch, "choice", "auto")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    gpu_attention.backend.cache_clear()
    yield
    torch.use_deterministic_algorithms(False)
    gpu_attention.backend.cache_clear()


def logged(caplog, world: World, **options) -> str:
    caplog.clear()
    with caplog.at_level(logging.INFO, "nanogrpo"):
        cfg = Config(**options)
        parts.choose_kernels(cfg, world, 128, compute_dtype(cfg, world.device.type))
    (record,) = caplog.records
    return record.getMessage()


@pytest.mark.skipif(importlib.util.find_spec("flash_attn"), reason="another backend is installed")
def test_one_line_says_what_computes(caplog):
    on_gpu, on_cpu = "computing on cuda in bfloat16: ", "computing on cpu in float32: "
    assert logged(caplog, GPU) == f"{on_gpu}Triton kernels, {ON_GPU}"
    assert logged(caplog, GPU, kernels="torch") == f"{on_gpu}PyTorch functions, {ON_GPU}"
    assert logged(caplog, GPU, dtype="float16").startswith("computing on cuda in float16: Triton")
    assert logged(caplog, SOLO) == f"{on_cpu}PyTorch functions, {ON_CPU}"
    be_deterministic()  # --full-determinism
    assert torch.get_deterministic_debug_mode() == 2  # the rule of two_calls.py


def test_triton_without_a_gpu_is_one_sentence(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with refused(r"^--kernels triton needs a GPU.*: use --kernels auto\.$"):
        parts.choose_kernels(Config(kernels="triton"), SOLO, 128, torch.float32)
