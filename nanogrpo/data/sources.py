"""Read the records of a data source.

In: a source, which is a JSON-lines file, a list of records, or anything else that a feature can
read. Out: its records (dicts) in order, each with its location for error messages. Read next:
prompts.py, which turns records into prompts.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from nanogrpo.errors import UserError, reading
from nanogrpo.feature import Feature, first

Record = tuple[str, dict]  # ("file.jsonl:12", record) or ("arithmetic, row 3", record)
# A source is a name, a list of records (dicts), or another object that a feature can read.
Source = Any


def read(source: Source, split: str = "train", features: Sequence[Feature] = ()) -> list[Record]:
    """Return all records of a source.

    `split` is "train", "eval" (a source in --eval-data), or "held out" (the held-out part of a
    training source, which may be empty). Raises UserError, with the file and line, if a file is
    missing, empty or damaged.
    """
    rows = first(feature.rows(source, split) for feature in features)
    if rows is None and split == "held out":
        return []
    with reading(name(source), "write it again, or give a list of records"):
        if rows is None and isinstance(source, str):
            found = list(_json_lines(Path(source)))
        else:
            rows = source if rows is None else rows
            found = [(f"{name(source)}, row {i}", record) for i, record in enumerate(rows, start=1)]
    if not found and split != "held out":
        raise UserError(f"{name(source)} holds no prompts: put at least one record in it.")
    return found


def name(source: Source) -> str:
    """Return the name of a source, for use in messages. A list of records is called "data"."""
    return source if isinstance(source, str) else "data"


def _json_lines(path: Path) -> Iterator[Record]:
    """Yield the records of a file. Lines are counted from 1, including blank lines."""
    if not path.is_file() or path.suffix not in (".jsonl", ".json"):
        raise UserError(
            f"{path} is not a .jsonl file: name such a file, `arithmetic` (a built-in task), or "
            "another source that docs/data.md lists."
        )
    # Only b"\n" ends a line. The method str.splitlines also splits at U+2028, which JSON allows.
    number, advice = 1, "each line must be one complete JSON object"
    with path.open("rb") as file, reading(lambda: f"{path}:{number}:", advice, "not JSON"):
        for number, line in enumerate(file, start=1):
            text = line.decode("utf-8-sig")
            if text.strip():
                yield f"{path}:{number}", json.loads(text)
