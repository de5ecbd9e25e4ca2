"""The built-in task: `arithmetic`, sums of two to four terms, answered as
`<think>…</think><answer>…</answer>`.

In: a split's name. Out: rows for data.py. Problems are split by a hash of their text, so that a
held-out problem is in no training prompt and in no warm-up text. Read next: warmup.py (the base
model that has something to learn here), rewards.py.
"""

from __future__ import annotations

import hashlib
import random
import re

from nanogrpo.errors import UserError

TASKS = ("arithmetic",)
SIZE = {"train": 8192, "eval": 256}


def problem(rng: random.Random) -> str:
    """A sum of two to four terms whose running total stays between 0 and 99: "34+5-7"."""
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
    """Which split a problem is in, by its text alone: one in eight is held out."""
    return hashlib.blake2b(text.encode()).digest()[0] % 8 == 0


def problems(split: str, count: int, seed: int) -> list[str]:
    """`count` different problems of the split "train" or "eval"."""
    rng, found = random.Random(f"arithmetic,{split},{seed}"), {}
    while len(found) < count:
        text = problem(rng)
        if held_out(text) == (split == "eval"):
            found[text] = None
    return list(found)


def rows(task: str, split: str) -> list[dict]:
    """A built-in data set: {"prompt": [one user message], "answer": "32"}. The same for every run."""
    if task not in TASKS:
        raise UserError(
            f"{task!r} is not a built-in task; use {', '.join(TASKS)}, or a .jsonl or .parquet file."
        )
    found = problems(split, SIZE[split], seed=0)
    return [
        {"prompt": [{"role": "user", "content": f"{text}="}], "answer": str(value(text))}
        for text in found
    ]


def value(text: str) -> int:
    return sum(int(term) for term in re.findall(r"[+-]?\d+", text))
