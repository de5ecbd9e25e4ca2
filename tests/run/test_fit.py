"""The settings that a GPU chooses fit, and a run that cannot fit is refused with what would help.

The GPUs are pretended: models are on the meta device, and nothing is allocated. Read before:
test_memory.py. Read next: test_out_of_memory.py.
"""

import dataclasses
import functools
import itertools
import logging
import os
import re

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from bench import common, fits, predict
from nanogrpo import Config
from nanogrpo.distributed import fsdp
from nanogrpo.distributed.world import World
from nanogrpo.engine.paged_cache import PAGE
from nanogrpo.extras import memory
from nanogrpo.model import weights
from nanogrpo.model.decoder import Decoder
from nanogrpo.vllm.feature import VLLM
from tests.conftest import refused

GIB = 2**30
KINDS = ("none", "selective", "full")
HOST = 2**42  # bytes of host memory, more than any of these runs needs
CASES = list(itertools.product(fits.COMMANDS, ("0.6B", "8B"), fits.SIZES, (24, 80)))
shape = functools.cache(fits.model)


@pytest.fixture(autouse=True, scope="module")
def counted_once():
    """Count the parameters of a model once, which would take most of the time: no test trains."""
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in ((weights, "sizes"), (memory, "numbers")):
            patch.setattr(owner, name, functools.cache(getattr(owner, name)))
        yield


def needed(model: Decoder, cfg: Config, size: int, longest: int = fits.PROMPT) -> int:
    return memory.on_device(memory.table(predict.inputs(model, predict.gpus(size), longest), cfg))


@pytest.fixture
def has(monkeypatch):
    """Return a function that pretends that so many bytes are free on each GPU."""
    monkeypatch.setattr(World, "gather", lambda self, mine: [mine])
    return lambda free: monkeypatch.setattr(memory, "capacity", lambda world: (free, HOST))


@pytest.mark.parametrize(("command", "name", "size", "card"), CASES)
def test_every_model_starts_on_every_card_or_a_sentence_says_what_is_missing(
    command, name, size, card, has
):
    cfg, free = fits.COMMANDS[command], fits.free(card)
    model = shape(name, cfg)
    inputs = predict.inputs(model, predict.gpus(size))
    has(free)
    chosen = memory.choose(inputs, cfg, free)
    assert chosen.reduce_gradients == "step" or size > 1
    assert None not in (chosen.max_concurrent, chosen.token_budget)
    assert "auto" not in (chosen.gradient_checkpointing, chosen.reduce_gradients)
    if needed(model, chosen, size) <= free:
        assert memory.fit(inputs, cfg) == (chosen, needed(model, chosen, size))
        return
    missing = re.escape(memory.shown(needed(model, chosen, size) - free))
    with refused(rf"available, so {missing} are missing \(.*\.$"):
        memory.fit(inputs, cfg)
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


def test_the_documentation_has_the_tables():
    """If this fails, put the output of `python -m bench.fits` into docs/memory.md."""
    assert fits.tables() in (common.ROOT / "docs/memory.md").read_text()


