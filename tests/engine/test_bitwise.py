"""`--bitwise`: for every token, the engine's log-prob is the trainer's, to the last bit.

tests/configurations.py has the row for two ranks and for resuming. Read next:
tests/kernels/test_exact.py.
"""

from types import SimpleNamespace

import pytest
import torch

from nanogrpo.extras import bitwise
from nanogrpo.model import gpu_attention
from tests import configurations
from tests.conftest import SOLO, steps

# two pages of the cache per completion, and memory for two pages: completions are evicted, and
# resumed after their tokens have been prefilled
LONG = "--max-completion-length 40"
EVICTED = f"{LONG} --cache-tokens 64"
GAP = ("sampling/k3", "sampling/sampling_logp_difference/max")


def test_the_bits_depend_neither_on_the_slots_nor_on_the_strips_nor_on_the_ranks(rows_of, tmp_path):
    usual = rows_of(folder="usual")
    assert any(row[GAP[1]] > 0 for row in usual)
    runs = {
        options: rows_of(f"--bitwise {options}", folder=options or "all")
        for options in (
            *("", "--max-concurrent 1", "--max-concurrent 7", "--token-budget 40"),
            "--top-k 40 --top-p 0.9 --min-p 0.1",
            "--dtype float16 --token-budget 40",
            f"{LONG} --max-concurrent 7",
            EVICTED,
        )
    }
    row = "the same bits in engine and trainer"
    two = steps(configurations.on_ranks(2, row, tmp_path / "two"))
    for step in (step for run in (two, *runs.values()) for step in run):
        assert [step[name] for name in GAP] == [0.0, 0.0]
    whole = runs[""]
    assert whole == runs["--max-concurrent 1"] == runs["--max-concurrent 7"]
    evictions = [step.pop("sampling/put_back") for step in runs[EVICTED]]
    assert min(evictions) > 3
    long = runs[f"{LONG} --max-concurrent 7"]
    assert [step.pop("sampling/put_back") for step in long] == [0, 0, 0]
    assert runs[EVICTED] == long
    # the gradients of smaller strips are added up in another order
    assert runs["--token-budget 40"][0]["entropy"] == pytest.approx(whole[0]["entropy"], abs=1e-7)
    for mine, theirs in zip(whole, usual):
        assert mine["reward"] == theirs["reward"]
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)


def test_layers_with_a_window_keep_their_attention():
    """A reward model may have them, although the policy may not."""
    with bitwise.Bitwise().running(SimpleNamespace(world=SOLO)):
        ours, theirs = (gpu_attention.backend("cpu", torch.float32, 64, n) for n in (0, 8))
    assert ours.__module__ == bitwise.__name__
    assert theirs.keywords == {"window": 8}
