"""All options of a run: one frozen dataclass, a comment a field. The command line is made from it (cli.py).

In: values. Out: a `Config`, validated; wrong values raise UserError with one sentence that names the field.
Names are those of TRL's GRPOConfig wherever the meaning is the same. `python train.py --help` prints the comments below, under
the headings below: they are the documentation. Read next: train.py.
"""

from __future__ import annotations

import dataclasses
import math
import shlex
from collections.abc import Callable
from dataclasses import dataclass

from nanogrpo.errors import UserError


@dataclass(frozen=True)
class Config:
    # --- model and data
    model: str = ""  # folder or hub id of a Qwen3 or Qwen2 checkpoint (config.json, *.safetensors, tokenizer.json)
    data: tuple[str, ...] = ()  # training prompts: .jsonl, .parquet, folders of save_to_disk, a built-in task (arithmetic)
    data_weights: tuple[float, ...] = ()  # one per source: its share of the prompts drawn; empty: all are one data set
    eval_data: tuple[str, ...] = ()  # held-out prompts for evaluation; empty: those that the training data bring, if any
    dataset_train_split: str = "train"  # of a saved DatasetDict: the split that --data takes
    dataset_test_split: str = "test"  # and the one for evaluation
    output_dir: str = "runs/grpo"  # metrics.jsonl and checkpoints are written here
    enable_thinking: bool = True  # the thinking switch of Qwen3's chat template
    max_prompt_length: int = 0  # in tokens, after the chat template; 0: what the context leaves
    long_prompts: str = "refuse"  # longer prompts: refuse the data, with the line's number, or drop them, counted
    # --- rewards
    reward_funcs: tuple[str, ...] = ("accuracy", "format")  # built in: these and length:TOKENS; module:function, file.py:function
    reward_weights: tuple[float, ...] = ()  # one per reward function; empty: all 1
    # --- sampling
    num_generations: int = 8  # G, completions per prompt: the group that shares a baseline
    generation_batch_size: int = 64  # completions per step: P·G, so P = generation_batch_size / num_generations prompts
    max_completion_length: int = 512  # longest completion in tokens, the stop token included
    temperature: float = 1.0  # of sampling, and so of every log-prob that is trained
    top_p: float = 1.0  # keep the smallest set of tokens with this probability; 1: all
    top_k: int = 0  # keep the k likeliest tokens; 0: all
    min_p: float = 0.0  # drop tokens less likely than this fraction of the likeliest
    engine: str = "local"  # what samples: local (our own decoder, in this process) or vllm (a server beside it)
    max_concurrent: int = 64  # sequences decoded at once by the embedded engine
    # --- the vLLM server (--engine vllm)
    server: tuple[str, ...] = ()  # addresses of running serve.py, such as http://127.0.0.1:8000; none: one is started, and ended
    vllm_python: str = ""  # the interpreter that has vLLM, for a server started here; empty: $NANOGRPO_VLLM_PYTHON, or this one
    vllm_options: str = ""  # more options for it, as serve.py takes them: one string, behind =
    weight_transport: str = "broadcast"  # how weights travel: broadcast (any machines), memory (one machine, or one GPU)
    server_window: int = 64  # groups under way on a server at once
    server_timeout: float = 60.0  # seconds in which a healthy server gives a sign of life, and takes the weights
    server_patience: float = 600.0  # seconds that a server which was not started here may be away before the run saves and stops
    max_staleness: int = 0  # steps that sampling may be ahead of training; 0: what is trained was sampled by the same weights
    old_logp_from: str = "auto"  # log-probs under the ratio: trainer (its own), engine (as sampled), auto (engine if stale)
    vllm_importance_sampling_mode: str = "off"  # correct trainer/engine: token_ or sequence_, then truncate or mask; or off
    vllm_importance_sampling_clip_max: float = 3.0  # largest importance weight, trainer over engine
    vllm_importance_sampling_clip_min: float | None = None  # smallest one; default: 0
    # --- objective
    loss_type: str = "dapo"  # how token losses are averaged: grpo, dr_grpo, dapo; bnpo is dapo here (docs/equations.md)
    scale_rewards: str = "group"  # divide advantages by the standard deviation of the group, the batch, or none
    epsilon: float = 0.2  # the ratio is clipped below at 1 - epsilon
    epsilon_high: float | None = None  # and above at 1 + epsilon_high; default: epsilon
    delta: float | None = None  # upper bound of the ratio, where the clip leaves it free (A < 0); default: none
    beta: float = 0.0  # weight of the KL penalty to the reference model; 0: no reference model is kept
    use_bias_correction_kl: bool = True  # multiply the k3 estimate by the ratio, which makes its gradient exact
    mask_truncated_completions: bool = False  # leave completions that were cut at the length limit out of the loss
    # --- optimisation
    max_steps: int = 100  # generations: each samples, scores and trains once
    num_iterations: int = 1  # passes over a generation
    steps_per_generation: int = 1  # optimizer steps per pass: the generation is split into so many minibatches
    share_prompts: bool = True  # completions of a prompt share one copy of its tokens; same gradient, fewer tokens
    token_budget: int = 16384  # tokens per micro-batch: gradients accumulate over as many as a minibatch needs
    learning_rate: float = 1e-6  # at its peak, after the warm-up
    lr_scheduler_type: str = "constant"  # after the warm-up: constant, linear or cosine to zero
    warmup_steps: int = 0  # optimizer steps of linear warm-up
    adam_beta1: float = 0.9  # decay of the mean of the gradients
    adam_beta2: float = 0.999  # decay of the mean of their squares
    adam_epsilon: float = 1e-8  # added to the root of the latter
    weight_decay: float = 0.0  # decoupled (AdamW), on matrices only
    max_grad_norm: float = 1.0  # gradients are scaled down to this global norm; 0: never
    # --- evaluation, logging, checkpoints
    eval_steps: int = 0  # evaluate greedily on the held-out prompts every so many steps, and before and after; 0: never
    eval_samples: int = 256  # held-out prompts evaluated, the first ones; 0: all
    save_steps: int = 0  # write a checkpoint every so many steps; 0: only the last
    save_total_limit: int = 2  # checkpoints kept, the newest ones; 0: all
    num_completions_to_print: int = 0  # completions shown in a table after each step; 0: none
    # --- machine
    gradient_checkpointing: str = "none"  # compute again in the backward: none, full, selective (not the costly operations)
    torch_compile: bool = False  # compile each block; the first steps take minutes longer
    torch_compile_backend: str = "inductor"  # or another that torch knows, such as aot_eager, which needs no C compiler
    cpu_offload: bool = False  # masters, gradients and moments in host memory; each block is sent when it computes
    reshard_after_forward: bool = True  # give gathered blocks back after the forward (ZeRO-3); no: keep them (ZeRO-2)
    ddp_timeout: int = 600  # seconds that ranks wait for each other: at the start, and in each collective
    heartbeat_timeout: int = 10  # seconds without a sign of life after which a rank counts as dead, and the others end
    seed: int = 0  # of everything: a run is a pure function of its seed on a CPU
    device: str = "auto"  # auto, cpu, cuda
    resume: bool = False  # continue from the last checkpoint of output_dir

    @property
    def prompts_per_step(self) -> int:
        """P."""
        return self.generation_batch_size // self.num_generations

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps a generation."""
        return self.num_iterations * self.steps_per_generation

    @property
    def on_policy(self) -> bool:
        """Whether the policy that is trained is the one that sampled: then the ratio is 1 and no old log-probs are needed."""
        return self.updates_per_step == 1 and not self.old_from_engine

    @property
    def old_from_engine(self) -> bool:
        """Whether the ratio is taken against the log-probs of the engine, whose weights may be older than the trainer's."""
        return self.old_logp_from == "engine" or (
            self.old_logp_from == "auto" and self.max_staleness > 0 and self.vllm_importance_sampling_mode == "off"
        )

    def validate(self) -> None:
        """Raises UserError on the first value that cannot work, naming the option."""
        c = self

        def require(ok: bool, sentence: str) -> None:
            if not ok:
                raise UserError(sentence)

        for field in dataclasses.fields(c):
            value = getattr(c, field.name)
            for number in value if isinstance(value, tuple) else (value,):
                finite = not isinstance(number, float) or math.isfinite(number)
                require(finite, f"--{dashed(field.name)} is {number}: give a finite number.")
        require(bool(c.model), "--model is missing: give the folder or hub id of a checkpoint.")
        for name in ("data", "eval_data"):  # a str would be taken for a list of letters
            require(not isinstance(getattr(c, name), str), f"--{dashed(name)} is one text: give a list of sources.")
        require(bool(c.data) and all(c.data), "--data is missing: give a .jsonl or .parquet file of prompts, or a built-in task.")
        require(
            not c.data_weights or len(c.data_weights) == len(c.data),
            f"--data-weights has {len(c.data_weights)} values for {len(c.data)} sources in --data: give one each.",
        )
        require(
            all(w > 0 for w in c.data_weights),
            f"--data-weights is {' '.join(map(str, c.data_weights))}: each weight must be above 0, and what has none left out.",
        )
        require(bool(c.output_dir), "--output-dir is empty: name the folder that the run is written to.")
        require(
            c.num_generations >= 2, f"--num-generations is {c.num_generations}: a group needs at least 2 completions to compare."
        )
        require(
            c.generation_batch_size > 0 and c.generation_batch_size % c.num_generations == 0,
            f"--generation-batch-size {c.generation_batch_size} is not a multiple of --num-generations {c.num_generations}: "
            "a step samples whole groups.",
        )
        require(
            c.steps_per_generation >= 1 and c.prompts_per_step % c.steps_per_generation == 0,
            f"--steps-per-generation {c.steps_per_generation} does not divide the {c.prompts_per_step} prompts of a step "
            "(generation_batch_size / num_generations): a minibatch holds whole groups.",
        )
        for name, allowed in CHOICES.items():
            require(getattr(c, name) in allowed, f"--{dashed(name)} is {getattr(c, name)!r}: choose one of {', '.join(allowed)}.")
        for name in POSITIVE:
            require(getattr(c, name) > 0, f"--{dashed(name)} is {getattr(c, name)}: it must be above 0.")
        for name in NOT_NEGATIVE:
            require((getattr(c, name) or 0) >= 0, f"--{dashed(name)} is {getattr(c, name)}: it must not be negative.")
        for name in ("top_p", "min_p"):
            require(0 <= getattr(c, name) <= 1, f"--{dashed(name)} is {getattr(c, name)}: it is a probability, between 0 and 1.")
        for name in ("adam_beta1", "adam_beta2"):
            require(0 <= getattr(c, name) < 1, f"--{dashed(name)} is {getattr(c, name)}: a decay is at least 0 and below 1.")
        require(c.top_p > 0, f"--top-p is {c.top_p}: no token could be drawn.")
        require(c.epsilon < 1, f"--epsilon is {c.epsilon}: the ratio is clipped at 1 - epsilon, which must stay positive.")
        require(c.delta is None or c.delta > 1, f"--delta is {c.delta}: the bound on the ratio must be above 1.")
        require(
            not c.reward_weights or len(c.reward_weights) == len(c.reward_funcs),
            f"--reward-weights has {len(c.reward_weights)} values for {len(c.reward_funcs)} reward functions: give one each.",
        )
        require(
            not (c.torch_compile and c.gradient_checkpointing == "selective"),
            "--gradient-checkpointing selective does not go with --torch-compile, which itself chooses what to recompute: use "
            "full or none.",
        )
        require(
            c.heartbeat_timeout >= 3,
            f"--heartbeat-timeout is {c.heartbeat_timeout}: ranks give a sign twice a second, allow at least 3 seconds.",
        )
        require(bool(c.reward_funcs), "--reward-funcs is empty: without a reward there is nothing to learn.")
        self._validate_engine(require)

    def _validate_engine(self, require: Callable[[bool, str], None]) -> None:
        c, corrected = self, self.vllm_importance_sampling_mode != "off"
        low, high = c.vllm_importance_sampling_clip_min or 0.0, c.vllm_importance_sampling_clip_max
        require(
            low <= 1 <= high,
            f"--vllm-importance-sampling-clip-min {low} and -max {high} must enclose 1, the weight where both agree.",
        )
        require(
            not (c.old_from_engine and corrected),
            "--old-logp-from engine already holds the correction in its ratio: set --vllm-importance-sampling-mode off.",
        )
        require(
            c.max_staleness == 0 or c.old_from_engine or corrected,
            "--max-staleness trains on samples of older weights: leave --old-logp-from to auto, or choose a "
            "--vllm-importance-sampling-mode.",
        )
        if c.engine == "local":
            for name in ("server", "vllm_python", "vllm_options", "max_staleness"):
                require(not getattr(c, name), f"--{dashed(name)} is for a vLLM server: add --engine vllm.")
        else:
            for name, neutral in (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0)):
                require(
                    getattr(c, name) == neutral,
                    f"--{dashed(name)} {getattr(c, name)} cannot be used with --engine vllm: its log-probs would be those after "
                    f"the filter, which training does not repeat; use {neutral}.",
                )
            for name in ("vllm_python", "vllm_options"):
                require(
                    not (c.server and getattr(c, name)),
                    f"--{dashed(name)} is for a server that is started here: give it to serve.py, or leave out --server.",
                )
            try:
                shlex.split(c.vllm_options)
            except ValueError as e:
                raise UserError(f"--vllm-options {c.vllm_options!r} cannot be split into words ({e}): close the quotes.") from e


