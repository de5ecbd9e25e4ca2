"""The client against a fake server (fake.py): its requests, the replies it trusts, and retries.

Read next: test_real.py.
"""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from types import SimpleNamespace

import pytest
import torch
import transformers

from nanogrpo.engine.base import SamplingParams, stream
from nanogrpo.errors import UserError
from nanogrpo.model.rope import Scaling
from nanogrpo.vllm import auth
from nanogrpo.vllm.protocol import check_server
from nanogrpo.vllm.server import Server, ServerError, ServerLost
from tests.conftest import tiny_config
from tests.model.peers import CONFIGS
from tests.ranks import free_port
from tests.vllm.fake import MODEL, PARAMS, PROMPTS, FakeVLLM, content, engine_of, wait_until

# --- what is sent, and what becomes of it ---


def test_every_sampling_field_is_sent(fake):
    engine_of(fake).sample(PROMPTS[:1], 4, PARAMS, step=5)
    (body,) = fake.generated()
    assert body["token_ids"] == [1, 2, 3]
    assert body["sampling_params"] == {
        **{
            "n": 4,
            "temperature": 1.0,
            "top_k": 0,
            "top_p": 1.0,
            "min_p": 0.0,
            "max_tokens": 8,
            "min_tokens": 0,
        },
        **{
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "repetition_penalty": 1.0,
            "logprobs": 0,
            "detokenize": False,
        },
        **{"stop_token_ids": [7, 9], "ignore_eos": True, "seed": stream(3, 5, 0, 0) >> 1},
    }


