"""The built-in reward functions, and loading any reward function by its name.

In: completions and the columns of the data, as lists (rewards/call.py defines the signature). Out:
for each completion, a number or None. The functions have the names of TRL's (trl.rewards), so the
logs do too, and return the same values, except that `accuracy_reward` reads more notations
(docs/rewards.md). `format` and the names `length` and `length:N` are our own. Read next:
rewards/answers.py (what counts as an answer), rewards/runner.py, which calls the functions.
"""

from __future__ import annotations

import difflib
import functools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

from nanogrpo.errors import UserError
from nanogrpo.rewards import plugin, symbolic
from nanogrpo.rewards.answers import (
    compare,
    extract_answer,
    extract_reference,
    latex,
    without_label,
)

# --- answers ---


def accuracy_reward(
    completions: list, solution: list | None = None, answer: list | None = None, **kwargs
) -> list[float | None]:
    """Return 1 where the extracted answer equals the reference, 0 where it differs or is missing.

    The reference is the record's `solution`, or else its `answer`: a bare result ("42", 42) or a
    text from which `extract_answer` can extract one. A shorter `answer` comes before a solution in
    which no answer is marked. The reward is None where a record has neither, or where math-verify
    had no time left to decide.
    """
    blank = [None] * len(completions)
    rewards: list[float | None] = []
    pairs = {}  # by the index of the completion
    for i, (completion, *cells) in enumerate(zip(completions, solution or blank, answer or blank)):
        references = [str(cell) for cell in cells if not is_empty(cell)]
        given = extract_answer(_text(completion))
        rewards.append(0.0 if references else None)
        if references and given is not None:
            pairs[i] = (given, extract_reference(*references))
    for i, verdict in zip(pairs, same_answers(list(pairs.values()))):
        rewards[i] = None if verdict is None else float(verdict)
    return rewards


def reasoning_accuracy_reward(
    completions: list,
    solution: list | None = None,
    answer: list | None = None,
    reasoning_delimiters: Sequence[str] = ("</think>",),
    **kwargs,
) -> list[float | None]:
    """Return `accuracy_reward` of the text after the reasoning, and 0 if the reasoning never ends.

    reasoning_delimiters: the first of them that a completion contains ends its reasoning.
    """
    answers = []
    for text in map(_text, completions):
        end = next((d for d in reasoning_delimiters if d in text), None)
        answers.append(text.rpartition(end)[2] if end else "")
    return accuracy_reward(answers, solution, answer)


def is_empty(cell: Any) -> bool:
    """Return whether a record lacks this value: null, the empty text of CSV, or NaN of pandas."""
    is_nan = isinstance(cell, float) and math.isnan(cell)
    return cell is None or is_nan or not str(cell).strip()


def same_answers(pairs: Sequence[tuple[str, str]]) -> list[bool | None]:
    """Return whether each (answer, reference) is equal; None if there was no time to decide."""
    verdicts = [compare(*pair) for pair in pairs]
    undecided = [
        (latex(answer), latex(without_label(wanted)))
        for (answer, wanted), verdict in zip(pairs, verdicts)
        if verdict is None
    ]
    decided = iter(symbolic.equal(undecided))
    return [next(decided) if verdict is None else verdict for verdict in verdicts]


# --- formats ---


NO_TAG = r"(?:(?!</?(?:think|answer)>).)*"
FORMAT = re.compile(
    rf"(?:<think>)?{NO_TAG}</think>\s*<answer>(?!\s*</answer>){NO_TAG}</answer>", re.DOTALL
)


def format_reward(completions: list, **kwargs) -> list[float]:
    """Return 1 for exactly `<think>…</think><answer>…</answer>` with a non-empty answer, else 0.

    White space around the tags is allowed. Each tag may occur once, because a completion that opens
    a second <answer> is hedging. <think> may be missing, because some chat templates end the prompt
    with it.
    """
    return [float(bool(FORMAT.fullmatch(_text(completion).strip()))) for completion in completions]


