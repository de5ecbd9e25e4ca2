"""Prompts from files, and which of them a step draws.

In: a .jsonl or .parquet file, or rows (dicts) of a built-in task. Out: `Prompt`s with token ids; `draw` picks those of a step.
Read next: tasks.py (built-in rows), rewards.py (where every other column ends up).

A row is one of
    {"prompt": "3+4=", ...}                                          plain: tokenized as it is
    {"prompt": [{"role": "user", "content": "3+4="}], ...}           conversational: through the chat template
    {"question": "What is 3+4?", "answer": "It is 7.\\n#### 7"}       GSM8K: becomes a prompt and the column `solution`
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np

from nanogrpo.batch import Prompt
from nanogrpo.errors import UserError
from nanogrpo.tokenizer import Tokenizer

RESERVED = ("prompts", "completions", "completion_ids")  # the runner's own arguments to a reward function


def load(
    source: str, tokenizer: Tokenizer, *, enable_thinking: bool | None = None, max_prompt_length: int | None = None
) -> list[Prompt]:
    """Every row of a file as a `Prompt`, in the file's order: `Prompt.id` is the row's position, blank lines not counted.

    `max_prompt_length` in tokens, after the chat template. A longer prompt is an error and is not cut: a question without its
    beginning has another answer. Nor is it skipped: the data set would no longer be the one that was named.

    UserError, with the file and line: missing or empty file, a line that is not JSON, a row without a usable prompt.
    """
    places, rows = [], []
    for place, row in _read(Path(source)):
        places.append(place)
        rows.append(row)
    if not rows:
        raise UserError(f"{source} holds no prompts: put at least one row in it")
    return from_rows(rows, tokenizer, enable_thinking=enable_thinking, max_prompt_length=max_prompt_length, places=places)


def from_rows(
    rows: Iterable[dict],
    tokenizer: Tokenizer,
    *,
    enable_thinking: bool | None = None,
    max_prompt_length: int | None = None,
    places: Sequence[str] | None = None,
) -> list[Prompt]:
    """Rows (see the top of the file) → prompts. `places[i]` is how errors name row i; the default is "row i"."""
    prompts: list[Prompt] = []
    for i, row in enumerate(rows):
        place = places[i] if places else f"row {i}"
        text, columns = _split(row, place, tokenizer.has_chat_template)
        try:
            token_ids = tokenizer.encode_prompt(text, enable_thinking=enable_thinking)
        except UserError as error:  # the template refused the messages: say whose
            raise UserError(f"{place}: {error}") from error
        if not token_ids:
            raise UserError(f"{place}: the prompt is empty; a completion needs at least one token to continue")
        if max_prompt_length is not None and len(token_ids) > max_prompt_length:
            raise UserError(
                f"{place}: the prompt has {len(token_ids)} tokens and max_prompt_length is {max_prompt_length}; "
                "raise max_prompt_length or remove the row"
            )
        prompts.append(Prompt(id=i, text=text, token_ids=token_ids, columns=columns))
    if not prompts:
        raise UserError("the data set holds no prompts: give it at least one row")
    return prompts


def draw(prompts: list[Prompt], n: int, seed: int, step: int) -> list[Prompt]:
    """The n prompts of a step: a pure function of its arguments, so that a resumed run draws what the interrupted one would have.

    Think of the epochs' orders laid end to end, an endless sequence; step s takes its positions s·n … s·n+n-1. So each prompt
    comes once an epoch, also when n does not divide the data set, and none comes twice in a step while n ≤ len(prompts).
    """
    if n < 1 or not prompts:
        raise ValueError(f"cannot draw {n} of {len(prompts)} prompts")
    positions = (divmod(i, len(prompts)) for i in range(step * n, step * n + n))  # (epoch, offset)
    return [prompts[_order(len(prompts), n, seed, epoch)[offset]] for epoch, offset in positions]


@lru_cache(maxsize=4)  # a step needs one epoch's order, or two at a boundary; the cache changes the time, never the value
def _order(count: int, n: int, seed: int, epoch: int) -> np.ndarray:
    """The order of the data set in an epoch → [count] int64, a permutation.

    A step that straddles the boundary takes `tail` prompts from the end of one epoch and `head = n - tail` from the start of the
    next. Two independent permutations would repeat some prompt in it, whose group would then count double. So the new epoch's
    first `head` are chosen among those that are not in that tail: the rest keep their random order behind.
    Each epoch thus depends on the one before, back to one whose start is also the start of a step: at most n epochs.
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
        # Positions in the new order of its first `head` members that are not in the old tail; n ≤ count leaves enough.
        chosen = np.flatnonzero(~np.isin(order, last))[:head]
        order = np.concatenate([order[chosen], np.delete(order, chosen)])
    return order


