"""The client against a fake server (fake.py): its requests, the replies it trusts, and retries.

Read next: test_real.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import json
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
import transformers

from nanogrpo.engine.base import SamplingParams, stream
from nanogrpo.errors import UserError
from nanogrpo.model.rope import Scaling
from nanogrpo.vllm import auth, protocol
from nanogrpo.vllm.protocol import check_server
from nanogrpo.vllm.server import Server, ServerError, ServerLost
from tests.conftest import tiny_config
from tests.model.peers import CONFIGS
from tests.ranks import free_port
from tests.vision.tiny import vision_config
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


def token(value):
    """Return a function that replaces the first token of a completion."""

    def spoil(choice):
        choice["token_ids"][0] = choice["logprobs"]["content"][0]["token_id"] = value

    return spoil


def span(**changes):
    return lambda choice: choice["weight_versions"][0].update(changes)


def logprob(value):
    return lambda choice: choice["logprobs"]["content"][0].update(logprob=value)


def too_many(choice):
    choice["token_ids"] = [1] * 9
    choice["logprobs"]["content"] = [{"token_id": 1, "logprob": -1.0}] * 9
    span(end=9)(choice)


def split(choice):
    """Label the tokens by two spans that overlap."""
    end, version = len(choice["token_ids"]), choice["weight_versions"][0]["version"]
    choice["weight_versions"] = [
        {"version": version, "start": 0, "end": end},
        {"version": version, "start": end - 1, "end": end},
    ]


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (token(-1), "returned tokens outside the vocabulary"),
        (token(tiny_config().vocab_size), "returned tokens outside the vocabulary"),
        (token(10**30), "returned tokens outside the vocabulary"),
        (token(True), "returned tokens outside the vocabulary"),
        (token(1.0), "returned tokens outside the vocabulary"),
        (token("1"), "returned tokens outside the vocabulary"),
        (token(None), "returned tokens outside the vocabulary"),
        (lambda c: c.update(token_ids=[]), "returned 0 tokens in a completion"),
        (lambda c: c.update(token_ids="abc"), "returned tokens outside the vocabulary"),
        (lambda c: c.update(token_ids=7), "an unexpected reply"),
        (too_many, "returned 9 tokens in a completion"),
        (lambda c: c["logprobs"]["content"].append({}), "an unexpected reply"),
        (lambda c: c["logprobs"]["content"].pop(), "returned log-probs of other tokens"),
        (lambda c: c.update(logprobs=None), "an unexpected reply"),
        (logprob(0.01), "returned a log-prob of 0.01, which is above 0"),
        (logprob("-1"), "returned a log-prob that is not a number"),
        (logprob(True), "returned a log-prob that is not a number"),
        (logprob([]), "returned a log-prob that is not a number"),
        (logprob(-(10**400)), "an unexpected reply"),
        (lambda c: c.update(index="0"), "returned a completion with index '0'"),
        (lambda c: c.update(index=-1), "returned a completion with index -1"),
        (lambda c: c.update(index=2), "returned a completion with index 2"),
        (lambda c: c.update(index=False), "returned a completion with index False"),
        (lambda c: c.update(index=1), "returned a completion twice"),
        (span(end=10**18), "returned weight versions of other tokens"),
        (span(end=-1), "returned weight versions of other tokens"),
        (span(end="1"), "returned weight versions of other tokens"),
        (span(start=1), "returned weight versions of other tokens"),
        (span(start=-1), "returned weight versions of other tokens"),
        (span(start="0"), "returned weight versions of other tokens"),
        (split, "returned weight versions of other tokens"),
        (span(version={}), "an unexpected reply"),
        (span(version="other"), "sampled from weights that this trainer did not send"),
        (lambda c: c.update(weight_versions=None), "an unexpected reply"),
        (lambda c: c.update(finish_reason=[[]]), r"ended a completion of prompt 0 by \[\[\]\]"),
    ],
)
def test_an_impossible_reply_is_refused_in_one_sentence(fake, spoil, sentence):
    params = protocol.body(PROMPTS[0], 2, PARAMS, 0)["sampling_params"]
    request = protocol.GroupRequest(PROMPTS[0], 2, {"sampling_params": params})
    reply = {"choices": [fake.choice(i, params) for i in range(2)]}
    size = tiny_config().vocab_size
    samples = protocol.read(reply, request, {"default": 3}, "here", size)
    assert [s.versions[0] for s in samples] == [3, 3]
    spoil(reply["choices"][0])
    with pytest.raises(ServerError, match=f"^here {sentence}|^here returned {sentence}") as e:
        protocol.read(json.loads(json.dumps(reply)), request, {"default": 3}, "here", size)
    assert "\n" not in str(e.value)


JUNK = [None, True, False, -1, 0, 1, 7, 10**18, 10**400, 1.5, float("nan"), float("inf"), 1e308]
JUNK += [
    "",
    "1",
    "x" * 5000,
    [],
    {},
    [[]],
    [None],
    {"a": 1},
    [1] * 50,
    json.loads("[" * 400 + "]" * 400),
]


def mutated(rng: random.Random, value):
    """Return a copy of JSON in which one part is replaced, removed or repeated."""
    value = copy.deepcopy(value)
    parts = [(value, key) for key in value]
    for part, key in parts:  # the list grows
        inner = part[key]
        if isinstance(inner, dict):
            parts += [(inner, k) for k in inner]
        elif isinstance(inner, list):
            parts += [(inner, k) for k in range(len(inner))]
    part, key = rng.choice(parts)
    how = rng.randrange(4)
    if how == 0:
        del part[key]
    elif how == 1 and isinstance(part, list):
        part.insert(key, part[key])
    else:
        part[key] = rng.choice(JUNK)
    return value


def test_mutated_replies_give_valid_samples_or_an_error_of_the_server(fake):
    rng, size, counts, errors = random.Random(0), tiny_config().vocab_size, Counter(), []
    request = protocol.GroupRequest(PROMPTS[0], 2, protocol.body(PROMPTS[0], 2, PARAMS, 0))
    params = request.body["sampling_params"]
    valid = {"choices": [fake.choice(i, params) for i in range(2)]}
    for _ in range(3000):
        reply = mutated(rng, valid)
        try:
            samples = protocol.read(reply, request, {"default": 3}, "here", size)
        except (ServerError, FloatingPointError) as e:
            errors.append(str(e))
            counts[type(e)] += 1
            continue
        counts[list] += 1
        for i, s in enumerate(samples):
            assert (s.index, len(s.token_ids)) == (i, len(s.logp))
            assert all(type(t) is int and 0 <= t < size for t in s.token_ids)
            assert all(-9999 < x < 0.01 for x in s.logp)
            assert s.versions == [3] * len(s.token_ids)
    assert min(counts.values()) > 20
    assert len(counts) == 3
    assert max(map(len, errors)) < 1000


def test_mutated_descriptions_are_accepted_or_refused_in_one_sentence(fake):
    rng, accepted, errors = random.Random(0), 0, []
    for _ in range(2000):
        facts = mutated(rng, fake.facts)
        try:
            check_server("here", facts, MODEL.cfg, 64, "")
        except UserError as e:
            errors.append(str(e))
            continue
        accepted += 1
        assert all(facts["model"].get(k) == v for k, v in fake.facts["model"].items())
        assert type(facts["max_model_len"]) is type(facts["workers"]) is int
        assert facts["dtype"] == "float32"
    assert 0 < accepted < 1000
    assert all(e.startswith("--server here ") and len(e) < 1000 for e in errors)


@pytest.mark.parametrize("choices", [None, 7, "ab", {}, [], [1, 2], [{}], [{}] * 3, [[], []]])
def test_choices_of_another_kind_are_refused(choices):
    request = protocol.GroupRequest(PROMPTS[0], 2, protocol.body(PROMPTS[0], 2, PARAMS, 0))
    for reply in ({"choices": choices}, {}):
        with pytest.raises(ServerError, match=r"here returned (an unexpected reply|\d of 2)"):
            protocol.read(reply, request, {}, "here", 100)


def test_a_log_prob_may_exceed_0_by_rounding(fake):
    engine = engine_of(fake)
    spoiled(fake, logprob(1e-6))
    assert engine.sample(PROMPTS[:1], 2, PARAMS, step=0)[0].logp[0] == 1e-6
    assert engine.restarts == 0


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"[" * 200_000, r"with status 200: \[\[\["),
        (b'{"a":' * 200_000, r"with status 200: .*a"),
        (b'{"choices": ' + b"[" * 900 + b"]" * 900 + b"}", "returned 1 of 2|with status 200"),
        (b"\xff\xfe", "with status 200"),
        (b"1" * 5000, "with status 200"),
        (b'"' + b"x" * (5 << 20) + b'"', "with more than 4,210,688 bytes"),
    ],
    ids=["deep list", "deep object", "deep field", "not UTF-8", "long number", "long"],
)
def test_an_answer_that_cannot_be_read_loses_the_server_and_the_run_stops(fake, data, problem):
    engine = engine_of(fake)
    fake.disturb = lambda m, path, b: data if "generate" in path else None
    with pytest.raises(ServerLost, match=problem) as e:
        engine.sample(PROMPTS[:1], 2, PARAMS, step=0)
    assert len(str(e.value)) < 1000


@contextlib.contextmanager
def answering(answer) -> Iterator[Server]:
    """Yield the client of a server that reads one request and then calls `answer` to send bytes."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def work():
            with contextlib.suppress(OSError), listening.accept()[0] as peer:
                data = b""
                while not data.endswith(b"\r\n\r\n"):
                    data += peer.recv(1 << 16)
                answer(peer)

        threading.Thread(target=work, daemon=True).start()
        yield Server(f"http://127.0.0.1:{listening.getsockname()[1]}", timeout=60.0)


