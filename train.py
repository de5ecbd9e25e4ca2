"""Train a language model with GRPO. The function `train` below is the whole loop.

Each step draws a few prompts, samples a group of completions for each prompt, and scores the
completions. A completion's advantage says how much better it scored than its group did on average.
The loss makes the tokens of a completion more likely if its advantage is positive, and less likely
if its advantage is negative:

    sync weights → draw → sample → score → advantages → pack → loss → optimizer step → log

    nanogrpo warmup runs/base                       # make a small base model in half a minute
    python train.py --model runs/base --data arithmetic --output-dir runs/first --learning-rate 3e-4
    python train.py --model Qwen/Qwen3-0.6B --data gsm8k.jsonl --reward-funcs accuracy my.py:brevity

In: a checkpoint, prompts, and reward functions (nanogrpo/config.py lists every option).
Out: output_dir/metrics.jsonl and checkpoints that transformers can load. A checkpoint is written
every --save-steps steps and at the end, to output_dir/checkpoint-N (N: number of finished steps).
By default the last two checkpoints are kept.
Read next: nanogrpo/types.py (the data that the parts exchange), nanogrpo/step.py (what happens to
the samples), nanogrpo/grpo/advantages.py, nanogrpo/grpo/loss.py and `policy_terms` in
kernels/reference/policy.py (the algorithm, down to the lines that compute the loss).
"""

import dataclasses
import logging
import os
import sys
from pathlib import Path

import torch

from nanogrpo.config import Config
from nanogrpo.distributed import fsdp
from nanogrpo.distributed.failure import asked, stoppable
from nanogrpo.distributed.world import join
from nanogrpo.errors import UserError
from nanogrpo.extras.attach import attach, parse
from nanogrpo.grpo.loss import objective
from nanogrpo.logs.metrics import Clock, Meter
from nanogrpo.run import output
from nanogrpo.run.optim import clip_and_step
from nanogrpo.run.setup import NOTHING, Given, Run, closing, load, settle, setup
from nanogrpo.step import assign_advantages, evaluate, log_step, pack, score, sync


def train(run: Run) -> None:
    """Train to the last step. Training starts from cfg.model or, with --resume, from the last
    checkpoint in cfg.output_dir. A resumed run needs the same options, except those that config.py
    declares with `free_option`, such as `--save-steps`.

    Every rank runs this function, and samples and scores its own share of the prompts. `pack` may
    then move samples to other ranks, so that all ranks have about the same work.
    """
    cfg, world, model = run.cfg, run.world, run.model
    with closing(run):
        # before the first step, or if a signal has skipped the evaluation before a resumed run
        if run.due(cfg.eval_steps) and not run.log.evaluated:
            evaluate(run)
        for step in range(run.start, cfg.max_steps):
            clock, meter = Clock(world.device), Meter(run.features)

            with clock("sync"):
                sync(run)  # copies the weights to the engine, unless the engine has them already

            with clock("sample"):
                prompts = world.part(run.draw(cfg.seed, step))  # this rank's share
                samples = run.engine.sample(prompts, cfg.num_generations, run.sampling, step)

            with clock("score"):
                score(run, samples, step)  # sets sample.reward
                # sets sample.advantage: (reward - mean) / std of its group
                generation = assign_advantages(run, samples)

            # a user's function may have turned gradients off
            with clock("train"), torch.enable_grad():
                # `pack` may move samples between ranks, and computes log-probs for the loss.
                # `pack` yields the micro-batches of each optimizer step.
                # `last` marks the last micro-batch of an optimizer step.
                # With --steps-per-generation, the samples are split into several lists.
                # With --num-iterations, all lists are repeated.
                # By default, --steps-per-generation and --num-iterations are 1.
                # Samples with advantage 0 have no gradient and are left out, unless beta > 0.
                # The tokens of these samples still count in the weight below.
                for batches in pack(run, samples, generation, step):
                    for batch, last in batches:
                        # The loss is Σ weight · (-min(ratio·A, clip(ratio)·A) + beta·KL).
                        # The sum is over the completion tokens; ratio = policy / old policy.
                        # See `policy_terms` in kernels/reference/policy.py.
                        # `objective` returns a function of the hidden states and the output matrix.
                        # This function computes the loss and its gradient.
                        # The model calls this function instead of returning logits.
                        #
                        # By default, beta is 0, and the weight is the same for all tokens:
                        # 1 / (completion tokens of the optimizer step over all ranks).
                        # By default, a step of this loop also makes only one optimizer step.
                        # Then every ratio is 1, and nothing is clipped.
                        # The gradient is then the gradient of -A · log π.
                        out = model.forward_strip(batch, objective(batch, cfg, run.features))
                        # Sums gradients over micro-batches and ranks.
                        fsdp.backward(model, out.loss, world, last)
                        meter.add(batch, out)
                    rate = run.learning_rate(step * cfg.updates_per_step + meter.updates)
                    meter.end_update(clip_and_step(model, run.optimizer, rate, cfg.max_grad_norm))

            run.done = step + 1
            log_step(run, step, samples, generation, meter, clock)
            # `stopping` is True if any rank has received a signal to stop.
            # If a save failed on any rank, this line raises the error of the save on every rank.
            stopping = world.any(asked.is_set(), error=run.saver.failure())
            if run.due(cfg.eval_steps) and not stopping:
                evaluate(run)  # first copies the new weights to the engine
            if run.due(cfg.save_steps or cfg.max_steps) or stopping:
                run.saver.save(run.done)  # writes in the background
            if stopping:
                break


@torch.inference_mode(False)  # a caller may have turned inference mode on
def start(cfg: Config, given: Given = NOTHING) -> Path:
    """Check the options, then train, in one process or in all processes that torchrun started.
    Return the output folder.
    """
    cfg.validate()
    # An absolute path, because a reward function may change the working directory.
    cfg = dataclasses.replace(cfg, output_dir=os.path.abspath(cfg.output_dir))
    features = attach(cfg, given)  # optional parts (nanogrpo/extras/attach.py)
    with join(cfg) as world, stoppable(), output.claimed(cfg, world):
        inputs = load(cfg, world, features, given)  # everything but the weights
        settle(inputs)  # sets max_steps; on a GPU, features set further options
        train(setup(inputs))
    return Path(cfg.output_dir)


def main(argv: list[str] | None = None, given: Given = NOTHING) -> int:
    level = logging.INFO if os.environ.get("RANK", "0") == "0" else logging.WARNING
    logging.basicConfig(level=level, format="%(message)s")
    try:
        start(parse(argv, given), given)
    # FloatingPointError: weights, log-probs or gradients are NaN or infinite.
    except (UserError, FloatingPointError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    # Ctrl-C before the first step. During the steps, `stoppable` handles signals.
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
