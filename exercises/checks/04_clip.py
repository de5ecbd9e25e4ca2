"""Check exercise 4 against `policy_terms`."""

import torch
from nanogrpo.kernels.reference.policy import Clip, LossInputs, policy_terms

from exercises.hints import expect, given, matches

START = "ratio = (logp - old_logp).exp() comes first; then two products, and their torch.minimum."


def check(answer) -> None:
    ratio = torch.tensor([0.5, 0.9, 1.0, 1.1, 2.0] * 2, dtype=torch.float64)
    A = torch.tensor([1.5] * 5 + [-1.0] * 5, dtype=torch.float64)
    old = -torch.linspace(0.5, 3.0, 10, dtype=torch.float64)
    logp = old + ratio.log()
    right = policy_terms(logp, LossInputs(A, torch.ones_like(A), old), Clip(0.3, 0.3))[0]
    clamped = ratio.clamp(0.7, 1.3)
    inverse = 1 / ratio
    mistakes = {
        "You take the larger of the two products. It must be the smaller one.": (
            -torch.maximum(ratio * A, clamped * A)
        ),
        "There is only the clamped product. Without the min, a token that moved in the wrong"
        " direction has no gradient that brings it back.": -clamped * A,
        "Nothing is clipped yet: this is -ratio · A.": -ratio * A,
        "Your ratio is upside down: it is exp(logp - old_logp).": (
            -torch.minimum(inverse * A, inverse.clamp(0.7, 1.3) * A)
        ),
        "You use the difference of the log-probs as the ratio. Take its exp.": (
            -torch.minimum(ratio.log() * A, ratio.log().clamp(0.7, 1.3) * A)
        ),
        "The clamp has the bounds 1 - epsilon and 1 + epsilon; yours is fixed at 0.2.": (
            -torch.minimum(ratio * A, ratio.clamp(0.8, 1.2) * A)
        ),
        "The sign is wrong: the loss is minus the smaller product.": -right,
        "Take the min of the two products, and not of the two ratios: with A < 0 it is another.": (
            -torch.minimum(ratio, clamped) * A
        ),
    }
    found = answer.loss(logp.clone().requires_grad_(), old, A, 0.3)
    matches("loss", found, right, mistakes)
    expect(found.requires_grad, "The loss has no gradient. Do not detach the log-probs.")
    flat = {("A > 0", "ratio > 1 + epsilon"), ("A < 0", "ratio < 1 - epsilon")}
    later = (
        "`loss` is right. Print it for the ratios 0.5, 0.7, 1.3 and 1.5, with A = 1 and A = -1,"
        " and look where two ratios on the same side of 1 have the same loss."
    )
    found = {tuple(pair) for pair in given(answer.NO_GRADIENT, "NO_GRADIENT", later)}
    expect(
        found == flat,
        "`loss` is right, but NO_GRADIENT is not. With A > 0, min(ratio·A, clamp(ratio)·A) is flat"
        " only where the clamped product is the smaller one, and that is on one side of 1. With"
        " A < 0 it is the other side.",
    )
