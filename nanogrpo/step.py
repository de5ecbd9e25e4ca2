"""What a step does with its samples: rewards, advantages, micro-batches, and the log record.

In: the samples of a step. Out: the same samples with rewards and advantages, then the micro-batches
(`PackedBatch`) of each optimizer step. This file moves data between the parts of a run and its
ranks. The algorithm itself is in grpo/. Read before: train.py. Read next: grpo/advantages.py.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from nanogrpo.config import Config
from nanogrpo.distributed.failure import Stop
from nanogrpo.engine.ahead import staleness
from nanogrpo.engine.base import SamplingParams, stream
from nanogrpo.grpo import entropy, mismatch, packing
from nanogrpo.grpo import loss as grpo
from nanogrpo.grpo.advantages import step_advantages
from nanogrpo.logs import metrics
from nanogrpo.model import lora
from nanogrpo.model.decoder import Decoder
from nanogrpo.rewards.call import TrainerState
from nanogrpo.run import memory
from nanogrpo.run.setup import Run
from nanogrpo.types import PackedBatch, Sample

log = logging.getLogger("nanogrpo")


def sync(run: Run) -> None:
    """Send the current weights to the engine, unless it has them already."""
    if run.engine.version != run.done:
        run.engine.load(run.model, version=run.done)


# --- rewards and advantages -----------------------------------------------------------------------


def score(run: Run, samples: list[Sample], step: int) -> None:
    """Decode the samples and call the reward functions on them.

    With dynamic sampling (--max-resample-times), groups without a signal are then replaced.
    """
    fill_rewards(run, samples)
    if run.cfg.max_resample_times:
        run.resampled_groups = resample(run, samples, step)


def fill_rewards(run: Run, samples: list[Sample]) -> None:
    """Set `text`, `rewards` and `reward` of each sample."""
    for sample in samples:
        sample.text = run.tokenizer.decode(sample.token_ids)
    run.rewards.score(samples, TrainerState(run.done, run.cfg.max_steps, run.epoch))


def assign_advantages(run: Run, samples: list[Sample]) -> None:
    """Set `advantage` of each sample: how much better it scored than its group."""
    for sample, advantage in zip(samples, run.world.part(advantages(run, samples))):
        sample.advantage = advantage


def advantages(run: Run, samples: list[Sample]) -> list[float]:
    """Return the advantages of the samples of all ranks. Every rank must call."""
    scored = run.world.concat([(s.reward, [*s.rewards.values()]) for s in samples])
    return step_advantages([r for r, _ in scored], run.cfg, [each for _, each in scored])[0]


def resample(run: Run, samples: list[Sample], step: int) -> int:
    """Replace groups without a signal by groups from different prompts (DAPO, Yu et al. 2025, 3.2).

    A group has no signal if all its advantages are 0. (Equal rewards are not the criterion: maxrl
    also gives 0 if the mean is not positive, and under normalize_then_sum the rewards of individual
    functions may differ although their sums are equal.) Groups that still have no signal after
    `max_resample_times` rounds are kept. Returns the number of groups sampled again, over all
    ranks.

    The new prompts and their random streams are functions of (seed, step, round, index of the
    replaced group), so neither resuming nor the number of ranks changes them. Every rank must call;
    each rank samples the replacements of its own groups.
    """
    n, world, count = run.cfg.num_generations, run.world, 0
    groups = len(samples) // n
    first = sum(world.gather(groups)[: world.rank])  # index of this rank's first group in the step
    for attempt in range(1, run.cfg.max_resample_times + 1):
        found = advantages(run, samples)
        flat = [g for g in range(len(found) // n) if not any(found[g * n : (g + 1) * n])]
        if not flat:
            break
        # A separate seed gives a different order of prompts, and different completions if a prompt
        # is drawn again.
        seed = stream(run.cfg.seed, step, attempt, 0)
        pairs = zip(flat, run.draw_all(seed, step))
        mine = [(g - first, prompt) for g, prompt in pairs if first <= g < first + groups]
        params = dataclasses.replace(run.sampling, seed=seed)
        fresh = run.engine.sample([prompt for _, prompt in mine], n, params, step)
        fill_rewards(run, fresh)
        for i, (g, _) in enumerate(mine):
            samples[g * n : (g + 1) * n] = fresh[i * n : (i + 1) * n]
        count += len(flat)
    return count


def evaluate(run: Run) -> None:
    """Complete the held-out prompts, by default greedily, score them with the same rewards, and log
    it all.
    """
    sync(run)
    prompts, n = run.world.part(run.eval_prompts), run.cfg.num_generations_eval
    samples = run.engine.sample(prompts, n, evaluation_sampling(run.cfg, run.sampling), step=0)
    fill_rewards(run, samples)
    facts = metrics.facts(samples, run.world)
    run.saver.evaluated(run.done, metrics.of_evaluation(facts, n))
    run.log.evaluation(run.done, facts, run.rewards.metrics(run.world.gather))
    run.log.completions.evaluation(run.done, samples)


def evaluation_sampling(cfg: Config, training: SamplingParams) -> SamplingParams:
    """Return how an evaluation samples. Its random numbers are not those of training."""
    temperature, seed = cfg.eval_temperature, stream(cfg.seed, 0, 0, 1)
    return dataclasses.replace(training, temperature=temperature, top_p=cfg.eval_top_p, seed=seed)


def begin(run: Run, stop: Stop) -> bool:
    """Evaluate the model before its first step. Return False if a signal asks to stop first."""
    if run.start == 0 and run.cfg.eval_steps and not run.world.any(stop.asked):
        evaluate(run)
    if not run.world.any(stop.asked):
        return True
    log.info("asked to stop before the first step: nothing was trained, and nothing is saved")
    return False


def measure(run: Run) -> tuple[metrics.Clock, metrics.Meter]:
    """Return the clock and the meter of a new step, after ending the trace of the step before.

    The trace ends here because one that cannot be written must not cost its step the evaluation
    and the checkpoint.
    """
    run.trace.step()
    return metrics.Clock(), metrics.Meter(run.cfg, run.entropy_bonus)


# --- micro-batches --------------------------------------------------------------------------------


def pack(run: Run, samples: list[Sample], step: int) -> Iterator[Sequence[PackedBatch]]:
    """Yield this rank's micro-batches of each optimizer step, repeated num_iterations times.

    The old and reference log-probs are computed before the first optimizer step. Every rank must
    call and iterate. A sample moves to a different rank only if that is needed to balance the
    ranks.
    """
    world, cfg = run.world, run.cfg
    sizes = world.concat(packing.sizes(samples, cfg))
    updates = packing.schedule(sizes, cfg, step, world.size, run.model.cfg.pair_cost)
    mine = world.exchange(samples, packing.wanted(updates, world.size))
    packed = [packing.pack(update, mine, cfg, world.rank, world.device) for update in updates]
    for batches in packed:
        add_logps(run, batches)
    for update, batches in enumerate(packed * cfg.num_iterations):
        if cfg.lora_dropout:  # a function of these numbers, so a resumed run has the same dropout
            torch.manual_seed(stream(cfg.seed, step, update, world.rank))
        run.entropy_bonus.weigh(batches)  # the entropy bonus may change after each optimizer step
        yield batches


@torch.no_grad()
def logp(model: Decoder, batch: PackedBatch, cfg: Config) -> Tensor:
    """Return the log-probs [M] float32 of a batch's targets at the sampling temperature."""
    return model.forward_packed(batch, grpo.logp_of(batch, cfg))[0]


