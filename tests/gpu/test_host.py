"""The host's work in a training step: it never waits for a GPU between the first kernel and the
update, and one GPU needs no FSDP2.

The operations are counted on the CPU (bench/step_trace.py). Read next:
nanogrpo/extras/one_gpu.py, test_device.py.
"""

import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch.distributed.checkpoint import filesystem

from bench import step_trace
from nanogrpo import Config
from nanogrpo.extras import one_gpu, sharding
from nanogrpo.grpo import loss as grpo
from nanogrpo.run import optim
from tests.conftest import CUDA, random_batch, tiny_model


@pytest.mark.parametrize("kind", step_trace.KINDS)
def test_the_host_waits_only_after_the_update(kind):
    host = step_trace.count(kind)
    assert {name for _, name in host.waits} == {"_local_scalar_dense"}
    assert {phase for phase, _ in host.waits} == {"update done"}
    assert not host.transfers


def test_on_one_gpu_a_step_takes_at_most_115_percent_of_the_host_time_without_shards():
    """Other processes can only make a measurement worse, so the best of three counts."""
    best = min(step_trace.of_host(4, [])[1]["over_unsharded"] for _ in range(3))
    assert best <= 1.15


def test_copies_follow_the_master_weights_and_gradients_are_float32():
    """Copies in float64 change nothing. In bfloat16, the error is about that of a model whose
    weights and gradients are bfloat16, and the update uses float32.
    """
    batches = [random_batch([(3, 7), (2, 5), (9, 4)], seed=seed) for seed in range(3)]

    def trained(dtype: torch.dtype, *copies: torch.dtype) -> dict[str, torch.Tensor]:
        model = tiny_model(tie_word_embeddings=True).to(dtype)
        for copy in copies:
            one_gpu.copy_weights(model, copy)
        weights = step_trace.train(model, batches, steps=2)
        with torch.no_grad():
            model.forward_strip(batches[0], grpo.logp_of(batches[0], Config()))
        for name, master in model.named_parameters():
            layer, _, own = name.rpartition(".")
            copy = getattr(model.get_submodule(layer), own)
            assert torch.equal(copy, master.to(copy.dtype))
        return weights

    for dtype, copy, limit in (
        (torch.float64, torch.float64, 1e-12),
        (torch.float32, torch.bfloat16, 1e-2),
    ):
        plain = trained(dtype)
        for name, weight in trained(dtype, copy).items():
            assert weight.dtype == dtype
            assert (weight - plain[name]).norm() <= limit * plain[name].norm()


@pytest.mark.skipif(CUDA, reason="runs the optimizer's kernel in the interpreter")
def test_a_run_on_one_gpu_learns_as_a_run_with_shards(rows_of):
    """With copies in float32, and with the optimizer's kernel in the interpreter."""
    usual, fuse = rows_of(folder="usual"), mock.Mock(wraps=one_gpu.fuse)
    yes = mock.Mock(return_value=True)
    copy = mock.Mock(side_effect=lambda model, _: one_gpu.copy_weights(model, torch.float32))
    with mock.patch.multiple(sharding, is_whole=yes, uses_triton=yes, copy_weights=copy, fuse=fuse):
        whole = rows_of("--reshard-after-forward never", folder="whole")
    for mine, theirs in zip(whole, usual):
        assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-6)
    fuse.assert_called_once()


@pytest.mark.parametrize("make", [torch.optim.SGD, optim.adamw])
def test_a_gradient_that_is_not_finite_changes_no_weight(make):
    layer = torch.nn.Linear(2, 2)
    layer.weight.grad, layer.bias.grad = torch.full((2, 2), torch.inf), torch.ones(2)
    before, optimizer = layer.weight.clone(), make([{"params": [*layer.parameters()]}])
    with pytest.raises(FloatingPointError, match="no update was made"):
        optim.clip_and_step(layer, optimizer, 1e-3, 1.0)
    assert torch.equal(layer.weight, before)
    assert not any(state["step"] for state in optimizer.state.values())


def test_the_thread_that_writes_a_checkpoint_never_waits_for_the_gpu(rows_of, monkeypatch):
    """With a GPU, torch's writer would copy from the GPU again, and wait before it writes a copy.
    Waiting here counts as an error, which would end the run.
    """
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.delattr(filesystem, "_OverlappingCpuLoader")
    assert len(rows_of("--max-steps 2 --save-steps 1")) == 2


def event(cat: str, name: str, ts: float, dur: float, call: int) -> dict:
    return {"cat": cat, "name": name, "ts": ts, "dur": dur, "args": {"correlation": call}}


def test_the_account_of_a_trace_names_the_cause_of_each_gap(tmp_path, capsys):
    """Times are in µs. Kernel b was launched in time, c after a wait, and d late. FSDP2 and torch
    annotate parts of a step, too.
    """
    kernels = [("nvjet_tst", 100, 50), ("flash_bwd", 160, 40), ("add", 300, 10), ("adam", 410, 5)]
    calls = [("launch", 90), ("launch", 95), ("launch", 295), ("launch", 405)]
    events = [event("kernel", *kernel, i) for i, kernel in enumerate(kernels)]
    events += [event("cuda_runtime", name, ts, 2, i) for i, (name, ts) in enumerate(calls)]
    events.append(event("cuda_runtime", "cudaStreamSynchronize", 96, 105, 9))
    marks = {"strip 1": 80, "FSDP::post_forward": 92, "optimizer": 400, "Optimizer.step#AdamW": 401}
    for name, start in marks.items():
        events.append({"cat": "user_annotation", "name": name, "ts": start, "dur": 1})
    found = step_trace.account(events)
    assert found.table == {
        "strip 1": {
            "matrix products": 0.05,
            "idle: launch": 0.01,
            "attention": 0.04,
            "idle: wait": 0.1,
            "element-wise": 0.01,
        },
        "optimizer": {"idle: host": 0.1, "optimizer": 0.005},
    }
    assert found.total == pytest.approx(0.315)
    record = {"case": "made up", "milliseconds": found.table, "seconds_median": 0.3}
    step_trace.draw([record, record], tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000
    step_trace.show([record])
    assert "made up: milliseconds" in capsys.readouterr().out


def test_a_trace_of_the_profiler_has_the_parts_of_a_step():
    """Without a GPU, each operation of the host serves as a kernel that starts at once."""
    with step_trace.tiny_step("one GPU", step_trace.annotate()) as step:
        events = step_trace.profiled(step)
    host = [e for e in events if e.get("cat") == "cpu_op"]
    for i, e in enumerate(host):
        events.append(event("kernel", e["name"], e["ts"] + 1, e["dur"], i))
        events.append(event("cuda_runtime", "cudaLaunchKernel", e["ts"], 1, i))
    table = step_trace.account(events).table
    assert set(table) <= {"pack", "strip 1", "strip 2", "strip 3", "optimizer"}
    assert all(table[f"strip {i}"]["element-wise"] > 0 for i in (1, 2, 3))
    assert table["optimizer"]["optimizer"] > 0


def test_200_strips_need_at_most_two_variants_of_each_kernel():
    out = subprocess.run(
        [sys.executable, "-m", "bench.kernel_variants"],
        env={**os.environ, "TRITON_INTERPRET": "0"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    counts = [int(line.split()[0]) for line in out.stdout.splitlines()]
    assert len(counts) >= 8, out.stderr
    assert max(counts) <= 2, out.stdout
