"""Turn rewards: each turn of a completion has its own advantage, with a baseline for each turn.

    R_ik = Σ_{l ≥ k} r_il                              the rewards of completion i from turn k on
    A_ik = (R_ik - mean_j R_jk) / (std_j R_jk + 1e-4)  over the completions j that have a turn k

All tokens of turn k get the advantage A_ik. So a reward changes only its own turn and the turns
before it. The idea that a turn has its own advantage is from Zeng et al. 2025 (2505.11821). This
recipe extends the idea to any number of turns, with a sum over later turns and a baseline for each
turn. If completions have only one turn, the result is GRPO.

A turn is the text that the model writes between two inserted texts (--tools, --environment-factory
or --rollout). `get_reward` of an environment may return a list with a reward for each turn. Any
reward function may return a list with a number at some tokens. Each number then belongs to the turn
of its token. If a function returns one number for a completion, this number belongs to the last
turn.

    python examples/tools.py runs/tools
    python examples/recipes/turns.py --model runs/tools/base --data runs/tools/train.jsonl \\
        --tools examples/tools.py:multiply --output-dir runs/turns …
"""

from __future__ import annotations

import sys

import numpy as np

from nanogrpo.extras.options import Config as Options
from nanogrpo.extras.recipe import main
from nanogrpo.extras.tools.turns import spans
from nanogrpo.feature import Feature


class Turns(Feature):
    def token_advantages(self, run, samples):
        n, out = run.cfg.num_generations, []
        for i in range(0, len(samples), n):
            group = samples[i : i + n]
            turns = [spans(s.model_token_indices) for s in group]
            rewards = [turn_rewards(s, t, run.rewards.weights) for s, t in zip(group, turns)]
            for s, own, each in zip(group, turns, turn_advantages(rewards)):
                given = np.zeros(len(s.token_ids))
                for (start, end), advantage in zip(own, each):
                    given[start:end] = advantage
                out.append(given.tolist())
        return out


def turn_rewards(sample, turns, weights):
    """Return the weighted reward of each turn, or NaN everywhere if no function applies."""
    total = np.zeros(len(turns)) if sample.reward is not None else np.full(len(turns), np.nan)
    starts = [start for start, _ in turns]
    for name, reward in sample.rewards.items():
        each = sample.token_rewards.get(name, [None] * (len(sample.token_ids) - 1) + [reward])
        for i, r in enumerate(each):
            if r is not None:
                total[max(np.searchsorted(starts, i, "right") - 1, 0)] += weights[name] * r
    return total


def turn_advantages(group):
    """Return the advantage of each turn, from the rewards of the turns of each completion."""
    returns = np.full((len(group), max(map(len, group))), np.nan)  # [G, turns]
    for row, rewards in zip(returns, group):
        row[: len(rewards)] = rewards[::-1].cumsum()[::-1]
    for column in returns.T:
        known = column[~np.isnan(column)]
        equal = len(known) < 2 or known.min() == known.max()
        column[:] = 0.0 if equal else (column - known.mean()) / (known.std(ddof=1) + 1e-4)
    return np.nan_to_num(returns)


def features(cfg):
    return [Turns()]


if __name__ == "__main__":
    sys.exit(main(Options, features))
