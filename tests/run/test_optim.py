"""Tests of the optimizer: every schedule is that of transformers, update by update, and 8-bit AdamW
follows AdamW.

The tests of 8 bits need torchao. Read next: nanogrpo/run/optim.py, nanogrpo/extras/optim.py.
"""

import dataclasses
import sys

import pytest
import torch
import transformers

from bench import predict
from nanogrpo import Config
from nanogrpo.extras import memory
from nanogrpo.extras.optim import Optim
from nanogrpo.extras.options import CHOICES
from nanogrpo.model import checkpoint
from nanogrpo.run import optim
from tests.conftest import SOLO, refused, write_base

GOOD = Config(model="base", data=("arithmetic",))
KINDS = CHOICES["lr_scheduler_type"]
SETTINGS = {
    "cosine_with_min_lr": [{"min_lr": 1e-4}, {"min_lr_rate": 0.2}],
    "warmup_stable_decay": [{"num_decay_steps": 4}, {"num_decay_steps": 40}],
}
CASES = [(kind, kwargs) for kind in KINDS for kwargs in SETTINGS.get(kind, [None])]


@pytest.mark.parametrize("warmup", [0, 1, 5, 0.25, 0.9, 30])
@pytest.mark.parametrize(("kind", "kwargs"), CASES)
def test_every_schedule_is_that_of_transformers(kind, kwargs, warmup):
    cfg = dataclasses.replace(
        GOOD,
        learning_rate=1e-3,
        max_steps=11,
        num_iterations=2,
        lr_scheduler_type=kind,
        lr_scheduler_kwargs=kwargs,
        warmup_steps=float(warmup),
    )
    cfg.validate()
    args = transformers.TrainingArguments(output_dir="-", use_cpu=True, warmup_steps=warmup)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)
    # transformers' `constant` has no warmup; ours has that of constant_with_warmup
    theirs = "constant_with_warmup" if kind == "constant" else kind
    schedule = transformers.get_scheduler(
        theirs, optimizer, args.get_warmup_steps(22), 22, scheduler_specific_kwargs=kwargs
    )
    expected = []
    for _ in range(22):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    extra = [Optim(cfg).learning_rate(u, cfg) for u in range(22)]
    found = [optim.learning_rate(u, cfg) if rate is None else rate for u, rate in enumerate(extra)]
    assert found == pytest.approx(expected, rel=1e-12, abs=1e-18)


# --- 8-bit AdamW ---

CFG = Config(optim="adamw_torch_8bit", learning_rate=1e-2, weight_decay=0.1)


def test_without_torchao_one_sentence_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    message = r"--optim adamw_torch_8bit needs its package: pip install 'nanogrpo\[torchao\]'\."
    with refused(message):
        optim.make_optimizer(torch.nn.Linear(2, 2), CFG, [Optim(CFG)])


def moved(model: torch.nn.Module, cfg: Config, steps: int = 30) -> torch.nn.Module:
    optimizer = optim.make_optimizer(model, cfg, [Optim(cfg)])
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


def test_eight_bits_take_as_much_memory_as_estimated(tmp_path):
    pytest.importorskip("torchao")
    base = write_base(tmp_path / "base", hidden_size=64, intermediate_size=256)
    optimizer = optim.make_optimizer(checkpoint.load_model(base), CFG, [Optim(CFG)])
    moments = [s[kind] for s in optimizer.state.values() for kind in ("exp_avg", "exp_avg_sq")]
    tensors = [[m.codes, m.scale, m.qmap] if hasattr(m, "codes") else [m] for m in moments]
    found = sum(t.nbytes for parts in tensors for t in parts)
    inputs = predict.inputs(checkpoint.empty_model(base), SOLO, 10)
    tables = [memory.table(inputs, cfg) for cfg in (CFG, Config())]
    estimates = [row.bytes for table in tables for row in table if row.name == "optimizer"]
    assert found == pytest.approx(estimates[0], rel=0.02)
    assert found < 0.5 * estimates[1]
