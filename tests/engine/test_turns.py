"""Completions in several turns: which tokens the model wrote, and which are trained on. A single
turn equals the engine without turns.

Read next: nanogrpo/engine/turns.py, tests/grpo/test_packing.py.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest
import torch

import train
from nanogrpo.config import Config
from nanogrpo.engine.base import SamplingParams
from nanogrpo.engine.local import LocalEngine
from nanogrpo.engine.turns import TurnsEngine
from nanogrpo.errors import UserError
from nanogrpo.grpo import loss as grpo
from nanogrpo.grpo import packing
from nanogrpo.model.tokenizer import Tokenizer
from nanogrpo.rewards import plugin
from nanogrpo.types import Prompt, Sample
from tests.conftest import SOLO, arguments, packed, positions_of, steps, tiny_model
from tests.engine.chat import Rendezvous


@pytest.fixture(scope="module")
def tokenizer(tiny_base):
    return Tokenizer(tiny_base)


CALCULATOR = Path(train.__file__).parent / "examples" / "calculator.py"
PROMPTS = [Prompt(i, f"{i}+1=", [50 + i, 14, 20, 30]) for i in range(3)]
PARAMS = SamplingParams(max_tokens=16, stop_token_ids=(3,), seed=5)


def engine_of(tokenizer, function=None):
    model = tiny_model(vocab_size=tokenizer.vocab_size)
    engine = LocalEngine(model.cfg, max_len=32, device="cpu")
    engine.load(model, 7)
    if function is None:
        return engine
    return TurnsEngine(engine, function, tokenizer, tokenizer.vocab_size, SOLO.gather)


def logp_given_prompt(model, sample):
    """Return the model's log-probs of a completion, from one forward over the sequence."""
    ids = torch.tensor(sample.prompt.token_ids + sample.token_ids)
    logp = model(ids, *positions_of([len(ids)])).log_softmax(-1)
    before = len(sample.prompt.token_ids) - 1
    return logp[before:-1].gather(1, torch.tensor(sample.token_ids)[:, None])[:, 0]


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
        logp = logp_given_prompt(model, s)
        # tokens after an answer are the model's too, given the answer
        for i in s.model_token_indices:
            assert logp[i].item() == pytest.approx(s.logp[i], abs=1e-5)


def test_turns_do_not_depend_on_the_other_samples(tokenizer):
    alone = engine_of(tokenizer, ask_and_answer).sample(PROMPTS[1:2], 16, PARAMS, step=0)
    among = engine_of(tokenizer, ask_and_answer).sample(PROMPTS, 16, PARAMS, step=0)[16:32]
    assert [s.token_ids for s in alone] == [s.token_ids for s in among]
    other = engine_of(tokenizer, ask_and_answer).sample(PROMPTS[1:2], 16, PARAMS, step=1)
    assert [s.token_ids for s in alone] != [s.token_ids for s in other]


def test_special_tokens_in_an_answer_do_not_end_a_turn(tokenizer):
    special = ["<|pad|>", "<|user|>", "<|assistant|>", "<|end|>"]

    def tool(samples, turns):
        for s, token in zip(samples, special):
            turns.observe(s, f"{token}!")
        turns.generate(samples)

    for s, token in zip(engine_of(tokenizer, tool).sample(PROMPTS[:1], 4, PARAMS, step=0), special):
        answered = s.token_ids[: s.is_model_token.index(True)]
        assert tokenizer.decode(answered) == f"{token}!"[:16]
        assert not {tokenizer.encode(each)[0] for each in special} & set(answered)


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
        logp = logp_given_prompt(model, s)
        torch.testing.assert_close(logp, torch.tensor(s.logp), rtol=0, atol=1e-5)


# --- training ---


@pytest.mark.parametrize("share", [True, False])
def test_only_model_tokens_carry_loss_but_later_tokens_see_the_answers(share):
    prompt = Prompt(0, "", [5, 6])
    answered = Sample(
        prompt,
        0,
        [10, 11, 12, 13, 14],
        [-1.0, -2.0, 0.0, -4.0, 0.0],
        True,
        [0] * 5,
        is_model_token=[True, True, False, True, False],
        advantage=1.0,
    )
    plain = Sample(prompt, 1, [20, 21], [-5.0, -6.0], True, [0] * 2, advantage=-1.0)
    cfg = Config(num_generations=2, generation_batch_size=2, share_prompts=share)
    assert packing.sizes([answered, plain], cfg) == [
        packing.Size(0, 2, 4, 3),
        packing.Size(0, 2, 2, 2),
    ]
    (batch,) = packed([answered, plain], cfg)
    assert batch.targets.tolist() == [10, 11, 13, 20, 21]
    assert batch.sampling_logp.tolist() == [-1.0, -2.0, -4.0, -5.0, -6.0]
    assert batch.sample.tolist() == [0, 0, 0, 1, 1]
    assert batch.weight.tolist() == pytest.approx(
        [1 / 5] * 5
    )  # dapo: the model's tokens of the step
    before = [batch.tokens[r].item() for r in batch.rows]
    # 13 is predicted from the answer 12; the answer 14 after it is not computed
    assert before == [6, 10, 12, 6, 20]
    assert 14 not in batch.tokens.tolist()


