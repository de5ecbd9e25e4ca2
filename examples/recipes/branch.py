"""Branching: sample K continuations from the most uncertain token, and compare them with each
other.

    t     = argmax_t H(π(· | prompt, y_<t))       of a completion y, the trunk
    stem  = y_<t                                  shared by the siblings y_1 … y_K ~ π(· | stem)
    A_i   = (r_i - mean_j r_j) / std_j r_j        over the K siblings of a stem

A prompt has G/K trunks, and each trunk has K siblings. So a step has G completions per prompt. The
reward of a sibling is the reward of its whole completion, which is the stem and the continuation.
All siblings of a stem begin with the same tokens, so A compares only the continuations. The
variance of r that comes from the stem is not part of A, as in TreeRPO (Yang et al. 2025,
2506.05183) and VinePPO (Kazemnejad et al. 2024, 2410.01679). The continuations differ most after
tokens with a high entropy (Wang et al. 2025, 2506.01939). Only continuations are in the loss,
because the gradient of the stem would be multiplied by Σ A = 0. The rest of the trunk is not used
as a sibling, because the choice of t depends on it.

The stem is computed once for all siblings. For the engine, the stem is the end of a prompt, and K
completions of this prompt are sampled. In training, the stem is the end of the `Prompt` that K
samples share, and a strip contains this `Prompt` only once. The lengths in the log are the lengths
of the continuations.

    python examples/recipes/branch.py --model runs/base --data arithmetic --output-dir runs/branch
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from nanogrpo.config import option
from nanogrpo.extras.options import Config
from nanogrpo.extras.recipe import main
from nanogrpo.extras.wrapper import Wrapper
from nanogrpo.feature import Feature
from nanogrpo.grpo import advantages, loss, packing, schedule
from nanogrpo.step import evaluation_sampling


@dataclass(frozen=True)
class Options(Config):
    branches: int = option(4, "siblings per stem (K); they share a baseline", ">= 2")

    def problems(self):
        if self.num_generations % self.branches or self.max_staleness:
            yield "--branches must divide --num-generations, and --max-staleness must be 0."


class Branch(Feature):
    def wrap(self, engine, run):
        self.k, self.scale = run.cfg.branches, run.cfg.scale_rewards
        return Branching(engine, run)

    def scored(self, run, samples, step):
        for sample in samples:
            vars(sample).update(sample.continuation)  # from now on, the stem is part of the prompt

    def advantages(self, rewards, by_function):  # [P, G]
        values, std = advantages.group_relative(rewards.view(-1, self.k), self.scale)  # [P·G/K, K]
        return values.view_as(rewards), std


class Branching(Wrapper):
    def __init__(self, engine, run):
        self.engine, self.run = engine, run

    def sample(self, prompts, n, params, step):
        if params == evaluation_sampling(self.run.cfg, self.run.sampling):
            return self.engine.sample(prompts, n, params, step)
        k, stems = self.run.cfg.branches, []
        pairs = most_uncertain(self.run, self.engine.sample(prompts, n // k, params, step))
        for s, t in pairs:
            # no prompt has a negative id, so the stem gets different random numbers
            ids, new = s.prompt.token_ids + s.token_ids[:t], ~(s.prompt.id * n + s.index)
            stems.append(replace(s.prompt, id=new, token_ids=ids, max_tokens=params.max_tokens - t))
        samples = self.engine.sample(stems, k, params, step)
        for i, s in enumerate(samples):
            trunk, t = pairs[i // k]
            s.continuation = {name: getattr(s, name) for name in ("prompt", *TOKENS)}
            whole = {name: getattr(trunk, name)[:t] + getattr(s, name) for name in TOKENS}
            vars(s).update(whole, prompt=trunk.prompt, index=i % n)
        return samples


TOKENS = "token_ids", "logp", "versions"  # the lists of a sample


@torch.no_grad()
def most_uncertain(run, samples):
    """Return each sample of this rank, and the index of its token with the highest entropy."""
    world, cfg = run.world, replace(run.cfg, mask_truncated_completions=False)
    everyone, found = world.concat([s.facts._replace(all_gradients=True) for s in samples]), []
    plan = schedule.plan(range(len(everyone)), everyone, cfg, world.size)
    mine = world.exchange(samples, schedule.wanted([plan], world.size))
    for batch in packing.pack(plan, mine, cfg, world.rank, world.device):
        _, entropy = run.model.forward_strip(batch, loss.logp_of(batch, cfg))  # [M]
        found += [(i, int(entropy[batch.sample == i].argmax())) for i in set(batch.sample.tolist())]
    places, before = dict(world.concat(found)), sum(world.gather(len(samples))[: world.rank])
    return [(s, places[before + i]) for i, s in enumerate(samples)]


def features(cfg):
    return [Branch()]


if __name__ == "__main__":
    raise SystemExit(main(Options, features))
