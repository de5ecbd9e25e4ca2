"""The local engine with pictures: its log-probs against the trainer's, completions that leave a
full cache, and completions in several turns.

Read next: test_train.py.
"""

import dataclasses

import pytest
import torch

from nanogrpo import Config
from nanogrpo.engine.base import SamplingParams
from nanogrpo.extras import chat, commands
from nanogrpo.extras.tools.turns import TurnsEngine
from nanogrpo.extras.vision.model import VisionDecoder
from tests.conftest import logp_of
from tests.engine import small
from tests.vision.base import load, prompts, write_data

MAX_LEN = 96
PARAMS = SamplingParams(max_tokens=24, stop_token_ids=range(9), seed=5)


def make_engine(base, **options):
    return small.make_engine(load(base), decoder=VisionDecoder, max_len=MAX_LEN, **options)


def same(samples, expected) -> None:
    assert [s.token_ids for s in samples] == [s.token_ids for s in expected]
    for s, e in zip(samples, expected):
        torch.testing.assert_close(torch.tensor(s.logp), torch.tensor(e.logp), atol=1e-5, rtol=1e-5)


def check_logp(base, samples, temperature=1.0) -> None:
    cfg = Config(num_generations=2, temperature=temperature)
    for s, logp in zip(samples, logp_of(load(base), samples, cfg)):
        own = torch.tensor(s.logp)[list(s.model_token_indices)]
        torch.testing.assert_close(own, logp, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("paged", [False, True])
def test_log_probs_equal_the_trainers(base, paged, temperature):
    params = dataclasses.replace(PARAMS, temperature=temperature)
    samples = make_engine(base, slots=5, paged=paged).sample(prompts(base), 4, params, step=0)
    check_logp(base, samples, temperature)


def test_a_completion_that_was_put_back_is_prefilled_with_its_pictures(base):
    """The pool holds one context, so completions leave it and go on later from their tokens."""
    params = dataclasses.replace(PARAMS, max_tokens=48, stop_token_ids=())
    expected = make_engine(base).sample(prompts(base), 2, params, step=0)
    engine = make_engine(base, paged=True, cache_tokens=MAX_LEN)
    same(engine.sample(prompts(base), 2, params, step=0), expected)
    assert engine.metrics()["sampling/put_back"] > 3


def test_a_picture_is_encoded_once_for_its_group(base):
    engine, seen = make_engine(base), []
    engine.model.model.visual.register_forward_pre_hook(lambda _, args: seen.extend(args[1]))
    found = prompts(base)
    engine.sample(found, 4, PARAMS, step=0)
    assert seen == [size for p in found if p.inputs for size in p.inputs.grid]


def test_later_turns_see_the_pictures_too(base, tokenizer):
    def rollout(samples, turns):
        turns.turn(samples, ())
        for s in samples:
            turns.observe(s, "7+")
        turns.turn([s for s in samples if turns.room(s) > 0], ())

    engine = TurnsEngine(make_engine(base), rollout, tokenizer, 108, lambda state: [state])
    params = dataclasses.replace(PARAMS, max_tokens=30, stop_token_ids=range(50))
    samples = engine.sample(prompts(base), 2, params, step=0)
    assert any(False in s.is_model_token and s.is_model_token[-1] for s in samples)
    check_logp(base, samples)


def test_an_evaluation_shows_the_pictures_and_a_chat_has_none(base, tmp_path, capsys):
    data, out = write_data(tmp_path / "data.jsonl", count=6), tmp_path / "eval"
    options = ["--data", str(data), "--reward-funcs", "accuracy", "--device", "cpu"]
    argv = [str(base), *options, "--max-completion-length", "4", "--output-dir", str(out)]
    assert commands.main(["eval", *argv]) == 0
    assert "<picture 48×32>1+1=" in (out / "eval.jsonl").read_text()
    assert '"images"' not in (out / "eval.jsonl").read_text()
    assert "".join(chat.Chat(Config(model=str(base)), "cpu").answer("3+4="))
