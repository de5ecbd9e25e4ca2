"""Grade-school word problems with one or two steps, and a reward for them.

    python examples/word_problems.py runs/problems      # writes train.jsonl and held_out.jsonl
    python train.py --data runs/problems/train.jsonl --eval-data runs/problems/held_out.jsonl \\
        --reward-funcs examples/word_problems.py:last_number …

In: the name of a folder. Out: two files of records such as
    {"prompt": [{"role": "user", "content": "Ben has 14 pears and …"}], "answer": "21"}

There are ten kinds of problems with five stories each. The last story of each kind is held out. On
average, one in three pairs of numbers is held out, too. So training problems and held-out problems
share neither stories nor pairs of numbers. The answer is never one of the numbers in the text, so
copying a number is always wrong. Read next: nanogrpo/rewards/call.py (what a reward function
receives).
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import random
import re
import sys
from collections.abc import Callable
from pathlib import Path

INSTRUCTION = "Answer with one short sentence."
SIZE = {"train": 4096, "held_out": 120}

# --- the words ---

WOMEN = "Ada Carla Dina Ella Grace Hana Ines Jill Kate Lily Maya Nora Olga Priya Rosa Tina"
MEN = "Adam Ben Carlos Dan Eric Finn Gus Hugo Ivan Jack Karl Leo Omar Paul Sam Tom"
PEOPLE = [
    *((name, "she", "her", "her") for name in WOMEN.split()),
    *((name, "he", "him", "his") for name in MEN.split()),
]
WORDS = {
    "toys": "marbles stickers stamps coins shells beads buttons cards badges pencils",
    "fruit": "apples pears plums lemons peaches oranges mangoes figs",
    "baked": "muffins cookies rolls pies buns bagels waffles",
    "birds": "pigeons sparrows crows gulls doves starlings",
    "animals": "ducks frogs turtles goldfish geese",
    "flowers": "tulips roses lilies daisies sunflowers",
    "clothes": "shirts hats scarves belts sweaters",
    "box": "box bag basket jar crate",
}

# --- each kind of problem: a function for the answer, ranges of the numbers, five stories ---

Kind = tuple[Callable, list[range], list[str]]
KINDS: dict[str, Kind] = {
    "add": (
        lambda a, b: a + b,
        [range(2, 16), range(2, 13)],
        [
            "{A} has {a} {toys}. {B} gives {him} {b} more. How many {toys} does {A} have now?",
            "There are {a} {birds} on a roof. Then {b} more land next to them. How many {birds} "
            "are on the roof now?",
            "{A} picked {a} {fruit} in the morning and {b} {fruit} in the afternoon. How many "
            "{fruit} did {he} pick that day?",
            "A bus is carrying {a} people. At the next stop {b} people get on and nobody gets "
            "off. How many people are on the bus now?",
            "{A} read {a} pages on Saturday and {b} pages on Sunday. How many pages did {he} read "
            "that weekend?",
        ],
    ),
    "take away": (
        lambda a, b: a - b,
        [range(5, 21), range(2, 10)],
        [
            "{A} had {a} {toys} and gave {b} of them to {B}. How many {toys} does {A} have left?",
            "A baker made {a} {baked} and sold {b} of them before noon. How many {baked} are left?",
            "There were {a} {fruit} in a bowl. {A} used {b} of them for a cake. How many {fruit} "
            "are still in the bowl?",
            "{A} has to drive {a} miles and has already driven {b} miles. How many miles are left?",
            "A library owned {a} comics, but {b} of them got wet and were thrown away. How many "
            "comics does the library still own?",
        ],
    ),
    "more than": (
        lambda a, b: a + b,
        [range(3, 16), range(2, 10)],
        [
            "{A} has {a} {toys}. {B} has {b} more than {A}. How many {toys} does {B} have?",
            "{A} is {a} years old. {His} uncle is {b} years older. How old is {his} uncle?",
            "A red rope is {a} feet long. A blue rope is {b} feet longer. How many feet long is "
            "the blue rope?",
            "{A} planted {a} {flowers}, which is {b} fewer than {B} planted. How many {flowers} "
            "did {B} plant?",
            "Last week a shop sold {a} {clothes}. This week it sold {b} more than last week. How "
            "many {clothes} did it sell this week?",
        ],
    ),
    "difference": (
        lambda a, b: a - b,
        [range(5, 21), range(2, 10)],
        [
            "{A} has {a} {toys} and {B} has {b}. How many more {toys} does {A} have than {B}?",
            "One tower of blocks is {a} inches tall and another is {b} inches tall. How many "
            "inches taller is the first tower?",
            "{A} needs {a} {fruit} for a party but has only {b}. How many more {fruit} does {he} "
            "need?",
            "The blue team scored {a} points and the red team scored {b} points. By how many "
            "points did the blue team win?",
            "A coat costs {a} dollars and a hat costs {b} dollars. How many dollars more does the "
            "coat cost?",
        ],
    ),
    "groups": (
        lambda a, b: a * b,
        [range(2, 11), range(2, 11)],
        [
            "{A} has {a} {boxes}. Each {box} holds {b} {toys}. How many {toys} does {he} have?",
            "A hall has {a} rows of chairs with {b} chairs in each row. How many chairs are in "
            "the hall?",
            "{A} plants {a} rows of {flowers} with {b} {flowers} in each row. How many {flowers} "
            "does {he} plant?",
            "A baker packs {a} {boxes} of {baked} with {b} {baked} in each {box}. How many {baked} "
            "does the baker pack?",
            "{A} bakes {a} trays of {baked}, with {b} {baked} on each tray. How many {baked} does "
            "{he} bake?",
        ],
    ),
    "price": (
        lambda a, b: a * b,
        [range(2, 11), range(2, 11)],
        [
            "One ticket costs {b} dollars. How many dollars do {a} tickets cost?",
            "{A} buys {a} {clothes} for {b} dollars each. How many dollars does {he} pay?",
            "A shop sells {toys} for {b} dollars each. How many dollars does {A} pay for {a} "
            "{toys}?",
            "Each {box} of {fruit} costs {b} dollars. How many dollars do {a} {boxes} cost?",
            "{A} rents a bike for {b} dollars an hour. How many dollars does {he} pay for {a} "
            "hours?",
        ],
    ),
    "rate": (
        lambda a, b: a * b,
        [range(2, 11), range(2, 11)],
        [
            "{A} walks {b} miles every day. How many miles does {he} walk in {a} days?",
            "{A} reads {b} pages every evening. How many pages does {he} read in {a} evenings?",
            "A machine fills {b} bottles every minute. How many bottles does it fill in {a} "
            "minutes?",
            "{A} saves {b} dollars every week. How many dollars does {he} save in {a} weeks?",
            "A cow gives {b} liters of milk every day. How many liters does it give in {a} days?",
        ],
    ),
    "times as many": (
        lambda a, b: a * b,
        [range(2, 11), range(2, 11)],
        [
            "{A} has {a} {toys}. {B} has {b} times as many. How many {toys} does {B} have?",
            "A kitten weighs {a} pounds. A dog weighs {b} times as much. How many pounds does the "
            "dog weigh?",
            "{A} picked {a} {fruit}. {B} picked {b} times as many. How many {fruit} did {B} pick?",
            "A cup costs {a} dollars. A pot costs {b} times as much. How many dollars does the "
            "pot cost?",
            "A small bus carries {a} people. A large bus carries {b} times as many. How many "
            "people does the large bus carry?",
        ],
    ),
    "gain and lose": (
        lambda a, b, c: a + b - c,
        [range(3, 13), range(2, 10), range(2, 10)],
        [
            "{A} had {a} {toys}, bought {b} more and then lost {c}. How many {toys} does {he} "
            "have now?",
            "A bus is carrying {a} people. At a stop {b} people get on and {c} people get off. "
            "How many people are on the bus now?",
            "{A} had {a} dollars, earned {b} dollars and spent {c} dollars. How many dollars does "
            "{he} have now?",
            "A pond had {a} {animals}. The keeper added {b} and later sold {c}. How many "
            "{animals} are in the pond now?",
            "A shelf held {a} books. {A} put {b} more books on it, and {B} took {c} away. How "
            "many books are on the shelf now?",
        ],
    ),
    "multiply and add": (
        lambda a, b, c: a * b + c,
        [range(2, 6), range(2, 8), range(2, 10)],
        [
            "{A} has {a} {boxes} with {b} {toys} in each, and {c} loose {toys}. How many {toys} "
            "does {he} have?",
            "{A} buys {a} {clothes} for {b} dollars each and an umbrella for {c} dollars. How "
            "many dollars does {he} pay?",
            "A hall has {a} rows of {b} chairs and {c} more chairs along the wall. How many "
            "chairs does it have?",
            "{A} ran {b} miles on each of {a} days and {c} miles on the day after. How many miles "
            "did {he} run in all?",
            "A farmer has {a} {boxes} of {b} {fruit} each and {c} more {fruit} in a bowl. How "
            "many {fruit} does the farmer have?",
        ],
    ),
}


def is_held_out(a: int, b: int) -> bool:
    """Return whether a pair of numbers is held out, regardless of their order. On average, one pair
    in three is held out.
    """
    text = f"{min(a, b)},{max(a, b)}"
    return hashlib.blake2b(text.encode()).digest()[0] % 3 == 0


def numbers_for(kind: str, held_out: bool, rng: random.Random) -> tuple[list[int], int]:
    """Return numbers for a problem of this kind, and the answer.

    Either all pairs of these numbers are held out, or none of them is. The answer is a whole
    number, is at least 2, and is not one of the numbers.
    """
    answer_of, ranges, _ = KINDS[kind]
    while True:
        numbers = [rng.choice(values) for values in ranges]
        answer = answer_of(*numbers)
        pairs = itertools.combinations(numbers, 2)
        if (
            all(is_held_out(*pair) == held_out for pair in pairs)
            and answer == int(answer) >= 2
            and answer not in numbers
        ):
            return numbers, int(answer)


def tell(story: str, numbers: list[int], rng: random.Random) -> str:
    """Return the text of a story with these numbers and random names and objects."""
    (name, he, him, his), (other, *_) = rng.sample(PEOPLE, 2)
    words = {slot: rng.choice(choices.split()) for slot, choices in WORDS.items()}
    boxes = words["box"] + ("es" if words["box"].endswith("x") else "s")
    people = {"A": name, "B": other, "he": he, "him": him, "his": his}
    people |= {"He": he.capitalize(), "His": his.capitalize()}
    return story.format(**people, **words, boxes=boxes, **dict(zip("abc", numbers)))


def problems(split: str, count: int, seed: int = 0) -> list[dict]:
    """Return `count` different problems, which cycle through the kinds. `split` is "train" or
    "held_out".
    """
    rng = random.Random(f"word problems,{split},{seed}")
    held_out = split == "held_out"
    found: dict[str, dict] = {}  # by text
    for kind in itertools.cycle(KINDS):
        if len(found) == count:
            return list(found.values())
        *stories, last = KINDS[kind][2]
        while True:
            numbers, answer = numbers_for(kind, held_out, rng)
            text = tell(last if held_out else rng.choice(stories), numbers, rng)
            if text not in found:
                break
        messages = [{"role": "user", "content": f"{text} {INSTRUCTION}"}]
        found[text] = {"prompt": messages, "answer": str(answer), "kind": kind}
    raise AssertionError  # not reached: `cycle` never ends


# --- the reward ---

NUMBER = re.compile(r"(?<!\w)-?\d[\d,]*(?:\.\d+)?")  # in "20-21", the "-" is not a minus sign


def last_number(completions: list, answer: list, **kwargs) -> list[float]:
    """Return 1 for each completion whose last number is the answer, else 0."""
    return [float(_last(completion) == float(a)) for completion, a in zip(completions, answer)]


def _last(completion: str | list[dict]) -> float | None:
    text = completion if isinstance(completion, str) else completion[-1]["content"]
    found = NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="where to write train.jsonl and held_out.jsonl")
    folder = parser.parse_args(argv).folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        parser.error(f"{folder} cannot be made ({e.strerror}): name another folder.")
    for split, count in SIZE.items():
        lines = [json.dumps(record) + "\n" for record in problems(split, count)]
        (folder / f"{split}.jsonl").write_text("".join(lines))
        print(f"{folder}/{split}.jsonl: {count} problems")
    return 0


if __name__ == "__main__":
    sys.exit(main())
