"""Turn the records of data sources into prompts, and choose the prompts of each step.

In: the records of files or built-in tasks (sources.py). Out: `Prompt`s with token ids. `draw` and
`draw_mixed` choose the prompts of a step. Read next: sources.py (where records come from),
rewards/runner.py (what receives the other columns).

A record is one of
    {"prompt": "3+4=", ...}                                      a text, tokenized as it is
    {"prompt": [{"role": "user", "content": "3+4="}], ...}       messages, for the chat template
    {"question": "What is 3+4?", "answer": "It is 7.\\n#### 7"}   GSM8K: a user message and the
                                                                 column `solution`
    {"problem": "What is 3+4?", "solution": "It is \\boxed{7}."}  MATH: a user message
`from_record` explains the options that change this.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import os
import re
import threading
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from nanogrpo.data import sources
from nanogrpo.errors import UserError, reading
from nanogrpo.model.tokenizer import Tokenizer
from nanogrpo.timelimit import limited
from nanogrpo.types import Prompt

log = logging.getLogger("nanogrpo")

# These arguments of reward functions come from the runner, so no column may have such a name.
RESERVED = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
# The columns that can hold the prompt if --prompt-column names none, in this order.
PROMPT_COLUMNS = ("prompt", "question", "problem")
PICTURE_FILE = r"(?is).*\.(png|jpe?g|webp|gif|bmp|tiff?)"
# Seconds that the chat template and the tokenizer may take for a record. They need milliseconds.
TIME_LIMIT = 10.0


def load_all(
    data: Sequence[sources.Source],
    tokenizer: Tokenizer,
    *,
    split: str = "train",
    held_out: bool = False,
    config: str = "",
    most: int = 0,
    max_prompt_length: int | None = None,
    long_prompts: str = "refuse",
    vision: Path | None = None,
    **how: Any,
) -> list[list[Prompt]]:
    """Return the prompts of each source: a name, or the records themselves.

    sources.py explains `split`, `held_out`, `config` and `most`. `how` are options of
    `from_record`.

    `Prompt.id` is the position of the record in the concatenation of all sources. It is part of the
    random key. Adding a source at the end, or dropping a long prompt, does not change the id of any
    other prompt.

    `max_prompt_length` is in tokens, after the chat template. A longer prompt is never truncated,
    because cutting off the beginning of a question can change its answer. If `long_prompts` is
    "drop", it is left out; otherwise it raises UserError.

    `vision` is the folder of a vision-language model; None: the model reads only text.

    A chat template is a program and may run forever, so it has TIME_LIMIT seconds per record. This
    limit needs a signal, so it holds in the main thread only, and it cannot interrupt a single
    operation in C, such as 10 ** (10 ** 9).
    """
    parts: list[list[Prompt]] = []
    first_id = 0
    seconds = TIME_LIMIT if threading.current_thread() is threading.main_thread() else 0.0
    reader = None
    if vision:
        from nanogrpo.vision.data import Reader  # only such a model needs this folder

        reader = Reader(vision)
    for source in data:
        name, records = sources.name(source), sources.read(source, split, held_out, config, most)
        kept = []
        folder = Path(source if isinstance(source, str) else "")
        how |= {"reader": reader, "base": folder if folder.is_dir() else folder.parent}
        for id, (place, record) in enumerate(records, first_id):
            prompt = from_record(record, tokenizer, id, place, seconds=seconds, **how)
            length = len(prompt.token_ids)
            if max_prompt_length is None or length <= max_prompt_length:
                kept.append(prompt)
            elif long_prompts != "drop":
                images = prompt.images
                of_pictures = f" ({len(images.rows)} of pictures)" if images else ""
                raise UserError(
                    f"{place}: the prompt has {length} tokens{of_pictures} but the limit is "
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
    *,
    prompt_column: str = "",
    answer_column: str = "",
    system_prompt: str = "",
    tools: Sequence[dict] = (),
    enable_thinking: bool | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    reader: Any = None,
    base: Path | None = None,
    seconds: float = 0.0,
) -> Prompt:
    """Turn a record (see the top of this file) into a prompt. `place` names it in messages.

    prompt_column: the column with the prompt; by default the first of PROMPT_COLUMNS. A text in the
    column `prompt` is tokenized as it is. A text in any other column becomes a user message if the
    model has a chat template.
    answer_column: the column that becomes `solution`; of a text with GSM8K's ####, the result.
    system_prompt: a system message before the prompt, which then becomes messages. Without a chat
    template it is a text before the prompt, followed by an empty line.
    tools: JSON schemas of functions, for the chat template; a record can have its own in `tools`.
    enable_thinking, template_kwargs: variables of the chat template (`Tokenizer.render`).
    reader: reads pictures (vision/data.py); None: the model reads only text.
    base: the folder of the data file, to which the paths of pictures are relative.
    seconds: the time limit of the chat template and the tokenizer; 0: none.
    """

    def require(ok: bool, problem: str) -> None:
        if not ok:
            raise UserError(f"{place}: {problem}.")

    require(
        isinstance(record, dict),
        f'a record must be an object like {{"prompt": ...}}, not a {type(record).__name__}',
    )
    columns, found = dict(record), ", ".join(map(repr, record)) or "no columns at all"
    column = prompt_column or next((name for name in PROMPT_COLUMNS if name in record), "")
    require(
        bool(column),
        f"it has no `prompt`, `question` or `problem` but {found}; name the column of the prompt "
        "with --prompt-column",
    )
    for option, named in (("--prompt-column", column), ("--answer-column", answer_column)):
        require(
            not named or named in record,
            f"it has no column {named!r} but {found}; name one of these with {option}",
        )
    text = columns.pop(column)
    for name in RESERVED:
        require(
            name not in columns,
            f"reward functions already receive an argument {name!r}; rename the column",
        )
    answer = record.get("answer")
    if answer_column:
        columns["solution"] = _result(record[answer_column])
    elif column == "question" and _result(answer) != answer:
        columns.setdefault("solution", _result(answer))
    own_tools = _parse_tools(record.get("tools"))
    require(
        own_tools is not None,
        "`tools` must be a list of JSON schemas; correct the record, or rename the column",
    )
    require(
        not (tools and own_tools),
        "it has `tools` of its own, but --tools names others; leave one of them out",
    )
    tools = tools or own_tools or ()
    require(text != "", "the prompt is empty; a completion needs at least one token to continue")
    require(
        reader is not None or not _has_picture([columns.get("image"), columns.get("images")], text),
        "it has a picture, but the model reads only text; use a vision-language model, or remove"
        " the picture",
    )
    chat, shown = tokenizer.has_chat_template, reader is not None and reader.shows(columns)
    if isinstance(text, str) and chat and (column != "prompt" or system_prompt or tools or shown):
        text = [{"role": "user", "content": text}]
    kinds = str if reader is None else (str, list)
    is_chat = isinstance(text, list) and all(
        isinstance(m, dict)
        and isinstance(m.get("role"), str)
        and isinstance(m.get("content"), kinds)
        for m in text
    )
    require(
        isinstance(text, str) or (is_chat and text),
        f'`{column}` must be a text or a list of {{"role": text, "content": text}}; correct the '
        "record",
    )
    require(
        not tools or tokenizer.shows_tools,
        "the model's chat template, if it has one, does not show tools to it; leave them out, or "
        "use a template that does",
    )
    if isinstance(text, str):
        text = f"{system_prompt}\n\n{text}" if system_prompt else text
    elif system_prompt:
        require(
            not any(m["role"] in ("system", "developer") for m in text),
            "the messages have a system message already; leave --system-prompt out, or remove it "
            "from the data",
        )
        text = [{"role": "system", "content": system_prompt}, *text]
    images = None
    try:
        if reader:
            text, pictures = reader.insert(text, columns, base or Path())
        variables = {"enable_thinking": enable_thinking, **(template_kwargs or {})}
        encode = functools.partial(tokenizer.encode_prompt, text, tools, **variables)
        token_ids = limited(encode, seconds)
        if reader:
            token_ids, images = reader.expand(token_ids, pictures)
    except UserError as e:  # for example, the template rejected the messages
        raise UserError(f"{place}: {e}") from e
    except TimeoutError:
        raise UserError(
            f"{place}: the chat template and the tokenizer take more than {seconds:g} s for this "
            "prompt; shorten it, or correct the template."
        ) from None
    require(
        len(token_ids) > 0, "the prompt is empty; a completion needs at least one token to continue"
    )
    return Prompt(id=id, text=text, token_ids=token_ids, columns=columns, images=images)


def _has_picture(columns: Sequence[Any], text: Any) -> bool:
    """Return whether a column holds a picture (the path or bytes of a file, or a PIL image), or the
    messages do. Other texts in the column may be there for reward functions.
    """

    def is_picture(value: Any) -> bool:
        if isinstance(value, str):
            return re.fullmatch(PICTURE_FILE, value) is not None
        is_file = isinstance(value, dict) and {"bytes", "path"} <= value.keys()
        return is_file or type(value).__module__.startswith("PIL.")

    messages = [m for m in text if isinstance(m, dict)] if isinstance(text, list) else []
    contents = [m["content"] for m in messages if isinstance(m.get("content"), list)]
    parts = [part for content in contents for part in content if isinstance(part, dict)]
    values = [v for column in columns for v in (column if isinstance(column, list) else [column])]
    return any(part.get("type") == "image" for part in parts) or any(map(is_picture, values))


def _result(answer: Any) -> Any:
    """Return the result after GSM8K's ####, or the answer as it is if it has none."""
    has_result = isinstance(answer, str) and "####" in answer
    return answer.rpartition("####")[2].strip() if has_result else answer


