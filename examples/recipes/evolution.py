"""Evolution strategies: the same engine and the same rewards, without a gradient of the policy.

    python examples/recipes/evolution.py --model runs/base --data arithmetic --num-generations 32 \\
        --generation-batch-size 2048 --learning-rate 1.5e-4 --output-dir runs/evolution

Completion i of each group is sampled with the weights θ_i, the i-th member. The fitness F_i of a
member is the mean reward of its completions, over all prompts of the step. The weights move towards
the noise that led to a higher fitness (Salimans et al. 2017, 1703.03864, algorithm 1; Qiu et al.
2025, 2509.24372, for language models):

    θ_2j = θ + σ ε_j,  θ_2j+1 = θ - σ ε_j,  ε_j ~ N(0, I)      G/2 antithetic pairs
    θ ← θ + α / (G σ) Σ_j (Z_2j - Z_2j+1) ε_j                  Z_i = mean_k sign(F_i - F_k)

Z is the rank of a member, from -1 to 1 (fitness shaping, section 2.1 of Salimans et al.). So a
single broken member does not dominate the update. G is --num-generations, α is --learning-rate, and
σ is --sigma. The noise is a function of the seed, the step and j, so it is generated again instead
of stored. All members sample with the same random numbers, so F differs only because of the noise.
The loop of train.py runs unchanged. All advantages are 0, so AdamW changes no weight (without
--beta and --weight-decay). After the step of AdamW, this feature changes the weights. The log warns
that nothing was learned, but this warning is only about AdamW.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace

import torch

from nanogrpo import Config
from nanogrpo.config import option
from nanogrpo.distributed import fsdp
from nanogrpo.engine.base import stream
from nanogrpo.extras.recipe import main
from nanogrpo.extras.wrapper import Wrapper
from nanogrpo.feature import Feature
from nanogrpo.run.state import local


@dataclass(frozen=True)
class Options(Config):
    sigma: float = option(0.01, "standard deviation of the noise in the weights", "> 0")

    def problems(self):
        if self.num_generations % 2 or self.max_resample_times:
            yield "--num-generations must be even (noise in pairs); --max-resample-times must be 0."


def weights(model):
    fsdp.reshard(model)
    return [p.detach() for p in model.parameters() if p.requires_grad]


def move(run, step, start, scales):
    """Set the weights to start + Σ_j scales[j] ε_j, where ε_j depends on the seed and the step."""
    for i, (w, before) in enumerate(zip(weights(run.model), start)):
        w.copy_(before)
        for j, scale in scales.items():
            random = torch.Generator(w.device).manual_seed(stream(run.cfg.seed, step, j, i))
            noise = torch.randn(w.shape, generator=random, device=w.device)
            local(w).add_(run.world.part(noise), alpha=scale)  # each rank has only some of the rows


class Population(Wrapper):
    """An engine that samples each completion of a group with different weights."""

    def __init__(self, engine, run):
        self.engine, self.run = engine, run

    def sample(self, prompts, n, params, step):
        if params is not self.run.sampling:  # an evaluation
            return self.engine.sample(prompts, n, params, step)
        start, found = [w.clone() for w in weights(self.run.model)], []
        for i in range(n):
            move(self.run, step, start, {i // 2: self.run.cfg.sigma * (-1) ** i})
            self.engine.load(self.run.model, step)
            mine = self.engine.sample(prompts, 1, params, step)
            found.append([replace(s, index=i) for s in mine])
        move(self.run, step, start, {})
        return [sample for group in zip(*found) for sample in group]


class Evolution(Feature):
    def wrap(self, engine, run):
        return Population(engine, run)

    def advantages(self, rewards, by_function):  # [P, G]
        fitness = rewards.nanmean(0)  # [G]
        self.scores = (fitness[:, None] - fitness).sign().nan_to_num().mean(1)
        return 0 * rewards, fitness.std().view(1, 1)

    def step(self, run, step, samples):
        rate = run.learning_rate(step) / (run.cfg.num_generations * run.cfg.sigma)
        scales = (rate * (self.scores[::2] - self.scores[1::2])).tolist()  # [G/2]
        move(run, step, weights(run.model), dict(enumerate(scales)))


def features(cfg):
    return [Evolution()]


if __name__ == "__main__":
    sys.exit(main(Options, features))
