"""Process the samples of a step: rewards, advantages, micro-batches, and the log record.

In: the samples of a step. Out: the same samples with rewards and advantages, then the micro-batches
(`PackedBatch`) of each optimizer step. This file moves data between the parts of a run and its
ranks. The algorithm itself is in grpo/. Read before: train.py. Read next: grpo/advantages.py.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from nanogrpo.config import Config
from nanogrpo.engine.base import SamplingParams, stream
from nanogrpo.feature import first
from nanogrpo.grpo import loss, packing
from nanogrpo.grpo.advantages import step_advantages
from nanogrpo.grpo.schedule import schedule, skipped, wanted
from nanogrpo.logs import metrics
from nanogrpo.model.decoder import Decoder
from nanogrpo.rewards.call import TrainerState
from nanogrpo.run.setup import Run
from nanogrpo.types import Facts, PackedBatch, Sample


@dataclasses.dataclass(frozen=True)
class Generation:
    """The facts that each rank knows about the samples of all ranks, in the order of prompts."""

    facts: list[Facts]  # [P·G]: rewards, advantages and lengths, but no tokens
    std: Tensor  # [P, 1] or [1, 1]: standard deviations of the rewards


def sync(run: Run) -> None:
    """Copy the current weights to the engine, unless the engine has them already."""
    if run.engine.version != run.done:
        run.engine.load(run.model, version=run.done)


# --- rewards and advantages -----------------------------------------------------------------------


def score(run: Run, samples: list[Sample], step: int) -> None:
    """Set `text`, `rewards` and `reward` of each sample."""
    fill_rewards(run, samples)
    for feature in run.features:
        feature.scored(run, samples, step)


def fill_rewards(run: Run, samples: list[Sample]) -> None:
    """Decode the samples and call the reward functions on them."""
    for sample in samples:
        sample.text = run.tokenizer.decode(sample.token_ids)
    run.rewards.score(samples, TrainerState(run.done, run.cfg.max_steps, run.epoch))


def assign_advantages(run: Run, samples: list[Sample]) -> Generation:
    """Set the `advantage` of each sample: how much better it scored than its group. A feature may
    also give each token its own advantage.

    Return the facts about the samples of all ranks. The ranks exchange these facts here, so every
    rank must call this function.
    """
    world, features = run.world, run.features
    facts = metrics.facts(samples, world)
    by_function = [[*f.rewards.values()] for f in facts]
    advantages, std = step_advantages([f.reward for f in facts], run.cfg, by_function, features)
    for sample, advantage in zip(samples, world.part(advantages)):
        sample.advantage = advantage
    given = first(feature.token_advantages(run, samples) for feature in features)
    if given is not None:
        for sample, each in zip(samples, given, strict=True):
            sample.token_advantages, sample.advantage = each, max(each, key=abs)
        advantages = world.concat([sample.advantage for sample in samples])
    every = any(feature.all_gradients for feature in features)
    facts = [f._replace(advantage=a, all_gradients=every) for f, a in zip(facts, advantages)]
    return Generation(facts, std)


def evaluate(run: Run) -> None:
    """Sample completions of the held-out prompts (greedily by default), score them with the same
    reward functions, and log the results.
    """
    sync(run)
    samples = complete_held_out(run)
    facts, more = metrics.facts(samples, run.world), run.rewards.metrics(run.world.gather)
    for feature in run.features:
        more |= feature.metrics(run, samples) or {}
        feature.evaluated(run, samples)
    run.log.evaluation(run.done, facts, more)


def complete_held_out(run: Run) -> list[Sample]:
    """Return completions of this rank's share of the held-out prompts, with their rewards."""
    prompts, how = run.world.part(run.eval_prompts), evaluation_sampling(run.cfg, run.sampling)
    samples = run.engine.sample(prompts, run.cfg.num_generations_eval, how, step=0)
    fill_rewards(run, samples)
    return samples


def evaluation_sampling(cfg: Config, training: SamplingParams) -> SamplingParams:
    """Return the sampling parameters of an evaluation. Training uses other random numbers."""
    return dataclasses.replace(
        training, temperature=cfg.eval_temperature, top_p=1.0, seed=stream(cfg.seed, 0, 0, 1)
    )


# --- micro-batches --------------------------------------------------------------------------------


def pack(
    run: Run, samples: list[Sample], generation: Generation, step: int
) -> Iterator[Iterable[tuple[PackedBatch, bool]]]:
    """Yield this rank's micro-batches of each optimizer step. All optimizer steps are repeated
    num_iterations times. Each micro-batch is paired with a flag, which is True for the last
    micro-batch of an optimizer step.

    The old and reference log-probs are computed before the first optimizer step. Every rank must
    call this function and iterate over its result. A sample moves to a different rank only if this
    is needed to balance the work.
    """
    world, cfg, cost = run.world, run.cfg, run.model.cfg.pair_cost
    updates = schedule(generation.facts, cfg, step, world.size, cost)
    mine = world.exchange(samples, wanted(updates, world.size))
    packed = [packing.pack(update, mine, cfg, world.rank, world.device) for update in updates]
    for batches in packed:
        for feature in run.features:
            feature.batches(run, batches)
        add_logps(run, batches)
    for batches in packed * cfg.num_iterations:
        yield ((batch, i == len(batches) - 1) for i, batch in enumerate(batches))


@torch.no_grad()
def logp(model: Decoder, batch: PackedBatch, cfg: Config) -> Tensor:
    """Return the log-probs [M] float32 of a batch's targets at the sampling temperature."""
    return model.forward_strip(batch, loss.logp_of(batch, cfg))[0]


def add_logps(run: Run, batches: Sequence[PackedBatch]) -> None:
    """Fill in the old and reference log-probs that the loss of one optimizer step needs.

    `old_logp` holds the log-probs under the policy that sampled the completions. If a generation
    has only one optimizer step, `old_logp` stays None, because the ratio is then 1. `ref_logp`
    holds the log-probs under the reference model, for the KL.
    """
    cfg, off_policy = run.cfg, run.cfg.updates_per_step > 1
    for batch in batches if off_policy or run.ref_model else ():  # batches are built only if needed
        if off_policy and batch.old_logp is None:
            batch.old_logp = logp(run.model, batch, cfg)
        if run.ref_model:
            with (run.ref_model.own_reference or nullcontext)():
                batch.ref_logp = logp(run.ref_model, batch, cfg)


# --- the record in the log ------------------------------------------------------------------------


def log_step(
    run: Run,
    step: int,
    samples: list[Sample],
    generation: Generation,
    meter: metrics.Meter,
    clock: metrics.Clock,
) -> None:
    """Write the metrics of a step to the log. Every rank must call this function."""
    world = run.world
    record = metrics.of_samples(generation.facts, generation.std)
    record |= {"epoch": run.epoch, **meter.summary(world), **metrics.of_memory(world)}
    record |= run.engine.metrics()
    for feature in run.features:
        record |= feature.metrics(run, samples) or {}
        record |= feature.step(run, step, samples) or {}
    record["frac_tokens_skipped"] = skipped(generation.facts, run.cfg)
    record["learning_rate"] = float(run.optimizer.param_groups[0]["lr"])
    run.log.step(step, generation.facts, record, clock, run.rewards.metrics(world.gather))
