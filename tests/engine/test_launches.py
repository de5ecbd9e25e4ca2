"""Contracts of decoding on a GPU, checked on meta tensors: launches and bytes of a step, the
transfers between two strides, and that nothing in a step depends on data.

Meta tensors have no data. A step that needs any on the host raises an error here, and could not be
captured as a CUDA graph. Read next: tests/kernels/traffic.py.
"""

import functools
from pathlib import Path
from unittest import mock

import pytest
import torch
from nanogrpo.kernels.triton import paged
from torch.utils._python_dispatch import TorchDispatchMode

from bench import cost, step_trace
from nanogrpo.engine import runner
from nanogrpo.engine.base import SamplingParams
from nanogrpo.engine.graphs import GraphRunner, rounded
from nanogrpo.engine.local import LocalEngine
from nanogrpo.model import dispatch, gpu_attention
from nanogrpo.types import Prompt
from tests.conftest import tiny_model
from tests.kernels.traffic import QWEN3, Traffic, tensors

MEAN = 400  # tokens in a row of the cache
PARAMS = SamplingParams()


@functools.cache
def decode(rows: int, kernels: str, params: SamplingParams) -> tuple[list[str], int]:
    """Return the launches of a decode step, and its bytes."""
    traffic = Traffic()
    options = {"device": "meta", "dtype": torch.bfloat16, "paged": True}
    engine = LocalEngine(QWEN3, max_len=4096, slots=rows, **options)
    # the first step makes the frequencies and the counters
    engine.model.model.angles(engine.scheduler.state[1])
    paged.counters(torch.device("meta"), rows * QWEN3.num_key_value_heads)
    with mock.patch.object(dispatch, "choice", kernels), torch.no_grad(), traffic.counting():
        engine.runner.step(rows, params)
    # Attention reads only the tokens of its rows, and lookups only some rows of their tables.
    cached, embedding = engine.cache.kv, engine.model.model.embed_tokens
    live = rows * MEAN * cached[:, :, 0, :, 0].numel() * cached.itemsize
    unread = (cached, embedding.weight)
    both = traffic.elementwise, traffic.products
    moved = sum(count.bytes for count in both) - sum(x.numel() * x.itemsize for x in unread)
    return [name for count in both for name in count.names], moved + live


@pytest.mark.parametrize("rows", [64, 256, 512])
def test_a_step_takes_few_launches_and_reads_little_but_weights_and_live_tokens(rows):
    names, moved = decode(rows, "triton", PARAMS)
    assert len(names) == 235, names
    assert sum(name.endswith("paged.attend_kernel") for name in names) == 28
    assert names.count("mm") == 4 * 28 + 1
    assert len(names) == 28 * cost.layer(QWEN3, cost.GPUS["H100"]).decode + 11
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


class Transfers(TorchDispatchMode):
    """Record whether each copy between host and device blocks. Random tokens reach the host."""

    def __init__(self):
        super().__init__()
        self.blocking, self.random = [], torch.Generator().manual_seed(0)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.overloadpacket.__name__ in ("to", "_to_copy") and kwargs.get("device") == CPU:
            out = torch.randint(20, args[0].shape, generator=self.random)
        else:
            out = func(*args, **kwargs)
        if len({x.device.type for x in tensors(args, out)}) > 1:
            self.blocking.append(not step_trace.blockless(args, kwargs))
        return out


CPU = torch.device("cpu")


def test_a_stride_has_three_transfers_and_none_blocks():
    """Each prefill in a stride adds at most one. Rows finish and start between strides.

    The host only waits for the copy of the tokens of the stride before.
    """
    engine = LocalEngine(tiny_model().cfg, max_len=300, slots=7, device="meta", paged=True)
    engine.runner.stride, engine.runner.behind = GraphRunner.stride, GraphRunner.behind
    engine.model.model.angles(engine.scheduler.state[1])
    prompts = [Prompt(i, "", list(range(1, 40 * i + 2))) for i in range(4)]
    params = SamplingParams(max_tokens=60, stop_token_ids=(0,))
    prefills = mock.Mock(wraps=engine.runner.prefill)
    engine.runner.prefill, strides = prefills, []
    with (
        mock.patch.object(gpu_attention, "backend", step_trace.stub),
        mock.patch.object(runner, "PREFILL_TOKENS", 128),
        Transfers() as transfers,
    ):
        for found in engine.sample_steps(prompts, 6, params, step=0):
            samples = found
            strides.append((transfers.blocking, prefills.call_count))
            transfers.blocking = []
            prefills.reset_mock()
    assert len({len(s.token_ids) for s in samples}) > 8
    assert sum(count > 0 for _, count in strides) > 1
    for i, (blocking, count) in enumerate(strides):
        assert not any(blocking)
        # the first tokens are read after the second launch
        assert 2 <= len(blocking) <= 3 + 3 * (i == 0) + count


def test_few_rows_of_a_graph_are_empty():
    """At most 15 rows in graphs for 17 to 64 rows, and at most 31 in larger graphs."""
    for rows in range(1, 513):
        assert rows <= rounded(rows) == rounded(rounded(rows)) <= 2 * rows
        assert rounded(rows) <= (rows + 15 if 16 < rows <= 64 else max(rows + 31, 16))
    assert len({rounded(rows) for rows in range(1, 513)}) == 22
