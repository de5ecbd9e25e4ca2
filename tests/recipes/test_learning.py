"""Recipes that train with a reward raise it. Read next: docs/recipes.md."""

import importlib

import pytest

RECIPES = dict.fromkeys(["branch", "critic", "curriculum", "rejection", "scale_rl"], "even")
RECIPES |= dict.fromkeys(["process", "turns"], "even_by_token")


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_reward_rises(recipe, learned, files):
    more = "--max-steps 30 --learning-rate 3e-3 --num-iterations 2 --reward-funcs"
    more += f" {files}/reward.py:{RECIPES[recipe]}"
    module = importlib.import_module(f"examples.recipes.{recipe}")
    first, last = learned(module, "reward", more)
    assert last > first + 0.2
