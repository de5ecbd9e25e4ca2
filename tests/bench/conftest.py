"""Helpers for the tests of benches. Read next: tests/conftest.py."""

import importlib
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from bench import common


@pytest.fixture
def in_this_process(monkeypatch):
    """Run the benches' child processes in this process, because starting one costs seconds. The
    value lists their command lines.
    """
    started = []

    def run(folder: Path, argv: Sequence[object], threads: int) -> dict:
        started.append(argv)
        module, *arguments = map(str, argv)
        assert not importlib.import_module(module).main(arguments)
        return json.loads((folder / "found.json").read_text())

    monkeypatch.setattr(common, "in_process", run)
    return started
