"""Two ranks are one: they draw, sample, score, train and log as one process does, up to rounding.

The table of configurations is tests/configurations.py. Read next: test_fsdp.py, which compares the
gradients of more ranks to 1e-6.
"""

import gzip
import json

import pytest

from tests import configurations
from tests.conftest import steps

# rounding itself, so small everywhere but not equal
GAP = "sampling/sampling_logp_difference"


@pytest.mark.parametrize("name", configurations.names("ranks"))
def test_two_ranks_are_one(name, tmp_path):
    row, one = configurations.ROWS[name], configurations.uninterrupted(name)
    two = configurations.on_ranks(2, name, tmp_path / "two")
    for a, b in zip(steps(one), steps(two), strict=True):
        assert a.keys() == b.keys()
        for key in a:
            limit = 1e-4 if key.startswith(GAP) else row.tolerance * max(1, abs(a[key]))
            assert abs(a[key] - b[key]) <= limit, (a["step"], key, a[key], b[key])
    a, b = configurations.saved(one), configurations.saved(two)
    assert a.keys() == b.keys()
    for key in a:
        error = (a[key].float() - b[key].float()).norm() / a[key].float().norm().clamp(min=1)
        assert error <= 10 * row.tolerance, (key, error)
    assert logged(one) == logged(two)


def logged(output) -> dict[str, list]:
    """Return the texts, rewards and tokens in each file of completions, without rounded numbers."""
    found = {}
    for path in (output / "completions").glob("*.jsonl*"):
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        columns = "prompt", "completion", "reward", "stopped", "row", "id", "text"
        found[path.name] = [[r.get(c) for c in columns] for r in map(json.loads, data.splitlines())]
    return found
