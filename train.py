"""GRPO on one machine, the whole loop: draw → sample → score → pack → loss → step → sync → log.

    python -m nanogrpo.warmup runs/base                                   # a small base model, made in half a minute
    python train.py --model runs/base --data arithmetic --output-dir runs/first --learning-rate 3e-4
    python train.py --model Qwen/Qwen3-0.6B --data gsm8k.jsonl --reward-funcs accuracy my_rewards.py:brevity

In: a checkpoint, prompts, reward functions (config.py lists every option). Out: output_dir/metrics.jsonl and checkpoint-N.
Each part is one file, and each line of `train` below names it. Read next: batch.py (what flows), then grpo.py (the algorithm).
"""

from __future__ import annotations

import dataclasses
import logging
import sys
from pathlib import Path

import torch

from nanogrpo import checkpoint, config, data, grpo, metrics, optim, packing, rewards, tasks
from nanogrpo.batch import Prompt, Sample
from nanogrpo.config import Config
from nanogrpo.errors import UserError
from nanogrpo.local_engine import LocalEngine
from nanogrpo.model import Decoder
from nanogrpo.rollout import Engine, SamplingParams
from nanogrpo.tokenizer import Tokenizer


def train(cfg: Config) -> None:
    """One run, from the options to the last checkpoint."""
    run = setup(cfg)
    model, optimizer, engine, log = run.model, run.optimizer, run.engine, run.log
    if cfg.eval_steps and run.start == 0:
        evaluate(run, after=0)
    for step in range(run.start, cfg.max_steps):
        clock, meter = metrics.Clock(), metrics.Meter()

        with clock("sample"):
            prompts = data.draw(run.prompts, cfg.prompts_per_step, cfg.seed, step)  # a pure function of (seed, step)
            samples = engine.sample(prompts, cfg.num_generations, run.sampling, step)  # P·G completions with their log-probs
        with clock("score"):
            decode(samples, run.tokenizer)
            rewards.score(samples, run.reward_funcs, cfg.reward_weights)
            std = grpo.assign_advantages(samples, cfg)

        with clock("train"):
            if not cfg.on_policy:  # the ratio is against the weights that sampled, so their log-probs are taken before they move
                score_logp(model, samples, "old_logp", cfg)
            if run.reference is not None:
                score_logp(run.reference, samples, "ref_logp", cfg)
            for minibatch in packing.minibatches(samples, cfg, step):  # one optimizer step each
                n_tokens = packing.trained_tokens(minibatch, cfg)
                for batch in packing.pack(minibatch, cfg, len(minibatch), n_tokens):  # micro-batches: gradients accumulate
                    batch = batch.to(run.device)
                    out = model.score(batch, grpo.objective(batch, cfg))
                    out.loss.backward()
                    meter.add(batch, out)
                rate = optim.learning_rate(step * cfg.updates_per_step + meter.updates, cfg)
                meter.end_update(optim.clip_and_step(model, optimizer, rate, cfg.max_grad_norm))
        with clock("sync"):
            engine.load(model, version=step + 1)

        row = {**metrics.of_samples(samples, std), **meter.summary(), "learning_rate": rate}
        log.step(step, samples, row, clock)
        if cfg.num_completions_to_print:
            metrics.print_completions(samples, cfg.num_completions_to_print)
        last = step + 1 == cfg.max_steps
        if cfg.eval_steps and (last or (step + 1) % cfg.eval_steps == 0):
            evaluate(run, after=step + 1)
        if last or (cfg.save_steps and (step + 1) % cfg.save_steps == 0):
            checkpoint.save(cfg, step + 1, model, optimizer, run.tokenizer, run.source)
    engine.close()


@torch.no_grad()
def score_logp(model: Decoder, samples: list[Sample], name: str, cfg: Config) -> None:
    """Sets `sample.old_logp` or `sample.ref_logp`: the model's log-probs of each completion, at the sampling temperature."""
    for batch in packing.pack(samples, cfg):
        batch = batch.to(next(model.parameters()).device)
        logp = model.score(batch, grpo.logp_of(batch, cfg))[0].cpu()  # [M]
        order = batch.sample.cpu()
        for i in order.unique().tolist():
            setattr(samples[i], name, logp[order == i])


