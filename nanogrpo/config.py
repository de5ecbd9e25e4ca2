"""Every option of the core, with its default, its help text and its rules.

    Config(model="runs/base", data=("arithmetic",)).validate()

In: values, usually from the command line (cli.py). Out: a `Config`, which is frozen. Creating a
`Config` with a value of the wrong type raises a UserError. `validate` raises a UserError if a value
of the right type is invalid. The message of a UserError names the option and says what to do.
Options have the same names as in TRL's GRPOConfig wherever the meaning is the same (docs/trl.md).
To add an option, add a field to `Config`. The command line, the help, the JSON file and the checks
are all derived from the fields. Extras add their own options in a subclass. Read next: train.py.
"""

from __future__ import annotations

import functools
import numbers
import operator
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any

from nanogrpo.errors import UserError

COMPARE = {">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le}
# For each type of field: the accepted Python classes, and the name of the type in messages.
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
    option mandatory; its text is the advice in the error message. An option with `needs` has an
    effect only if the option named there is set ("eval_steps"), or has one of the listed values
    ("loss_type=dapo|grpo"). `group` starts a new section of `--help`. `words` maps other spellings,
    such as TRL's true and false, to the allowed values.
    """
    return field(default=default, metadata={"help": help, "limits": limits, **rules})


# An option that may differ when a run is resumed.
# Such an option does not change the run's result, except for rounding.
free_option = functools.partial(option, free=True)


def converted(kind: str, value: Any) -> Any:
    """Convert a value to the field type `kind`, or raise TypeError.

    A list becomes a tuple, 1 becomes 1.0 in a field of type float, and a numpy number becomes a
    Python number.
    """
    kind, _, optional = kind.partition(" | ")
    if optional and value is None:
        return None
    if not isinstance(value, TYPES[kind][0]) or (isinstance(value, bool) and kind != "bool"):
        raise TypeError
    if kind.startswith("tuple"):
        return tuple(converted("str" if "str" in kind else "float", item) for item in value)
    return int(value) if kind == "int" else float(value) if kind == "float" else value


@dataclass(frozen=True)
class Config:
    model: str = option(
        "",
        "folder or hub id of a Qwen3, Qwen2, Llama or Mistral checkpoint",
        group="Model, data and output",
        required="give the folder or hub id of a checkpoint, or try --profile debug",
    )
    data: tuple[str, ...] = option(
        (),
        "training prompts: JSON-lines files, or the built-in task arithmetic; docs/data.md lists"
        " further sources",
        required="give a .jsonl file of prompts, another data set (docs/data.md), or the built-in"
        " task arithmetic",
    )
    eval_data: tuple[str, ...] = free_option(
        (),
        "held-out prompts for evaluation; empty: use the test split of the training data, if any",
    )
    prompt_column: str = option(
        "", "column with the prompt; empty: the first of prompt, question and problem"
    )
    answer_column: str = option(
        "",
        "column with the reference answer, which becomes the column solution; if it contains ####,"
        " only the text after the #### is kept",
    )
    system_prompt: str = option(
        "",
        "system message before each prompt, as text or as the name of a file; without a chat"
        " template, it is plain text before the prompt",
    )
    output_dir: str = free_option(
        "runs/grpo",
        "folder for metrics.jsonl and checkpoints",
        required="name the folder to write the run to",
    )
    enable_thinking: bool = option(True, "turn on thinking in Qwen3's chat template")
    chat_template_kwargs: dict[str, Any] | None = option(  # noqa: RUF009 (declares a field)
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
        "accuracy, reasoning_accuracy, format, think_format, another built-in function"
        " (docs/rewards.md), or module:name or file.py:name; arguments follow a name as"
        " name:key=value,key=value",
        group="Rewards",
        required="name at least one reward function",
    )
    reward_weights: tuple[float, ...] = option(
        (), "weight of each reward function; empty: 1 for all"
    )
    reward_timeout: float = free_option(
        60.0,
        "seconds allowed for one call of a reward function from a module or file; 0: no limit, and"
        " the call runs in the trainer's own process",
        ">= 0",
        "<= 1e7",
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
    max_concurrent: int | None = free_option(
        None,
        "sequences that are decoded at once; default: 64, or on a GPU as many as a step samples, at"
        " most 512",
        "> 0",
        "<= 65536",
    )
    cache_tokens: int | None = free_option(
        None,
        "tokens in the key/value cache on a GPU, at least one full sequence; default: as many as"
        " fit, but no more than all concurrent sequences can need",
        "> 0",
    )
    loss_type: str = option(
        "dapo",
        "the loss; docs/equations.md has the formulas",
        group="Loss",
        choices=("grpo", "bnpo", "dr_grpo", "dapo"),
    )
    epsilon: float = option(0.2, "clip the ratio below at 1 - epsilon", ">= 0", "< 1")
    epsilon_high: float | None = option(
        None, "clip the ratio above at 1 + epsilon_high; default: epsilon", ">= 0"
    )
    delta: float | None = option(
        None,
        "upper bound on the ratio where the clip does not bound it (A < 0); default: none",
        "> 1",
    )
    beta: float = option(
        0.0,
        "coefficient of the KL penalty to the reference model; 0: keep no reference model",
        ">= 0",
    )
    mask_truncated_completions: bool = option(
        False, "leave completions that reached the length limit out of the loss"
    )
    scale_rewards: str = option(
        "group",
        "grpo: divide advantages by the standard deviation of the group or batch, or do not divide",
        choices=("group", "batch", "none"),
        words={"true": "group", "false": "none"},
    )
    max_steps: int = free_option(
        100,
        "steps of the run; each one samples, scores and trains once",
        "> 0",
        group="Optimizer",
    )
    num_train_epochs: float = option(
        0.0, "passes over the prompts, in place of max_steps; 0: train for max_steps", ">= 0"
    )
    num_iterations: int = option(1, "training passes over each generation", "> 0")
    steps_per_generation: int = option(
        1, "minibatches (optimizer steps) that a generation is split into", "> 0"
    )
    share_prompts: bool = free_option(
        True, "pack a prompt once for all its completions; same gradient, fewer tokens"
    )
    token_budget: int | None = free_option(
        None,
        "tokens per micro-batch; gradients accumulate over as many as a minibatch needs; default:"
        " 16384, or on a GPU as many as fit into its memory, at most 65536",
        "> 0",
    )
    learning_rate: float = option(1e-6, "peak learning rate, after the warmup", "> 0")
    lr_scheduler_type: str = option(
        "constant",
        "learning rate after the warmup, as in transformers",
        choices=("constant", "constant_with_warmup", "linear", "cosine"),
    )
    warmup_steps: float = option(
        0.0, "optimizer steps of warmup; a number below 1 is their share of all steps", ">= 0"
    )
    weight_decay: float = option(
        0.0, "AdamW: decoupled weight decay, applied to matrices only", ">= 0"
    )
    max_grad_norm: float = option(1.0, "clip gradients to this global norm; 0: do not clip", ">= 0")
    eval_steps: int = free_option(
        0,
        "steps between evaluations on the held-out prompts; 0: never; evaluations also run before"
        " the first step and after the last",
        ">= 0",
        group="Evaluation, checkpoints and logging",
    )
    num_generations_eval: int = free_option(
        1,
        "completions per held-out prompt, for mean@k and pass@k",
        "> 0",
    )
    eval_temperature: float = free_option(
        0.0,
        "sampling temperature in an evaluation; 0: always the most likely token (greedy)",
        ">= 0",
    )
    eval_samples: int = free_option(256, "evaluate the first N held-out prompts; 0: all", ">= 0")
    save_steps: int = free_option(
        50,
        "steps between checkpoints; 0: only the last; checkpoints are written in the background",
        ">= 0",
    )
    save_total_limit: int = free_option(
        2, "keep this many of the newest checkpoints; 0: all", ">= 0"
    )
    overwrite_output_dir: bool = free_option(
        False,
        "delete log, completions and checkpoints of an earlier run, unless --resume continues it",
    )
    gradient_checkpointing: str = free_option(
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
    ddp_timeout: int = free_option(
        600,
        "seconds that ranks wait for each other, at the start and in each collective",
        "> 0",
        "<= 1e7",
    )
    seed: int = option(
        0,
        "seed for all randomness; on a CPU the same seed gives the same run, bit for bit",
        ">= 0",
        "< 9223372036854775808",
    )
    device: str = free_option("auto", "device to train on", choices=("auto", "cpu", "cuda"))
    resume: bool = free_option(False, "continue from the last checkpoint in output_dir")

    def __post_init__(self) -> None:
        """Convert each value, or raise a UserError that names the type of the option."""
        for f in fields(self):
            value, kind = getattr(self, f.name), str(f.type)
            try:
                object.__setattr__(self, f.name, converted(kind, value))
            except (TypeError, OverflowError):  # OverflowError: beyond the largest float
                wanted = TYPES[kind.partition(" | ")[0]][1]
                raise UserError(
                    f"--{dashed(f.name)} is {value!r:.100} but must be {wanted}."
                ) from None

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
        """The value of max_concurrent, or 64 if max_concurrent is not set. On a GPU, a feature sets
        max_concurrent to a value that suits the free memory.
        """
        return self.max_concurrent or 64

    @property
    def strip_tokens(self) -> int:
        """The value of token_budget, or 16,384 if token_budget is not set. On a GPU, a feature sets
        token_budget to a value that suits the free memory.
        """
        return self.token_budget or 16384

    @property
    def checkpointing(self) -> str:
        """The value of gradient_checkpointing, or "none" if the value is "auto". On a GPU, a
        feature first replaces "auto" with a value that suits the free memory.
        """
        return "none" if self.gradient_checkpointing == "auto" else self.gradient_checkpointing

    @property
    def upper_epsilon(self) -> float:
        """The value of epsilon_high, or of epsilon if epsilon_high is not set."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high

    @property
    def chat_variables(self) -> dict[str, Any]:
        """The variables of the chat template, for all prompts."""
        return {"enable_thinking": self.enable_thinking, **(self.chat_template_kwargs or {})}

    def problems(self) -> Iterator[str]:
        """Yield a message for each broken rule that involves several options. A subclass checks the
        rules of its own options.
        """
        if len(self.reward_weights) not in (0, len(self.reward_funcs)):
            yield (
                f"--reward-weights has {len(self.reward_weights)} values but --reward-funcs has"
                f" {len(self.reward_funcs)}: give one value for each."
            )
        if self.generation_batch_size % self.num_generations:
            yield (
                f"--generation-batch-size {self.generation_batch_size} is not a multiple of"
                f" --num-generations {self.num_generations}: choose a multiple, because a step"
                " samples complete groups."
            )
        if self.prompts_per_step % self.steps_per_generation:
            yield (
                f"--steps-per-generation {self.steps_per_generation} does not divide the"
                f" {self.prompts_per_step} prompts of a step (generation_batch_size /"
                " num_generations): choose a divisor, because a minibatch holds complete groups."
            )
        if self.num_train_epochs and self.max_steps != Config.max_steps:
            yield (
                f"--num-train-epochs {self.num_train_epochs:g} and --max-steps {self.max_steps}"
                " both say how long to train: leave one of them out."
            )

    def validate(self) -> None:
        """Raise a UserError for all invalid values."""
        own = [vars(k)["problems"] for k in type(self).__mro__[::-1] if "problems" in vars(k)]
        # `values` runs first, so the other checks can rely on each value's range
        for checks in ((values,), (*own, ignored)):
            if problems := [problem for check in checks for problem in check(self)]:
                raise UserError(*problems)


def dashed(name: str) -> str:
    """Return a field's name as it is written on the command line, without the leading dashes."""
    return name.replace("_", "-")


def values(c: Config) -> Iterator[str]:
    """Check each value against the rules of its field."""
    for f in fields(c):
        name, value, rules = f"--{dashed(f.name)}", getattr(c, f.name), f.metadata
        items = value if isinstance(value, tuple) else (value,)
        if "required" in rules and not (items and all(items)):
            yield f"{name} is missing: {rules['required']}."
        for item in items:
            if isinstance(item, float) and not abs(item) < 1e38:  # the largest float32 is 3e38
                yield f"{name} is {item}: give a number below 1e38."
                continue
            if item not in rules.get("choices", (item,)):
                yield f"{name} is {item!r}: choose one of {', '.join(rules['choices'])}."
            for limit in rules["limits"]:
                sign, bound = limit.split()
                if item is not None and not COMPARE[sign](item, float(bound)):
                    yield f"{name} is {item}: it must be {limit}."


def ignored(c: Config) -> Iterator[str]:
    """Yield a message for each option that has no effect because of another option's value."""
    for f in fields(c):
        value = getattr(c, f.name)
        if "needs" not in f.metadata or value == f.default:
            continue
        other, _, wanted = f.metadata["needs"].partition("=")
        value = " ".join(map(str, value)) if isinstance(value, tuple) else value
        current, problem = getattr(c, other), f"--{dashed(f.name)} is {value}, which has no effect"
        if not wanted and current == getattr(type(c), other):
            yield f"{problem} without --{dashed(other)}: set that too."
        if wanted and current not in wanted.split("|"):
            choice = wanted.replace("|", " or ")
            yield f"{problem} with --{dashed(other)} {current}: choose {choice}, or leave it out."
