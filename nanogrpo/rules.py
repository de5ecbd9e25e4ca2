"""What may stand in the options: a rule for every number and choice, and for every pair that does
not go together.

In: a Config. Out: nothing, or UserError at the first value that cannot work, with one sentence that
names the option and says what to do. A new option belongs into a table below, or has a `require` of
its own. Read before: config.py. Read next: cli.py.
"""

from __future__ import annotations

import dataclasses
import math
import shlex
from typing import Any

from nanogrpo.errors import UserError

CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")  # one term, five ways to average it
CORRECTIONS = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
CHOICES = {
    "long_prompts": ("refuse", "drop"),
    "report_to": ("none", "tensorboard", "wandb"),
    "loss_type": (*CLIPPED, "cispo", "sapo", "vespo", "dppo_tv", "dppo_kl"),
    "importance_sampling_level": ("token", "sequence"),
    "advantage_estimator": ("grpo", "rloo", "maxrl"),
    "scale_rewards": ("group", "batch", "none"),
    "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
    "lr_scheduler_type": ("constant", "linear", "cosine"),
    "gradient_checkpointing": ("none", "full", "selective"),
    "device": ("auto", "cpu", "cuda"),
    "engine": ("local", "vllm"),
    "weight_transport": ("broadcast", "memory"),
    "old_logp_from": ("auto", "trainer", "engine"),
    "vllm_importance_sampling_mode": ("off", *CORRECTIONS),
}
# the matrices of a block
LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
POSITIVE = (
    "max_completion_length",
    "temperature",
    *(
        "sapo_temperature_pos",
        "sapo_temperature_neg",
        "vespo_k_pos",
        "vespo_lambda_pos",
        "vespo_k_neg",
        "vespo_lambda_neg",
    ),
    "entropy_coef_delta",
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
    *("lora_alpha", "ref_model_mixup_alpha", "ref_model_sync_steps"),
)
NOT_NEGATIVE = (
    *(
        "top_k",
        "epsilon",
        "epsilon_high",
        "beta",
        "warmup_steps",
        "weight_decay",
        "max_grad_norm",
        "eval_steps",
        "eval_samples",
    ),
    *(
        "dppo_penalty",
        "off_policy_mask_threshold",
        "entropy_coef",
        "entropy_coef_min",
        "entropy_coef_max",
        "entropy_target",
    ),
    *(
        "reward_timeout",
        "save_steps",
        "trace_step",
        "num_completions_to_print",
        "max_prompt_length",
        "save_total_limit",
        "seed",
    ),
    *(
        "server_patience",
        "max_staleness",
        "max_resample_times",
        "vllm_importance_sampling_clip_min",
        "lora_r",
    ),
)

SECONDS = (
    "reward_timeout",
    "server_timeout",
    "server_patience",
    "ddp_timeout",
    "heartbeat_timeout",
)
# an option that does nothing without another: given alone, it would be ignored in silence
NEEDS = {
    **dict.fromkeys(("lora_alpha", "lora_target_modules"), "lora_r"),
    **dict.fromkeys(("ref_model_mixup_alpha", "ref_model_sync_steps"), "sync_ref_model"),
    **dict.fromkeys(
        ("entropy_coef_min", "entropy_coef_max", "entropy_coef_delta", "entropy_target"),
        "use_adaptive_entropy",
    ),
    **{
        "eval_data": "eval_steps",
        "use_bias_correction_kl": "beta",
        "torch_compile_backend": "torch_compile",
    },
}
# the same of an option that belongs to some choices of another; epsilon* belong to most, and a
# profile sets one
ONLY_WITH = {
    **dict.fromkeys(("sapo_temperature_pos", "sapo_temperature_neg"), ("loss_type", ("sapo",))),
    **dict.fromkeys(
        ("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"),
        ("loss_type", ("vespo",)),
    ),
    "dppo_penalty": ("loss_type", ("dppo_tv", "dppo_kl")),
    "vllm_importance_sampling_clip_max": ("vllm_importance_sampling_mode", CORRECTIONS),
    "vllm_importance_sampling_clip_min": ("vllm_importance_sampling_mode", CORRECTIONS),
}


def dashed(name: str) -> str:
    return name.replace("_", "-")


def require(ok: bool, sentence: str) -> None:
    if not ok:
        raise UserError(sentence)


