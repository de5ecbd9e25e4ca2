"""Read the records of a data source: a JSONL, CSV or Parquet file, a folder saved by Hugging Face's
`datasets`, a data set of the hub, a built-in task, or the records themselves.

In: a source. Out: its records (dicts) in order, each with its location for error messages. Read
next: prompts.py, which turns them into prompts; hub.py and gym.py, which need extra packages.

The `datasets` package is not needed for a saved folder, because its `save_to_disk` writes Arrow
streams and a state.json that lists them. A `DatasetDict` is a folder of such folders, one per
split, listed in dataset_dict.json.
"""

from __future__ import annotations

import csv
import json
import pickle
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from nanogrpo.data import gym, hub, tasks
from nanogrpo.errors import UserError, read_json, reading

Record = tuple[str, dict]  # (where it is: "file.jsonl:12" or "folder, row 3"; the record)
# A name, or records: a list of dicts, a `datasets.Dataset`, or a `DatasetDict` with splits.
Source = str | Iterable[dict] | Mapping[str, Any]


def read(
    source: Source, split: str = "train", held_out: bool = False, config: str = "", most: int = 0
) -> list[Record]:
    """Return all records of a source.

    `split` selects one of the splits of a data set of the hub or of a saved `DatasetDict`.
    `held_out` selects the held-out problems of a task, which defines its own split. `config` is the
    configuration of a data set of the hub. `most` is the number of records that are needed, for
    sources that make them; 0: all. Raises UserError, with the file and line, if something is
    missing, empty or damaged.
    """
    if not isinstance(source, str):
        found = _given(source, split)
    elif source in tasks.TASKS:
        found = _numbered(source, tasks.records("eval" if held_out else "train"))
    elif source.startswith(gym.PREFIX):
        found = _numbered(source, gym.records(source, held_out, most))
    elif uses_hub(source):
        records = _of_split(hub.load(source, config), split, source)
        with reading(f"--data {source}", "download the data set again"):
            found = _numbered(source, records.to_list())
    else:
        with reading(source, "write it again"):
            found = _from_path(Path(source), split)
    if not found:
        raise UserError(f"{name(source)} holds no prompts: put at least one record in it.")
    return found


def holds_out(source: Source, split: str, config: str = "") -> bool:
    """Return whether a source has held-out prompts: a task, or a data set with that split."""
    if not isinstance(source, str):
        return isinstance(source, Mapping) and split in source
    if source in tasks.TASKS or source.startswith(gym.PREFIX):
        return True
    return split in (hub.load(source, config) if uses_hub(source) else _splits(Path(source)))


def name(source: Source) -> str:
    """Return what messages call a source: its name, or "data" for records."""
    return source if isinstance(source, str) else "data"


def uses_hub(source: Source) -> bool:
    """Return whether the package `datasets` reads a source: a hub id, or a folder of data files."""
    if not isinstance(source, str) or source in tasks.TASKS:
        return False
    saved = [Path(source, name) for name in ("state.json", "dataset_dict.json")]
    return hub.is_name(source) and not any(path.is_file() for path in saved)


def _given(source: Iterable[dict] | Mapping[str, Any], split: str) -> list[Record]:
    records = _of_split(source, split, "data") if isinstance(source, Mapping) else source
    if not isinstance(records, Iterable):
        raise UserError(
            f"data is a {type(records).__name__}: give names, or an iterable of records such as a "
            "list of dicts."
        )
    found = _numbered("data", records)
    for place, record in found:
        for column, value in record.items() if isinstance(record, Mapping) else ():
            if not isinstance(column, str):
                raise UserError(
                    f"{place}: the column {column!r} has no text as its name: rename it."
                )
            try:
                json.dumps(value, sort_keys=True, default=_TEXT.get(column, _as_text))
            except Exception as e:  # the class of the value may raise anything
                raise UserError(
                    f"{place}: the column {column!r} holds a {type(value).__name__} that cannot be "
                    "stored as JSON: give texts, numbers, lists and dicts."
                ) from e
    return found


def _as_text(value: object) -> str:
    """Return the text of a value that JSON lacks, such as a date. Raise an exception if reward
    functions could not receive a copy of it, or if the text would differ in the next run.
    """
    pickle.dumps(value)
    if " at 0x" in (text := str(value)):
        raise TypeError(text)
    return text


