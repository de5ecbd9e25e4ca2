"""Check the options and build the parts of a run before its first expensive step.

In: the options and the world. Out: a `Run`, which train.py and step.py use. A mistake by the user
that can be found before training is reported here, in one sentence. Read next: state.py
(checkpoints), engine/local.py and vllm/client.py (the engines).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import logging
import math
import os
import shlex
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, cast

import torch

from nanogrpo.config import VISION_LORA_TARGETS, Config, dashed
from nanogrpo.data import prompts as data
from nanogrpo.data import sources
from nanogrpo.distributed import fsdp
from nanogrpo.distributed.world import World
from nanogrpo.engine.ahead import AheadEngine
from nanogrpo.engine.base import Engine, SamplingParams
from nanogrpo.engine.local import LocalEngine
from nanogrpo.engine.tools import Tools
from nanogrpo.engine.turns import TurnsEngine
from nanogrpo.errors import UserError, read_json
from nanogrpo.grpo.entropy import Bonus
from nanogrpo.logs import metrics, progress
from nanogrpo.logs.console import Log
from nanogrpo.logs.trace import make_trace
from nanogrpo.model import adapters, attention, checkpoint, dispatch, lora
from nanogrpo.model.decoder import Decoder
from nanogrpo.model.tokenizer import Tokenizer
from nanogrpo.rewards import plugin
from nanogrpo.rewards.builtin import is_empty, needs_answers
from nanogrpo.rewards.runner import Runner
from nanogrpo.run import hub, memory, optim, output, state, warmup
from nanogrpo.types import Prompt
from nanogrpo.vllm import gpus
from nanogrpo.vllm.auth import SECRET
from nanogrpo.vllm.client import VLLMEngine
from nanogrpo.vllm.server import ServerLost, Sidecar
from nanogrpo.vllm.sleeping import SleepingEngine

log = logging.getLogger("nanogrpo")


@dataclasses.dataclass(frozen=True)
class Given:
    """Objects from Python (nanogrpo/api.py) that take the place of names in the options."""

    reward_funcs: Sequence[str | Callable] = ()
    train_dataset: sources.Source | None = None
    eval_dataset: sources.Source | None = None
    tools: Sequence[Callable] = ()
    environment_factory: Callable | None = None
    rollout: Callable | None = None


NOTHING = Given()


@dataclasses.dataclass
class Run:
    """The parts and counters of a run, created by `setup`."""

    cfg: Config  # with --num-train-epochs, max_steps follows from the number of prompts
    world: World
    tokenizer: Tokenizer
    prompts: list[Prompt]
    eval_prompts: list[Prompt]
    rewards: Runner
    model: Decoder
    # The frozen reference model; or the model itself, to be used with its adapters off; or None
    # when beta is 0.
    reference: Decoder | None
    optimizer: torch.optim.Optimizer
    entropy_bonus: Bonus  # off by default
    engine: Engine
    draw_all: Callable[[int, int], list[Prompt]]  # (seed, step) → all ranks' prompts of a step
    sampling: SamplingParams  # how training completions are sampled
    log: Log
    trace: torch.profiler.profile
    saver: state.Saver
    estimate: int  # expected peak of device memory in bytes
    start: int  # first step: 0, or where a resumed run continues
    done: int  # finished steps, including those before `start`
    resampled_groups: int = 0  # groups that dynamic sampling replaced in the last step

    @property
    def epoch(self) -> float:
        """How often the finished steps have used each prompt, on average."""
        return self.done * self.cfg.prompts_per_step / len(self.prompts)

    def draw(self, step: int) -> list[Prompt]:
        """Return this rank's share of the prompts of a step: a pure function of (seed, step)."""
        return list(self.world.part(self.draw_all(self.cfg.seed, step)))

    def evaluates(self, stopping: bool) -> bool:
        """Return whether to evaluate now: every `eval_steps` steps and after the last step.

        A run that stops early does not evaluate, because the user wants it to end.
        """
        every, last = self.cfg.eval_steps, self.done == self.cfg.max_steps
        return every > 0 and (last or (self.done % every == 0 and not stopping))

    def saves(self, stopping: bool) -> bool:
        """Return whether to save now: every `save_steps` steps, and whenever the run ends."""
        every, last = self.cfg.save_steps, self.done == self.cfg.max_steps
        return last or stopping or (every > 0 and self.done % every == 0)


