"""A curriculum by pass rate: prompts that the model solves only sometimes are replayed.

    s_i ← s_i + α·(mean of r over the completions of prompt i - s_i)        after each step with i
    P(i) ∝ s_i·(1 - s_i)                                                    for prompts to replay

s_i is the pass rate of prompt i, and r is the reward from the first function of --reward-funcs.
This reward must be from 0 to 1. When prompt i occurs for the first time, s_i is the mean of r. In
each step, a share of the prompts is replayed: these prompts are drawn without replacement from the
prompts that already occurred. All other prompts of the step are the same as in a run without a
curriculum.

s·(1 - s) is the variance of a reward that is 0 or 1. If this variance is 0, all completions of a
group have the same reward, and GRPO has no gradient. Foster and Foerster 2025 (2502.12272) call
this variance learnability. Jiang et al. 2020 (2010.03934) introduced replay by difficulty. With
P(i) ∝ 1 - s_i, as in Kimi k1.5 (2025, 2501.12599), most replayed prompts would be prompts that are
never solved.

The pass rates of all prompts are part of a checkpoint, and the random numbers are a function of
(seed, step). So a resumed run draws the same prompts as an uninterrupted run.

    python examples/recipes/curriculum.py --model runs/base --data arithmetic --output-dir runs/hard
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from nanogrpo.config import option
from nanogrpo.engine.base import stream
from nanogrpo.extras.options import Config
from nanogrpo.extras.recipe import main
from nanogrpo.feature import Feature


@dataclass(frozen=True)
class Options(Config):
    replay_share: float = option(0.5, "share of the prompts of a step to replay", ">= 0", "<= 1")
    pass_rate_step: float = option(0.5, "α, the weight of the newest mean reward", "> 0", "<= 1")

    def problems(self):
        if self.max_staleness or self.environment_factory:
            yield "a curriculum refuses --max-staleness and --environment-factory: leave them out."


class Curriculum(Feature):
    def model(self, model, inputs):
        # [prompts]: s_i; NaN before the first occurrence
        self.rate = torch.full((len(inputs.prompts),), math.nan, dtype=torch.float64)

    def tensors(self):
        return {"curriculum.rate": self.rate}

    def draw(self, run, drawn, seed, step):
        count = int(run.cfg.replay_share * len(drawn))
        fresh = drawn[: len(drawn) - count]
        chosen = replayed(self.rate.numpy(), {p.id for p in fresh}, count, seed, step)
        more = drawn[len(fresh) + len(chosen) :]
        return [*fresh, *(run.prompts[i] for i in chosen), *more]

    def scored(self, run, samples, step):
        first = [(s.prompt.id, next(iter(s.rewards.values()))) for s in samples]
        passed = {}
        for i, r in run.world.concat(first):
            passed.setdefault(i, []).append(math.nan if r is None else r)
        for i, rewards in passed.items():
            old, mean = self.rate[i].item(), float(np.mean(rewards))
            self.rate[i] = mean if math.isnan(old) else old + run.cfg.pass_rate_step * (mean - old)

    def step(self, run, step, samples):
        return {"curriculum/pass_rate": self.rate.nanmean().item()}


def replayed(rate, excluded, count, seed, step):
    """Return up to `count` prompts, drawn with probability ∝ rate·(1 - rate), each at most once."""
    weight = np.nan_to_num(rate * (1 - rate)).clip(min=0)  # 0 before the first occurrence
    weight[[*excluded]] = 0
    # draws by the largest keys log(u) / weight (Efraimidis and Spirakis 2006)
    random = np.random.RandomState(stream(seed, step, 0, 2) % 2**32).uniform(size=len(weight))
    order = np.argsort(-np.log(random) / np.maximum(weight, 1e-300), kind="stable")
    return [int(i) for i in order[:count] if weight[i] > 0]


def features(cfg):
    return [Curriculum()]


if __name__ == "__main__":
    raise SystemExit(main(Options, features))