def check(c: Any) -> None:
    """c: a Config, which this file cannot name: config.py imports it."""
    for field in dataclasses.fields(c):
        value = getattr(c, field.name)
        for number in value if isinstance(value, tuple) else (value,):
            finite = not isinstance(number, float) or math.isfinite(number)
            require(finite, f"--{dashed(field.name)} is {number}: give a finite number.")
    require(
        bool(c.model),
        "--model is missing: give the folder or hub id of a checkpoint, or try --profile debug.",
    )
    kind, _, count = c.model.partition(":")
    require(
        kind != "warmup" or (count.isdecimal() and int(count) > 0),
        f"--model {c.model!r} is no number of steps: write warmup:60, say.",
    )
    for name in ("data", "eval_data"):  # a str would be taken for a list of letters
        require(
            not isinstance(getattr(c, name), str),
            f"--{dashed(name)} is one text: give a list of sources.",
        )
    require(
        bool(c.data) and all(c.data),
        "--data is missing: give a .jsonl or .parquet file of prompts, or a built-in task.",
    )
    require(
        not c.data_weights or len(c.data_weights) == len(c.data),
        f"--data-weights has {len(c.data_weights)} values for {len(c.data)} sources in --data: give one each.",
    )
    require(
        all(w > 0 for w in c.data_weights),
        f"--data-weights is {' '.join(map(str, c.data_weights))}: each weight must be above 0, and what has none left out.",
    )
    require(
        bool(c.output_dir), "--output-dir is empty: name the folder that the run is written to."
    )
    require(
        c.num_generations >= 2,
        f"--num-generations is {c.num_generations}: a group needs at least 2 completions to compare.",
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
        for value in (
            getattr(c, name) if isinstance(getattr(c, name), tuple) else (getattr(c, name),)
        ):
            require(
                value in allowed,
                f"--{dashed(name)} is {value!r}: choose one of {', '.join(allowed)}.",
            )
    require(
        c.report_to == ("none",) or "none" not in c.report_to,
        "--report-to names none and others: leave none out.",
    )
    for name in POSITIVE:
        require(
            getattr(c, name) > 0, f"--{dashed(name)} is {getattr(c, name)}: it must be above 0."
        )
    for name in NOT_NEGATIVE:
        require(
            (getattr(c, name) or 0) >= 0,
            f"--{dashed(name)} is {getattr(c, name)}: it must not be negative.",
        )
    for name in ("top_p", "min_p"):
        require(
            0 <= getattr(c, name) <= 1,
            f"--{dashed(name)} is {getattr(c, name)}: it is a probability, between 0 and 1.",
        )
    for name in ("adam_beta1", "adam_beta2"):
        require(
            0 <= getattr(c, name) < 1,
            f"--{dashed(name)} is {getattr(c, name)}: a decay is at least 0 and below 1.",
        )
    require(c.top_p > 0, f"--top-p is {c.top_p}: no token could be drawn.")
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
    require(
        bool(c.reward_funcs), "--reward-funcs is empty: without a reward there is nothing to learn."
    )
    require(
        c.trace_step <= c.max_steps,
        f"--trace-step {c.trace_step} is beyond --max-steps {c.max_steps}: name a step of the run, the first is 1.",
    )
    require(c.seed < 2**63, f"--seed is {c.seed}: it must be below 2^63.")
    for name in SECONDS:
        require(
            getattr(c, name) <= 1e7,
            f"--{dashed(name)} is {getattr(c, name)} seconds: give at most 1e7, four months.",
        )
    _objective(c)
    _engine(c)
    _adapters_and_reference(c)
    for name, needed in NEEDS.items():
        value, given = getattr(c, name), getattr(c, name) != getattr(type(c), name)
        require(
            not given or getattr(c, needed),
            f"--{dashed(name)} is {value}, which does nothing without --{dashed(needed)}: give it too.",
        )
    for name, (other, choices) in ONLY_WITH.items():
        value, chosen = getattr(c, name), getattr(c, other)
        require(
            value == getattr(type(c), name) or chosen in choices,
            f"--{dashed(name)} is {value}, which does nothing with --{dashed(other)} {chosen}: leave it out, or choose "
            f"{' or '.join(choices)}.",
        )


def _objective(c: Any) -> None:
    require(
        c.epsilon < 1,
        f"--epsilon is {c.epsilon}: the ratio is clipped at 1 - epsilon, which must stay positive.",
    )
    require(
        c.delta is None or c.delta > 1,
        f"--delta is {c.delta}: the bound on the ratio must be above 1.",
    )
    require(
        c.delta is None or c.loss_type in CLIPPED,
        f"--delta {c.delta} does not go with --loss-type {c.loss_type}, which bounds the ratio in its own way: leave it out.",
    )
    require(
        c.importance_sampling_level == "token" or not c.loss_type.startswith(("dppo", "vespo")),
        f"--importance-sampling-level sequence does not go with --loss-type {c.loss_type}, which has its own ratios: use token.",
    )
    require(
        c.loss_type != "vespo" or not c.vllm_importance_sampling_mode.startswith("sequence"),
        f"--vllm-importance-sampling-mode {c.vllm_importance_sampling_mode} does not go with --loss-type vespo, which "
        "multiplies the tokens' own: use token_truncate, token_mask or off.",
    )
    require(
        0 <= c.top_entropy_quantile <= 1,
        f"--top-entropy-quantile is {c.top_entropy_quantile}: it is a share of the tokens, between 0 and 1.",
    )
    require(
        not c.use_adaptive_entropy or c.entropy_coef_min <= c.entropy_coef <= c.entropy_coef_max,
        f"--entropy-coef {c.entropy_coef} is not between --entropy-coef-min {c.entropy_coef_min} and --entropy-coef-max "
        f"{c.entropy_coef_max}, where --use-adaptive-entropy keeps it: start inside.",
    )
    require(
        c.scale_rewards == "group" or c.multi_objective_aggregation == "sum_then_normalize",
        f"--scale-rewards {c.scale_rewards} does not go with --multi-objective-aggregation normalize_then_sum, which scales by "
        "the group and then by the batch: leave it out.",
    )
    own = {"grpo": ("group", "batch", "none"), "rloo": ("group", "none"), "maxrl": ("group",)}[
        c.advantage_estimator
    ]
    require(
        c.scale_rewards in own
        and (
            c.advantage_estimator == "grpo" or c.multi_objective_aggregation == "sum_then_normalize"
        ),
        f"--advantage-estimator {c.advantage_estimator} has a scale of its own: leave --scale-rewards and "
        "--multi-objective-aggregation out.",
    )


def _adapters_and_reference(c: Any) -> None:
    require(
        set(LORA_TARGETS) >= set(c.lora_target_modules),
        f"--lora-target-modules is {' '.join(c.lora_target_modules)}: choose among {', '.join(LORA_TARGETS)}, or leave it out "
        "for all.",
    )
    require(
        bool(c.lora_r) or not c.lora_adapter,
        f"--lora-adapter {c.lora_adapter} has no adapters to fill: give its --lora-r.",
    )
    require(
        c.ref_model_mixup_alpha <= 1,
        f"--ref-model-mixup-alpha is {c.ref_model_mixup_alpha}: it is the policy's part of the mix, at most 1.",
    )
    require(
        c.beta > 0 or not c.sync_ref_model,
        f"--sync-ref-model is {c.sync_ref_model}, but while --beta is {c.beta} no reference is kept: give a --beta above 0.",
    )
    require(
        not (c.sync_ref_model and c.lora_r),
        "--sync-ref-model does not go with --lora-r, whose reference is the base without adapters: leave one of them out.",
    )


def _engine(c: Any) -> None:
    corrected = c.vllm_importance_sampling_mode != "off"
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
    require(
        not (c.rollout and c.max_staleness),
        "--rollout does not go with --max-staleness: its turns are sampled with the weights that train; use 0.",
    )
    if c.engine == "local":
        server = ("server", "server_window", "server_timeout", "server_patience")
        for name in (*server, "vllm_python", "vllm_options", "weight_transport", "max_staleness"):
            given = getattr(c, name) != getattr(type(c), name)
            require(not given, f"--{dashed(name)} is for a vLLM server: add --engine vllm.")
    else:
        for name, neutral in (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0)):
            require(
                getattr(c, name) == neutral,
                f"--{dashed(name)} {getattr(c, name)} cannot be used with --engine vllm: its log-probs would be those after "
                f"the filter, which training does not repeat; use {neutral}.",
            )
        require(
            0.01 <= c.temperature <= 2,
            f"--temperature {c.temperature} is beyond vLLM's limits: give 0.01 to 2.",
        )
        for name in ("vllm_python", "vllm_options"):
            require(
                not (c.server and getattr(c, name)),
                f"--{dashed(name)} is for a server that is started here: give it to serve.py, or leave out --server.",
            )
        try:
            words = shlex.split(c.vllm_options)
        except ValueError as e:
            raise UserError(
                f"--vllm-options {c.vllm_options!r} cannot be split into words ({e}): close the quotes."
            ) from e
        for name in ("--model", "--host", "--port", "--secret-file", "--owner"):
            ours = any(word.split("=")[0] == name for word in words)
            require(
                not ours,
                f"--vllm-options sets {name}, which the trainer chooses for its own server: leave it out.",
            )