def think_format_reward(completions: list, **kwargs) -> list[float]:
    """Return 1 for a completion that starts with <think>, its only one, and has a </think>."""
    return [
        float(text.startswith("<think>") and text.count("<think>") == 1 and "</think>" in text)
        for text in map(_text, completions)
    ]


# --- lengths and repetition: factories, whose arguments follow the name ---
# The arguments are positional-only parameters of the reward functions, because the data may have
# columns of the same names.


def get_soft_overlong_punishment(
    max_completion_len: int, soft_punish_cache: float | None = None
) -> Callable:
    """Return DAPO's soft overlong punishment (Yu et al. 2025, eq. 13).

    max_completion_len, soft_punish_cache: in tokens. The cache is a fifth of the length by default,
    as in the paper.
    """
    _numbers(locals())
    cache = max_completion_len / 5 if soft_punish_cache is None else soft_punish_cache
    if not (max_completion_len > 0 and 0 <= cache <= max_completion_len):
        raise UserError(
            f"--reward-funcs: max_completion_len is {max_completion_len} and soft_punish_cache is "
            f"{cache:g}: the first must be positive, and the second between 0 and the first"
        )
    return functools.partial(soft_overlong_punishment_reward, max_completion_len, cache)


def soft_overlong_punishment_reward(
    limit: int, cache: float, /, *, completion_ids: list[list[int]], **kwargs
) -> list[float]:
    """Return 0 up to `limit` - `cache` tokens, falling linearly to -1 at `limit`.

    It depends on one completion only: if it compared a completion with the longest one in its
    batch, the same text would get different rewards in different steps.
    """
    return [
        0.0 if len(ids) <= limit - cache
        else (limit - cache - len(ids)) / cache if len(ids) <= limit
        else -1.0
        for ids in completion_ids
    ]  # fmt: skip


def get_cosine_scaled_reward(
    max_len: int,
    min_value_wrong: float = -1.0,
    max_value_wrong: float = -0.5,
    min_value_correct: float = 0.5,
    max_value_correct: float = 1.0,
) -> Callable:
    """Return accuracy scaled by the length (Yeo et al. 2025, appendix C.1).

    From 0 to max_len tokens, a right answer falls from max_value_correct to min_value_correct, and
    a wrong one rises from min_value_wrong to max_value_wrong, both along half a cosine wave.
    """
    _numbers(locals())
    if not max_len > 0:
        raise UserError(f"--reward-funcs: max_len is {max_len}: it must be positive")
    right, wrong = (max_value_correct, min_value_correct), (min_value_wrong, max_value_wrong)
    return functools.partial(cosine_scaled_reward, max_len, right, wrong)


def cosine_scaled_reward(
    max_len: int,
    right: tuple[float, float],
    wrong: tuple[float, float],
    /,
    *,
    completions: list,
    completion_ids: list[list[int]],
    **kwargs,
) -> list[float | None]:
    """Return a value between those at length 0 and at max_len, which differ for right and wrong."""
    rewards: list[float | None] = []
    for correct, ids in zip(accuracy_reward(completions, **kwargs), completion_ids):
        short, long = right if correct else wrong
        wave = 1.0 + math.cos(min(len(ids) / max_len, 1.0) * math.pi)  # from 2 to 0
        rewards.append(None if correct is None else long + 0.5 * (short - long) * wave)
    return rewards


def get_repetition_penalty_reward(ngram_size: int = 3, max_penalty: float = -1.0) -> Callable:
    """Return a penalty for repeated n-grams of tokens (Yeo et al. 2025, appendix C.2)."""
    _numbers(locals())
    if not isinstance(ngram_size, int):
        raise UserError(f"--reward-funcs: ngram_size is {ngram_size}: it must be a whole number")
    if not (ngram_size > 0 and max_penalty <= 0):
        raise UserError(
            f"--reward-funcs: ngram_size is {ngram_size} and max_penalty is {max_penalty}: the "
            "first must be positive, and the second must not be"
        )
    return functools.partial(repetition_penalty_reward, ngram_size, max_penalty)


