"""Problems of reasoning-gym as prompts: the package's own, different when held out, and mistakes.

Read next: tests/rewards/test_reasoning_gym.py (their rewards).
"""

import sys

import pytest

from nanogrpo import Config
from nanogrpo.data import sources
from nanogrpo.data.prompts import load
from nanogrpo.extras.gym import data as gym
from nanogrpo.model.tokenizer import Tokenizer
from tests.conftest import refused, said
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
    features = [gym.Gym(Config())]
    ours = load(Config(), chat, [source], features)
    assert [p.text for p in ours] == [said(theirs[i]["question"]) for i in range(6)]
    assert [p.columns["answer"] for p in ours] == [theirs[i]["answer"] for i in range(6)]
    assert [p.columns["reasoning_gym"]["problem"] for p in ours] == [theirs[i] for i in range(6)]

    held_out = load(Config(), chat, [source], features, split="held out")
    assert len(held_out) == 6
    again = load(Config(), chat, [source], features, split="eval")
    assert [p.text for p in held_out] == [p.text for p in again]
    assert not {str(p.text) for p in ours} & {str(p.text) for p in held_out}
    # a data set with a seed close by has most of the problems; the held-out ones have none of them
    near = reasoning_gym.create_dataset(task, **{**arguments, "seed": 4})
    assert near[0]["question"] == theirs[1]["question"]


def test_the_seed_is_0_unless_it_is_given():
    given, default = (
        gym.records(f"reasoning_gym:chain_sum:size=2{s}", False) for s in (",seed=0", "")
    )
    assert [r["question"] for r in given] == [r["question"] for r in default]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("countdwn", r"cannot be created \(Dataset 'countdwn' not registered\): correct its name"),
        ("countdown:sise=3", r"cannot be created \(.* unexpected keyword argument 'sise'\): corr"),
        ("countdown:size=f()", "cannot be read"),
        ("countdown:seed=x", r"cannot be created \(.*\): correct its name or arguments"),
        ("countdown:size=2,min_numbers=9", "max_numbers must be >= min_numbers"),
        ("countdown:size=0", "holds no prompts"),
    ],
)
def test_a_mistake_in_the_name_is_reported_in_one_sentence(source, message):
    with refused(message):
        sources.read(f"reasoning_gym:{source}", features=[gym.Gym(Config())])


def test_without_the_package_the_message_says_what_to_install(monkeypatch):
    gym.dataset.cache_clear()
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with refused(r"needs the package .*: pip install 'nanogrpo\[reasoning\]'\."):
        sources.read("reasoning_gym:countdown", features=[gym.Gym(Config())])
