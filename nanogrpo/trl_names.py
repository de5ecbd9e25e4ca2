"""TRL's options: which name or value here stands for each option of TRL that has no equal here.

    translate({"use_vllm": True, "per_device_train_batch_size": 8})
        → {"engine": "vllm", "generation_batch_size": 8, "steps_per_generation": 1}

In: options by name, from the command line or a file. Out: options of `Config`. The meaning of an
option is translated only where it is clear; otherwise a UserError says what to use instead, or why
there is no such option. The tables cover every field of TRL 1.16.0's GRPOConfig, ModelConfig and
script arguments and of transformers' TrainingArguments. The tables in docs/trl.md are printed from
them (python -m nanogrpo.trl_names). Read before: cli.py.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from nanogrpo.config import Config, dashed
from nanogrpo.errors import UserError

log = logging.getLogger("nanogrpo")

# --- the tables: one entry answers for all the names in its key -----------------------------------

# The same option under another name.
RENAMED = {
    "model_name_or_path": "model",
    "dataset_name": "data",
    "warmup_ratio": "warmup_steps",
    "activation_checkpointing": "gradient_checkpointing",
    "vllm_server_base_url": "server",
    "vllm_importance_sampling_cap": "vllm_importance_sampling_clip_max",
}

# Options that `translate` understands, with what they become.
TRANSLATED = {
    "per_device_train_batch_size gradient_accumulation_steps": "--generation-batch-size and"
    " --steps-per-generation; micro-batches follow from --token-budget",
    "use_vllm": "--engine vllm",
    "vllm_mode": "colocate: --weight-transport memory, with a server that the trainer starts;"
    " server: --server",
    "vllm_server_host vllm_server_port": "--server",
    "vllm_importance_sampling_correction": "--vllm-importance-sampling-mode, sequence_mask or off",
    "use_peft": "--lora-r 16, unless you give another rank",
    "use_cpu": "--device cpu",
    "resume_from_checkpoint": "true is --resume, which continues from the last checkpoint in"
    " --output-dir",
    "eval_strategy": "no is --eval-steps 0, steps changes nothing",
    "save_strategy": "steps changes nothing; for other values use --save-steps",
    "bf16": "true changes nothing: a GPU computes in bfloat16 and a CPU in float32, and weights are"
    " stored in float32",
    "shuffle_dataset": "true changes nothing: prompts are always shuffled, by --seed and epoch",
}

# Another option does it, but a value of one is not a value of the other.
INSTEAD = {
    "auto_find_batch_size": "lower --token-budget; the memory is estimated before the run",
    "data_seed": "use --seed, which is the seed of all randomness",
    "accelerator_config deepspeed fsdp fsdp_config parallelism_config local_rank": "start one"
    " process per GPU with torchrun, which always shards the weights; see --reshard-after-forward"
    " and --cpu-offload",
    "hub_token": "log in with `hf auth login` or set HF_TOKEN, because others can read command"
    " lines; then use --push-to-hub",
    "project": "set TRACKIO_PROJECT or WANDB_PROJECT, for --report-to trackio or wandb",
    "torch_compile_mode": "use --torch-compile, with --torch-compile-backend",
    "torch_empty_cache_steps": "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, or lower"
    " --token-budget",
    "vllm_server_timeout": "use --server-timeout for one request, and --server-patience for a lost"
    " server",
    "vllm_gpu_memory_utilization": 'use --vllm-options="--gpu-memory-utilization 0.3"',
    "vllm_tensor_parallel_size": 'use --vllm-options="--tensor-parallel-size 2"',
    "vllm_model_impl": 'use --vllm-options="--model-impl vllm"',
    "reward_model_name_or_path": "use --reward-funcs model:FOLDER",
    "datasets test_split_size": "use --data with several sources, --data-weights and --eval-data",
    "env": "set environment variables in the shell; there is no option for them",
}

# Leaving these out changes nothing that matters, so they are accepted and ignored.
IGNORED = {
    "logging_strategy logging_steps logging_first_step logging_nan_inf_filter disable_tqdm"
    " log_level log_level_replica log_on_each_node": "every step is logged, by the first process",
    "include_num_input_tokens_seen skip_memory_metrics": "tokens and memory are always logged",
    "dataloader_drop_last dataloader_in_order dataloader_multiprocessing_context"
    " dataloader_num_workers dataloader_persistent_workers dataloader_pin_memory"
    " dataloader_prefetch_factor length_column_name": "all prompts are in memory, and no worker"
    " loads them",
    "remove_unused_columns": "reward functions receive all columns",
    "ddp_backend ddp_broadcast_buffers ddp_bucket_cap_mb ddp_find_unused_parameters"
    " ddp_static_graph ds3_gather_for_generation ignore_bias_buffers": "weights are sharded with"
    " FSDP2",
    "average_tokens_across_devices": "the loss is averaged over the tokens of all processes",
    "batch_eval_metrics eval_accumulation_steps eval_do_concat_batches eval_use_gather_object"
    " include_for_metrics label_names prediction_loss_only": "an evaluation scores completions"
    " with the reward functions",
    "per_device_eval_batch_size": "the engine samples as many completions at once as fit into"
    " --max-concurrent",
    "eval_on_start do_train do_eval do_predict": "--eval-steps evaluates before the first step, at"
    " intervals, and after the last",
    "enable_jit_checkpoint": "SIGTERM always saves a checkpoint",
    "restore_callback_states_from_checkpoint": "there are no callbacks",
    "gradient_checkpointing_kwargs activation_checkpointing_kwargs": "--gradient-checkpointing"
    " says all",
    "use_liger_kernel liger_kernel_config": "head, norms and activations are fused kernels",
    "attn_implementation": "a GPU uses FlashAttention if it is installed",
    "use_cache use_transformers_continuous_batching transformers_continuous_batching_config"
    " use_transformers_paged": "the local engine has a key-value cache and always batches"
    " continuously",
    "dtype torch_dtype": "weights are trained in float32, a GPU computes in bfloat16, and"
    " checkpoints have the dtype of the base model",
    "tf32": "a GPU computes in bfloat16",
    "debug": "a gradient that is not finite always ends the run",
    "disable_dropout": "dropout in config.json is never applied",
    "pad_to_multiple_of": "nothing is padded",
    "vllm_group_port": "the trainer chooses the port and sends it to the server",
    "vllm_max_model_length": "the trainer gives its own server the length it needs",
    "hub_strategy hub_always_push": "--push-to-hub uploads once, after the last step",
    "lora_task_type": "a causal language model is trained",
}

UNSUPPORTED = {
    "fp16 fp16_full_eval bf16_full_eval": "a GPU computes in bfloat16 and a CPU in float32",
    "full_determinism": "on a CPU the same seed gives the same bits; on a GPU it does not",
    "label_smoothing_factor": "completions have advantages, and no labels",
    "neftune_noise_alpha": "noise would train another policy than the one that sampled",
    "optim_args optim_target_modules": "AdamW is the only optimizer; its settings are --adam-beta1,"
    " --adam-beta2, --adam-epsilon and --weight-decay",
    "eval_delay": "evaluations start before the first step",
    "ignore_data_skip": "a resumed run always continues with the next prompts",
    "train_sampling_strategy": "prompts are shuffled, and micro-batches are balanced by tokens",
    "save_on_each_node": "all machines share --output-dir",
    "hub_revision": "--push-to-hub writes to the main branch",
    "trackio_space_id trackio_bucket_id trackio_static_space_id": "only --report-to"
    " says where metrics go",
    "model_revision": "download the revision, and give its folder to --model",
    "model_init_kwargs trust_remote_code": "there is one decoder, in nanogrpo/model/decoder.py",
    "router_aux_loss_coef": "there are no mixtures of experts",
    "cast_lm_head_to_fp32": "everything after the logits is computed in float32, and"
    " kernels/README.md describes the rounding",
    "generation_kwargs repetition_penalty cache_implementation": "the distribution that is sampled"
    " would differ from the policy that is trained",
    "vllm_structured_outputs_regex": "constraints change the log-probs, which would differ from"
    " those of the policy that is trained",
    "vllm_enable_sleep_mode": "the server keeps its memory while the trainer works; on a shared GPU"
    ' limit it with --vllm-options="--gpu-memory-utilization 0.3"',
    "log_multimodal": "only text is supported",
    "log_completions_hub_repo": "--log-completions writes files, which you can upload",
    "dataset_streaming streaming": "all prompts are read at the start, because a resumed run draws"
    " them again",
    "load_in_4bit load_in_8bit bnb_4bit_quant_type bnb_4bit_quant_storage"
    " use_bnb_nested_quant": "the base model is not quantized; --lora-r trains adapters on a"
    " float32 base",
    "use_dora lora_modules_to_save lora_target_parameters": "adapters are plain LoRA on linear"
    " layers",
}


def rows(table: Mapping[str, str]) -> dict[str, str]:
    """Return a table with one entry for each name."""
    return {name: answer for names, answer in table.items() for name in names.split()}


TABLES = (RENAMED, TRANSLATED, INSTEAD, IGNORED, UNSUPPORTED)
NAMES = {name for table in TABLES for name in rows(table)} - {f.name for f in fields(Config)}


# --- the translation ------------------------------------------------------------------------------


def translate(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options with TRL's replaced by ours, and log what became of each one."""
    out = {name: value for name, value in options.items() if name not in NAMES}
    given = {name: value for name, value in options.items() if name in NAMES}
    ignored, instead, unsupported = rows(IGNORED), rows(INSTEAD), rows(UNSUPPORTED)
    for name, value in given.items():
        if name in ignored:
            log.info("--%s: ignored, because %s", dashed(name), ignored[name])
        elif name in instead | unsupported and value not in (False, None):
            raise UserError(f"--{dashed(name)} is an option of TRL: {answer(name)}.")
    _engine(given, out)
    _batch(given, out)
    _rest(given, out)
    return out