def test_an_answer_cut_short_is_not_taken_for_an_empty_one():
    """Only that of /health has no body."""
    with (
        answering(
            lambda peer: peer.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n")
        ) as server,
        pytest.raises(ServerError, match=r"did not answer /health .*IncompleteRead"),
    ):
        server.get("/health")


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    "start",
    [
        b"HTTP/1.1 200 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n",
        CHUNKED + b"ffffffffff\r\n",
        CHUNKED + b"-1\r\n",  # which http.client takes for a chunk that ends with the connection
    ],
)
def test_an_answer_without_end_is_not_kept(start):
    sent = [0]

    def flood(peer):
        peer.sendall(start)
        while sent[0] < 1 << 30:
            sent[0] += peer.send(b"x" * (1 << 20))

    with (
        answering(flood) as server,
        pytest.raises(ServerError, match="answered /is_paused with more than 4,194,304 bytes"),
    ):
        server.get("/is_paused")
    assert sent[0] < 64 << 20  # with what fits into the buffers of the sockets


@pytest.mark.parametrize(
    ("start", "drop"),
    [
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
        (b"HTTP/1.1 200 OK\r\nX: ", b"x"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n", b"x"),
        (CHUNKED + b"0\r\n", b"X: x\r\n"),
    ],
)
def test_an_answer_that_arrives_drop_by_drop_is_late(start, drop):
    def drip(peer):
        peer.sendall(start)
        while True:
            peer.sendall(drop)
            time.sleep(0.01)

    with (
        answering(drip) as server,
        pytest.raises(ServerError, match=r"did not answer /is_paused within 0\.2 s"),
    ):
        server.get("/is_paused", timeout=0.2)


@pytest.mark.parametrize("answer", [{}, {"is_paused": 0}, {"is_paused": None}])
def test_a_server_that_does_not_say_whether_it_is_paused_is_lost(fake, answer):
    engine = engine_of(fake, interval=0.02)
    fake.disturb = lambda m, path, b: answer if path == "/is_paused" else None
    wait_until(lambda: engine.problem is not None)
    assert "does not say whether it is paused" in str(engine.problem)


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


@contextlib.contextmanager
def four():
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(FakeVLLM(tiny_config())) for _ in range(4)]


