"""Rewards of single tokens: what reward functions receive, and the recipes for steps and turns."""

import json
import math
from statistics import mean, stdev

import pytest
import torch

from examples.recipes import process, turns
from nanogrpo.model.checkpoint import load_model
from nanogrpo.model.tokenizer import Tokenizer
from nanogrpo.types import Prompt
from tests.conftest import completion, positions_of, said, write_rows

FUNCTION = """
import json, pathlib

def by_token(prompts, completion_ids, logp, entropy, pieces, **kwargs):
    rows = list(zip(prompts, completion_ids, logp, entropy, pieces))
    if pieces[0] != "of the data":  # the column of the held-out data
        pathlib.Path(__file__).with_name("seen.json").write_text(json.dumps(rows))
    return [[float(i % 2) for i in ids] for ids in completion_ids]
"""


def test_reward_functions_may_ask_for_numbers_of_the_tokens(rows_of, tiny_base, tmp_path):
    (tmp_path / "reward.py").write_text(FUNCTION)
    options = f"--reward-funcs {tmp_path}/reward.py:by_token --max-steps 1 --token-budget 60"
    options += f" --temperature 0.7 --eval-data {tmp_path}/held_out.jsonl --eval-steps 1"
    write_rows(tmp_path / "held_out.jsonl", [{"prompt": "1+1=", "pieces": "of the data"}])
    rows_of(options, folder="run")
    tokenizer, model = Tokenizer(tiny_base), load_model(tiny_base)
    rows = json.loads((tmp_path / "seen.json").read_text())
    assert len(rows) == 16
    for prompt, ids, logp, entropy, pieces in rows:
        given = tokenizer.encode_prompt(prompt)
        with torch.no_grad():
            logits = model(torch.tensor(given + ids), *positions_of([len(given) + len(ids)]))
        found = (logits[len(given) - 1 : -1] / 0.7).log_softmax(-1)  # [M, V]
        torch.testing.assert_close(torch.tensor(entropy), -(found.exp() * found).sum(-1))
        torch.testing.assert_close(
            torch.tensor(logp), found.gather(1, torch.tensor(ids)[:, None])[:, 0]
        )
        assert (len(pieces), "".join(pieces)) == (
            len(ids),
            tokenizer.decode(ids, skip_special_tokens=False),
        )


NAN = math.nan
GROUP = [[NAN, 1.0, NAN, 0.5], [0.0, NAN], [NAN, NAN, NAN], [2.0, -1.0, 0.25]]  # by token


def test_a_token_gets_the_normalized_rewards_of_the_steps_that_end_at_or_after_it():
    """Shao et al. 2024, section 4.1.3, one sum at a time."""
    given = [r for rewards in GROUP for r in rewards if r == r]
    found = process.process_advantages([torch.tensor(r).double().numpy() for r in GROUP])
    for rewards, advantages in zip(GROUP, found):
        for t, advantage in enumerate(advantages):
            later = [(r - mean(given)) / (stdev(given) + 1e-4) for r in rewards[t:] if r == r]
            assert advantage == pytest.approx(sum(later), abs=1e-12)


def test_a_turn_is_compared_with_the_same_turn_of_the_group():
    group = [[1.0, 0.0, 2.0], [0.5, 1.5], [0.0], [2.0, 2.0, 2.0]]
    found = turns.turn_advantages([torch.tensor(r).numpy() for r in group])
    for i, rewards in enumerate(group):
        for k in range(len(rewards)):
            others = [sum(each[k:]) for each in group if len(each) > k]
            expected = (sum(rewards[k:]) - mean(others)) / (stdev(others) + 1e-4)
            assert found[i][k] == pytest.approx(expected, rel=1e-6, abs=1e-12)


def test_equal_rewards_give_no_gradient():
    assert not any(map(any, process.process_advantages([torch.full((3,), 0.1).numpy()] * 2)))
    assert not turns.turn_advantages([torch.full((2,), 0.1).numpy()] * 3).any()


@pytest.mark.parametrize("rewards_of", [process.token_rewards, turns.turn_rewards])
def test_rewards_of_tokens_turns_and_completions_are_added_with_their_weights(rewards_of):
    flags = [True, True, False, True, True]
    s = completion(Prompt(0, "", [1]), [5] * 5, is_model_token=flags)
    s.rewards, s.reward = {"a": 4.0, "b": 3.0, "c": None}, 11.0
    s.token_rewards = {"a": [None, 1.0, None, 3.0, None]}
    weights = {"a": 2.0, "b": 1.0, "c": 9.0}
    if rewards_of is turns.turn_rewards:
        assert rewards_of(s, [(0, 2), (3, 5)], weights).tolist() == [2.0, 9.0]
    else:
        found = rewards_of(s, weights)
        assert found[[1, 3, 4]].tolist() == [2.0, 6.0, 3.0]
        assert [*map(math.isnan, found)] == [True, False, True, False, False]


def test_a_step_of_the_task_is_right_if_it_is_the_next_one():
    text = "<think>34+5=39,39-7=31,31+1=32</think><answer>32</answer>"
    ((*rewards,),) = process.steps([said("34+5-7+1=")], [["<think>", *text[7:]]])
    assert {i + 6: r for i, r in enumerate(rewards) if r is not None} == {13: 1.0, 21: 0.0, 29: 0.0}
