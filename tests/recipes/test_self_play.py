"""Self-play: each question is answered by the same model, rewards and baselines are the paper's,
and the answers get better.

Read next: examples/recipes/self_play.py.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from examples.recipes import self_play
from nanogrpo.types import Prompt
from tests.conftest import completion, steps


@pytest.mark.parametrize(
    ("question", "right"),
    [("12+7-3=", "16"), ("5-9=", "-4"), ("12=", None), ("1+2", None), ("1+2=3+4=", None)],
)
def test_only_sums_are_valid_questions(question, right):
    assert self_play.answer(question) == right


def test_rewards_and_baselines_are_those_of_the_paper():
    """Zhao et al. 2025, equations 4 and 8: two groups of two questions, with three answers each.
    The second question of the first group is not valid, and nobody solves the first of the second.
    """
    table = [[1.0, 0.0, 1.0], [None] * 3, [0.0, 0.0, 0.0], [1.0, 1.0, 1.0]]
    samples = []
    for i, row in enumerate(table):
        ask = completion(Prompt(i // 2, "", [1]), [2], i % 2, rewards={"accuracy": 0.3})
        prompt = Prompt(-1 - i, "", [1], {"solution": None if i == 1 else "7"})
        answers = [completion(prompt, [2], j) for j in range(3)]
        for sample, reward in zip(answers, row):
            sample.reward, sample.rewards = reward, {"accuracy": reward}
        samples += [ask, *answers]
    feature = self_play.SelfPlay()
    feature.model(None, SimpleNamespace(cfg=self_play.Options(), longest_prompt=5))
    feature.scored(None, samples, 0)
    asks = np.array([1 / 3, -1.0, 0.0, 0.0])
    assert [s.reward for s in samples[::4]] == pytest.approx(list(asks))
    values = torch.tensor([np.nan if s.reward is None else s.reward for s in samples])
    found, _ = feature.advantages(values.double().view(2, 8), None)
    answers = np.array([1, 0, 1, 0, 0, 0, 1, 1, 1], float)
    found = found.reshape(4, 4).numpy()
    for ours, given in ((found[:, 0], asks), (found[[0, 2, 3], 1:].ravel(), answers)):
        np.testing.assert_allclose(ours, (given - given.mean()) / (given.std(ddof=1) + 1e-4))
    assert np.isnan(found[1, 1:]).all()  # which become 0


def test_the_answers_get_better(learned, tmp_path, monkeypatch):
    """Here, every question is valid. The model still answers its own questions."""
    monkeypatch.setattr(self_play, "answer", lambda question: "7")
    more = "--log-completions --max-steps 25 --generation-batch-size 32 --learning-rate 3e-3"
    first, last = learned(self_play, "rewards/even/mean", more)
    assert last > 1.3 * first
    for row in steps(tmp_path / "run"):
        mean = 0.25 * row["rewards/question/mean"] + 0.75 * row["rewards/even/mean"]
        assert row["reward"] == pytest.approx(mean)