def test_more_memory_never_chooses_leaner_settings():
    cfg, seen = fits.COMMANDS["train.py"], []
    model = shape("1.7B", cfg)
    for free in range(40, 141, 3):
        chosen = memory.choose(predict.inputs(model, predict.gpus(1)), cfg, free * GIB)
        assert needed(model, chosen, 1) + memory.MARGIN <= free * GIB
        assert chosen.slots == 64
        share = (chosen.cache_tokens * 64 // (64 * 768)).bit_length()  # of the cache, in halvings
        kind, kept = -KINDS.index(chosen.checkpointing), chosen.reshard_after_forward == "never"
        seen.append((min(share, 6), kind, chosen.strip_tokens, kept))
    assert seen == sorted(seen)
    assert seen[-1] == (6, 0, 65536, True)
    assert chosen.cache_tokens == 64 * 768
    assert len(set(seen)) > 4


@pytest.mark.parametrize(("free", "slots"), [(40, 256), (60, 256), (100, 512), (140, 512)])
def test_more_than_256_slots_are_chosen_only_with_half_of_their_cache(free, slots):
    cfg = dataclasses.replace(fits.COMMANDS["train.py"], generation_batch_size=2048)
    inputs = predict.inputs(shape("1.7B", cfg), predict.gpus(1))
    chosen = memory.choose(inputs, cfg, free * GIB)
    assert chosen.slots == slots
    assert (chosen.cache_tokens >= 256 * 768) == (slots > 256)  # 768 is the largest length


def test_a_long_prompt_makes_the_cache_smaller_instead_of_ending_the_run():
    """With room for the longest prompt in each of 64 slots, the cache would need 115 GiB."""
    cfg = fits.COMMANDS["train.py"]
    model = shape("0.6B", cfg)
    chosen = memory.choose(predict.inputs(model, predict.gpus(1), 16_384), cfg, fits.free(80))
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
            inputs = predict.inputs(shape("0.6B", Config()), predict.gpus(1))
            chosen = memory.choose(inputs, cfg, free * GIB)
            assert getattr(chosen, name) == value


def test_all_ranks_choose_the_same_for_the_fullest_gpu(caplog, monkeypatch):
    """Rank 0 also has the weights for the servers, and this rank has more free memory."""
    cfg = Config(engine="vllm", server=("http://there:1",))
    model, free = shape("0.6B", Config()), [25 * GIB, 60 * GIB]
    monkeypatch.setattr(memory, "capacity", lambda world: (free[world.rank], HOST))
    monkeypatch.setattr(World, "gather", lambda self, mine: free)
    found = []
    for rank in (0, 1):
        place = dataclasses.replace(predict.gpus(2), rank=rank)
        with caplog.at_level(logging.INFO):
            found.append(memory.fit(predict.inputs(model, place), cfg))
    assert found[0][0] == found[1][0]
    assert found[0][1] > found[1][1]
    assert found[0][0].checkpointing != "none" or found[0][0].strip_tokens < 16384
    (line,) = {m for m in caplog.messages if m.startswith("settings for the free GPU memory: ")}
    assert "--token-budget" in line
    assert "--max-concurrent" not in line  # the server decides


def test_a_server_on_the_same_gpu_is_counted_but_is_not_the_trainers(has):
    has(fits.free(80))
    model = shape("0.6B", Config())
    sizes, inputs = [], predict.inputs(model, predict.gpus(1))
    for where in ({}, {"server": ("http://there:1",)}, {"vllm_gpus": "1"}):
        cfg = Config(engine="vllm", max_concurrent=16, cache_tokens=8000, **where)
        chosen = memory.choose(inputs, cfg, fits.free(80))
        rows = memory.table(inputs, chosen)
        server = sum(row.bytes for row in rows if row.of_server)
        _, estimate = memory.fit(inputs, cfg)
        assert estimate == memory.on_device(rows) - server
        sizes.append(server)
    n = sum(p.numel() for p in model.parameters())
    token = 2 * 2 * 8 * 128 * 28  # keys and values of 8 heads of 128 in 28 layers
    assert sizes == [2 * n + (8000 + PAGE) * token + memory.MARGIN, 0, 0]


@pytest.mark.parametrize(
    "cfg",
    [
        Config(),
        Config(lora_r=16, dtype="bfloat16"),
        Config(lora_r=16, load_in_4bit=True),
    ],
)
def test_shards_of_a_large_model_on_eight_ranks_are_as_large_as_estimated(cfg):
    """FSDP2 shards the model on a pretended process group."""
    place = World(0, 8, torch.device("cpu"))
    model = fits.model("1.7B", cfg)
    row = memory.table(predict.inputs(model, place), cfg)[0]
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    try:
        fsdp.prepare(model, place, cfg)
        local = sum(p.to_local().nbytes for p in model.parameters())
    finally:
        dist.destroy_process_group()
    assert row.name == "parameters"
    assert row.bytes == pytest.approx(local, rel=1e-3)


# --- the allocator --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, "expandable_segments:False"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}, "backend:native"),
    ],
)
def test_cuda_ipc_forbids_segments_that_grow_unless_the_user_decides(monkeypatch, before, after):
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    for name, value in before.items():
        monkeypatch.setenv(name, value)
    environment = dict(os.environ)
    monkeypatch.setattr(os, "environ", environment)
    VLLM()
    assert environment.get("PYTORCH_CUDA_ALLOC_CONF") == after
