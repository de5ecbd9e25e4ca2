"""Samples, a runner and the file of reward functions that the tests of this folder share.

    from tests.rewards.conftest import FUNCTIONS, groups, make_samples, runner

Read next: functions.py.
"""

from pathlib import Path
from typing import Any

from nanogrpo import Config
from nanogrpo.rewards.scorer import Scorer
from nanogrpo.types import Prompt, Sample
from tests.conftest import SOLO, completion

FUNCTIONS = Path(__file__).with_name("functions.py")


def runner(*functions: Any, timeout: float = 0.0, weights=(), features=()) -> Scorer:
    """Return the runner of these functions, which may be names."""
    cfg = Config(reward_timeout=timeout, reward_weights=tuple(weights))
    return Scorer(cfg, SOLO.device, features, functions)


def make_samples(texts=("7", "8"), prompt="3+4=", prompt_id=17, **columns) -> list[Sample]:
    """One group: a sample for each text."""
    shared = Prompt(id=prompt_id, text=prompt, token_ids=[1], columns=columns)
    return [completion(shared, [5, 2], i, text=text) for i, text in enumerate(texts)]


def groups(count=5) -> list[Sample]:
    """`count` groups of two samples, with the prompts "0", "1", …"""
    return [s for p in range(count) for s in make_samples(("", "a"), str(p), prompt_id=p)]
