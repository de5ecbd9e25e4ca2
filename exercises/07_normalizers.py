"""Exercise 7: who counts how much?

The loss of a step is Σ weight · l over all tokens of B completions, where l is the loss of a token.
Three papers choose the weight differently. A completion has n tokens, the B completions together
have N, and the length limit is L:

    grpo      the mean over completions of the mean over their tokens   (Shao et al. 2024)
    dapo      the mean over all tokens                                  (Yu et al. 2025)
    dr_grpo   the mean over completions of (the sum over tokens) / L    (Liu et al. 2025)

1. Return the weight of a token, for each completion: a list of B numbers.
2. A long wrong completion and a short wrong one have the same advantage. With which of the three is
   each token of the long one discouraged less than each token of the short one?

    python -m exercises.check 7
"""


def weights(lengths: list[int], loss_type: str, limit: int) -> list[float]:
    """lengths: the n of each completion. Returns the weight of its tokens, for each completion."""
    ...


MERCIFUL_TO_LONG_MISTAKES = ...  # "grpo", "dapo" or "dr_grpo"
