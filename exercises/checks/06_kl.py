"""Check exercise 6 against `k3`, and its means against the exact KL of a small distribution."""

import torch
from nanogrpo.kernels.reference import policy

from exercises.hints import expect, given, matches

START = "Begin with x = ref_logp - logp."


def check(answer) -> None:
    g = torch.Generator().manual_seed(0)
    logp, ref = torch.randn(2, 12, generator=g, dtype=torch.float64).log_softmax(1)
    x = ref - logp
    weighted = (
        "Do not multiply by the probability. The samples come from π, so likely tokens occur more"
        " often, and the plain mean over the samples is the mean over π."
    )
    mistakes = {
        weighted: logp.exp() * (logp - ref),
        "This is the KL in the other direction: k1 is the mean of log π - log ref.": x,
        "The KL is a mean of signed values. Without the absolute value, k1 has that mean.": (
            x.abs()
        ),
    }
    matches("k1", answer.k1(logp, ref), logp - ref, mistakes)
    mistakes = {
        weighted: logp.exp() * policy.k3(x),
        "Your x has the wrong sign: x = ref_logp - logp.": (-x).exp() + x - 1,
        "The 1 is missing: where both models agree, k3 must be 0.": x.exp() - x,
        "This is k2 = x²/2. It is close to k3 near 0, but has another mean.": x * x / 2,
        "The x is missing: e^x - 1 alone has the mean 0.": x.exp() - 1,
    }
    found = answer.k3(logp, ref)
    matches("k3", found, policy.k3(x), mistakes)
    exact = (logp.exp() * (logp - ref)).sum()
    matches("the mean of k3", (logp.exp() * found).sum(), exact)
    expect(
        given(answer.MEAN_OF_THE_DIFFERENCE, "MEAN_OF_THE_DIFFERENCE") == 0,
        "Both functions are right, but the mean of e^x - 1 is not. e^x is ref/π: write"
        " Σ π (ref/π - 1) as two sums, and remember that probabilities sum to 1.",
    )