@contextlib.contextmanager
def closing(run: Run) -> Iterator[None]:
    """Close the parts of the run, however it ends. If the last server is lost, save first."""
    with contextlib.closing(run.log), run.saver, contextlib.closing(run.engine), run.trace:
        try:
            with memory.explained(run.cfg):
                yield
        except ServerLost:  # raised on every rank
            if run.done > run.start:
                run.saver.save(run.done, run.entropy_bonus.state)
            raise
    if best := run.saver.best:
        message = "best checkpoint: %s (%s %.4g after %d steps)"
        where = run.saver.best_checkpoint
        log.info(message, where, best["metric"], best["value"], best["step"])
    if run.cfg.push_to_hub and run.done == run.cfg.max_steps:
        last = checkpoint.checkpoints(run.cfg.output_dir)[-1]
        folder = run.saver.best_checkpoint or last
        # an upload may take longer than --ddp-timeout
        run.world.patient().once(lambda: hub.push(run.cfg, folder))
    if run.done and run.world.main:  # the last save has finished
        progress.print_line(progress.closing_line(run.cfg, run.done))


def setup(cfg: Config, world: World, given: Given = NOTHING) -> Run:
    """Check every input, then build the parts. Every rank must call."""
    check_world(cfg, world)
    gpus.shares(cfg, world)  # refuses GPUs that a vLLM server cannot use
    hub.check(cfg)
    source = find_model(cfg, world)
    tokenizer = Tokenizer(source)
    tools = make_tools(cfg, tokenizer, given)
    rewards = make_rewards(cfg, world, tools, given)
    check_metric(cfg, rewards, tools)
    rollout = given.rollout or (plugin.load(cfg.rollout, "--rollout") if cfg.rollout else None)
    model = checkpoint.empty_model(source, cfg.load_in_4bit)
    if cfg.engine == "vllm" and checkpoint.in_four_bits(source):
        raise UserError(
            f"--engine vllm would load {source} in 4 bits, into which no merged weights can be "
            "sent: use the original model with --load-in-4bit, or --engine local."
        )
    lora.attach(model, cfg, world.device.type)
    freeze_vision_tower(model, cfg)
    adapters.check_base(source, cfg)
    check_vocabulary(tokenizer, model)
    choose_kernels(cfg, world, model.cfg.head_dim)
    context = model.cfg.max_position_embeddings
    vision = source if model.cfg.vision else None
    parts, eval_prompts = load_prompts(cfg, tokenizer, context, tools, given, vision)
    prompts = list(itertools.chain(*parts))
    check_pictures(cfg, prompts + eval_prompts)
    check_answers(cfg, prompts)
    if eval_prompts and all(map(needs_answers, cfg.reward_funcs)):  # or nothing is evaluated
        check_answers(cfg, eval_prompts, "eval_data" if cfg.eval_data else "data")
    cfg = with_steps(cfg, len(prompts))
    origin = output.origin(cfg, world, prompts)
    longest = max(len(p.token_ids) for p in prompts + eval_prompts)
    counts = len(prompts), len(eval_prompts), *lora.sizes(model)
    log.info("%s", progress.summary(cfg, *counts))
    if tools and tools.environment:  # its observations make prompts longer
        longest = min(max(longest, cfg.max_prompt_length), context - cfg.max_completion_length)
        tools.max_prompt_length = longest
    cfg, estimate = memory.fit(model, cfg, world, longest, rewards.models)
    if cfg.lora_r and cfg.save_merged:
        both = cfg, dataclasses.replace(cfg, save_merged=False)
        sizes = (memory.shown(memory.on_disk(model, c)) for c in both)
        log.info("a checkpoint takes %s on the disk, and %s with --no-save-merged", *sizes)

    load_sharded(model, source, world, cfg)
    reference = make_reference(model, source, world, cfg)
    optimizer = optim.make_optimizer(model, cfg)
    world.once(lambda: output.clear(cfg))  # only now, after everything that can be checked
    start, carried = state.resume(cfg, world, model, optimizer, origin, reference)
    sampling = sampling_params(cfg, tokenizer)
    draw_all = functools.partial(data.draw, prompts, cfg.prompts_per_step)
    if cfg.data_weights:
        draw_all = functools.partial(data.draw_mixed, parts, cfg.data_weights, cfg.prompts_per_step)
    max_len = longest + cfg.max_completion_length
    turn = memory.while_sampling(model, cfg, world, longest, rewards.models)
    needed = turn if cfg.vllm_enable_sleep_mode else estimate
    engine = client = make_engine(cfg, world, model, source, max_len, needed)
    if function := rollout or tools:
        # Every tool call has a limit of its own, but together they may take long.
        patient = world.patient() if tools and cfg.tool_timeout else world
        size = model.cfg.vocab_size
        engine = TurnsEngine(engine, function, tokenizer, size, patient.gather)
    if cfg.engine == "vllm":
        draw = functools.partial(draw_all, cfg.seed)
        limits = cfg.max_steps, cfg.max_staleness
        engine = AheadEngine(engine, draw, cfg.num_generations, sampling, *limits, world)
    if cfg.vllm_enable_sleep_mode:
        engine = SleepingEngine(engine, cast(VLLMEngine, client))
    config_json = read_json(source / "config.json")
    return Run(
        cfg=cfg,
        world=world,
        tokenizer=tokenizer,
        prompts=prompts,
        eval_prompts=eval_prompts,
        rewards=rewards,
        model=model,
        reference=reference,
        optimizer=optimizer,
        entropy_bonus=Bonus(cfg, world, carried),
        engine=engine,
        draw_all=draw_all,
        sampling=sampling,
        log=Log(cfg, world, start),
        trace=make_trace(cfg, world, start),
        saver=state.Saver(cfg, world, model, optimizer, tokenizer, config_json, origin, reference),
        estimate=estimate,
        start=start,
        done=start,
    )


