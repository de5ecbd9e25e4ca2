"""Check exercise 2 against `leave_one_out`."""

import torch

from exercises.hints import expect, given, matches
from nanogrpo.extras.estimators import leave_one_out
from nanogrpo.grpo.advantages import group_relative

START = "rewards.sum(dim=1, keepdim=True) - rewards is the sum of the others, for each completion."


def check(answer) -> None:
    r = torch.tensor([[1, 0, 0, 0], [2, 1, 1, 0]], dtype=torch.float64)
    total, right = r.sum(1, keepdim=True), leave_one_out(r)
    mistakes = {
        "The baseline still contains the completion's own reward: leave it out of the sum.": (
            r - r.mean(1, keepdim=True)
        ),
        "There are only G - 1 others: divide their sum by G - 1.": r - (total - r) / 4,
        "You divide by G - 1, but the sum still contains the completion itself: subtract it.": (
            r - total / 3
        ),
        "You subtract the number 1 from the sum. Subtract the completion's own reward.": (
            r - (total - 1) / 3
        ),
        "RLOO does not divide by the standard deviation.": group_relative(r)[0],
        "The sign is wrong: a reward above those of the others has a positive advantage.": -right,
    }
    matches("advantages", answer.advantages(r.clone()), right, mistakes)
    pair = r[:, :2]
    mistakes = {
        "That is right for G = 4, but not for G = 2: G is rewards.shape[1], so divide by G - 1.": (
            pair - (pair.sum(1, keepdim=True) - pair) / 3
        )
    }
    found = answer.advantages(pair.clone())
    matches("advantages with G = 2", found, leave_one_out(pair), mistakes)
    how = (
        "Write A = r - (S - r)/(G - 1), where S is the sum of the group, and bring it to one"
        " fraction; then S/G is the mean."
    )
    for G in (2, 4, 8):
        factor = float(given(answer.f(G), "f", f"`advantages` is right. {how}"))
        expect(
            abs(factor * (G - 1) / G - 1) < 1e-9,
            f"f({G}) is {factor:.4g}. {how}"
            + (" Yours is the reciprocal." if abs(factor - (G - 1) / G) < 1e-9 else ""),
        )
