"""Sampling ahead: admission by counting, the bound on every token, errors that reach the loop.
Against the fake server.
"""

import contextlib
import threading
from collections import Counter
from types import SimpleNamespace
from unittest import mock

import pytest

from nanogrpo import Config
from nanogrpo.extras.ahead import AheadEngine, staleness
from nanogrpo.types import Sample
from tests.conftest import SOLO, refused
from tests.vllm.fake import MODEL, PARAMS, PROMPTS, FakeVLLM, engine_of


@pytest.fixture
def fake():
    with FakeVLLM(MODEL.cfg) as server:
        yield server


@pytest.fixture
def ahead_of(fake):
    """A function that makes an engine, which is closed after the test."""
    with contextlib.ExitStack() as stack:

        def ahead_of(bound=1, stop=6, prompts=PROMPTS[:2], n=2):
            cfg = Config(num_generations=n, max_steps=stop, max_staleness=bound)
            draw = mock.Mock(return_value=prompts)
            run = SimpleNamespace(cfg=cfg, sampling=PARAMS, world=SOLO, draw=draw)
            return stack.enter_context(contextlib.closing(AheadEngine(engine_of(fake), run)))

        yield ahead_of


def take(ahead: AheadEngine, step: int) -> list[Sample]:
    return ahead.sample(PROMPTS[:2], 2, PARAMS, step)


def asked_steps(fake) -> int:
    # seeds: a repeated request counts once
    return len({b["sampling_params"]["seed"] for b in fake.generated()}) // 2


@pytest.mark.parametrize("bound", [1, 2])
def test_no_step_is_asked_for_before_its_time_and_none_beyond_the_last(fake, ahead_of, bound):
    ahead = ahead_of(bound)
    for step in range(6):
        samples = take(ahead, step)
        assert all(v >= step - bound for s in samples for v in s.versions)
        assert ahead.run.draw.call_count == min(step + bound + 1, 6)
        ahead.engine.load(MODEL, step + 1)
    assert asked_steps(fake) == 6


def test_a_token_that_is_too_old_stops_the_run(ahead_of):
    ahead = ahead_of()
    take(ahead, 0)
    take(ahead, 1)
    with refused("--max-staleness 1: a token of step 2 was sampled"):
        take(ahead, 2)  # nothing was loaded in between


def test_an_error_of_the_thread_reaches_the_loop(fake, ahead_of):
    ahead = ahead_of()
    fake.disturb = lambda m, path, b: 400 if "generate" in path else None
    with pytest.raises(Exception, match="/inference/v1/generate"):
        take(ahead, 0)


def test_the_thread_that_samples_ahead_ends_with_the_engine(fake, ahead_of):
    """Also between two groups, when there is no connection to cut: the interpreter waits for this
    thread.
    """
    ahead = ahead_of(stop=9, prompts=PROMPTS * 50, n=1)
    usual, many, closed = fake.answer, threading.Event(), threading.Event()

    def answer(path, body):
        if len(fake.generated()) > 10 and path == "/inference/v1/generate":
            many.set()
            closed.wait(60)
        return usual(path, body)

    fake.answer = answer
    ahead.engine.servers[0].abort = lambda: None  # as if it came between two requests
    ahead._request(0)
    assert many.wait(60)
    ahead.close()
    closed.set()
    (thread,) = ahead.pool._threads
    thread.join(60)
    assert not thread.is_alive()
    assert len(fake.generated()) < 50 * len(PROMPTS)  # not at the end of its work


def test_the_figures_of_staleness():
    assert staleness([Counter([2, 3, 3]), Counter([3])], 3) == {
        "staleness/mean": 0.25,
        "staleness/max": 1,
        "staleness/mixed": 0.5,
    }