def _permutation(count: int, seed: int, epoch: int) -> np.ndarray:
    """[count] int64. `RandomState` and not `default_rng`: numpy promises that its stream never changes between versions."""
    words = [seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF, epoch]
    return np.random.RandomState(words).permutation(count)


def _split(row: dict, place: str, conversational: bool) -> tuple[str | list[dict], dict]:
    """A row → (its prompt, checked; the other columns)."""
    if not isinstance(row, dict):
        raise UserError(f'{place}: a row must be an object like {{"prompt": ...}}, but this is a {type(row).__name__}')
    if clash := [name for name in RESERVED if name in row]:
        raise UserError(f"{place}: the column {clash[0]!r} is a name that reward functions receive already; rename the column")
    columns = dict(row)
    if "prompt" in row:
        prompt = columns.pop("prompt")
    elif _is_gsm8k(row):
        question = columns.pop("question")
        prompt = [{"role": "user", "content": question}] if conversational else question
        columns.setdefault("solution", row["answer"].rpartition("####")[2].strip())
    else:
        raise UserError(f"{place}: no `prompt`; give each row one (or GSM8K's `question` and `answer` with `#### result`)")
    if not isinstance(prompt, str):
        is_chat = isinstance(prompt, list) and prompt and all(isinstance(message, dict) for message in prompt)
        if not is_chat or any(not isinstance(m.get(key), str) for m in prompt for key in ("role", "content")):
            raise UserError(f'{place}: `prompt` must be a text or a list of {{"role": text, "content": text}}; mend the row')
    return prompt, columns


def _is_gsm8k(row: dict) -> bool:
    return isinstance(row.get("question"), str) and isinstance(row.get("answer"), str) and "####" in row["answer"]


def _read(path: Path) -> Iterator[tuple[str, dict]]:
    """The rows of a file, each with the words that find it again: "file.jsonl:12" counts lines from 1, blank ones included."""
    if not path.is_file():
        raise UserError(f"{path} is not a file: name a .jsonl or .parquet file, or a built-in task")
    if path.suffix == ".parquet":
        yield from _read_parquet(path)
    elif path.suffix in (".jsonl", ".json"):
        # Lines are split at b"\n" alone: str.splitlines would also split at U+2028 and its kin, which JSON allows in a text.
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                try:
                    text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                    if text.strip():
                        yield f"{path}:{number}", json.loads(text)
                except (ValueError, RecursionError) as error:  # not JSON, or not UTF-8, or brackets without end
                    raise UserError(f"{path}:{number}: not JSON ({error}); each line must be one whole JSON object") from error
    else:
        raise UserError(
            f"{path}: cannot tell the format from {path.suffix!r}; name it .jsonl (one JSON object a line) or .parquet"
        )


def _read_parquet(path: Path) -> Iterator[tuple[str, dict]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise UserError(f"{path} needs pyarrow to be read: pip install pyarrow, or convert it to .jsonl") from error
    try:
        rows = pyarrow.parquet.read_table(path).to_pylist()
    except pyarrow.ArrowException as error:
        raise UserError(f"{path} cannot be read as Parquet ({error}): write the file again") from error
    for number, row in enumerate(rows, start=1):
        yield f"{path}, row {number}", row