# --- the parts ------------------------------------------------------------------------------------


def find_model(cfg: Config, world: World) -> Path:
    """Return the folder of the checkpoint to train. For `warmup:STEPS`, make that base first."""
    kind, _, count = cfg.model.partition(":")
    if kind != "warmup":
        return checkpoint.locate(cfg.model)
    folder = Path(cfg.base)
    world.once(lambda: warmup.ensure_base(folder, cfg.seed, int(count)))
    return folder


def choose_kernels(cfg: Config, world: World, head_size: int) -> None:
    """Choose the kernels and the determinism of this process, and log what will compute."""
    device = world.device.type
    if cfg.kernels == "triton" and device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise UserError(
            "--kernels triton needs a GPU, because on a CPU only Triton's slow interpreter runs its"
            " kernels (TRITON_INTERPRET=1): use --kernels auto."
        )
    dispatch.choice = cfg.kernels
    if cfg.full_determinism:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
        # Not needed, and slow. torch defines this property of a module dynamically.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        torch.use_deterministic_algorithms(True)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    triton = dispatch.functions_for(world.device) is not dispatch.reference
    parts = ["Triton kernels" if triton else "PyTorch functions"]
    if cfg.torch_compile:
        parts.append(f"blocks by torch.compile ({cfg.torch_compile_backend})")
    parts.append(f"attention by {attention.NAMES[attention.backend(device, dtype, head_size)]}")
    if attention.deterministic():
        parts.append("deterministic")
    log.info("computing on %s in %s: %s", device, f"{dtype}"[6:], ", ".join(parts))


def freeze_vision_tower(model: Decoder, cfg: Config) -> None:
    """Freeze the vision encoder, if --freeze-vision-tower asks for it."""
    names = [name for name in cfg.lora_target_modules if name in VISION_LORA_TARGETS]
    option = f"--lora-target-modules {names[0]}" if names else "--freeze-vision-tower"
    if (names or cfg.freeze_vision_tower) and not model.cfg.vision:
        raise UserError(
            f"{option} is for a vision encoder, which --model {cfg.model} does not have: leave it "
            "out."
        )
    if cfg.freeze_vision_tower:
        visual: Any = model.model.visual
        visual.requires_grad_(False)


def load_sharded(model: Decoder, source: Path, world: World, cfg: Config) -> Decoder:
    """Load weights into an empty model.

    The model is sharded over the ranks before anything is read, so no rank ever stores more than
    its shard.
    """
    fsdp.prepare(model, world, cfg)
    model.to_empty(device="cpu" if cfg.cpu_offload else world.device)
    model.tie()
    checkpoint.load_weights(model, source)
    adapters.initialize(model, cfg)
    return model


