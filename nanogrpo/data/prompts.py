"""Turn the records of data sources into prompts, and choose the prompts of each step.

In: the records of files or built-in tasks (sources.py). Out: `Prompt`s with token ids. `draw` and
`draw_mixed` choose the prompts of a step. Read next: sources.py (where records come from),
rewards/runner.py (what receives the other columns).

A record is one of
    {"prompt": "3+4=", ...}                                      a text, tokenized as it is
    {"prompt": [{"role": "user", "content": "3+4="}], ...}       messages, for the chat template
    {"question": "What is 3+4?", "answer": "It is 7.\\n#### 7"}   GSM8K: a prompt and the column
                                                                 `solution`
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache

import numpy as np

from nanogrpo.data import sources
from nanogrpo.errors import UserError
from nanogrpo.model.tokenizer import Tokenizer
from nanogrpo.types import Prompt

log = logging.getLogger("nanogrpo")

# These arguments of reward functions come from the runner, so no column may have such a name.
RESERVED = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")


def load_all(
    names: Sequence[str],
    tokenizer: Tokenizer,
    *,
    split: str = "train",
    held_out: bool = False,
    enable_thinking: bool | None = None,
    max_prompt_length: int | None = None,
    long_prompts: str = "refuse",
) -> list[list[Prompt]]:
    """Return the prompts of each source. `split` and `held_out` are explained in sources.py.

    `Prompt.id` is the position of the record in the concatenation of all sources. It is part of the
    random key. Adding a source at the end, or dropping a long prompt, does not change the id of any
    other prompt.

    `max_prompt_length` is in tokens, after the chat template. A longer prompt is never truncated,
    because cutting off the beginning of a question can change its answer. If `long_prompts` is
    "drop", it is left out; otherwise it raises UserError.
    """
    parts: list[list[Prompt]] = []
    first_id = 0
    for name in names:
        records = sources.read(name, split, held_out)
        kept = []
        for id, (place, record) in enumerate(records, first_id):
            prompt = from_record(record, tokenizer, id, place, enable_thinking)
            length = len(prompt.token_ids)
            if max_prompt_length is None or length <= max_prompt_length:
                kept.append(prompt)
            elif long_prompts != "drop":
                raise UserError(
                    f"{place}: the prompt has {length} tokens but the limit is "
                    f"{max_prompt_length}; raise --max-prompt-length, remove the record, or use "
                    "--long-prompts drop."
                )
        if not kept:
            raise UserError(
                f"{name}: all {len(records)} prompts have more than {max_prompt_length} tokens; "
                "raise --max-prompt-length."
            )
        if dropped := len(records) - len(kept):
            count, limit = f"{dropped} of {len(records)}", max_prompt_length
            log.info("%s: %s prompts have more than %d tokens and are dropped.", name, count, limit)
        parts.append(kept)
        first_id += len(records)
    return parts


def from_record(
    record: dict,
    tokenizer: Tokenizer,
    id: int = 0,
    place: str = "record",
    enable_thinking: bool | None = None,
) -> Prompt:
    """Turn a record (see the top of this file) into a prompt. `place` names it in messages."""

    def require(ok: bool, problem: str) -> None:
        if not ok:
            raise UserError(f"{place}: {problem}.")

    require(
        isinstance(record, dict),
        f'a record must be an object like {{"prompt": ...}}, not a {type(record).__name__}',
    )
    for name in RESERVED:
        require(
            name not in record,
            f"reward functions already receive an argument {name!r}; rename the column",
        )
    columns = dict(record)
    question, answer = record.get("question"), record.get("answer")
    if "prompt" in record:
        text = columns.pop("prompt")
    else:
        require(
            isinstance(question, str) and isinstance(answer, str) and "####" in answer,
            "it has no `prompt`; add one, or GSM8K's `question` and `answer` with `#### result`",
        )
        del columns["question"]
        chat = tokenizer.has_chat_template
        text = [{"role": "user", "content": question}] if chat else question
        columns.setdefault("solution", str(answer).rpartition("####")[2].strip())
    is_chat = isinstance(text, list) and all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str)
        for m in text
    )
    require(
        isinstance(text, str) or (is_chat and text),
        '`prompt` must be a text or a list of {"role": text, "content": text}; correct the record',
    )
    try:
        token_ids = tokenizer.encode_prompt(text, enable_thinking=enable_thinking)
    except UserError as e:  # for example, the template rejected the messages
        raise UserError(f"{place}: {e}") from e
    require(
        len(token_ids) > 0, "the prompt is empty; a completion needs at least one token to continue"
    )
    return Prompt(id=id, text=text, token_ids=token_ids, columns=columns)


# --- the prompts of a step ---


def draw(prompts: list[Prompt], n: int, seed: int, step: int) -> list[Prompt]:
    """Choose the n prompts of a step. This is a pure function, so a resumed run draws the same
    prompts as an uninterrupted one.

    The epochs, each shuffled differently, form one long sequence, of which step s takes positions
    s·n … s·n+n-1. Each prompt occurs once per epoch, even if n does not divide the size of the
    dataset. No prompt occurs twice in a step as long as n ≤ len(prompts).
    """
    places = (divmod(i, len(prompts)) for i in range(step * n, step * n + n))
    return [prompts[_order(len(prompts), n, seed, epoch)[offset]] for epoch, offset in places]


# A step needs the order of one epoch, or of two at a boundary. The cache only saves time.
@lru_cache(maxsize=4)
def _order(count: int, n: int, seed: int, epoch: int) -> np.ndarray:
    """Return the order of the data set in an epoch: [count] int64, a permutation.

    A step that crosses the boundary of two epochs takes `tail` prompts from the old one and
    n - tail from the new one. With independent permutations a step could contain a prompt twice,
    which would give it twice the weight. So the first n - tail prompts of the new epoch are chosen
    from those that are not in that tail; the others follow in their random order. The order of an
    epoch therefore depends on that of the previous epoch, and so on, back to the last epoch that
    began at the start of a step. That epoch is at most n epochs back.
    """
    first = epoch
    while n <= count and first * count % n:  # with n > count, steps repeat prompts anyway
        first -= 1
    order = _permutation(count, seed, first)
    for e in range(first + 1, epoch + 1):
        tail, new = e * count % n, _permutation(count, seed, e)
        # positions in `new`; there are enough because n ≤ count
        chosen = np.flatnonzero(~np.isin(new, order[count - tail :]))[: n - tail]
        order = np.concatenate([new[chosen], np.delete(new, chosen)])
    return order


def draw_mixed(
    parts: Sequence[list[Prompt]], weights: Sequence[float], n: int, seed: int, step: int
) -> list[Prompt]:
    """Choose the n prompts of a step from several sources, like `draw`. Of any k consecutive
    prompts, source i provides k · weights[i] / sum(weights), up to rounding.

    The weights are shares of the prompts drawn, regardless of the sizes of the sources. Each source
    is shuffled and repeated in its own epochs, so a small source with a large weight is repeated
    often. No prompt occurs twice in a step (see `smallest`).

    The sources take turns according to the Sainte-Laguë method, which allocates seats in
    parliaments: the j-th prompt of source i is due at (j + 1/2) / share_i, and prompts are drawn in
    the order in which they are due (ties: in the order of sources). Fractions make this exact. With
    float rounding, a resumed run could differ from an uninterrupted one.
    """
    shares = _shares(weights)
    start = step * n
    # Skip the prompts that are due by start - len(shares). There are at most `start` of them.
    taken = [math.floor(share * max(start - len(shares), 0)) for share in shares]
    chosen = []
    for position in range(sum(taken), start + n):
        i = min(range(len(shares)), key=lambda i: (2 * taken[i] + 1) / shares[i])
        if position >= start:
            part, most = parts[i], _most(shares[i], len(shares), n)
            epoch, offset = divmod(taken[i], len(part))
            chosen.append(part[_mixed_order(len(part), most - 1, seed, epoch, i)[offset]])
        taken[i] += 1
    return chosen


def smallest(weights: Sequence[float], i: int, n: int) -> int:
    """Return the number of prompts that source i of a mixture needs, so that no prompt occurs twice
    in a step of n prompts.
    """
    return max(3 * (_most(_shares(weights)[i], len(weights), n) - 1), 1)


def _shares(weights: Sequence[float]) -> list[Fraction]:
    total = sum(map(Fraction, weights))
    return [Fraction(weight) / total for weight in weights]


def _most(share: Fraction, sources: int, n: int) -> int:
    """Return the maximum number of prompts that a step of n can take from a source with this share.

    If a step takes c prompts from source i, then at least (c-1)·share_j/share_i - 1 prompts of
    every other source j are drawn between the first and the last of them, and the total is at most
    n.
    """
    return min(n, math.floor(share * (n + sources - 2)) + 1)


@lru_cache(maxsize=64)
def _mixed_order(count: int, most: int, seed: int, epoch: int, source: int) -> np.ndarray:
    """Return the order of one source of a mixture in an epoch: [count] int64, a permutation.

    A step can cross the boundary of two epochs, with up to `most` prompts on either side. To keep
    it from drawing a prompt twice, the first 2·most prompts of a random permutation are reordered:
    the ones that were among the last `most` of the previous epoch move to the end of those 2·most.
    Since count ≥ 3·most (see `smallest`), the last `most` prompts of the order stay where they are.
    """
    order = _permutation(count, seed, epoch, source)
    if not epoch or not most:
        return order
    last = _permutation(count, seed, epoch - 1, source)[count - most :]
    first, rest = order[: 2 * most], order[2 * most :]
    repeated = np.isin(first, last)
    return np.concatenate([first[~repeated], first[repeated], rest])


def _permutation(count: int, seed: int, *where: int) -> np.ndarray:
    """Return a random permutation: [count] int64. numpy guarantees that the stream of RandomState,
    unlike that of default_rng, never changes between versions.
    """
    words = [seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF, *where]
    return np.random.RandomState(words).permutation(count)
