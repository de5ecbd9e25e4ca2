"""A decoder with Triton kernels gives the results and gradients of one with PyTorch's functions: as
close to float64, for every architecture, with adapters, recomputation, shared prompts and sharding.

They run in Triton's interpreter where there is no GPU. tests/kernels/test_norm_rope_swiglu.py tests
each kernel. Read next: tests/distributed/test_fsdp.py.
"""

import copy
import dataclasses

import pytest
import torch
from nanogrpo.kernels.triton import norm, rope

from nanogrpo import Config
from nanogrpo.distributed import fsdp
from nanogrpo.extras.sharding import shard
from nanogrpo.grpo.loss import objective
from nanogrpo.kernels import head
from nanogrpo.model import dispatch, gpu_attention
from nanogrpo.model.decoder import Decoder, logits
from nanogrpo.run import optim
from nanogrpo.types import Prompt, Sample
from tests.conftest import (
    SOLO,
    packed,
    positions_of,
    random_tokens,
    tiny_config,
    tiny_model,
)
from tests.kernels.masks import strip_of
from tests.kernels.traffic import Traffic
from tests.model.peers import CONFIGS

PROMPT, COMPLETIONS = 5, [4, 1, 7]  # lengths
T = PROMPT + sum(COMPLETIONS)
# every completion starts at the state of the prompt's last token
ROWS = torch.tensor([4, 5, 6, 7, 4, 4, 10, 11, 12])
POSITIONS = torch.cat([torch.arange(PROMPT), *(PROMPT + torch.arange(n) for n in COMPLETIONS)])


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    """Let a program of the backward passes visit several rows."""
    monkeypatch.setattr(norm, "PROGRAMS", 5)
    monkeypatch.setattr(rope, "PROGRAMS", 5)


def gradients(model, choice: str) -> dict[str, torch.Tensor]:
    """Return the logits of a shared prompt's completions, and the gradient of each parameter."""
    before, dispatch.choice = dispatch.choice, choice
    try:
        model.zero_grad()
        tokens = random_tokens(T, model.cfg.vocab_size)
        out = model(tokens, POSITIONS, strip_of([[PROMPT, *COMPLETIONS]]), ROWS, logits)  # [M, V]
        upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(8))
        out.backward(upstream.to(out.dtype))
    finally:
        dispatch.choice = before
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.requires_grad}
    return {"logits": out.detach(), **grads}


def as_exact_as_pytorch(model) -> None:
    """Assert that no result is more than twice as far from float64 as PyTorch's, in the norm, or
    that both are as close as float32 allows.
    """
    fused, eager = gradients(model, "triton"), gradients(model, "torch")
    exact = gradients(copy.deepcopy(model).double(), "torch")
    assert fused.keys() == exact.keys()
    for name, true in exact.items():
        error, usual = ((x[name].double() - true).norm() for x in (fused, eager))
        assert error <= 2 * usual + 1e-7 * true.norm(), name


@pytest.mark.parametrize("name", ["qwen2", "llama_biases", "qwen3_yarn"])
def test_every_architecture(name):
    """With a norm per head and without, biases, scaled rotations, and head sizes of 12 to 32."""
    as_exact_as_pytorch(tiny_model(dataclasses.replace(CONFIGS[name], num_hidden_layers=1), seed=1))


def test_recomputation_changes_no_bit(monkeypatch):
    monkeypatch.setattr(dispatch, "choice", "triton")
    results = []
    for kind in ("none", "full", "selective"):
        model = tiny_model(num_hidden_layers=1)
        cfg = Config(model="m", gradient_checkpointing=kind)
        shard(model, cfg, SOLO)
        fsdp.prepare(model, SOLO, cfg)
        out = model(random_tokens(4), *positions_of([1, 3]))
        out.square().sum().backward()
        results.append([out, *(p.grad for p in model.parameters())])
    plain, *recomputed = results
    for found in recomputed:
        assert all(map(torch.equal, found, plain))


def test_nothing_in_a_training_step_depends_on_data(monkeypatch):
    """It runs on meta tensors, which have none; so the host never waits for a GPU. The exception is
    the head, which selects its rows with `nonzero` (kernels/head.py): here it takes all of them.
    """
    monkeypatch.setattr(dispatch, "choice", "triton")
    monkeypatch.setattr(gpu_attention, "backend", lambda *_: gpu_attention.varlen)  # as on a GPU
    monkeypatch.setattr(head, "_chunks", lambda mask, n: torch.ones_like(mask).cumsum(0).split(n))
    cfg, prompt = Config(model="m"), Prompt(0, "", [1, 2, 3])
    samples = [Sample(prompt, j, [5] * n, [-1.0] * n, True, [0] * n) for j, n in enumerate((2, 4))]
    for sample in samples:
        sample.advantage = 1.0
    (batch,) = packed(samples, cfg)
    assert batch.kv_rows is not None
    with torch.device("meta"):
        model = Decoder(tiny_config())
    compute = copy.deepcopy(model).to(torch.bfloat16)
    traffic = Traffic()
    with traffic.counting():
        out = compute.forward_strip(batch.to("meta"), objective(batch.to("meta"), cfg))
        fsdp.backward(compute, out.loss, SOLO, last=True)
    files = {name.split(".")[-2] for name in traffic.elementwise.names if "_kernel" in name}
    assert files == {"norm", "rope", "swiglu", "gather", "fused_rows"}
    optimizer = optim.make_optimizer(model, cfg)
    for master, weight in zip(model.parameters(), compute.parameters(), strict=True):
        master.grad = weight.grad.float()
    assert torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).is_meta
    optimizer.step()
    assert all(p.is_meta and p.dtype == torch.float32 for p in model.parameters())
