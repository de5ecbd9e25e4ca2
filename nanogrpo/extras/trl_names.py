"""The names of options in other programs: which options replace TRL's options, and what to use for
other names.

    notes = Notes()
    translate({"use_peft": True, "per_device_train_batch_size": 8}, notes)
        → {"lora_r": 16, "generation_batch_size": 8, "steps_per_generation": 1}
    notes.finish()                # logs the replacements, or raises one error for all mistakes
    unknown("--kl_coef", FIELDS)  # → "--kl_coef is not an option: use --beta."

In: options by name, from the command line, a file or Python. Out: options of `Config`. An option is
translated only if its meaning is clear. For others, a UserError says what to use instead, or why
there is no such option. The tables cover every field of GRPOConfig, ModelConfig and the script
arguments in TRL 1.16.0, and every field of TrainingArguments in transformers. The command
`python docs/trl_tables.py` prints the tables for docs/trl.md. Read next: commandline.py and
trl_objects.py, which use this file.
"""

import contextlib
import difflib
import logging
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from nanogrpo.cli import Options
from nanogrpo.config import dashed
from nanogrpo.errors import UserError, without_nulls

logger = logging.getLogger("nanogrpo")

# --- the tables -----------------------------------------------------------------------------------


def table(text: str) -> dict[str, str]:
    """Return the entries of a table. An entry begins with one or more names. The indented lines
    after the names describe them, in Markdown.
    """
    entries = re.findall(r"((?:^ {4}\S.*\n)+)((?:^ {8}.*\n)+)", text, re.MULTILINE)
    return {" ".join(names.split()): " ".join(words.split()) for names, words in entries}


# Options of TRL that have a different name here.
RENAMED = {
    "model_name_or_path": "model",
    "dataset_name": "data",
    "warmup_ratio": "warmup_steps",
    "activation_checkpointing": "gradient_checkpointing",
    "vllm_server_base_url": "server",
    "vllm_importance_sampling_cap": "vllm_importance_sampling_clip_max",
}

# Options that `translate` understands, with their replacements.
TRANSLATED = table(
    """
    per_device_train_batch_size gradient_accumulation_steps
        `--generation-batch-size` and `--steps-per-generation`; micro-batches follow from
        `--token-budget`
    use_vllm
        `true` is `--engine vllm`, with TRL's default `vllm_mode`; `false` is `--engine local`
    vllm_mode
        `colocate`, the default: the trainer starts a vLLM server on the GPU of its first process,
        unless `--server` is given; `server`: start a server yourself, and give its address to
        `--server`
    vllm_server_host vllm_server_port
        `--server http://HOST:PORT`
    vllm_gpu_memory_utilization vllm_tensor_parallel_size
        vLLM's options of the same names, in `--vllm-options`; as in TRL, they apply only to a
        server that the trainer starts; by default, the server's memory depends on the free memory
    vllm_importance_sampling_correction
        `true` is `--vllm-importance-sampling-mode sequence_mask`, unless a different mode is given;
        `false` is `off`
    use_peft
        `true` is `--lora-r 16`, unless a different rank is given; `false` is `--lora-r 0`
    use_cpu
        `true` is `--device cpu`; otherwise a GPU is used if there is one
    fp16
        `true` is `--dtype float16`, which also applies to the engine
    cast_lm_head_to_fp32
        `true` is `--head-dtype float32`, which also applies to the engine, and needs no float32
        copy of the head's weights
    resume_from_checkpoint
        `true` is `--resume`, which continues from the last checkpoint in `--output-dir`; to
        continue from an earlier checkpoint, delete the later ones
    sync_ref_model
        `true` is `--ref-model-sync-steps 512`, unless a different number is given; `false` is 0
    eval_strategy
        `steps` changes nothing, and `no` is `--eval-steps 0`; otherwise give a number to
        `--eval-steps`
    save_strategy
        `steps` changes nothing, and `no` is `--save-steps 0`, which saves only after the last step;
        otherwise give a number to `--save-steps`
    greater_is_better
        the best checkpoint has the highest value of `--metric-for-best-model`
    """
)

