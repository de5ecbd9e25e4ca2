"""A checkpoint is written while training goes on: what it holds, in which precision, and who learns
when it fails.

Read before: test_resume.py, where each save is waited for. Read next: test_state.py, where runs are
killed in the middle of it.
"""

import threading

import torch
from safetensors.torch import load_file

from nanogrpo.model import checkpoint
from nanogrpo.run import state
from tests.conftest import write_base
from tests.model.test_checkpoint import assert_same
from tests.run.test_resume import saver, start


def test_training_goes_on_while_the_state_is_written(tmp_path, tiny_base, monkeypatch):
    """What is written is the state when `save` returned, though each parameter changed before its
    file was even opened.
    """
    run, go = start(tmp_path, tiny_base).advance(1), threading.Event()
    expected = run.state()
    write, export = state.dcp.FileSystemWriter.write_data, checkpoint.write_model
    monkeypatch.setattr(
        state.dcp.FileSystemWriter, "write_data", lambda *a: (go.wait(60), write(*a))[1]
    )
    monkeypatch.setattr(checkpoint, "write_model", lambda *a: (go.wait(60), export(*a))[1])
    tokenizer = checkpoint.Tokenizer(tiny_base)
    with saver(run.cfg, run.model, run.optimizer, tokenizer, tiny_base) as writer:
        writer.save(1)
        assert writer.failure() is None
        run.advance(2)
        assert not checkpoint.checkpoints(run.cfg.output_dir)
        go.set()
    resumed = start(tmp_path, tiny_base, resume=True)
    assert_same(resumed.state(), expected)
    exported = dict(checkpoint.load_model(writer.final).named_parameters())
    assert all(torch.equal(p, expected[f"master.{n}"]) for n, p in exported.items())


def test_a_save_that_fails_is_told_at_the_next_look(tmp_path, tiny_base, monkeypatch):
    run = start(tmp_path, tiny_base)
    run.save()
    run.advance(1)
    monkeypatch.setattr(
        checkpoint,
        "write_model",
        lambda *a: (_ for _ in ()).throw(OSError(28, "No space left on device")),
    )
    writer = saver(
        run.cfg,
        run.model,
        run.optimizer,
        checkpoint.Tokenizer(tiny_base),
        tiny_base,
    )
    writer.save(1)
    writer.wait()
    told = str(writer.failure())
    assert told.startswith(
        f"{tmp_path}/run/checkpoint-1 could not be written (No space left on device): make room"
    )
    assert writer.failure() is None  # told once
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["checkpoint-0"]


def test_a_bfloat16_base_is_exported_in_bfloat16_and_resumed_in_float32(tmp_path):
    base = write_base(tmp_path / "base")
    model = checkpoint.load_model(base).to(torch.bfloat16)
    checkpoint.export(model, base, checkpoint.Tokenizer(base))
    run = start(tmp_path, base).advance(1)
    exported = load_file(run.save() / "model.safetensors")
    assert {t.dtype for t in exported.values()} == {torch.bfloat16}
    masters = run.state()
    assert all(
        torch.equal(t, masters[f"master.{n}"].to(torch.bfloat16)) for n, t in exported.items()
    )
    assert any(not torch.equal(t.float(), masters[f"master.{n}"]) for n, t in exported.items())
    assert_same(start(tmp_path, base, resume=True).state(), masters)
