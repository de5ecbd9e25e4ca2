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

from nanogrpo import Config
from nanogrpo.config import dashed
from nanogrpo.extras.commandline import parse
from nanogrpo.extras.options import CHOICES, LOSS_CONSTANTS
from tests.conftest import refused

FIELDS = {f.name: f for f in dataclasses.fields(Config)}
LIMITS = {name: f.metadata["limits"] for name, f in FIELDS.items() if f.metadata["limits"]}
NEEDS = {name: f.metadata["needs"] for name, f in FIELDS.items() if "needs" in f.metadata}
GOOD = Config(model="base", data=("arithmetic",))


def is_number(name: str) -> bool:
    return str(FIELDS[name].type).split()[0] in ("int", "float")


def test_every_field_has_a_help_text_and_known_rules():
    for name, f in FIELDS.items():
        rules = {"limits", "choices", "required", "needs", "group", "words", "free"}
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
    out = capsys.readouterr().out
    text = "".join(out.split())  # without spaces, as argparse breaks lines within words as well
    for name, f in FIELDS.items():
        help = f.metadata["help"]
        assert re.search(rf"--{dashed(name)}[ ,]", out)
        default = " ".join(map(str, f.default)) if isinstance(f.default, tuple) else f.default
        help += "" if default in ("", None) else f" (default: {default})"
        assert "".join(help.split()) in text
        if name in CHOICES:
            assert "{" + ",".join(CHOICES[name]) + "}" in text
        if "group" in f.metadata:
            assert f"{f.metadata['group']}:\n  --{dashed(name)}" in out
    # some versions of argparse add a default of their own
    assert text.count("(default:True)") == sum(f.default is True for f in FIELDS.values())


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
        return "1,2"
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


# --- the rules ------------------------------------------------------------------------------------


def outside(name: str, limit: str) -> float:
    """Return a number for this field just outside a limit such as "> 0"."""
    sign, bound = limit.split()
    number = float(bound)
    number = number if sign in "><" else number - 1 if sign == ">=" else number * 2
    return int(number) if str(FIELDS[name].type).startswith("int") else number


BAD = [
    ("model", ""),
    ("data", ()),
    ("data", ("a", "")),
    ("data", "a.jsonl"),
    ("eval_data", "a.jsonl"),
    ("output_dir", ""),
    ("reward_funcs", ()),
    ("reward_weights", (1.0,)),
    ("reward_weights", (1.0, math.nan)),
    ("reward_weights", (math.inf, 1.0)),
    ("learning_rate", -math.inf),
    ("generation_batch_size", 60),
    ("steps_per_generation", 3),
    ("steps_per_generation", 16),
    ("report_to", ("none", "wandb")),
    ("ref_model_sync_steps", 9),
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


@pytest.mark.parametrize(("name", "value"), BAD)
def test_every_rule_names_the_option_and_the_value(name, value):
    with refused(rf"^--{dashed(name)} .*\.$") as error:
        dataclasses.replace(GOOD, **{name: value}).validate()
    if value and not isinstance(value, tuple | dict):
        assert str(value) in str(error.value)


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
        ("delta", "2", "a number"),
        ("chat_template_kwargs", [1], "an object"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_when_the_options_are_made(name, value, wanted):
    with refused(rf"^--{dashed(name)} is .+ but must be {wanted}\.$") as error:
        Config(**{name: value})
    assert len(str(error.value)) < 200


@pytest.mark.parametrize("name", FIELDS)
def test_no_field_takes_any_object(name):
    with refused(f"--{dashed(name)} is <object object at .* but must be "):
        Config(**{name: object()})


def test_numbers_and_lists_get_the_type_of_the_field():
    given = {"learning_rate": 1, "max_steps": np.int64(3), "beta": np.float32(0.5), "delta": None}
    cfg = Config(**given, reward_weights=[1, 0.5], data=["a"])
    for name, value in {**given, "reward_weights": (1.0, 0.5), "data": ("a",)}.items():
        assert getattr(cfg, name) == value
    assert [type(getattr(cfg, name)) for name in list(given)[:3]] == [float, int, float]
    assert json.loads(json.dumps(dataclasses.asdict(cfg)))["reward_weights"] == [1.0, 0.5]


# The ranges of the numbers, written a second time: a limit that is lost would go unnoticed.
RANGES = {
    "above 0": "max_completion_length temperature top_p"
    " max_concurrent"
    " cache_tokens"
    " max_steps num_iterations token_budget learning_rate adam_epsilon ddp_timeout"
    " server_timeout vllm_importance_sampling_clip_max lora_alpha ref_model_mixup_alpha"
    " generation_batch_size steps_per_generation"
    " num_generations_eval",
    "at least 0": "top_k min_p epsilon epsilon_high beta warmup_steps weight_decay max_grad_norm"
    " num_train_epochs eval_steps eval_samples"
    " off_policy_mask_threshold entropy_coef "
    "  reward_timeout save_steps num_completions_to_print"
    " max_prompt_length ref_model_sync_steps save_total_limit seed max_staleness max_resample_times"
    " vllm_importance_sampling_clip_min lora_r adam_beta1 adam_beta2 top_entropy_quantile"
    " max_tool_calling_iterations tool_timeout eval_temperature",
    "above 1": "delta",
    "at least 2": "num_generations",
}
LARGEST = {
    "<= 1": "top_p min_p top_entropy_quantile ref_model_mixup_alpha",
    "< 1": "epsilon adam_beta1 adam_beta2",
    "<= 1e7": "reward_timeout server_timeout ddp_timeout tool_timeout",
    "<= 65536": "max_concurrent",
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
    "max_grad_norm": 0.0,
    "delta": 1.01,
    "top_entropy_quantile": 0.0,
    "reward_weights": (0.0, -1.0),
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
            if other == "ref_model_sync_steps":
                values["beta"] = 0.1
            if "load_best_model_at_end" in values:
                values |= {"load_best_model_at_end": True, "eval_steps": 7, "save_steps": 7}
            if name == "num_generations_eval":
                values |= {"eval_steps": 7, "eval_temperature": 0.5}
            if name == "loss_kwargs":
                values[name] = {constant: 0.5 for constant in LOSS_CONSTANTS[choice]}
            if other == "log_tokens":
                values["log_completions"] = True
            dataclasses.replace(GOOD, **values).validate()