# Options that are not translated, with the option or the action that serves the same purpose.
INSTEAD = table(
    """
    auto_find_batch_size
        do not set `--token-budget`; the run then chooses it from the free memory of the GPU
    data_seed
        use `--seed`, which determines all random numbers
    accelerator_config deepspeed fsdp fsdp_config parallelism_config local_rank
        start one process per GPU with torchrun; the weights are then always sharded; see
        `--reshard-after-forward` and `--cpu-offload`
    push_to_hub hub_model_id hub_private_repo hub_token hub_strategy hub_always_push hub_revision
        run `hf upload` after the training (docs/running.md)
    save_only_model
        delete `checkpoint-N/state` after the run, because only `--resume` needs it
    log_unique_prompts log_completions_hub_repo log_multimodal
        `--log-completions` writes files with all completions and pictures
    project
        set TRACKIO_PROJECT or WANDB_PROJECT, for `--report-to trackio` or `wandb`
    torch_empty_cache_steps
        lower `--token-budget`; the allocator uses expandable segments, so there is hardly any
        unused memory to free (docs/memory.md)
    vllm_server_timeout
        use `--server-timeout`
    vllm_model_impl
        use `--vllm-options="--model-impl transformers"`
    reward_model_name_or_path
        use `--reward-funcs model:FOLDER`
    datasets test_split_size
        use `--data` with several sources and `--eval-data`
    sapo_temperature_pos sapo_temperature_neg vespo_k_pos vespo_k_neg vespo_lambda_pos
    vespo_lambda_neg
        use `--loss-kwargs`, a JSON object with these names
    use_adaptive_entropy entropy_target entropy_coef_min entropy_coef_max entropy_coef_delta
        use a constant `--entropy-coef`
    use_rslora
        multiply `--lora-alpha` by the square root of `--lora-r`
    env
        set environment variables in the shell; there is no option for them
    """
)

# These options are accepted and ignored, because they have no effect in nanogrpo.
IGNORED = table(
    """
    bf16 tf32 torch_dtype
        a GPU computes in bfloat16 and a CPU in float32, unless `--dtype` is given; weights are
        trained in float32, and checkpoints have the dtype of the base model
    shuffle_dataset
        prompts are always shuffled, in an order that depends on `--seed` and the epoch
    bnb_4bit_quant_storage use_bnb_nested_quant
        `--load-in-4bit` always stores the codes as bytes, and always quantizes the scales of the
        blocks, too
    logging_strategy logging_steps logging_first_step logging_nan_inf_filter disable_tqdm log_level
    log_level_replica log_on_each_node
        every step is logged, by the first process
    include_num_input_tokens_seen skip_memory_metrics
        tokens and memory are always logged
    dataloader_drop_last dataloader_in_order dataloader_multiprocessing_context
    dataloader_num_workers dataloader_persistent_workers dataloader_pin_memory
    dataloader_prefetch_factor length_column_name
        all prompts are in memory, and no worker loads them
    remove_unused_columns
        reward functions receive all columns
    ddp_backend ddp_broadcast_buffers ddp_bucket_cap_mb ddp_find_unused_parameters ddp_static_graph
    ds3_gather_for_generation ignore_bias_buffers
        weights are sharded with FSDP2
    average_tokens_across_devices
        the loss is always averaged over the tokens of all processes
    batch_eval_metrics eval_accumulation_steps eval_do_concat_batches eval_use_gather_object
    include_for_metrics label_names per_device_eval_batch_size prediction_loss_only
        an evaluation scores completions with the reward functions, and `--max-concurrent` limits
        how many are sampled at once
    do_train do_eval do_predict eval_on_start
        a run always trains, and with `--eval-steps` it also evaluates, starting before the first
        step
    enable_jit_checkpoint
        SIGTERM always saves a checkpoint
    restore_callback_states_from_checkpoint
        there are no callbacks
    gradient_checkpointing_kwargs activation_checkpointing_kwargs
        `--gradient-checkpointing` has no further settings
    use_liger_kernel liger_kernel_config torch_compile torch_compile_backend torch_compile_mode
        a GPU uses our fused kernels, unless `--kernels` is torch
    attn_implementation
        a GPU uses torch's FlashAttention, or the backend that `NANOGRPO_ATTENTION` names
    use_cache use_transformers_continuous_batching transformers_continuous_batching_config
    use_transformers_paged
        the local engine has a key-value cache and always batches continuously
    debug
        a gradient with NaN or infinity ends the run, except with `--dtype` float16
    disable_dropout
        the dropout settings in config.json are always ignored
    pad_to_multiple_of
        nothing is padded
    vllm_group_port vllm_max_model_length
        the trainer tells its server what it needs
    lora_task_type
        a causal language model is trained
    """
)

