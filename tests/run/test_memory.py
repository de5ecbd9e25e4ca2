"""The memory estimate matches real tensors and refuses what cannot fit.

Read next: tests/distributed/test_fsdp.py (the shards).
"""

import dataclasses
import logging
import types

import pytest
import torch
from nanogrpo.kernels.reference.policy import Clip, LossInputs
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from bench import predict
from nanogrpo import Config
from nanogrpo.distributed import fsdp
from nanogrpo.distributed.world import World, join
from nanogrpo.engine.local import LocalEngine
from nanogrpo.engine.runner import PREFILL_TOKENS
from nanogrpo.extras import head_dtype, memory
from nanogrpo.extras.bitwise import swapped
from nanogrpo.extras.sharding import shard
from nanogrpo.logs import metrics
from nanogrpo.model import dispatch
from nanogrpo.model import head as ops
from nanogrpo.model.attention import StripAttention
from nanogrpo.model.decoder import Block, Decoder
from nanogrpo.run import optim
from nanogrpo.types import Prompt
from tests.conftest import SOLO, completion, packed, random_batch, refused, tiny_config, tiny_model
from tests.kernels.traffic import QWEN3, Attention, Traffic
from tests.ranks import run


class Live(TorchDispatchMode):
    """Count the bytes of tensors created inside that still exist: a storage's Python object lives
    exactly as long as its memory.
    """

    def __init__(self, model: Decoder):
        super().__init__()
        self.storages = WeakIdKeyDictionary()
        self.weights = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor) and t.untyped_storage().data_ptr() not in self.weights:
                self.storages[t.untyped_storage()] = t.untyped_storage().nbytes()
        return out

    @property
    def bytes(self) -> int:
        return sum(self.storages.values())


def nbytes(*tensors) -> int:
    return sum(t.nbytes for t in tensors)


def sizes_of(cfg: Config, model: Decoder, longest: int = 40) -> dict[str, int]:
    rows = memory.table(predict.inputs(model, SOLO, longest), cfg)
    return {row.name.split(" of ")[0]: row.bytes for row in rows}


@pytest.mark.parametrize(
    ("model_type", "kind"),
    [("qwen3", "none"), ("qwen3", "full"), ("qwen3", "selective"), ("qwen2", "none")],
)
def test_activations_are_as_large_as_estimated(model_type, kind):
    """With 4 layers and 600 tokens, between forward and backward. On a CPU a norm keeps one more
    copy than a fused one on a GPU.
    """
    shape = {
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
    }
    model = tiny_model(tiny_config(model_type=model_type, num_hidden_layers=4, **shape), std=0.05)
    cfg = Config(gradient_checkpointing=kind)
    shard(model, cfg, SOLO)
    fsdp.prepare(model, SOLO, cfg)
    batch = random_batch([(40, 60)] * 6)
    with Live(model) as live:
        hidden = model.model(
            batch.tokens, batch.positions, StripAttention(batch.cu_seqlens, batch.max_len)
        )
        kept = live.bytes
    per_layer, _ = memory.activation_bytes(model.cfg, 4, kind)
    estimate = 600 * (4 * per_layer + 3 * 4 * 128)
    assert 0.8 < kept / estimate < 1.25, (kept, estimate)
    assert hidden.requires_grad


@pytest.mark.parametrize("model_type", ["qwen3", "llama"])
@pytest.mark.parametrize("kernels", ["torch", "triton"])
def test_a_block_on_a_gpu_keeps_as_much_as_estimated(kernels, model_type, monkeypatch):
    """Of Qwen3-0.6B's shape, on meta tensors in bfloat16."""
    monkeypatch.setattr(dispatch, "choice", kernels)
    c, T = dataclasses.replace(QWEN3, model_type=model_type), 64
    with torch.device("meta"):
        block = Block(c, 0).to(torch.bfloat16)
        x = torch.empty(T, c.hidden_size, dtype=torch.bfloat16, requires_grad=True)
        cos, sin = torch.empty(2, T, 1, c.head_dim)
    kept = {}

    def keep(t: torch.Tensor) -> torch.Tensor:
        kept[t.untyped_storage()._cdata] = t.untyped_storage()
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t), Traffic().counting():
        block(x, torch.empty_like(x), cos, sin, lambda layer, *qkv: Attention.apply(*qkv[:3]))
    shared = {t.untyped_storage()._cdata for t in (*block.parameters(), cos)}
    found = sum(storage.nbytes() for key, storage in kept.items() if key not in shared)
    estimate, _ = memory.activation_bytes(c, 2, "none", fused=kernels == "triton")
    assert 0.9 < found / (T * estimate) < 1.01


