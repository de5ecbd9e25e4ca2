"""A real vLLM samples with the trainer's weights: log-probs agree after every sync, and malformed
requests change no weight.

Marked `vllm`: needs the environment of docs/vllm.md. Each start of a server takes half a minute.
"""

import json
import threading
import time

import pytest
import torch

from nanogrpo.engine.base import SamplingParams
from nanogrpo.extras import head_dtype
from nanogrpo.model import checkpoint
from nanogrpo.types import Prompt
from nanogrpo.vllm.auth import CONNECT
from nanogrpo.vllm.protocol import FLOAT32_LOGITS
from nanogrpo.vllm.server import Server, ServerError
from nanogrpo.vllm.sleeping import SleepingEngine
from nanogrpo.vllm.sync import WeightSync
from tests.conftest import refused, write_base
from tests.vllm.real import (
    PROMPTS,
    SIZES,
    check_syncs,
    gap,
    label,
    params,
    raw,
    serve,
    train_a_little,
)

pytestmark = pytest.mark.vllm
SESSION = ("/start_weight_update", "/update_weights", "/finish_weight_update")


# --- the same policy on both sides ---


@pytest.mark.parametrize("head", ["tied", "untied"])
@pytest.mark.parametrize("transport", ["broadcast", "memory"])
def test_log_probs_agree_before_and_after_every_sync(request, head, transport):
    real = request.getfixturevalue(head)
    model = checkpoint.load_model(real.folder)
    check_syncs(real.engine(model, transport=transport), model, PROMPTS, first=model)


def test_float32_logits_of_16_bit_weights_agree_after_every_sync(tmp_path):
    """No layer changes the hidden states, so they are the same bits on both sides, and only the
    logits could be rounded.
    """
    base = write_base(tmp_path / "base", **SIZES)
    for real in serve(base, "--dtype", "bfloat16", *FLOAT32_LOGITS):
        model = checkpoint.load_model(base).bfloat16()
        for name, p in model.named_parameters():
            if "norm" in name or name.endswith(("o_proj.weight", "down_proj.weight")):
                p.data.fill_(float("norm" in name))
        model.lm_head.weight.data *= 20
        with refused("has --head-dtype float32, but the trainer has model"):
            real.engine(model)
        engine = real.engine(model, head_dtype="float32")
        for version in range(2):
            engine.load(model, version)
            samples = engine.sample(PROMPTS, 4, params(1.0), step=0)
            assert gap(model, samples, 1.0, head_dtype.product) <= 1e-5
            assert gap(model, samples, 1.0) > 1e-3  # the trainer's logits are rounded
            model.lm_head.weight.data *= 1.5
        engine.close()


def test_many_prompts_at_once_are_neither_split_nor_computed_for_every_completion(tied):
    """64 prompts of 100 tokens exceed vLLM's 2,048 tokens per step. A seeded prompt that is split
    over two steps would end the engine on a CPU.
    """
    model = checkpoint.load_model(tied.folder)
    engine = tied.engine(model)
    engine.load(model, 0)
    ids = torch.randint(97, (64, 100), generator=torch.Generator().manual_seed(0)).tolist()
    prompts = [Prompt(i, "", tokens) for i, tokens in enumerate(ids)]
    names = ("prefix_cache_queries", "prefix_cache_hits")
    before = [counted(tied.server, name) for name in names]
    samples = engine.sample(prompts, 2, params(1.0, max_tokens=4), step=0)
    after = [counted(tied.server, name) for name in names]
    # the second completion of each group computes only what follows the last full block of 32
    assert [b - a for a, b in zip(before, after)] == [64 * 2 * 100, 64 * 96]
    assert gap(model, samples, 1.0) <= 1e-5
    few = engine.sample(prompts[::9], 2, params(1.0, max_tokens=4), step=0)
    expected = {(s.prompt.id, s.index): s.token_ids for s in samples}
    assert all(s.token_ids == expected[s.prompt.id, s.index] for s in few)
    assert engine.restarts == 0
    engine.close()


def test_stop_tokens_and_lengths_are_the_trainers(tied):
    model = checkpoint.load_model(tied.folder)
    engine = tied.engine(model)
    engine.load(model, 0)
    stops = tuple(range(20))
    samples = engine.sample(
        PROMPTS, 8, SamplingParams(max_tokens=6, stop_token_ids=stops, seed=2), step=0
    )
    for s in samples:
        assert s.stopped == (s.token_ids[-1] in stops)
        assert not any(t in stops for t in s.token_ids[:-1])
        assert s.stopped or len(s.token_ids) == 6
    assert {s.stopped for s in samples} == {True, False}
    free = engine.sample(PROMPTS, 2, SamplingParams(max_tokens=6), step=0)
    assert all(len(s.token_ids) == 6 and not s.stopped for s in free)
    engine.close()


def test_versions_show_per_token_when_weights_change_during_a_completion(tied):
    model = checkpoint.load_model(tied.folder)
    engine = tied.engine(model, max_len=384)
    engine.load(model, 0)
    long = SamplingParams(max_tokens=100)
    # a fast server may finish before the weights arrive; then try again
    for version in range(8):
        samples, before = [], counted(tied.server, "generation_tokens")

        def sample(into=samples):
            into.extend(engine.request(PROMPTS * 2, 4, long, 0))

        thread = threading.Thread(target=sample)
        thread.start()
        deadline = time.monotonic() + 60
        while counted(tied.server, "generation_tokens") == before and time.monotonic() < deadline:
            pass
        train_a_little(model, seed=version)
        engine.load(model, version + 1)
        thread.join(60)
        assert [(s.prompt.id, s.index) for s in samples] == [
            (p.id, i) for p in PROMPTS * 2 for i in range(4)
        ]
        assert all(
            s.versions == sorted(s.versions) and set(s.versions) <= {version, version + 1}
            for s in samples
        )
        if any(len(set(s.versions)) == 2 for s in samples):
            break
    else:
        pytest.fail("in eight attempts no completion saw its weights change")
    assert engine.restarts == 0
    engine.close()


