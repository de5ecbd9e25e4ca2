"""Turn the records of data sources into prompts, and choose the prompts of each step.

In: records from files or other sources (sources.py). Out: `Prompt`s with token ids. `draw` chooses
the prompts of a step. Read next: sources.py (where records come from), rewards/scorer.py (what
receives the other columns).

A record has one of these forms:

* {"prompt": "3+4=", ...} has a string, which is tokenized unchanged.
* {"prompt": [{"role": "user", "content": "3+4="}], ...} has messages for the chat template.
* {"question": "What is 3+4?", "answer": "It is 7.\\n#### 7"} is a record of GSM8K. The question
  becomes a user message, and the answer becomes the column `solution`.
* {"problem": "What is 3+4?", "solution": "It is \\boxed{7}."} is a record of MATH. The problem
  becomes a user message.

`from_record` describes the options that change how a record is read.
"""

import logging
import os
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from nanogrpo.config import Config
from nanogrpo.data import sources
from nanogrpo.errors import UserError, reading
from nanogrpo.feature import Feature, first
from nanogrpo.model.tokenizer import Tokenizer
from nanogrpo.types import Prompt

logger = logging.getLogger("nanogrpo")

# The runner passes these arguments to reward functions, so no column may have one of these names.
RESERVED = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
# Without --prompt-column, the prompt is the first of the following columns that a record has.
PROMPT_COLUMNS = ("prompt", "question", "problem")


def load_prompts(
    cfg: Config,
    tokenizer: Tokenizer,
    context: int,
    features: Sequence[Feature] = (),
    train_data: sources.Source | None = None,
    eval_data: sources.Source | None = None,
) -> tuple[list[Prompt], list[Prompt]]:
    """Return the training prompts and the held-out prompts. Without --eval-steps, the list of
    held-out prompts is empty.

    Every prompt leaves room for a completion in the model's context. The arguments `train_data` and
    `eval_data` are sources (such as lists of records) that replace --data and --eval-data.
    """
    data = cfg.data if train_data is None else [train_data]
    prompts = load(cfg, tokenizer, data, features, context=context)
    if len(prompts) < cfg.prompts_per_step:  # a repeated prompt would be counted twice
        raise UserError(
            f"--data {' '.join(cfg.data)} holds {len(prompts)} prompts but a step draws "
            f"{cfg.prompts_per_step} different ones: add prompts, or lower --generation-batch-size."
        )
    if not cfg.eval_steps:
        return prompts, []
    named = cfg.eval_data if eval_data is None else [eval_data]
    split = "eval" if named else "held out"
    return prompts, load_held_out(cfg, tokenizer, context, named or data, features, split)


def load_held_out(
    cfg: Config,
    tokenizer: Tokenizer,
    context: int,
    data: Sequence[sources.Source],
    features: Sequence[Feature] = (),
    split: str = "eval",
) -> list[Prompt]:
    """Return the first --eval-samples prompts of these sources. `sources.read` explains `split`."""
    found = load(cfg, tokenizer, data, features, context=context, split=split)
    if not found:
        raise UserError(
            "--eval-steps asks for evaluation, but there are no held-out prompts: name some with "
            "--eval-data."
        )
    return found[: cfg.eval_samples or None]


