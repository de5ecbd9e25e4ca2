"""Problems from the package reasoning-gym (`reasoning_gym:NAME:key=value,key=value`).

    --data reasoning_gym:countdown:size=2000,max_numbers=4 --reward-funcs reasoning_gym

In: the name of a data set of reasoning-gym, with arguments such as `size` and `seed`. Out: records
with a question, an answer, and the column `reasoning_gym`. The reward function `reasoning_gym`
reads the problem and the name of its data set from this column of a record. Read next:
extras/gym/reward.py.

Each data set has a verifier, which scores answers. Some verifiers evaluate the answer with Python's
`eval` or with sympy, so a completion could run any program. The data sets with such verifiers are
listed in EVALUATE, and are refused. For the data sets in ARITHMETIC, reward.py passes an answer to
the verifier only if it is plain arithmetic.
"""

from functools import lru_cache
from typing import Any

from nanogrpo.config import Config
from nanogrpo.errors import UserError, reading
from nanogrpo.feature import Feature
from nanogrpo.rewards.plugin import split_arguments

PREFIX = "reasoning_gym:"
# Held-out problems have the seed `seed + HELD_OUT`.
# Problem i is made from `seed + i`, so data sets with close seeds would share problems.
HELD_OUT = 1_000_000_000
EVALUATE = {
    "simple_integration",
    "intermediate_integration",
    "polynomial_multiplication",
    "string_insertion",
    "spiral_matrix",
    "binary_matrix",
    "n_queens",
    "composite",  # composite may contain any other data set
}
ARITHMETIC = {"countdown", "puzzle24"}


class Gym(Feature):
    def __init__(self, cfg: Config):
        names = any(source.startswith(PREFIX) for source in (*cfg.data, *cfg.eval_data))
        if "reasoning_gym" in cfg.reward_funcs and not names:
            raise UserError(
                "--reward-funcs reasoning_gym scores the problems of --data reasoning_gym:NAME, but"
                f" --data is {' '.join(cfg.data)}: pass such a source to --data, or choose other"
                " reward functions."
            )

    def rows(self, source: Any, split: str) -> list[dict] | None:
        ours = isinstance(source, str) and source.startswith(PREFIX)
        return records(source, split != "train") if ours else None

    def reward(self, name: str, *_: Any) -> str | None:
        # this function runs in the process of the user's reward functions
        own = "nanogrpo.extras.gym.reward:reasoning_gym_reward"
        return own if name in ("reasoning_gym", "reasoning_gym_reward") else None


def records(source: str, held_out: bool) -> list[dict]:
    """Return the records of a source that starts with PREFIX. The default seed is 0."""
    name, given = split_arguments(source, "--data")
    # the package raises errors of many types, such as AssertionError
    with reading(source, "correct its name or arguments", "cannot be created"):
        given["seed"] = given.get("seed", 0) + HELD_OUT * held_out
        spec = f"{name}:" + ",".join(f"{key}={value!r}" for key, value in given.items())
        problems = [*dataset(spec)]
    # A record contains the whole problem, because another process may make a different one:
    # a few data sets depend on the order of Python's sets.
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
    """Return the data set of a source, a sequence of problems with a method `score_answer`."""
    try:
        import reasoning_gym
    except ImportError as e:
        raise UserError(
            "a source reasoning_gym:NAME needs the package reasoning-gym: "
            "pip install 'nanogrpo[reasoning]'."
        ) from e
    name, given = split_arguments(source.partition(":")[2], "--data")
    if name in EVALUATE:
        raise UserError(
            f"the verifier of {name} evaluates the answer as Python code, so a completion could run"
            " any program: choose another data set."
        )
    return reasoning_gym.create_dataset(name, **given)