def test_all_servers_get_the_weights_at_the_same_time():
    together = threading.Barrier(4, timeout=60)

    def disturb(method, path, body):
        if path == "/update_weights":
            together.wait()

    with four() as servers:
        for server in servers:
            server.disturb = disturb
        engine = engine_of(*servers)
        assert [s.alive for s in engine.servers] == [True] * 4
        for server in servers:
            assert server.label == engine.sync.label(0)
            assert all(torch.equal(server.weights[n], p) for n, p in MODEL.named_parameters())


def test_each_server_that_gets_no_weights_is_named(caplog):
    with four() as servers:
        engine = engine_of(*servers)
        for server in servers[1:3]:
            server.disturb = lambda m, path, b: 500 if path == "/update_weights" else None
        engine.load(MODEL, 1)
        assert [s.alive for s in engine.servers] == [True, False, False, True]
        lost = [r.getMessage() for r in caplog.records if "lost a server" in r.getMessage()]
        assert sorted(line.split()[3] for line in lost) == sorted(s.url for s in servers[1:3])


def test_each_server_that_cannot_be_used_is_named(caplog):
    with four() as servers:
        engine = engine_of(*servers, load=False)
        for server in servers[2:]:
            server.facts["model"] = server.facts["model"] | {"vocab_size": 77}
        with pytest.raises(UserError, match=f"--server {servers[2].url} serves another model"):
            engine.load(MODEL, 0)
        assert f"--server {servers[3].url} serves another model" in caplog.text


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
        "http://127.0.0.1:\u0661\u0662",  # digits of another script
        "http://[::1",
        "http://[::1:8000",
        "http://a..b:8000",
        f"http://{'a' * 64}.example:8000",
        "http://ünï.example:8000",
        "http://user@127.0.0.1:8000",
        "http://127.0.0.1:8000/x",
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


