"""The reward function for benchmarks in which the model does not have to learn. The function has
its own module so that the process that runs reward functions does not import torch.
"""


def share_of_even(completion_ids: list[list[int]], **kwargs) -> list[float]:
    """Return the fraction of even token ids, a fast reward that varies within a group."""
    return [sum(i % 2 == 0 for i in ids) / len(ids) for ids in completion_ids]
