"""The built-in reward functions, and loading any reward function by its name.

In: completions and the columns of the data, as lists (rewards/call.py defines the signature). Out:
for each completion, a number or None. Read next: rewards/runner.py, which calls them.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable
from fractions import Fraction

from nanogrpo.errors import UserError
from nanogrpo.rewards import plugin

# --- the functions ---


def format_reward(completions: list, **kwargs) -> list[float]:
    """Return 1 for exactly `<think>…</think><answer>…</answer>` with a non-empty answer, else 0.

    White space around the tags is allowed. Each tag may occur once, because a completion that opens
    a second <answer> is hedging. <think> may be missing, because some chat templates end the prompt
    with it.
    """
    return [float(_is_formatted(_text(completion).strip())) for completion in completions]


def _is_formatted(text: str) -> bool:
    if text.count("<think>") > 1 or text.find("<think>") > 0:  # only at the very start
        return False
    if any(text.count(tag) != 1 for tag in ("</think>", "<answer>", "</answer>")):
        return False
    rest = text.partition("</think>")[2].strip()
    answer = rest.removeprefix("<answer>").removesuffix("</answer>")
    return rest == f"<answer>{answer}</answer>" and bool(answer.strip())


def accuracy_reward(
    completions: list, solution: list | None = None, answer: list | None = None, **kwargs
) -> list[float | None]:
    """Return 1 where the extracted answer equals the reference, 0 where it differs or is missing.

    The reference is the record's `solution`, or else its `answer`: a bare result ("42", 42) or a
    text from which `extract_answer` can extract one. The reward is None where a record has neither.
    """
    blank = [None] * len(completions)
    rewards: list[float | None] = []
    for completion, first, second in zip(completions, solution or blank, answer or blank):
        reference = second if first is None else first
        if reference is None:
            rewards.append(None)
            continue
        expected, given = extract_answer(str(reference)), extract_answer(_text(completion))
        expected = str(reference) if expected is None else expected
        rewards.append(float(given is not None and same_answer(given, expected)))
    return rewards


def length_reward(limit: int = 512, /, *, completion_ids: list[list[int]], **kwargs) -> list[float]:
    """Return DAPO's soft overlong punishment (Yu et al. 2025, eq. 13).

    It is 0 up to 4/5 of `limit` tokens (the paper's cache is limit / 5) and falls linearly to -1 at
    `limit`. It depends on one completion only: if it compared a completion with the longest one in
    its batch, the same text would get different rewards in different steps. `limit` is
    positional-only, because the data may have a column of that name.
    """
    cache = limit / 5
    return [max(-1.0, min(0.0, (limit - cache - len(ids)) / cache)) for ids in completion_ids]


# --- extracting and comparing answers ---

BRACES = re.compile(r"\\boxed\s*\{|\\[{}]|[{}]")
FRAC = re.compile(r"^([+-]?)\\frac\{(\d+)\}\{(\d+)\}$")
NUMBER = re.compile(r"[+-]?(\d+/\d+|\d+\.?\d*|\.\d+)")


def extract_answer(text: str) -> str | None:
    """Return the final answer in a text, or None.

    This is the last \\boxed{…}, else the last <answer>…</answer>, else the rest of the line after
    ####. If there is a </think>, only the text after it counts, because results tried while
    thinking are not answers. The time is linear in the length of the text, even for a degenerate
    completion that repeats an unclosed \\boxed{ up to the length limit.
    """
    text = text.rpartition("</think>")[2]
    last_start, last_box = -1, ""  # start and content of the last closed box
    open_braces: list[tuple[int, bool]] = []  # (start of the content, whether it is a box)
    for match in BRACES.finditer(text):
        if match[0].endswith("{") and match[0] != r"\{":
            open_braces.append((match.end(), match[0] != "{"))
        elif match[0] == "}" and open_braces:
            start, is_box = open_braces.pop()
            if is_box and start > last_start:
                last_start, last_box = start, text[start : match.start()]
    if last_start >= 0:
        return last_box.strip()
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, max(end, 0))
    if start >= 0:
        return text[start + len("<answer>") : end].strip()
    _, mark, rest = text.rpartition("####")
    return rest.strip().partition("\n")[0].strip() if mark else None


def same_answer(a: str, b: str) -> bool:
    """Return whether two answers are equal, as exact numbers if both are numbers, otherwise as
    strings.

    "1,234" equals "1234.0" and "\\frac{1}{2}" equals "0.5". Units are dropped, not converted: "$5"
    is 5 and "50\\%" is 50, not 0.5. Nothing is rounded: 0.333 is not 1/3.
    """
    a, b = _normalise(a), _normalise(b)
    first, second = _number(a), _number(b)
    return a == b if first is None or second is None else first == second


def _normalise(text: str) -> str:
    text = re.sub(r"\\text\{([^{}]*)\}", r"\1", text)  # \text{Monday} → Monday
    text = re.sub(r"\\left|\\right|\\[!,;: $%]|[$%]", "", text)  # LaTeX's spacing, $ and %
    # Remove white space, except between digits: "1 2" is not 12.
    text = re.sub(r"(?<!\d) | (?!\d)", "", re.sub(r"\s+", " ", text)).rstrip(".")
    text = re.sub(r"\\[dt]frac", r"\\frac", text)
    text = re.sub(r"\\frac(\d)(\d)", r"\\frac{\1}{\2}", text)  # \frac12
    # Remove commas only where they group thousands: "1,2" is a pair.
    return text.replace(",", "") if re.fullmatch(r"[+-]?\d{1,3}(,\d{3})+(\.\d*)?", text) else text


def _number(text: str) -> Fraction | None:
    # A text of over 200 characters is longer than any answer, and Python refuses to parse an
    # integer of more than 4300 digits.
    text = FRAC.sub(r"\1\2/\3", text[:201])
    with contextlib.suppress(ZeroDivisionError):
        return Fraction(text) if len(text) <= 200 and NUMBER.fullmatch(text) else None
    return None


def _text(completion: str | list[dict]) -> str:
    return completion if isinstance(completion, str) else completion[-1]["content"]


# --- functions by name ---

BUILT_IN: dict[str, Callable] = {
    "format": format_reward,
    "accuracy": accuracy_reward,
    "length": length_reward,
}


def is_builtin(spec: str) -> bool:
    """Return whether `spec` names code of this package, which does not need a separate process."""
    return spec in BUILT_IN or spec.startswith(("length:", "model:"))


def load_function(spec: str, max_completion_length: int = 512) -> Callable:
    """Return the function that `spec` names.

    spec: "format", "accuracy", "length" (for `max_completion_length` tokens), "length:TOKENS",
    "package.module:name" or "path/to/file.py:name". Raises UserError if there is no such function.
    """
    if spec == "reasoning_gym":  # a file of its own, because it needs a package
        spec = "nanogrpo.rewards.reasoning_gym:reasoning_gym_reward"
    if spec == "length":
        spec = f"length:{max_completion_length}"
    if not spec.startswith("length:"):
        hint = f", nor one of {', '.join(BUILT_IN)} or model:FOLDER"
        return BUILT_IN.get(spec) or plugin.load(spec, "reward_funcs", hint)
    limit = spec.removeprefix("length:")
    if not limit.isdecimal() or int(limit) == 0:
        raise UserError(
            f"reward_funcs: {spec!r} must have a positive number of tokens after the colon, "
            "e.g. length:512"
        )
    return functools.partial(length_reward, int(limit))
