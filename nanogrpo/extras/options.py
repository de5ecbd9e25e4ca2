"""All options of the core and of the extras, combined in one `Config`.

    from nanogrpo import Config   # this one
    Config(model="runs/base", data=("arithmetic",), lora_r=16).validate()

Each class below contains the options of one or two extras, and their rules. Read next: config.py
(what an option is), attach.py (which extras the options attach).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from nanogrpo.cli import Options
from nanogrpo.config import Config as Core
from nanogrpo.config import dashed, free_option, option
from nanogrpo.errors import UserError, without_nulls
from nanogrpo.extras import trl_names
from nanogrpo.extras.dashboards import DashboardOptions
from nanogrpo.extras.lora.options import LoRAOptions
from nanogrpo.vllm.options import VLLMOptions

CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")  # losses with the clipped term
WEIGHTED = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


@dataclass(frozen=True)
class ImportanceOptions(Core):
    """Sampling ahead of training, log-probs of the engine, and importance weights for the gap
    between engine and trainer.
    """

    max_staleness: int = option(
        0,
        "steps that sampling may run ahead of training; 0: train only on samples of the current"
        " weights",
        ">= 0",
        needs="engine=vllm",
    )

    vllm_importance_sampling_mode: str = option(
        "off",
        "how to correct the gap between trainer and engine: with importance weights per token or"
        " sequence, or with the engine's log-probs as the old log-probs of the ratio (ratio); off:"
        " ratio with max_staleness, otherwise no correction",
        choices=("off", "ratio", *WEIGHTED),
        words={"false": "off"},
    )
    vllm_importance_sampling_clip_max: float = option(
        3.0,
        "largest importance weight (trainer over engine)",
        "> 0",
        needs=f"vllm_importance_sampling_mode={'|'.join(WEIGHTED)}",
    )
    vllm_importance_sampling_clip_min: float | None = option(
        None,
        "smallest importance weight; default: 0",
        ">= 0",
        needs=f"vllm_importance_sampling_mode={'|'.join(WEIGHTED)}",
    )

    def problems(self) -> Iterator[str]:
        mode = self.vllm_importance_sampling_mode
        if self.loss_type == "vespo" and mode.startswith("sequence"):
            yield (
                f"--vllm-importance-sampling-mode {mode} cannot be used with --loss-type vespo,"
                " which multiplies the weights of the tokens: use token_truncate, token_mask or"
                " off."
            )
        high = self.vllm_importance_sampling_clip_max
        low = self.vllm_importance_sampling_clip_min or 0.0
        if not low <= 1 <= high:
            yield (
                f"--vllm-importance-sampling-clip-min {low} and --vllm-importance-sampling-clip-max"
                f" {high} do not enclose 1, the weight if trainer and engine agree: choose one"
                " bound on each side of it."
            )

    @property
    def old_from_engine(self) -> bool:
        """Whether the ratio's denominator comes from the engine, whose weights may be older than
        the trainer's.
        """
        mode = self.vllm_importance_sampling_mode
        return mode == "ratio" or (mode == "off" and self.max_staleness > 0)


@dataclass(frozen=True)
class PrecisionOptions(Core):
    """How closely engine and trainer agree."""

    bitwise: bool = option(
        False,
        "compute the same bits in the engine and the trainer, for any batch (docs/precision.md);"
        " slower",
    )
    dtype: str = option(
        "auto",
        "dtype of the computation in engine and trainer; auto: bfloat16 on a GPU, else float32;"
        " trained weights are float32, and float16 has a loss scale (docs/precision.md)",
        choices=("auto", "bfloat16", "float16"),
        words={"float32": "auto"},  # in TRL, this is the dtype of the weights
    )
    head_dtype: str = option(
        "model",
        "dtype of the logits if weights have 16 bits: the same as the weights (model), or float32,"
        " which brings the log-probs of engine and trainer closer together",
        choices=("model", "float32"),
    )

    def problems(self) -> Iterator[str]:
        others: Any = self  # this class has the options of all extras
        for name, used in (("engine vllm", others.engine == "vllm"), ("lora-r", others.lora_r)):
            if self.bitwise and used:
                yield f"--bitwise cannot be used with --{name}: leave one of them out."


# The constants of the losses that --loss-kwargs may change, and their defaults.
LOSS_CONSTANTS = {
    "sapo": {"sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05},
    "vespo": {
        "vespo_k_pos": 2.0,
        "vespo_lambda_pos": 3.0,
        "vespo_k_neg": 3.0,
        "vespo_lambda_neg": 2.0,
    },
    "dppo_tv": {"dppo_penalty": 0.0},
    "dppo_kl": {"dppo_penalty": 0.0},
}


@dataclass(frozen=True)
class ObjectivesOptions(Core):
    """Other losses."""

    importance_sampling_level: str = option(
        "token", "one ratio per token, or one per sequence (GSPO)", choices=("token", "sequence")
    )
    loss_kwargs: dict[str, Any] | None = option(  # noqa: RUF009 (a field, like others)
        None,
        'JSON object with constants of the loss, such as {"sapo_temperature_pos": 1.0}: the'
        " temperature for A > 0 and for A <= 0 (sapo_temperature_pos, _neg), the power and the"
        " decay of the sequence's ratio (vespo_k_pos, _neg, vespo_lambda_pos, _neg), or the"
        " coefficient of the squared log-ratio added to each token's loss (dppo_penalty)",
        needs="loss_type=sapo|vespo|dppo_tv|dppo_kl",
    )
    use_bias_correction_kl: bool = option(
        True,
        "multiply the k3 estimate of the KL by the ratio, which makes its gradient exact",
        needs="beta",
    )
    off_policy_mask_threshold: float | None = option(
        None,
        "leave a completion with A < 0 out of the loss if its mean log(engine/policy) exceeds this",
        ">= 0",
    )

    @property
    def loss_constants(self) -> dict[str, float]:
        """The constants of the loss: the defaults of its type, overridden by loss_kwargs."""
        return LOSS_CONSTANTS.get(self.loss_type, {}) | (self.loss_kwargs or {})

    @property
    def needs_two_phases(self) -> bool:
        """Whether the loss of a token differs from the loss in the core, or depends on other
        tokens."""
        return (
            self.loss_type not in CLIPPED
            or self.importance_sampling_level == "sequence"
            or self.off_policy_mask_threshold is not None
            or (self.beta > 0 and not self.use_bias_correction_kl)
        )

    def problems(self) -> Iterator[str]:
        known = LOSS_CONSTANTS.get(self.loss_type, {})
        for name, value in (self.loss_kwargs or {}).items() if known else ():
            if name not in known:
                yield (
                    f"--loss-kwargs: --loss-type {self.loss_type} has no constant {name}: give one"
                    f" of {', '.join(known)}."
                )
            elif type(value) not in (int, float) or not 0 < value < math.inf:
                yield f"--loss-kwargs: {name} is {value!r}: give a number above 0."
        if self.delta is not None and self.loss_type not in CLIPPED:
            yield (
                f"--delta {self.delta} cannot be used with --loss-type {self.loss_type}, which"
                " bounds the ratio in its own way: leave it out."
            )
        level = self.importance_sampling_level
        if level == "sequence" and self.loss_type.startswith(("dppo", "vespo")):
            yield (
                f"--importance-sampling-level {level} cannot be used with --loss-type"
                f" {self.loss_type}, which defines its own ratios: use token."
            )


@dataclass(frozen=True)
class EntropyOptions(Core):
    """Entropy bonus, and training on uncertain tokens."""

    top_entropy_quantile: float = option(
        1.0,
        "train only on this share of the tokens, those with the highest entropy; 1: on all",
        ">= 0",
        "<= 1",
    )
    entropy_coef: float = option(
        0.0, "coefficient of the entropy bonus, a mean over the trained tokens; 0: none", ">= 0"
    )

    def problems(self) -> Iterator[str]:
        if self.top_entropy_quantile < 1 and self.loss_type == "vespo":
            yield (
                "--top-entropy-quantile cannot be used with --loss-type vespo, whose weights belong"
                " to whole sequences: use another loss."
            )


@dataclass(frozen=True)
class EstimatorsOptions(Core):
    """Other advantages."""

    advantage_estimator: str = option(
        "grpo",
        "baseline of a reward: the group's mean (grpo, maxrl), or the mean of the others (rloo);"
        " maxrl also divides the difference by the group's mean",
        group="Advantages",
        choices=("grpo", "rloo", "maxrl"),
    )
    multi_objective_aggregation: str = option(
        "sum_then_normalize",
        "several rewards: add them first, or normalize each one first (GDPO)",
        choices=("sum_then_normalize", "normalize_then_sum"),
    )

    def problems(self) -> Iterator[str]:
        scales = {  # for each estimator and aggregation, the values of --scale-rewards
            "grpo, sum_then_normalize": "group batch none",
            "grpo, normalize_then_sum": "group",
            "rloo, sum_then_normalize": "group none",
            "maxrl, sum_then_normalize": "group",
        }
        estimator, aggregation = self.advantage_estimator, self.multi_objective_aggregation
        if self.scale_rewards not in scales.get(f"{estimator}, {aggregation}", "").split():
            yield (
                f"--advantage-estimator {estimator}, --multi-objective-aggregation {aggregation}"
                f" and --scale-rewards {self.scale_rewards} cannot be combined, because rloo,"
                " maxrl and normalize_then_sum define their own scale: leave out all but one."
            )


@dataclass(frozen=True)
class ResampleOptions(Core):
    """Min-p, and dynamic sampling."""

    min_p: float = option(
        0.0,
        "sample only tokens whose probability is at least this share of the highest; 0: all tokens",
        ">= 0",
        "<= 1",
    )
    max_resample_times: int = option(
        0,
        "how often to replace groups in which every advantage is 0 (DAPO's dynamic sampling);"
        " 0: never",
        ">= 0",
    )


@dataclass(frozen=True)
class ReferenceOptions(Core):
    """A different reference model, or one that follows the policy."""

    ref_model: str = option(
        "",
        "folder or hub id of the reference model of the KL, such as a teacher; empty: the model"
        " before training",
        needs="beta",
    )
    ref_model_sync_steps: int = option(
        0,
        "steps between updates of the reference model, ref = alpha*policy + (1 - alpha)*ref, such"
        " as 512; 0: never",
        ">= 0",
        needs="beta",
    )
    ref_model_mixup_alpha: float = option(
        0.6,
        "alpha, the policy's share; 1: the reference becomes a copy of the policy",
        "> 0",
        "<= 1",
        needs="ref_model_sync_steps",
    )

    def problems(self) -> Iterator[str]:
        for other in ("ref_model", "lora_r"):
            if self.ref_model_sync_steps and getattr(self, other):
                yield (
                    f"--ref-model-sync-steps cannot be used with --{dashed(other)}, because the"
                    " reference is then not a copy of the policy: leave one of them out."
                )


# Schedules that the core lacks, each with its settings.
# A run must set exactly one of the settings of its schedule.
SCHEDULES = {
    "cosine_with_min_lr": ("min_lr", "min_lr_rate"),
    "warmup_stable_decay": ("num_decay_steps",),
}


@dataclass(frozen=True)
class OptimOptions(Core):
    """Other optimizers and schedules."""

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
    lr_scheduler_kwargs: dict[str, Any] | None = option(  # noqa: RUF009 (a field, like others)
        None, 'JSON object with settings of the schedule, such as {"min_lr_rate": 0.1}'
    )

    def problems(self) -> Iterator[str]:
        kind, given = self.lr_scheduler_type, self.lr_scheduler_kwargs or {}
        known = SCHEDULES.get(kind, ())
        for name, value in given.items():
            if name not in known:
                yield (
                    f"--lr-scheduler-kwargs: --lr-scheduler-type {kind} has no setting {name}:"
                    f" give {' or '.join(known) or 'none'}."
                )
            elif type(value) not in (int, float) or not 0 <= value < math.inf:
                yield f"--lr-scheduler-kwargs: {name} is {value!r}: give a number, 0 or more."
            elif name == "min_lr" and value >= self.learning_rate:
                yield (
                    f"--lr-scheduler-kwargs: min_lr {value} is not below --learning-rate"
                    f" {self.learning_rate}: lower it."
                )
        if known and len(given) != 1:
            yield (
                f"--lr-scheduler-type {kind} needs {' or '.join(known)}: give exactly one in"
                " --lr-scheduler-kwargs."
            )

    @property
    def other_optimizer(self) -> bool:
        """Whether any option of the optimizer or the schedule differs from its default."""
        own = OptimOptions.__annotations__  # the names of the options above
        return any(getattr(self, name) != getattr(OptimOptions, name) for name in own)


@dataclass(frozen=True)
class ShardingOptions(Core):
    """Sharding and determinism."""

    cpu_offload: bool = free_option(
        False,
        "keep weights, gradients and optimizer state in host memory; copy each block to the GPU"
        " when it runs",
    )
    reshard_after_forward: str = free_option(
        "auto",
        "free the gathered weights of a block after its forward pass (ZeRO-3), or keep them until"
        " the optimizer step (ZeRO-2); auto: keep them on one GPU if its free memory allows it",
        choices=("auto", "always", "never"),
        words={"true": "always", "false": "never"},
    )
    reduce_gradients: str = free_option(
        "auto",
        "reduce gradients over the GPUs once per optimizer step, or after each micro-batch, which"
        " needs almost 4 bytes less per weight but communicates more; auto: by free memory",
        choices=("auto", "step", "micro_batch"),
    )
    full_determinism: bool = option(
        False,
        "use only deterministic operations on a GPU; the backward pass of attention gets slower",
    )


@dataclass(frozen=True)
class ToolsOptions(Core):
    """Tools, environments and rollout functions."""

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
    tool_timeout: float = free_option(
        30.0,
        "seconds allowed for one tool call, after which the model reads an error; 0: no limit",
        ">= 0",
        "<= 1e7",
    )
    rollout: str = option(
        "",
        "function that decides when the model generates, and what it reads in between:"
        " module:function or file.py:function",
    )

    def problems(self) -> Iterator[str]:
        users = [n for n in ("rollout", "tools", "environment_factory") if getattr(self, n)]
        if users and getattr(self, "max_staleness", False):
            yield (
                f"--{dashed(users[0])} cannot be used with --max-staleness, because its turns are"
                " sampled with the current weights: use --max-staleness 0."
            )
        if self.rollout and len(users) > 1:
            yield (
                f"--rollout cannot be used with --{dashed(users[1])}, because tool calls are a"
                " rollout of their own: leave one of them out."
            )


@dataclass(frozen=True)
class VisionOptions(Core):
    """Vision-language models."""

    freeze_vision_tower: bool = option(
        False, "do not train the vision encoder of a vision-language model, only its decoder"
    )


@dataclass(frozen=True)
class DataOptions(Core):
    """Data sets from the Hugging Face Hub, and other kinds of files."""

    dataset_config: str = option("", "configuration of a data set of the hub, such as main")
    dataset_train_split: str = option(
        "train", "split to train on, of a data set of the hub or a saved DatasetDict"
    )
    dataset_test_split: str = free_option("test", "split of such a data set to evaluate on")


@dataclass(frozen=True)
class BestOptions(Core):
    """The best checkpoint."""

    load_best_model_at_end: bool = free_option(
        False,
        "also keep the checkpoint with the best evaluation, and print its name at the end",
        needs="eval_steps",
    )
    metric_for_best_model: str = free_option(
        "reward", "name of the evaluation metric that should be highest, such as accuracy_reward"
    )

    def problems(self) -> Iterator[str]:
        save, each = self.save_steps, self.eval_steps
        if self.load_best_model_at_end and each and (not save or save % each):
            yield (
                "--load-best-model-at-end compares checkpoints that were evaluated, but"
                f" --save-steps {self.save_steps} is not a multiple of --eval-steps"
                f" {self.eval_steps}: choose a multiple."
            )


@dataclass(frozen=True)
class CompletionsOptions(Core):
    """The completions of each step, and their tokens."""

    log_completions: bool = free_option(
        False, "write every completion and its rewards to output_dir/completions, one file per step"
    )
    num_completions_to_print: int = free_option(
        0,
        "print this many completions after each step, of different prompts if possible; 0: none",
        ">= 0",
    )

    log_tokens: bool = free_option(
        False,
        "also write each token of the completions, with its probability, entropy, ratio, gap"
        " between trainer and engine, and share of the gradient, for nanogrpo view",
        needs="log_completions",
    )


@dataclass(frozen=True)
class Config(  # the last base class comes first in `--help-all`
    CompletionsOptions,
    DashboardOptions,
    BestOptions,
    DataOptions,
    VisionOptions,
    LoRAOptions,
    ShardingOptions,
    OptimOptions,
    ToolsOptions,
    ResampleOptions,
    EstimatorsOptions,
    EntropyOptions,
    ReferenceOptions,
    ObjectivesOptions,
    ImportanceOptions,
    PrecisionOptions,
    VLLMOptions,
    Core,
):
    """All options."""

    # these two fields replace those of the core
    loss_type: str = option(
        "dapo",
        "the loss; docs/equations.md has the formulas",
        choices=(*CLIPPED, "cispo", "sapo", "vespo", "dppo_tv", "dppo_kl"),
    )
    lr_scheduler_type: str = option(
        "constant",
        "learning rate after the warmup; the schedules are those of transformers",
        choices=("constant", "constant_with_warmup", "linear", "cosine", *SCHEDULES),
    )

    def __new__(cls, *_: Any, **given: Any) -> Config:
        """Raise a UserError, instead of Python's TypeError, for a name that is not an option."""
        known = cls.__dataclass_fields__
        for name in given.keys() - known.keys():
            raise UserError(trl_names.unknown(name, known))
        return super().__new__(cls)

    @classmethod
    def from_trl(cls, args: Any = None, **given: Any) -> Config:
        """Return the options that replace TRL's options, and log each replacement.

        `args` is a dict or a GRPOConfig. Only the values of a GRPOConfig that differ from its
        defaults are used. `given` are options under TRL's names or ours, and the arguments model,
        processing_class and peft_config of TRL's GRPOTrainer (trl_objects.py). If there are
        mistakes, raises one UserError that lists all of them.

        >>> Config.from_trl(GRPOConfig(output_dir="a", beta=0.1), model="Qwen/Qwen3-0.6B", lora_r=8)
        """
        from nanogrpo.extras import trl_objects  # which imports torch

        notes = trl_names.Notes()
        options = layer(trl_objects.options_of(args, **given), notes, cls)
        options = trl_names.translate(options, notes)
        notes.finish(trl_names.in_python)
        return cls(**without_nulls(options))


