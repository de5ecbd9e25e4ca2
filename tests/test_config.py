"""Tests of every option: it has a help text, the command line sets it, and its rules hold.

Read next: test_bad_input.py, where mistakes go through the program.
"""

import dataclasses
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest

from nanogrpo.cli import parse
from nanogrpo.config import CHOICES, Config, dashed
from nanogrpo.errors import UserError
from nanogrpo.run.optim import learning_rate

FIELDS = {f.name: f for f in dataclasses.fields(Config)}
LIMITS = {name: f.metadata["limits"] for name, f in FIELDS.items() if f.metadata["limits"]}
NEEDS = {name: f.metadata["needs"] for name, f in FIELDS.items() if "needs" in f.metadata}
GOOD = Config(model="base", data=("arithmetic",))


def is_number(name: str) -> bool:
    return str(FIELDS[name].type).split()[0] in ("int", "float")


def test_every_field_has_a_help_text_and_known_rules():
    for name, f in FIELDS.items():
        rules = {"limits", "choices", "required", "needs", "group", "words"}
        assert f.metadata.keys() <= {"help", *rules}
        assert set(f.metadata.get("words", {}).values()) <= set(CHOICES.get(name, ()))
        assert len(f.metadata["help"]) > 5
        assert f.metadata["help"].isascii(), "a terminal in the C locale could not print it"
        assert f.metadata.get("needs", name).split("=")[0] in FIELDS
        if is_number(name):
            assert f.metadata["limits"]


def test_help_shows_every_option_with_its_text_and_default(capsys):
    with pytest.raises(SystemExit) as done:
        parse(["--help"])
    assert done.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for name, f in FIELDS.items():
        help = f.metadata["help"]
        assert re.search(rf"--{dashed(name)}[ ,]", text)
        default = " ".join(map(str, f.default)) if isinstance(f.default, tuple) else f.default
        assert (help if default in ("", None) else f"{help} (default: {default})") in text
        if name in CHOICES:
            assert "{" + ",".join(CHOICES[name]) + "}" in text
        if "group" in f.metadata:
            assert f"{f.metadata['group']}: --{dashed(name)}" in text
    # some versions of argparse add a default of their own
    assert text.count("(default: True)") == sum(f.default is True for f in FIELDS.values())


def test_no_arguments_give_the_defaults():
    assert parse([]) == Config()


def other_value(name: str):
    """Return a valid value of the field's type that is not its default."""
    f = FIELDS[name]
    kind = str(f.type)
    if name in CHOICES:
        other = next(c for c in reversed(CHOICES[name]) if f.default not in (c, (c,)))
        return (other,) if kind.startswith("tuple") else other
    if kind.startswith("tuple"):
        return (1.5, 2.0, 1e-3) if "float" in kind else ("a", "b:c")
    if kind.startswith("dict"):
        return {"a": [True, None]}
    if name == "vllm_gpus":
        return "1,GPU-0a1b"
    value = 2.0 if name == "vllm_importance_sampling_clip_max" else 0.125
    return {"bool": not f.default, "int": 7, "str": "other"}.get(kind.split()[0], value)


@pytest.mark.parametrize("name", FIELDS)
def test_the_command_line_sets_every_field(name):
    value = other_value(name)
    assert value != FIELDS[name].default
    option = f"--{dashed(name)}"
    if isinstance(value, bool):
        argv = [option if value else option.replace("--", "--no-", 1)]
        assert getattr(parse([option]), name) is True
    else:
        given = json.dumps(value) if isinstance(value, dict) else value
        argv = [option, *map(str, given if isinstance(given, tuple) else (given,))]
    cfg = parse(argv)
    assert type(getattr(cfg, name)) is type(value)
    assert cfg == dataclasses.replace(Config(), **{name: value})


