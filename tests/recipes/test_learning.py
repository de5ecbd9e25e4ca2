"""Recipes that train with a reward raise it. Read next: docs/recipes.md."""

import importlib
import statistics

import pytest

from tests.conftest import arguments, steps
from tests.recipes import run

RECIPES = dict.fromkeys(["branch", "critic", "curriculum", "rejection", "scale_rl"], "even")
RECIPES |= dict.fromkeys(["process", "turns"], "even_by_token")


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_reward_rises(recipe, tiny_base, files, tmp_path):
    more = "--max-steps 30 --learning-rate 3e-3 --num-iterations 2 --reward-funcs"
    function = f"{files}/reward.py:{RECIPES[recipe]}"
    argv = arguments(tiny_base, files, tmp_path, *more.split(), function)
    assert run(importlib.import_module(f"examples.recipes.{recipe}"), argv) == 0
    rewards = [row["reward"] for row in steps(tmp_path)]
    assert statistics.fmean(rewards[-5:]) > statistics.fmean(rewards[:5]) + 0.2, rewards