@pytest.mark.parametrize("value", [None, "256", 0, -1, True, 1e9, [[]]])
@pytest.mark.parametrize("fact", ["model", "vision", "max_model_len", "dtype", "workers", "gpus"])
def test_a_description_that_is_not_a_sidecars_is_refused(fake, fact, value):
    fake.facts[fact] = value
    with pytest.raises(
        UserError,
        match=rf"is not a sidecar of this project \(its {fact} is .*start it with serve.py",
    ):
        engine_of(fake, load=False)


@pytest.mark.parametrize("name", [*CONFIGS, "qwen3_vl"])
def test_a_server_of_the_same_model_is_accepted(tmp_path, name):
    """A server describes the config that transformers has read, with all defaults filled in."""
    cfg = CONFIGS.get(name) or vision_config()
    (tmp_path / "config.json").write_text(json.dumps(cfg.to_dict()))
    found = transformers.AutoConfig.from_pretrained(tmp_path)
    model = SimpleNamespace(
        hf_config=found,
        hf_text_config=found.get_text_config(),
        multimodal_config=None,
        dtype=torch.float32,
        max_model_len=64,
    )
    config = SimpleNamespace(
        model_config=model, parallel_config=SimpleNamespace(world_size_across_dp=1)
    )

    async def collective_rpc(method: str) -> list[dict]:
        assert method == "device_facts"
        return [{"gpu": gpu, "nccl": "2.29.7"} for gpu in ("A", "B")]

    client = SimpleNamespace(vllm_config=config, collective_rpc=collective_rpc)
    info = json.loads(json.dumps(asyncio.run(auth.describe(SimpleNamespace(engine_client=client)))))
    assert (info["gpus"], info["nccl"]) == (["A", "B"], "2.29.7")
    check_server("here", info, cfg, 64, "")
    other = dataclasses.replace(cfg, rope_scaling=Scaling("linear", 3.0))
    with pytest.raises(
        UserError, match=r"its rope_scaling is .*, but --model has .*'factor': 3\.0"
    ):
        check_server("here", info, other, 64, "")


def test_a_server_with_another_rope_scaling_is_refused(fake):
    fake.facts["model"]["rope_scaling"] = {"rope_type": "linear", "factor": 2.0}
    with pytest.raises(
        UserError, match=r"its rope_scaling is \{.*'rope_type': 'linear'.*but --model has None"
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
    with pytest.raises(UserError, match="refuses the secret; set NANOGRPO_SECRET to the one of"):
        engine_of(fake, load=False)


def test_weights_arrive_in_the_servers_dtype(fake):
    fake.facts["dtype"] = "bfloat16"
    engine_of(fake)
    assert all(
        torch.equal(fake.weights[n], p.detach().bfloat16()) for n, p in MODEL.named_parameters()
    )
