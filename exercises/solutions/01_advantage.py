"""Solution of exercise 1.

If all rewards of a group are equal, their standard deviation is 0, and without EPS the advantage
would be 0 / 0 = NaN. With it, the advantage is 0: this group says nothing about what to prefer.

The project's function is `group_relative` in nanogrpo/grpo/advantages.py. It subtracts the lowest
reward first, so that equal rewards give exactly 0, and it leaves out completions without a reward.
"""

from torch import Tensor

EPS = 1e-4


def advantages(rewards: Tensor) -> Tensor:
    mean = rewards.mean(dim=1, keepdim=True)  # [P, 1]
    std = rewards.std(dim=1, keepdim=True)  # [P, 1]
    return (rewards - mean) / (std + EPS)
