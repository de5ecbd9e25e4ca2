"""Samples and the file of reward functions that the tests of this folder share.

    from tests.rewards.conftest import FUNCTIONS, groups, make_samples

Read next: functions.py, clock.py.
"""

from pathlib import Path

from nanogrpo.types import Prompt, Sample

FUNCTIONS = Path(__file__).with_name("functions.py")


def make_samples(texts=("7", "8"), prompt="3+4=", prompt_id=17, **columns) -> list[Sample]:
    """One group: a sample for each text."""
    shared = Prompt(id=prompt_id, text=prompt, token_ids=[1], columns=columns)
    return [
        Sample(shared, i, [5, 2], [-1.0, -0.1], True, [0, 0], text=text)
        for i, text in enumerate(texts)
    ]


def groups(count=5) -> list[Sample]:
    """`count` groups of two samples, with the prompts "0", "1", …"""
    return [s for p in range(count) for s in make_samples(("", "a"), str(p), prompt_id=p)]
