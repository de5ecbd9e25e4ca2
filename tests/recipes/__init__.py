"""Tests of the recipes in examples/recipes/."""

from types import ModuleType


def run(recipe: ModuleType, argv: list[str]) -> int:
    """Train with a recipe, and return the exit status."""
    return recipe.main(recipe.Options, recipe.features, argv)
