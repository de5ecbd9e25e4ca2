"""Check the inputs of a run, and build its parts.

In: the options, the world and the features of this run. Out: a `Run`, which train.py and step.py
use. train.py calls four functions, in this order. `load` returns `Inputs`: a model without weights,
the prompts and the reward functions. `settle` chooses the settings that depend on these inputs.
`setup` returns the `Run`. `closing` closes the parts of the run at its end. A user's mistake is
reported in one sentence, where the value is read. Read next: state.py (checkpoints),
engine/local.py (the engine).
"""

import contextlib
import dataclasses
import logging
import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from nanogrpo.config import Config
from nanogrpo.data import prompts as data
from nanogrpo.data.sources import Source
from nanogrpo.distributed import fsdp
from nanogrpo.distributed.world import World
from nanogrpo.engine.base import Engine, SamplingParams
from nanogrpo.engine.local import LocalEngine
from nanogrpo.errors import UserError, first_sentence
from nanogrpo.feature import Feature, first
from nanogrpo.logs import progress
from nanogrpo.logs.console import Log
from nanogrpo.model import checkpoint, dispatch, gpu_attention, weights
from nanogrpo.model.decoder import Decoder
from nanogrpo.model.tokenizer import Tokenizer
from nanogrpo.rewards.scorer import Scorer
from nanogrpo.run import optim, output, state
from nanogrpo.types import Prompt

logger = logging.getLogger("nanogrpo")


@dataclasses.dataclass(frozen=True)
class Given:
    """Python objects that replace names in the options."""

    reward_funcs: Sequence[str | Callable] = ()
    train_dataset: Source | None = None
    eval_dataset: Source | None = None


NOTHING = Given()


@dataclasses.dataclass
class Inputs:
    """The inputs of a run. `load` makes this object."""

    cfg: Config
    world: World
    features: Sequence[Feature]
    source: Path  # the folder of the checkpoint to train
    tokenizer: Tokenizer
    model: Decoder  # on the meta device until `setup` loads its weights
    rewards: Scorer
    prompts: list[Prompt]
    eval_prompts: list[Prompt]
    longest_prompt: int  # number of tokens; a feature may increase this number


@dataclasses.dataclass
class Run(Inputs):
    """The parts and counters of a run. `setup` makes this object."""

    ref_model: Decoder | None  # the reference model; None when beta is 0
    optimizer: torch.optim.Optimizer
    sampling: SamplingParams  # how training completions are sampled
    log: Log
    saver: state.Saver
    start: int  # first step: 0, or the step where a resumed run continues
    done: int  # finished steps, including those before `start`
    engine: Engine = None  # type: ignore[assignment]  # set last

    @property
    def epoch(self) -> float:
        """How often each prompt was used in the finished steps, on average."""
        return self.done * self.cfg.prompts_per_step / len(self.prompts)

    def draw(self, seed: int, step: int) -> list[Prompt]:
        """Return the prompts of a step for all ranks. These prompts depend only on the seed and the
        step, unless a feature chooses them.
        """
        drawn = data.draw(self.prompts, self.cfg.prompts_per_step, seed, step)
        for feature in self.features:
            drawn = feature.draw(self, drawn, seed, step) or drawn
        return drawn

    def learning_rate(self, update: int) -> float:
        """Return the learning rate of an optimizer step. If no feature sets the learning rate,
        optim.py computes it."""
        rate = first(feature.learning_rate(update, self.cfg) for feature in self.features)
        return optim.learning_rate(update, self.cfg) if rate is None else rate

    def due(self, every: int) -> bool:
        """Return True if the number of finished steps is a multiple of `every`, or if the run is
        finished. If `every` is 0, always return False.
        """
        return every > 0 and (self.done == self.cfg.max_steps or self.done % every == 0)


def load(
    cfg: Config,
    world: World,
    features: Sequence[Feature],
    given: Given = NOTHING,
    read: Callable = data.load_prompts,
) -> Inputs:
    """Read and check everything except the weights. Every rank must call this function.

    The function `read` returns the prompts and the held-out prompts.
    """
    source = checkpoint.locate(cfg.model)
    tokenizer = Tokenizer(source)
    model = empty_model(source, features)
    if tokenizer.vocab_size > model.cfg.vocab_size:  # more ids are padding
        raise UserError(
            f"tokenizer.json has ids up to {tokenizer.vocab_size - 1}, but the vocab_size in "
            f"config.json is {model.cfg.vocab_size}: use the tokenizer that belongs to the weights."
        )
    rewards = Scorer(cfg, world.device, features, given.reward_funcs)
    context = model.cfg.max_position_embeddings
    prompts, eval_prompts = read(
        cfg, tokenizer, context, features, given.train_dataset, given.eval_dataset
    )
    rewards.check(prompts, eval_prompts)
    longest = max(len(p.token_ids) for p in prompts + eval_prompts)
    inputs = Inputs(
        cfg, world, features, source, tokenizer, model, rewards, prompts, eval_prompts, longest
    )
    for feature in features:
        feature.model(model, inputs)
    return inputs


def settle(inputs: Inputs) -> None:
    """Choose the settings that depend on the data, the model and the machine."""
    cfg = inputs.cfg
    if cfg.num_train_epochs:
        # rounded, so that 0.1 epochs of 30 prompts are exactly 3 prompts
        prompts = round(cfg.num_train_epochs * len(inputs.prompts), 6)
        steps = math.ceil(prompts / cfg.prompts_per_step)
        cfg = dataclasses.replace(cfg, max_steps=steps, num_train_epochs=0.0)
        cfg.validate()  # some checks depend on the number of steps
    for feature in inputs.features:
        cfg = feature.settings(cfg, inputs) or cfg
    inputs.cfg = cfg


