"""How good is each completion: the built-in reward functions, and finding the user's by name.

In: completions and the data's columns, as lists (reward_call.py has the signature). Out: one number
each, or None. Read next: reward_runner.py, which calls them.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from fractions import Fraction

from nanogrpo.errors import UserError
from nanogrpo.rewards import plugin

# ---- the built-in functions ----------------------------------------------------------------------

BRACES = re.compile(r"\\boxed\s*\{|\\[{}]|[{}]")
NUMBER = re.compile(r"([+-]?)(?:\\frac\{(\d+)\}\{(\d+)\}|(\d+)/(\d+)|(\d+\.?\d*|\.\d+))")


def format_reward(completions: list, **kwargs) -> list[float]:
    """1 for exactly `<think>…</think><answer>…</answer>` with an answer in it and nothing around it
    but white space, else 0.

    Each tag may come once: a completion that opens a second <answer> is hedging. <think> may be
    missing: some chat templates end the prompt with it, and then the completion starts inside.
    """
    return [float(_is_formatted(_text(completion).strip())) for completion in completions]


def _is_formatted(text: str) -> bool:
    if text.count("<think>") > 1 or text.find("<think>") > 0:  # at the very start, or nowhere
        return False
    if any(text.count(tag) != 1 for tag in ("</think>", "<answer>", "</answer>")):
        return False
    rest = text.partition("</think>")[2].strip()
    return (
        rest.startswith("<answer>")
        and rest.endswith("</answer>")
        and bool(rest[len("<answer>") : -len("</answer>")].strip())
    )


def accuracy_reward(
    completions: list, solution: list | None = None, answer: list | None = None, **kwargs
) -> list[float | None]:
    """1 where the extracted answer equals the reference, 0 where it differs or is missing, None
    where the row has no reference.

    The reference is the row's `solution`, or else its `answer`: a bare result ("42", 42) or a text
    that `extract_answer` reads.
    """
    if solution is None and answer is None:
        raise ValueError("the data has neither a column `solution` nor `answer`")
    blank = [None] * len(completions)
    scores: list[float | None] = []
    for completion, first, second in zip(completions, solution or blank, answer or blank):
        reference = first if first is not None else second
        if reference is None:
            scores.append(None)
            continue
        wanted, given = extract_answer(str(reference)), extract_answer(_text(completion))
        scores.append(
            float(
                given is not None
                and same_answer(given, str(reference) if wanted is None else wanted)
            )
        )
    return scores


def length_reward(limit: int = 512, /, *, completion_ids: list[list[int]], **kwargs) -> list[float]:
    """DAPO's soft overlong punishment (Yu et al. 2025, eq. 13): 0 up to 4/5 of `limit` tokens, then
    linearly to -1 at `limit`.

    A function of the completion alone: one that compared it with the longest of its batch would pay
    differently for the same text from step to step. `limit` is max_completion_length, or given as
    "length:LIMIT"; the cache of the paper is limit / 5, as there. It is given by position, so that
    a column of the data that is named `limit` stays one.
    """
    cache = limit / 5
    return [max(-1.0, min(0.0, (limit - cache - len(ids)) / cache)) for ids in completion_ids]


def extract_answer(text: str) -> str | None:
    """The final answer in a text, or None: the last \\boxed{…}, else the last <answer>…</answer>,
    else what follows ####.

    Only what follows </think>, when there is one: results tried while thinking are no answers.
    Linear in the text's length, also for the degenerate completions that repeat an unclosed
    \\boxed{ to the limit.
    """
    text = text.rpartition("</think>")[2]
    # (start, content) of the last box; (start, is it a box) of each brace not yet closed
    found, open_braces = (-1, ""), []
    for match in BRACES.finditer(text):
        if match[0].endswith("{") and match[0] != r"\{":
            open_braces.append((match.end(), match[0] != "{"))
        elif match[0] == "}" and open_braces:
            start, boxed = open_braces.pop()
            if boxed and start > found[0]:
                found = start, text[start : match.start()]
    if found[0] >= 0:
        return found[1].strip()
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, max(end, 0))
    if start >= 0:
        return text[start + len("<answer>") : end].strip()
    _, mark, rest = text.rpartition("####")
    return rest.strip().partition("\n")[0].strip() if mark else None


def same_answer(a: str, b: str) -> bool:
    """Equal as exact numbers when both are numbers ("1,234" and "1234.0", "\\frac{1}{2}" and
    "0.5"), else as normalised texts.

    Units are dropped, not converted: "$5" is 5, "50\\%" is 50 (and not 0.5). Nothing is rounded:
    0.333 is not 1/3.
    """
    a, b = _normalise(a), _normalise(b)
    first, second = _number(a), _number(b)
    return first == second if first is not None and second is not None else a == b


def _normalise(text: str) -> str:
    text = re.sub(r"\\text\{([^{}]*)\}", r"\1", text)  # \text{Monday} → Monday
    text = re.sub(r"\\left|\\right|\\[!,;: $%]|[$%]", "", text)  # LaTeX's spacing, $ and %
    # White space goes, except between digits: "1 2" is not 12.
    text = re.sub(r"(?<!\d) | (?!\d)", "", re.sub(r"\s+", " ", text)).rstrip(".")
    text = re.sub(r"\\[dt]frac", r"\\frac", text)
    text = re.sub(r"\\frac(\d)(\d)", r"\\frac{\1}{\2}", text)  # \frac12
    # Commas go only where they group thousands: "1,2" is a pair.
    return text.replace(",", "") if re.fullmatch(r"[+-]?\d{1,3}(,\d{3})+(\.\d*)?", text) else text


def _number(text: str) -> Fraction | None:
    # Longer than any answer: let it be a text. (Python refuses to parse an int of more than 4300
    # digits.)
    match = NUMBER.fullmatch(text) if len(text) <= 200 else None
    if match is None:
        return None
    sign, top, bottom, top2, bottom2, plain = match.groups()
    if plain is None and int(bottom or bottom2) == 0:
        return None
    value = Fraction(plain) if plain else Fraction(int(top or top2), int(bottom or bottom2))
    return -value if sign == "-" else value


def _text(completion: str | list[dict]) -> str:
    return completion if isinstance(completion, str) else completion[-1]["content"]


# ---- finding functions ---------------------------------------------------------------------------

BUILT_IN = {"format": format_reward, "accuracy": accuracy_reward, "length": length_reward}


def is_ours(spec: str) -> bool:
    """Whether a spec names what this package computes by itself, fast and without end only by a bug
    of ours.
    """
    return spec in BUILT_IN or spec.startswith(("length:", "model:"))


def load_function(spec: str, max_completion_length: int = 512) -> Callable:
    """A spec → a function: "format", "accuracy", "length" or "length:LIMIT", "package.module:name",
    "path/to/file.py:name".

    "length" alone judges against `max_completion_length`. UserError when the spec names nothing
    that can be called; what importing the user's code raises is its __cause__.
    """
    if spec == "length":
        spec = f"length:{max_completion_length}"
    if spec in BUILT_IN:
        return BUILT_IN[spec]
    where, _, name = spec.rpartition(":")
    if where == "length":
        if not name.isdecimal() or int(name) == 0:
            raise UserError(
                f"reward_funcs: {spec!r} must give a positive number of tokens after the colon, e.g. length:512"
            )
        return functools.partial(length_reward, int(name))
    if not where or not name:
        raise UserError(
            f"reward_funcs: {spec!r} is neither one of {', '.join(BUILT_IN)} nor package.module:name, path/file.py:name or "
            "model:folder"
        )
    return plugin.load(spec, "reward_funcs")