def make_reference(model: Decoder, source: Path, world: World, cfg: Config) -> Decoder | None:
    """Return the frozen reference model for the KL penalty; None when beta is 0.

    With LoRA the model itself is returned: with its adapters disabled, it is the starting model.
    """
    if not cfg.beta or cfg.lora_r:
        return model if cfg.beta else None
    # It has no backward pass, so there is no reason to keep its blocks gathered.
    cfg = dataclasses.replace(cfg, reshard_after_forward="always")
    reference = load_sharded(checkpoint.empty_model(source), source, world, cfg)
    return reference.requires_grad_(False)


def with_steps(cfg: Config, prompts: int) -> Config:
    """Return the options with max_steps computed from --num-train-epochs, if that is set."""
    if not cfg.num_train_epochs:
        return cfg
    steps = math.ceil(Fraction(str(cfg.num_train_epochs)) * prompts / cfg.prompts_per_step)
    out = dataclasses.replace(cfg, max_steps=steps, num_train_epochs=0.0)
    out.validate()  # options that depend on the number of steps
    return out


def sampling_params(cfg: Config, tokenizer: Tokenizer) -> SamplingParams:
    """Return how training completions are sampled."""
    return SamplingParams(
        temperature=cfg.temperature,
        top_k=cfg.top_k,
        top_p=cfg.top_p,
        min_p=cfg.min_p,
        max_tokens=cfg.max_completion_length,
        stop_token_ids=tokenizer.stop_token_ids,
        seed=cfg.seed,
    )


def make_engine(
    cfg: Config, world: World, model: Decoder, source: Path, max_len: int, needed: int
) -> Engine:
    """Return the engine that samples. It has no weights yet.

    needed: the bytes of device memory that the trainer is expected to need while a vLLM server has
    its memory.

    With --engine vllm and no --server, a vLLM server is started here and ends with the run.
    """
    if cfg.engine == "local":
        slots, tokens = cfg.slots, cfg.cache_tokens
        return LocalEngine(
            model.cfg,
            max_len=max_len,
            slots=slots,
            cache_tokens=tokens,
            device=world.device,
            four_bits=cfg if cfg.load_in_4bit else None,
        )
    sidecar = None
    if not cfg.server:
        python = cfg.vllm_python or os.environ.get("NANOGRPO_VLLM_PYTHON", "")
        # CPUs compute bfloat16 slowly, and the server must agree with the trainer's float32.
        dtype = ["--dtype", "float32"] if world.device.type == "cpu" else []
        given = shlex.split(cfg.vllm_options)
        own = cfg.vllm_gpus  # GPUs
        shared = gpus.shares(cfg, world)
        share = world.once(lambda: memory.server_share(world, needed, given)) if shared else []
        sleeps = ["--enable-sleep-mode"] if cfg.vllm_enable_sleep_mode else []
        several = gpus.parallel(own, given)
        options = ["--max-model-len", str(max_len), *dtype, *share, *sleeps, *several, *given]
        sidecar = Sidecar(
            source,
            options,
            python,
            Path(cfg.output_dir) / "serve.log",
            gpus=world.once(lambda: gpus.visible(own)) if own else "",
        )
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
        sleeps=cfg.vllm_enable_sleep_mode,
        world=world,
    )


def make_tools(cfg: Config, tokenizer: Tokenizer, given: Given = NOTHING) -> Tools | None:
    """Import the tools and the environment that the model may use, if any."""
    if not (cfg.tools or cfg.environment_factory):
        return None
    factory, spec = given.environment_factory, cfg.environment_factory
    return Tools(
        tokenizer,
        given.tools or [plugin.load(tool, "--tools") for tool in cfg.tools],
        factory or (plugin.load(spec, "--environment-factory") if spec else None),
        max_iterations=cfg.max_tool_calling_iterations,
        timeout=cfg.tool_timeout,
        template={"enable_thinking": cfg.enable_thinking, **(cfg.chat_template_kwargs or {})},
    )


def make_rewards(
    cfg: Config,
    world: World,
    tools: Tools | None = None,
    given: Given = NOTHING,
) -> Runner:
    """Import the reward functions, and check that a slow one cannot exceed --ddp-timeout."""
    own = tools.reward() if tools else None
    if own and "environment" not in cfg.reward_funcs:
        raise UserError(
            f"--environment-factory: {own.__name__} has a method get_reward, but --reward-funcs "
            "does not name environment, which calls it: add that name, or rename the method."
        )
    if not own and "environment" in cfg.reward_funcs:
        raise UserError(
            "--reward-funcs environment calls get_reward of --environment-factory, which is not "
            "there: write that method, or name other reward functions."
        )
    specs = given.reward_funcs or cfg.reward_funcs
    rewards = Runner(
        [own if own and spec == "environment" else spec for spec in specs],
        cfg.reward_weights,
        environment="" if given.environment_factory else cfg.environment_factory,
        env=cfg.reward_env,
        timeout=cfg.reward_timeout,
        max_completion_length=cfg.max_completion_length,
        device=world.device,
    )
    longest = rewards.longest * (1 + cfg.max_resample_times)
    if world.size > 1 and longest > cfg.ddp_timeout:
        raise UserError(
            f"--reward-timeout {cfg.reward_timeout:g}: scoring may take up to {longest:g} s, but "
            f"the ranks wait only --ddp-timeout {cfg.ddp_timeout} s for each other: lower the "
            "first or raise the second."
        )
    return rewards