def test_a_command_line_with_several_options():
    argv = "--model m --data d --reward-funcs accuracy rewards.py:f --reward-weights 1 -0.5"
    more = "--epsilon-high 0.28 --no-enable-thinking --resume --learning-rate 3e-4"
    cfg = parse([*argv.split(), *more.split()])
    assert (cfg.reward_funcs, cfg.reward_weights) == (("accuracy", "rewards.py:f"), (1.0, -0.5))
    assert (cfg.epsilon_high, cfg.learning_rate) == (0.28, 3e-4)
    assert (cfg.enable_thinking, cfg.resume) == (False, True)
    cfg.validate()
    assert parse(["--reward-weights"]).reward_weights == ()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        # abbreviations are not guessed, but the nearest option is named
        ("--num-generation 4", "--num-generation is not an option: use --num-generations, or"),
        ("--learning_rates=1e-4", "--learning_rates is not an option: use --learning-rate, or"),
        ("--profil debug", "--profil is not an option: use --profile, or"),
        ("--lr 1e-4", "--lr is not an option: "),
        ("runs/base", "runs/base is not an option: see"),
        ("--num-generations four", "--num-generations: invalid int value: 'four'"),
        ("--num-generations 2.5", "--num-generations: invalid int"),
        ("--temperature warm", "--temperature: invalid float value: 'warm'"),
        ("--reward-weights 1 two", "--reward-weights: invalid float value: 'two'"),
        ("--seed", "--seed: expected one argument"),
        ("--resume=yes", "--resume"),
        ("--chat-template-kwargs {", "--chat-template-kwargs: '{' is no JSON object such as"),
        ("--chat-template-kwargs 3", "--chat-template-kwargs: '3' is no JSON object"),
    ],
)
def test_a_command_line_that_cannot_be_parsed(argv, message):
    with pytest.raises(UserError, match=re.escape(message)) as error:
        parse(argv.split())
    assert re.search(r"see --help( for the options)?\.$", str(error.value))


# --- the rules ------------------------------------------------------------------------------------


def outside(name: str, limit: str) -> float:
    """Return a number for this field just outside a limit such as "> 0"."""
    sign, bound = limit.split()
    number = float(bound)
    number = number if sign in "><" else number - 1 if sign == ">=" else number * 2
    return int(number) if str(FIELDS[name].type).startswith("int") else number


BAD = [
    ("chat_template_kwargs", {"enable_thinking": False}),
    ("chat_template_kwargs", {"tools": []}),
    ("model", ""),
    ("model", "warmup:"),
    ("model", "warmup:0"),
    ("data", ()),
    ("data", ("a", "")),
    ("data", "a.jsonl"),
    ("eval_data", "a.jsonl"),
    ("data_weights", (1.0, 1.0)),
    ("data_weights", (0.0,)),
    ("data_weights", (-1.0,)),
    ("output_dir", ""),
    ("reward_funcs", ()),
    ("reward_weights", (1.0,)),
    ("reward_weights", (1.0, math.nan)),
    ("reward_weights", (math.inf, 1.0)),
    ("learning_rate", -math.inf),
    ("generation_batch_size", 60),
    ("steps_per_generation", 3),
    ("steps_per_generation", 16),
    ("trace_step", 101),
    ("report_to", ("none", "wandb")),
    ("sync_ref_model", True),
    *((name, "nonsense") for name in CHOICES),
    *((name, ("nonsense",)) for name in CHOICES if isinstance(FIELDS[name].default, tuple)),
    *(
        (name, outside(name, limit))
        for name, limits in LIMITS.items()
        for limit in limits
        if is_number(name)
    ),
    *((name, math.nan) for name in FIELDS if "float" in str(FIELDS[name].type) and is_number(name)),
    *((name, other_value(name)) for name in NEEDS),
]


def test_unique_prompts_need_a_dashboard_with_tables():
    cfg = dataclasses.replace(GOOD, log_completions=True, log_unique_prompts=True)
    for report_to in ("none",), ("tensorboard",):
        with pytest.raises(UserError, match="--log-unique-prompts is True, which has no effect w"):
            dataclasses.replace(cfg, report_to=report_to).validate()
    dataclasses.replace(cfg, report_to=("tensorboard", "wandb")).validate()


@pytest.mark.parametrize(("name", "value"), BAD)
def test_every_rule_names_the_option_and_the_value(name, value):
    with pytest.raises(UserError) as error:
        dataclasses.replace(GOOD, **{name: value}).validate()
    sentence = str(error.value)
    assert sentence.startswith(f"--{dashed(name)} ")
    assert sentence.endswith(".")
    assert "\n" not in sentence
    if value and not isinstance(value, tuple | dict):
        assert str(value) in sentence