UNSUPPORTED = table(
    """
    bnb_4bit_quant_type load_in_8bit
        the only quantization is NF4, with `--load-in-4bit`
    fp16_full_eval bf16_full_eval
        evaluations compute in the dtype of training, `--dtype`
    label_smoothing_factor
        completions have advantages instead of labels
    neftune_noise_alpha lora_dropout
        with noise, the policy in training would differ from the policy that samples
    optim_args optim_target_modules
        AdamW is the only optimizer; its settings are `--adam-beta1`, `--adam-beta2`,
        `--adam-epsilon` and `--weight-decay`
    eval_delay
        the first evaluation is always before the first step
    ignore_data_skip
        a resumed run always continues with the next prompts
    train_sampling_strategy
        prompts are shuffled, and micro-batches are balanced by tokens
    save_on_each_node
        all machines share `--output-dir`
    trackio_space_id trackio_bucket_id trackio_static_space_id
        `--report-to trackio` logs on this machine only
    model_revision
        download the revision, and give its folder to `--model`
    model_init_kwargs trust_remote_code router_aux_loss_coef
        there is only one decoder, in nanogrpo/model/decoder.py, and it has no experts
    generation_kwargs repetition_penalty cache_implementation vllm_structured_outputs_regex
        the sampling distribution would differ from the trained policy
    dataset_streaming streaming
        a resumed run must be able to draw the same prompts again, so all prompts are read at the
        start
    use_dora lora_modules_to_save lora_target_parameters
        adapters are plain LoRA on linear layers
    """
)

# Options that are refused, with their default values in TRL.
# The default and false are accepted and ignored.
NEUTRAL = {
    "log_multimodal": True,
    "sapo_temperature_pos": 1.0,
    "sapo_temperature_neg": 1.05,
    "vespo_k_pos": 2.0,
    "vespo_k_neg": 3.0,
    "vespo_lambda_pos": 3.0,
    "vespo_lambda_neg": 2.0,
    "bnb_4bit_quant_type": "nf4",
    "entropy_coef_min": 0.0,
    "entropy_coef_max": 1.0,
    "entropy_coef_delta": 0.005,
    "entropy_target": 0.2,
    "repetition_penalty": 1.0,
    "train_sampling_strategy": "random",
    "local_rank": -1,
    "vllm_model_impl": "vllm",
}

