"""The parts of a run, built and checked before the first expensive step.

In: the options and the world. Out: a `Run`, which the loop in train.py uses. Every mistake of the
user's that can be seen before training is told here, in one sentence. Read next: checkpoint.py,
state.py, local_engine.py, vllm_engine.py.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import shlex
from collections.abc import Callable
from pathlib import Path

import torch

from nanogrpo.config import Config
from nanogrpo.data import prompts as data
from nanogrpo.data import sources as rows
from nanogrpo.distributed import fsdp
from nanogrpo.distributed.world import World
from nanogrpo.engine.ahead import Ahead
from nanogrpo.engine.base import Engine, SamplingParams
from nanogrpo.engine.local import LocalEngine
from nanogrpo.engine.turns import TurnsEngine
from nanogrpo.errors import UserError, read_json
from nanogrpo.grpo.entropy import Bonus
from nanogrpo.logs.console import Log
from nanogrpo.model import adapters, checkpoint, lora
from nanogrpo.model.decoder import Decoder
from nanogrpo.model.tokenizer import Tokenizer
from nanogrpo.rewards import plugin
from nanogrpo.rewards.runner import Runner
from nanogrpo.run import memory, optim, output, state, warmup
from nanogrpo.types import Prompt
from nanogrpo.vllm.auth import SECRET
from nanogrpo.vllm.client import VLLMEngine
from nanogrpo.vllm.server import Sidecar


@dataclasses.dataclass
class Run:
    """Everything that a run holds; made by `setup`."""

    cfg: Config
    world: World
    config_json: dict  # of the checkpoint that training started from
    origin: dict[str, str]  # hashes of what the run is fed
    tokenizer: Tokenizer
    prompts: list[Prompt]
    eval_prompts: list[Prompt]
    rewards: Runner
    model: Decoder
    # frozen, or the model itself, whose adapters are turned off; None when beta is 0
    reference: Decoder | None
    optimizer: torch.optim.Optimizer
    bonus: Bonus  # of entropy; remembers two numbers from update to update
    engine: Engine
    ahead: Ahead  # gives the samples of each step, drawn by the engine
    draw: Callable[[int, int], list[Prompt]]  # (seed, step) → the prompts of a step
    sampling: SamplingParams
    log: Log
    estimate: int  # bytes on the device, ahead of the run
    start: int  # the first step: 0, or where a resumed run continues
    done: int  # finished steps so far: those before `start`, then one more after each


def setup(cfg: Config, world: World) -> Run:
    """Checks every input before the first expensive step, then builds the parts."""
    check_world(cfg, world)
    source = find_model(cfg, world)
    tokenizer = Tokenizer(source)
    raw = read_json(source / "config.json")
    rewards = make_rewards(cfg, world)
    rollout = plugin.load(cfg.rollout, "--rollout") if cfg.rollout else None
    model = checkpoint.empty_model(source)
    lora.attach(model, cfg)
    check_vocabulary(tokenizer, model)
    parts, eval_prompts = load_prompts(cfg, tokenizer, model.cfg.max_position_embeddings)
    prompts = list(itertools.chain(*parts))
    check_answers(cfg, prompts)
    origin = output.origin(cfg, world, prompts)
    longest = max(len(p.token_ids) for p in prompts + eval_prompts)
    estimate = memory.check(model, cfg, world, longest, rewards.models)
    load_sharded(model, source, world, cfg)
    # it is the reference itself, its adapters off
    reference = model if cfg.beta and cfg.lora_r else None
    if cfg.beta and not cfg.lora_r:
        # it has no backward to keep its blocks gathered for
        frozen = dataclasses.replace(cfg, reshard_after_forward=True)
        reference = load_sharded(
            checkpoint.empty_model(source), source, world, frozen
        ).requires_grad_(False)
    optimizer = optim.make_optimizer(model, cfg)
    world.once(lambda: output.clear(cfg))  # all that can be checked has been
    start = state.resume(cfg, world, model, optimizer, origin, reference)
    engine = make_engine(cfg, world, model, source, max_len=longest + cfg.max_completion_length)
    if rollout:
        engine = TurnsEngine(engine, rollout, tokenizer, model.cfg.vocab_size, world.gather)
    sampling = SamplingParams(
        temperature=cfg.temperature,
        top_k=cfg.top_k,
        top_p=cfg.top_p,
        min_p=cfg.min_p,
        max_tokens=cfg.max_completion_length,
        stop_token_ids=tokenizer.stop_token_ids,
        seed=cfg.seed,
    )
    what = (data.draw_mixed, parts, cfg.data_weights) if cfg.data_weights else (data.draw, prompts)
    draw = functools.partial(*what, cfg.prompts_per_step)  # a pure function of (seed, step)
    draw_step = functools.partial(draw, cfg.seed)
    return Run(
        cfg=cfg,
        world=world,
        config_json=raw,
        origin=origin,
        tokenizer=tokenizer,
        prompts=prompts,
        eval_prompts=eval_prompts,
        rewards=rewards,
        model=model,
        reference=reference,
        optimizer=optimizer,
        bonus=Bonus(cfg, world, state.carried(cfg, world)),
        engine=engine,
        ahead=Ahead(
            engine,
            draw_step,
            cfg.num_generations,
            sampling,
            start,
            cfg.max_steps,
            cfg.max_staleness,
            world.part,
            world.main,
        ),
        draw=draw,
        sampling=sampling,
        log=Log(cfg, world, start),
        estimate=estimate,
        start=start,
        done=start,
    )


def find_model(cfg: Config, world: World) -> Path:
    """The folder of the checkpoint to train; that of `warmup:STEPS` is made first, in the output
    folder.
    """
    kind, _, count = cfg.model.partition(":")
    if kind != "warmup":
        return checkpoint.locate(cfg.model)
    folder = Path(cfg.base)
    world.once(lambda: warmup.ensure_base(folder, cfg.seed, int(count)))
    return folder


def make_engine(cfg: Config, world: World, model: Decoder, source: Path, max_len: int) -> Engine:
    """What samples; it has no weights yet. A vLLM server that is not named is started here, and
    ends with the run.
    """
    if cfg.engine == "local":
        return LocalEngine(
            model.cfg, max_len=max_len, slots=cfg.max_concurrent, device=world.device
        )
    sidecar = None
    if not cfg.server:
        python = cfg.vllm_python or os.environ.get("NANOGRPO_VLLM_PYTHON", "")
        # A CPU computes bfloat16 slowly, and the trainer's float32 is what the server must agree
        # with.
        dtype = ["--dtype", "float32"] if world.device.type == "cpu" else []
        options = ["--max-model-len", str(max_len), *dtype, *shlex.split(cfg.vllm_options)]
        sidecar = Sidecar(source, options, python, Path(cfg.output_dir) / "serve.log")
    return VLLMEngine(
        model,
        max_len=max_len,
        servers=cfg.server,
        sidecar=sidecar,
        secret=os.environ.get(SECRET, ""),
        transport=cfg.weight_transport,
        window=cfg.server_window,
        timeout=cfg.server_timeout,
        patience=cfg.server_patience,
        world=world,
    )


def check_world(cfg: Config, world: World) -> None:
    if cfg.prompts_per_step % world.size:
        raise UserError(
            f"the {cfg.prompts_per_step} prompts of a step (--generation-batch-size / --num-generations) cannot be shared evenly "
            f"by {world.size} processes: choose a multiple."
        )


def make_rewards(cfg: Config, world: World) -> Runner:
    """The reward functions, imported. While one rank tries what hangs, the others must not give it
    up.
    """
    rewards = Runner(
        cfg.reward_funcs,
        cfg.reward_weights,
        timeout=cfg.reward_timeout,
        max_completion_length=cfg.max_completion_length,
        device=world.device,
    )
    longest = rewards.longest * (1 + cfg.max_resample_times)
    if world.size > 1 and longest > cfg.ddp_timeout:
        raise UserError(
            f"--reward-timeout {cfg.reward_timeout:g}: scoring may take up to {longest:g} s, but the ranks give each "
            f"other up after --ddp-timeout {cfg.ddp_timeout}: lower the one or raise the other."
        )
    return rewards


def check_answers(cfg: Config, prompts: list[Prompt]) -> None:
    if "accuracy" in cfg.reward_funcs and not any(
        {"solution", "answer"} & p.columns.keys() for p in prompts
    ):
        raise UserError(
            f"--data {' '.join(cfg.data)} has neither a column solution nor answer, which --reward-funcs accuracy compares "
            "with: add one, or name other reward functions."
        )


def check_vocabulary(tokenizer: Tokenizer, model: Decoder) -> None:
    """A model may have more rows than its tokenizer has ids (padding), but not fewer: a lookup
    would read past the table.
    """
    if tokenizer.vocab_size > model.cfg.vocab_size:
        raise UserError(
            f"tokenizer.json has ids up to {tokenizer.vocab_size - 1} but config.json a vocab_size of {model.cfg.vocab_size}: "
            "take the tokenizer that belongs to the weights."
        )


def load_sharded(model: Decoder, source: Path, world: World, cfg: Config) -> Decoder:
    """Gives an empty model its weights, cut over the ranks before they are read: no rank ever holds
    more than its part.
    """
    fsdp.prepare(model, world, cfg)
    model.to_empty(device=fsdp.parameter_device(world, cfg))
    model.tie()
    checkpoint.load_weights(model, source)
    adapters.begin(model, cfg)
    return model


def load_prompts(
    cfg: Config, tokenizer: Tokenizer, context: int
) -> tuple[list[list[Prompt]], list[Prompt]]:
    """Training prompts by source, and the held-out ones, each short enough to leave room for a
    completion.
    """
    room = context - cfg.max_completion_length
    if room < 1:
        raise UserError(
            f"--max-completion-length {cfg.max_completion_length} leaves no room for a prompt in a context of {context}."
        )
    options = {"enable_thinking": cfg.enable_thinking, "long_prompts": cfg.long_prompts}
    options["max_prompt_length"] = min(cfg.max_prompt_length or room, room)
    parts = data.load_all(cfg.data, tokenizer, split=cfg.dataset_train_split, **options)
    check_enough(cfg, [len(part) for part in parts])
    split = cfg.dataset_test_split if cfg.dataset_test_split != cfg.dataset_train_split else ""
    held_out = cfg.eval_data or [name for name in cfg.data if rows.holds_out(name, split)]
    if cfg.eval_steps and not held_out:
        raise UserError(
            "--eval-steps asks for evaluation but --eval-data names no held-out prompts."
        )
    if not cfg.eval_steps:
        return parts, []
    found = data.load_all(
        held_out, tokenizer, split=cfg.dataset_test_split, held_out=True, **options
    )
    return parts, list(itertools.chain(*found))[: cfg.eval_samples or None]


def check_enough(cfg: Config, sizes: list[int]) -> None:
    """No prompt may come twice in a step: its group would count double."""
    P = cfg.prompts_per_step
    if not cfg.data_weights and sum(sizes) < P:
        raise UserError(
            f"--data {' '.join(cfg.data)} holds {sum(sizes)} prompts but a step draws {P} different ones."
        )
    for i, (name, size) in enumerate(zip(cfg.data, sizes)):
        if cfg.data_weights and size < (wanted := data.smallest(cfg.data_weights, i, P)):
            raise UserError(
                f"--data {name} holds {size} prompts but by its weight in --data-weights it needs {wanted}, or one would come "
                "twice in a step: lower its weight, or name its file without weights."
            )
