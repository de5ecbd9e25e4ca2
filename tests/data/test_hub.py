"""Data sets of the hub: read by the package `datasets`, from a folder in the hub's layout and from
the cache that it fills, without a network.

Read next: test_gsm8k.py (a run with a hub id).
"""

import sys

import pytest

from nanogrpo.data import hub, sources
from nanogrpo.errors import UserError
from tests.data.hub_cache import fill_cache, write_repository

datasets = pytest.importorskip("datasets")
ROWS = [{"question": f"{i}+1?", "answer": f"#### {i + 1}"} for i in range(5)]


@pytest.fixture
def repository(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    return write_repository(tmp_path / "gsm8k", {"main": ROWS, "other": ROWS[:2]})


def records(source, *args, **options):
    return [record for _, record in sources.read(str(source), *args, **options)]


def test_a_folder_in_the_layout_of_the_hub_is_read(repository):
    assert sources.uses_hub(str(repository))
    assert records(repository, config="main") == ROWS
    assert records(repository, "test", config="main") == ROWS[:1]
    assert records(repository, config="other") == ROWS[:2]
    assert sources.read(str(repository), config="main")[4][0] == f"{repository}, row 5"
    assert [sources.holds_out(str(repository), s, "main") for s in ("test", "dev")] == [True, False]


def test_a_data_set_is_read_by_its_hub_id_from_the_cache(repository, tmp_path, monkeypatch):
    fill_cache(monkeypatch, repository, "main", tmp_path / "hub", "openai/gsm8k")
    assert sources.uses_hub("openai/gsm8k")
    assert records("openai/gsm8k", config="main") == ROWS
    assert records("openai/gsm8k", "test") == ROWS[:1]  # only one configuration is in the cache
    assert sources.holds_out("openai/gsm8k", "test", "main")
    with pytest.raises(UserError, match=r"cannot be loaded \(ValueError: .* for config 'nope'"):
        records("openai/gsm8k", config="nope")
    with pytest.raises(UserError, match=r"has no split 'dev' but 'train', 'test': name one with"):
        records("openai/gsm8k", "dev", config="main")


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
    assert {name: sources.uses_hub(name) for name in names} == names


def test_mistakes_are_reported_in_one_sentence_and_at_once(repository, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "train.jsonl").write_text('{"prompt": ')
    for source, config, message in [
        (repository, "", r"has the configurations 'main', 'other': name one with --dataset-config"),
        (repository, "nope", r"that datasets cannot load \(ValueError: .*Available: \['main', 'ot"),
        (tmp_path / "empty", "", r"that datasets cannot load \(.*doesn't contain any data files"),
        (tmp_path / "broken", "", "is a folder that datasets cannot load"),
        ("no/such", "", r"no/such is no file or folder here, and the hub cannot be reached"),
    ]:
        with pytest.raises(UserError, match=message) as caught:
            sources.read(str(source), config=config)
        assert str(caught.value).startswith(f"--data {source} ")
        assert "\n" not in str(caught.value)


def test_without_the_package_the_message_says_what_to_install(repository, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"only be read .*: pip install 'nanogrpo\[data\]', or"):
        hub.load("openai/gsm8k", "main")
