"""A real vLLM samples with the trainer's weights: log-probs agree after every sync, closed routes
stay closed, and only a trainer can change a weight.

Marked `vllm`: needs the environment of docs/vllm.md. Each start of a server takes half a minute.
"""

from __future__ import annotations

import json
import random
import threading
import time
from pathlib import Path

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

from nanogrpo.config import Config
from nanogrpo.distributed.world import join
from nanogrpo.engine.base import SamplingParams
from nanogrpo.errors import UserError
from nanogrpo.model import checkpoint
from nanogrpo.model.tokenizer import Tokenizer
from nanogrpo.types import Prompt
from nanogrpo.vllm.auth import ROUTES
from nanogrpo.vllm.client import VLLMEngine
from nanogrpo.vllm.server import Server, ServerError
from nanogrpo.vllm.sleeping import SleepingEngine
from nanogrpo.vllm.sync import WeightSync
from tests.conftest import write_base
from tests.engine.rounding import agree, trained
from tests.ranks import run
from tests.vllm.forge import CLOSED, forged, not_http, status
from tests.vllm.real import PROMPTS, SIZES, gap, label, malformed, params, raw, train_a_little

pytestmark = pytest.mark.vllm


# --- the same policy on both sides ---


@pytest.mark.parametrize("head", ["tied", "untied"])
@pytest.mark.parametrize("transport", ["broadcast", "memory"])
def test_log_probs_agree_before_and_after_every_sync(request, head, transport):
    real = request.getfixturevalue(head)
    model = checkpoint.load_model(real.folder)
    engine = real.engine(model, transport=transport)
    for version in range(3):
        engine.load(model, version)
        for temperature in (1.0, 0.7, 0.0):
            samples = engine.sample(PROMPTS, 4, params(temperature), step=version)
            assert len(samples) == 24
            assert {v for s in samples for v in s.versions} == {version}
            assert gap(model, samples, temperature) <= 1e-5
            again = engine.sample(PROMPTS[::-1], 4, params(temperature), step=version)
            # seeds, not neighbours, decide
            assert [s.token_ids for s in again[-4:]] == [s.token_ids for s in samples[:4]]
        train_a_little(model, seed=version)
        # so the next round shows that the weights really moved
        assert gap(model, samples, 0.0) > 1e-3
    engine.close()


def test_one_corrupted_tensor_shows_in_the_gap(tied):
    model = checkpoint.load_model(tied.folder)
    engine = tied.engine(model)
    name = "model.layers.1.mlp.up_proj.weight"
    valid = model.get_parameter(name).detach().clone()
    with torch.no_grad():
        model.get_parameter(name)[3:6].neg_()  # what is sent …
        engine.load(model, 0)
        model.get_parameter(name).copy_(valid)  # … is not what the trainer has
    assert gap(model, engine.sample(PROMPTS, 4, params(1.0), step=0), 1.0) > 1e-5
    engine.load(model, 1)
    assert gap(model, engine.sample(PROMPTS, 4, params(1.0), step=0), 1.0) <= 1e-5
    engine.close()


def test_on_a_trained_model_both_sides_are_as_close_to_float64_as_float32_allows(tied):
    """With trained weights the largest gap exceeds 1e-5: see tests/engine/test_rounding.py."""
    model = checkpoint.load_model(tied.folder)
    prompts = trained(model, Tokenizer(tied.folder))
    engine = tied.engine(model, max_len=96)
    engine.load(model, 0)
    agree(model, engine.sample(prompts, 8, params(1.0), step=0), 1.0)
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


def two_ranks(folder: Path, url: str, secret: str) -> dict:
    with join(Config(device="cpu")) as world:
        full, model = (checkpoint.load_model(folder) for _ in range(2))
        for block in model.model.layers:
            fully_shard(block)
        fully_shard(model)
        engine = VLLMEngine(model, max_len=256, servers=[url], secret=secret, world=world)
        mine = PROMPTS[:4] if world.main else PROMPTS[4:]
        gaps = []
        for version in range(2):
            engine.load(model, version)
            samples = engine.sample(mine, 2, params(0.7), step=version)
            gaps.append(gap(full, samples, 0.7))
            train_a_little(full, seed=version)
            # the same step on the shards
            for p, q in zip(model.parameters(), full.parameters()):
                p.data.copy_(distribute_tensor(q.data, p.device_mesh, p.placements))
        engine.close()
        return {"gaps": gaps, "prompts": [s.prompt.id for s in samples]}


def test_two_trainer_processes_under_fsdp(tied):
    first, second = run(2, two_ranks, tied.folder, tied.server.url, tied.process.secret)
    assert max(first["gaps"] + second["gaps"]) <= 1e-5
    # each rank has the samples of its own prompts
    assert first["prompts"] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert second["prompts"] == [4, 4, 5, 5]


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


# --- access control ---


def test_every_route_refuses_a_request_without_the_secret(tied):
    for secret in ("", "x" * 32):
        stranger = Server(tied.server.url, secret)
        for path in [*ROUTES, *CLOSED]:
            for call in (stranger.get, stranger.post):
                with pytest.raises(UserError, match="refuses the secret"):
                    call(path)


def test_routes_that_sampling_does_not_need_return_404(tied):
    for path in CLOSED:
        for call in (tied.server.get, tied.server.post):
            with pytest.raises(UserError, match="404"):
                call(path)
    assert tied.server.get("/is_paused") == {"is_paused": False}


