"""Completions in several turns: which tokens the model wrote. A single turn equals the engine
without turns.

Read next: nanogrpo/extras/tools/turns.py, tests/grpo/test_packing.py.
"""

import sys
from pathlib import Path

import pytest
import torch

import train
from nanogrpo.engine.base import SamplingParams
from nanogrpo.extras.tools.turns import TurnsEngine
from nanogrpo.model.tokenizer import Tokenizer
from nanogrpo.rewards import plugin
from nanogrpo.types import Prompt
from tests.conftest import SOLO, logp_alone, refused, tiny_model
from tests.engine.small import make_engine


@pytest.fixture(scope="module")
def tokenizer(tiny_base):
    return Tokenizer(tiny_base)


CALCULATOR = Path(train.__file__).parent / "examples" / "calculator.py"
PROMPTS = [Prompt(i, f"{i}+1=", [50 + i, 14, 20, 30]) for i in range(3)]
PARAMS = SamplingParams(max_tokens=16, stop_token_ids=(3,), seed=5)


def engine_of(tokenizer, function=None):
    engine = make_engine(tiny_model(vocab_size=tokenizer.vocab_size), max_len=32)
    if function is None:
        return engine
    return TurnsEngine(engine, function, tokenizer, tokenizer.vocab_size, SOLO.gather)


def one_turn(samples, turns):
    assert turns.generate(samples) == []  # nothing to answer


def test_one_turn_samples_what_the_engine_samples(tokenizer):
    plain = engine_of(tokenizer).sample(PROMPTS, 4, PARAMS, 2)
    mine = engine_of(tokenizer, one_turn).sample(PROMPTS, 4, PARAMS, 2)
    for a, b in zip(plain, mine, strict=True):
        assert (a.prompt.id, a.index, a.token_ids, a.logp, a.stopped, a.versions) == (
            *(b.prompt.id, b.index, b.token_ids, b.logp, b.stopped, b.versions),
        )
        assert b.is_model_token == [True] * len(b.token_ids)


LETTERS = tuple("abcdefghijklmnop")


def ask_and_answer(samples, turns):
    """End a turn at any lower-case letter, and answer with two tokens."""
    while samples := turns.generate(samples, stop=LETTERS):
        for s in samples:
            turns.observe(s, "42")


def test_answers_are_read_but_do_not_count_as_the_models_tokens(tokenizer):
    samples = engine_of(tokenizer, ask_and_answer).sample(PROMPTS, 16, PARAMS, step=0)
    assert sum(not all(s.is_model_token) for s in samples) > 10
    answer, letters = tokenizer.encode("42"), tokenizer.encode("".join(LETTERS))
    model = tiny_model(vocab_size=tokenizer.vocab_size)
    for s in samples:
        assert len(s.token_ids) == len(s.logp) == len(s.versions) == len(s.is_model_token) <= 16
        answered = [i for i, own in enumerate(s.is_model_token) if not own]
        for i in answered:
            assert s.logp[i] == 0.0
        for start in (i for i in answered if s.is_model_token[i - 1]):
            assert s.token_ids[start - 1] in letters
            assert s.token_ids[start : start + 2] == answer[: 16 - start]
        assert s.stopped == (s.token_ids[-1] == 3)
        logp = logp_alone(model, s)
        # tokens after an answer are the model's too, given the answer
        for i in s.model_token_indices:
            assert logp[i].item() == pytest.approx(s.logp[i], abs=1e-5)


def some_and_the_rest(samples, turns):
    turns.generate(samples[::2])  # as many as complete groups have, but of other prompts
    turns.generate(samples[1::2])


def in_another_order(samples, turns):
    turns.generate(samples[1:] + samples[:1])


@pytest.mark.parametrize("function", [some_and_the_rest, in_another_order])
def test_a_completion_continues_its_own_prompt_whichever_samples_are_passed(tokenizer, function):
    model = tiny_model(vocab_size=tokenizer.vocab_size)
    for s in engine_of(tokenizer, function).sample(
        [*PROMPTS, Prompt(3, "3+1=", [53, 14, 20, 30])], 4, PARAMS, step=0
    ):
        logp = logp_alone(model, s)
        torch.testing.assert_close(logp, torch.tensor(s.logp), rtol=0, atol=1e-5)


# --- bad functions ---


def fills(**changes):
    def function(samples, turns):
        for s in samples:
            values = {
                "token_ids": [1, 2],
                "logp": [-1.0, -1.0],
                "versions": [7, 7],
                "is_model_token": [True, True],
            } | changes
            vars(s).update({k: list(v) for k, v in values.items()})

    return function


def test_a_function_may_set_the_tokens_itself(tokenizer):
    samples = engine_of(tokenizer, fills()).sample(PROMPTS, 2, PARAMS, step=0)
    assert all(s.token_ids == [1, 2] for s in samples)


def fails(samples, turns):
    raise KeyError("tool")


def leaves(samples, turns):
    sys.exit(0)


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        (lambda samples, turns: None, "with no token that the model wrote: call turns.generate"),
        (fills(is_model_token=[False, False]), "with no token that the model wrote"),
        (fails, "fails raised KeyError: 'tool'; fix the function"),
        (leaves, "leaves raised SystemExit: 0; fix the function"),
        (
            lambda samples, turns: turns.generate(samples, stop=("no such token",)),
            "choose a string that is a single token",
        ),
        (fills(logp=[-1.0]), "tokens that cannot be trained on"),
        (fills(versions=[7, 6]), r"turns.engine.version \(7\)"),
        (fills(token_ids=[1, 10_000]), "an id of the model's tokenizer"),
        (fills(logp=[-1.0, float("nan")]), "a log-probability"),
        (fills(**dict.fromkeys(("token_ids", "is_model_token"), [1] * 17)), "length 16, tool"),
    ],
)
def test_a_rollout_that_cannot_be_trained_on_is_an_error(tokenizer, function, sentence):
    with refused(sentence):
        engine_of(tokenizer, function).sample(PROMPTS, 2, PARAMS, step=0)


# --- the calculator ---


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<think>34+5=", "39"),
        ("1-9=", "-8"),
        ("1+2= ", ""),
    ],
)
def test_the_calculator(text, answer):
    assert plugin.load(f"{CALCULATOR}:calculate", "")(text) == answer
