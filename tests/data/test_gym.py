"""Problems of reasoning-gym as prompts: the package's own, different when held out, and mistakes.

Read next: tests/rewards/test_reasoning_gym.py (their rewards).
"""

import dataclasses
import sys

import pytest

from nanogrpo.config import Config
from nanogrpo.data import gym, sources
from nanogrpo.data.prompts import load_all
from nanogrpo.errors import UserError
from nanogrpo.model.tokenizer import Tokenizer
from nanogrpo.run import setup
from tests.model.tokenizer_folder import make_folder

reasoning_gym = pytest.importorskip("reasoning_gym")
TASKS = {
    "countdown": {"min_numbers": 3, "max_numbers": 3, "operators": ("+", "-")},
    "chain_sum": {"max_terms": 3, "allow_negation": True},
    "word_sorting": {},
}


@pytest.mark.parametrize("task", TASKS)
def test_prompts_are_the_problems_that_the_package_makes(tmp_path, task):
    chat = Tokenizer(make_folder(tmp_path))
    arguments = {"size": 6, "seed": 3, **TASKS[task]}
    text = ",".join(f"{key}={value!r}" for key, value in arguments.items())
    source = f"reasoning_gym:{task}:{text}"
    theirs = reasoning_gym.create_dataset(task, **arguments)
    (ours,) = load_all([source], chat)
    assert [p.text for p in ours] == [
        [{"role": "user", "content": theirs[i]["question"]}] for i in range(6)
    ]
    assert [p.columns["answer"] for p in ours] == [theirs[i]["answer"] for i in range(6)]
    assert [p.columns["reasoning_gym"]["problem"] for p in ours] == [theirs[i] for i in range(6)]

    assert sources.holds_out(source, "any")
    (held_out,) = load_all([source], chat, held_out=True)
    assert len(held_out) == 6
    assert not {str(p.text) for p in ours} & {str(p.text) for p in held_out}
    # a data set with a seed close by has most of the problems; the held-out ones have none of them
    near = reasoning_gym.create_dataset(task, **{**arguments, "seed": 4})
    assert near[0]["question"] == theirs[1]["question"]


def test_the_seed_is_0_unless_it_is_given():
    given, default = (
        gym.records(f"reasoning_gym:chain_sum:size=2{s}", False) for s in (",seed=0", "")
    )
    assert [r["question"] for r in given] == [r["question"] for r in default]


def test_arguments_are_written_as_in_a_call():
    assert gym.parse("reasoning_gym:a") == ("a", {})
    text = "x=-1,y=[1, 2],z=('+', '-'),word=easy,on=true,off=False,none=None,t='a, b'"
    assert gym.parse(f"reasoning_gym:a:{text}") == (
        "a",
        {
            "x": -1,
            "y": [1, 2],
            "z": ("+", "-"),
            "word": "easy",
            "on": True,
            "off": False,
            "none": None,
            "t": "a, b",
        },
    )


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("countdwn", "has no data set 'countdwn': choose another, for example countdown"),
        ("", "has no data set '': choose another, for example"),
        ("countdown:sise=3", r"countdown has no argument 'sise': choose among min_numbers, .*size"),
        ("countdown:3", "'3' cannot be read: write reasoning_gym:NAME:key=value,key=value"),
        ("countdown:size", "'size' cannot be read"),
        ("countdown:size=", "'size=' cannot be read"),
        ("countdown:size=1,size=2", "cannot be read"),
        ("countdown:size=f()", "cannot be read"),
        ("countdown:**{}", "cannot be read"),
        ("countdown:a=1),g(b=2", "cannot be read"),
        ("countdown:seed=-1", "seed is -1: give a whole number from 0 to 999999999"),
        ("countdown:seed=x", "seed is 'x': give a whole number"),
        ("countdown:size=x", "countdown:size=x cannot be made .*: correct its arguments"),
        ("countdown:size=2,min_numbers=9", "max_numbers must be >= min_numbers"),
        ("countdown:size=0", "holds no prompts"),
    ],
)
def test_a_mistake_in_the_name_is_reported_in_one_sentence(source, message):
    with pytest.raises(UserError, match=message) as caught:
        sources.read(f"reasoning_gym:{source}")
    assert str(caught.value).startswith(f"reasoning_gym:{source}")
    assert str(caught.value).count("\n") == 0


def test_without_the_package_the_message_says_what_to_install(monkeypatch):
    gym.dataset.cache_clear()
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(
        UserError, match=r"this needs the package .*: pip install 'nanogrpo\[reasoning\]'\."
    ):
        sources.read("reasoning_gym:countdown")


def test_an_evaluation_makes_only_the_problems_that_it_needs(tiny_tokenizer, caplog):
    source = "reasoning_gym:chain_sum:size=20"
    cfg = Config(data=(source,), eval_samples=3, max_completion_length=8)
    found = []
    with caplog.at_level("INFO", "nanogrpo"):
        for how in ("refuse", "drop"):  # dropped prompts would leave less than three
            each = dataclasses.replace(cfg, long_prompts=how)
            load = setup.prompt_loader(each, tiny_tokenizer, 256)
            found.append(setup.load_held_out(each, load, each.data))
    assert found[0] == found[1]
    assert len(found[0]) == 3
    assert caplog.messages == [f"{source}: making {n} problems" for n in (3, 20)]
