"""What a step learns from: samples → rewards → advantages → micro-batches with all that the loss
compares with.

In: the samples that an engine drew. Out: the same with rewards and advantages; then this rank's
`PackedBatch`es. The words between the ranks are here; what is computed is in rewards.py, grpo.py,
packing.py, mismatch.py and entropy.py. Read before: train.py. Read next: grpo.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nanogrpo.config import Config
from nanogrpo.grpo import entropy, mismatch, packing
from nanogrpo.grpo import loss as grpo
from nanogrpo.model import lora
from nanogrpo.model.decoder import Decoder
from nanogrpo.resample import resample
from nanogrpo.rewards.call import TrainerState
from nanogrpo.run.setup import Run
from nanogrpo.types import PackedBatch, Sample


def score(run: Run, samples: list[Sample]) -> None:
    """Fills the text and the rewards of samples."""
    for sample in samples:
        sample.text = run.tokenizer.decode(sample.token_ids)
    if samples:
        epoch = run.done * run.cfg.prompts_per_step / len(run.prompts)
        run.rewards.score(samples, TrainerState(run.done, run.cfg.max_steps, epoch))


def judge(run: Run, samples: list[Sample], step: int) -> tuple[Tensor, int]:
    """Fills rewards and advantages; with dynamic sampling, replaces groups that teach nothing.

    Returns the standard deviations of grpo.advantages, and how many groups were sampled anew.
    """
    score(run, samples)
    replaced = resample(run, samples, step, score, advantages)
    found, std = advantages(run, samples)
    for sample, advantage in zip(samples, run.world.part(found)):
        sample.advantage = advantage
    return std, replaced


def advantages(run: Run, samples: list[Sample]) -> tuple[list[float], Tensor]:
    """grpo.step_advantages of the samples of all ranks, from their rewards. Every rank calls."""
    scored = run.world.concat([(s.reward, [*s.rewards.values()]) for s in samples])
    return grpo.step_advantages([r for r, _ in scored], run.cfg, [each for _, each in scored])


def pack(run: Run, samples: list[Sample], step: int) -> list[list[PackedBatch]]:
    """This rank's micro-batches of each optimizer step of a pass. Samples change rank only where
    the balance needs it.
    """
    world, cfg = run.world, run.cfg
    sizes = world.concat(packing.sizes(samples, cfg))
    updates = packing.schedule(sizes, cfg, step, world.size, run.model.cfg.pair_cost)
    mine = world.exchange(samples, packing.wanted(updates, world.size))
    return [
        [batch.to(world.device) for batch in packing.pack(update, mine, cfg, world.rank)]
        for update in updates
    ]


@torch.no_grad()
def logp(model: Decoder, batch: PackedBatch, cfg: Config) -> Tensor:
    """The model's log-probs of a batch's completion tokens at the sampling temperature, [M]
    float32.
    """
    return model.forward_packed(batch, grpo.logp_of(batch, cfg))[0]


@torch.no_grad()
def add_logps(run: Run, batches: list[PackedBatch]) -> None:
    """What the loss of an optimizer step compares with, taken before the weights move.

    Log-probs of the policy that sampled, by the trainer or by the engine, and of the reference;
    from them the correction for the engine, and from the entropies the tokens that are trained.
    """
    cfg, entropies = run.cfg, []
    mode, top = cfg.vllm_importance_sampling_mode, cfg.top_entropy_quantile < 1
    recompute = not cfg.old_from_engine and (not cfg.on_policy or mode != "off")
    for batch in batches:
        if cfg.old_from_engine:
            batch.old_logp = batch.sampling_logp
        if recompute or top:
            before, h = run.model.forward_packed(batch, grpo.logp_of(batch, cfg, entropy=True))
            batch.old_logp = before if recompute else batch.old_logp
            entropies.append(h)
        if mode != "off":
            bounds = cfg.vllm_importance_sampling_clip_max, cfg.vllm_importance_sampling_clip_min
            batch.importance = mismatch.correction(
                batch.old_logp, batch.sampling_logp, batch.sample, mode, *bounds
            )
        if run.reference is not None:
            with lora.off(run.reference):
                batch.ref_logp = logp(run.reference, batch, cfg)
    if top:
        entropy.keep_top(batches, entropies, cfg.top_entropy_quantile, run.world)
