"""Contracts of a decode step on a GPU, checked on meta tensors: its launches, its bytes, and that
nothing in it depends on data.

Meta tensors have no data. A step that needs any on the host raises an error here, and could not be
captured as a CUDA graph. Read next: tests/kernels/traffic.py.
"""

import functools
from pathlib import Path
from unittest import mock

import pytest
import torch

from bench import cost
from nanogrpo.engine.base import SamplingParams
from nanogrpo.engine.local import LocalEngine
from nanogrpo.model import dispatch
from tests.kernels.traffic import QWEN3, Traffic

MEAN = 400  # tokens in a row of the cache
PARAMS = SamplingParams()


@functools.cache
def decode(rows: int, kernels: str, params: SamplingParams) -> tuple[list[str], int]:
    """Return the launches of a decode step, and its bytes."""
    traffic = Traffic()
    options = {"device": "meta", "dtype": torch.bfloat16, "paged": True}
    engine = LocalEngine(QWEN3, max_len=4096, slots=rows, **options)
    engine.model.model.angles(engine.scheduler.state[1])  # the first step computes the frequencies
    with mock.patch.object(dispatch, "choice", kernels), torch.no_grad(), traffic.counting():
        engine.runner.step(rows, 4096, params)
    # Attention reads only the tokens of its rows, and lookups only some rows of their tables.
    cached, embedding = engine.cache.kv, engine.model.model.embed_tokens
    live = rows * MEAN * cached[:, :, 0, :, 0].numel() * cached.itemsize
    unread = (cached, embedding.weight)
    both = traffic.elementwise, traffic.products
    moved = sum(count.bytes for count in both) - sum(x.numel() * x.itemsize for x in unread)
    return [name for count in both for name in count.names], moved + live


@pytest.mark.parametrize("rows", [64, 256])
def test_a_step_takes_at_most_300_launches_and_reads_little_but_weights_and_live_tokens(rows):
    names, moved = decode(rows, "triton", PARAMS)
    assert len(names) <= 300, names
    for kernel in ("attend", "combine"):
        assert sum(name.endswith(f"paged.{kernel}_kernel") for name in names) == 28
    assert names.count("mm") == 4 * 28 + 1
    planned = 28 * cost.layer(QWEN3, cost.GPUS["H100"]).decode + 15
    assert len(names) == pytest.approx(planned, rel=0.02)
    weights = 2 * 596_049_920  # the head reads the embedding
    tokens = 28 * 2 * 2 * 8 * 128 * rows * MEAN
    assert weights + tokens < moved < 1.1 * (weights + tokens)
    text = (Path(__file__).resolve().parents[2] / "kernels" / "README.md").read_text()
    assert f"{len(names)} launches" in text
    assert f"{moved / 1e9:.2f} GB for {rows}" in text


FILTERS = [{"temperature": 0.0}, {"temperature": 0.7, "top_k": 20, "top_p": 0.9}]


@pytest.mark.parametrize("kernels", ["triton", "torch"])
@pytest.mark.parametrize("changes", [{}, *FILTERS], ids=str)
def test_nothing_in_a_step_depends_on_data(kernels, changes):
    names, _ = decode(8, kernels, SamplingParams(**changes))
    assert names
