"""Self-play of two roles: the same model writes questions and answers them.

    python examples/recipes/self_play.py --model M --data asks.jsonl --reward-funcs accuracy …

--data contains prompts that ask for a question, such as {"prompt": "Write a sum:"}. A group has G =
--num-generations completions. The group contains G / (1 + --solutions) questions, and each question
is followed by --solutions completions that answer it. The verifier is the function `answer` below.
It says whether a question is valid, and returns the answer to the question. This verifier is made
for sums, so replace it for another task. A solution has the usual reward r. A question is rewarded
if it is hard, but not too hard (Absolute Zero: Zhao et al. 2025, 2505.03335, equation 4):

    r_ask = -1 if the question is not valid, 0 if no solution is right, else 1 - mean r

In this equation, r comes from the first reward function, and is from 0 to 1. Each role has its own
baseline (TRR++ in the same paper), because the rewards of the two roles differ in mean and scale:

    A = (r - mean_role) / (std_role + 1e-4)        mean and std over all samples of a role in a step

An answer to a question that is not valid has no reward. In evaluations, the model writes no
questions, and only answers the prompts of --eval-data.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, replace

import torch

from nanogrpo import Config
from nanogrpo.config import option
from nanogrpo.extras.recipe import main
from nanogrpo.extras.wrapper import Wrapper
from nanogrpo.feature import Feature
from nanogrpo.grpo.advantages import group_relative
from nanogrpo.types import Prompt


@dataclass(frozen=True)
class Options(Config):
    solutions: int = option(3, "solutions per question", "> 0")

    def problems(self):
        if self.num_generations % (1 + self.solutions) or self.max_resample_times:
            yield "1 + --solutions must divide --num-generations; leave out --max-resample-times."


def answer(question):
    """Return the answer to a sum such as "12+7-3=", or None if it is not valid."""
    valid = re.fullmatch(r"\d\d?([+-]\d\d?){1,3}=", question)
    return str(sum(map(int, re.findall(r"[+-]?\d+", question)))) if valid else None


class Game(Wrapper):
    """An engine in which the model first asks questions, and then answers its own questions."""

    def __init__(self, engine, run):
        self.engine, self.run, self.k = engine, run, run.cfg.solutions

    def sample(self, prompts, n, params, step):
        if params is not self.run.sampling:  # an evaluation
            return self.engine.sample(prompts, n, params, step)
        asks, k = self.engine.sample(prompts, n // (1 + self.k), params, step), self.k
        solutions = self.engine.sample([self.question(ask, n) for ask in asks], k, params, step)
        found = [s for i, ask in enumerate(asks) for s in (ask, *solutions[i * k : (i + 1) * k])]
        return [replace(sample, index=i % n) for i, sample in enumerate(found)]

    def question(self, ask, n):
        """Return the prompt for the solutions. The prompt is empty if the question is not valid."""
        text = self.run.tokenizer.decode(ask.token_ids)
        right, id = answer(text), -1 - (ask.prompt.id * n + ask.index)  # unlike all other ids
        messages = [{"role": "user", "content": text if right else ""}]
        return Prompt(id, messages, self.run.tokenizer.encode_prompt(messages), {"solution": right})


class SelfPlay(Feature):
    def model(self, model, inputs):
        inputs.longest_prompt += inputs.cfg.max_completion_length  # of questions
        self.size = 1 + inputs.cfg.solutions

    def wrap(self, engine, run):
        return Game(engine, run)

    def scored(self, run, samples, step):
        for ask, *solutions in zip(*[iter(samples)] * self.size):
            rewards = [next(iter(s.rewards.values())) for s in solutions]
            rate = None if None in rewards else sum(rewards) / len(rewards)
            valid = solutions[0].prompt.columns["solution"]
            ask.reward = (rate and 1 - rate) if valid else -1.0
            ask.rewards = {**dict.fromkeys(ask.rewards), "question": ask.reward}
            for solution in solutions:
                solution.rewards["question"] = None  # the log has a mean for each role
                solution.reward = solution.reward if valid else None

    def advantages(self, rewards, by_function):  # [P, G]
        asks, solutions = rewards.view(-1, self.size).split([1, self.size - 1], 1)
        (a, _), (b, std) = (group_relative(role.reshape(1, -1)) for role in (asks, solutions))
        return torch.cat([a.T, b.view_as(solutions)], 1).view_as(rewards), std


def features(cfg):
    return [SelfPlay()]


if __name__ == "__main__":
    sys.exit(main(Options, features))