def answer(name: str) -> str:
    """Return what to do about an option of TRL that has no translation."""
    reason = rows(UNSUPPORTED).get(name)
    return f"it is not supported here, because {reason}" if reason else rows(INSTEAD)[name]


def _engine(given: Mapping[str, Any], out: dict[str, Any]) -> None:
    """Translate the options of vLLM."""
    if "use_vllm" in given:
        _take("use_vllm", given, out, engine="vllm" if _flag("use_vllm", given) else "local")
    on = out.get("engine") == "vllm"
    for name in ("vllm_mode", "vllm_server_host", "vllm_server_port"):
        if name in given and not on:
            log.info("--%s: ignored, because vLLM is not used", dashed(name))
    mode = given.get("vllm_mode")
    if mode not in (None, "colocate", "server"):
        raise UserError(f"--vllm-mode is {mode!r}: choose colocate or server.")
    if on and mode == "colocate":
        _take("vllm_mode", given, out, weight_transport="memory")
    elif on and "server" not in out and given.keys() & {"vllm_server_host", "vllm_server_port"}:
        host, port = given.get("vllm_server_host", "127.0.0.1"), given.get("vllm_server_port", 8000)
        names = "vllm_mode vllm_server_host vllm_server_port"
        _take(names, given, out, server=(f"http://{host}:{port}",))
    elif on and mode == "server" and "server" not in out:
        _take("vllm_mode", given, out, server=("http://127.0.0.1:8000",))
    name, field = "vllm_importance_sampling_correction", "vllm_importance_sampling_mode"
    if name in given and not (_flag(name, given) and field in out):
        _take(name, given, out, **{field: "sequence_mask" if given[name] else "off"})


