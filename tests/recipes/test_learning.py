"""Recipes that train with a reward raise it. Read next: docs/recipes.md."""

import importlib
import statistics

import pytest

from tests.conftest import arguments, steps


@pytest.mark.parametrize("recipe", ["branch", "critic", "curriculum", "rejection", "scale_rl"])
def test_the_reward_rises(recipe, tiny_base, files, tmp_path):
    more = ["--max-steps", "30", "--learning-rate", "3e-3", "--num-iterations", "2"]
    argv = arguments(tiny_base, files, tmp_path / "run", *more)
    program = importlib.import_module(f"examples.recipes.{recipe}")
    assert program.main(program.Options, program.features, argv) == 0
    rewards = [row["reward"] for row in steps(tmp_path / "run")]
    assert statistics.fmean(rewards[-5:]) > statistics.fmean(rewards[:5]) + 0.2, rewards
