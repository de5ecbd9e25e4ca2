"""Data sets of the hub: read by the package `datasets`, from a folder in the hub's layout and from
the cache that it fills, without a network.

Read next: test_gsm8k.py (a run with a hub id).
"""

import sys

import pytest

from nanogrpo import Config
from nanogrpo.data import sources
from nanogrpo.extras.data.sources import Sources, uses_hub
from tests.conftest import refused
from tests.data.hub_cache import fill_cache, write_repository

datasets = pytest.importorskip("datasets")
ROWS = [{"question": f"{i}+1?", "answer": f"#### {i + 1}"} for i in range(5)]


@pytest.fixture
def repository(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    return write_repository(tmp_path / "gsm8k", {"main": ROWS, "other": ROWS[:2]})


def records(source, config="", split="train", test="test"):
    cfg = Config(data=(str(source),), dataset_config=config, dataset_test_split=test)
    return [record for _, record in sources.read(str(source), split, [Sources(cfg)])]


def test_a_folder_in_the_layout_of_the_hub_is_read(repository):
    assert records(repository, "main") == ROWS
    assert records(repository, "main", "eval") == ROWS[:1]
    assert records(repository, "other", "held out") == ROWS[:1]
    assert records(repository, "main", "held out", "dev") == []


def test_a_data_set_is_read_by_its_hub_id_from_the_cache(repository, tmp_path, monkeypatch):
    fill_cache(monkeypatch, repository, "main", tmp_path / "hub", "openai/gsm8k")
    assert records("openai/gsm8k", "main") == ROWS
    assert records("openai/gsm8k", split="eval") == ROWS[:1]  # the cache has one configuration
    with refused(r"cannot load it \(ValueError: .* for config 'nope'"):
        records("openai/gsm8k", "nope")
    with refused(r"has no split 'dev', only 'train', 'test': name one with"):
        records("openai/gsm8k", "main", "eval", "dev")


def test_only_a_name_that_is_no_file_can_be_a_hub_id(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train").write_text("x")
    names = {
        "openai/gsm8k": True,
        "AI-MO/NuminaMath-1.5": True,
        "data": True,
        "data/train": False,
        "data/none.jsonl": False,
        "gsm8k": False,
        "./gsm8k": False,
        "a/b/c": False,
        "arithmetic": False,
        "reasoning_gym:a/b": False,
    }
    assert {name: uses_hub(name) for name in names} == names


def test_mistakes_are_reported_in_one_sentence_and_at_once(repository, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "train.jsonl").write_text('{"prompt": ')
    for source, config, message in [
        (repository, "", r"Config name is missing.*\['main', 'other'\].*, or --dataset-config"),
        (repository, "nope", r"datasets cannot load it \(ValueError: .*Available: \['main', 'ot"),
        (tmp_path / "empty", "", r"datasets cannot load it \(.*doesn't contain any data files"),
        (tmp_path / "broken", "", "is not a local file, and the package datasets cannot load it"),
        ("no/such", "", r"is not a local file, and the package datasets cannot load it \(Conn"),
    ]:
        with refused(f"^--data {source} .*{message}"):
            records(source, config)


def test_without_the_package_the_message_says_what_to_install(repository, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with refused(r"only be read .*: pip install 'nanogrpo\[data\]', or"):
        records("openai/gsm8k", "main")