@pytest.mark.parametrize(
    ("name", "value"), [("model", "a\0"), ("data", ("a", "\0")), ("output_dir", "\0")]
)
def test_a_nul_character_is_refused(name, value):
    with pytest.raises(UserError, match=f"^--{dashed(name)} has a NUL character, which no file or"):
        dataclasses.replace(GOOD, **{name: value}).validate()


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("learning_rate", "1e-4", "a number"),
        ("learning_rate", True, "a number"),
        ("learning_rate", 10**400, "a number"),
        ("max_steps", 2.0, "a whole number"),
        ("max_steps", None, "a whole number"),
        ("num_generations", "8", "a whole number"),
        ("num_generations", [8], "a whole number"),
        ("resume", 1, "true or false"),
        ("model", Path("runs/base"), "a string"),
        ("data", "a.jsonl", "a list of strings"),
        ("reward_funcs", (len,), "a list of strings"),
        ("reward_weights", [1, None], "a list of numbers"),
        ("reward_weights", np.ones((9, 9)), "a list of numbers"),
        ("delta", "2", "a number or None"),
        ("chat_template_kwargs", [1], "an object or None"),
        ("chat_template_kwargs", {1: 2, "a": 3}, "an object or None"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_when_the_options_are_made(name, value, wanted):
    with pytest.raises(UserError) as error:
        Config(**{name: value})
    sentence = str(error.value)
    assert re.fullmatch(rf"--{dashed(name)} is .+ but must be {wanted}\.", sentence)
    assert len(sentence) < 200


@pytest.mark.parametrize("name", FIELDS)
def test_no_field_takes_any_object(name):
    with pytest.raises(UserError, match=f"--{dashed(name)} is <object object at .* but must be "):
        Config(**{name: object()})


def test_numbers_and_lists_get_the_type_of_the_field():
    given = {"learning_rate": 1, "max_steps": np.int64(3), "beta": np.float32(0.5), "delta": None}
    cfg = Config(**given, reward_weights=[1, 0.5], data=["a"])
    for name, value in {**given, "reward_weights": (1.0, 0.5), "data": ("a",)}.items():
        assert getattr(cfg, name) == value
    assert [type(getattr(cfg, name)) for name in list(given)[:3]] == [float, int, float]
    assert json.loads(json.dumps(dataclasses.asdict(cfg)))["reward_weights"] == [1.0, 0.5]


def test_an_object_holds_only_what_json_can_store():
    with pytest.raises(UserError, match=r"--chat-template-kwargs is .*len.*: give texts, numbers"):
        dataclasses.replace(GOOD, chat_template_kwargs={"style": len}).validate()


# The ranges of the numbers, written a second time: a limit that is lost would go unnoticed.
RANGES = {
    "above 0": "max_completion_length temperature sapo_temperature_pos sapo_temperature_neg top_p"
    " vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg entropy_coef_delta max_concurrent"
    " cache_tokens log_tokens_mib"
    " max_steps num_iterations token_budget learning_rate adam_epsilon ddp_timeout server_window"
    " server_timeout vllm_importance_sampling_clip_max lora_alpha ref_model_mixup_alpha"
    " ref_model_sync_steps generation_batch_size steps_per_generation data_weights"
    " num_generations_eval eval_top_p",
    "at least 0": "top_k epsilon epsilon_high beta warmup_steps weight_decay max_grad_norm"
    " num_train_epochs eval_steps eval_samples"
    " dppo_penalty off_policy_mask_threshold entropy_coef entropy_coef_min"
    " entropy_coef_max entropy_target reward_timeout save_steps trace_step num_completions_to_print"
    " max_prompt_length save_total_limit seed server_patience max_staleness max_resample_times"
    " vllm_importance_sampling_clip_min lora_r min_p adam_beta1 adam_beta2 top_entropy_quantile"
    " lora_dropout max_tool_calling_iterations tool_timeout eval_temperature",
    "above 1": "delta",
    "at least 2": "num_generations",
    "at least 3": "heartbeat_timeout",
}
LARGEST = {
    "<= 1": "top_p eval_top_p min_p top_entropy_quantile ref_model_mixup_alpha",
    "< 1": "epsilon adam_beta1 adam_beta2 lora_dropout",
    "<= 1e7": "reward_timeout server_timeout server_patience ddp_timeout heartbeat_timeout"
    " tool_timeout log_tokens_mib",
    f"< {2**63}": "seed",
}


def test_the_ranges_of_the_numbers():
    limits = {name: [] for name in LIMITS}
    for table in (RANGES, LARGEST):
        for limit, names in table.items():
            sign = limit.replace("above", ">").replace("at least", ">=")
            for name in names.split():
                limits[name].append(sign)
    assert {name: list(found) for name, found in LIMITS.items()} == limits


GOOD_EDGES = {
    "num_generations": 2,
    "generation_batch_size": 8,
    "steps_per_generation": 8,
    "max_completion_length": 1,
    "token_budget": 1,
    "max_steps": 1,
    "save_total_limit": 0,
    "max_grad_norm": 0.0,
    "beta": 0.0,
    "epsilon": 0.0,
    "epsilon_high": 0.0,
    "delta": 1.01,
    "adam_beta1": 0.0,
    "top_p": 1e-3,
    "top_k": 1,
    "min_p": 1.0,
    "top_entropy_quantile": 0.0,
    "reward_weights": (0.0, -1.0),
    "heartbeat_timeout": 3,
    "ddp_timeout": 10**7,
    "seed": 2**63 - 1,
}


@pytest.mark.parametrize("name", GOOD_EDGES)
def test_values_at_the_edge_of_a_range_are_valid(name):
    dataclasses.replace(GOOD, **{name: GOOD_EDGES[name]}).validate()


def test_an_option_that_needs_another_is_valid_with_it():
    for name, needs in NEEDS.items():
        other, _, wanted = needs.partition("=")
        assert set(wanted.split("|")) <= {"", *CHOICES.get(other, ())}
        for choice in wanted.split("|") if wanted else [other_value(other)]:
            values = {name: other_value(name), other: choice}
            if other == "sync_ref_model":
                values["beta"] = 0.1
            if "load_best_model_at_end" in values:
                values |= {"load_best_model_at_end": True, "eval_steps": 7, "save_steps": 7}
            if name in ("num_generations_eval", "eval_top_p"):
                values |= {"eval_steps": 7, "eval_temperature": 0.5}
            if other == "use_adaptive_entropy":
                values["entropy_coef"] = 0.125
            if name == "log_unique_prompts":
                values["report_to"] = ("trackio",)
            if other == "log_tokens":
                values["log_completions"] = True
            dataclasses.replace(GOOD, **values).validate()


def test_torch_compile_excludes_selective_recomputation():
    for kind in ("none", "full"):
        dataclasses.replace(GOOD, torch_compile=True, gradient_checkpointing=kind).validate()
    message = "--gradient-checkpointing selective cannot be used with --torch-compile"
    with pytest.raises(UserError, match=message):
        dataclasses.replace(GOOD, torch_compile=True, gradient_checkpointing="selective").validate()


def test_derived_sizes():
    cfg = dataclasses.replace(
        GOOD, num_generations=8, generation_batch_size=64, num_iterations=3, steps_per_generation=2
    )
    assert (cfg.prompts_per_step, cfg.updates_per_step, cfg.on_policy) == (8, 6, False)
    assert GOOD.on_policy


# --- the learning rate ----------------------------------------------------------------------------


def test_the_learning_rate_warms_up_and_decays():
    cfg = dataclasses.replace(
        GOOD, learning_rate=2.0, warmup_steps=4, max_steps=6, num_iterations=2
    )  # 12 updates, 8 of them after the warmup
    for kind, middle in {"constant": 2.0, "linear": 1.0, "cosine": 1.0}.items():
        rates = [
            learning_rate(u, dataclasses.replace(cfg, lr_scheduler_type=kind)) for u in range(12)
        ]
        assert rates[:5] == pytest.approx([0.0, 0.5, 1.0, 1.5, 2.0])
        assert rates[8] == pytest.approx(middle)
        assert rates[4:] == sorted(rates[4:], reverse=True)
        assert rates[-1] > 0
    assert rates[-1] == pytest.approx(1 + math.cos(math.pi * 7 / 8))


def test_a_warmup_longer_than_the_run_does_not_divide_by_zero():
    cfg = dataclasses.replace(
        GOOD, warmup_steps=10, max_steps=10, lr_scheduler_type="cosine", learning_rate=1.0
    )
    rates = [learning_rate(u, cfg) for u in range(10)]
    assert rates == pytest.approx([u / 10 for u in range(10)])