def prompt_loader(
    cfg: Config,
    tokenizer: Tokenizer,
    context: int,
    tools: Tools | None = None,
    vision: Path | None = None,
) -> Callable[..., list[list[Prompt]]]:
    """Return a function (sources, split=, held_out=) → the prompts of each source.

    Every prompt leaves room for a completion in a context of so many tokens. vision: the folder of
    a vision-language model.
    """
    room = context - cfg.max_completion_length
    if room < 1:
        raise UserError(
            f"--max-completion-length {cfg.max_completion_length} leaves no room for a prompt in a "
            f"context of {context}: lower it."
        )
    check_data_options(cfg, tokenizer)
    return functools.partial(
        data.load_all,
        tokenizer=tokenizer,
        config=cfg.dataset_config,
        prompt_column=cfg.prompt_column,
        answer_column=cfg.answer_column,
        system_prompt=data.system_prompt(cfg.system_prompt),
        enable_thinking=cfg.enable_thinking,
        template_kwargs=cfg.chat_template_kwargs,
        tools=tools.schemas if tools else (),
        long_prompts=cfg.long_prompts,
        max_prompt_length=min(cfg.max_prompt_length or room, room),
        vision=vision,
    )


def load_prompts(
    cfg: Config,
    tokenizer: Tokenizer,
    context: int,
    tools: Tools | None = None,
    given: Given = NOTHING,
    vision: Path | None = None,
) -> tuple[list[list[Prompt]], list[Prompt]]:
    """Return the training prompts of each source and the held-out prompts.

    Every prompt is short enough to leave room for a completion in the model's context.
    """
    load = prompt_loader(cfg, tokenizer, context, tools, vision)
    train_data = cfg.data if given.train_dataset is None else (given.train_dataset,)
    parts = load(train_data, split=cfg.dataset_train_split)
    check_enough(cfg, [len(part) for part in parts])
    if not cfg.eval_steps:
        return parts, []
    split = cfg.dataset_test_split if cfg.dataset_test_split != cfg.dataset_train_split else ""
    holds = functools.partial(sources.holds_out, split=split, config=cfg.dataset_config)
    eval_data = cfg.eval_data if given.eval_dataset is None else (given.eval_dataset,)
    held_out = eval_data or list(filter(holds, train_data))
    if not held_out:
        raise UserError(
            "--eval-steps asks for evaluation, but there are no held-out prompts: name some with "
            "--eval-data."
        )
    return parts, load_held_out(cfg, load, held_out)


def load_held_out(
    cfg: Config, load: Callable[..., list[list[Prompt]]], names: Sequence[sources.Source]
) -> list[Prompt]:
    """Return the first --eval-samples prompts of these sources. load: from `prompt_loader`."""
    most = cfg.eval_samples if cfg.long_prompts == "refuse" else 0  # others may take their places
    found = load(names, split=cfg.dataset_test_split, held_out=True, most=most)
    return list(itertools.chain(*found))[: cfg.eval_samples or None]


# --- checks ---------------------------------------------------------------------------------------


def check_world(cfg: Config, world: World) -> None:
    if cfg.prompts_per_step % world.size:
        raise UserError(
            f"the {cfg.prompts_per_step} prompts of a step (--generation-batch-size / "
            f"--num-generations) cannot be shared evenly by {world.size} processes: choose a "
            "multiple."
        )


