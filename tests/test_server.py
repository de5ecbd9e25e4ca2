"""Whether a server is the trainer's to use, against the fake server: one that hangs, and one that another trainer uses.

Read before: test_vllm_engine.py. The other end of the claim: test_serve.py. Read next: test_vllm_trouble.py.
"""

from __future__ import annotations

import threading
import time

import pytest
from conftest import tiny_config
from fake_vllm import MODEL, FakeVLLM, engine_of

from nanogrpo.errors import UserError
from nanogrpo.server import ServerError


@pytest.fixture
def fake():
    with FakeVLLM(tiny_config()) as server:
        yield server


def test_a_hanging_server_costs_the_syncs_nothing_until_it_answers_again(fake):
    with FakeVLLM(tiny_config()) as other:
        engine = engine_of(fake, other)
        engine.servers[1].moment = 0.3
        held = threading.Event()
        other.disturb = lambda m, path, b: held.wait(100) and None  # it accepts, and never answers
        engine._lose(engine.servers[1], ServerError("for the test"))
        begin = time.monotonic()
        for version in range(1, 5):
            engine.load(MODEL, version)
            assert [s.alive for s in engine.servers] == [True, False]
        assert time.monotonic() - begin < 60  # less than one wait for an answer
        held.set()
        engine.servers[1].knocking.join(60)
        engine.load(MODEL, 5)
        assert [s.alive for s in engine.servers] == [True, True]
        assert other.label == engine.sync.label(5)


def test_a_server_of_another_trainer_is_waited_for_and_then_refused(fake):
    left = [2]

    def taken(method, path, body):
        left[0] -= 1
        return 409 if left[0] >= 0 else None

    fake.disturb = taken
    engine_of(fake, patience=30.0)  # its trainer was killed a moment ago
    left[0] = 10**6
    with pytest.raises(UserError, match=r"is taken \(as told\); give each trainer a server of its own"):
        engine_of(fake)


def test_a_trainer_is_heard_while_it_trains(fake, monkeypatch):
    monkeypatch.setattr("nanogrpo.server.BEAT", 0.02)
    heard = threading.Event()
    engine = engine_of(fake)
    fake.disturb = lambda m, path, b: (path == "/health" and heard.set()) or None
    assert heard.wait(60)
    engine.close()
