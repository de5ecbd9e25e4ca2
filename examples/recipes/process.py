"""Process rewards: a token's advantage is the sum of the normalized rewards of its own step and all
later steps.

    r̃_j = (r_j - mean(R)) / (std(R) + 1e-4)      R: all step rewards of the group's completions
    A_t = Σ_{j: step j ends at or after token t} r̃_j

This is GRPO with process supervision (Shao et al. 2024, 2402.03300, section 4.1.3). To reward
steps, a reward function returns a list with a number at the last token of each step, and None at
all other tokens. If a function returns one number per completion, this number is treated as the
reward of a further step, which ends at the last token. If there are several functions, their
rewards are weighted with --reward-weights and added.

Because rewards are added, completions with many steps get more reward, and a model could write
steps just to collect their rewards. The function `steps` below rewards only the steps of the
built-in task that lead to the answer:

    python examples/recipes/process.py --model runs/base --data arithmetic \\
        --reward-funcs accuracy examples/recipes/process.py:steps --output-dir runs/process
"""

from __future__ import annotations

import re
import sys
from bisect import bisect_left
from itertools import accumulate

import numpy as np

from nanogrpo.extras.options import Config as Options
from nanogrpo.extras.recipe import main
from nanogrpo.feature import Feature


class Process(Feature):
    def token_advantages(self, run, samples):
        n, out = run.cfg.num_generations, []
        rewards = [token_rewards(s, run.rewards.weights) for s in samples]
        for i in range(0, len(samples), n):
            out += process_advantages(rewards[i : i + n])
        return out


def token_rewards(sample, weights):
    """Return the weighted rewards of a sample's functions for each token (NaN: no reward)."""
    total = np.full(len(sample.token_ids), np.nan)
    for name, reward in sample.rewards.items():
        if reward is not None:
            at_end = [None] * (len(total) - 1) + [reward]
            each = np.array(sample.token_rewards.get(name, at_end), float)
            total = np.where(np.isnan(each), total, np.nan_to_num(total) + weights[name] * each)
    return total


def process_advantages(group):
    """Return the advantage of each token, from the rewards of each token of a group."""
    given = np.concatenate(group)
    given = given[~np.isnan(given)]
    if not len(given) or given.min() == given.max():  # exact zeros: the group is left out
        return [[0.0] * len(rewards) for rewards in group]
    scaled = ((rewards - given.mean()) / (given.std(ddof=1) + 1e-4) for rewards in group)
    return [np.nan_to_num(each)[::-1].cumsum()[::-1].tolist() for each in scaled]


def steps(prompts, pieces, **kwargs):
    """Reward each step such as "34+5=39" with 1 if it is the right next step, and otherwise 0."""
    rewards = []
    for prompt, each in zip(prompts, pieces):
        terms = [int(term) for term in re.findall(r"[+-]?\d+", prompt[-1]["content"])]
        totals = [*accumulate(terms)]
        right = [f"{a}{t:+d}={b}" for a, t, b in zip(totals, terms[1:], totals[1:])]
        ends = [*accumulate(map(len, each))]  # of the tokens, in characters
        reward = [None] * len(each)
        for k, step in enumerate(re.finditer(r"[^,<>]+(?=,|</think>)", "".join(each))):
            reward[bisect_left(ends, step.end())] = float(step[0] in right[k : k + 1])
        rewards.append(reward)
    return rewards


def features(cfg):
    return [Process()]


if __name__ == "__main__":
    sys.exit(main(Options, features))
