"""Read the records of a log, list checkpoints, rename an earlier log, and write files atomically.

In: a path in the output folder. Out: the records, or the written file; on failure, a UserError that
names the file. Read next: logs/console.py and extras/plot.py, which use this file.
"""

import contextlib
import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path

from nanogrpo.errors import UserError, reading, unwritten


def read_records(path: Path) -> Iterator[dict]:
    """Yield the objects of a file with one JSON object per line, such as metrics.jsonl.

    A half-written last line is skipped, because a run may be in progress or may have been killed.
    Any other damaged line raises UserError, because a log without it would be misleading.
    """
    with reading(path, "give the output folder of a run"):
        lines = path.read_bytes().splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            record = dict(json.loads(line))
            good = type(record.get("step", 0)) is int and type(record.get("run", {})) is dict
        except (ValueError, TypeError, RecursionError):
            if number == len(lines):
                return
            good = False
        if not good:
            raise UserError(f"{path}:{number} is not a record of a run: fix or remove this line.")
        yield record


def checkpoints(output_dir: str | Path) -> list[Path]:
    """Return the finished checkpoints of a run, oldest first."""
    numbered = [p for p in Path(output_dir).glob("checkpoint-*") if p.name[11:].isdecimal()]
    return sorted(numbered, key=lambda p: int(p.name[11:]))


def set_aside(path: Path) -> Path:
    """Rename `name.suffix` to the first unused name among `name-1.suffix`, `name-2.suffix`, …"""
    names = (path.with_stem(f"{path.stem}-{i}") for i in itertools.count(1))
    return path.rename(next(name for name in names if not name.exists()))


def replace(path: Path, data: bytes) -> None:
    """Write a file atomically: after a kill or a power cut, the file has either the old or the new
    data. Create the folder of the file if needed.
    """
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}.tmp")  # ranks may write the same file
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file)  # otherwise, the rename might reach the disk before the data
        temporary.replace(path)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an error that occurs while `path` is written into a UserError."""
    try:
        yield
    except OSError as e:
        raise unwritten(path, e) from e