def test_the_gradient_equals_that_of_a_masked_sequence(tokenizer):
    """Compared with autograd over the full sequence, with the answers' losses masked by hand."""
    samples = engine_of(tokenizer, ask_and_answer).sample(PROMPTS, 4, PARAMS, step=0)
    assert any(not all(s.is_model_token) for s in samples)
    cfg = Config(num_generations=4, generation_batch_size=12, loss_type="grpo")
    for i, s in enumerate(samples):
        s.advantage = (-1.0) ** i * (1 + i / 7)
    model = tiny_model(vocab_size=tokenizer.vocab_size)

    for batch in packed(samples, cfg):
        model.forward_packed(batch, grpo.objective(batch, cfg)).loss.backward()
    ours = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()

    for s in samples:
        logp = logp_given_prompt(model, s)
        own = torch.tensor(s.is_model_token)
        (-(s.advantage * logp * own).sum() / own.sum() / len(samples)).backward()
    for n, p in model.named_parameters():
        torch.testing.assert_close(ours[n], p.grad, rtol=2e-4, atol=2e-6)


# --- several ranks ---


def test_ranks_with_different_numbers_of_turns_end_together(tokenizer):
    """As with a vLLM server, all ranks make each engine call together.

    Their samples equal those of a single process.
    """
    meeting, calls, results = Rendezvous(2), Rendezvous(2), [None, None]

    class Meets:
        def __init__(self, engine, rank):
            self.engine, self.call = engine, calls.of(rank)

        def __getattr__(self, name):
            return getattr(self.engine, name)

        def sample(self, prompts, n, *args, **more):
            assert len(set(self.call(n))) == 1  # all ranks make the same kind of call
            return self.engine.sample(prompts, n, *args, **more)

    def work(rank):
        engine = engine_of(tokenizer, [ask_and_answer, one_turn][rank])
        engine.engine, engine.gather = Meets(engine.engine, rank), meeting.of(rank)
        results[rank] = engine.sample(PROMPTS[rank : rank + 1], 8, PARAMS, step=0)

    threads = [threading.Thread(target=work, args=(r,)) for r in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(30)
    alone = engine_of(tokenizer, ask_and_answer).sample(PROMPTS[:1], 8, PARAMS, step=0)
    assert [s.token_ids for s in results[0]] == [s.token_ids for s in alone]
    assert len(results[1]) == 8


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
        (fails, "fails raised KeyError: 'tool'; fix the function"),
        (leaves, "leaves raised SystemExit: 0; fix the function"),
        (
            lambda samples, turns: turns.generate(samples, stop=("no such token",)),
            "choose a text that is one token",
        ),
        (fills(logp=[-1.0]), "of different lengths"),
        (fills(versions=[7, 6]), "with versions other than 7: give turns.engine.version"),
        (fills(is_model_token=[False, False]), "with no token that the model wrote"),
        (fills(token_ids=[1, 10_000]), "outside the vocabulary"),
        (fills(logp=[-1.0, float("nan")]), "not a log-probability"),
        (
            fills(
                token_ids=[1] * 17, logp=[-1.0] * 17, versions=[7] * 17, is_model_token=[True] * 17
            ),
            "17 tokens",
        ),
    ],
)
def test_a_rollout_that_cannot_be_trained_on_is_an_error(tokenizer, function, sentence):
    with pytest.raises(UserError, match=sentence):
        engine_of(tokenizer, function).sample(PROMPTS, 2, PARAMS, step=0)


# --- the calculator ---


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<think>34+5=", "39"),
        ("34+5=39,39-7=", "32"),
        ("1-9=", "-8"),
        ("=", ""),
        ("3*4=", ""),
        ("1+2= ", ""),
        ("+2=", ""),
    ],
)
def test_the_calculator(text, answer):
    assert plugin.load(f"{CALCULATOR}:calculate", "")(text) == answer


@pytest.mark.parametrize(
    "more", [[], ["--max-resample-times", "2", "--num-iterations", "2", "--beta", "0.1"]]
)
def test_a_run_with_the_calculator(tiny_base, files, tmp_path, more):
    options = ["--rollout", f"{CALCULATOR}:rollout", "--max-completion-length", "16", *more]
    assert train.main(arguments(tiny_base, files, tmp_path, *options)) == 0
    rows = steps(tmp_path)
    assert len(rows) == 3
    # of the model's tokens, given the answers
    assert all(row["sampling/sampling_logp_difference/max"] < 1e-5 for row in rows)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            ["--rollout", "nowhere"],
            "--rollout: 'nowhere' is neither package.module:name nor path/file.py:name",
        ),
        (["--rollout", f"{CALCULATOR}:no"], "has no function 'no'"),
        (
            ["--rollout", "no.such.module:f"],
            "importing 'no.such.module' raised ModuleNotFoundError",
        ),
        (
            ["--rollout", "a:b", "--engine", "vllm", "--max-staleness", "1"],
            "--rollout cannot be used with --max-staleness",
        ),
    ],
)
def test_options_that_cannot_work_are_errors(tiny_base, files, tmp_path, capsys, options, sentence):
    assert train.main(arguments(tiny_base, files, tmp_path, *options)) == 2
    assert sentence in capsys.readouterr().err
