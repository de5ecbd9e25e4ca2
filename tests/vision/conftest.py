"""A tiny vision-language base that the tests of this folder share. Read next: base.py."""

from pathlib import Path

import pytest

from nanogrpo.model.tokenizer import Tokenizer
from tests.vision.base import write_base


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint folder. Read or copy it, but never write to it."""
    return write_base(tmp_path_factory.mktemp("vision"))


@pytest.fixture(scope="session")
def tokenizer(base: Path) -> Tokenizer:
    return Tokenizer(base)
