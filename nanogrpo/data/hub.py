"""Read data sets from the Hugging Face hub, and folders in its layout, with the package `datasets`.

In: a hub id ("openai/gsm8k") or a folder of data files, and the name of a configuration. Out: the
records of a split. The package comes with the extra `data`; nothing else in the project needs it.
Read next: sources.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nanogrpo.errors import UserError


def is_name(source: str) -> bool:
    """Return whether a source is a folder, or can be a hub id: owner/name, and no file."""
    path = Path(source)
    is_id = re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", source) is not None
    is_file = path.is_file() or path.suffix in (".json", ".jsonl", ".csv", ".parquet", ".txt")
    return path.is_dir() or (is_id and not is_file)


def load(source: str, config: str) -> Mapping[str, Any]:
    """Return the splits of a data set, by name. Each iterates over its records."""
    try:
        import datasets
    except ImportError as e:
        raise UserError(
            f"--data {source} can only be read with the package datasets: pip install "
            "'nanogrpo[data]', or name a .jsonl, .csv or .parquet file."
        ) from e
    try:
        return datasets.load_dataset(source, config or None)
    # the library raises errors of many types, for the name, the network, the files and the cache
    except Exception as e:
        reason = f"{type(e).__name__}: {' '.join(str(e).split())[:300]}"
        if names := re.search(r"Config name is missing.*?\[(.*?)\]", reason):
            raise UserError(
                f"--data {source} has the configurations {names[1]}: name one with "
                "--dataset-config."
            ) from e
        if Path(source).is_dir():
            problem, advice = "is a folder that datasets cannot load", "name another"
        elif isinstance(e, ConnectionError):
            problem = "is no file or folder here, and the hub cannot be reached"
            advice = "correct the name, or download the data set on a machine with a network"
        else:
            problem = "is no file or folder here, and the hub's data set cannot be loaded"
            advice = "correct the name"
        raise UserError(
            f"--data {source} {problem} ({reason}): {advice}, or correct --dataset-config."
        ) from e