def repetition_penalty_reward(
    n: int, max_penalty: float, /, *, completion_ids: list[list[int]], **kwargs
) -> list[float]:
    """Return max_penalty times the share of the n-grams that occurred before."""
    rewards = []
    for ids in completion_ids:
        grams = list(zip(*(ids[i:] for i in range(n))))
        repeated = 1 - len(set(grams)) / len(grams) if grams else 0.0
        rewards.append(repeated * max_penalty if repeated else 0.0)  # never -0.0
    return rewards


def _numbers(arguments: dict) -> None:
    for name, value in arguments.items():
        if not isinstance(value, int | float | None):
            raise UserError(f"--reward-funcs: {name} is {value!r}: it must be a number")


def _text(completion: str | list[dict]) -> str:
    if isinstance(completion, str):
        return completion
    thought = completion[-1].get("reasoning_content")  # tools separate it
    return f"<think>{thought}</think>" * bool(thought) + completion[-1]["content"]


# --- functions by name ---

BUILT_IN: dict[str, Callable] = {
    "accuracy": accuracy_reward,
    "reasoning_accuracy": reasoning_accuracy_reward,
    "format": format_reward,
    "think_format": think_format_reward,
    "soft_overlong": get_soft_overlong_punishment,
    "cosine": get_cosine_scaled_reward,
    "repetition_penalty": get_repetition_penalty_reward,
}
BY_NAME = BUILT_IN | {function.__name__: function for function in BUILT_IN.values()}
# Functions that need a package or more protection. They run in the process of the user's functions.
ELSEWHERE = {"reasoning_gym": "nanogrpo.rewards.reasoning_gym:reasoning_gym_reward"}
NEED_ANSWERS = (accuracy_reward, reasoning_accuracy_reward, get_cosine_scaled_reward)


def _name(spec: str) -> str:
    return spec.partition(":")[0]


def full_name(spec: str) -> str:
    """Return module:name for a name in ELSEWHERE, and any other spec unchanged."""
    return ELSEWHERE.get(spec, spec)


def is_users(spec: str) -> bool:
    """Return whether `spec` names a user's function, which runs in a process of its own.

    A name without a module or file is a built-in one, or a mistake.
    """
    return ":" in plugin.split_arguments(spec)[0] and _name(spec) not in ("length", "model")


def needs_answers(spec: str) -> bool:
    """Return whether the function compares answers with the column `solution` or `answer`."""
    return BY_NAME.get(_name(spec)) in NEED_ANSWERS


def load_function(spec: str, max_completion_length: int = 512) -> Callable:
    """Return the function that `spec` names.

    spec: a name in BUILT_IN or TRL's name for it, "package.module:name" or "path/to/file.py:name",
    with or without arguments (rewards/plugin.py). A limit on the length is `max_completion_length`
    by default. "length:TOKENS" is an older spelling of soft_overlong. Raises UserError if there is
    no such function.
    """
    spec = full_name(spec)
    name, arguments = plugin.split_arguments(spec)
    if _name(name) == "length":
        name, arguments = "soft_overlong", _length(name, arguments)
    if name not in BY_NAME:
        near = difflib.get_close_matches(_name(name), [*BY_NAME, *ELSEWHERE, "length"], n=1)
        if "." in name and ":" not in name:  # as in TRL's command line
            near = [":".join(name.rsplit(".", 1))]
        hint = f", nor one of {', '.join([*BUILT_IN, *ELSEWHERE])} or model:FOLDER"
        return plugin.load_reward(spec, f"{hint}; did you mean {near[0]}?" if near else hint)
    function = BY_NAME[name]
    if function in NEED_ANSWERS:
        symbolic.check_installed(name)
    limit = {
        get_soft_overlong_punishment: "max_completion_len",
        get_cosine_scaled_reward: "max_len",
    }.get(function)
    if limit:
        arguments = {limit: max_completion_length, **arguments}
    return plugin.bind(function, arguments, spec)


def _length(spec: str, arguments: dict) -> dict:
    _, colon, limit = spec.partition(":")
    if colon and not (limit.isdecimal() and int(limit)):
        raise UserError(
            f"--reward-funcs: {spec!r} must have a positive number of tokens after the colon, "
            "e.g. length:512"
        )
    return arguments | ({"max_completion_len": int(limit)} if colon else {})