# Names in other libraries, and arguments of TRL's trainer.
# A name may have a prefix, as in actor_rollout_ref.rollout.n.
SYNONYMS = table(
    """
    kl_coef kl_coeff kl_loss_coef init_kl_coef kl_penalty_coef
        use `--beta`
    use_kl_loss use_kl_in_reward
        a `--beta` above 0 adds the KL to the loss
    max_new_tokens response_length max_response_length max_tokens max_gen_len
        use `--max-completion-length`
    max_seq_length max_seq_len max_length max_model_len
        use `--max-prompt-length` and `--max-completion-length`
    lr actor_lr actor_learning_rate
        use `--learning-rate`
    lr_scheduler scheduler_type
        use `--lr-scheduler-type`
    epochs num_epochs n_epochs max_epochs total_epochs
        use `--num-train-epochs`
    total_episodes num_episodes total_training_steps total_steps num_steps
        use `--max-steps`; a step samples `--generation-batch-size` completions, which some
        libraries call episodes
    n rollout_n num_samples num_return_sequences num_samples_per_prompt n_samples_per_prompt
    group_size
        use `--num-generations`
    batch_size train_batch_size rollout_batch_size global_batch_size
        use `--generation-batch-size`, the number of completions per step
    num_mini_batches ppo_mini_batch_size mini_batch_size
        use `--steps-per-generation`, the number of minibatches
    micro_batch_size micro_train_batch_size ppo_micro_batch_size ppo_micro_batch_size_per_gpu
        use `--token-budget`, the number of tokens per micro-batch, or leave it out
    num_ppo_epochs ppo_epochs
        use `--num-iterations`
    cliprange clip_range clip_ratio clip_eps clip_epsilon eps_clip clip_ratio_low
        use `--epsilon`
    clip_ratio_high clip_eps_high eps_clip_high
        use `--epsilon-high`
    clip_ratio_c
        use `--delta`
    entropy_coeff ent_coef entropy_loss_coef
        use `--entropy-coef`
    gamma lam lambd gae_lambda vf_coef cliprange_value critic_lr
        GRPO has no value function and no discount, because all tokens of a completion have the same
        advantage
    grad_clip gradient_clipping max_norm
        use `--max-grad-norm`
    lora_rank lora_dim
        use `--lora-r`
    use_lora
        use `--lora-r` 16, or another rank above 0
    load_in_4_bit load_4bit use_4bit bnb_4bit_use_double_quant quantization_config
        use `--load-in-4bit`
    bnb_4bit_compute_dtype mixed_precision precision amp use_bf16 use_fp16 bfloat16 float16
        use `--dtype`; by default, a GPU computes in bfloat16 and a CPU in float32
    use_gradient_checkpointing enable_gradient_checkpointing gradient_checkpoint grad_checkpoint
        use `--gradient-checkpointing`
    use_liger_loss use_liger
        leave it out, because a GPU uses our fused kernels, unless `--kernels` is torch
    early_stopping early_stopping_patience callbacks
        pass a function as `on_step` to nanogrpo.train, or stop the run with Ctrl-C;
        `--load-best-model-at-end` keeps the best checkpoint
    reward_fn reward_func reward_function reward_functions
        use `--reward-funcs`
    reward_processing_classes
        use `--reward-funcs` model:FOLDER, with the tokenizer in FOLDER
    dataset train_data train_file train_files dataset_path train_dataset
        use `--data`, or pass train_dataset to nanogrpo.train
    eval_file val_files val_data eval_dataset
        use `--eval-data`, or pass eval_dataset to nanogrpo.train
    tokenizer tokenizer_name tokenizer_path
        leave it out, because the tokenizer is read from the folder of `--model`
    rollout_func
        use `--rollout` with a function of the arguments (samples, turns), because TRL's signature
        differs (docs/fork.md)
    device_map
        leave it out, because each process of torchrun has its own GPU
    optimizers
        use `--optim`, `--learning-rate` and `--lr-scheduler-type`
    use_wandb wandb_project
        use `--report-to` wandb, and set WANDB_PROJECT
    """
)

# Former options of nanogrpo.
REMOVED = table(
    """
    data_weights
        every prompt is drawn equally often, so repeat a file to draw it more often
    reward_env
        reward functions see the whole environment of the trainer
    dppo_penalty
        give it in --loss-kwargs
    old_logp_from
        use --vllm-importance-sampling-mode ratio for the log-probs of the engine
    eval_top_p
        an evaluation samples from all tokens, at --eval-temperature
    measure_zero_advantages
        --beta or --entropy-coef, however small, trains on all tokens
    resume_from
        remove the checkpoints after that one, then --resume
    heartbeat_timeout
        a rank that hangs is lost after --ddp-timeout
    server_window
        a server that we start is restarted once for each loss
    server_patience
        a run waits ten minutes for a lost server
    trace_step
        use torch.profiler (docs/running.md)
    save_merged
        a checkpoint always has the merged weights, next to its folder adapter
    ema_decay
        examples/recipes/ema.py has it
    lora_base_dtype
        use --dtype, in which frozen weights are stored, too
    vllm_python
        set the environment variable NANOGRPO_VLLM_PYTHON
    log_tokens_mib
        the limit is 256 MiB for a run
    """
)


def rows(table: Mapping[str, str]) -> dict[str, str]:
    """Return a table with one entry for each name. Markdown is removed from its texts."""
    return {name: text.replace("`", "") for names, text in table.items() for name in names.split()}


TABLES = (RENAMED, TRANSLATED, INSTEAD, IGNORED, UNSUPPORTED)
NAMES = {name for table in TABLES for name in rows(table)}
SERVER = ("vllm_mode", "vllm_server_host", "vllm_server_port")
OF_VLLM = ("vllm_gpu_memory_utilization", "vllm_tensor_parallel_size")


# --- mistakes and other notes ---------------------------------------------------------------------