def check_data_options(cfg: Config, tokenizer: Tokenizer) -> None:
    """Report options that would have no effect on this data or with this chat template."""
    if cfg.dataset_config and not any(map(sources.uses_hub, (*cfg.data, *cfg.eval_data))):
        raise UserError(
            f"--dataset-config {cfg.dataset_config} has no effect, because no source is a data set "
            "of the hub: leave it out."
        )
    read = tokenizer.template_variables
    if ignored := (cfg.chat_template_kwargs or {}).keys() - read:
        raise UserError(
            f"--chat-template-kwargs sets {min(ignored)}, but the model's chat template reads only "
            f"{', '.join(sorted(read)) or 'no variables'}: leave it out."
        )
    if cfg.system_prompt and not tokenizer.has_chat_template:
        log.info(
            "the model has no chat template: --system-prompt is put before each prompt as text, "
            "with an empty line between them"
        )


def check_pictures(cfg: Config, prompts: list[Prompt]) -> None:
    """Report options that read or change the text of prompts, if some of these have pictures, or
    messages in parts.
    """
    judges = [spec for spec in cfg.reward_funcs if spec.startswith("model:")]
    uses = [f"--reward-funcs {spec}" for spec in judges]
    uses += ["--environment-factory"] if cfg.environment_factory else []
    for p in prompts if uses else ():
        if isinstance(p.text, list) and any(isinstance(m["content"], list) for m in p.text):
            raise UserError(
                f"{uses[0]} works with texts only, but the messages of prompt {p.id} have pictures "
                "or parts: leave the option out, or write each content as a text."
            )


def check_answers(cfg: Config, prompts: list[Prompt], option: str = "data") -> None:
    """Require the answers that the reward functions compare with. option: names the sources."""
    name = f"--{dashed(option)} {' '.join(getattr(cfg, option))}"
    columns = ("solution", "answer")
    answered = any(not is_empty(p.columns.get(column)) for p in prompts for column in columns)
    judges = [spec for spec in cfg.reward_funcs if needs_answers(spec)]
    if judges and not answered:
        raise UserError(
            f"{name} has no value in a column solution or answer, which --reward-funcs "
            f"{judges[0]} compares with: add one, or name other reward functions."
        )
    for p in prompts if judges else ():
        found = {column: p.columns.get(column) for column in columns}
        given = {column: value for column, value in found.items() if value is not None}
        if given and all(isinstance(value, list | tuple | dict) for value in given.values()):
            column, value = given.popitem()
            raise UserError(
                f"{name}: the column {column} of prompt {p.id} holds a {type(value).__name__}, but "
                f"--reward-funcs {judges[0]} compares with a text or a number: name another column "
                "with --answer-column."
            )
    gym = any("reasoning_gym" in p.columns for p in prompts)
    if "reasoning_gym" in cfg.reward_funcs and not gym:
        raise UserError(
            f"--reward-funcs reasoning_gym scores the problems of --data reasoning_gym:NAME, but "
            f"--data is {' '.join(cfg.data)}: name such a source, or other reward functions."
        )


def check_metric(cfg: Config, rewards: Runner, tools: Tools | None) -> None:
    """Require a --metric-for-best-model that an evaluation of this run may have."""
    n = cfg.num_generations_eval
    values: dict[str, float | None] = dict.fromkeys(rewards.names, 1.0)
    completion = metrics.Facts(1, 1, True, values, 1.0, calls=0 if tools else None)
    row = metrics.of_evaluation([completion] * n, n)
    if cfg.load_best_model_at_end and state.deciding(cfg, row) is None:
        raise state.unknown_metric(cfg, row)


def check_vocabulary(tokenizer: Tokenizer, model: Decoder) -> None:
    """A model may have more embeddings than its tokenizer has ids (padding), but never fewer."""
    if tokenizer.vocab_size > model.cfg.vocab_size:
        raise UserError(
            f"tokenizer.json has ids up to {tokenizer.vocab_size - 1} but config.json a vocab_size "
            f"of {model.cfg.vocab_size}: take the tokenizer that belongs to the weights."
        )


def check_enough(cfg: Config, sizes: list[int]) -> None:
    """Require enough prompts for one step: a prompt drawn twice would get twice the weight."""
    P, weights = cfg.prompts_per_step, cfg.data_weights
    needed = [(" ".join(cfg.data), sum(sizes), P)]
    if weights:
        wanted = [data.smallest(weights, i, P) for i in range(len(weights))]
        needed = [*zip(cfg.data, sizes, wanted)]
    for name, size, least in needed:
        if size < least:
            raise UserError(
                f"--data {name} holds {size} prompts but a step draws {least} different ones: add "
                "prompts, or lower --generation-batch-size or its weight in --data-weights."
            )
