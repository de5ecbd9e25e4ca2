"""Train a language model with GRPO. The function `train` below is the whole loop.

Each step samples a group of completions for each of a few prompts and scores them. A completion's
advantage says how much better it scored than its group did on average. The loss makes the tokens of
completions with a positive advantage more likely, and those with a negative advantage less likely:

    sync weights → draw → sample → score → advantages → pack → loss → optimizer step → log

    nanogrpo warmup runs/base                       # make a small base model in half a minute
    python train.py --model runs/base --data arithmetic --output-dir runs/first --learning-rate 3e-4
    python train.py --model Qwen/Qwen3-0.6B --data gsm8k.jsonl --reward-funcs accuracy my.py:brevity

In: a checkpoint, prompts, and reward functions (nanogrpo/config.py lists every option).
Out: output_dir/metrics.jsonl, and, every --save-steps steps and at the end, output_dir/checkpoint-N
(N: finished steps), which transformers can load. By default the last two checkpoints are kept.
Read next: nanogrpo/types.py (the data that the parts exchange), nanogrpo/step.py (what happens to
the samples), nanogrpo/grpo/advantages.py, nanogrpo/grpo/loss.py and `policy_terms` in
kernels/reference.py (the algorithm, down to the lines that compute the loss).
"""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
from pathlib import Path

from nanogrpo import cli
from nanogrpo.config import Config
from nanogrpo.distributed import fsdp
from nanogrpo.distributed.failure import Stop
from nanogrpo.distributed.world import World, join
from nanogrpo.errors import UserError
from nanogrpo.grpo.loss import objective
from nanogrpo.run import output
from nanogrpo.run.memory import explained
from nanogrpo.run.optim import clip_and_step, learning_rate
from nanogrpo.run.setup import NOTHING, Given, closing, setup
from nanogrpo.step import assign_advantages, begin, evaluate, log_step, measure, pack, score, sync


def train(cfg: Config, world: World, stop: Stop, given: Given = NOTHING) -> None:
    """Train to the last step, starting from cfg.model, or with --resume from the last checkpoint in
    cfg.output_dir. To resume, give the same options (some, such as --save-steps, may differ).

    Every rank runs this function and scores its own share of the prompts. It also samples that
    share; with vLLM, rank 0 sends the requests of all ranks. `pack` may then move samples to other
    ranks, so that all ranks have about the same work. `given` has the functions and data that come
    from Python instead of options (nanogrpo/api.py).
    """
    run = setup(cfg, world, given)
    cfg, model, optimizer = run.cfg, run.model, run.optimizer
    with closing(run):  # if no vLLM server can be recovered, this saves the finished steps first
        # With --eval-steps, a new run is evaluated first. False: a signal came; nothing is saved.
        if not begin(run, stop):
            return
        for step in range(run.start, cfg.max_steps):
            clock, meter = measure(run)  # meter.updates counts the step's optimizer steps

            with clock("sync"):
                sync(run)  # copies the current weights to the engine, unless it has them already

            with clock("sample"):
                prompts = run.draw(step)  # this rank's share of the step's prompts
                # With --max-staleness, older weights may have sampled these, in earlier steps.
                samples = run.engine.sample(prompts, cfg.num_generations, run.sampling, step)

            with clock("score"):
                # Sets sample.reward. With --max-resample-times, also replaces some groups.
                score(run, samples, step)
                # Sets sample.advantage, by default (reward - mean) / std of its group.
                assign_advantages(run, samples)

            with clock("train"):
                # One list of micro-batches per optimizer step: --steps-per-generation splits the
                # samples into several lists, --num-iterations repeats all lists; both are 1 by
                # default. Samples with advantage 0 have no gradient by default and are left out,
                # but their tokens still count in the weight below.
                # If the loss needs log-probs from before this step's first update (old_logp) or
                # from the reference model (ref_logp), the micro-batches contain these.
                for batches in pack(run, samples, step):
                    for batch in batches:
                        # Σ weight · (-min(ratio·A, clip(ratio)·A) + beta·KL) over the completion
                        # tokens, with ratio = policy / old policy: see policy_terms in
                        # kernels/reference.py. `objective` returns this loss as a function of the
                        # hidden states and the output matrix, which the model calls instead of
                        # returning logits.
                        #
                        # By default (--loss-type dapo; other types change the weight, or the
                        # clipped term itself) the weight is 1 / (completion tokens of the
                        # optimizer step, over all ranks), beta is 0, and a step of this loop makes
                        # one optimizer step. Then every ratio is 1, nothing is clipped, and the
                        # gradient is that of -A · log π. (With --max-staleness the ratio compares,
                        # by default, with the older weights that sampled.)
                        out = model.forward_packed(batch, objective(batch, cfg))
                        # Sums gradients over micro-batches and ranks.
                        fsdp.backward(model, out.loss, world, last=batch is batches[-1])
                        meter.add(batch, out)  # for the log, and for --use-adaptive-entropy
                    rate = learning_rate(step * cfg.updates_per_step + meter.updates, cfg)
                    meter.end_update(clip_and_step(model, optimizer, rate, cfg.max_grad_norm))

            run.done = step + 1
            # With --sync-ref-model, every --ref-model-sync-steps steps; otherwise the reference
            # stays cfg.model, also after --resume.
            fsdp.update_reference(run.reference, model, cfg, run.done)
            log_step(run, step, samples, meter, clock)
            # True if a signal reached any rank. If a save failed on any rank, its error is raised
            # here.
            stopping = world.any(stop.asked, error=run.saver.failure())
            if run.evaluates(stopping):
                evaluate(run)  # of the new weights: it calls `sync` first
            if run.saves(stopping):
                # Writes in the background. An adaptive entropy bonus has a state of its own.
                run.saver.save(run.done, run.entropy_bonus.state)
            if stopping:
                break


def start(cfg: Config, given: Given = NOTHING) -> Path:
    """Check the options, then train, alone or in the world that torchrun has made. Return the
    output folder.
    """
    cfg.validate()
    # An absolute path, because a reward function may change the working directory.
    cfg = dataclasses.replace(cfg, output_dir=os.path.abspath(cfg.output_dir))
    with join(cfg) as world, Stop() as stop, output.claimed(cfg, world), explained(cfg):
        train(cfg, world, stop, given)
    return Path(cfg.output_dir)


def main(argv: list[str] | None = None) -> int:
    main_rank = os.environ.get("RANK", "0") == "0"
    level = logging.INFO if main_rank else logging.WARNING
    logging.basicConfig(level=level, format="%(message)s")
    try:
        start(cli.parse(argv))
    except (
        UserError,
        FloatingPointError,
    ) as e:  # FloatingPointError: NaN or inf weights, log-probs or gradients
        print(f"error: {e}", file=sys.stderr)
        return 2
    # While the ranks connect. Later, Stop ends the run after the step, or at a second signal.
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
