"""Train a language model with GRPO. The function `train` below is the whole loop.

Each step samples a group of completions for each of a few prompts and scores them. A completion's
advantage says how much better it scored than its group did on average. The loss makes the tokens of
completions with a positive advantage more likely, and those with a negative advantage less likely:

    sync weights → draw → sample → score → advantages → pack → loss → optimizer step → log

    nanogrpo warmup runs/base                       # make a small base model in half a minute
    python train.py --model runs/base --data arithmetic --output-dir runs/first --learning-rate 3e-4
    python train.py --model Qwen/Qwen3-0.6B --data gsm8k.jsonl --reward-funcs accuracy my.py:brevity

In: a checkpoint, prompts, and reward functions (nanogrpo/config.py lists every option).
Out: output_dir/metrics.jsonl and output_dir/checkpoint-N.
Read next: nanogrpo/types.py (the data that the parts exchange), nanogrpo/step.py (what happens to
the samples), nanogrpo/grpo/advantages.py, nanogrpo/grpo/loss.py and `policy_terms` in
kernels/reference.py (the algorithm, down to the lines that compute the loss).
"""

from __future__ import annotations

import dataclasses
import logging
import os
import sys

from nanogrpo import cli
from nanogrpo.config import Config
from nanogrpo.distributed import fsdp
from nanogrpo.distributed.failure import Stop
from nanogrpo.distributed.world import World, join
from nanogrpo.errors import UserError
from nanogrpo.grpo.loss import objective
from nanogrpo.run import output
from nanogrpo.run.optim import clip_and_step, learning_rate
from nanogrpo.run.setup import closing, setup
from nanogrpo.step import assign_advantages, begin, evaluate, log_step, measure, pack, score, sync


def train(cfg: Config, world: World, stop: Stop) -> None:
    """Train to the last step, starting from cfg.model, or with --resume from the last checkpoint.

    Every rank runs this function, on its own share of the samples.
    """
    run = setup(cfg, world)
    model, optimizer = run.model, run.optimizer
    with closing(run):  # if the last vLLM server is lost, this saves before it closes everything
        if not begin(run, stop):  # with --eval-steps, it evaluates first; False: a signal came
            return
        for step in range(run.start, cfg.max_steps):
            clock, meter = measure(run)

            with clock("sync"):
                sync(run)  # the engine gets the current weights

            with clock("sample"):
                prompts = run.draw(step)  # this rank's share of the step's prompts
                samples = run.engine.sample(prompts, cfg.num_generations, run.sampling, step)

            with clock("score"):
                score(run, samples, step)  # sets sample.reward
                # Sets sample.advantage, by default (reward - mean) / std of its group.
                assign_advantages(run, samples)

            with clock("train"):
                # One list of micro-batches for each optimizer step. If the loss needs log-probs
                # from before the first of them (old_logp) or from the reference model (ref_logp),
                # the micro-batches contain these.
                for batches in pack(run, samples, step):
                    for batch in batches:
                        # Σ weight · (-min(ratio·A, clip(ratio)·A) + beta·KL) over the tokens, with
                        # ratio = policy / old policy: see policy_terms in kernels/reference.py. By
                        # default there is one optimizer step per generation: then every ratio is 1,
                        # nothing is clipped, and the gradient is that of -A · log π. The weight is
                        # 1 / (tokens of the optimizer step, over all ranks).
                        out = model.forward_packed(batch, objective(batch, cfg))
                        # Sums gradients over micro-batches and ranks.
                        fsdp.backward(model, out.loss, world, last=batch is batches[-1])
                        meter.add(batch, out)
                    rate = learning_rate(step * cfg.updates_per_step + meter.updates, cfg)
                    meter.end_update(clip_and_step(model, optimizer, rate, cfg.max_grad_norm))

            run.done = step + 1
            fsdp.update_reference(run.reference, model, cfg, run.done)  # with --sync-ref-model
            log_step(run, step, samples, meter, clock)
            # True if a signal reached any rank. If a save failed on any rank, its error is raised
            # here.
            stopping = world.any(stop.asked, error=run.saver.failure())
            if run.evaluates(stopping):
                evaluate(run)
            if run.saves(stopping):
                run.saver.save(run.done, run.entropy_bonus.state)  # writes in the background
            if stopping:
                break


def main(argv: list[str] | None = None) -> int:
    main_rank = os.environ.get("RANK", "0") == "0"
    level = logging.INFO if main_rank else logging.WARNING
    logging.basicConfig(level=level, format="%(message)s")
    try:
        cfg = cli.parse(argv)
        cfg.validate()
        # An absolute path, because a reward function may change the working directory.
        cfg = dataclasses.replace(cfg, output_dir=os.path.abspath(cfg.output_dir))
        with join(cfg) as world, Stop() as stop, output.claimed(cfg, world):
            train(cfg, world, stop)
    except (
        UserError,
        FloatingPointError,
    ) as e:  # FloatingPointError: NaN or inf weights, log-probs or gradients
        print(f"error: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # while the ranks connect; later, Stop ends the run after the step
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
