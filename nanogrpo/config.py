"""Every option of a run, with its default, its help text and its rules.

    Config(model="runs/base", data=("arithmetic",)).validate()

In: values, usually from the command line (cli.py). Out: a `Config`, which is frozen. A value of the
wrong type raises a UserError when the `Config` is made, and `validate` raises one for any other
invalid value. The message names the option and says what to do. Options have the same names as in
TRL's GRPOConfig wherever the meaning is the same (docs/trl.md). To add one, add a field: `--help`,
the command line, the JSON file and the checks follow from it. Read next: train.py.
"""

from __future__ import annotations

import json
import math
import numbers
import operator
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any

from nanogrpo.errors import UserError

CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")  # one clipped term, averaged in five ways
# the linear layers of a block
LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# those of a vision encoder (vision/model.py), with the names that PEFT needs
VISION_LORA_TARGETS = ("attn.qkv", "attn.proj", "linear_fc1", "linear_fc2")
# The schedules of the learning rate, with the settings that --lr-scheduler-kwargs may change and
# their defaults, as in transformers. run/optim.py has the formulas.
SCHEDULES: dict[str, dict[str, Any]] = {
    "constant": {},
    "constant_with_warmup": {},
    "linear": {},
    "cosine": {"num_cycles": 0.5},
    "cosine_with_restarts": {"num_cycles": 1},
    "cosine_with_min_lr": {"num_cycles": 0.5, "min_lr": None, "min_lr_rate": None},
    "cosine_warmup_with_min_lr": {
        "num_cycles": 0.5,
        "min_lr": None,
        "min_lr_rate": None,
        "warmup_lr_rate": None,
    },
    "polynomial": {"lr_end": 1e-7, "power": 1.0},
    "inverse_sqrt": {"timescale": None},
    "warmup_stable_decay": {
        "num_decay_steps": None,
        "num_stable_steps": None,
        "warmup_type": "linear",
        "decay_type": "cosine",
        "min_lr_ratio": 0.0,
        "num_cycles": 0.5,
    },
}
COMPARE = {">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le}
# The types of the fields, the classes of the values they take, and their names in error messages.
TYPES: dict[str, tuple[Any, str]] = {
    "bool": (bool, "true or false"),
    "int": (numbers.Integral, "a whole number"),
    "float": (numbers.Real, "a number"),
    "str": (str, "a string"),
    "tuple[str, ...]": ((list, tuple), "a list of strings"),
    "tuple[float, ...]": ((list, tuple), "a list of numbers"),
    "dict[str, Any]": (dict, "an object"),
}


def option(default: Any, help: str, *limits: str, **rules: Any) -> Any:
    """Declare a field of `Config`.

    Limits are written as "> 0" or "<= 1". `choices` lists the allowed values. `required` makes the
    option mandatory, and is the advice for a user who leaves it out. `needs` names another option
    ("lora_r"), possibly with values ("loss_type=dppo_tv|dppo_kl"), without which this one has no
    effect. `group` starts a new section of `--help`. `words` maps other spellings of a value, such
    as TRL's true and false, to ours.
    """
    return field(default=default, metadata={"help": help, "limits": limits, **rules})


def converted(kind: str, value: Any) -> Any:
    """Return a value in the form that a field of type `kind` takes, or raise TypeError.

    A list becomes a tuple, 1 becomes 1.0 in a field of type float, and a number of numpy becomes
    one of Python.
    """
    kind, _, optional = kind.partition(" | ")
    if optional and value is None:
        return None
    if not isinstance(value, TYPES[kind][0]) or (isinstance(value, bool) and kind != "bool"):
        raise TypeError
    if isinstance(value, dict) and not all(isinstance(name, str) for name in value):
        raise TypeError
    if kind.startswith("tuple"):
        return tuple(converted("str" if "str" in kind else "float", item) for item in value)
    return int(value) if kind == "int" else float(value) if kind == "float" else value


def type_name(kind: str, none: str) -> str:
    """Return the name of a field's type in an error message, where None is called `none`."""
    kind, _, optional = kind.partition(" | ")
    return TYPES[kind][1] + (f" or {none}" if optional else "")


@dataclass(frozen=True)
class Config:
    model: str = option(
        "",
        "folder or hub id of a Qwen3, Qwen3-VL, Qwen2, Llama or Mistral checkpoint; warmup:STEPS"
        " first teaches a tiny model some arithmetic",
        group="Model, data and output",
        required="give the folder or hub id of a checkpoint, or try --profile debug",
    )
    data: tuple[str, ...] = option(
        (),
        "training prompts: .jsonl, .csv or .parquet files, folders written by save_to_disk, hub ids"
        " of data sets, reasoning_gym:NAME, or the built-in task arithmetic",
        required="give a .jsonl, .csv or .parquet file of prompts, the hub id of a data set, or the"
        " built-in task arithmetic",
    )
    data_weights: tuple[float, ...] = option(
        (), "share of the prompts drawn from each source; empty: treat all sources as one", "> 0"
    )
    eval_data: tuple[str, ...] = option(
        (),
        "held-out prompts for evaluation; empty: use the test split of the training data, if any",
        needs="eval_steps",
    )
    dataset_config: str = option("", "configuration of a data set of the hub, such as main")
    dataset_train_split: str = option(
        "train", "split to train on, of a data set of the hub or a saved DatasetDict"
    )
    dataset_test_split: str = option("test", "split of such a data set to evaluate on")
    prompt_column: str = option(
        "", "column with the prompt; empty: the first of prompt, question and problem"
    )
    answer_column: str = option(
        "",
        "column with the reference answer, which becomes the column solution; if it contains ####,"
        " only the text after that is kept",
    )
    system_prompt: str = option(
        "",
        "system message before each prompt, as text or as the name of a file; without a chat"
        " template, it is plain text before the prompt",
    )
    output_dir: str = option(
        "runs/grpo",
        "folder for metrics.jsonl and checkpoints",
        required="name the folder to write the run to",
    )
    enable_thinking: bool = option(True, "turn on thinking in Qwen3's chat template")
    chat_template_kwargs: dict[str, Any] | None = option(  # noqa: RUF009 (a field, as all others)
        None, "JSON object of further variables for the chat template"
    )
    max_prompt_length: int = option(
        0,
        "longest prompt in tokens, after the chat template; 0: as long as the context allows",
        ">= 0",
    )
    long_prompts: str = option(
        "refuse",
        "what to do about longer prompts: stop with an error that names the line, or drop them and"
        " log how many",
        choices=("refuse", "drop"),
    )

    reward_funcs: tuple[str, ...] = option(
        ("accuracy", "format"),
        "accuracy, reasoning_accuracy, format, think_format, soft_overlong, cosine,"
        " repetition_penalty, reasoning_gym, module:name, file.py:name or model:FOLDER; arguments"
        " follow a name as name:key=value,key=value",
        group="Rewards",
        required="name at least one reward function",
    )
    reward_weights: tuple[float, ...] = option(
        (), "weight of each reward function; empty: 1 for all"
    )
    # The default is far longer than a judge model or the execution of generated code needs, and
    # twice the default is far below ddp_timeout.
    reward_timeout: float = option(
        60.0,
        "seconds allowed for one call of a reward function from a module or file; 0: no limit, and"
        " the call runs in the trainer's own process",
        ">= 0",
        "<= 1e7",
    )
    reward_env: tuple[str, ...] = option(
        (),
        "secret environment variables to pass to your reward functions, such as OPENAI_API_KEY;"
        " others are hidden from them (docs/rewards.md)",
    )

    num_generations: int = option(
        8,
        "completions per prompt (G); they form the group that shares a baseline",
        ">= 2",
        group="Sampling",
    )
    generation_batch_size: int = option(
        64,
        "completions per step (P*G); a step has generation_batch_size / num_generations prompts",
        "> 0",
    )
    max_completion_length: int = option(
        512, "longest completion in tokens, including the stop token", "> 0"
    )
    temperature: float = option(
        1.0, "sampling temperature, also used for every log-prob in the loss", "> 0"
    )
    top_p: float = option(
        1.0,
        "sample from the smallest set of tokens with this total probability; 1: from all",
        "> 0",
        "<= 1",
    )
    top_k: int = option(0, "sample from the k most likely tokens; 0: from all", ">= 0")
    min_p: float = option(
        0.0, "drop tokens less likely than this fraction of the most likely token", ">= 0", "<= 1"
    )
    engine: str = option(
        "local",
        "what generates the completions: our own decoder in the training process, or vLLM servers",
        choices=("local", "vllm"),
    )
    max_concurrent: int | None = option(
        None,
        "sequences the local engine decodes at once (a vLLM server decides for itself); default:"
        " 64, or on a GPU as many as a step samples, at most 256",
        "> 0",
    )
    cache_tokens: int | None = option(
        None,
        "tokens in the local engine's cache on a GPU, at least one sequence; default: as many as"
        " fit, at most the longest sequence in each slot",
        "> 0",
    )
    tools: tuple[str, ...] = option(
        (),
        "functions that the model may call: module:function or file.py:function, with type hints"
        " and a docstring",
    )
    environment_factory: str = option(
        "",
        "class with a method reset, one object per completion: module:Class or file.py:Class; the"
        " model may call its other methods",
    )
    max_tool_calling_iterations: int = option(
        0, "how often a completion may continue after tool calls; 0: while there is room", ">= 0"
    )
    # far longer than a call should take, because the other completions wait
    tool_timeout: float = option(
        30.0,
        "seconds allowed for one tool call, after which the model reads an error; 0: no limit",
        ">= 0",
        "<= 1e7",
    )
    rollout: str = option(
        "",
        "function that decides when the model generates and inserts text in between:"
        " module:function or file.py:function",
    )
    max_resample_times: int = option(
        0,
        "how often to replace groups in which every advantage is 0 (DAPO's dynamic sampling);"
        " 0: never",
        ">= 0",
    )

    server: tuple[str, ...] = option(
        (),
        "addresses of running serve.py processes, such as http://127.0.0.1:8000; empty: start one"
        " for this run",
        group="vLLM",
        needs="engine=vllm",
    )
    vllm_python: str = option(
        "",
        "Python interpreter with vLLM, to start a server with; empty: $NANOGRPO_VLLM_PYTHON, or"
        " the trainer's own",
        needs="engine=vllm",
    )
    vllm_options: str = option(
        "",
        'serve.py options for that server, as one string: --vllm-options="--dtype half"',
        needs="engine=vllm",
    )
    vllm_gpus: str = option(
        "",
        "GPUs of that server, such as 1 or 2,3 (tensor parallel), as numbers or UUIDs; empty: share"
        " the trainer's first GPU",
        needs="engine=vllm",
    )
    vllm_enable_sleep_mode: bool = option(
        False,
        "on a shared GPU, free the server's memory while the trainer trains, and wake it to sample",
        needs="engine=vllm",
    )
    weight_transport: str = option(
        "auto",
        "how weights reach the servers: by torch.distributed between GPUs and machines, through the"
        " memory of the same GPU or machine, or whichever fits (auto)",
        choices=("auto", "broadcast", "memory"),
        needs="engine=vllm",
    )
    server_window: int = option(
        64, "groups in progress on one server at a time", "> 0", needs="engine=vllm"
    )
    server_timeout: float = option(
        60.0,
        "seconds within which a healthy server answers a request, or accepts the weights",
        "> 0",
        "<= 1e7",
        needs="engine=vllm",
    )
    server_patience: float = option(
        600.0,
        "seconds to wait for a lost server that you have started, before saving and stopping",
        ">= 0",
        "<= 1e7",
        needs="engine=vllm",
    )
    max_staleness: int = option(
        0,
        "steps that sampling may run ahead of training; 0: train only on samples of the current"
        " weights",
        ">= 0",
        needs="engine=vllm",
    )
    old_logp_from: str = option(
        "auto",
        "old log-probs in the ratio: the trainer's, the engine's, or the engine's only with"
        " max_staleness and without vllm_importance_sampling_mode (auto)",
        choices=("auto", "trainer", "engine"),
    )
    vllm_importance_sampling_mode: str = option(
        "off",
        "correct the gap between trainer and engine with importance weights, per token or sequence",
        choices=("off", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
    )
    vllm_importance_sampling_clip_max: float = option(
        3.0,
        "largest importance weight (trainer over engine)",
        "> 0",
        needs="vllm_importance_sampling_mode",
    )
    vllm_importance_sampling_clip_min: float | None = option(
        None,
        "smallest importance weight; default: 0",
        ">= 0",
        needs="vllm_importance_sampling_mode",
    )

    loss_type: str = option(
        "dapo",
        "the loss; docs/equations.md has the formulas",
        group="Loss",
        choices=(*CLIPPED, "cispo", "sapo", "vespo", "dppo_tv", "dppo_kl"),
    )
    importance_sampling_level: str = option(
        "token", "one ratio per token, or one per sequence (GSPO)", choices=("token", "sequence")
    )
    epsilon: float = option(
        0.2,
        "clip the ratio below at 1 - epsilon; dppo: largest divergence for a token with A < 0",
        ">= 0",
        "< 1",
    )
    epsilon_high: float | None = option(
        None,
        "clip the ratio above at 1 + epsilon_high (cispo: at epsilon_high, 5 in the paper);"
        " default: epsilon",
        ">= 0",
    )
    delta: float | None = option(
        None,
        "upper bound on the ratio where the clip does not bound it (A < 0); default: none",
        "> 1",
    )
    sapo_temperature_pos: float = option(
        1.0,
        "sapo: temperature for A > 0; higher means gradients fade faster away from ratio 1",
        "> 0",
        needs="loss_type=sapo",
    )
    sapo_temperature_neg: float = option(
        1.05, "sapo: temperature for A <= 0", "> 0", needs="loss_type=sapo"
    )
    vespo_k_pos: float = option(
        2.0,
        "vespo: power of the sequence ratio in the weight, for A >= 0",
        "> 0",
        needs="loss_type=vespo",
    )
    vespo_lambda_pos: float = option(
        3.0, "vespo: decay of the weight, for A >= 0", "> 0", needs="loss_type=vespo"
    )
    vespo_k_neg: float = option(
        3.0,
        "vespo: power of the sequence ratio in the weight, for A < 0",
        "> 0",
        needs="loss_type=vespo",
    )
    vespo_lambda_neg: float = option(
        2.0, "vespo: decay of the weight, for A < 0", "> 0", needs="loss_type=vespo"
    )
    dppo_penalty: float = option(
        0.0,
        "dppo: coefficient of the squared log-ratio added to each token's loss; prime-rl uses 1e-3",
        ">= 0",
        needs="loss_type=dppo_tv|dppo_kl",
    )
    beta: float = option(
        0.0,
        "coefficient of the KL penalty to the reference model; 0: keep no reference model",
        ">= 0",
    )
    sync_ref_model: bool = option(
        False,
        "update the reference model periodically: ref = alpha*policy + (1 - alpha)*ref",
        needs="beta",
    )
    ref_model_mixup_alpha: float = option(
        0.6,
        "alpha, the policy's share; 1: the reference becomes a copy of the policy",
        "> 0",
        "<= 1",
        needs="sync_ref_model",
    )
    ref_model_sync_steps: int = option(
        512, "steps between these updates of the reference", "> 0", needs="sync_ref_model"
    )
    use_bias_correction_kl: bool = option(
        True,
        "multiply the k3 estimate of the KL by the ratio, which makes its gradient exact",
        needs="beta",
    )
    measure_zero_advantages: bool = option(
        False,
        "include completions whose advantage is 0 in the entropy and the other metrics; otherwise"
        " training skips them, because they have no gradient",
    )
    mask_truncated_completions: bool = option(
        False, "leave completions that reached the length limit out of the loss"
    )
    off_policy_mask_threshold: float | None = option(
        None,
        "leave a completion with A < 0 out of the loss if its mean log(engine/policy) exceeds this",
        ">= 0",
    )
    top_entropy_quantile: float = option(
        1.0,
        "train only on this share of the tokens, those with the highest entropy; 1: on all",
        ">= 0",
        "<= 1",
    )
    entropy_coef: float = option(
        0.0, "coefficient of the entropy bonus, a mean over the trained tokens; 0: none", ">= 0"
    )
    use_adaptive_entropy: bool = option(
        False,
        "adjust entropy_coef after each optimizer step, to keep the entropy near entropy_target",
    )
    entropy_coef_min: float = option(
        0.0, "adaptive: smallest coefficient", ">= 0", needs="use_adaptive_entropy"
    )
    entropy_coef_max: float = option(
        1.0, "adaptive: largest coefficient", ">= 0", needs="use_adaptive_entropy"
    )
    entropy_coef_delta: float = option(
        0.005,
        "adaptive: raise the coefficient by this if the entropy is at or below the target,"
        " otherwise lower it",
        "> 0",
        needs="use_adaptive_entropy",
    )
    entropy_target: float = option(
        0.2,
        "adaptive: target in nats per token; no bonus is applied while the entropy is above it",
        ">= 0",
        needs="use_adaptive_entropy",
    )

    advantage_estimator: str = option(
        "grpo",
        "baseline of a reward: the group's mean (grpo), the mean of the others (rloo), or the"
        " group's mean, which also divides the difference (maxrl)",
        group="Advantages",
        choices=("grpo", "rloo", "maxrl"),
    )
    scale_rewards: str = option(
        "group",
        "grpo: divide by the standard deviation of the group, of the batch, or do not divide",
        choices=("group", "batch", "none"),
        words={"true": "group", "false": "none"},
    )
    multi_objective_aggregation: str = option(
        "sum_then_normalize",
        "several rewards: add them first, or normalize each one first (GDPO)",
        choices=("sum_then_normalize", "normalize_then_sum"),
    )

    max_steps: int = option(
        100, "steps of the run; each one samples, scores and trains once", "> 0", group="Optimizer"
    )
    num_train_epochs: float = option(
        0.0, "passes over the prompts, in place of max_steps; 0: train for max_steps", ">= 0"
    )
    num_iterations: int = option(1, "training passes over each generation", "> 0")
    steps_per_generation: int = option(
        1, "number of minibatches (optimizer steps) each generation is split into", "> 0"
    )
    share_prompts: bool = option(
        True, "pack a prompt's tokens once for all its completions: same gradient, fewer tokens"
    )
    token_budget: int | None = option(
        None,
        "tokens per micro-batch; gradients accumulate over as many as a minibatch needs; default:"
        " 16384, or fewer if a GPU has too little free memory",
        "> 0",
    )
    learning_rate: float = option(1e-6, "peak learning rate, after the warmup", "> 0")
    lr_scheduler_type: str = option(
        "constant",
        "learning rate after the warmup; the schedules are those of transformers",
        choices=tuple(SCHEDULES),
    )
    lr_scheduler_kwargs: dict[str, Any] | None = option(  # noqa: RUF009 (a field, as all others)
        None, 'JSON object with settings of the schedule, such as {"min_lr_rate": 0.1}'
    )
    warmup_steps: float = option(
        0.0, "optimizer steps of warmup, or a number below 1 for their share of all steps", ">= 0"
    )
    optim: str = option(
        "adamw_torch_fused",
        "AdamW with float32 moments, or with 8-bit moments (pip install 'nanogrpo[torchao]')",
        choices=("adamw_torch_fused", "adamw_torch_8bit"),
        words={"adamw_torch": "adamw_torch_fused", "adamw_8bit": "adamw_torch_8bit"},
    )
    adam_beta1: float = option(0.9, "AdamW: decay of the mean of the gradients", ">= 0", "< 1")
    adam_beta2: float = option(
        0.999, "AdamW: decay of the mean of the squared gradients", ">= 0", "< 1"
    )
    adam_epsilon: float = option(
        1e-8, "AdamW: constant added to the denominator, for stability", "> 0"
    )
    weight_decay: float = option(
        0.0, "AdamW: decoupled weight decay, applied to matrices only", ">= 0"
    )
    freeze_vision_tower: bool = option(
        False, "do not train the vision encoder of a vision-language model, only its decoder"
    )
    max_grad_norm: float = option(1.0, "clip gradients to this global norm; 0: do not clip", ">= 0")

    lora_r: int = option(
        0,
        "rank of the adapters, W + alpha/r*B*A; only they are trained; 0: train all weights",
        ">= 0",
        group="LoRA",
    )
    lora_alpha: float = option(32.0, "alpha in alpha/r", "> 0", needs="lora_r")
    use_rslora: bool = option(False, "use alpha/sqrt(r) instead of alpha/r", needs="lora_r")
    lora_dropout: float = option(
        0.0,
        "share of the adapters' inputs that training sets to 0; engines and old log-probs have no"
        " dropout",
        ">= 0",
        "< 1",
        needs="lora_r",
    )
    lora_target_modules: tuple[str, ...] = option(
        (),
        "layers that get adapters, such as q_proj v_proj; empty: the seven of the decoder, and none"
        " of a vision encoder (attn.qkv attn.proj linear_fc1 linear_fc2)",
        choices=(*LORA_TARGETS, *VISION_LORA_TARGETS),
        needs="lora_r",
    )
    lora_base_dtype: str = option(
        "auto",
        "how the frozen weights are stored; auto: in the dtype they compute in, which is bfloat16"
        " on a GPU",
        choices=("auto", "float32", "bfloat16"),
        needs="lora_r",
    )
    load_in_4bit: bool = option(
        False,
        "store the frozen matrices of the blocks in 4 bits (NF4, as in QLoRA), which takes a"
        " quarter of bfloat16's memory",
        needs="lora_r",
    )
    lora_adapter: str = option(
        "",
        "folder of adapters in PEFT's format to start from; the reference model stays the base",
        needs="lora_r",
    )

    eval_steps: int = option(
        0,
        "steps between evaluations on the held-out prompts, also run before the first step"
        " and after the last; 0: never",
        ">= 0",
        group="Evaluation, checkpoints and logging",
    )
    num_generations_eval: int = option(
        1,
        "completions per held-out prompt, for mean@k and pass@k",
        "> 0",
        needs="eval_steps",
    )
    eval_temperature: float = option(
        0.0,
        "sampling temperature in an evaluation; 0: always the most likely token (greedy)",
        ">= 0",
        needs="eval_steps",
    )
    eval_top_p: float = option(
        1.0,
        "top_p in an evaluation; 1: sample from all tokens",
        "> 0",
        "<= 1",
        needs="eval_temperature",
    )
    eval_samples: int = option(256, "evaluate the first N held-out prompts; 0: all", ">= 0")
    save_steps: int = option(
        50,
        "steps between checkpoints, which are written in the background; 0: only the last",
        ">= 0",
    )
    save_total_limit: int = option(2, "keep this many of the newest checkpoints; 0: all", ">= 0")
    save_only_model: bool = option(
        False, "save the weights without the optimizer's state; --resume then cannot continue"
    )
    save_merged: bool = option(
        True,
        "with LoRA, save the weights with the adapters merged into them, next to the adapters; if"
        " off, nanogrpo merge writes them later",
        needs="lora_r",
    )
    load_best_model_at_end: bool = option(
        False,
        "also keep the best checkpoint by evaluation, and name it at the end",
        needs="eval_steps",
    )
    metric_for_best_model: str = option(
        "reward",
        "name of the evaluation metric that decides, such as accuracy_reward",
        needs="load_best_model_at_end",
    )
    greater_is_better: bool = option(
        True, "whether the higher value of that metric is better", needs="load_best_model_at_end"
    )
    push_to_hub: bool = option(
        False, "upload the final checkpoint (or the best one) to the Hugging Face hub"
    )
    hub_model_id: str = option(
        "",
        "repository to upload to, such as me/my-model; default: the name of output_dir",
        needs="push_to_hub",
    )
    hub_private_repo: bool = option(
        False, "make that repository private when it is created", needs="push_to_hub"
    )
    overwrite_output_dir: bool = option(
        False, "delete what an earlier run left in output_dir, unless --resume continues it"
    )
    report_to: tuple[str, ...] = option(
        ("none",),
        "log to TensorBoard (files in output_dir), Trackio (on this machine) or Weights & Biases,"
        " as well as to metrics.jsonl",
        choices=("none", "tensorboard", "trackio", "wandb"),
    )
    run_name: str = option(
        "", "name of the run in trackio and wandb; empty: that of output_dir", needs="report_to"
    )
    log_completions: bool = option(
        False,
        "write every completion and its rewards to output_dir/completions, one file per step, and"
        " to the tables of trackio and wandb",
    )
    log_tokens: bool = option(
        False,
        "also write each token of the completions, with its probability, entropy, ratio, gap"
        " between trainer and engine, and share of the gradient, for nanogrpo view",
        needs="log_completions",
    )
    log_tokens_mib: float = option(
        256.0,
        "MiB for the tokens of the whole run; each step may use its share, for as many complete"
        " groups as fit",
        "> 0",
        "<= 1e7",
        needs="log_tokens",
    )
    log_unique_prompts: bool = option(
        False,
        "in the tables of trackio and wandb, keep one completion per prompt",
        needs="log_completions",
    )
    num_completions_to_print: int = option(
        0,
        "print this many completions after each step, of different prompts if possible; 0: none",
        ">= 0",
    )
    trace_step: int = option(
        0,
        "step to record with torch.profiler, into output_dir/trace-N.json; the first is 1, 0: none",
        ">= 0",
    )

    gradient_checkpointing: str = option(
        "auto",
        "recompute activations in the backward pass: none, all, or only the cheap ones; auto: none,"
        " or as many as a GPU's free memory requires",
        group="Hardware",
        choices=("auto", "none", "full", "selective"),
        words={"true": "full", "false": "none"},
    )
    kernels: str = option(
        "auto",
        "norms, rotation, SwiGLU and output head in Triton kernels or in PyTorch; auto: triton on a"
        " GPU, torch on a CPU",
        choices=("auto", "triton", "torch"),
    )
    torch_compile: bool = option(
        False,
        "compile each block of the model, which replaces the Triton kernels in it; the first steps"
        " take minutes longer",
    )
    torch_compile_backend: str = option(
        "inductor",
        "a backend that torch knows; aot_eager, for example, needs no C compiler",
        needs="torch_compile",
    )
    cpu_offload: bool = option(
        False,
        "keep weights, gradients and optimizer state in host memory; copy each block to the GPU"
        " when it runs",
    )
    reshard_after_forward: str = option(
        "auto",
        "free the gathered weights of a block after its forward pass (ZeRO-3), or keep them until"
        " the optimizer step (ZeRO-2); auto: keep them on one GPU if its free memory allows it",
        choices=("auto", "always", "never"),
        words={"true": "always", "false": "never"},
    )
    reduce_gradients: str = option(
        "auto",
        "reduce gradients over the GPUs once per optimizer step, or after each micro-batch, which"
        " needs almost 4 bytes less per weight but communicates more; auto: by free memory",
        choices=("auto", "step", "micro_batch"),
    )
    ddp_timeout: int = option(
        600,
        "seconds that ranks wait for each other, at the start and in each collective",
        "> 0",
        "<= 1e7",
    )
    heartbeat_timeout: int = option(
        10,
        "seconds without a heartbeat before a rank counts as dead and the others exit; ranks send"
        " two per second",
        ">= 3",
        "<= 1e7",
    )
    seed: int = option(
        0,
        "seed for all randomness; on a CPU the same seed gives the same run, bit for bit",
        ">= 0",
        "< 9223372036854775808",
    )
    full_determinism: bool = option(
        False,
        "use only deterministic operations on a GPU; the backward pass of attention gets slower",
    )
    device: str = option("auto", "device to train on", choices=("auto", "cpu", "cuda"))
    resume: bool = option(False, "continue from the last checkpoint in output_dir")
    resume_from: str = option(
        "",
        "continue from this checkpoint of output_dir, such as checkpoint-40, instead of the last",
        needs="resume",
    )

    def __post_init__(self) -> None:
        """Convert each value, or raise a UserError that names the type of the option."""
        for f in fields(self):
            value, kind = getattr(self, f.name), str(f.type)
            try:
                object.__setattr__(self, f.name, converted(kind, value))
            except (TypeError, OverflowError):  # the second for a number beyond the largest float
                shown = " ".join(repr(value).split())
                raise UserError(
                    f"--{dashed(f.name)} is {shown:.100} but must be {type_name(kind, 'None')}."
                ) from None

    @property
    def base(self) -> str:
        """Folder or hub id of the initial weights. A warmup:STEPS run creates them there first."""
        return f"{self.output_dir}/base" if self.model.startswith("warmup:") else self.model

    @property
    def prompts_per_step(self) -> int:
        """P, the number of prompts per step."""
        return self.generation_batch_size // self.num_generations

    @property
    def updates_per_step(self) -> int:
        """The number of optimizer steps per generation."""
        return self.num_iterations * self.steps_per_generation

    @property
    def slots(self) -> int:
        """max_concurrent, or 64 if it is not set. On a GPU, run/memory.py sets it."""
        return self.max_concurrent or 64

    @property
    def strip_tokens(self) -> int:
        """token_budget, or 16,384 if it is not set. On a GPU, run/memory.py sets it."""
        return self.token_budget or 16384

    @property
    def checkpointing(self) -> str:
        """gradient_checkpointing, or none for auto. On a GPU, run/memory.py decides."""
        return "none" if self.gradient_checkpointing == "auto" else self.gradient_checkpointing

    @property
    def scheduler_kwargs(self) -> dict[str, Any]:
        """The settings of the schedule: its defaults, changed by lr_scheduler_kwargs."""
        return SCHEDULES[self.lr_scheduler_type] | (self.lr_scheduler_kwargs or {})

    @property
    def on_policy(self) -> bool:
        """Whether the trained policy is the one that sampled. If so, the ratio is 1 and no old
        log-probs are needed.
        """
        return self.updates_per_step == 1 and not self.old_from_engine

    @property
    def old_from_engine(self) -> bool:
        """Whether the ratio divides by the engine's log-probs, which may come from older weights
        than the trainer's.
        """
        return self.old_logp_from == "engine" or (
            self.old_logp_from == "auto"
            and self.max_staleness > 0
            and self.vllm_importance_sampling_mode == "off"
        )

    @property
    def recomputes_old(self) -> bool:
        """Whether the trainer computes the log-probs of the ratio, or of the correction for the
        engine, before the first update.
        """
        corrected = not self.on_policy or self.vllm_importance_sampling_mode != "off"
        return corrected and not self.old_from_engine

    @property
    def upper_epsilon(self) -> float:
        """epsilon_high, or epsilon if it is not set."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high

    def validate(self) -> None:
        """Raise a UserError for the first invalid value."""
        for check in (_values, _sizes, _schedule, _saving, _loss, _engine, _ignored):
            for problem in check(self):
                raise UserError(problem)


# The allowed values of each option that has choices; a fork may add to them (docs/fork.md).
CHOICES: dict[str, tuple[str, ...]] = {
    f.name: f.metadata["choices"] for f in fields(Config) if "choices" in f.metadata
}


def dashed(name: str) -> str:
    """Return an option's name as the command line spells it, without the leading dashes."""
    return name.replace("_", "-")


# Each function below yields one sentence per problem. Those that combine options come after
# `_values`, so they can rely on the range of each value.


def _values(c: Config) -> Iterator[str]:
    """Check each value against the rules of its own field."""
    for f in fields(c):
        name, value, rules = f"--{dashed(f.name)}", getattr(c, f.name), f.metadata
        if isinstance(value, dict) and not _storable(value):
            yield f"{name} is {value}: give texts, numbers, lists and objects, as in JSON."
        items = value if isinstance(value, tuple) else (value,)
        if "required" in rules and not (items and all(items)):
            yield f"{name} is missing: {rules['required']}."
        for item in items:
            if isinstance(item, str) and "\0" in item:  # in YAML, and from Python
                yield f"{name} has a NUL character, which no file or name can have: remove it."
            if isinstance(item, float) and not math.isfinite(item):
                yield f"{name} is {item}: give a finite number."
            if item not in CHOICES.get(f.name, (item,)):
                yield f"{name} is {item!r}: choose one of {', '.join(CHOICES[f.name])}."
            for limit in rules["limits"]:
                sign, bound = limit.split()
                if item is not None and not COMPARE[sign](item, float(bound)):
                    yield f"{name} is {item}: it must be {limit}."


def _storable(value: dict) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def _sizes(c: Config) -> Iterator[str]:
    """Check the options of the model, the data sources, the sizes of a step, and the hardware."""
    if c.num_generations_eval > 1 and not c.eval_temperature:
        yield (
            f"--num-generations-eval {c.num_generations_eval} would give equal completions at"
            " --eval-temperature 0: set a temperature, such as 1.0."
        )
    kind, _, count = c.model.partition(":")
    if kind == "warmup" and not (count.isdecimal() and int(count)):
        yield f"--model {c.model!r} has no number of steps: write, for example, warmup:60."
    for name in ("enable_thinking", "tools", "messages", "add_generation_prompt"):
        if name in (c.chat_template_kwargs or {}):
            instead = "use --no-enable-thinking" if name == "enable_thinking" else "leave it out"
            yield f"--chat-template-kwargs sets {name}, which the trainer sets itself: {instead}."
    for values, sources in (("data_weights", "data"), ("reward_weights", "reward_funcs")):
        given, expected = len(getattr(c, values)), len(getattr(c, sources))
        if given not in (0, expected):
            yield (
                f"--{dashed(values)} has {given} values but --{dashed(sources)} has {expected}:"
                " give one value for each."
            )
    if c.generation_batch_size % c.num_generations:
        yield (
            f"--generation-batch-size {c.generation_batch_size} is not a multiple of"
            f" --num-generations {c.num_generations}: choose a multiple, because a step samples"
            " complete groups."
        )
    if c.prompts_per_step % c.steps_per_generation:
        yield (
            f"--steps-per-generation {c.steps_per_generation} does not divide the"
            f" {c.prompts_per_step} prompts of a step (generation_batch_size / num_generations):"
            " choose a divisor, because a minibatch holds complete groups."
        )
    if c.num_train_epochs and c.max_steps != Config.max_steps:
        yield (
            f"--num-train-epochs {c.num_train_epochs:g} and --max-steps {c.max_steps} both say how"
            " long to train: leave one of them out."
        )
    if c.trace_step > c.max_steps and not c.num_train_epochs:
        yield (
            f"--trace-step {c.trace_step} is beyond --max-steps {c.max_steps}: name a step of the"
            " run."
        )
    if c.torch_compile and c.load_in_4bit:
        yield (
            "--load-in-4bit cannot be used with --torch-compile, because the compiler could keep"
            " the dequantized matrices for the backward pass: leave one of them out."
        )
    if c.torch_compile and c.gradient_checkpointing == "selective":
        yield (
            "--gradient-checkpointing selective cannot be used with --torch-compile, which chooses"
            " itself what to recompute: use full or none."
        )
    if "none" in c.report_to and len(c.report_to) > 1:
        yield "--report-to lists 'none' together with others: remove 'none'."


def _schedule(c: Config) -> Iterator[str]:
    """Check the warmup and the settings of the schedule."""
    if c.warmup_steps > 1 and c.warmup_steps % 1:
        yield (
            f"--warmup-steps {c.warmup_steps} is neither a whole number of steps nor a share below"
            " 1: give one of them."
        )
    kind, option = c.lr_scheduler_type, f"--lr-scheduler-kwargs {c.lr_scheduler_kwargs}"
    given, known = c.lr_scheduler_kwargs or {}, SCHEDULES[kind]
    for name, value in given.items():
        if name not in known:
            names = f"one of {', '.join(known)}" if known else "none"
            yield f"{option}: --lr-scheduler-type {kind} has no setting {name}: give {names}."
            return
        shapes = ("linear", "cosine", "1-sqrt")
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if isinstance(known[name], str):
            if value not in shapes:
                yield f"{option}: {name} is {value!r}: choose one of {', '.join(shapes)}."
        elif not (number and 0 <= value < math.inf):
            yield f"{option}: {name} is {value!r}: give a number, 0 or more."
    if "min_lr" in known and ("min_lr" in given) == ("min_lr_rate" in given):
        yield (
            f"--lr-scheduler-type {kind} needs either min_lr or min_lr_rate: give one of them in"
            " --lr-scheduler-kwargs."
        )
    if kind == "warmup_stable_decay" and "num_decay_steps" not in given:
        yield (
            f"--lr-scheduler-type {kind} needs num_decay_steps, the optimizer steps of the decay:"
            " give it in --lr-scheduler-kwargs."
        )
    for name in ("min_lr", "lr_end"):
        end = c.scheduler_kwargs.get(name)
        if end is not None and not end < c.learning_rate:
            yield (
                f"--lr-scheduler-type {kind} ends at {name} {end}, which is not below"
                f" --learning-rate {c.learning_rate}: lower {name} in --lr-scheduler-kwargs."
            )


def _saving(c: Config) -> Iterator[str]:
    """Check the options of checkpoints, of the best one, and of the hub."""
    if (
        c.load_best_model_at_end
        and c.eval_steps
        and (not c.save_steps or c.save_steps % c.eval_steps)
    ):
        yield (
            f"--load-best-model-at-end compares checkpoints that were evaluated, but --save-steps"
            f" {c.save_steps} is not a multiple of --eval-steps {c.eval_steps}: choose a multiple."
        )
    if not re.fullmatch(r"(|[\w.-]+|[\w.-]+/[\w.-]+)", c.hub_model_id):
        yield f"--hub-model-id {c.hub_model_id!r} is no repository: write OWNER/NAME or NAME."


def _loss(c: Config) -> Iterator[str]:
    """Check the options of the loss, the advantages and the reference model."""
    if c.delta is not None and c.loss_type not in CLIPPED:
        yield (
            f"--delta {c.delta} cannot be used with --loss-type {c.loss_type}, which bounds the"
            " ratio in its own way: leave it out."
        )
    if c.importance_sampling_level == "sequence" and c.loss_type.startswith(("dppo", "vespo")):
        yield (
            f"--importance-sampling-level sequence cannot be used with --loss-type {c.loss_type},"
            " which defines its own ratios: use token."
        )
    mode = c.vllm_importance_sampling_mode
    if c.loss_type == "vespo" and mode.startswith("sequence"):
        yield (
            f"--vllm-importance-sampling-mode {mode} cannot be used with --loss-type vespo, which"
            " multiplies the weights of the tokens: use token_truncate, token_mask or off."
        )
    low, high = c.entropy_coef_min, c.entropy_coef_max
    if c.use_adaptive_entropy and not low <= c.entropy_coef <= high:
        yield (
            f"--entropy-coef {c.entropy_coef} is not between --entropy-coef-min {low} and"
            f" --entropy-coef-max {high}, as --use-adaptive-entropy requires: choose a value"
            " between them."
        )
    together = c.multi_objective_aggregation == "sum_then_normalize"
    if c.scale_rewards != "group" and not together:
        yield (
            f"--scale-rewards {c.scale_rewards} cannot be used with --multi-objective-aggregation"
            " normalize_then_sum, which scales by the group and then by the batch: leave it out."
        )
    scales = {"grpo": CHOICES["scale_rewards"], "rloo": ("group", "none"), "maxrl": ("group",)}
    estimator = c.advantage_estimator
    if c.scale_rewards not in scales[estimator] or not (together or estimator == "grpo"):
        yield (
            f"--advantage-estimator {estimator} defines its own scale: leave --scale-rewards and"
            " --multi-objective-aggregation out."
        )
    if c.sync_ref_model and c.lora_r:
        yield (
            "--sync-ref-model cannot be used with --lora-r, because the reference is then the base"
            " without adapters: leave one of them out."
        )


def _engine(c: Config) -> Iterator[str]:
    """Check the options of the engine and of the log-probs it reports."""
    corrected = c.vllm_importance_sampling_mode != "off"
    low, high = c.vllm_importance_sampling_clip_min or 0.0, c.vllm_importance_sampling_clip_max
    if not low <= 1 <= high:
        yield (
            f"--vllm-importance-sampling-clip-min {low} and --vllm-importance-sampling-clip-max"
            f" {high} do not enclose 1, the weight if trainer and engine agree: choose one bound on"
            " each side of it."
        )
    if c.old_from_engine and corrected:
        yield (
            "--old-logp-from engine already includes the correction in the ratio: set"
            " --vllm-importance-sampling-mode off."
        )
    if c.max_staleness and not (c.old_from_engine or corrected):
        yield (
            "--max-staleness trains on samples of older weights, which needs a correction: leave"
            " --old-logp-from at auto, or choose a --vllm-importance-sampling-mode."
        )
    users = [name for name in ("rollout", "tools", "environment_factory") if getattr(c, name)]
    if users and c.max_staleness:
        yield (
            f"--{dashed(users[0])} cannot be used with --max-staleness, because its turns are"
            " sampled with the current weights: use --max-staleness 0."
        )
    if c.rollout and len(users) > 1:
        yield (
            f"--rollout cannot be used with --{dashed(users[1])}, because tool calls are a rollout"
            " of their own: leave one of them out."
        )
    for name in ("max_tool_calling_iterations", "tool_timeout"):
        if getattr(c, name) != getattr(Config, name) and not (c.tools or c.environment_factory):
            yield (
                f"--{dashed(name)} is {getattr(c, name)}, which has no effect without --tools or"
                " --environment-factory: set one of them too."
            )
    if c.engine == "local":
        return
    for name in ("top_p", "top_k", "min_p", "eval_top_p"):
        if getattr(c, name) != getattr(Config, name):
            yield (
                f"--{dashed(name)} {getattr(c, name)} cannot be used with --engine vllm, because"
                " its log-probs would include the filter, which training does not apply: use"
                f" {getattr(Config, name)}."
            )
    if not 0.01 <= c.temperature <= 2:
        yield (
            f"--temperature {c.temperature} is outside the range of vLLM: give a value between 0.01"
            " and 2."
        )
    for name in ("vllm_python", "vllm_options"):
        if c.server and getattr(c, name):
            yield (
                f"--{dashed(name)} configures a server that the trainer starts: give it to serve.py"
                " instead, or leave --server out."
            )
    for name in ("vllm_gpus", "vllm_enable_sleep_mode"):
        if c.server and getattr(c, name):
            yield (
                f"--{dashed(name)} is for a server that the trainer starts, but --server names one"
                " that runs already: leave one of them out."
            )
    gpus = c.vllm_gpus.split(",")
    if c.vllm_gpus and not all(re.fullmatch(r"[0-9]{1,4}|(GPU|MIG)-[\w/-]+", gpu) for gpu in gpus):
        yield f"--vllm-gpus is {c.vllm_gpus!r}: write numbers or UUIDs with commas, such as 2,3."
    if len(set(gpus)) < len(gpus):
        yield f"--vllm-gpus {c.vllm_gpus} names a GPU twice: name each once."
    if c.vllm_enable_sleep_mode and c.max_staleness:
        yield (
            "--vllm-enable-sleep-mode cannot be used with --max-staleness, because the server then"
            " samples while the trainer trains: leave one of them out."
        )
    try:
        words = shlex.split(c.vllm_options)
    except ValueError as e:
        yield f"--vllm-options {c.vllm_options!r} cannot be split ({e}): close the quotes."
        return
    for name in ("--model", "--host", "--port", "--secret-file", "--owner"):
        if name in (word.split("=")[0] for word in words):
            yield (
                f"--vllm-options sets {name}, which the trainer chooses for its own server: leave"
                " it out."
            )


def _ignored(c: Config) -> Iterator[str]:
    """Find options that are set but have no effect, because of the value of another option."""
    if c.reward_env and not c.reward_timeout:
        yield (
            "--reward-env has no effect with --reward-timeout 0, because reward functions then run"
            " in the trainer's own process: leave it out."
        )
    if c.freeze_vision_tower and c.lora_r:
        yield (
            "--freeze-vision-tower has no effect with --lora-r, which trains nothing but adapters:"
            " leave it out."
        )
    for f in fields(c):
        value = getattr(c, f.name)
        if "needs" not in f.metadata or value == f.default:
            continue
        other, _, wanted = f.metadata["needs"].partition("=")
        value = " ".join(map(str, value)) if isinstance(value, tuple) else value
        current, problem = getattr(c, other), f"--{dashed(f.name)} is {value}, which has no effect"
        if not wanted and current == getattr(Config, other):
            yield f"{problem} without --{dashed(other)}: set that too."
        if wanted and current not in wanted.split("|"):
            choice = wanted.replace("|", " or ")
            yield f"{problem} with --{dashed(other)} {current}: choose {choice}, or leave it out."
    if c.log_unique_prompts and not {"trackio", "wandb"} & {*c.report_to}:
        yield (
            "--log-unique-prompts is True, which has no effect without the tables of trackio or"
            " wandb: name one of them with --report-to, or leave it out."
        )
