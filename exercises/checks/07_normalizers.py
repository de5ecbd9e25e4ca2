"""Check exercise 7 against `token_weight`."""

import torch

from exercises.hints import expect, given, matches
from nanogrpo import Config
from nanogrpo.grpo.loss import token_weight

START = "With dapo, each token has the weight 1/N, where N = sum(lengths)."


def check(answer) -> None:
    lengths, limit = [2, 8, 5], 10
    B, N = len(lengths), sum(lengths)
    n = torch.tensor(lengths, dtype=torch.float64)
    one = torch.ones(3, dtype=torch.float64)
    mistakes = {
        "grpo": {
            "With grpo, the weights of all tokens sum to 1: divide by B too.": 1 / n,
            "With grpo, a completion's tokens are averaged over its own length n.": one / N,
            "With grpo, a token's weight is 1/(B·n), which shrinks with the length.": n / (B * N),
        },
        "dapo": {
            "With dapo, all tokens have the same weight, however long the completion.": 1 / n,
            "With dapo, there is no mean over completions: all tokens are averaged at once.": (
                1 / (B * n)
            ),
            "With dapo, divide by the number of tokens N, and not also by B.": one / (B * N),
        },
        "dr_grpo": {
            "With dr_grpo, the mean over completions still divides by B.": one / limit,
            "With dr_grpo, L is the limit for all completions, not the longest one of the batch.": (
                one / (B * max(lengths))
            ),
            "With dr_grpo, the length n of the completion does not matter.": 1 / (B * n),
            "With dr_grpo, divide by the limit instead of n, and by B.": 1 / (n * limit),
            "With dr_grpo, divide by B, the number of completions, not by N.": one / (N * limit),
        },
    }
    for kind, wrong in mistakes.items():
        cfg = Config(loss_type=kind, max_completion_length=limit)
        right = [token_weight(length, B, N, cfg) for length in lengths]
        found = given(answer.weights(list(lengths), kind, limit), "weights")
        found = torch.tensor([float(given(w, "weights")) for w in found], dtype=torch.float64)
        matches(f"weights of {kind}", found, torch.tensor(right, dtype=torch.float64), wrong)
    merciful = given(answer.MERCIFUL_TO_LONG_MISTAKES, "MERCIFUL_TO_LONG_MISTAKES")
    expect(
        str(merciful).lower() == "grpo",
        "`weights` is right. Now compare the weights of a token in the completions of 2 and of 8"
        " tokens: with one loss type only, they differ.",
    )
