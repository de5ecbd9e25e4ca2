"""A decoder with Triton kernels gives the results and gradients of one with PyTorch's functions: as
close to float64, for every architecture, with adapters, recomputation, shared prompts and sharding.

They run in Triton's interpreter where there is no GPU. tests/kernels/test_norm_rope_swiglu.py tests
each kernel. Read next: tests/distributed/test_fsdp.py.
"""

import copy
import dataclasses
import functools

import pytest
import torch

from nanogrpo.config import Config
from nanogrpo.distributed import fsdp
from nanogrpo.distributed.world import join
from nanogrpo.engine.cache import KVCache
from nanogrpo.grpo.loss import objective
from nanogrpo.kernels import head, norm, rope
from nanogrpo.model import attention, checkpoint, dispatch
from nanogrpo.model.decoder import Decoder, logits
from nanogrpo.run import optim
from nanogrpo.run import setup as parts
from nanogrpo.types import Prompt, Sample
from tests.conftest import (
    COMPLETIONS,
    PROMPT,
    SOLO,
    packed,
    positions_of,
    random_tokens,
    shared_prompt,
    tiny_config,
    tiny_model,
    write_base,
)
from tests.kernels.traffic import Traffic
from tests.model.lora_ranks import adapted
from tests.model.peers import CONFIGS
from tests.ranks import run

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
        out = model(tokens, POSITIONS, shared_prompt(), ROWS, logits)  # [M, V]
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


@pytest.mark.parametrize("name", ["qwen3", "qwen2", "llama_scaled", "llama_biases", "qwen3_yarn"])
def test_every_architecture(name):
    """With a norm per head and without, biases, scaled rotations, and head sizes of 12 to 32."""
    as_exact_as_pytorch(tiny_model(dataclasses.replace(CONFIGS[name], num_hidden_layers=1), seed=1))


def test_adapters():
    model = tiny_model(num_hidden_layers=1)
    as_exact_as_pytorch(adapted(Config(model="m", lora_r=4), model))


def test_recomputation_changes_no_bit():
    results = []
    for kind in ("none", "full", "selective"):
        model = tiny_model(num_hidden_layers=1)
        fsdp.prepare(model, SOLO, Config(model="m", gradient_checkpointing=kind))
        results.append(gradients(model, "triton"))
    plain, *recomputed = results
    for found in recomputed:
        assert all(torch.equal(value, plain[name]) for name, value in found.items())


def test_compiled_blocks_launch_no_kernel(monkeypatch):
    """The compiler fuses PyTorch's functions itself; the final norm is not compiled."""
    seen, kind = [], type(norm.forward_kernel)
    launch = kind.run

    def recorded(kernel, *args, **kwargs):
        seen.append(kernel)
        return launch(kernel, *args, **kwargs)

    monkeypatch.setattr(kind, "run", recorded)
    torch._dynamo.reset()
    model = tiny_model(num_hidden_layers=1)
    expected = gradients(model, "torch")
    options = {"torch_compile": True, "torch_compile_backend": "eager"}
    fsdp.prepare(model, SOLO, Config(model="m", **options))
    found = gradients(model, "triton")
    assert norm.forward_kernel in seen
    assert not {rope.forward_kernel, rope.backward_kernel} & {*seen}
    for name, value in expected.items():
        assert (found[name] - value).norm() <= 1e-5 * value.norm(), name


def _two_ranks(base):
    cfg = Config(model=str(base), device="cpu", gradient_checkpointing="selective")
    with join(cfg) as world:
        model = parts.load_sharded(checkpoint.empty_model(base), base, world, cfg)
        found = gradients(model, "triton")
        return {name: getattr(x, "full_tensor", lambda x=x: x)() for name, x in found.items()}


def test_sharded_blocks(tmp_path):
    """Each rank computes the same strip, so the mean of the gradients is that of one process."""
    base = write_base(tmp_path, num_hidden_layers=1)
    expected = gradients(checkpoint.load_model(base), "torch")
    for found in run(2, _two_ranks, base):
        for name, value in expected.items():
            assert (found[name] - value).norm() <= 1e-5 * value.norm(), name


def test_decoding_a_token_at_a_time(monkeypatch):
    """The engine runs the same blocks with a cache."""
    monkeypatch.setattr(dispatch, "choice", "triton")
    model, tokens = tiny_model(), random_tokens(6)
    with torch.inference_mode():
        expected = model(tokens, *positions_of([6]))
        c = model.cfg
        size = c.num_hidden_layers, 1, c.num_key_value_heads, 8, c.head_dim
        cache = KVCache(*size, torch.float32, torch.device("cpu"))
        for i in range(6):
            position = torch.tensor([i])
            cache.begin(position, i + 1)
            got = model(tokens[i : i + 1], position, cache)
            torch.testing.assert_close(got[0], expected[i], rtol=0, atol=1e-5)


def test_nothing_in_a_training_step_depends_on_data(monkeypatch):
    """It runs on meta tensors, which have none; so the host never waits for a GPU. The exception is
    the head, which selects its rows with `nonzero` (kernels/head.py): here it takes all of them.
    """
    monkeypatch.setattr(dispatch, "choice", "triton")
    monkeypatch.setattr(attention, "backend", lambda *_: "torch")  # as on a GPU
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
        out = compute.forward_packed(batch.to("meta"), objective(batch.to("meta"), cfg))
        fsdp.backward(compute, out.loss, SOLO, last=True)
    files = {name.split(".")[-2] for name in traffic.elementwise.names if "_kernel" in name}
    assert files == {"norm", "rope", "swiglu", "gather", "log_softmax", "fused_rows", "policy"}
    optimizer = optim.make_optimizer(model, cfg)
    for master, weight in zip(model.parameters(), compute.parameters(), strict=True):
        master.grad = weight.grad.float()
    assert torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).is_meta
    optimizer.step()
    assert all(p.is_meta and p.dtype == torch.float32 for p in model.parameters())


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["qwen3", "qwen2"])
def test_bfloat16_on_a_gpu(name):
    """The error is at most twice that of PyTorch's functions in the same dtype."""
    model = tiny_model(CONFIGS[name], seed=1).cuda().to(torch.bfloat16)
    tokens, (positions, attend) = random_tokens(64).cuda(), positions_of([64], "cuda")

    @functools.cache
    def computed(choice, dtype):
        dispatch.choice = choice
        copied = copy.deepcopy(model).to(dtype)
        out = copied(tokens, positions, attend)
        out.backward(torch.ones_like(out))
        return [out.detach(), *(p.grad for p in copied.parameters())]

    try:
        exact = computed("torch", torch.float64)
        sides = [computed(choice, torch.bfloat16) for choice in ("triton", "torch")]
    finally:
        dispatch.choice = "auto"
    for fused, eager, true in zip(*sides, exact):
        assert (fused - true).norm() <= 2 * (eager - true).norm()