def test_keys_gathered_for_shared_prompts_are_as_many_as_estimated():
    """With 16 completions of one prompt that is ten times as long: count what the forward keeps
    beyond that of as many unshared tokens.
    """
    shape = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 32,
    }
    model = tiny_model(tiny_config(num_hidden_layers=4, **shape), std=0.05)
    cfg = Config(num_generations=16, generation_batch_size=16, max_completion_length=9)
    prompt = Prompt(0, "", [i % 100 for i in range(80)])
    (batch,) = packed(
        [completion(prompt, [7] * 9, j, advantage=1.0) for j in range(16)],
        cfg,
    )
    assert (
        memory.longest_strip(cfg, 1, 80)
        == (len(batch.tokens), len(batch.kv_rows), False)
        == (80 + 16 * 8, 80 + 16 * 88, False)
    )
    kept = []
    for more in ((), (batch.kv_rows, batch.kv_cu_seqlens, batch.kv_max_len)):
        with Live(model) as live:
            hidden = model.model(
                batch.tokens,
                batch.positions,
                StripAttention(batch.cu_seqlens, batch.max_len, *more),
            )
            kept.append(live.bytes)
        assert hidden.requires_grad
    row = "keys and values gathered for 1,488 rows"
    estimate = 2 * sizes_of(cfg, model, longest=80)[row]  # float32 here, and bfloat16 on a GPU
    assert abs(kept[1] - kept[0] - estimate) < 0.05 * estimate
    # with recomputation they exist for one layer at a time
    again = dataclasses.replace(cfg, gradient_checkpointing="full")
    assert sizes_of(again, model, longest=80)[row] == estimate / 8


@pytest.mark.parametrize("logits", ["model", "float32"])
def test_a_chunk_of_logits_takes_as_much_as_estimated(logits, monkeypatch):
    """On meta tensors in bfloat16, with a frozen head, whose gradient takes no memory."""
    monkeypatch.setattr(dispatch, "choice", "triton")
    model = tiny_model(vocab_size=4096, hidden_size=16).requires_grad_(False)
    estimate = sizes_of(Config(head_dtype=logits), model)["logits"]
    meta, rows, most = torch.device("meta"), ops.default_chunk(4096, torch.float32, SOLO.device), 0
    numbers = torch.empty(rows, device=meta)
    hidden, weight = (torch.empty(n, 16, device=meta).bfloat16() for n in (rows, 4096))
    batch = numbers.long(), LossInputs(numbers, numbers), Clip(0.2, 0.2)

    class Most(Live):
        def __torch_dispatch__(self, *call):
            nonlocal most
            out = super().__torch_dispatch__(*call)
            most = max(most, self.bytes)
            return out

    functions = head_dtype.functions(meta) if logits == "float32" else dispatch.functions_for(meta)
    with swapped(meta, functions), Most(model), Traffic().counting():
        ops.head_policy_loss(hidden.requires_grad_(), weight, *batch, chunk=rows)
    assert 1 < most / estimate < 1.1


def test_weights_moments_and_cache_are_exactly_as_estimated():
    """The engine's numbers are float32 here, and bfloat16 on a GPU."""
    model = tiny_model(num_hidden_layers=3)
    cfg = Config(max_concurrent=6, max_completion_length=60, beta=0.1)
    optimizer = optim.make_optimizer(model, cfg)
    engine = LocalEngine(model.cfg, max_len=100, slots=6, device="cpu", paged=True)
    table = sizes_of(cfg, model)
    assert table["parameters"] == table["gradients"] == nbytes(*model.parameters())
    moments = [s[k] for s in optimizer.state.values() for k in ("exp_avg", "exp_avg_sq")]
    assert table["optimizer"] == nbytes(*moments)
    assert 2 * table["engine: weights"] == nbytes(*engine.model.parameters())
    assert 2 * table["cache"] == nbytes(engine.cache.kv)


def test_a_strip_is_as_long_as_the_budget_or_a_sample():
    for options, expected in {
        (200, 1000, True): (1000, 4000, True),
        (2000, 1000, True): (2039, 4000, True),
        (2, None, True): (8 * (40 + 8), 8 * (40 + 8 * 41), False),
        (2, None, False): (8 * 8 * 41, 8 * 8 * 41, False),
    }.items():
        longest, budget, share = options
        cfg = Config(max_completion_length=longest, token_budget=budget, share_prompts=share)
        assert memory.longest_strip(cfg, 1, 40) == expected


def test_on_a_cpu_the_peak_is_that_of_the_process():
    (before,) = metrics.of_memory(SOLO).values()
    assert 0.05 < before < 64  # torch alone takes as much
    block = torch.ones(2**26, dtype=torch.uint8)  # 64 MiB, written
    assert metrics.of_memory(SOLO)["memory/host_peak_gib"] >= before
    assert block.sum() == 2**26