def setup(inputs: Inputs) -> Run:
    """Load the weights and build the parts of a run. Every rank must call this function."""
    cfg, world, features, model = inputs.cfg, inputs.world, inputs.features, inputs.model
    if cfg.prompts_per_step % world.size:
        raise UserError(
            f"the {cfg.prompts_per_step} prompts of a step (--generation-batch-size / "
            f"--num-generations) cannot be shared evenly by {world.size} processes: choose a "
            "multiple of the number of processes."
        )
    origin = output.origin(inputs)
    load_weights(model, inputs)
    choose_kernels(cfg, world, model.cfg.head_dim, model.sharding.dtype)
    sizes = weights.sizes(model)
    logger.info(progress.summary(cfg, len(inputs.prompts), len(inputs.eval_prompts), *sizes))
    ref_model = make_reference(inputs)
    optimizer = optim.make_optimizer(model, cfg, features)
    world.once(lambda: output.clear(cfg))  # only after all checks
    saver = state.Saver(inputs, optimizer, origin)
    start = saver.resume()  # restores weights and moments, too
    if start >= cfg.max_steps:
        logger.info("nothing to do: the run has already taken all %d steps (--max-steps)", start)
    run = Run(
        **vars(inputs),
        ref_model=ref_model,
        optimizer=optimizer,
        sampling=sampling_params(cfg, inputs.tokenizer),
        log=Log(cfg, world, start, features),
        saver=saver,
        start=start,
        done=start,
    )
    run.engine = make_engine(run)
    return run


@contextlib.contextmanager
def closing(run: Run) -> Iterator[None]:
    """Close the parts of the run at its end, even after an error."""
    with run.saver, contextlib.closing(run.engine), contextlib.ExitStack() as stack:
        for feature in run.features:
            stack.enter_context(feature.running(run) or contextlib.nullcontext())
        yield
    if run.done and run.world.main:  # the last save has finished
        progress.print_end(run.cfg, run.done, run.saver.keep)


# --- the parts ------------------------------------------------------------------------------------


def empty_model(source: Path, features: Sequence[Feature]) -> Decoder:
    """Return the model of a checkpoint on the meta device."""
    return first(feature.decoder(source) for feature in features) or checkpoint.empty_model(source)


def choose_kernels(cfg: Config, world: World, head_size: int, dtype: torch.dtype) -> None:
    """Choose the kernels of this process, and log the device, dtype and kernels."""
    device = world.device.type
    if cfg.kernels == "triton" and device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise UserError(
            "--kernels triton needs a GPU, because on a CPU only Triton's slow interpreter runs its"
            " kernels (TRITON_INTERPRET=1): use --kernels auto."
        )
    dispatch.choice = cfg.kernels
    is_plain = dispatch.functions_for(world.device) is dispatch.reference
    functions = "PyTorch functions" if is_plain else "Triton kernels"
    attention = gpu_attention.backend(device, dtype, head_size).__name__  # flash, varlen, sdpa
    logger.info(
        "computing on %s in %s: %s, attention by %s", device, f"{dtype}"[6:], functions, attention
    )


def load_weights(model: Decoder, inputs: Inputs) -> Decoder:
    """Load weights into an empty model.

    The model is sharded over the ranks before weights are read, so a rank stores only its shard.
    """
    fsdp.prepare(model, inputs.world, inputs.cfg)
    try:
        model.to_empty(device="cpu" if model.sharding.offload else inputs.world.device)
    except RuntimeError as e:  # torch's allocator on the host
        raise UserError(
            f"the weights of {inputs.source} do not fit into memory ({first_sentence(e)}): use a "
            "smaller model, or more processes."
        ) from e
    model.tie()
    checkpoint.load_weights(model, inputs.source)
    for feature in inputs.features:
        feature.loaded(model)
    return model


def make_reference(inputs: Inputs) -> Decoder | None:
    """Return the frozen reference model for the KL penalty, or None if beta is 0.

    If the model can act as its own reference, no second model is needed.
    """
    if not inputs.cfg.beta:
        return None
    if inputs.model.own_reference:
        return inputs.model
    reference = empty_model(inputs.source, inputs.features)
    # The reference model has no backward pass, so its blocks need not stay gathered.
    reference.sharding = dataclasses.replace(inputs.model.sharding, keep_gathered=False)
    return load_weights(reference, inputs).requires_grad_(False)


def make_engine(run: Run) -> Engine:
    """Return the sampling engine, which has no weights yet."""
    engines = (feature.engine(run) for feature in run.features)
    engine: Engine = first(engines) or LocalEngine(**of_engine(run))
    for feature in run.features:
        engine = feature.wrap(engine, run) or engine
    return engine


def of_engine(run: Run) -> dict[str, Any]:
    """Return the arguments of the local engine."""
    return {
        "cfg": run.model.cfg,
        "decoder": type(run.model),
        "max_len": run.longest_prompt + run.cfg.max_completion_length,
        "slots": run.cfg.slots,
        "cache_tokens": run.cfg.cache_tokens,
        "device": run.world.device,
        "dtype": run.model.sharding.dtype,
    }


def sampling_params(cfg: Config, tokenizer: Tokenizer) -> SamplingParams:
    """Return the sampling parameters of training."""
    return SamplingParams(
        temperature=cfg.temperature,
        top_k=cfg.top_k,
        top_p=cfg.top_p,
        max_tokens=cfg.max_completion_length,
        stop_token_ids=tokenizer.stop_token_ids,
        seed=cfg.seed,
    )
