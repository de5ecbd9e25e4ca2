"""A tool in a multi-turn exchange: the model writes a sum up to "=", the calculator its result, and
the model goes on.

    python train.py --model runs/base --data arithmetic --rollout nanogrpo.engine.calculator:rollout …

The base model of warmup.py works sums out as `34+5=39,39-7=32`; here what follows each "=" is not
its own any more, and so not trained: it learns to ask and to use the answer, not to add. Read
before: turns.py.
"""

from __future__ import annotations

import re

from nanogrpo.engine.turns import Turns
from nanogrpo.types import Sample

CALL = re.compile(r"(\d{1,9})([+-])(\d{1,9})=$")


def calculate(text: str) -> str:
    """What the calculator answers to a text that ends in "=": "…,39-7=" → "32"; nothing where there
    is no sum before it.
    """
    call = CALL.search(text)
    if call is None:
        return ""
    a, sign, b = call.groups()
    return str(int(a) + int(b) if sign == "+" else int(a) - int(b))


def rollout(samples: list[Sample], turns: Turns) -> None:
    while samples := turns.generate(samples, stop=("=",)):
        for sample in samples:
            turns.observe(sample, calculate(turns.text(sample)))