def test_no_forged_request_gets_through_and_each_is_answered(tied):
    """The same as in test_access.py, against vLLM's own HTTP server and routes."""
    address, secret = (tied.server.host, tied.server.port), tied.process.secret
    requests = dict(forged(tied.server.port, secret, ["/pause", "/metrics", *CLOSED[::6]]))
    requests |= not_http(tied.server.port)
    found = {label: status(address, data) for label, data in requests.items()}
    wrong = {label: code for label, code in found.items() if code not in (400, 401, 403)}
    assert not wrong
    assert len(found) > 1000
    assert tied.server.get("/is_paused") == {"is_paused": False}


# --- requests with the secret ---


def test_fuzzed_weight_routes_neither_crash_the_server_nor_change_a_weight(tied):
    model = checkpoint.load_model(tied.folder)
    engine = tied.engine(model)
    engine.load(model, 0)
    s = tied.server
    before = [(x.token_ids, x.logp) for x in engine.sample(PROMPTS[:1], 1, params(1.0), step=0)]
    layout = [list(e) for e in engine.sync.layout.entries]
    valid = {"transport": "broadcast", "layout": layout, "bucket_bytes": 1 << 20, "timeout": 1.0}
    valid |= {"address": "127.0.0.1", "port": 9, "group": "x", "size": 2}
    rng, refused = random.Random(0), 0
    bodies = [
        ("/init_weight_transfer_engine", {"init_info": malformed(rng, valid)}) for _ in range(60)
    ]
    bodies += [
        ("/init_weight_transfer_engine", x)
        for x in ({}, {"init_info": []}, {"init_info": "x"}, {"init_info": None})
    ]
    handle = {"path": "/etc/passwd"}
    memory = {**valid, "transport": "memory", "handles": [handle]}
    bodies += [
        ("/init_weight_transfer_engine", {"init_info": memory | {"handles": h}})
        for h in ([handle], [{}], [1], [], "x")
    ]
    updates = [
        {},
        [],
        [{}],
        {"sequence": 10**9},
        {"sequence": "1"},
        {"sequence": True},
        {"sequence": 1, "checksums": 1},
        {"names": ["a"]},
        7,
        {"sequence": 1, "x": 1},
    ]
    session = ("/start_weight_update", "/update_weights", "/finish_weight_update")
    bodies += [(path, {"update_info": u}) for u in updates for path in session]
    for path, body in bodies:
        status = raw(s, path, json.dumps(body).encode())
        assert status == 200 or 400 <= status < 600  # an answer, not a lost connection
        refused += status != 200
    assert refused > 60
    # truncated JSON
    for path in ("/init_weight_transfer_engine", "/update_weights", "/finish_weight_update"):
        assert raw(s, path, json.dumps({"init_info": valid}).encode()[:-7]) >= 400
    after = engine.request(PROMPTS[:1], 1, params(1.0), 0)
    assert [(x.token_ids, x.logp) for x in after] == before
    # The trainer can continue.
    samples = engine.sample(PROMPTS, 2, params(1.0), step=0)
    assert gap(model, samples, 1.0) <= 1e-5
    engine.load(model, 1)
    assert {v for x in engine.sample(PROMPTS, 2, params(1.0), step=1) for v in x.versions} == {1}
    engine.close()


@pytest.mark.parametrize("transport", ["broadcast", "memory"])
def test_bytes_that_change_on_the_way_are_noticed(tied, transport):
    model = checkpoint.load_model(tied.folder)
    sync = WeightSync(model, "float32", torch.device("cpu"))
    sync.gather(model)
    sync.connect(tied.server, transport, 1)
    sync.slots["model.norm.weight"][7] += 1e-3  # after the checksums
    with pytest.raises(ServerError, match="bucket 0 arrived with other bytes than the trainer"):
        sync.send(tied.server, 0)
    assert label(tied.server) == "torn"
    sync.gather(model)
    sync.connect(tied.server, transport, 1)
    sync.send(tied.server, 1)
    assert label(tied.server) == sync.label(1)
    sync.close([tied.server])


def test_a_layout_that_lacks_a_tensor_is_refused(tied):
    """The trainer's model has fewer tensors than the server's. This must be reported."""
    model = checkpoint.load_model(tied.folder)
    s = tied.server
    s.get("/health")
    part = torch.nn.ModuleDict({"model": torch.nn.ModuleDict({"norm": model.model.norm})})
    sync = WeightSync(part, "float32", torch.device("cpu"))
    sync.gather(part)
    sync.connect(s, "memory", 1)
    with pytest.raises(ServerError, match="parameters did not arrive"):
        sync.send(s, 0)
    assert label(s) == "torn"
    assert s.get("/is_paused") == {"is_paused": False}
    sync.close([s])
    engine = tied.engine(model)  # the next sync repairs it
    engine.load(model, 0)
    assert gap(model, engine.sample(PROMPTS, 2, params(1.0), step=0), 1.0) <= 1e-5
    engine.close()


# --- bad input ---


def test_a_trainer_of_another_model_is_refused(tied, tmp_path):
    other = checkpoint.load_model(
        write_base(tmp_path / "other", **SIZES | {"intermediate_size": 96})
    )
    with pytest.raises(
        UserError, match=r"serves another model: its (intermediate_size|tie_word_embeddings) is"
    ):
        tied.engine(other)
