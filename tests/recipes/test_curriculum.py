"""Prompts are replayed with the probabilities of the docstring. A row of tests/configurations.py
shows that a resumed run replays the same ones, and that two ranks do.

Read next: examples/recipes/curriculum.py.
"""

from types import SimpleNamespace

import numpy as np

from examples.recipes import curriculum
from nanogrpo.types import Prompt, Sample
from tests.conftest import SOLO, completion


def samples(prompt: Prompt, *rewards: float) -> list[Sample]:
    return [
        completion(prompt, [1], j, rewards={"right": r, "short": 9.0})
        for j, r in enumerate(rewards)
    ]


def test_pass_rates_are_moving_averages_and_decide_what_is_replayed():
    prompts = [Prompt(i, "", [1]) for i in range(6)]
    fresh = [[0, 1, 2, 3], [4, 5, 0, 1]]
    run = SimpleNamespace(
        cfg=curriculum.Options(replay_share=0.5, pass_rate_step=0.25),
        prompts=prompts,
        world=SOLO,
    )
    feature = curriculum.Curriculum()
    feature.model(None, run)

    def draw(seed, step):
        return feature.draw(run, [prompts[i] for i in fresh[step]], seed, step)

    assert [p.id for p in draw(0, 0)] == fresh[0]  # there is nothing to replay yet
    rewards = {0: [[1, 1], [0, 0], [1, 0]], 1: [[0, 0], [1, 0]], 2: [[1, 1]], 3: [[0, 1]]}
    for i, rounds in rewards.items():
        for given in rounds:
            feature.scored(run, samples(prompts[i], *given), 0)
    for i, rounds in rewards.items():
        means = [np.mean(given) for given in rounds]
        shares = [0.75 ** (len(means) - 1), *[0.25 * 0.75**k for k in range(len(means) - 1)][::-1]]
        np.testing.assert_allclose(feature.rate[i], np.dot(shares, means))
    drawn = [[p.id for p in draw(seed, 1)] for seed in range(4000)]
    assert all(ids[:2] == [4, 5] and len({*ids}) == 4 for ids in drawn)
    assert {i for ids in drawn for i in ids[2:]} == {0, 1, 3}  # 2 is solved
    weights = {i: float(feature.rate[i] * (1 - feature.rate[i])) for i in (0, 1, 3)}
    for i, weight in weights.items():
        assert abs(np.mean([ids[2] == i for ids in drawn]) - weight / sum(weights.values())) < 0.03
    assert draw(7, 1) == draw(7, 1)
