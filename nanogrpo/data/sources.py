"""Rows from where they lie: JSONL, Parquet, a folder that Hugging Face's `datasets` has saved, a
built-in task.

In: the name of a source. Out: its rows (dicts) in its order, each with the words that find it again
in an error. Read next: data.py, which makes prompts of them.

`datasets` itself is not needed: `save_to_disk` writes Arrow streams and a state.json that names
them, and a `DatasetDict` is a folder of such folders, one a split, named in dataset_dict.json.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from nanogrpo.data import tasks
from nanogrpo.errors import UserError, read_json

Row = tuple[str, dict]  # (where it is: "file.jsonl:12" or "folder, row 3"; the row)


def read(source: str, split: str = "train", held_out: bool = False) -> list[Row]:
    """All rows of a source. `split` is asked of a saved `DatasetDict`; `held_out` of a built-in
    task, which splits by itself.

    UserError, with the file and line, on what is missing, empty or damaged.
    """
    path = Path(source)
    if source in tasks.TASKS:
        rows = [
            (f"{source}, row {i}", row)
            for i, row in enumerate(tasks.rows(source, "eval" if held_out else "train"), 1)
        ]
    elif path.is_dir():
        rows = list(_saved(path, split))
    elif not path.is_file():
        raise UserError(
            f"{path} is not a file: name a .jsonl or .parquet file, a folder of save_to_disk, or a built-in task"
        )
    elif path.suffix == ".parquet":
        rows = list(_parquet(path))
    elif path.suffix in (".jsonl", ".json"):
        rows = list(_jsonl(path))
    else:
        raise UserError(
            f"{path}: cannot tell the format from {path.suffix!r}; name it .jsonl (one JSON object a line) or .parquet"
        )
    if not rows:
        raise UserError(f"{source} holds no prompts: put at least one row in it")
    return rows


def holds_out(source: str, split: str) -> bool:
    """Whether a source of training prompts brings held-out ones: a built-in task, or a saved
    `DatasetDict` with that split.
    """
    return source in tasks.TASKS or split in _splits(Path(source))


def _jsonl(path: Path) -> Iterator[Row]:
    """ "file.jsonl:12" counts lines from 1, blank ones included."""
    # Lines are split at b"\n" alone: str.splitlines would also split at U+2028 and its kin, which
    # JSON allows in a text.
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                if text.strip():
                    yield f"{path}:{number}", json.loads(text)
            # not JSON, or not UTF-8, or brackets without end
            except (ValueError, RecursionError) as error:
                raise UserError(
                    f"{path}:{number}: not JSON ({error}); each line must be one whole JSON object"
                ) from error


def _parquet(path: Path) -> Iterator[Row]:
    pyarrow = _pyarrow(path)
    from pyarrow import parquet

    try:
        rows = parquet.read_table(path).to_pylist()
    except pyarrow.ArrowException as error:
        raise UserError(
            f"{path} cannot be read as Parquet ({error}): write the file again"
        ) from error
    for number, row in enumerate(rows, start=1):
        yield f"{path}, row {number}", row


def _saved(folder: Path, split: str) -> Iterator[Row]:
    """A folder of `Dataset.save_to_disk` or, by its split, of `DatasetDict.save_to_disk`."""
    if splits := _splits(folder):
        if split not in splits:
            raise UserError(
                f"{folder} has no split {split!r} but {', '.join(map(repr, splits))}: name one (--dataset-train-split)"
            )
        folder = folder / split
    pyarrow = _pyarrow(folder)
    from pyarrow import ipc

    try:
        names = [entry["filename"] for entry in read_json(folder / "state.json")["_data_files"]]
    except (KeyError, TypeError) as error:
        raise UserError(
            f"{folder} is not a folder of save_to_disk: its state.json names no data files"
        ) from error
    number = 0
    for name in names:
        try:
            with pyarrow.memory_map(str(folder / name)) as file, ipc.open_stream(file) as stream:
                rows = stream.read_all().to_pylist()
        except (pyarrow.ArrowException, OSError) as error:
            raise UserError(
                f"{folder / name} cannot be read as Arrow ({error}): save the data set again"
            ) from error
        for row in rows:
            number += 1
            yield f"{folder}, row {number}", row


def _splits(folder: Path) -> list[str]:
    """The splits of a saved `DatasetDict`; none of anything else."""
    if not (folder / "dataset_dict.json").is_file():
        return []
    splits = read_json(folder / "dataset_dict.json").get("splits")
    if not isinstance(splits, list) or not all(isinstance(split, str) for split in splits):
        raise UserError(f"{folder / 'dataset_dict.json'} names no splits: save the data set again")
    return splits


def _pyarrow(path: Path):
    try:
        import pyarrow
    except ImportError as error:
        raise UserError(
            f"{path} needs pyarrow to be read: pip install pyarrow, or convert it to .jsonl"
        ) from error
    return pyarrow
