"""A policy that cannot read its prompt, trained with GRPO: for exercise 10.

The task: the answer to a prompt is one of the digits 1 to 6. The policy is a table of log-probs:
for each of 8 places, one for each token. It never sees the prompt, so it cannot do better than to
guess.

In: a reward for a completion and the right answer. Out: the mean reward and the accuracy, as the
training goes on. Read next: nanogrpo/grpo/advantages.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from nanogrpo.grpo.advantages import group_relative

TOKENS = "123456 ."  # a full stop ends the completion
ANSWERS = "123456"
LENGTH, GROUP, STEPS = 8, 16, 200


class State(NamedTuple):
    """The policy after some steps."""

    step: int
    reward: float  # mean over the samples of the step
    accuracy: float  # share of the samples that are the right answer, and nothing else
    example: str


def train(reward: Callable[[str, str], float], seed: int = 0) -> list[State]:
    """Train the table with a reward, and return its states."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.zeros(LENGTH, len(TOKENS), requires_grad=True)
    optimizer = torch.optim.Adam([table], lr=0.1)
    stop, states = TOKENS.index("."), []
    for step in range(STEPS + 1):
        logp_all = table.log_softmax(-1)  # [8, V]
        probabilities = logp_all.detach().exp()
        count = len(ANSWERS) * GROUP
        ids = probabilities.multinomial(count, replacement=True, generator=generator).T  # [n, 8]
        texts = ["".join(TOKENS[i] for i in row) for row in ids.tolist()]
        said = [text.split(".")[0] for text in texts]
        wanted = [answer for answer in ANSWERS for _ in range(GROUP)]
        rewards = torch.tensor([float(reward(*pair)) for pair in zip(said, wanted)])
        if step % 50 == 0:
            right = sum(a == b for a, b in zip(said, wanted)) / count
            states.append(State(step, float(rewards.mean()), right, said[0]))
        A = group_relative(rewards.view(-1, GROUP))[0].flatten()  # [n]
        # the tokens up to the first full stop
        trained = ((ids == stop).cumsum(1) - (ids == stop).long()) == 0  # [n, 8]
        logp = logp_all[torch.arange(LENGTH), ids]  # [n, 8]
        loss = -(A[:, None] * logp * trained).sum() / trained.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return states
