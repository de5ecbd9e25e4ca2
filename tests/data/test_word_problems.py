"""Tests of the word problems in examples/: right answers, good English, and a split without
overlap. Read next: examples/word_problems.py.
"""

import importlib
import itertools
import json
import re
import string
from pathlib import Path

import pytest

from examples import word_problems
from examples.word_problems import INSTRUCTION, KINDS, PEOPLE, WORDS, last_number, problems
from nanogrpo.rewards.runner import Runner
from nanogrpo.types import Prompt, Sample

SPLITS = {"train": problems("train", 600), "held_out": problems("held_out", 180)}
STORIES = {kind: stories for kind, (_, _, stories) in KINDS.items()}


def text_of(record: dict) -> str:
    return record["prompt"][0]["content"].removesuffix(INSTRUCTION).strip()


def numbers_in(text: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", text)]


def pattern(story: str) -> re.Pattern:
    """Return a pattern that matches the story with any words and numbers."""
    parts = string.Formatter().parse(story)
    return re.compile(
        "".join(re.escape(plain) + (r"\w+" if name else "") for plain, name, *_ in parts)
    )


PATTERNS = {
    split: [
        pattern(s) for stories in STORIES.values() for s in (stories[-1:] if held else stories[:-1])
    ]
    for split, held in (("train", False), ("held_out", True))
}


def test_there_are_fifty_different_stories():
    assert {len(stories) for stories in STORIES.values()} == {5}
    assert len({s for stories in STORIES.values() for s in stories}) == 50


@pytest.mark.parametrize("split", SPLITS)
def test_every_story_occurs_in_its_split_and_in_no_other(split):
    (other,) = set(PATTERNS) - {split}
    texts = [text_of(record) for record in SPLITS[split]]
    for mine in PATTERNS[split]:
        assert any(mine.fullmatch(text) for text in texts), mine.pattern
    for others in PATTERNS[other]:
        assert not any(others.fullmatch(text) for text in texts), others.pattern


def test_no_pair_of_numbers_of_a_held_out_problem_occurs_in_training():
    pairs = {
        split: {
            tuple(sorted(pair))
            for record in records
            for pair in itertools.combinations(numbers_in(text_of(record)), 2)
        }
        for split, records in SPLITS.items()
    }
    assert not pairs["train"] & pairs["held_out"]
    assert len(pairs["held_out"]) > 30


# Each kind computed again, from the numbers in the order of the text.
AGAIN = {
    "add": lambda a, b: a + b,
    "take away": lambda a, b: a - b,
    "more than": lambda a, b: a + b,
    "difference": lambda a, b: a - b,
    "groups": lambda a, b: a * b,
    "price": lambda a, b: a * b,
    "rate": lambda a, b: a * b,
    "times as many": lambda a, b: a * b,
    "gain and lose": lambda a, b, c: a + b - c,
    "multiply and add": lambda a, b, c: a * b + c,
}


def test_the_answer_is_right_and_is_not_in_the_text():
    for record in [*SPLITS["train"], *SPLITS["held_out"]]:
        text, answer = text_of(record), int(record["answer"])
        numbers = numbers_in(text)
        assert AGAIN[record["kind"]](*numbers) == answer > 1, text
        assert answer not in numbers, text


def test_the_kinds_are_equally_frequent():
    for records in SPLITS.values():
        kinds = [record["kind"] for record in records]
        assert {kinds.count(kind) for kind in KINDS} == {len(records) / 10}


def test_no_rule_that_ignores_the_story_answers_many_problems():
    """Multiplying the first two numbers is the best of these rules: it is right in two fifths."""
    records = SPLITS["held_out"]
    rules = [sum, max, min, lambda n: n[0] - n[1], lambda n: n[0] * n[1], lambda n: n[-1]]
    for rule in rules:
        right = sum(rule(numbers_in(text_of(r))) == int(r["answer"]) for r in records)
        assert right / len(records) <= 0.41


def test_the_english_is_good_by_construction():
    for record in [*SPLITS["train"], *SPLITS["held_out"]]:
        text = text_of(record)
        assert text.endswith("?")
        assert "  " not in text
        assert not re.search(r"[{}]|\b1\b", text), text  # every number is plural
        for sentence in re.findall(r"[^.?]+[.?]", text):
            assert sentence.strip()[0].isupper(), text
        assert not re.search(r"\b[Aa] [aeiou]", text), text  # "a apple"


def test_plurals_and_names_are_well_formed():
    for name in set(WORDS) - {"box"}:
        irregular = {"goldfish", "geese"}
        assert all(word.endswith("s") or word in irregular for word in WORDS[name].split())
    assert len({name for name, *_ in PEOPLE}) == len(PEOPLE) == 32
    assert {tuple(pronouns) for _, *pronouns in PEOPLE} == {
        ("she", "her", "her"),
        ("he", "him", "his"),
    }


def test_the_same_problems_are_written_every_time(tmp_path, capsys):
    assert word_problems.main([str(tmp_path)]) == 0
    for split, count in word_problems.SIZE.items():
        lines = (tmp_path / f"{split}.jsonl").read_text().splitlines()
        assert [json.loads(line) for line in lines] == problems(split, count)
        assert f"{split}.jsonl: {count} problems" in capsys.readouterr().out or split != "train"


def test_a_file_in_place_of_the_folder_is_named(tmp_path, capsys):
    (tmp_path / "problems").touch()
    with pytest.raises(SystemExit) as error:
        word_problems.main([str(tmp_path / "problems")])
    assert error.value.code == 2
    assert "problems cannot be made (File exists): name another" in capsys.readouterr().err


def test_a_comparison_names_the_checkpoint_that_is_missing(tmp_path, capsys, monkeypatch):
    monkeypatch.syspath_prepend(Path(word_problems.__file__).parent)
    main = importlib.import_module("before_after").main
    with pytest.raises(SystemExit) as error:
        main([str(tmp_path), str(tmp_path / "checkpoint-9"), "held_out.jsonl"])
    assert error.value.code == 2
    assert "checkpoint-9 is missing: train first, with `make real`." in capsys.readouterr().err


# --- the reward ---


@pytest.mark.parametrize(
    ("text", "answer", "reward"),
    [
        ("Ann has 21 apples.", "21", 1),
        ("14 + 7 = 21", "21", 1),
        ("She has 14 + 7 = 21.", "21", 1),
        ("It costs $21.00", "21", 1),
        ("**21**", "21", 1),
        ("1,021 miles", "1021", 1),
        ("He walks 30-9=21 miles", "21", 1),
        ("30-21", "21", 1),
        ("the answer is -21", "21", 0),
        ("21 apples, or 22", "21", 0),
        ("21 of the 30 apples", "21", 0),
        ("21.5", "21", 0),
        ("121", "21", 0),
        ("twenty-one", "21", 0),
        ("x21", "21", 0),
        ("", "21", 0),
        ("9" * 5000, "21", 0),
    ],
)
def test_only_the_last_number_counts(text, answer, reward):
    assert last_number([text], [answer]) == [reward]
    assert last_number([[{"role": "assistant", "content": text}]], [answer], kind=["add"]) == [
        reward
    ]


def test_copying_any_number_of_the_problem_earns_nothing():
    for record in SPLITS["train"]:
        for number in numbers_in(text_of(record)):
            assert last_number([str(number)], [record["answer"]]) == [0]


def test_the_reward_runs_as_a_function_of_the_user():
    runner = Runner(["examples/word_problems.py:last_number"], max_completion_length=8)
    record = SPLITS["train"][0]
    columns = {name: value for name, value in record.items() if name != "prompt"}
    prompt = Prompt(0, record["prompt"], [1], columns=columns)
    samples = [
        Sample(prompt, i, [2], [0.0], True, [0], text=t)
        for i, t in enumerate(("x", record["answer"]))
    ]
    runner.score(samples)
    assert [s.reward for s in samples] == [0, 1]