@pytest.mark.parametrize("filters", [{"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}])
def test_filters_that_training_cannot_reproduce_are_refused(fake, filters):
    option = next(iter(filters)).replace("_", "-")
    with pytest.raises(UserError, match=f"--{option} .* cannot be used with --engine vllm"):
        engine_of(fake).sample(PROMPTS, 2, SamplingParams(max_tokens=4, **filters), step=0)
    assert not fake.generated()


def test_seeds_are_a_function_of_seed_step_prompt_and_sample(fake):
    engine = engine_of(fake)
    first = content(engine.sample(PROMPTS, 4, PARAMS, step=1))
    assert content(engine.sample(PROMPTS[::-1], 4, PARAMS, step=1)) == sorted(
        first, key=lambda s: (-s[0], s[1])
    )
    assert content(engine.sample(PROMPTS, 4, PARAMS, step=2)) != first
    assert content(engine.sample(PROMPTS, 4, SamplingParams(max_tokens=8, seed=4), step=1)) != first
    seeds = [b["sampling_params"]["seed"] + i for b in fake.generated() for i in range(4)]
    # the repeated step repeated its own, and no other seed occurs twice
    assert len(set(seeds)) == 3 * 6 * 4
    assert max(seeds) < 1 << 63


def test_samples_come_prompt_by_prompt_and_are_complete(fake):
    engine = engine_of(fake, window=3)
    samples = engine.sample(PROMPTS, 2, PARAMS, step=0)
    assert [(s.prompt.id, s.index) for s in samples] == [(p, i) for p in range(6) for i in range(2)]
    assert all(s.versions == [0] * len(s.token_ids) == [0] * len(s.logp) for s in samples)
    assert {s.stopped for s in samples} == {True, False}
    assert all(s.stopped == (len(s.token_ids) < 8) for s in samples)


def test_a_greedy_completion_is_requested_once_per_group(fake):
    samples = engine_of(fake).sample(
        PROMPTS[:1], 3, SamplingParams(temperature=0.0, max_tokens=4), step=0
    )
    assert [s.index for s in samples] == [0, 1, 2]
    assert samples[0].token_ids == samples[2].token_ids
    assert fake.generated()[0]["sampling_params"]["n"] == 1


def test_prefixes_of_other_weights_and_other_runs_are_never_reused(fake):
    engine = engine_of(fake)
    engine.sample(PROMPTS[:1], 1, PARAMS, step=0)
    engine.load(MODEL, 1)
    engine.sample(PROMPTS[:1], 1, PARAMS, step=1)
    other = engine_of(fake)
    other.load(MODEL, 1)
    other.sample(PROMPTS[:1], 1, PARAMS, step=1)
    assert len({b["cache_salt"] for b in fake.generated()}) == 3


def test_at_most_window_groups_are_under_way(fake):
    under_way, most, lock, full = 0, 0, threading.Lock(), threading.Event()
    answer = fake.answer

    def counted(path, body):
        nonlocal under_way, most
        with lock:
            under_way += path == "/inference/v1/generate"
            most = max(most, under_way)
        reply = answer(path, body)
        if path == "/inference/v1/generate":
            full.set() if most > 1 else full.wait(60)
            threading.Event().wait(0.02)  # long enough for the others to arrive, if they were let
        with lock:
            under_way -= path == "/inference/v1/generate"
        return reply

    fake.answer = counted
    engine_of(fake, window=2).sample(PROMPTS, 1, PARAMS, step=0)
    assert most == 2


# --- what is not trusted ---


def spoiled(fake, spoil, times=1000):
    """Let `spoil` change the first choice of the next `times` replies."""
    left = [times]

    def disturb(method, path, body):
        if path != "/inference/v1/generate" or not left[0]:
            return None
        left[0] -= 1
        reply = fake.answer(path, body)
        spoil(reply["choices"][0])
        return reply

    fake.disturb = disturb


@pytest.mark.parametrize("value", [-9999.0, float("nan"), float("-inf"), None])
def test_a_log_prob_that_is_not_finite_raises(fake, value):
    engine = engine_of(fake)
    spoiled(fake, lambda c: c["logprobs"]["content"][0].update(logprob=value))
    with pytest.raises(FloatingPointError, match="prompt 0 that is not finite at weight version 0"):
        engine.sample(PROMPTS[:1], 2, PARAMS, step=0)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda c: c.update(finish_reason="abort"),
        lambda c: c.update(index=1),
        lambda c: c["logprobs"]["content"].pop(),
        lambda c: c.pop("token_ids"),
        lambda c: c.update(weight_versions=[]),
        lambda c: c["weight_versions"][0].update(version="default"),
        lambda c: c["weight_versions"][0].update(version="0"),
        lambda c: c["weight_versions"][0].update(version=[]),
    ],
    ids=[
        "aborted",
        "index twice",
        "log-prob missing",
        "ids missing",
        "version missing",
        "other weights",
        "no trainer",
        "no label",
    ],
)
def test_an_incomplete_reply_is_discarded_and_the_group_requested_again(fake, spoil):
    engine = engine_of(fake)
    expected = content(engine.sample(PROMPTS, 2, PARAMS, step=0))
    spoiled(fake, spoil, times=1)
    assert content(engine.sample(PROMPTS, 2, PARAMS, step=0)) == expected
    assert engine.restarts == 1  # the server was taken for lost, and given the weights again


def test_a_server_whose_replies_are_all_incomplete_stops_the_run(fake):
    engine = engine_of(fake)
    spoiled(fake, lambda c: c.update(finish_reason="abort"))
    with pytest.raises(
        ServerLost,
        match=r"No vLLM server returns completions \(.* a completion of prompt . by 'abort'\)",
    ):
        engine.sample(PROMPTS, 2, PARAMS, step=0)


def test_a_server_that_lost_the_weights_is_sent_them_again(fake):
    engine = engine_of(fake)
    expected = content(engine.sample(PROMPTS, 2, PARAMS, step=0))
    fake.label, fake.weights = "default", {}  # as after a restart at the same address
    assert content(engine.sample(PROMPTS, 2, PARAMS, step=0)) == expected
    assert fake.weights.keys() == dict(MODEL.named_parameters()).keys()


# --- retries, and servers that die ---


def test_a_retry_after_status_5xx_returns_the_same_samples(fake):
    engine = engine_of(fake)
    expected = content(engine.sample(PROMPTS, 2, PARAMS, step=0))
    calls = []
    fake.disturb = lambda m, path, b: (
        503 if "generate" in path and not calls.append(1) and len(calls) < 3 else None
    )
    assert content(engine.sample(PROMPTS, 2, PARAMS, step=0)) == expected
    assert engine.restarts == 0


def test_when_one_of_two_servers_dies_the_other_does_the_work(fake):
    with FakeVLLM(tiny_config()) as other:
        engine = engine_of(fake, other, window=1)
        expected = content(engine.sample(PROMPTS, 2, PARAMS, step=0))
        dead = threading.Event()

        def die(method, path, body):
            other.http.server_close()
            dead.set()
            return 500

        other.disturb = die
        # so the other server gets a group before all are done
        fake.disturb = lambda m, path, b: dead.wait(60) and None
        assert content(engine.sample(PROMPTS, 2, PARAMS, step=0)) == expected
        assert [s.alive for s in engine.servers] == [True, False]
        engine.load(MODEL, 1)  # the sync continues without it
        assert [s.versions[0] for s in engine.sample(PROMPTS[:2], 1, PARAMS, step=1)] == [1, 1]


def test_a_server_that_comes_back_gets_the_weights_with_the_next_sync(fake):
    with FakeVLLM(tiny_config()) as other:
        engine = engine_of(fake, other, interval=0.02)
        engine._lose(engine.servers[1], ServerError("for the test"))
        wait_until(lambda: engine.servers[1].error is None)  # a heartbeat was answered
        engine.load(MODEL, 1)
        assert [s.alive for s in engine.servers] == [True, True]
        assert other.label == fake.label == engine.sync.label(1)


def test_a_hanging_server_is_noticed_by_the_heartbeat(fake):
    with FakeVLLM(tiny_config()) as other:
        engine = engine_of(fake, other, interval=0.1, window=2)
        engine.servers[1].timeout = 0.4
        held, given, waited = threading.Event(), threading.Event(), []
        # it accepts, and never answers
        other.disturb = lambda m, path, b: given.set() or waited.append(held.wait(100))
        # so the other server gets a group before all are done
        fake.disturb = lambda m, path, b: given.wait(60) and None
        samples = engine.sample(PROMPTS, 2, PARAMS, step=0)
        assert len(samples) == 12
        assert [s.alive for s in engine.servers] == [True, False]
        assert waited == []  # nobody waited for it to answer
        held.set()


def test_a_server_that_a_dead_trainer_left_paused_is_repaired(fake):
    engine = engine_of(fake, interval=0.1)
    expected = content(engine.sample(PROMPTS, 2, PARAMS, step=0))
    fake.running.clear()  # as /pause does
    assert content(engine.sample(PROMPTS, 2, PARAMS, step=0)) == expected
    assert engine.restarts == 1


def test_without_any_server_the_run_stops_after_server_patience():
    with FakeVLLM(tiny_config()) as fake:
        engine = engine_of(fake)
        engine.patience = 0.6
        fake.stop()
        begin = time.monotonic()
        with pytest.raises(
            ServerLost,
            match=r"No vLLM server is left \(.*\); the run stops; .* continue with --resume",
        ):
            engine.sample(PROMPTS, 2, PARAMS, step=0)
        assert 0.6 <= time.monotonic() - begin < 60
        with pytest.raises(ServerLost):
            engine.load(MODEL, 1)


# --- bad input: one sentence, which names the option or the prompt ---


def test_an_address_without_a_server_is_reported():
    with pytest.raises(
        UserError,
        match=r"--server: http://127.0.0.1:\d+ did not answer /nanogrpo .*; start serve.py there",
    ):
        engine_of(f"http://127.0.0.1:{free_port()}", load=False)


@pytest.mark.parametrize(
    "url",
    [
        "ftp://x:1",
        "http://",
        "http://:8000",
        "http://127.0.0.1:port",
        "http://127.0.0.1",
        "http://127.0.0.1:99999",
    ],
)
def test_a_malformed_address_is_refused(url):
    with pytest.raises(UserError, match=r"is not an address; write it as http://127.0.0.1:8000"):
        Server(url)


@pytest.mark.parametrize(
    "field", ["vocab_size", "hidden_size", "num_hidden_layers", "tie_word_embeddings", "rope_theta"]
)
def test_a_server_of_another_model_is_refused(fake, field):
    fake.facts["model"][field] = 77
    with pytest.raises(
        UserError, match=rf"serves another model: its {field} is 77, but --model has"
    ):
        engine_of(fake, load=False)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_server_of_the_same_model_is_accepted(tmp_path, name):
    """A server describes the config that transformers has read, with all defaults filled in."""
    cfg = CONFIGS[name]
    (tmp_path / "config.json").write_text(json.dumps(cfg.to_dict()))
    model = SimpleNamespace(
        hf_config=transformers.AutoConfig.from_pretrained(tmp_path), dtype="", max_model_len=64
    )
    config = SimpleNamespace(
        model_config=model, parallel_config=SimpleNamespace(world_size_across_dp=1)
    )
    state = SimpleNamespace(engine_client=SimpleNamespace(vllm_config=config))
    info = json.loads(json.dumps(auth.describe(state)))
    check_server("here", info, cfg, 64, "")
    other = dataclasses.replace(cfg, rope_scaling=Scaling("linear", 3.0))
    with pytest.raises(
        UserError, match=r"its rope_scaling is .*, but --model has .*'factor': 3\.0"
    ):
        check_server("here", info, other, 64, "")


def test_a_server_with_another_rope_scaling_is_refused(fake):
    fake.facts["model"]["rope_scaling"] = {"rope_type": "linear", "factor": 2.0}
    with pytest.raises(
        UserError, match=r"its rope_scaling is \{'rope_type': 'linear'.*but --model has None"
    ):
        engine_of(fake, load=False)


def test_a_context_that_is_too_short_is_reported(fake):
    with pytest.raises(
        UserError,
        match=r"has a context of 256 tokens, but prompt and completion need 300; start serve.py",
    ):
        engine_of(fake, max_len=300, load=False)


def test_a_server_that_is_not_a_sidecar_is_refused(fake):
    fake.disturb = lambda m, path, b: 404
    with pytest.raises(
        UserError, match=r"is not a sidecar of this project; start it with serve.py"
    ):
        engine_of(fake, load=False)


def test_a_wrong_secret_is_reported(fake):
    fake.disturb = lambda m, path, b: 401
    with pytest.raises(UserError, match="refuses the secret; set NANOGRPO_SECRET to the one"):
        engine_of(fake, load=False)


def test_weights_arrive_in_the_servers_dtype(fake):
    fake.facts["dtype"] = "bfloat16"
    engine_of(fake)
    assert all(
        torch.equal(fake.weights[n], p.detach().bfloat16()) for n, p in MODEL.named_parameters()
    )