def peaks() -> list[dict]:
    """Simulate GPUs on two ranks: rank r's tensors took 3 + r GiB in the first step, and 1 GiB in
    the second.
    """
    with join(Config(device="cpu")) as world:
        taken = [(3 + world.rank) * 2**30]
        torch.cuda.max_memory_allocated = lambda device: taken[-1]
        torch.cuda.reset_peak_memory_stats = lambda device: taken.append(2**30)
        there = dataclasses.replace(world, device=torch.device("cuda", world.rank))
        return [{**metrics.of_memory(there), "memory/host_peak_gib": 0} for _ in range(2)]


def test_the_peak_is_that_of_the_fullest_gpu_in_one_step():
    host = {"memory/host_peak_gib": 0}
    expected = [{**host, "memory/peak_gib": peak} for peak in (4.0, 1.0)]
    assert run(2, peaks) == [expected, expected]


# --- a pretended GPU ---


@pytest.fixture
def gpu(monkeypatch):
    """Return a function: pretend to be on a GPU with so many GiB in total, free and allocated."""

    def pretend(total: float, free: float, allocated: float) -> World:
        monkeypatch.setattr(
            torch.cuda, "mem_get_info", lambda d: (int(free * 2**30), int(total * 2**30))
        )
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda d: int(allocated * 2**30))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda d: int(allocated * 2**30))
        return World(0, 1, torch.device("cuda", 0))

    return pretend


@pytest.mark.parametrize(
    ("total", "free", "allocated", "estimate", "share"),
    [
        (80, 70, 8, 30, "0.575"),  # 70 - 22 - 2 = 46
        (80, 79, 0, 0, "0.920"),  # no more than vLLM would take by itself
        (24, 20, 9, 5, "0.750"),  # the estimate was too low
    ],
)
def test_a_server_gets_what_the_trainer_does_not_need(gpu, total, free, allocated, estimate, share):
    world = gpu(total, free, allocated)
    assert memory.server_share(world, estimate * 2**30, ["--dtype", "half"]) == [
        "--gpu-memory-utilization",
        share,
    ]


@pytest.mark.parametrize("word", ["--gpu-memory-utilization=0.5", "--kv_cache_memory_bytes"])
def test_the_users_share_is_kept(gpu, word):
    assert memory.server_share(gpu(80, 1, 8), 70 * 2**30, [word]) == []


def test_a_gpu_without_room_for_a_server_is_reported(gpu):
    with refused(r"GPU has 20,480.0 MiB free, .* too little for vLLM"):
        memory.server_share(gpu(80, 20, 60), 80 * 2**30, [])


def test_the_table_is_logged_and_a_run_that_cannot_fit_is_refused_with_sizes(gpu, caplog):
    model, cfg = tiny_model(), Config(max_concurrent=6, max_completion_length=60)
    with caplog.at_level(logging.INFO):
        memory.fit(predict.inputs(model, gpu(80, 70, 1), 40), cfg)
    for words in ("parameters", "optimizer", "activations of ", "cache of ", "MiB"):
        assert words in caplog.text
    message = r"^a process needs [\d,]+\.\d MiB of memory but the GPU has 1\.0 MiB "
    with refused(rf"{message}.*\(.*activations of.*\): lower"):
        memory.fit(predict.inputs(model, gpu(80, 2**-10, 0), 40), cfg)


def test_an_evaluation_gets_a_cache_as_large_as_the_free_memory(gpu):
    model, world = tiny_model(), gpu(80, 20, 10)  # 10 GiB are allocated, 20 more are free
    cfg = memory.for_sampling(Config(), model, world, completions=1000)
    token = 4 * 2 * 16 * 2  # keys and values in bfloat16: 2 heads of 16 in 2 layers
    weights = 2 * sum(p.numel() for p in model.parameters())
    prefill = 2 * PREFILL_TOKENS  # its keys and values, and their copies
    assert cfg.cache_tokens == ((18 << 30) - weights) // token - prefill
    two = types.SimpleNamespace(device=world.device, size=2, gather=lambda x: [x, x])
    block = sum(p.numel() for p in model.model.layers[1].parameters())
    less = memory.for_sampling(Config(), model, two, completions=1000).cache_tokens
    assert cfg.cache_tokens - less == -(-(weights - 2 * block) // token)  # FSDP gathers them
    assert cfg.max_concurrent == memory.MOST_SLOTS
    assert memory.for_sampling(Config(), model, world, completions=7).max_concurrent == 7
    given = Config(max_concurrent=3, cache_tokens=5)
    assert memory.for_sampling(given, model, world, completions=1000) == given
    assert memory.for_sampling(Config(), model, SOLO, completions=1000) == Config()
