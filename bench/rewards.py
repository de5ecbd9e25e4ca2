"""The reward function for benchmarks in which the model does not have to learn.

This function has its own module, because it runs in the process of reward functions, which does not
import torch.
"""


def share_of_even(completion_ids: list[list[int]], **kwargs) -> list[float]:
    """Return the share of even token ids, a fast reward that differs within a group."""
    return [sum(i % 2 == 0 for i in ids) / len(ids) for ids in completion_ids]
