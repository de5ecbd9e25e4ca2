"""Read data sets from the Hugging Face hub, folders of data files, folders that `save_to_disk` has
written, CSV and Parquet files, a `DatasetDict` from Python, and the built-in task `arithmetic`.

In: the name of a source, or a dict of splits. Out: the records of a split. CSV files and the task
need no extra package; all others need `pip install 'nanogrpo[data]'`. Read next:
nanogrpo/data/sources.py, extras/arithmetic/task.py.
"""

import contextlib
import csv
import importlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nanogrpo.config import Config
from nanogrpo.errors import UserError, reading, without_nulls
from nanogrpo.extras.arithmetic import task
from nanogrpo.extras.options import DataOptions
from nanogrpo.feature import Feature
from nanogrpo.types import Prompt


class Sources(Feature):
    def __init__(self, cfg: Config):
        self.options = cfg if isinstance(cfg, DataOptions) else DataOptions()

    def encode(self, prompt: Prompt, variables: dict, *_: Any) -> None:
        """Parse the variables of the chat template that are columns of the data."""
        for name in variables.keys() & prompt.columns.keys():
            variables[name] = _variable(variables[name])

    def rows(self, source: Any, split: str) -> list[dict] | None:
        splits = source if isinstance(source, Mapping) else None
        if isinstance(source, str):
            if source == task.NAME:
                return task.records("train" if split == "train" else "eval")
            if Path(source).suffix in (".csv", ".parquet"):
                return [] if split == "held out" else _file(Path(source))
            splits = _load(source, self.options.dataset_config) if uses_hub(source) else None
        if splits is None:
            return None
        train, test = self.options.dataset_train_split, self.options.dataset_test_split
        wanted = train if split == "train" else test
        if split == "held out" and (wanted == train or wanted not in splits):
            return []
        if "" in splits:  # one data set without splits
            wanted = ""
        if wanted not in splits:
            raise UserError(
                f"{source if isinstance(source, str) else 'data'} has no split {wanted!r}, only "
                f"{', '.join(map(repr, splits))}: name one with --dataset-train-split or "
                "--dataset-test-split."
            )
        with reading(f"--data {source}", "save or download the data set again"):
            found = splits[wanted]
            if not hasattr(found, "to_list"):
                return list(found)
            found.data.validate(full=True)  # a damaged Arrow file could crash the process
            return found.to_list()


def _variable(value: Any) -> Any:
    """Return the value of a chat template's variable. In the data, the value may be JSON text.

    If objects have different fields, Arrow fills in the missing fields with nulls. These nulls are
    dropped.
    """
    with contextlib.suppress(ValueError, RecursionError, TypeError):  # not JSON
        is_json = isinstance(value, str) and value[:1] in "[{"
        return json.loads(value if is_json else json.dumps(value), object_hook=without_nulls)
    return value


def uses_hub(source: str) -> bool:
    """Return whether a source is a folder or a possible hub id (owner/name that is not a file)."""
    is_id = re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", source) is not None
    suffixes = (".json", ".jsonl", ".csv", ".parquet", ".txt")
    # the methods of Path would raise an error for a long name
    is_file = os.path.isfile(source) or source.endswith(suffixes)
    return os.path.isdir(source) or (is_id and not is_file)


def _file(path: Path) -> list[dict]:
    if path.suffix == ".parquet":
        with reading(path, "write the file again", "cannot be read as Parquet"):
            return _import("pyarrow.parquet", path).read_table(path).to_pylist()
    csv.field_size_limit(1 << 30)  # the default size limit is too small for long solutions
    with reading(path, "name another file"), path.open(encoding="utf-8-sig", newline="") as file:
        rows = csv.DictReader(file, strict=True)
        found = []
        with reading(
            lambda: f"{path}:{rows.reader.line_num}:", "write the file again", "not CSV in UTF-8"
        ):
            for row in rows:
                if None in row or None in row.values():
                    raise UserError(
                        f"{path}:{rows.reader.line_num}: the line has more or fewer fields than "
                        "the first line; put texts with commas in double quotes."
                    )
                found.append(row)
    return found


def _load(source: str, config: str) -> Mapping[str, Any]:
    """Return the splits of a data set by name. A data set without splits is returned as {"": data
    set}."""
    datasets = _import("datasets", source)
    try:
        if any(Path(source, name).is_file() for name in ("state.json", "dataset_dict.json")):
            saved = datasets.load_from_disk(source)
            return saved if isinstance(saved, Mapping) else {"": saved}
        return datasets.load_dataset(source, config or None)
    # the package datasets raises errors of many types
    except Exception as e:
        reason = f"{type(e).__name__}: {' '.join(str(e).split())[:300]}"
        raise UserError(
            f"--data {source} is not a local file, and the package datasets cannot load it "
            f"({reason}): correct the name, or --dataset-config."
        ) from e


def _import(package: str, source: str | Path) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as e:
        raise UserError(
            f"--data {source} can only be read with the package {package.partition('.')[0]}: pip "
            "install 'nanogrpo[data]', or name a .jsonl file."
        ) from e