def _parse_tools(value: Any) -> list[dict] | None:
    """Return the tools of a record, which can be a list or its JSON text. None: they are neither.

    Arrow fills up the fields that one schema lacks and another has with nulls, which are dropped.
    """
    if isinstance(value, str) and value:
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return None
    try:
        tools = _without_nulls(value or [])
    except RecursionError:  # schemas nested too deeply
        return None
    ok = isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)
    return tools if ok else None


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_nulls(v) for k, v in value.items() if v is not None}
    return [_without_nulls(v) for v in value] if isinstance(value, list) else value


def system_prompt(option: str) -> str:
    """Return the text of --system-prompt: the option's value, or the content of the file it names.

    White space at both ends is removed, such as the last line break of a file.
    """
    if os.path.isfile(option):
        with reading(f"--system-prompt {option}", "give UTF-8"):
            text = Path(option).read_text(encoding="utf-8")
        if not text.strip():
            raise UserError(f"--system-prompt {option} is an empty file: write the text into it.")
        return text.strip()
    if option and not option.strip():
        raise UserError("--system-prompt is blank: give a text or a file, or leave it out.")
    # one word with an ending: probably a path with a mistake
    if Path(option).suffix in (".txt", ".md") and len(option.split()) == 1:
        raise UserError(f"--system-prompt {option} is not a file: correct the path.")
    return option.strip()


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
