"""Tests of the recipes in examples/recipes/."""

from types import ModuleType

from nanogrpo.types import Prompt, Sample
from tests.conftest import completion


def run(recipe: ModuleType, argv: list[str]) -> int:
    """Train with a recipe, and return the exit status."""
    return recipe.main(recipe.Options, recipe.features, argv)


def two_groups(prompts: list[Prompt]) -> list[Sample]:
    """Return two completions of each of two prompts, with different lengths and advantages."""
    return [
        completion(prompts[i // 2], [7 + i] * n, i % 2, logp=-5.0, advantage=a)
        for i, (n, a) in enumerate([(2, 1.0), (5, -1.0), (4, 0.0), (3, 2.0)])
    ]
