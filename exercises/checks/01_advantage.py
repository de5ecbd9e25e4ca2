"""Check exercise 1 against `group_relative`."""

import torch

from exercises.hints import matches
from nanogrpo.grpo.advantages import group_relative

START = (
    "Begin with rewards.mean(dim=1, keepdim=True): one mean per group, of shape [P, 1], which torch"
    " then subtracts from each reward of the group."
)


def check(answer) -> None:
    r = torch.tensor([[1, 0, 0, 0], [2, 1, 1, 0], [5, 5, 5, 5]], dtype=torch.float64)
    std = r.std(1, keepdim=True)
    centered = r - r.mean(1, keepdim=True)
    right, _ = group_relative(r)
    mistakes = {
        "You subtract the mean of all prompts. Each group has its own mean: dim=1, keepdim=True.": (
            (r - r.mean()) / (std + 1e-4)
        ),
        "You divide by the std of all prompts. Each group has its own: dim=1, keepdim=True.": (
            centered / (r.std() + 1e-4)
        ),
        "Mean and std are those of all prompts. Each group has its own: dim=1, keepdim=True.": (
            (r - r.mean()) / (r.std() + 1e-4)
        ),
        "You average over the prompts (dim 0). A group is a row: use dim=1, keepdim=True.": (
            (r - r.mean(0)) / (r.std(0) + 1e-4)
        ),
        "Your std divides by G. That of a sample divides by G - 1, which is torch's default.": (
            centered / (r.std(1, keepdim=True, correction=0) + 1e-4)
        ),
        "You have not divided by the standard deviation.": centered,
        "The third group has equal rewards, so its std is 0, and 0 / 0 is NaN: add EPS to it.": (
            centered / std
        ),
        "EPS is added to the variance. Add it to the standard deviation.": (
            centered / (std**2 + 1e-4).sqrt()
        ),
        "You have not subtracted the mean. If all are good, none would be discouraged.": (
            r / (std + 1e-4)
        ),
        "The sign is wrong: a reward above the mean must have a positive advantage.": -right,
    }
    matches("advantages", answer.advantages(r.clone()), right, mistakes)
