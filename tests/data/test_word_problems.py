"""Tests of the word problems in examples/: right answers, good English, and a split without
overlap. Read next: examples/word_problems.py.
"""

import itertools
import re
import string
from operator import add, mul, sub

import pytest

from examples import word_problems
from examples.word_problems import INSTRUCTION, KINDS, last_number, problems
from tests.conftest import read_rows, said
from tests.rewards.answer_table import rows

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
    "add": add,
    "take away": sub,
    "more than": add,
    "difference": sub,
    "groups": mul,
    "price": mul,
    "rate": mul,
    "times as many": mul,
    "gain and lose": lambda a, b, c: a + b - c,
    "multiply and add": lambda a, b, c: a * b + c,
}


def test_the_answer_is_right_and_is_not_in_the_text():
    for record in [*SPLITS["train"], *SPLITS["held_out"]]:
        text, answer = text_of(record), int(record["answer"])
        numbers = numbers_in(text)
        assert AGAIN[record["kind"]](*numbers) == answer > 1, text
        assert answer not in numbers, text


def test_the_same_problems_are_written_every_time(tmp_path, capsys):
    assert word_problems.main([str(tmp_path)]) == 0
    for split, count in word_problems.SIZE.items():
        assert read_rows(tmp_path / f"{split}.jsonl") == problems(split, count)
        assert f"{split}.jsonl: {count} problems" in capsys.readouterr().out or split != "train"


# --- the reward ---


LAST_NUMBERS = rows(r"""
Ann has 21 apples. == 21
14 + 7 = 21 == 21
She has 14 + 7 = 21. == 21
It costs $21.00 == 21
**21** == 21
1,021 miles == 1021
He walks 30-9=21 miles == 21
30-21 == 21
the answer is -21 != 21
21 apples, or 22 != 21
21 of the 30 apples != 21
21.5 != 21
121 != 21
twenty-one != 21
x21 != 21
 != 21
""")


@pytest.mark.parametrize(("text", "answer", "right"), [*LAST_NUMBERS, ("9" * 5000, "21", False)])
def test_only_the_last_number_counts(text, answer, right):
    assert last_number([text], [answer]) == [right]
    assert last_number([said(text, "assistant")], [answer], kind=["add"]) == [right]
