"""Sampling one token: the hash against its definition, tokens against the softmax, and edge cases.

The statistics use fixed keys, so they are the same in every run. test_truncation.py compares the
filters with transformers. Read next: tests/engine/test_local.py.
"""

import pytest
import torch
from nanogrpo.kernels.reference.sample import uniform

from nanogrpo.engine.base import SamplingParams, stream
from nanogrpo.engine.sampler import filter_logits, sample


def test_uniform_is_splitmix64():
    """It equals the same hash in Python's unbounded integers, for any size of key and counter."""
    word = (1 << 64) - 1

    def mix(key, counter):
        z = (key + (counter + 1) * 0x9E3779B97F4A7C15) & word
        z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & word
        z = ((z ^ z >> 27) * 0x94D049BB133111EB) & word
        return ((z ^ z >> 31) >> 11) * 2.0**-53

    keys = [0, 1, (1 << 63) - 1, *(stream(0, s, 3, 1) for s in range(50))]
    for counter in (0, 1, 77, 131_071):
        got = uniform(torch.tensor(keys), torch.full((len(keys),), counter))
        assert got.tolist() == [mix(k, counter) for k in keys]
    # the first output of the published generator at seed 0
    assert mix(0, 0) == (0xE220A8397B1DCDAF >> 11) * 2.0**-53


@pytest.mark.parametrize(
    "changes",
    [{}, {"temperature": 0.6}, {"top_k": 9, "top_p": 0.9}],
    ids=["plain", "cooler", "filtered"],
)
def test_tokens_follow_the_softmax(changes):
    params = SamplingParams(**changes)
    n, logits = 200_000, torch.randn(40, generator=torch.Generator().manual_seed(3)) * 1.5
    kept = filter_logits(logits[None], params)
    tokens, logp = sample(
        kept.expand(n, -1), torch.full((n,), stream(9, 9, 9, 9)), torch.arange(n), params
    )
    expected = (kept.double() / params.temperature).softmax(-1)[0]
    counts, possible = torch.bincount(tokens, minlength=40).double(), expected > 0
    assert (counts[~possible] == 0).all()
    wanted, freedom = n * expected[possible], possible.sum() - 1
    # Pearson's statistic, about Normal(0, 1) if the counts come from the expected distribution
    statistic = ((counts[possible] - wanted) ** 2 / wanted).sum() - freedom
    assert abs(statistic / (2 * freedom) ** 0.5) < 4
    torch.testing.assert_close(logp, expected.log()[tokens].float())


def test_top_p_adds_up_integers_because_a_gpu_adds_floats_in_any_order(monkeypatch):
    # `x | 0` is an error if x has floats
    monkeypatch.setattr(torch.Tensor, "cumsum", lambda x, dim: (x | 0).cumsum_(dim))
    filter_logits(torch.zeros(1, 4), SamplingParams(top_p=0.5))


@pytest.mark.parametrize("u", [0.0, 2.0**-53, 0.5, 1 - 2.0**-24, 1 - 2.0**-53])
def test_a_token_of_probability_zero_is_never_sampled(u, monkeypatch):
    monkeypatch.setattr(
        "nanogrpo.kernels.reference.sample.uniform",
        lambda key, counter: torch.full(key.shape, u, dtype=torch.float64),
    )
    logits = torch.randn(8, 5000, generator=torch.Generator().manual_seed(0))
    logits[:, :7] = logits[:, 2000:2010] = logits[:, -9:] = float("-inf")
    logits[0, 7:] = float("-inf")
    logits[0, 2005] = 0.0  # the only token that is left
    key = torch.zeros(8, dtype=torch.int64)
    for params in (
        SamplingParams(),
        SamplingParams(top_p=0.3),
        SamplingParams(top_k=1),
    ):
        kept = filter_logits(logits, params)
        token, logp = sample(kept, key, key, params)
        assert token[0] == 2005
        assert logp.isfinite().all()
        assert kept.gather(1, token[:, None]).isfinite().all()