CHOICES = {
    "long_prompts": ("refuse", "drop"),
    "loss_type": ("grpo", "bnpo", "dr_grpo", "dapo"),
    "scale_rewards": ("group", "batch", "none"),
    "lr_scheduler_type": ("constant", "linear", "cosine"),
    "gradient_checkpointing": ("none", "full", "selective"),
    "device": ("auto", "cpu", "cuda"),
    "engine": ("local", "vllm"),
    "weight_transport": ("broadcast", "memory"),
    "old_logp_from": ("auto", "trainer", "engine"),
    "vllm_importance_sampling_mode": ("off", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
}
POSITIVE = (
    "max_completion_length",
    "temperature",
    "max_concurrent",
    "max_steps",
    "num_iterations",
    "token_budget",
    "learning_rate",
    "adam_epsilon",
    "ddp_timeout",
    "server_window",
    "server_timeout",
    "vllm_importance_sampling_clip_max",
)
NOT_NEGATIVE = (
    *("top_k", "epsilon", "epsilon_high", "beta", "warmup_steps", "weight_decay", "max_grad_norm", "eval_steps", "eval_samples"),
    *("save_steps", "num_completions_to_print", "max_prompt_length", "save_total_limit", "seed"),
    *("server_patience", "max_staleness", "vllm_importance_sampling_clip_min"),
)


def dashed(name: str) -> str:
    return name.replace("_", "-")