def load(
    cfg: Config,
    tokenizer: Tokenizer,
    data: Sequence[sources.Source],
    features: Sequence[Feature] = (),
    *,
    context: int = 1 << 30,
    split: str = "train",
) -> list[Prompt]:
    """Return the prompts of all sources. `sources.read` explains `split`.

    `Prompt.id` is the position of the record in the concatenation of all sources. The random
    numbers of a completion depend on this id. If a source is added at the end, or a long prompt is
    dropped, all other prompts keep their ids.

    A prompt is never truncated, because a truncated question can have a different answer. A prompt
    with more than --max-prompt-length tokens (after the chat template) is refused or dropped.
    """
    room = context - cfg.max_completion_length
    if room < 1:
        raise UserError(
            f"--max-completion-length {cfg.max_completion_length} leaves no room for a prompt in a "
            f"context of {context} tokens: lower this limit."
        )
    longest = min(cfg.max_prompt_length or room, room)
    read = tokenizer.template_variables
    if ignored := (cfg.chat_template_kwargs or {}).keys() - read:
        raise UserError(
            f"--chat-template-kwargs sets {min(ignored)}, but the model's chat template reads "
            f"{', '.join(sorted(read)) or 'no variables'}: leave this variable out."
        )
    prompts: list[Prompt] = []
    first_id, system = 0, system_prompt(cfg.system_prompt)
    for source in data:
        records = sources.read(source, split, features)
        folder = Path(source if isinstance(source, str) else "")
        folder = folder if folder.is_dir() else folder.parent
        kept = []
        for id, (place, record) in enumerate(records, first_id):
            prompt = from_record(record, tokenizer, id, place, cfg, system, features, folder)
            if len(prompt.token_ids) <= longest:
                kept.append(prompt)
            elif cfg.long_prompts == "refuse":
                raise UserError(
                    f"{place}: the prompt has {len(prompt.token_ids)} tokens but the limit is "
                    f"{longest}; raise --max-prompt-length, remove the record, or use "
                    "--long-prompts drop."
                )
        if dropped := len(records) - len(kept):
            logger.info(
                f"{sources.name(source)}: {dropped} of {len(records)} prompts have more than "
                f"{longest} tokens and are dropped."
            )
        prompts += kept
        first_id += len(records)
    return prompts


def from_record(
    record: dict,
    tokenizer: Tokenizer,
    id: int,
    place: str,
    cfg: Config,
    system_prompt: str,
    features: Sequence[Feature],
    folder: Path,
) -> Prompt:
    """Turn a record into a prompt. The top of this file lists the forms of records.

    The option --prompt-column names the column with the prompt; the default is the first of
    PROMPT_COLUMNS that the record has. A string in the column `prompt` is tokenized unchanged. A
    string in any other prompt column becomes a user message if the model has a chat template.

    The option --answer-column names the column that becomes `solution`. If the text of this column
    contains GSM8K's ####, only the text after the #### is used.

    With a chat template, `system_prompt` becomes a system message, and a text prompt becomes a user
    message. Without a chat template, the system prompt and an empty line are put before the text.

    The options --enable-thinking and --chat-template-kwargs set variables of the chat template
    (`Tokenizer.render`). A column with the name of such a variable sets the variable for this
    record.

    `place` names the record in error messages. `folder` is the folder of the data file.
    """

    def require(ok: bool, problem: str) -> None:
        if not ok:
            raise UserError(f"{place}: {problem}.")

    require(
        isinstance(record, dict),
        f'a record must be an object like {{"prompt": ...}}, not a {type(record).__name__}',
    )
    columns, found = dict(record), ", ".join(map(repr, record)) or "no columns at all"
    column = cfg.prompt_column or next((c for c in PROMPT_COLUMNS if c in record), "prompt")
    for option, named in (("--prompt-column", column), ("--answer-column", cfg.answer_column)):
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
    if cfg.answer_column:
        columns["solution"] = _result(record[cfg.answer_column])
    elif column == "question" and _result(answer) != answer:
        columns.setdefault("solution", _result(answer))
    # an empty cell does not set a variable, but the value False does
    read = tokenizer.template_variables
    own = {n: x for n, x in columns.items() if n in read and x not in (None, "", [])}
    is_question = column != "prompt" or system_prompt or own
    if isinstance(text, str) and tokenizer.has_chat_template and is_question:
        text = [{"role": "user", "content": text}]
    is_chat = isinstance(text, list) and all(
        isinstance(m, dict)
        and isinstance(m.get("role"), str)
        and isinstance(m.get("content"), str | list)
        for m in text
    )
    malformed = (
        f'`{column}` must be a string or a list of {{"role": string, "content": string}}; correct '
        "the record"
    )
    require(isinstance(text, str) or (is_chat and text), malformed)
    if isinstance(text, str):
        text = f"{system_prompt}\n\n{text}" if system_prompt else text
    elif system_prompt:
        require(
            not any(m["role"] in ("system", "developer") for m in text),
            "the messages have a system message already; leave --system-prompt out, or remove it "
            "from the data",
        )
        text = [{"role": "system", "content": system_prompt}, *text]
    prompt = Prompt(id, text, [], columns)
    variables = cfg.chat_variables | own

    def tokenize() -> list[int]:
        return tokenizer.encode_prompt(prompt.text, **variables)

    try:
        ids = first(f.encode(prompt, variables, folder, tokenize) for f in features)
        if ids is None and is_chat and not all(isinstance(m["content"], str) for m in text):
            raise UserError(f"{malformed}.")
        prompt.token_ids = tokenize() if ids is None else ids
    except UserError as e:  # for example, the template rejected the messages
        raise UserError(f"{place}: {e}") from e
    require(bool(prompt.token_ids), "the prompt is empty; it needs at least one token")
    return prompt