def _batch(given: Mapping[str, Any], out: dict[str, Any]) -> None:
    """Translate the batch per device. As in TRL, a generation contains per_device x processes x
    steps_per_generation completions, and TRL's steps_per_generation counts micro-batches, of which
    gradient_accumulation_steps make an optimizer step.
    """
    names = "per_device_train_batch_size gradient_accumulation_steps"
    if not given.keys() & set(names.split()):
        return
    each = _whole("per_device_train_batch_size", given, 8)  # TRL's default
    accumulated = _whole("gradient_accumulation_steps", given, 1)
    processes = int(os.environ.get("WORLD_SIZE", 1))
    total, micro = out.pop("generation_batch_size", None), out.pop("steps_per_generation", None)
    if total and micro:
        raise UserError(
            "--generation-batch-size and --steps-per-generation determine the batch: leave out"
            " --per-device-train-batch-size and --gradient-accumulation-steps."
        )
    if total and total % (each * processes):
        raise UserError(
            f"--generation-batch-size {total} is not a multiple of --per-device-train-batch-size"
            f" {each} on {processes} processes: choose a multiple, or leave the second out."
        )
    micro = micro or (total // (each * processes) if total else accumulated)
    if micro % accumulated:
        raise UserError(
            f"--gradient-accumulation-steps {accumulated} does not divide the {micro} micro-batches"
            " of a generation (TRL's steps_per_generation): choose a divisor, because an optimizer"
            " step cannot span two generations."
        )
    total = each * processes * micro
    _take(names, given, out, generation_batch_size=total, steps_per_generation=micro // accumulated)


def _rest(given: Mapping[str, Any], out: dict[str, Any]) -> None:
    """Translate what needs no more than a look at its value."""
    if "use_peft" in given:
        use = _flag("use_peft", given)
        if use and "lora_r" not in out:
            _take("use_peft", given, out, lora_r=16)  # TRL's default
        elif not use and out.get("lora_r"):
            raise UserError("--use-peft is false, but --lora-r is given: leave one of them out.")
    if "use_cpu" in given and _flag("use_cpu", given):
        _take("use_cpu", given, out, device="cpu")
    if (folder := given.get("resume_from_checkpoint")) is not None:
        if not isinstance(folder, bool):
            raise UserError(
                f"--resume-from-checkpoint {folder}: use --resume, which continues from the last"
                " checkpoint in --output-dir."
            )
        _take("resume_from_checkpoint", given, out, resume=folder)
    if given.get("eval_strategy") == "no":
        _take("eval_strategy", given, out, eval_steps=0)
    for name in ("eval_strategy", "save_strategy"):
        steps = name.replace("strategy", "steps")
        value = given.get(name)
        if value not in (None, "steps") and (name, value) != ("eval_strategy", "no"):
            raise UserError(
                f"--{dashed(name)} {value} is not supported: give a number to --{dashed(steps)},"
                " where 0 means never (for saving: only at the end)."
            )
        if name == "eval_strategy" and value == "steps" and not out.get(steps):
            raise UserError("--eval-strategy steps needs --eval-steps: give a number of steps.")
    for name in ("bf16", "shuffle_dataset"):
        if name in given and not _flag(name, given):
            reason = rows(TRANSLATED)[name].partition(": ")[2]
            raise UserError(f"--{dashed(name)} cannot be turned off, because {reason}.")
        if name in given:
            log.info("--%s: %s", dashed(name), rows(TRANSLATED)[name])
    settings = out.get("chat_template_kwargs")
    if isinstance(settings, dict) and isinstance(settings.get("enable_thinking"), bool):
        rest = {name: value for name, value in settings.items() if name != "enable_thinking"}
        out["chat_template_kwargs"] = rest or None
        on = {"enable_thinking": settings["enable_thinking"]}
        _take("chat_template_kwargs", {"chat_template_kwargs": on}, out, **on)
    if out.get("max_steps") == -1 and out.get("num_train_epochs"):
        del out["max_steps"]  # TRL's way to leave it out
    if out.get("lora_target_modules") == ("all-linear",):
        out["lora_target_modules"] = Config.lora_target_modules  # all of them


def _take(names: str, given: Mapping[str, Any], out: dict[str, Any], **ours: Any) -> None:
    """Add our options for the given ones to `out`, and log it."""
    theirs = _spelled({name: given[name] for name in names.split() if name in given})
    for name, value in ours.items():
        if out.get(name, value) != value:
            raise UserError(
                f"{theirs} means {_spelled({name: value})}, but {_spelled({name: out[name]})} is"
                " given too: leave one of them out."
            )
    out.update(ours)
    log.info("%s: taken as %s", theirs, _spelled(ours))


def _spelled(options: Mapping[str, Any]) -> str:
    """Return options as the command line spells them."""
    words = []
    for name, value in options.items():
        words.append(f"--{dashed(name)}")
        if value is not True:
            words.append(" ".join(map(str, value)) if isinstance(value, tuple) else str(value))
    return " ".join(words)


def _flag(name: str, given: Mapping[str, Any]) -> bool:
    if not isinstance(given[name], bool):
        raise UserError(f"--{dashed(name)} is {given[name]!r} but must be true or false.")
    return given[name]


def _whole(name: str, given: Mapping[str, Any], default: int) -> int:
    value = given.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UserError(f"--{dashed(name)} is {value!r} but must be a whole number above 0.")
    return value


# --- the documentation ----------------------------------------------------------------------------


def tables() -> str:
    """Return the tables of docs/trl.md."""
    renamed = {theirs: f"--{dashed(ours)}" for theirs, ours in RENAMED.items()}
    out = ""
    for title, heads, table in (
        ("Understood under TRL's name", ("TRL", "here"), {**renamed, **TRANSLATED}),
        ("Another option instead", ("TRL", "here"), INSTEAD),
        ("Accepted and ignored", ("TRL", "because"), IGNORED),
        ("Not supported", ("TRL", "because"), UNSUPPORTED),
    ):
        out += f"## {title}\n\n| {heads[0]} | {heads[1]} |\n| --- | --- |\n"
        for names, text in table.items():
            names = ", ".join(f"`{name}`" for name in names.split())
            text = re.sub(r"(--[a-z][a-z0-9-]*)", r"`\1`", text)
            out += f"| {names} | {text} |\n"
        out += "\n"
    return out


if __name__ == "__main__":
    print(tables(), end="")
