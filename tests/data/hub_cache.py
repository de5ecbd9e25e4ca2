"""Data sets as the hub and the cache of `datasets` store them, for tests without a network.

Out: `write_repository` and `fill_cache`. Used by test_hub.py and test_gsm8k.py.
"""

from pathlib import Path

import pytest


def write_repository(folder: Path, configs: dict[str, list[dict]]) -> Path:
    """Write a folder as one clones it from the hub. Each configuration has the rows as its training
    split, and the first of them as its test split.
    """
    import datasets

    card = "---\nconfigs:\n"
    for name, rows in configs.items():
        (folder / name).mkdir(parents=True)
        card += f"- config_name: {name}\n  data_files:\n"
        for split, part in {"train": rows, "test": rows[:1]}.items():
            datasets.Dataset.from_list(part).to_parquet(folder / name / f"{split}-0.parquet")
            card += f"  - {{split: {split}, path: {name}/{split}-*}}\n"
    (folder / "README.md").write_text(card + "---\n")
    return folder


def fill_cache(
    monkeypatch: pytest.MonkeyPatch, repository: Path, config: str, cache: Path, hub_id: str
) -> None:
    """Fill the cache as if the folder had been downloaded under this hub id. The folder's name must
    be the second part of the id.
    """
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(cache))
    datasets.load_dataset(str(repository), config)
    (cache / repository.name).rename(cache / hub_id.replace("/", "___"))
