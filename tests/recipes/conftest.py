"""A run of a recipe that learns. Read next: test_learning.py."""

import statistics
from collections.abc import Callable

import pytest

from tests.conftest import arguments, steps
from tests.recipes import run


@pytest.fixture
def learned(tiny_base, files, tmp_path) -> Callable[..., tuple[float, float]]:
    """A function that trains with a recipe, and returns the means of a metric over the first five
    steps and over the last five.
    """

    def learned(recipe, metric: str, options: str) -> tuple[float, float]:
        assert run(recipe, arguments(tiny_base, files, tmp_path / "run", options)) == 0
        values = [row[metric] for row in steps(tmp_path / "run")]
        return statistics.fmean(values[:5]), statistics.fmean(values[-5:])

    return learned
