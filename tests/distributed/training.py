"""Train a tiny model for a few steps, in one process or many, for tests that compare the results.

gradient, weights = train_steps(base, {"token_budget": 60}, world)
assert differ(expected, gradient) < LIMIT
"""

import itertools
import random
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanogrpo import Config
from nanogrpo import step as experience
from nanogrpo.distributed import fsdp
from nanogrpo.distributed.world import World
from nanogrpo.extras.loss_scale import LossScale
from nanogrpo.extras.optim import Optim
from nanogrpo.extras.sharding import Sharded, shard
from nanogrpo.feature import Feature
from nanogrpo.grpo import loss as grpo
from nanogrpo.grpo import packing, schedule
from nanogrpo.model import checkpoint, weights
from nanogrpo.model.decoder import Decoder
from nanogrpo.run import optim
from nanogrpo.run import setup as parts
from nanogrpo.types import Prompt, Sample
from tests.conftest import SOLO

LIMIT = 1e-6


# With mask_truncated_completions only these samples are trained: fewer than ranks, and none in the
# second step.
STOPPED = [{5}, set(), {5, 6, 9}]
WITHOUT_ADVANTAGE = {(0, 0), (0, 1), (0, 2), (0, 3), (3, 1)}  # a group, and one more sample


def load_sharded(
    base: Path,
    world: World,
    cfg: Any,
    model: Decoder | None = None,
    features: Sequence[Feature] = (),
) -> Decoder:
    """Return the sharded model of a checkpoint, as a run loads it."""
    model = model or checkpoint.empty_model(base)
    shard(model, cfg, world)
    inputs: Any = types.SimpleNamespace(cfg=cfg, world=world, source=base, features=features)
    return parts.load_weights(model, inputs)


def generation(step: int) -> list[Sample]:
    """Return 4 prompts of 4 random completions of uneven length: a pure function of the step."""
    rng, samples = random.Random(step), []
    for i in range(4):
        prompt = Prompt(i, "", [rng.randrange(104) for _ in range(rng.randint(1, 12))])
        for j in range(4):
            ids = [rng.randrange(104) for _ in range(rng.choice([1, 3, 5, 9, 17]))]
            sample = Sample(
                prompt,
                j,
                ids,
                [-rng.random() * 4 for _ in ids],
                len(samples) in STOPPED[step],
                [0] * len(ids),
            )
            sample.advantage = 0.0 if (i, j) in WITHOUT_ADVANTAGE else rng.gauss(0, 1)
            samples.append(sample)
    return samples


def train_steps(
    base: Path, options: dict, world: World = SOLO, scale: LossScale | None = None
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the full gradient of the first update, and the parameters after the last step.
    scale: the loss scale of a run in float16.

    Off policy, the old log-probs are perturbed: otherwise the first update would only see ratios of
    1, and later gradients have passed through Adam. The reference is the policy scaled.

    Adam divides by the gradient's size. Where that is rounding noise, an update with Adam's default
    epsilon of 1e-8 is the sign of the noise. A larger epsilon makes the update a continuous
    function of the gradient, which can be compared.
    """
    cfg = Config(
        **{
            "model": str(base),
            "learning_rate": 1e-3,
            "adam_epsilon": 1e-5,
            "num_generations": 4,
            **options,
        }
    )
    model, *others = (
        load_sharded(base, world, cfg, features=[Sharded(cfg)]) for _ in range(2 if cfg.beta else 1)
    )
    with torch.no_grad():
        for p in itertools.chain(*(reference.parameters() for reference in others)):
            p.mul_(1.2)
    optimizer = optim.make_optimizer(model, cfg, [Optim(cfg)])  # its epsilon
    gradient, factor = {}, 1.0
    if scale:
        restored = scale.running(
            types.SimpleNamespace(model=model, optimizer=optimizer, world=world)
        )
        factor = world.size / scale.state[0].item()
    for step in range(3 if cfg.mask_truncated_completions else 2):
        samples = generation(step)
        plan = schedule.schedule(
            [s.facts for s in samples],
            cfg,
            step,
            world.size,
            model.cfg.pair_cost,
        )
        updates = [list(packing.pack(update, samples, cfg, world.rank)) for update in plan]
        if cfg.mask_truncated_completions and world.size > 1:
            counts = [
                sum(strip != [] for strips in update.strips for strip in strips) for update in plan
            ]
            # some rank has nothing to do
            assert counts[0] < world.size or (step == 2 and world.size == 2)
        for batch in itertools.chain(*updates):
            if cfg.updates_per_step > 1:
                batch.old_logp = experience.logp(model, batch, cfg) + 0.3 * torch.sin(
                    7.0 * batch.targets + batch.sample
                )
            for reference in others:
                batch.ref_logp = experience.logp(reference, batch, cfg)
        for batches in updates * cfg.num_iterations:
            for batch in batches:
                loss = model.forward_strip(batch, grpo.objective(batch, cfg)).loss
                fsdp.backward(model, loss, world, last=batch is batches[-1])
            for name, p in model.named_parameters() if not gradient else ():
                full = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
                gradient[name] = full * factor
            optim.clip_and_step(model, optimizer, cfg.learning_rate, 1.0)
    if scale:
        restored.close()
    return gradient, weights.host_weights(model)


def differ(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Return the relative error over all tensors: |a - b| / |a|."""
    assert set(a) == set(b)
    return (
        sum((a[n] - b[n]).norm() ** 2 for n in a) ** 0.5 / sum(a[n].norm() ** 2 for n in a) ** 0.5
    ).item()
