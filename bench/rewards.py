"""The reward of benches whose models have nothing to learn.

It has a module of its own because it runs in the process for user rewards, which imports no torch.
"""


def share_of_even(completion_ids: list[list[int]], **kwargs) -> list[float]:
    """Return a cheap reward that differs within a group."""
    return [sum(i % 2 == 0 for i in ids) / len(ids) for ids in completion_ids]
