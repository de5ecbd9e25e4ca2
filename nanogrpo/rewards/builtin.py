"""Define the built-in reward functions, and load any reward function by its name.

In: completions and the columns of the data, as lists (rewards/call.py defines the signature). Out:
a number or None for each completion. The functions have the same names as in TRL (trl.rewards), and
the logs use these names, too. The functions return the same values as in TRL, except that
`accuracy_reward` understands more notations (docs/rewards.md). `format` is our own function. Read
next: rewards/answers.py (what counts as an answer), rewards/scorer.py, which calls the functions.
"""

import difflib
import re
from collections.abc import Callable, Sequence
from typing import Any

from nanogrpo.errors import UserError
from nanogrpo.rewards import plugin, symbolic
from nanogrpo.rewards.answers import compare, extract_answer, extract_reference

# --- answers ---


def accuracy_reward(
    completions: list, solution: list | None = None, answer: list | None = None, **kwargs
) -> list[float | None]:
    """Return 1 if the extracted answer equals the reference, and 0 if it differs or is missing.

    The reference is the record's `solution`, or else its `answer`: a plain result ("42" or 42), or
    a text from which `extract_answer` can extract the result. If no answer is marked in the
    solution, and `answer` is shorter, `answer` is used. The reward is None if a record has neither
    `solution` nor `answer`, or if math-verify did not compare the two (rewards/symbolic.py).
    """
    blank = [None] * len(completions)
    pairs = []
    for completion, *cells in zip(completions, solution or blank, answer or blank):
        references = [str(cell) for cell in cells if not is_empty(cell)]
        given = extract_answer(text_of(completion)) or ""
        pairs.append((given, extract_reference(*references)) if references else None)
    return [None if verdict is None else float(verdict) for verdict in same_answers(pairs)]


def is_empty(cell: Any) -> bool:
    """Return whether a value is missing: null, an empty string (in CSV) or NaN (in pandas)."""
    return cell is None or cell != cell or not str(cell).strip()  # only NaN differs from itself


def same_answers(pairs: Sequence[tuple[str, str] | None]) -> list[bool | None]:
    """Return for each pair (answer, reference) whether the two are equal. The result is None if the
    pair is None or was not compared.
    """
    # a dictionary, because a group often repeats an answer
    verdicts: dict[Any, bool | None] = {pair: compare(*pair) for pair in pairs if pair}
    verdicts |= symbolic.equal([pair for pair, verdict in verdicts.items() if verdict is None])
    return [verdicts.get(pair) for pair in pairs]


# --- formats ---


NO_TAG = r"(?:(?!</?(?:think|answer)>).)*"
FORMAT = re.compile(
    rf"(?:<think>)?{NO_TAG}</think>\s*<answer>(?!\s*</answer>){NO_TAG}</answer>", re.DOTALL
)


def format_reward(completions: list, **kwargs) -> list[float]:
    """Return 1 for exactly `<think>…</think><answer>…</answer>` with a non-empty answer, else 0.

    White space around the tags is allowed. Each tag may occur only once, because a second <answer>
    would allow a second guess. The first <think> may be missing, because some chat templates end
    the prompt with it.
    """
    return [
        float(bool(FORMAT.fullmatch(text_of(completion).strip()))) for completion in completions
    ]


def text_of(completion: str | list[dict]) -> str:
    if isinstance(completion, str):
        return completion
    thought = completion[-1].get("reasoning_content")  # some templates store it separately
    return f"<think>{thought}</think>" * bool(thought) + completion[-1]["content"]


# --- functions by name ---

BUILT_IN: dict[str, Callable] = {
    "accuracy": accuracy_reward,
    "format": format_reward,
}
NEED_ANSWERS: set[Callable] = {accuracy_reward}


def is_users(spec: str) -> bool:
    """Return whether `spec` names a user's function, which runs in a separate process.

    A name without a module or file is a built-in function or a mistake.
    """
    return ":" in plugin.split_arguments(spec)[0]


def load_function(spec: str) -> Callable:
    """Return the function that `spec` names.

    `spec` is a name in BUILT_IN, TRL's name for such a function, "package.module:name" or
    "path/to/file.py:name", with or without arguments (rewards/plugin.py). Raises UserError if there
    is no such function.
    """
    if is_users(spec):
        return plugin.load_reward(spec)
    name, arguments = plugin.split_arguments(spec)
    function = BUILT_IN.get(name.removesuffix("_reward"))  # the suffix of TRL's names
    if function is None:
        near = difflib.get_close_matches(name, BUILT_IN, n=1)
        raise UserError(
            f"--reward-funcs: {name!r} is unknown; give package.module:name, path/file.py:name, or "
            f"one of {', '.join(BUILT_IN)}, … (docs/rewards.md)"
            + (f"; did you mean {near[0]}?" if near else "")
        )
    return plugin.bind(function, arguments, spec)
