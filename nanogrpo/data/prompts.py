"""Prompts from rows, and which of them a step draws.

In: the rows of files or tasks (rows.py). Out: `Prompt`s with token ids; `draw` and `draw_mixed`
pick those of a step. Read next: rows.py (where rows come from), reward_runner.py (where every other
column ends up).

A row is one of
    {"prompt": "3+4=", ...}                                          plain: tokenized as it is
    {"prompt": [{"role": "user", "content": "3+4="}], ...}           conversational: through the chat template
    {"question": "What is 3+4?", "answer": "It is 7.\\n#### 7"}       GSM8K: becomes a prompt and the column `solution`
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from fractions import Fraction
from functools import lru_cache

import numpy as np

from nanogrpo.data import sources
from nanogrpo.errors import UserError
from nanogrpo.model.tokenizer import Tokenizer
from nanogrpo.types import Prompt

log = logging.getLogger("nanogrpo")

# The runner's own arguments to a reward function.
RESERVED = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")


def load(source: str, tokenizer: Tokenizer, **options) -> list[Prompt]:
    """Every row of one source as a `Prompt`; the options are those of `load_all`."""
    return load_all([source], tokenizer, **options)[0]


def load_all(
    names: Sequence[str],
    tokenizer: Tokenizer,
    *,
    split: str = "train",
    held_out: bool = False,
    **options,
) -> list[list[Prompt]]:
    """The prompts of each source, in its order. The options are those of `from_rows`; split,
    held_out: see rows.py.

    `Prompt.id` is the row's position in all sources laid end to end. It is part of the random key:
    a source that is added at the end, or a long prompt that is dropped, changes no other prompt's
    id.
    """
    parts, first = [], 0
    for name in names:
        found = sources.read(name, split, held_out)
        places = [place for place, _ in found]
        parts.append(
            from_rows(
                [row for _, row in found],
                tokenizer,
                places=places,
                first_id=first,
                name=name,
                **options,
            )
        )
        first += len(found)
    return parts


def from_rows(
    rows: Iterable[dict],
    tokenizer: Tokenizer,
    *,
    enable_thinking: bool | None = None,
    max_prompt_length: int | None = None,
    long_prompts: str = "refuse",
    places: Sequence[str] | None = None,
    first_id: int = 0,
    name: str = "the data set",
) -> list[Prompt]:
    """Rows (see the top of the file) → prompts. `places[i]` is how errors name row i; the default
    is "row i".

    `max_prompt_length` in tokens, after the chat template. A longer prompt is never cut: a question
    without its beginning has another answer. It is an error, for without it the data set would not
    be the one that was named; or, with `long_prompts` "drop", it is left out, and how many were is
    logged.
    """
    prompts: list[Prompt] = []
    dropped = 0
    for i, row in enumerate(rows):
        place = places[i] if places else f"row {i}"
        text, columns = _split(row, place, tokenizer.has_chat_template)
        try:
            token_ids = tokenizer.encode_prompt(text, enable_thinking=enable_thinking)
        except UserError as error:  # the template refused the messages: say whose
            raise UserError(f"{place}: {error}") from error
        if not token_ids:
            raise UserError(
                f"{place}: the prompt is empty; a completion needs at least one token to continue"
            )
        if max_prompt_length is not None and len(token_ids) > max_prompt_length:
            if long_prompts == "drop":
                dropped += 1
                continue
            raise UserError(
                f"{place}: the prompt has {len(token_ids)} tokens and max_prompt_length is {max_prompt_length}; "
                "raise max_prompt_length, remove the row, or choose --long-prompts drop"
            )
        prompts.append(Prompt(id=first_id + i, text=text, token_ids=token_ids, columns=columns))
    if dropped and prompts:
        count = f"{dropped} of {dropped + len(prompts)}"
        log.info(
            "%s: %s prompts have more than %d tokens and are dropped.",
            name,
            count,
            max_prompt_length,
        )
    if not prompts:
        raise UserError(
            f"{name}: all {dropped} prompts have more than {max_prompt_length} tokens: raise max_prompt_length"
            if dropped
            else f"{name} holds no prompts: give it at least one row"
        )
    return prompts


# ---- which prompts a step draws ------------------------------------------------------------------


def draw(prompts: list[Prompt], n: int, seed: int, step: int) -> list[Prompt]:
    """The n prompts of a step: a pure function of its arguments, so that a resumed run draws what
    the interrupted one would have.

    Think of the epochs' orders laid end to end, an endless sequence; step s takes its positions s·n
    … s·n+n-1. So each prompt comes once an epoch, also when n does not divide the data set, and
    none comes twice in a step while n ≤ len(prompts).
    """
    if n < 1 or not prompts:
        raise ValueError(f"cannot draw {n} of {len(prompts)} prompts")
    positions = (divmod(i, len(prompts)) for i in range(step * n, step * n + n))  # (epoch, offset)
    return [prompts[_order(len(prompts), n, seed, epoch)[offset]] for epoch, offset in positions]


# a step needs one epoch's order, or two at a boundary; the cache changes the time, never the value
@lru_cache(maxsize=4)
def _order(count: int, n: int, seed: int, epoch: int) -> np.ndarray:
    """The order of the data set in an epoch → [count] int64, a permutation.

    A step that straddles the boundary takes `tail` prompts from the end of one epoch and `head = n
    - tail` from the start of the next. Two independent permutations would repeat some prompt in it,
    whose group would then count double. So the new epoch's first `head` are chosen among those that
    are not in that tail: the rest keep their random order behind. Each epoch thus depends on the
    one before, back to one whose start is also the start of a step: at most n epochs.
    """
    if n > count:  # a step repeats prompts anyway
        return _permutation(count, seed, epoch)
    first = epoch
    while first * count % n:
        first -= 1
    order = _permutation(count, seed, first)
    for e in range(first + 1, epoch + 1):
        tail = e * count % n
        head, last, order = n - tail, order[count - tail :], _permutation(count, seed, e)
        # Positions in the new order of its first `head` members that are not in the old tail; n ≤
        # count leaves enough.
        chosen = np.flatnonzero(~np.isin(order, last))[:head]
        order = np.concatenate([order[chosen], np.delete(order, chosen)])
    return order


def draw_mixed(
    parts: Sequence[list[Prompt]], weights: Sequence[float], n: int, seed: int, step: int
) -> list[Prompt]:
    """As `draw`, from several sources: of any k prompts in a row, source i gives weights[i] /
    sum(weights) · k, up to rounding.

    The weights are shares of the prompts that are drawn, whatever the sizes of the sources: each is
    shuffled and repeated by itself, epoch after epoch of its own, so that a small one with a large
    weight comes round often. Nothing is left to chance but the order within a source. No prompt
    comes twice in a step (see `smallest`).
    """
    chosen = []
    for i, position in _places(tuple(weights), step * n, n):
        epoch, offset = divmod(position, len(parts[i]))
        chosen.append(
            parts[i][_mixed_order(len(parts[i]), _most(weights, i, n) - 1, seed, epoch, i)[offset]]
        )
    return chosen


def smallest(weights: Sequence[float], i: int, n: int) -> int:
    """The prompts that source i must hold at least, for steps of n of a mixture: then none comes
    twice in a step.
    """
    return max(3 * (_most(weights, i, n) - 1), 1)


def _most(weights: Sequence[float], i: int, n: int) -> int:
    """The most prompts that a step of n can take from source i. A source's c prompts in a row leave
    room for (c-1)·w_j/w_i - 1 or more of each other source j between the first and the last, and
    all of them are at most n.
    """
    share = Fraction(weights[i]) / sum(map(Fraction, weights))
    return min(n, math.floor(share * (n + len(weights) - 2)) + 1)


def _places(weights: tuple[float, ...], start: int, n: int) -> list[tuple[int, int]]:
    """The places start … start+n-1 of the endless mixture → (source, position in the source's own
    endless sequence) each.

    The j-th prompt of source i is due at (j + 1/2) / share_i, and places are taken in the order of
    what is due (a tie: by source). This is Sainte-Laguë's rule for sharing seats, in exact
    fractions: float rounding would part a resumed run from the one that it continues. What is due
    by start - (number of sources) has at most `start` members: the count begins there.
    """
    total = sum(map(Fraction, weights))
    shares = [Fraction(w) / total for w in weights]
    taken = [math.floor(share * max(start - len(shares), 0)) for share in shares]
    found: list[tuple[int, int]] = []
    for place in range(sum(taken), start + n):
        i = min(range(len(shares)), key=lambda i: (2 * taken[i] + 1) / shares[i])
        if place >= start:
            found.append((i, taken[i]))
        taken[i] += 1
    return found


@lru_cache(maxsize=64)
def _mixed_order(count: int, most: int, seed: int, epoch: int, source: int) -> np.ndarray:
    """The order of a source of a mixture in an epoch → [count] int64, a permutation.

    A step may straddle two epochs with up to `most` prompts on either side. So the first `most` are
    chosen among the first 2 · most of a random permutation, such that none is one of the last
    `most` of the epoch before; with count ≥ 3 · most (see `smallest`) the end of an order is as
    random as it was.
    """
    order = _permutation(count, seed, epoch, source)
    if not epoch or not most:
        return order
    last = _permutation(count, seed, epoch - 1, source)[count - most :]
    first, rest = order[: 2 * most], order[2 * most :]
    repeated = np.isin(first, last)
    return np.concatenate([first[~repeated], first[repeated], rest])


def _permutation(count: int, seed: int, *where: int) -> np.ndarray:
    """[count] int64. `RandomState` and not `default_rng`: numpy promises that its stream never
    changes between versions.
    """
    words = [seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF, *where]
    return np.random.RandomState(words).permutation(count)


# ---- rows ----------------------------------------------------------------------------------------


def _split(row: dict, place: str, conversational: bool) -> tuple[str | list[dict], dict]:
    """A row → (its prompt, checked; the other columns)."""
    if not isinstance(row, dict):
        raise UserError(
            f'{place}: a row must be an object like {{"prompt": ...}}, but this is a {type(row).__name__}'
        )
    if clash := [name for name in RESERVED if name in row]:
        raise UserError(
            f"{place}: the column {clash[0]!r} is a name that reward functions receive already; rename the column"
        )
    columns = dict(row)
    if "prompt" in row:
        prompt = columns.pop("prompt")
    elif _is_gsm8k(row):
        question = columns.pop("question")
        prompt = [{"role": "user", "content": question}] if conversational else question
        columns.setdefault("solution", row["answer"].rpartition("####")[2].strip())
    else:
        raise UserError(
            f"{place}: no `prompt`; give each row one (or GSM8K's `question` and `answer` with `#### result`)"
        )
    if not isinstance(prompt, str):
        is_chat = (
            isinstance(prompt, list)
            and prompt
            and all(isinstance(message, dict) for message in prompt)
        )
        if not is_chat or any(
            not isinstance(m.get(key), str) for m in prompt for key in ("role", "content")
        ):
            raise UserError(
                f'{place}: `prompt` must be a text or a list of {{"role": text, "content": text}}; mend the row'
            )
    return prompt, columns


def _is_gsm8k(row: dict) -> bool:
    return (
        isinstance(row.get("question"), str)
        and isinstance(row.get("answer"), str)
        and "####" in row["answer"]
    )
