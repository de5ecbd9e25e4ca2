"""Read the records of a data source: JSONL, Parquet, a folder saved by Hugging Face's `datasets`,
or a built-in task.

In: the name of a source. Out: its records (dicts) in order, each with its location for error
messages. Read next: prompts.py, which turns them into prompts.

The `datasets` package is not needed, because its `save_to_disk` writes Arrow streams and a
state.json that lists them. A `DatasetDict` is a folder of such folders, one per split, listed in
dataset_dict.json.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from nanogrpo.data import tasks
from nanogrpo.errors import UserError, read_json

Record = tuple[str, dict]  # (where it is: "file.jsonl:12" or "folder, row 3"; the record)


def read(source: str, split: str = "train", held_out: bool = False) -> list[Record]:
    """Return all records of a source.

    `split` selects the split of a saved `DatasetDict`. `held_out` selects the held-out problems of
    a built-in task, which defines its own split. Raises UserError, with the file and line, if
    something is missing, empty or damaged.
    """
    path = Path(source)
    if source in tasks.TASKS:
        return _numbered(source, tasks.records("eval" if held_out else "train"))
    if path.is_dir():
        found = _saved(path, split)
    elif not path.is_file():
        raise UserError(
            f"{path} is not a file: name a .jsonl or .parquet file, a folder written by "
            "save_to_disk, or a built-in task."
        )
    elif path.suffix == ".parquet":
        found = _parquet(path)
    elif path.suffix in (".jsonl", ".json"):
        found = list(_jsonl(path))
    else:
        raise UserError(
            f"{path}: the format {path.suffix!r} is unknown; use .jsonl (one JSON object per line) "
            "or .parquet."
        )
    if not found:
        raise UserError(f"{source} holds no prompts: put at least one record in it.")
    return found


def holds_out(source: str, split: str) -> bool:
    """Return whether a source has held-out prompts: a built-in task, or a saved `DatasetDict` with
    that split.
    """
    return source in tasks.TASKS or split in _splits(Path(source))


def _numbered(source: str | Path, records: list[dict]) -> list[Record]:
    return [(f"{source}, row {i}", record) for i, record in enumerate(records, start=1)]


def _jsonl(path: Path) -> Iterator[Record]:
    """Yield the records of a file. Lines are counted from 1, including blank ones."""
    # Only b"\n" ends a line. str.splitlines would also split at U+2028, which JSON strings allow.
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                if text.strip():
                    yield f"{path}:{number}", json.loads(text)
            # not JSON, not UTF-8, or nested too deeply
            except (ValueError, RecursionError) as e:
                raise UserError(
                    f"{path}:{number}: not JSON ({e}); each line must be one complete JSON object."
                ) from e


def _parquet(path: Path) -> list[Record]:
    pyarrow = _pyarrow(path)
    from pyarrow import parquet

    try:
        return _numbered(path, parquet.read_table(path).to_pylist())
    except pyarrow.ArrowException as e:
        raise UserError(f"{path} cannot be read as Parquet ({e}): write the file again.") from e


def _saved(folder: Path, split: str) -> list[Record]:
    """Read a folder of `Dataset.save_to_disk`, or one split of `DatasetDict.save_to_disk`."""
    if splits := _splits(folder):
        if split not in splits:
            raise UserError(
                f"{folder} has no split {split!r} but {', '.join(map(repr, splits))}: name one "
                "with --dataset-train-split."
            )
        folder = folder / split
    pyarrow = _pyarrow(folder)
    from pyarrow import ipc

    try:
        names = [entry["filename"] for entry in read_json(folder / "state.json")["_data_files"]]
    except (KeyError, TypeError) as e:
        raise UserError(
            f"{folder} was not written by save_to_disk: its state.json names no data files."
        ) from e
    records = []
    for path in (folder / name for name in names):
        try:
            with pyarrow.memory_map(str(path)) as file, ipc.open_stream(file) as stream:
                records += stream.read_all().to_pylist()
        except (pyarrow.ArrowException, OSError) as e:
            raise UserError(f"{path} cannot be read as Arrow ({e}): save the data again.") from e
    return _numbered(folder, records)


def _splits(folder: Path) -> list[str]:
    """Return the splits of a saved `DatasetDict`. Any other folder has none."""
    path = folder / "dataset_dict.json"
    splits = read_json(path).get("splits") if path.is_file() else []
    if not isinstance(splits, list):
        raise UserError(f"{path} names no splits: save the data set again.")
    return splits


def _pyarrow(path: Path):
    try:
        import pyarrow
    except ImportError as e:
        raise UserError(
            f"{path} can only be read with pyarrow: pip install pyarrow, or convert it to .jsonl."
        ) from e
    return pyarrow
