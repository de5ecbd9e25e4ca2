"""Two parts of ScaleRL (Khatri et al. 2025, 2510.13786): averaging by prompt, and no-positive
resampling.

    L = 1/P · Σ_p 1/(Σ_i |y_i|) · Σ_i Σ_t l_it      p: prompts; y_i: completions of p; t: tokens

In L, all prompts have the same weight, and all tokens of a prompt have the same weight. P is the
number of prompts in the optimizer step on all ranks. Prompts for which all advantages are 0 are not
counted (ScaleRL's zero-variance filter). This average replaces the average of --loss-type.

s_p is the mean of r over all completions of prompt p so far, where r is the reward from the first
function of --reward-funcs. This reward must be from 0 to 1. Prompts with s_p ≥ `max_pass_rate` are
not drawn again. Other prompts are drawn at random instead. The sums of r are part of a checkpoint,
so a resumed run draws the same prompts as an uninterrupted run.

train.py has options for two other parts of ScaleRL: its loss, and advantages that are divided by
the standard deviation of all rewards of the step.

    python examples/recipes/scale_rl.py --model runs/base --data arithmetic --output-dir runs/s \\
        --loss-type cispo --epsilon-high 5 --scale-rewards batch
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from nanogrpo.config import option
from nanogrpo.engine.base import stream
from nanogrpo.extras.options import Config
from nanogrpo.extras.recipe import main
from nanogrpo.feature import Feature
from nanogrpo.grpo.loss import is_trained


@dataclass(frozen=True)
class Options(Config):
    max_pass_rate: float = option(0.9, "pass rate at which a prompt is no longer drawn", "> 0")

    def problems(self):
        if self.max_staleness or self.environment_factory:
            yield "ScaleRL refuses --max-staleness and --environment-factory: leave them out."


class ScaleRL(Feature):
    def model(self, model, inputs):
        self.history = torch.zeros(2, len(inputs.prompts), dtype=torch.float64)  # Σ r, completions

    def tensors(self):
        return {"scale_rl.history": self.history}

    def draw(self, run, drawn, seed, step):
        total, count = self.history.tolist()
        random = np.random.RandomState(stream(seed, step, 0, 2) >> 31)
        more = [run.prompts[i] for i in random.permutation(len(run.prompts))]
        each = {p.id: p for p in [*drawn, *more]}.values()  # without repetition
        left = [p for p in each if total[p.id] < run.cfg.max_pass_rate * max(count[p.id], 1)]
        return [*left, *drawn][: len(drawn)]  # reuses `drawn` if too few prompts are left

    def scored(self, run, samples, step):
        rows = [(s.facts, next(iter(s.rewards.values()))) for s in samples]
        rows = run.world.concat(rows)  # of all ranks, in the order of batch.sample
        for fact, r in rows:
            if r is not None:
                self.history[:, fact.prompt] += torch.tensor([r, 1.0])
        lengths = [fact.length * is_trained(fact, run.cfg) for fact, _ in rows]
        self.tokens = torch.tensor(lengths).view(-1, run.cfg.num_generations).sum(1)  # [P]

    def batches(self, run, batches):
        groups = [batch.sample // run.cfg.num_generations for batch in batches]  # [M] each
        mine = {p for g, batch in zip(groups, batches) for p in g[batch.advantage != 0].tolist()}
        prompts = len({*run.world.concat([*mine])})
        for group, batch in zip(groups, batches):
            batch.weight = 1 / (max(prompts, 1) * self.tokens.to(group.device)[group]).float()


def features(cfg):
    return [ScaleRL()]


if __name__ == "__main__":
    raise SystemExit(main(Options, features))