class Notes:
    """The results of reading the options: mistakes, and the replacements of TRL's options."""

    def __init__(self) -> None:
        self.mistakes: list[str] = []
        self.rows: list[tuple[str, str]] = []

    @contextlib.contextmanager
    def mistake(self) -> Iterator[None]:
        """Collect a UserError, so that one error can list all mistakes."""
        try:
            yield
        except UserError as e:
            self.mistakes += e.args

    def check(self, where: str = "") -> None:
        """If there are mistakes, raise one UserError that lists all of them."""
        if self.mistakes:
            raise UserError(f"{where}{UserError(*self.mistakes)}")

    def finish(self, respell: Callable[[str], str] = str) -> None:
        """If there are mistakes, raise one UserError; otherwise, log the replacements."""
        self.check()
        lines = [f"\n  {respell(theirs):32}  {respell(ours)}" for theirs, ours in self.rows]
        if lines:
            logger.info("TRL's options became:%s", "".join(lines))


def unknown(name: str, known: Collection[str] = ("--help",)) -> str:
    """Return the message about a name that is not an option. `known` contains the names of all
    options, spelled as on the command line or as in files and Python.
    """
    plain = name.lstrip("-").replace("-", "_").rpartition(".")[2].removeprefix("no_")
    for table, text in MESSAGES:
        if answer := rows(table).get(plain):
            sentence = text.format(name, answer)
            return sentence if "--help" in known else in_python(sentence)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    advice = f"use {near[0]}, or see --help" if near else "see --help for the options"
    return f"{name} is not an option: {advice}."


MESSAGES = (
    (REMOVED, "{} was removed: {}."),
    (SYNONYMS, "{} is not an option: {}."),
    ({k: f"use --{dashed(v)}" for k, v in RENAMED.items()}, "{} is an option of TRL: {}."),
    (TRANSLATED, "{} is an option of TRL, which Config.from_trl translates: {}."),
    (INSTEAD, "{} is an option of TRL: {}."),
    (IGNORED, "{} is an option of TRL: leave it out, because {}."),
    (UNSUPPORTED, "{} is an option of TRL: it is not supported here, because {}."),
)


def in_python(text: str) -> str:
    """Return a message in which options are spelled as in Python: --top-p becomes top_p."""
    return re.sub(r"--(?!help)([a-z][a-z0-9-]*)", lambda option: option[1].replace("-", "_"), text)


# --- the translation ------------------------------------------------------------------------------


def refuse(name: str, value: Any) -> None:
    """Raise UserError if an option of TRL is refused with this value."""
    if name in rows(INSTEAD | UNSUPPORTED) and value not in (False, None, NEUTRAL.get(name)):
        raise UserError(unknown(f"--{dashed(name)}"))


def translate(options: Options, notes: Notes) -> Options:
    """Return the options with TRL's options replaced by ours, and note each replacement."""
    out = {name: value for name, value in options.items() if name not in NAMES}
    given = {name: value for name, value in options.items() if name in NAMES}
    ignored = rows(IGNORED)
    notes.rows += [
        (f"--{dashed(n)}", f"ignored, because {ignored[n]}") for n in given if n in ignored
    ]
    for work in (_values, _server, _batch, _ours):
        with notes.mistake():
            work(given, out, notes)
    return out


def _values(given: Options, out: Options, notes: Notes) -> None:
    """Translate the options whose meaning depends only on their own value."""
    mode, steps = "vllm_importance_sampling_mode", "ref_model_sync_steps"
    flags = {  # our option, its value for true, and its value for false; None: the option is free
        "use_vllm": ("engine", "vllm", "local"),
        "vllm_importance_sampling_correction": (mode, out.get(mode, "sequence_mask"), "off"),
        "use_peft": ("lora_r", out.get("lora_r") or 16, 0),
        "use_cpu": ("device", "cpu", None),
        "fp16": ("dtype", "float16", None),
        "cast_lm_head_to_fp32": ("head_dtype", "float32", None),
        "resume_from_checkpoint": ("resume", True, False),
        "sync_ref_model": (steps, out.get(steps, 512), 0),
    }
    meanings: dict[str, dict[str, dict]] = {
        name: {"true": {ours: yes}, "false": without_nulls({ours: no})}
        for name, (ours, yes, no) in flags.items()
    }
    meanings["vllm_mode"] = {"colocate": {}, "server": {}}
    meanings["greater_is_better"] = {"true": {}, "none": {}}
    for kind in ("eval", "save"):  # YAML reads no as false
        never = {f"{kind}_steps": 0}
        meanings[f"{kind}_strategy"] = {"no": never, "false": never, "steps": {}}
    for name in filter(meanings.get, given):
        value = str(given[name]).lower()
        if value not in meanings[name]:
            raise UserError(
                f"--{dashed(name)} {given[name]} is not supported: {rows(TRANSLATED)[name]}."
            )
        _take({name: given[name]}, out, notes, **meanings[name][value])


