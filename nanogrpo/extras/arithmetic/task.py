"""The built-in task `arithmetic`: sums of two to four terms, answered as
`<think>…</think><answer>…</answer>`.

    nanogrpo warmup runs/base
    nanogrpo train --model runs/base --data arithmetic

In: the name of a split, "train" or "eval". Out: records for data/prompts.py. A hash of a problem's
text decides its split, so no held-out problem occurs in a training prompt or a warm-up text. Read
next: warmup.py (a base model that can still improve on this task), rewards/builtin.py.
"""

import hashlib
import random
import re

NAME = "arithmetic"
SIZE = {"train": 8192, "eval": 256}


def problem(rng: random.Random) -> str:
    """Return a sum of two to four terms, such as "34+5-7", whose partial sums are from 0 to 99."""
    while True:
        total = rng.randint(10, 89)
        text = str(total)
        for _ in range(rng.randint(1, 3)):
            term = rng.choice([-1, 1]) * rng.randint(1, 9)
            total += term
            text += f"{term:+d}"
            if not 0 <= total <= 99:
                break
        else:
            return text


def held_out(text: str) -> bool:
    """Return whether a problem is held out. A hash of its text decides this: one problem in eight
    is held out.
    """
    return hashlib.blake2b(text.encode()).digest()[0] % 8 == 0


def problems(split: str, count: int, seed: int) -> list[str]:
    """Return `count` different problems of the split "train" or "eval"."""
    rng = random.Random(f"arithmetic,{split},{seed}")
    found: dict[str, None] = {}  # a dict that is used as an ordered set
    while len(found) < count:
        text = problem(rng)
        if held_out(text) == (split == "eval"):
            found[text] = None
    return list(found)


def records(split: str) -> list[dict]:
    """Return records {"prompt": [one message], "answer": "32"}; every run gets the same records."""
    return [
        {"prompt": [{"role": "user", "content": f"{text}="}], "answer": str(value(text))}
        for text in problems(split, SIZE[split], seed=0)
    ]


def value(text: str) -> int:
    """Return the result of a problem."""
    return sum(int(term) for term in re.findall(r"[+-]?\d+", text))