def _as_text_or_picture(value: object) -> str:
    """Return the text of a value; of a PIL image, which vision/data.py stores as bytes, none."""
    return "" if type(value).__module__.startswith("PIL.") else _as_text(value)


_TEXT = dict.fromkeys(("image", "images", "prompt"), _as_text_or_picture)  # by column


def _of_split(splits: Mapping[str, Any], split: str, source: str) -> Any:
    _check_split(source, split, splits)
    return splits[split]


def _check_split(source: str | Path, split: str, splits: Iterable[str]) -> None:
    if split not in splits:
        raise UserError(
            f"{source} has no split {split!r} but {', '.join(map(repr, splits))}: name one with "
            "--dataset-train-split or --dataset-test-split."
        )


def _from_path(path: Path, split: str) -> list[Record]:
    if path.is_dir():
        return _saved(path, split)
    if not path.is_file():
        raise UserError(
            f"{path} is not a file: name a .jsonl, .csv or .parquet file, a folder written by "
            "save_to_disk, the hub id of a data set (owner/name), reasoning_gym:NAME, or the "
            "built-in task arithmetic."
        )
    if path.suffix == ".parquet":
        return _parquet(path)
    if path.suffix == ".csv":
        return list(_csv(path))
    if path.suffix in (".jsonl", ".json"):
        return list(_jsonl(path))
    raise UserError(
        f"{path}: the format {path.suffix!r} is unknown; use .jsonl (one JSON object per line), "
        ".csv or .parquet."
    )


def _numbered(source: str | Path, records: Iterable[dict]) -> list[Record]:
    return [(f"{source}, row {i}", record) for i, record in enumerate(records, start=1)]


def _csv(path: Path) -> Iterator[Record]:
    """Yield the records of a file whose first line names the columns. All values are texts."""
    csv.field_size_limit(1 << 30)  # a long solution is no reason to stop
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = csv.reader(file, strict=True)
        with reading(
            lambda: f"{path}:{rows.line_num}:", "write the file again", "not CSV in UTF-8"
        ):
            columns = next(rows, [])
            if len(set(columns)) < len(columns):
                raise UserError(f"{path}:1: two columns have the same name; rename one of them.")
            for row in rows:
                place = f"{path}:{rows.line_num}"
                if row and len(row) != len(columns):
                    raise UserError(
                        f"{place}: it has {len(row)} fields but the first line names "
                        f"{len(columns)} columns; put texts with commas in double quotes."
                    )
                if row:
                    yield place, dict(zip(columns, row))


def _jsonl(path: Path) -> Iterator[Record]:
    """Yield the records of a file. Lines are counted from 1, including blank ones."""
    # Only b"\n" ends a line. str.splitlines would also split at U+2028, which JSON strings allow.
    number, advice = 1, "each line must be one complete JSON object"
    with path.open("rb") as file, reading(lambda: f"{path}:{number}:", advice, "not JSON"):
        for number, line in enumerate(file, start=1):
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            if text.strip():
                yield f"{path}:{number}", json.loads(text)


def _parquet(path: Path) -> list[Record]:
    _pyarrow(path)
    from pyarrow import parquet

    with reading(path, "write the file again", "cannot be read as Parquet"):
        return _numbered(path, parquet.read_table(path).to_pylist())


def _saved(folder: Path, split: str) -> list[Record]:
    """Read a folder of `Dataset.save_to_disk`, or one split of `DatasetDict.save_to_disk`."""
    if splits := _splits(folder):
        _check_split(folder, split, splits)
        folder = folder / split
    pyarrow = _pyarrow(folder)
    from pyarrow import ipc

    saved = read_json(folder / "state.json")
    with reading(folder / "state.json", "give a folder of save_to_disk", "names no data files"):
        paths = [folder / entry["filename"] for entry in saved["_data_files"]]
    records = []
    for path in paths:
        with (
            reading(path, "save the data again", "cannot be read as Arrow"),
            pyarrow.memory_map(str(path)) as file,
            ipc.open_stream(file) as stream,
        ):
            table = stream.read_all()
            table.validate(full=True)  # damaged offsets would read memory that is not ours
            records += table.to_pylist()
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
