"""GRPO on one machine, the whole loop: draw → sample → score → pack → loss → step → sync → log.

    python -m nanogrpo.warmup runs/base                                   # a small base model, made in half a minute
    python train.py --model runs/base --data arithmetic --output-dir runs/first --learning-rate 3e-4
    python train.py --model Qwen/Qwen3-0.6B --data gsm8k.jsonl --reward-funcs accuracy my_rewards.py:brevity

In: a checkpoint, prompts, reward functions (config.py lists every option). Out: output_dir/metrics.jsonl and checkpoint-N.
Each part is one file, and each line of `train` below names it. Read next: batch.py (what flows), then grpo.py (the algorithm).
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import os
import sys

import torch
from torch import Tensor

from nanogrpo import cli, data, fsdp, grpo, memory, metrics, optim, packing, rewards
from nanogrpo.batch import PackedBatch, Sample
from nanogrpo.config import Config
from nanogrpo.errors import UserError
from nanogrpo.model import Decoder
from nanogrpo.run import Run, setup
from nanogrpo.state import Saver
from nanogrpo.world import Stop, World, join


def train(cfg: Config, world: World) -> None:
    """One run, from the options to the last checkpoint. Every rank runs it; what differs is its share of the samples."""
    run = setup(cfg, world)
    model, optimizer, engine, log = run.model, run.optimizer, run.engine, run.log
    if cfg.eval_steps and run.start == 0:
        evaluate(run, after=0)
    with Stop() as stop, Saver(cfg, world, model, optimizer, run.tokenizer, run.config) as saver:
        for step in range(run.start, cfg.max_steps):
            clock, meter = metrics.Clock(), metrics.Meter()

            with clock("sample"):
                prompts = data.draw(run.prompts, cfg.prompts_per_step, cfg.seed, step)  # a pure function of (seed, step)
                samples = engine.sample(world.share(prompts), cfg.num_generations, run.sampling, step)  # with their log-probs
            with clock("score"):
                score(run, samples)
                advantages, std = grpo.step_advantages(world.concat([s.reward for s in samples]), cfg)  # of all ranks
                for sample, advantage in zip(samples, world.share(advantages)):
                    sample.advantage = advantage

            with clock("train"):
                updates = pack(run, samples, step)  # the micro-batches of each optimizer step
                for batch in itertools.chain(*updates):
                    if not cfg.on_policy:  # the ratio is against the weights that sampled: taken before they move
                        batch.old_logp = logp(model, batch, cfg)
                    if run.reference is not None:
                        batch.ref_logp = logp(run.reference, batch, cfg)
                for batches in updates * cfg.num_iterations:  # the same micro-batches, once per pass
                    for batch in batches:  # gradients accumulate, and are summed over the ranks once
                        fsdp.sync_gradients(model, batch is batches[-1])
                        out = model.score(batch, grpo.objective(batch, cfg))
                        (out.loss * world.size).backward()  # FSDP takes the mean over ranks: this makes it the sum
                        meter.add(batch, out)
                    rate = optim.learning_rate(step * cfg.updates_per_step + meter.updates, cfg)
                    meter.end_update(optim.clip_and_step(model, optimizer, rate, cfg.max_grad_norm))
            with clock("sync"):
                engine.load(model, version=step + 1)

            facts = metrics.facts(samples, world)
            row = {**metrics.of_samples(facts, std), **meter.summary(world), **memory.measured(world), "learning_rate": rate}
            log.step(step, facts, row, clock)
            if cfg.num_completions_to_print and world.main:
                metrics.print_completions(samples, cfg.num_completions_to_print)
            stopped = world.agree(stop.asked, saver.failure())  # a signal to any rank, or its failed save, is known to all
            last = step + 1 == cfg.max_steps
            if cfg.eval_steps and (last or (step + 1) % cfg.eval_steps == 0):
                evaluate(run, after=step + 1)
            if last or stopped or (cfg.save_steps and (step + 1) % cfg.save_steps == 0):
                saver.save(step + 1)  # copies the state; the writing goes on beside the next steps
            if stopped:
                break
    engine.close()


def score(run: Run, samples: list[Sample]) -> None:
    """Fills the text and the rewards of samples."""
    for sample in samples:
        sample.text = run.tokenizer.decode(sample.token_ids)
    if samples:
        rewards.score(samples, run.reward_funcs, run.cfg.reward_weights)


def pack(run: Run, samples: list[Sample], step: int) -> list[list[PackedBatch]]:
    """This rank's micro-batches of each optimizer step of a pass. Samples change rank only where the balance needs it."""
    world, cfg = run.world, run.cfg
    sizes = world.concat(packing.sizes(samples, cfg))
    updates = packing.schedule(sizes, cfg, step, world.size, run.model.cfg.pair_cost)
    mine = world.exchange(samples, packing.wanted(updates, world.size))
    return [[batch.to(world.device) for batch in packing.pack(update, mine, cfg, world.rank)] for update in updates]


@torch.no_grad()
def logp(model: Decoder, batch: PackedBatch, cfg: Config) -> Tensor:
    """The model's log-probs of a batch's completion tokens at the sampling temperature, [M] float32."""
    return model.score(batch, grpo.logp_of(batch, cfg))[0]


def evaluate(run: Run, after: int) -> None:
    """Greedy completions of the held-out prompts, scored by the same rewards."""
    greedy = dataclasses.replace(run.sampling, temperature=0.0)
    samples = run.engine.sample(run.world.share(run.eval_prompts), 1, greedy, step=0)
    score(run, samples)
    run.log.evaluation(after, metrics.facts(samples, run.world))


def main(argv: list[str] | None = None) -> int:
    logging.basicConfig(level=logging.INFO if os.environ.get("RANK", "0") == "0" else logging.WARNING, format="%(message)s")
    try:
        cfg = cli.parse(argv)
        cfg.validate()
        with join(cfg) as world:
            train(cfg, world)
    except (UserError, FloatingPointError) as e:  # the latter: weights or log-probs that are no numbers
        print(f"error: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # before the first step: later, it ends the run after the step (world.Stop)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
