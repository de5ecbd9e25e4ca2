"""Exercise 2: leave one out.

In exercise 1, each completion is compared with a mean that contains its own reward. RLOO (Ahmadian
et al. 2024, arXiv 2402.14740) compares it with the mean of the G - 1 *other* completions of its
group, and does not divide by a standard deviation:

    rewards 1, 0, 0, 0   →   baselines 0, 1/3, 1/3, 1/3   →   A = 1, -1/3, -1/3, -1/3

1. Write `advantages`. It needs no loop: the sum of the others is the sum of the group, minus the
   completion's own reward.
2. With pen and paper, show that A = f(G) · (r - mean of the group), where the mean is that of all G
   rewards. Write down f.

    python -m exercises.check 2
"""

from torch import Tensor


def advantages(rewards: Tensor) -> Tensor:
    """rewards: [P, G]. Returns the advantages [P, G]."""
    ...


def f(G: int) -> float:
    """Return the factor between the two advantages, for groups of G completions."""
    ...
