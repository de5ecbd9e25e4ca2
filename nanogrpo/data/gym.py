"""Problems of the package reasoning-gym, as the source `reasoning_gym:NAME:key=value,key=value`.

    --data reasoning_gym:countdown:size=2000,max_numbers=4 --reward-funcs reasoning_gym

In: the name of a data set of that package, with arguments such as `size` and `seed`. Out: records
with a question, an answer, and the column `reasoning_gym`, from which the reward function of the
same name takes the problem and the verifier of its data set. Read next: rewards/reasoning_gym.py.
"""

from __future__ import annotations

import dataclasses
import difflib
import logging
from functools import lru_cache
from typing import Any

from nanogrpo.arguments import parse_arguments
from nanogrpo.errors import UserError

log = logging.getLogger("nanogrpo")

PREFIX = "reasoning_gym:"
# Added to the seed of held-out problems. Problem i of a data set is made from `seed + i`, so data
# sets with seeds that are close together share problems.
HELD_OUT = 1_000_000_000


def records(source: str, held_out: bool, most: int = 0) -> list[dict]:
    """Return the records of a source that starts with PREFIX, at most the first `most` unless that
    is 0, because some kinds take long. The default seed is 0.
    """
    try:
        name, given = parse(source)
        seed = given.get("seed", 0)
        if type(seed) is not int or not 0 <= seed < HELD_OUT:
            raise UserError(f"seed is {seed!r}: give a whole number from 0 to {HELD_OUT - 1}.")
        given |= {"seed": seed + HELD_OUT if held_out else seed}
        made = ",".join(f"{key}={value!r}" for key, value in given.items())
        spec = f"{PREFIX}{name}:{made}"
        data = dataset(spec)
        count = min(len(data), most or len(data))
        log.info("%s: making %s problems", source, f"{count:,}")
        problems = [data[i] for i in range(count)]
    except UserError as e:
        raise UserError(f"{source}: {e}") from e
    except Exception as e:  # the package raises errors of many types, also AssertionError
        reason = " ".join(str(e).split()) or type(e).__name__
        raise UserError(f"{source} cannot be made ({reason}): correct its arguments.") from e
    # The problem is kept as a whole, because a few data sets would make a different one in another
    # process: they depend on the order of Python's sets.
    return [
        {
            "question": problem["question"],
            "answer": problem["answer"],
            "reasoning_gym": {"source": spec, "problem": problem},
        }
        for problem in problems
    ]


@lru_cache(maxsize=16)
def dataset(source: str) -> Any:
    """Return the data set of a source: a sequence of problems, with `score_answer`."""
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as e:
        raise UserError(
            "this needs the package reasoning-gym: pip install 'nanogrpo[reasoning]'."
        ) from e
    name, given = parse(source)
    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, n=3) or sorted(DATASETS)
        raise UserError(
            f"reasoning-gym has no data set {name!r}: choose another, for example "
            f"{', '.join(near)}."
        )
    known = [field.name for field in dataclasses.fields(DATASETS[name][1])]
    for key in given:
        if key not in known:
            raise UserError(f"{name} has no argument {key!r}: choose among {', '.join(known)}.")
    return reasoning_gym.create_dataset(name, **given)


def parse(source: str) -> tuple[str, dict[str, Any]]:
    """Return the name and the arguments of a source.

    >>> parse('reasoning_gym:countdown:size=20,operators=("+", "-")')
    ('countdown', {'size': 20, 'operators': ('+', '-')})
    """
    name, _, text = source.removeprefix(PREFIX).partition(":")
    try:
        return name, parse_arguments(text)
    except ValueError:
        raise UserError(
            f"{text!r} cannot be read: write reasoning_gym:NAME:key=value,key=value."
        ) from None
