"""A tool in a multi-turn rollout: the model writes a sum up to "=", the calculator appends the
result, and the model continues.

    python train.py --model runs/base --data arithmetic --rollout examples/calculator.py:rollout …

The base model of nanogrpo/extras/arithmetic/warmup.py writes sums as `34+5=39,39-7=32`. With this
rollout, the calculator writes the result after each "=", and the model is not trained on these
tokens. The model learns to call the calculator and to use its results, but not to do arithmetic.
For tools that a chat model calls by name, see tools.py. Read first: nanogrpo/extras/tools/turns.py.
"""

from __future__ import annotations

import re

from nanogrpo.extras.tools.turns import Turns
from nanogrpo.types import Sample

CALL = re.compile(r"(\d{1,9})([+-])(\d{1,9})=$")


def calculate(text: str) -> str:
    """Return the result of the sum at the end of a text: "…,39-7=" → "32". If there is no sum,
    return "".
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
