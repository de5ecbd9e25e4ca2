"""How good is each completion: reward functions, and the runner that calls them and trusts nothing they return.

In: samples with their decoded `text`. Out: `sample.rewards[name]` and the weighted sum `sample.reward`.
Read next: grpo.py, which turns the rewards of a group into advantages.

A reward function has TRL's signature, so that functions written for either run in both. It is called once for all B samples:
    def my_reward(completions, **kwargs) -> list[float | None]        # B results; None: this function does not apply here
with the keyword arguments, lists of length B each,
    prompts          as in the data: text, or messages
    completions      text for a text prompt, [{"role": "assistant", "content": text}] for messages
    completion_ids   token ids, the stop token included
    <column>         one for each other column of the data; None where a row lacks it
"""

from __future__ import annotations

import copy
import functools
import importlib
import importlib.util
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from fractions import Fraction
from numbers import Real
from pathlib import Path

from nanogrpo.batch import Sample
from nanogrpo.errors import UserError

# ---- the built-in functions ----------------------------------------------------------------------------------------------------

BRACES = re.compile(r"\\boxed\s*\{|\\[{}]|[{}]")
NUMBER = re.compile(r"([+-]?)(?:\\frac\{(\d+)\}\{(\d+)\}|(\d+)/(\d+)|(\d+\.?\d*|\.\d+))")


def format_reward(completions: list, **kwargs) -> list[float]:
    """1 for exactly `<think>…</think><answer>…</answer>` with an answer in it and nothing around it but white space, else 0.

    Each tag may come once: a completion that opens a second <answer> is hedging. <think> may be missing: some chat templates end
    the prompt with it, and then the completion starts inside.
    """
    return [float(_is_formatted(_text(completion).strip())) for completion in completions]


def _is_formatted(text: str) -> bool:
    if text.count("<think>") > 1 or text.find("<think>") > 0:  # at the very start, or nowhere
        return False
    if any(text.count(tag) != 1 for tag in ("</think>", "<answer>", "</answer>")):
        return False
    rest = text.partition("</think>")[2].strip()
    return rest.startswith("<answer>") and rest.endswith("</answer>") and bool(rest[len("<answer>") : -len("</answer>")].strip())