def counted(server: Server, name: str) -> float:
    """Return one of vLLM's counters."""
    connection = server.kind(server.host, server.port, timeout=30)
    connection.request("GET", "/metrics", headers=server.headers)
    lines = connection.getresponse().read().decode().splitlines()
    connection.close()
    return sum(float(x.split()[-1]) for x in lines if x.startswith(f"vllm:{name}_total"))


# --- sleep mode ---


@pytest.mark.parametrize("transport", ["broadcast", "memory"])
def test_the_order_of_sleep_mode_is_one_that_vllm_accepts(tied, transport):
    """A vLLM on a CPU pauses, but keeps its memory when it sleeps."""
    model = checkpoint.load_model(tied.folder)
    client = tied.engine(model, transport=transport, sleeps=True)
    engine = SleepingEngine(client, client)
    for version in (0, 0, 1):
        assert tied.server.get("/is_paused") == {"is_paused": True}
        engine.load(model, version)
        samples = engine.sample(PROMPTS, 4, params(1.0), step=version)
        assert {v for s in samples for v in s.versions} == {version}
        assert gap(model, samples, 1.0) <= 1e-5
        if version == 0:
            train_a_little(model, seed=len(samples))
    assert client.restarts == 0
    client.wake()
    engine.close()
    assert label(tied.server) == client.sync.label(1)


# --- requests with the secret ---

JUNK = [
    *({}, [], None, "x", {"handles": [["self", "../../etc/passwd"]]}, {"handles": [1]}),
    *({"layout": [["a", "float32", ["x"]]]}, {"layout": 7}, {"bucket_bytes": -1}, {"size": 2**63}),
    *({"extra": 1}, {"checksums": 1}, {"checksums": ["x"]}, {"transport": "../../etc/passwd"}),
]


def test_malformed_requests_neither_crash_the_server_nor_change_a_weight(tied):
    model, s = checkpoint.load_model(tied.folder), tied.server
    engine = tied.engine(model)
    engine.load(model, 0)
    before = [(x.token_ids, x.logp) for x in engine.sample(PROMPTS[:1], 1, params(1.0), step=0)]
    layout = [list(e) for e in engine.sync.layout.entries]
    valid = {"transport": "memory", "layout": layout, "bucket_bytes": 1 << 20, "timeout": 1.0}
    refused = 0
    for junk in JUNK:
        info = valid | junk if isinstance(junk, dict) and junk else junk
        bodies = {CONNECT: {"init_info": info}} | {path: {"update_info": junk} for path in SESSION}
        for path, body in bodies.items():
            status = raw(s, path, json.dumps(body).encode())
            assert status == 200 or 400 <= status < 600  # an answer, not a lost connection
            refused += status != 200
            assert raw(s, path, json.dumps(body).encode()[:-7]) >= 400  # truncated JSON
    assert refused > len(JUNK)
    after = engine.request(PROMPTS[:1], 1, params(1.0), 0)
    assert [(x.token_ids, x.logp) for x in after] == before
    engine.load(model, 1)  # the trainer can continue
    assert gap(model, engine.sample(PROMPTS, 2, params(1.0), step=1), 1.0) <= 1e-5
    engine.close()


@pytest.mark.parametrize("transport", ["broadcast", "memory"])
def test_bytes_that_change_on_the_way_are_noticed(tied, transport):
    model = checkpoint.load_model(tied.folder)
    sync = WeightSync(model, "float32", torch.device("cpu"))
    sync.gather(model)
    sync.connect(tied.server, transport, 1)
    sync.slots["model.norm.weight"][7] += 1e-3  # after the checksums
    with pytest.raises(ServerError, match="bucket 0 does not have the bytes that were sent"):
        sync.send(tied.server, 0)
    assert tied.server.get("/is_paused") == {"is_paused": True}
    sync.gather(model)
    sync.connect(tied.server, transport, 1)
    sync.send(tied.server, 1)
    assert label(tied.server) == sync.label(1)
    sync.close([tied.server])


def test_a_layout_that_lacks_a_tensor_is_refused(tied):
    """The trainer's model has fewer tensors than the server's. This must be reported."""
    model = checkpoint.load_model(tied.folder)
    s = tied.server
    s.get("/nanogrpo")
    part = torch.nn.ModuleDict({"model": torch.nn.ModuleDict({"norm": model.model.norm})})
    sync = WeightSync(part, "float32", torch.device("cpu"))
    sync.gather(part)
    sync.connect(s, "memory", 1)
    with pytest.raises(ServerError, match="parameters did not arrive"):
        sync.send(s, 0)
    assert s.get("/is_paused") == {"is_paused": True}  # nobody samples from torn weights
    sync.close([s])
    engine = tied.engine(model)  # the next sync repairs it
    engine.load(model, 0)
    assert gap(model, engine.sample(PROMPTS, 2, params(1.0), step=0), 1.0) <= 1e-5
    engine.close()