def decode(samples: list[Sample], tokenizer: Tokenizer) -> None:
    for sample in samples:
        sample.text = tokenizer.decode(sample.token_ids)


def evaluate(run: Run, after: int) -> None:
    """Greedy completions of the held-out prompts, scored by the same rewards."""
    samples = run.engine.sample(run.eval_prompts, 1, dataclasses.replace(run.sampling, temperature=0.0), step=0)
    decode(samples, run.tokenizer)
    rewards.score(samples, run.reward_funcs, run.cfg.reward_weights)
    run.log.evaluation(after, samples)


@dataclasses.dataclass
class Run:
    """Everything that a run holds; made by `setup`."""

    cfg: Config
    device: torch.device
    source: Path  # the checkpoint that training started from
    tokenizer: Tokenizer
    prompts: list[Prompt]
    eval_prompts: list[Prompt]
    reward_funcs: list
    model: Decoder
    reference: Decoder | None  # frozen; None when beta is 0
    optimizer: torch.optim.Optimizer
    engine: Engine
    sampling: SamplingParams
    log: metrics.Log
    start: int  # finished steps: 0, or where a resumed run continues


def setup(cfg: Config) -> Run:
    """Checks every input before the first expensive step, then builds the parts."""
    cfg.validate()
    checkpoint.check_output(cfg)
    device = torch.device("cuda" if cfg.device == "auto" and torch.cuda.is_available() else cfg.device.replace("auto", "cpu"))
    source = checkpoint.locate(cfg.model)
    tokenizer = Tokenizer.from_pretrained(source)
    reward_funcs = rewards.load_functions(cfg.reward_funcs)
    model = checkpoint.load_model(source, device=device)
    context = model.cfg.max_position_embeddings
    prompts, eval_prompts = load_prompts(cfg, tokenizer, context)
    reference = checkpoint.load_model(source, device=device).requires_grad_(False) if cfg.beta else None
    optimizer = optim.make_optimizer(model, cfg)
    start = checkpoint.resume(cfg, model, optimizer)
    longest = max(len(p.token_ids) for p in prompts + eval_prompts)
    engine = LocalEngine(model.cfg, max_len=longest + cfg.max_completion_length, slots=cfg.max_concurrent, device=device)
    engine.load(model, version=start)
    sampling = SamplingParams(
        temperature=cfg.temperature,
        top_k=cfg.top_k,
        top_p=cfg.top_p,
        min_p=cfg.min_p,
        max_tokens=cfg.max_completion_length,
        stop_token_ids=tokenizer.stop_token_ids,
        seed=cfg.seed,
    )
    log = metrics.Log(cfg, start)
    parts = (source, tokenizer, prompts, eval_prompts, reward_funcs, model, reference, optimizer, engine, sampling, log, start)
    return Run(cfg, device, *parts)


def load_prompts(cfg: Config, tokenizer: Tokenizer, context: int) -> tuple[list[Prompt], list[Prompt]]:
    """Training and held-out prompts, each short enough to leave room for a completion."""
    room = context - cfg.max_completion_length
    if room < 1:
        raise UserError(
            f"--max-completion-length {cfg.max_completion_length} leaves no room for a prompt in a context of {context}."
        )
    limit = min(cfg.max_prompt_length or room, room)

    def load(source: str, split: str) -> list[Prompt]:
        options = {"enable_thinking": cfg.enable_thinking, "max_prompt_length": limit}
        if source in tasks.TASKS:
            return data.from_rows(tasks.rows(source, split), tokenizer, **options)
        return data.load(source, tokenizer, **options)

    prompts = load(cfg.data, "train")
    if len(prompts) < cfg.prompts_per_step:
        raise UserError(f"--data {cfg.data} holds {len(prompts)} prompts but a step draws {cfg.prompts_per_step} different ones.")
    held_out = cfg.eval_data or (cfg.data if cfg.data in tasks.TASKS else "")
    if cfg.eval_steps and not held_out:
        raise UserError("--eval-steps asks for evaluation but --eval-data names no held-out prompts.")
    return prompts, load(held_out, "eval")[: cfg.eval_samples or None] if cfg.eval_steps else []


def main(argv: list[str] | None = None) -> int:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        train(config.parse(argv))
    except UserError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
