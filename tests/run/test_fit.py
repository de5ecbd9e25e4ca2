"""The settings that a GPU chooses fit, and a run that cannot fit is refused with what would help.

The GPUs are pretended: models are on the meta device, and nothing is allocated. Read before:
test_memory.py. Read next: test_out_of_memory.py.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import os

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from bench import common, fits
from nanogrpo.config import Config, dashed
from nanogrpo.distributed import fsdp, world
from nanogrpo.distributed.world import World
from nanogrpo.engine.cache import PAGE
from nanogrpo.errors import UserError
from nanogrpo.model import lora
from nanogrpo.model.decoder import Decoder
from nanogrpo.run import memory
from tests.conftest import SOLO, tiny_config, tiny_model

GIB = 2**30
KINDS = ("none", "selective", "full")
HOST = 2**42  # bytes of host memory, more than any of these runs needs
CASES = list(itertools.product(fits.COMMANDS, fits.SHAPES, fits.SIZES, fits.CARDS))
shape = functools.cache(fits.model)


def needed(model: Decoder, cfg: Config, size: int, longest: int = fits.PROMPT) -> int:
    return memory.on_device(memory.table(model, cfg, fits.gpus(size), longest))


@pytest.fixture
def has(monkeypatch):
    """Return a function that pretends that so many bytes are free on each GPU."""
    return lambda free: monkeypatch.setattr(memory, "capacity", lambda world: (free, HOST))


@pytest.mark.parametrize(("command", "name", "size", "card"), CASES)
def test_every_model_starts_on_every_card_or_a_sentence_says_what_is_missing(
    command, name, size, card, has
):
    cfg, free = fits.COMMANDS[command], fits.free(card)
    model, world = shape(name, cfg), fits.gpus(size)
    has(free)
    chosen = memory.choose(model, cfg, world, fits.PROMPT, free)
    assert chosen.reduce_gradients == "step" or size > 1
    assert None not in (chosen.max_concurrent, chosen.token_budget)
    assert "auto" not in (chosen.gradient_checkpointing, chosen.reduce_gradients)
    if needed(model, chosen, size) <= free:
        assert memory.check(model, chosen, world, fits.PROMPT) == needed(model, chosen, size)
        return
    with pytest.raises(UserError) as error:
        memory.check(model, chosen, world, fits.PROMPT)
    sentence = str(error.value)
    missing = memory.shown(needed(model, chosen, size) - free)
    assert f"available, so {missing} are missing (" in sentence
    assert sentence.endswith(".")
    assert "\n" not in sentence
    # no other settings would have fit
    every = itertools.product(KINDS, (256, 4096), ("step", "micro_batch"))
    for kind, budget, reduce in every:
        lean = dataclasses.replace(
            cfg,
            max_concurrent=1,
            cache_tokens=1,
            gradient_checkpointing=kind,
            token_budget=budget,
            reduce_gradients=reduce,
        )
        assert needed(model, lean, size) > free, lean


def test_the_documentation_has_the_tables(monkeypatch):
    """If this fails, put the output of `python -m bench.fits` into docs/memory.md."""
    monkeypatch.setattr(memory, "GATHERED", 1)  # as with torch 2.12 and newer
    assert fits.tables() in (common.ROOT / "docs/memory.md").read_text()


def test_more_memory_never_chooses_leaner_settings():
    cfg, seen = fits.COMMANDS["train.py"], []
    model = shape("1.7B", cfg)
    for free in range(40, 141, 3):
        chosen = memory.choose(model, cfg, fits.gpus(1), fits.PROMPT, free * GIB)
        assert needed(model, chosen, 1) + memory.MARGIN <= free * GIB
        assert chosen.slots == 64
        share = (chosen.cache_tokens * 64 // (64 * 768)).bit_length()  # of the cache, in halvings
        kind, kept = -KINDS.index(chosen.checkpointing), chosen.reshard_after_forward == "never"
        seen.append((min(share, 6), kind, chosen.strip_tokens, kept))
    assert seen == sorted(seen)
    assert seen[-1] == (6, 0, 16384, True)
    assert chosen.cache_tokens == 64 * 768
    assert len(set(seen)) > 4


def test_a_long_prompt_makes_the_cache_smaller_instead_of_ending_the_run():
    """With room for the longest prompt in each of 64 slots, the cache would need 115 GiB."""
    cfg = fits.COMMANDS["train.py"]
    model = shape("0.6B", cfg)
    chosen = memory.choose(model, cfg, fits.gpus(1), 16_384, fits.free(80))
    assert chosen.slots == 64
    assert 16_896 < chosen.cache_tokens < 64 * 16_896 / 1.4
    assert needed(model, chosen, 1, 16_384) + memory.MARGIN <= fits.free(80)


def test_what_the_user_gives_is_kept_and_the_rest_is_chosen_around_it():
    given = {
        "max_concurrent": 100,
        "cache_tokens": 9000,
        "token_budget": 5000,
        "gradient_checkpointing": "none",
    }
    for name, value in given.items():
        cfg = Config(**{name: value})
        for free in (20, 60, 200):
            chosen = memory.choose(
                shape("0.6B", Config()), cfg, fits.gpus(1), fits.PROMPT, free * GIB
            )
            assert getattr(chosen, name) == value
    compiled = Config(torch_compile=True)
    kinds = {
        memory.choose(
            shape("0.6B", Config()), compiled, fits.gpus(1), fits.PROMPT, free * GIB
        ).checkpointing
        for free in range(16, 60)
    }
    assert kinds == {"none", "full"}  # the compiler does not go together with selective


def test_on_a_cpu_nothing_depends_on_the_memory():
    fixed = {
        "max_concurrent": 64,
        "token_budget": 16384,
        "gradient_checkpointing": "none",
        "reduce_gradients": "step",
        "reshard_after_forward": "always",
    }
    for free in (0, 10 * GIB, 1000 * GIB):
        chosen = memory.choose(tiny_model(), Config(), SOLO, 40, free)
        assert chosen == dataclasses.replace(Config(), **fixed)
    cfg = Config(token_budget=7, gradient_checkpointing="full")
    assert memory.choose(tiny_model(), cfg, SOLO, 40, 0).token_budget == 7
    assert (Config().slots, Config().strip_tokens, Config().checkpointing) == (64, 16384, "none")


def test_all_ranks_choose_the_same_for_the_fullest_gpu(caplog, monkeypatch):
    """Rank 0 also has the weights for the servers, and this rank has more free memory."""
    cfg = Config(engine="vllm", server=("http://there:1",))
    model, free = shape("0.6B", Config()), [25 * GIB, 60 * GIB]
    monkeypatch.setattr(memory, "capacity", lambda world: (free[world.rank], HOST))
    monkeypatch.setattr(World, "gather", lambda self, mine: free)
    found = []
    for rank in (0, 1):
        place = dataclasses.replace(fits.gpus(2), rank=rank)
        with caplog.at_level(logging.INFO):
            found.append(memory.fit(model, cfg, place, fits.PROMPT))
    assert found[0][0] == found[1][0]
    assert found[0][1] > found[1][1]
    assert found[0][0].checkpointing != "none" or found[0][0].strip_tokens < 16384
    (line,) = {m for m in caplog.messages if m.startswith("settings for the free GPU memory: ")}
    assert "--token-budget" in line
    assert "--max-concurrent" not in line  # the server decides


# --- what would fit -------------------------------------------------------------------------------


def test_each_change_that_the_sentence_names_is_enough(has):
    has(fits.free(80))
    cfg, model = fits.COMMANDS["train.py"], shape("8B", fits.COMMANDS["train.py"])
    chosen = memory.choose(model, cfg, fits.gpus(1), fits.PROMPT, fits.free(80))
    with pytest.raises(UserError, match=r"use --lora-r 16 or .*--cpu-offload.* or 4 GPUs of this"):
        memory.check(model, chosen, fits.gpus(1), fits.PROMPT)
    for changes, size in (({"lora_r": 16}, 1), ({"cpu_offload": True}, 1), ({}, 4)):
        other = dataclasses.replace(cfg, **changes)
        best = memory.choose(shape("8B", other), other, fits.gpus(size), fits.PROMPT, fits.free(80))
        assert memory.check(shape("8B", other), best, fits.gpus(size), fits.PROMPT) < fits.free(80)
    two = memory.choose(model, cfg, fits.gpus(2), fits.PROMPT, fits.free(80))
    assert needed(model, two, 2) > fits.free(80)


def test_four_bits_are_proposed_where_adapters_alone_are_not_enough(has):
    has(fits.free(24))
    for cfg, words in (
        (Config(), "use --lora-r 16 --load-in-4bit"),
        (Config(lora_r=16), "use --load-in-4bit"),
    ):
        model = shape("8B", cfg)
        chosen = memory.choose(model, cfg, fits.gpus(1), fits.PROMPT, fits.free(24))
        with pytest.raises(UserError, match=words):
            memory.check(model, chosen, fits.gpus(1), fits.PROMPT)
    cfg = Config(lora_r=16, load_in_4bit=True)
    model = shape("8B", cfg)
    chosen = memory.choose(model, cfg, fits.gpus(1), fits.PROMPT, fits.free(24))
    assert memory.check(model, chosen, fits.gpus(1), fits.PROMPT) < fits.free(24) - memory.MARGIN


def test_four_bits_are_not_proposed_where_matrices_are_not_made_of_blocks(has):
    has(fits.free(24))
    with torch.device("meta"):
        model = Decoder(tiny_config(hidden_size=250, intermediate_size=2_000_002))
    chosen = memory.choose(model, Config(), fits.gpus(1), fits.PROMPT, fits.free(24))
    with pytest.raises(UserError, match=r"missing .*: use --cpu-offload\.$") as error:
        memory.check(model, chosen, fits.gpus(1), fits.PROMPT)
    assert "4bit" not in str(error.value)


def test_settings_of_the_user_that_do_not_fit_are_named_with_others_that_do(has):
    has(fits.free(24))
    cfg, model = Config(token_budget=65_536, cache_tokens=300_000), shape("0.6B", Config())
    chosen = memory.choose(model, cfg, fits.gpus(1), 2048, fits.free(24))
    with pytest.raises(UserError) as error:
        memory.check(model, chosen, fits.gpus(1), 2048)
    best = memory.choose(model, Config(), fits.gpus(1), 2048, fits.free(24))
    for name in ("cache_tokens", "token_budget"):
        assert f"--{dashed(name)} {getattr(best, name)} " in str(error.value)
    memory.check(model, best, fits.gpus(1), 2048)


def test_a_model_beyond_all_of_them_is_refused_too(has):
    has(2 * GIB)
    cfg = Config(generation_batch_size=8)  # one prompt: no second rank can share the step
    chosen = memory.choose(shape("8B", Config()), cfg, fits.gpus(1), fits.PROMPT, 2 * GIB)
    with pytest.raises(UserError, match=r"\): use a smaller model or larger GPUs\.$"):
        memory.check(shape("8B", Config()), chosen, fits.gpus(1), fits.PROMPT)


def test_a_server_on_the_same_gpu_is_counted_but_is_not_the_trainers(has):
    has(fits.free(80))
    model = shape("0.6B", Config())
    sizes = []
    for where in ({}, {"server": ("http://there:1",)}, {"vllm_gpus": "1"}):
        cfg = Config(engine="vllm", max_concurrent=16, cache_tokens=8000, **where)
        chosen = memory.choose(model, cfg, fits.gpus(1), fits.PROMPT, fits.free(80))
        rows = memory.table(model, chosen, fits.gpus(1), fits.PROMPT)
        server = sum(row.bytes for row in rows if row.of_server)
        estimate = memory.check(model, chosen, fits.gpus(1), fits.PROMPT)
        assert estimate == memory.on_device(rows) - server
        sizes.append(server)
    n = sum(p.numel() for p in model.parameters())
    token = 2 * 2 * 8 * 128 * 28  # keys and values of 8 heads of 128 in 28 layers
    assert sizes == [2 * n + (8000 + PAGE) * token + memory.MARGIN, 0, 0]


def test_taking_turns_with_a_server_is_proposed_where_it_is_enough(has):
    cfg = Config(engine="vllm", cache_tokens=64 * 768)
    model = shape("1.7B", Config())
    has(fits.free(40))
    chosen = memory.choose(model, cfg, fits.gpus(1), fits.PROMPT, fits.free(40))
    with pytest.raises(UserError, match=r" or --vllm-enable-sleep-mode"):
        memory.check(model, chosen, fits.gpus(1), fits.PROMPT)
    turns = dataclasses.replace(cfg, vllm_enable_sleep_mode=True)
    chosen = memory.choose(model, turns, fits.gpus(1), fits.PROMPT, fits.free(40))
    assert memory.check(model, chosen, fits.gpus(1), fits.PROMPT) < fits.free(40)


def test_the_capacity_of_a_gpu_is_what_others_leave_free(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (50 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 3 * GIB)
    assert memory.capacity(fits.gpus(1))[0] == 53 * GIB


# --- bytes per weight -----------------------------------------------------------------------------


def per_weight(size: int, cfg: Config, *rows: str) -> float:
    """Return the bytes per weight of these rows for the 8B model."""
    model = shape("8B", dataclasses.replace(cfg, reduce_gradients="auto"))
    table = memory.table(model, cfg, fits.gpus(size), fits.PROMPT)
    n = sum(p.shape.numel() for _, p in lora.base_parameters(model))
    names = ("parameters", "optimizer", "gradients", "engine: weights")
    return sum(row.bytes for row in table if row.name.startswith(names)) / n


def test_the_bytes_per_weight_are_those_of_the_documentation():
    once = Config(token_budget=4096)  # several micro-batches, on eight ranks too
    each = dataclasses.replace(once, reduce_gradients="micro_batch")
    full = Config(lora_r=16, lora_base_dtype="float32")
    assert per_weight(1, once) == pytest.approx(18)
    assert per_weight(8, once) == pytest.approx(12 / 8 + 4 + 2)
    assert per_weight(8, each) == pytest.approx(16 / 8 + 2)
    adapters = 16 * per_weight_of_adapters()
    assert per_weight(1, full) == pytest.approx(4 + 2 + adapters)
    assert per_weight(1, Config(lora_r=16)) == pytest.approx(2 + 2 + adapters)
    four = Config(lora_r=16, load_in_4bit=True)
    model = shape("8B", Config())
    root = model.lm_head.weight.numel() + model.model.embed_tokens.weight.numel()
    share = root / sum(p.numel() for p in model.parameters())  # the engine's adapters: 2 bytes
    expected = 0.516 * (1 - share) + 2 * share + 18 * per_weight_of_adapters()
    assert per_weight(1, four) == pytest.approx(expected, rel=1e-3)


def per_weight_of_adapters() -> float:
    model = shape("8B", Config(lora_r=16))
    sizes = {flag: 0 for flag in (False, True)}
    for p in model.parameters():
        sizes[p.requires_grad] += p.numel()
    return sizes[True] / sizes[False]


@pytest.mark.parametrize(
    "cfg",
    [
        Config(),
        Config(lora_r=16, lora_base_dtype="bfloat16"),
        Config(lora_r=16, load_in_4bit=True),
    ],
)
def test_shards_of_a_large_model_on_eight_ranks_are_as_large_as_estimated(cfg):
    """FSDP2 shards the model on a pretended process group."""
    place = World(0, 8, torch.device("cpu"))
    model = fits.model("1.7B", cfg)
    row = memory.table(model, cfg, place, fits.PROMPT)[0]
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    try:
        fsdp.prepare(model, place, cfg)
        local = sum(p.to_local().nbytes for p in model.parameters())
    finally:
        dist.destroy_process_group()
    assert row.name == "parameters"
    assert row.bytes == pytest.approx(local, rel=1e-3)


def test_torch_2_11_gathers_each_byte_of_four_bits_as_two(monkeypatch):
    cfg = Config(lora_r=16, load_in_4bit=True, reshard_after_forward="never")
    model, rows = fits.model("1.7B", cfg), []
    for gathered in (1, 2):
        monkeypatch.setattr(memory, "GATHERED", gathered)
        rows.append({row.name: row.bytes for row in memory.table(model, cfg, fits.gpus(1), 256)})
    packed = sum(p.nbytes for p in model.parameters() if p.dtype == torch.uint8)
    assert packed > 0.7e9
    differences = {name: rows[1][name] - size for name, size in rows[0].items()}
    assert differences.pop("gathered by FSDP") == packed
    assert not any(differences.values())


# --- the allocator --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "before", "after"),
    [
        ({}, {}, "expandable_segments:True"),
        ({}, {"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}, "backend:native"),
        ({}, {"PYTORCH_ALLOC_CONF": "backend:native"}, None),
        ({"engine": "vllm"}, {}, None),  # CUDA IPC
    ],
)
def test_segments_can_grow_unless_the_user_or_cuda_ipc_forbids_it(
    monkeypatch, options, before, after
):
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    for name, value in before.items():
        monkeypatch.setenv(name, value)
    environment = dict(os.environ)
    monkeypatch.setattr(os, "environ", environment)
    world._configure_allocator(Config(**options))
    assert environment.get("PYTORCH_CUDA_ALLOC_CONF") == after
