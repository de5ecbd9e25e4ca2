"""Exercise 1: the advantage.

The model has written G completions for each of P prompts, and rewards[p, g] says how good
completion g of prompt p is. The completions of a prompt are a group. The advantage of a completion
says how much better it is than its group:

    A = (r - mean of the group) / (std of the group + EPS)

    rewards 1, 0, 0, 0   →   mean 0.25, std 0.5   →   A = 1.4997, -0.4999, -0.4999, -0.4999

The standard deviation is that of a sample, as torch computes it by default: its sum of squares is
divided by G - 1. Think of a group in which all rewards are equal: why is there an EPS?

    python -m exercises.check 1
"""

import torch
from torch import Tensor

EPS = 1e-4


def advantages(rewards: Tensor) -> Tensor:
    """rewards: [P, G]. Returns the advantages [P, G]."""
    ...
