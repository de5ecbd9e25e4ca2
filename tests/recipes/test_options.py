"""Options that a recipe refuses, because a run would compute something else without a word.

Read next: examples/recipes/.
"""

import pytest

from examples.recipes import branch, curriculum, ema, evolution, scale_rl, self_play
from tests.conftest import refused

AHEAD = {"max_staleness": 1, "engine": "vllm"}
OWN = {"environment_factory": "own.py:Own", "reward_funcs": ("accuracy",)}


@pytest.mark.parametrize(
    ("recipe", "given"),
    [
        *((recipe, AHEAD) for recipe in (branch, curriculum, ema, scale_rl)),
        *((recipe, OWN) for recipe in (curriculum, scale_rl)),
        *((recipe, {"max_resample_times": 1}) for recipe in (evolution, self_play)),
    ],
)
def test_an_option_that_a_recipe_cannot_follow_is_refused(recipe, given):
    needed = {"model": "m", "num_generations": 8, "data": ("sums.jsonl",), "eval_steps": 1}
    recipe.Options(**needed).validate()
    with refused(f"--{next(iter(given)).replace('_', '-')}"):
        recipe.Options(**needed, **given).validate()
