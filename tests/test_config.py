"""The options: each documented, each settable from the command line, each rule of `validate` with
its sentence.

Read next: test_bad_input.py, where mistakes go through the program.
"""

import dataclasses
import math
import re

import pytest

from nanogrpo.cli import documentation, parse
from nanogrpo.config import CHOICES, NOT_NEGATIVE, POSITIVE, Config, dashed
from nanogrpo.errors import UserError
from nanogrpo.rules import NEEDS, ONLY_WITH, SECONDS
from nanogrpo.run.optim import learning_rate

FIELDS = {f.name: f for f in dataclasses.fields(Config)}
GOOD = Config(model="base", data=("arithmetic",))


def test_every_field_has_a_heading_and_a_comment():
    docs = documentation()
    assert list(docs) == list(FIELDS)
    assert not [
        name for name, (heading, comment) in docs.items() if not heading or len(comment) < 5
    ]


def test_help_names_every_field_with_its_comment_and_default(capsys):
    with pytest.raises(SystemExit) as done:
        parse(["--help"])
    assert done.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for name, (heading, comment) in documentation().items():
        assert re.search(rf"--{dashed(name)}[ ,]", text)
        assert " ".join(comment.split()) in text
        assert f"{heading}: --" in text
        default = FIELDS[name].default
        if default not in ("", (), None):
            shown = " ".join(map(str, default)) if isinstance(default, tuple) else default
            assert f"{' '.join(comment.split())} (default: {shown})" in text
    # some argparses add their own
    assert text.count("(default: True)") == sum(f.default is True for f in FIELDS.values())


def test_no_arguments_give_the_defaults():
    assert parse([]) == Config()


def other_value(name: str):
    """Some value of the field's type that is not its default."""
    kind = str(FIELDS[name].type)
    if name in CHOICES:
        other = CHOICES[name][-1] if CHOICES[name][-1] != FIELDS[name].default else CHOICES[name][0]
        return (other,) if kind.startswith("tuple") else other
    if kind.startswith("tuple"):
        return (1.5, -2.0, 1e-3) if "float" in kind else ("a", "b:c")
    return {"bool": not FIELDS[name].default, "int": 7, "str": "other"}.get(kind, 0.125)


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_can_be_set_from_the_command_line(name):
    value = other_value(name)
    assert value != FIELDS[name].default
    option = f"--{dashed(name)}"
    if isinstance(value, bool):
        argv = [option if value else option.replace("--", "--no-", 1)]
        assert getattr(parse([option]), name) is True
    else:
        argv = [option, *map(str, value if isinstance(value, tuple) else (value,))]
    cfg = parse(argv)
    assert getattr(cfg, name) == value
    assert type(getattr(cfg, name)) is type(value)
    assert cfg == dataclasses.replace(Config(), **{name: value})


def test_a_command_line_round_trip():
    argv = "--model m --data d --reward-funcs accuracy rewards.py:f --reward-weights 1 -0.5 --epsilon-high 0.28 --no-enable-thinking"
    cfg = parse([*argv.split(), "--resume", "--learning-rate", "3e-4"])
    assert (cfg.reward_funcs, cfg.reward_weights) == (("accuracy", "rewards.py:f"), (1.0, -0.5))
    assert (cfg.epsilon_high, cfg.enable_thinking, cfg.resume, cfg.learning_rate) == (
        0.28,
        False,
        True,
        3e-4,
    )
    cfg.validate()
    assert parse(["--reward-weights"]).reward_weights == ()


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        ("--num-generation 4", "--num-generation"),  # no guessing at abbreviations
        ("--lr 1e-4", "--lr"),
        ("runs/base", "runs/base"),
        ("--num-generations four", "--num-generations: invalid int value: 'four'"),
        ("--num-generations 2.5", "--num-generations: invalid int"),
        ("--temperature warm", "--temperature: invalid float value: 'warm'"),
        ("--reward-weights 1 two", "--reward-weights: invalid float value: 'two'"),
        ("--seed", "--seed: expected one argument"),
        ("--resume=yes", "--resume"),
    ],
)
def test_what_cannot_be_parsed_is_named(argv, named):
    with pytest.raises(UserError, match=re.escape(named)) as told:
        parse(argv.split())
    assert str(told.value).endswith("see --help for the options.")


# ---- the rules -----------------------------------------------------------------------------------

