"""Evolution strategies: the update is the paper's sum over the population, in numpy.

Read next: examples/recipes/evolution.py.
"""

import numpy as np
import torch

from examples.recipes import evolution
from nanogrpo.engine.base import stream
from nanogrpo.model import checkpoint
from tests.conftest import arguments
from tests.recipes import run

SIGMA, RATE = 0.1, 0.08
OPTIONS = f"--sigma {SIGMA} --learning-rate {RATE} --log-completions"


def test_the_weights_move_by_the_sum_of_noise_and_fitness(tiny_base, files, tmp_path, monkeypatch):
    """Salimans et al. 2017, algorithm 1, over all members instead of pairs, in float64. The fitness
    is computed from the rewards of the completions.
    """
    fitness = []

    class Spy(evolution.Evolution):
        def advantages(self, rewards, by_function):
            fitness.append(rewards.numpy().mean(0))
            return super().advantages(rewards, by_function)

    monkeypatch.setattr(evolution, "Evolution", Spy)
    argv = arguments(tiny_base, files, tmp_path, f"{OPTIONS} --max-steps 1 --seed 3")
    assert run(evolution, argv) == 0
    before, after = (
        dict(checkpoint.load_model(folder).named_parameters())
        for folder in (tiny_base, tmp_path / "checkpoint-1")
    )
    z = [np.mean([np.sign(one - other) for other in fitness[0]]) for one in fitness[0]]
    assert len({*z}) > 2  # members differ
    for i, name in enumerate(before):
        total = 0.0
        for member, score in enumerate(z):
            random = torch.Generator().manual_seed(stream(3, 0, member // 2, i))
            noise = torch.randn(before[name].shape, generator=random).double().numpy()
            total = total + score * noise * (-1) ** member
        moved = (after[name] - before[name]).detach().double().numpy()
        np.testing.assert_allclose(moved, RATE / (4 * SIGMA) * total, atol=2e-6)


def test_the_reward_rises(learned):
    more = "--max-steps 20 --num-generations 16 --generation-batch-size 32"
    first, last = learned(evolution, "reward", f"{OPTIONS} {more}")
    assert last > first + 0.1