def accuracy_reward(completions: list, solution: list | None = None, answer: list | None = None, **kwargs) -> list[float | None]:
    """1 where the extracted answer equals the reference, 0 where it differs or is missing, None where the row has no reference.

    The reference is the row's `solution`, or else its `answer`: a bare result ("42", 42) or a text that `extract_answer` reads.
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
        scores.append(float(given is not None and same_answer(given, str(reference) if wanted is None else wanted)))
    return scores


def length_reward(limit: int = 512, /, *, completion_ids: list[list[int]], **kwargs) -> list[float]:
    """DAPO's soft overlong punishment (Yu et al. 2025, eq. 13): 0 up to 4/5 of `limit` tokens, then linearly to -1 at `limit`.

    A function of the completion alone: one that compared it with the longest of its batch would pay differently for the same
    text from step to step. `limit` is max_completion_length, or given as "length:LIMIT"; the cache of the paper is limit / 5,
    as there. It is given by position, so that a column of the data that is named `limit` stays one.
    """
    cache = limit / 5
    return [max(-1.0, min(0.0, (limit - cache - len(ids)) / cache)) for ids in completion_ids]


def extract_answer(text: str) -> str | None:
    """The final answer in a text, or None: the last \\boxed{…}, else the last <answer>…</answer>, else what follows ####.

    Only what follows </think>, when there is one: results tried while thinking are no answers. Linear in the text's length, also
    for the degenerate completions that repeat an unclosed \\boxed{ to the limit.
    """
    text = text.rpartition("</think>")[2]
    found, open_braces = (-1, ""), []  # (start, content) of the last box; (start, is it a box) of each brace not yet closed
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
    """Equal as exact numbers when both are numbers ("1,234" and "1234.0", "\\frac{1}{2}" and "0.5"), else as normalised texts.

    Units are dropped, not converted: "$5" is 5, "50\\%" is 50 (and not 0.5). Nothing is rounded: 0.333 is not 1/3.
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
    # Longer than any answer: let it be a text. (Python refuses to parse an int of more than 4300 digits.)
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


# ---- finding functions ---------------------------------------------------------------------------------------------------------

BUILT_IN = {"format": format_reward, "accuracy": accuracy_reward, "length": length_reward}


def load_functions(specs: Sequence[str], max_completion_length: int = 512) -> list[Callable]:
    """Each spec → a function: "format", "accuracy", "length" or "length:LIMIT", "package.module:name", "path/to/file.py:name".

    "length" alone judges against `max_completion_length`.

    UserError when a spec names nothing that can be called; what importing the user's code raises is its __cause__.
    """
    if isinstance(specs, str) or not specs:
        raise UserError(f"reward_funcs is {specs!r}: name a list of at least one function, e.g. accuracy")
    return [_load_function(f"length:{max_completion_length}" if spec == "length" else spec) for spec in specs]


def _load_function(spec: str) -> Callable:
    if spec in BUILT_IN:
        return BUILT_IN[spec]
    where, _, name = spec.rpartition(":")
    if where == "length":
        if not name.isdecimal() or int(name) == 0:
            raise UserError(f"reward_funcs: {spec!r} must give a positive number of tokens after the colon, e.g. length:512")
        return functools.partial(length_reward, int(name))
    if not where or not name:
        raise UserError(
            f"reward_funcs: {spec!r} is neither one of {', '.join(BUILT_IN)} nor package.module:name nor path/file.py:name"
        )
    try:
        module = _load_file(Path(where)) if where.endswith(".py") else importlib.import_module(where)
    except (Exception, SystemExit) as error:  # the user's module may raise anything; the sentence carries it
        raise UserError(
            f"reward_funcs: importing {where!r} raised {type(error).__name__}: {error}; mend it or the path"
        ) from error
    if not callable(function := getattr(module, name, None)):
        raise UserError(f"reward_funcs: {where!r} has no function {name!r}; check the name after the colon")
    return function


def _load_file(path: Path):
    """Run a file once as a module of its own. Two specs that name one file share the module, and so its state."""
    path = path.resolve()
    name = "nanogrpo_reward_file:" + str(path)  # a name no import statement can collide with
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        sys.modules[name] = importlib.util.module_from_spec(spec)  # before it runs: dataclasses and pickle look it up
        try:
            spec.loader.exec_module(sys.modules[name])
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


# ---- the runner ----------------------------------------------------------------------------------------------------------------


LARGEST = 1e30  # of a reward or a sum, either sign: well inside float32, in which the advantages that it makes are trained on


def score(samples: list[Sample], functions: Sequence[Callable], weights: Sequence[float] | None = None) -> None:
    """Fill each sample's `rewards` and `reward`: Σ_f weight_f · reward_f over the functions that gave a number, None if none did.

    `weights`: None or empty, 1 each. A function that raises or calls sys.exit, returns the wrong count or a value that is not a
    number of at most LARGEST stops the run with a UserError, and no sample is touched: a 0 in its place would be trained on as if
    it were a judgement.
    """
    weights = list(weights) if weights else [1.0] * len(functions)
    if len(weights) != len(functions):
        raise UserError(f"reward_weights has {len(weights)} values for {len(functions)} reward functions; give one for each")
    results = {name: _call(function, name, samples) for name, function in zip(_names(functions), functions)}
    rewards = [dict(zip(results, values)) for values in zip(*results.values())]
    sums = [_weighted_sum(weights, given, sample) for given, sample in zip(rewards, samples)]
    for sample, given, total in zip(samples, rewards, sums):
        sample.rewards, sample.reward = given, total


def _weighted_sum(weights: Sequence[float], rewards: dict[str, float | None], sample: Sample) -> float | None:
    terms = [w * r for w, r in zip(weights, rewards.values()) if r is not None]
    if not abs(total := sum(terms)) <= LARGEST:
        raise UserError(
            f"reward_weights make {total} of the rewards {rewards} for sample {sample.index} of prompt {sample.prompt.id}; make "
            f"them smaller, for a sum must not be beyond {LARGEST:g}"
        )
    return total if terms else None


def _names(functions: Sequence[Callable]) -> list[str]:
    """The name of each function in logs: its __name__ (of what a partial wraps), with _2, _3 … where two would coincide."""
    names: list[str] = []
    for function in functions:
        while isinstance(function, functools.partial):
            function = function.func
        base = name = getattr(function, "__name__", type(function).__name__)
        count = 1
        while name in names:
            count += 1
            name = f"{base}_{count}"
        names.append(name)
    return names


def _call(function: Callable, name: str, samples: list[Sample]) -> list[float | None]:
    """One reward function over all samples → one checked value each."""
    keys = dict.fromkeys(key for sample in samples for key in sample.prompt.columns)  # the union, in order of appearance
    # Lists made for this call, and copies of what is in them: a function that edits its arguments must reach neither the ids that
    # will be trained, nor the next function, nor the steps to come, which draw the same prompts again.
    columns = copy.deepcopy({key: [sample.prompt.columns.get(key) for sample in samples] for key in keys})
    try:
        result = function(
            prompts=copy.deepcopy([sample.prompt.text for sample in samples]),
            completions=[_as_completion(sample) for sample in samples],
            completion_ids=[list(sample.token_ids) for sample in samples],
            **columns,
        )
    except (Exception, SystemExit) as error:  # the user's code may raise anything; sys.exit(0) would look like the run's end
        frames = traceback.extract_tb(error.__traceback__)  # [0] is the call above, [1] the line of the user's function
        where = f"{Path(frames[1].filename).name}:{frames[1].lineno}" if len(frames) > 1 else "its call"
        ids = list(dict.fromkeys(sample.prompt.id for sample in samples))
        raise UserError(
            f"the reward function {name} raised {type(error).__name__}: {error} (at {where}, given {len(samples)} completions of "
            f"prompts {', '.join(map(str, ids[:4]))}{', …' if len(ids) > 4 else ''}); mend the function"
        ) from error
    values = result.tolist() if hasattr(result, "tolist") else result  # numpy and torch
    if not isinstance(values, list | tuple) or len(values) != len(samples):
        got = f"{len(values)} values" if isinstance(values, list | tuple) else f"a {type(result).__name__}"
        raise UserError(
            f"the reward function {name} returned {got} for {len(samples)} completions; it must return a list, one each"
        )
    return [_checked(value, name, sample) for value, sample in zip(values, samples)]


def _as_completion(sample: Sample) -> str | list[dict]:
    return sample.text if isinstance(sample.prompt.text, str) else [{"role": "assistant", "content": sample.text}]


def _checked(value, name: str, sample: Sample) -> float | None:
    if value is None:
        return None
    number = value.item() if getattr(value, "ndim", None) == 0 else value  # a numpy or torch scalar
    # One comparison refuses NaN, both infinities and integers beyond float. A bool is a Real: True counts 1.
    if not isinstance(number, Real) or not abs(number) <= LARGEST:
        raise UserError(
            f"the reward function {name} returned {value!r} for sample {sample.index} of prompt {sample.prompt.id}; "
            f"it must return a number of at most {LARGEST:g}, or None where it does not apply"
        )
    return float(number)