def _server(given: Options, out: Options, notes: Notes) -> None:
    """Translate the options that say where vLLM runs, and with how much memory."""
    theirs = {name: given[name] for name in SERVER if name in given}
    settings = {name: given[name] for name in OF_VLLM if name in given}
    if out.get("engine") != "vllm":
        if theirs | settings:
            notes.rows.append((spelled(theirs | settings), "ignored, because vLLM is not used"))
        return
    if theirs and "server" not in out and given.get("vllm_mode") != "colocate":
        host, port = given.get("vllm_server_host", "127.0.0.1"), given.get("vllm_server_port", 8000)
        _take(theirs, out, notes, server=[f"http://{host}:{port}"])
    if settings and "server" in out:
        notes.rows.append((spelled(settings), "ignored, because --server has its own settings"))
    elif settings:
        words = [f"--{dashed(name)[5:]}={value}" for name, value in settings.items()]
        options = " ".join([out.pop("vllm_options", ""), *words]).strip()
        _take(settings, out, notes, vllm_options=options)


def _batch(given: Options, out: Options, notes: Notes) -> None:
    """Translate the batch per device. As in TRL, a generation contains per_device x processes x
    steps_per_generation completions, where TRL's steps_per_generation counts micro-batches. An
    optimizer step has gradient_accumulation_steps micro-batches.
    """
    sizes = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}  # TRL's defaults
    theirs = {name: given[name] for name in sizes if name in given}
    if not theirs:
        return
    for name, value in theirs.items():
        if type(value) is not int or value < 1:
            raise UserError(f"--{dashed(name)} is {value!r} but must be a whole number above 0.")
    each, accumulated = (sizes | theirs).values()
    at_once = each * int(os.environ.get("WORLD_SIZE", 1))
    total, micro = out.pop("generation_batch_size", None), out.pop("steps_per_generation", None)
    if total and micro:
        raise UserError(
            "--generation-batch-size and --steps-per-generation determine the batch: leave out"
            " --per-device-train-batch-size and --gradient-accumulation-steps."
        )
    if total and total % at_once:
        raise UserError(
            f"--generation-batch-size {total} is not a multiple of --per-device-train-batch-size"
            f" times the number of processes, {at_once}: choose a multiple, or use only"
            " --generation-batch-size."
        )
    micro = micro or (total // at_once if total else accumulated)
    if micro % accumulated:
        raise UserError(
            f"--gradient-accumulation-steps {accumulated} does not divide the {micro} micro-batches"
            " of a generation (TRL's steps_per_generation): choose a divisor, because an optimizer"
            " step cannot span two generations."
        )
    ours = {"generation_batch_size": at_once * micro, "steps_per_generation": micro // accumulated}
    _take(theirs, out, notes, **ours)


def _ours(given: Options, out: Options, notes: Notes) -> None:
    """Translate values that only TRL allows. The options have the same names in TRL and here."""
    settings = out.get("chat_template_kwargs")
    if isinstance(settings, dict) and "enable_thinking" in settings:
        rest = {**settings}
        thinking = rest.pop("enable_thinking")
        _take({"chat_template_kwargs": settings}, out, notes, enable_thinking=thinking)
        out["chat_template_kwargs"] = rest or None
    if out.get("max_steps") == -1 and out.get("num_train_epochs"):
        del out["max_steps"]  # in TRL, -1 means that max_steps is not set
    if out.get("lora_target_modules") == ["all-linear"]:
        del out["lora_target_modules"]  # all of them


def _take(theirs: Options, out: Options, notes: Notes, **ours: Any) -> None:
    """Add `ours` to `out`, and note that these options replace `theirs`."""
    for name, value in ours.items():
        if out.get(name, value) != value:
            raise UserError(
                f"{spelled(theirs)} means {spelled({name: value})}, but"
                f" {spelled({name: out[name]})} is given too: leave one of them out."
            )
    out.update(ours)
    if ours:
        notes.rows.append((spelled(theirs), spelled(ours)))


def spelled(options: Options) -> str:
    """Return options as the command line spells them."""
    words = []
    for name, value in options.items():
        words.append(f"--{dashed(name)}")
        if value is not True:
            words += value if isinstance(value, list) else [value]
    return " ".join(map(str, words))
