"""Tests of 8-bit AdamW: it follows AdamW, and a resumed run is the same bit for bit, also sharded.

They need torchao. Read next: test_resume.py.
"""

import dataclasses
import itertools
import sys
from pathlib import Path

import pytest
import torch

from nanogrpo.config import Config
from nanogrpo.distributed.world import World, join
from nanogrpo.errors import UserError
from nanogrpo.model import checkpoint
from nanogrpo.run import memory, optim, setup, state
from tests.conftest import write_base
from tests.ranks import run

CFG = Config(optim="adamw_torch_8bit", learning_rate=1e-2, weight_decay=0.1)


def test_without_torchao_one_sentence_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    message = r"--optim adamw_torch_8bit needs its package: pip install 'nanogrpo\[torchao\]'\."
    with pytest.raises(UserError, match=message):
        optim.make_optimizer(torch.nn.Linear(2, 2), CFG)


def moved(model: torch.nn.Module, cfg: Config, steps: int = 30) -> torch.nn.Module:
    optimizer = optim.make_optimizer(model, cfg)
    random = torch.Generator().manual_seed(0)
    for step in range(steps):
        x = torch.randn(32, 64, generator=random)
        (model(x) - x.flip(1)).square().mean().backward()
        optim.clip_and_step(model, optimizer, 1e-2 * min(1, step / 5), max_grad_norm=1.0)
    return model


def test_eight_bits_follow_adamw():
    pytest.importorskip("torchao")
    torch.manual_seed(0)
    start = torch.nn.Linear(64, 64)
    weights = {}
    for name in ("adamw_torch_8bit", "adamw_torch_fused"):
        model = torch.nn.Linear(64, 64)
        model.load_state_dict(start.state_dict())
        weights[name] = moved(model, dataclasses.replace(CFG, optim=name)).weight.detach()
    distance = (weights["adamw_torch_fused"] - start.weight).norm()
    gap = (weights["adamw_torch_8bit"] - weights["adamw_torch_fused"]).norm()
    assert 0 < gap < 0.05 * distance


def advance(model, optimizer, steps: range) -> None:
    """Make updates with gradients that are a function of the step and the parameter."""
    for step in steps:
        for i, p in enumerate(model.parameters()):
            random = torch.Generator().manual_seed(1000 * step + i)
            full = torch.randn(p.shape, generator=random)
            if hasattr(p, "device_mesh"):
                from torch.distributed.tensor import distribute_tensor

                full = distribute_tensor(full, p.device_mesh, p.placements)
            p.grad = full
        optim.clip_and_step(model, optimizer, 1e-3 * (step + 1), max_grad_norm=1.0)


def local(tensors: dict) -> dict:
    out = {n: t.to_local() if hasattr(t, "to_local") else t for n, t in tensors.items()}
    return {n: t.detach().clone() for n, t in out.items()}


def saved_and_resumed(base: Path, output: Path) -> dict:
    """Compare four updates with two, a checkpoint, and two. Return what each rank holds."""
    cfg = dataclasses.replace(CFG, model=str(base), output_dir=str(output), device="cpu")
    config = checkpoint.read_json(base / "config.json")
    facts: dict = {}
    with join(cfg) as world:
        made = []
        for resume in (False, True):
            cfg = dataclasses.replace(cfg, resume=resume)
            model = setup.load_sharded(checkpoint.empty_model(base), base, world, cfg)
            optimizer = optim.make_optimizer(model, cfg)
            done, _ = state.resume(cfg, world, model, optimizer, {})
            if not resume:
                advance(model, optimizer, range(2))
                tokenizer = checkpoint.Tokenizer(base)
                saver = state.Saver(cfg, world, model, optimizer, tokenizer, config, {})
                with saver:
                    saver.save(2)
                done = 2
            advance(model, optimizer, range(done, 4))
            made.append(local(state.tensors(model, optimizer)))
        whole, resumed = made
        facts["same"] = whole.keys() == resumed.keys() and all(
            torch.equal(whole[name], resumed[name]) for name in whole
        )
        facts["names"] = list(whole)
        moments = itertools.chain(
            *([s["exp_avg"], s["exp_avg_sq"]] for s in optimizer.state.values())
        )
        shards = [m.to_local() if hasattr(m, "to_local") else m for m in moments]
        facts["bytes"] = sum(
            sum(getattr(m, part).nbytes for part in ("codes", "scale", "qmap"))
            if hasattr(m, "codes")
            else m.nbytes
            for m in shards
        )
        facts["estimate"] = memory.moment_bytes(checkpoint.empty_model(base), cfg, world.size)
        facts["float32"] = memory.moment_bytes(
            checkpoint.empty_model(base), Config(model=str(base)), world.size
        )
    return facts


@pytest.mark.parametrize("size", [1, 2])
def test_a_resumed_run_is_the_same_bit_for_bit(tmp_path, size):
    pytest.importorskip("torchao")
    base = write_base(tmp_path / "base", hidden_size=64, intermediate_size=256)
    facts = run(size, saved_and_resumed, base, tmp_path)
    assert all(f["same"] for f in facts)
    assert any(".codes@" in name for f in facts for name in f["names"])
    for f in facts:
        assert f["bytes"] == pytest.approx(f["estimate"], rel=0.02)
        assert f["bytes"] < 0.5 * f["float32"]
    cfg = dataclasses.replace(CFG, model=str(base), output_dir=str(tmp_path), resume=True)
    model = checkpoint.load_model(base)
    world = World(0, 3, torch.device("cpu"))
    message = f"written by {size} processes, and its 8-bit moments cannot be divided among 3: use"
    with pytest.raises(UserError, match=message):
        state._latest(cfg, {}, world.size)
    assert state._latest(cfg, {}, size) is not None
    if size == 1:
        optimizer = optim.make_optimizer(model, cfg)
        assert state.resume(cfg, World(0, 1, world.device), model, optimizer, {})[0] == 2
