"""A plugin of pytest for exercise 17: each test runs twice, with an intact and a corrupted sync.

EXERCISE=exercises/17_corrupt_the_sync.py python -m pytest -p exercises.corrupting TEST
"""

import os
from pathlib import Path

import pytest


@pytest.fixture(autouse=True, params=["intact-sync", "corrupted-sync"])
def _sync(request):
    from exercises import tiny
    from exercises.check import load

    if request.param == "intact-sync":
        yield
    else:
        with tiny.corrupted(load(Path(os.environ["EXERCISE"])).corrupt):
            yield