def _result(answer: Any) -> Any:
    """Return the text after GSM8K's ####, or the unchanged answer if it contains no ####."""
    if isinstance(answer, str) and "####" in answer:
        return answer.rpartition("####")[2].strip()
    return answer


def system_prompt(option: str) -> str:
    """Return the value of --system-prompt, or the contents of the file that it names.

    Leading and trailing white space is removed, such as the line break at the end of a file.
    """
    if os.path.isfile(option):
        with reading(f"--system-prompt {option}", "give UTF-8"):
            return Path(option).read_text(encoding="utf-8").strip()
    # one word with a file extension is probably a mistyped path
    if Path(option).suffix in (".txt", ".md") and len(option.split()) == 1:
        raise UserError(f"--system-prompt {option} is not a file: correct the path.")
    return option.strip()


# --- the prompts of a step ---


def draw(prompts: list[Prompt], n: int, seed: int, step: int) -> list[Prompt]:
    """Choose the n prompts of a step. This function is pure, so a resumed run draws the same
    prompts as an uninterrupted run.

    Each epoch is a new random order of all prompts, and the epochs form one long sequence. Step s
    takes positions s·n … s·n+n-1 of this sequence. Each prompt occurs once per epoch, even if n
    does not divide the size of the dataset. No prompt occurs twice in a step as long as n ≤
    len(prompts).
    """
    places = (divmod(i, len(prompts)) for i in range(step * n, step * n + n))
    return [prompts[_order(len(prompts), n, seed, epoch)[offset]] for epoch, offset in places]


# Cached, because every step needs the shuffled order of its epoch, or of two epochs.
@lru_cache(maxsize=4)
def _order(count: int, n: int, seed: int, epoch: int) -> np.ndarray:
    """Return the order of the prompts in an epoch, as a permutation [count] int64.

    A step that crosses the boundary of two epochs takes `tail` prompts from the old epoch and n -
    tail from the new epoch. With independent permutations, a step across two epochs could contain a
    prompt twice, and this prompt would have twice the weight. So the first n - tail prompts of the
    new epoch are chosen from the prompts that are not in the tail of the old epoch. All other
    prompts follow in random order. So the orders of the epochs form a chain, in which each order
    depends on the previous one. This chain starts at the last epoch that began exactly at the start
    of a step (at most n epochs back).
    """
    begin = epoch
    while n <= count and begin * count % n:  # if n > count, steps repeat prompts anyway
        begin -= 1
    order = _permutation(count, seed, begin)
    for e in range(begin + 1, epoch + 1):
        tail, new = e * count % n, _permutation(count, seed, e)
        # positions in `new` of prompts that are not in the tail (at least n - tail)
        chosen = np.flatnonzero(~np.isin(new, order[count - tail :]))[: n - tail]
        order = np.concatenate([new[chosen], np.delete(new, chosen)])
    return order


def _permutation(count: int, seed: int, epoch: int) -> np.ndarray:
    """Return a random permutation [count] int64. We use RandomState instead of default_rng, because
    numpy guarantees that RandomState's numbers are the same in all versions.
    """
    words = [seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF, epoch]
    return np.random.RandomState(words).permutation(count)
