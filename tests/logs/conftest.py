"""A sample without a model, for the tests of this folder.

    from tests.logs.conftest import sample

Read next: test_metrics.py.
"""

from nanogrpo.types import Prompt, Sample


def sample(n: int, stopped: bool = True, prompt: int = 3, **rewards: float | None) -> Sample:
    """A completion of `n` tokens to a prompt of `prompt` tokens, with these rewards."""
    given = [r for r in rewards.values() if r is not None]
    fields = {"text": "text", "rewards": rewards, "reward": sum(given) if given else None}
    return Sample(Prompt(0, "?", [1] * prompt), 0, [2] * n, [0.0] * n, stopped, [0] * n, **fields)