FIELDS = {f.name: f for f in fields(Config)}
CHOICES = {n: f.metadata["choices"] for n, f in FIELDS.items() if "choices" in f.metadata}


def complete(cfg: Any) -> Config:
    """Return the options of a run, with the defaults of the extras if these options are missing."""
    return cfg if isinstance(cfg, Config) else Config(**vars(cfg))


def layer(given: Options, notes: trl_names.Notes, kind: type[Config]) -> Options:
    """Return options under nanogrpo's names. The options come from a command line, a file or
    Python. TRL's other options keep their names, so that `trl_names.translate` can translate them.
    `notes` collects mistakes in the names and in the types of values.
    """
    out: Options = {}
    if isinstance(inner := given.get("model_init_kwargs"), Mapping):
        given = {**given, **inner, "model_init_kwargs": None}
    for theirs, value in given.items():
        if value is None and theirs in trl_names.NAMES | trl_names.REMOVED.keys():
            continue  # a file for TRL may list every option
        with notes.mistake():
            name = trl_names.RENAMED.get(theirs, theirs)
            type_, rules = rules_of(name, kind)
            ours: Any = rules.get("words", {}).get(str(value).lower(), value)
            # our option may take several strings where TRL's option takes one
            several = type_.startswith("tuple") and (name != theirs or "choices" in rules)
            ours = [ours] if several and isinstance(ours, str) else ours
            row = trl_names.spelled({theirs: value}), trl_names.spelled({name: ours})
            notes.rows += [row] * (row[0] != row[1])
            if name in out and out[name] != ours:
                raise UserError(
                    f"--{dashed(theirs)} and --{dashed(name)} are the same option: remove one."
                )
            if name in trl_names.NAMES:
                trl_names.refuse(name, ours)
            elif ours is not None:  # None stands for the default
                kind(**{name: ours})
            out[name] = ours
    return out


def rules_of(name: str, kind: type[Config]) -> tuple[str, Mapping[str, Any]]:
    """Return the type of an option and its rules. Both are empty if there is no such option."""
    field = kind.__dataclass_fields__.get(name)
    return (str(field.type), field.metadata) if field else ("", {})
