"""Read the records of a log, keep an earlier log, and write files that are never half-finished.

In: a path in the output folder. Out: its records, or the written file; or a UserError that names
the file. Read next: logs/console.py, logs/completions.py, logs/plot.py, which use it.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nanogrpo.errors import UserError, reading


def read_records(path: Path) -> Iterator[tuple[bytes, dict]]:
    """Yield each line of a metrics.jsonl with its record.

    A half-written last line is skipped, because a run may be in progress or may have been killed.
    Any other damaged line raises UserError: skipping it would falsify the log.
    """
    with reading(path, "give the output folder of a run"):
        lines = path.read_bytes().splitlines()
    for number, line in enumerate(lines, start=1):
        record: Any = None
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):  # not JSON, not UTF-8, or endless brackets
            if number == len(lines):
                return
        is_object = isinstance(record, dict) and isinstance(record.get("num_tokens", 0), int)
        if not is_object or not ("run" in record or isinstance(record.get("step"), int)):
            raise UserError(f"{path}:{number} is not a record of a log: fix or remove this line.")
        yield line, record


def set_aside(path: Path) -> Path:
    """Rename `name.suffix` to the first unused name of `name-1.suffix`, `name-2.suffix`, …"""
    names = (path.with_stem(f"{path.stem}-{i}") for i in itertools.count(1))
    return path.rename(next(name for name in names if not name.exists()))


def replace(path: Path, data: bytes, durable: bool = False) -> None:
    """Write a file atomically, so a crash leaves the old or the new data. Create its folder.

    durable: this also holds for a crash of the machine, but the disk has to be waited for.
    """
    with writing(path):
        path.parent.mkdir(exist_ok=True)
        temporary = path.with_suffix(".tmp")
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        temporary.replace(path)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an error while `path` is written into a UserError."""
    try:
        yield
    except OSError as e:
        raise UserError(f"{path} could not be written ({e.strerror}): make room.") from e