BAD = [
    ("model", ""),
    ("data", ()),
    ("data", ("a", "")),
    ("data", "a.jsonl"),
    ("eval_data", "a.jsonl"),
    ("data_weights", (1.0, 1.0)),
    ("data_weights", (0.0,)),
    ("data_weights", (-1.0,)),
    ("output_dir", ""),
    ("num_generations", 1),
    ("num_generations", 0),
    ("num_generations", -8),
    ("generation_batch_size", 0),
    ("generation_batch_size", -64),
    ("generation_batch_size", 60),
    ("steps_per_generation", 0),
    ("steps_per_generation", 3),
    ("steps_per_generation", 16),
    *((name, "nonsense") for name in CHOICES),
    *((name, value) for name in POSITIVE for value in (0, -1)),
    *((name, -1) for name in NOT_NEGATIVE),
    ("top_p", 0.0),
    ("top_p", 1.1),
    ("top_p", -0.1),
    ("min_p", -0.1),
    ("min_p", 1.5),
    ("epsilon", 1.0),
    ("delta", 1.0),
    ("delta", -2.0),
    ("heartbeat_timeout", 2),
    ("heartbeat_timeout", -10),
    ("adam_beta1", 1.0),
    ("adam_beta2", -0.1),
    ("reward_weights", (1.0,)),
    ("reward_funcs", ()),
    *(
        (n, v)
        for n, f in FIELDS.items()
        if "float" in str(f.type) and "tuple" not in str(f.type)
        for v in (math.nan, math.inf)
    ),
    ("reward_weights", (1.0, math.nan)),
    ("reward_weights", (math.inf, 1.0)),
    ("learning_rate", -math.inf),
    ("lora_target_modules", ("lm_head",)),
    ("lora_adapter", "folder"),
    ("ref_model_mixup_alpha", 1.1),
    ("sync_ref_model", True),
    ("seed", 2**63),
    ("trace_step", 101),
    *((name, 10**8) for name in SECONDS),
    *((name, other_value(name)) for name in NEEDS if name != "lora_target_modules"),
    ("lora_target_modules", ("q_proj",)),
    *(
        (name, other_value(name))
        for name in ONLY_WITH
        if name != "vllm_importance_sampling_clip_max"
    ),
    ("vllm_importance_sampling_clip_max", 2.0),
]


@pytest.mark.parametrize(("name", "value"), BAD)
def test_every_rule_names_the_option_and_the_value(name, value):
    with pytest.raises(UserError) as told:
        dataclasses.replace(GOOD, **{name: value}).validate()
    sentence = str(told.value)
    assert sentence.startswith(f"--{dashed(name)} ")
    assert sentence.endswith(".")
    assert "\n" not in sentence
    if value != "" and not isinstance(value, tuple) and not name.endswith("data"):
        assert str(value) in sentence


GOOD_EDGES = {
    "num_generations": 2, "generation_batch_size": 8, "steps_per_generation": 8, "top_p": 1e-3, "min_p": 1.0, "top_k": 1,
    "epsilon": 0.0, "epsilon_high": 0.0, "delta": 1.01, "adam_beta1": 0.0, "beta": 0.0, "max_grad_norm": 0.0, "seed": 0,
    "reward_weights": (0.0, -1.0), "token_budget": 1, "max_steps": 1, "save_total_limit": 0, "max_completion_length": 1,
}  # fmt: skip


def test_an_option_of_some_choices_goes_with_each_of_them():
    for name, (other, choices) in ONLY_WITH.items():
        assert set(choices) < set(CHOICES[other])
        for choice in choices:
            value = 2.0 if name.endswith("clip_max") else 0.125
            dataclasses.replace(GOOD, **{name: value, other: choice}).validate()


def test_the_compiler_and_selective_recomputation_do_not_go_together():
    for kind in ("none", "full"):
        dataclasses.replace(GOOD, torch_compile=True, gradient_checkpointing=kind).validate()
    with pytest.raises(
        UserError, match="--gradient-checkpointing selective does not go with --torch-compile"
    ):
        dataclasses.replace(GOOD, torch_compile=True, gradient_checkpointing="selective").validate()


@pytest.mark.parametrize("name", GOOD_EDGES)
def test_the_edge_of_what_is_allowed(name):
    dataclasses.replace(GOOD, **{name: GOOD_EDGES[name]}).validate()


def test_the_rules_only_name_fields():
    assert {
        *CHOICES,
        *POSITIVE,
        *NOT_NEGATIVE,
        *NEEDS,
        *NEEDS.values(),
        *ONLY_WITH,
        *SECONDS,
    } <= set(FIELDS)
    numbers = {n for n, f in FIELDS.items() if str(f.type).split()[0] in ("int", "float")}
    ruled = {*POSITIVE, *NOT_NEGATIVE} | {name for name, _ in BAD}
    assert numbers <= ruled  # no number without a rule


def test_derived_sizes():
    cfg = dataclasses.replace(
        GOOD, num_generations=8, generation_batch_size=64, num_iterations=3, steps_per_generation=2
    )
    assert (cfg.prompts_per_step, cfg.updates_per_step, cfg.on_policy) == (8, 6, False)
    assert GOOD.on_policy


# ---- the learning rate ---------------------------------------------------------------------------


def test_the_schedule_warms_up_and_ends():
    cfg = dataclasses.replace(
        GOOD, learning_rate=2.0, warmup_steps=4, max_steps=6, num_iterations=2
    )  # 12 updates, 8 of them after
    for kind, middle in {"constant": 2.0, "linear": 1.0, "cosine": 1.0}.items():
        rates = [
            learning_rate(u, dataclasses.replace(cfg, lr_scheduler_type=kind)) for u in range(12)
        ]
        assert rates[:5] == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.0])
        assert rates[8] == pytest.approx(middle)
        assert rates[4:] == sorted(rates[4:], reverse=True)
        assert rates[-1] > 0
    assert rates[-1] == pytest.approx(1 + math.cos(math.pi * 7 / 8))


def test_a_warm_up_longer_than_the_run_is_no_division_by_zero():
    cfg = dataclasses.replace(
        GOOD, warmup_steps=10, max_steps=10, lr_scheduler_type="cosine", learning_rate=1.0
    )
    assert [learning_rate(u, cfg) for u in range(10)] == pytest.approx(
        [(u + 1) / 10 for u in range(10)]
    )
