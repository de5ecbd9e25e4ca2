"""GRPO, the whole loop: sync → draw → sample → score → pack → loss → step → log.

    python -m nanogrpo.run.warmup runs/base                                   # a small base model, made in half a minute
    python train.py --model runs/base --data arithmetic --output-dir runs/first --learning-rate 3e-4
    python train.py --model Qwen/Qwen3-0.6B --data gsm8k.jsonl --reward-funcs accuracy my_rewards.py:brevity

In: a checkpoint, prompts, reward functions (config.py lists every option). Out:
output_dir/metrics.jsonl and checkpoint-N. Each part is one file, and each line of `train` below
names it. Read next: batch.py (what flows), experience.py (what a step learns from), grpo.py (the
algorithm).
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import sys
from collections import Counter
from collections.abc import Iterator

from nanogrpo import cli
from nanogrpo import step as experience
from nanogrpo.config import Config
from nanogrpo.distributed import fsdp
from nanogrpo.distributed.failure import Stop
from nanogrpo.distributed.world import World, join
from nanogrpo.engine.ahead import staleness
from nanogrpo.errors import UserError
from nanogrpo.grpo import loss as grpo
from nanogrpo.logs import metrics
from nanogrpo.logs.trace import Trace
from nanogrpo.run import memory, optim, output
from nanogrpo.run.setup import Run, setup
from nanogrpo.run.state import Saver
from nanogrpo.vllm.server import ServerLost


def train(cfg: Config, world: World, stop: Stop) -> None:
    """One run, from the options to the last checkpoint. Every rank runs it; what differs is its
    share of the samples.
    """
    run = setup(cfg, world)
    model, optimizer, bonus, log = run.model, run.optimizer, run.bonus, run.log
    saver = Saver(
        cfg, world, model, optimizer, run.tokenizer, run.config_json, run.origin, run.reference
    )
    with contextlib.closing(log), saver, engine_of(run, saver), Trace(cfg, world) as trace:
        if cfg.eval_steps and run.start == 0 and not world.any(stop.asked):
            evaluate(run)
        if world.any(stop.asked):
            logging.getLogger("nanogrpo").info(
                "asked to stop before the first step: nothing was trained, nothing is saved"
            )
            return
        for step in range(run.start, cfg.max_steps):
            trace.begin(step)
            clock, meter = metrics.Clock(), metrics.Meter()

            with clock("sync"):
                sync(run)  # the weights of the step before go to the engine
            with clock("sample"):
                samples = run.ahead.take(step)  # this rank's, with the engine's log-probs
            with clock("score"):
                std, replaced = experience.judge(run, samples, step)  # rewards and advantages

            with clock("train"):
                # the micro-batches of each optimizer step
                updates = experience.pack(run, samples, step)
                for batches in updates:
                    experience.add_logps(run, batches)  # before the weights move
                # the same micro-batches, once per pass
                for batches in updates * cfg.num_iterations:
                    bonus.weigh(batches)
                    # gradients accumulate, and are summed over the ranks once
                    for batch in batches:
                        fsdp.sync_gradients(model, batch is batches[-1])
                        out = model.forward_packed(batch, grpo.objective(batch, cfg))
                        # FSDP takes the mean over ranks: this makes it the sum
                        (out.loss * world.size).backward()
                        meter.add(batch, out)
                        bonus.add(batch, out)
                    rate = optim.learning_rate(step * cfg.updates_per_step + meter.updates, cfg)
                    meter.end_update(optim.clip_and_step(model, optimizer, rate, cfg.max_grad_norm))
                    bonus.end_update()
            run.done = step + 1
            if cfg.sync_ref_model and run.done % cfg.ref_model_sync_steps == 0:
                fsdp.mix(run.reference, model, cfg.ref_model_mixup_alpha)

            facts = metrics.facts(samples, world)
            row = {**metrics.of_samples(facts, std), **meter.summary(world)}
            row |= {
                **memory.measured(world, run.estimate),
                **bonus.metrics(),
                "learning_rate": rate,
            }
            if cfg.max_resample_times:
                row["resampled_groups"] = replaced
            if cfg.engine == "vllm":
                row |= staleness(world.concat([Counter(s.versions) for s in samples]), step)
                row["vllm/restarts"] = run.engine.restarts
            log.step(step, facts, row, clock, run.rewards.metrics(world.gather))
            log.completions.log(step, samples)
            # a signal to any rank, or its failed save, is known to all
            stopped = world.any(stop.asked, saver.failure())
            last = step + 1 == cfg.max_steps
            if cfg.eval_steps and (last or (not stopped and (step + 1) % cfg.eval_steps == 0)):
                evaluate(run)
            if last or stopped or (cfg.save_steps and (step + 1) % cfg.save_steps == 0):
                # copies the state; the writing goes on beside the next steps
                saver.save(step + 1, bonus.state)
            if stopped:
                break


@contextlib.contextmanager
def engine_of(run: Run, saver: Saver) -> Iterator[None]:
    """Ends the engine with the run, however that ends. When a server is lost for good, what is
    trained is saved first.
    """
    with contextlib.closing(run.engine), contextlib.closing(run.ahead):
        try:
            yield
        except ServerLost:  # on every rank
            if run.done > run.start:
                saver.save(run.done, run.bonus.state)
            raise


def sync(run: Run) -> None:
    """Brings the engine the weights after `run.done` steps, if it has them not yet."""
    if run.engine.version != run.done:
        run.engine.load(run.model, version=run.done)


def evaluate(run: Run) -> None:
    """Greedy completions of the held-out prompts, scored by the same rewards."""
    sync(run)
    greedy = dataclasses.replace(run.sampling, temperature=0.0)
    samples = run.engine.sample(run.world.part(run.eval_prompts), 1, greedy, step=0)
    experience.score(run, samples)
    run.log.evaluation(
        run.done, metrics.facts(samples, run.world), run.rewards.metrics(run.world.gather)
    )


def main(argv: list[str] | None = None) -> int:
    logging.basicConfig(
        level=logging.INFO if os.environ.get("RANK", "0") == "0" else logging.WARNING,
        format="%(message)s",
    )
    try:
        cfg = cli.parse(argv)
        cfg.validate()
        # a reward function may change the folder
        cfg = dataclasses.replace(cfg, output_dir=os.path.abspath(cfg.output_dir))
        with join(cfg) as world, Stop() as stop, output.claimed(cfg, world):
            train(cfg, world, stop)
    # the latter: weights or log-probs that are no numbers
    except (UserError, FloatingPointError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    # while the processes join: later, it ends the run after the step (ends.Stop)
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