@torch.no_grad()
def add_logps(run: Run, batches: Sequence[PackedBatch]) -> None:
    """Fill in the old and reference log-probs that the loss of one optimizer step needs.

    old_logp: log-probs under the policy that sampled, from the trainer or the engine. It stays None
    on policy, where the ratio is 1. ref_logp: log-probs under the reference model, for the KL.
    These also determine the importance weights that correct for the mismatch between engine and
    trainer (mismatch.py). The entropies determine which tokens are trained
    (--top-entropy-quantile).
    """
    cfg, entropies = run.cfg, []
    mode, top = cfg.vllm_importance_sampling_mode, cfg.top_entropy_quantile < 1
    if not (cfg.old_from_engine or cfg.recomputes_old or top or run.reference is not None):
        return  # without building the strips
    for batch in batches:
        if cfg.old_from_engine:
            batch.old_logp = batch.sampling_logp
        if cfg.recomputes_old or top:
            before, h = run.model.forward_packed(batch, grpo.logp_of(batch, cfg))
            batch.old_logp = before if cfg.recomputes_old else batch.old_logp
            entropies.append(h)
        if mode != "off":
            bounds = cfg.vllm_importance_sampling_clip_max, cfg.vllm_importance_sampling_clip_min
            assert batch.old_logp is not None  # recomputed above, or the engine's
            batch.importance = mismatch.correction(
                batch.old_logp, batch.sampling_logp, batch.sample, mode, *bounds
            )
        if run.reference is not None:
            with lora.disabled(run.reference):
                batch.ref_logp = logp(run.reference, batch, cfg)
    if top:
        entropy.keep_top(batches, entropies, cfg.top_entropy_quantile, run.world)


# --- the record in the log ------------------------------------------------------------------------


def log_step(
    run: Run, step: int, samples: list[Sample], meter: metrics.Meter, clock: metrics.Clock
) -> None:
    """Write the metrics of a step, and its completions if requested. Every rank must call."""
    world, cfg = run.world, run.cfg
    facts = metrics.facts(samples, world)
    by_function = [[*f.rewards.values()] for f in facts]
    advantages, std = step_advantages([f.reward for f in facts], cfg, by_function)
    record = {**metrics.of_samples(facts, std), "epoch": run.epoch, **meter.summary(world)}
    record |= {**memory.measured(world, run.estimate), **run.engine.metrics()}
    if cfg.engine == "vllm":
        record |= staleness(world.concat([Counter(s.versions) for s in samples]), step)
    record["frac_tokens_skipped"] = packing.skipped(world.concat(packing.sizes(samples, cfg)))
    record["learning_rate"] = float(run.optimizer.param_groups[0]["lr"])
    if cfg.max_resample_times:
        record["resampled_groups"] = run.resampled_groups
    run.log.step(step, facts, record, clock, run.rewards.metrics(world.gather), advantages)
    run.log.samples(step, samples)
    if meter.tokens:
        run.log.token_log.step(step, samples, advantages, meter.tokens, run.tokenizer)
