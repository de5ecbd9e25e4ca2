"""Servers that tests share: a fake one for each test, and real ones for a whole session.

Starting a real vLLM takes half a minute, so only tests that kill a server get their own.
"""

from collections.abc import Iterator

import pytest

from tests.conftest import tiny_config, write_base
from tests.vllm.fake import FakeVLLM
from tests.vllm.real import SIZES, Real, serve


@pytest.fixture
def fake() -> Iterator[FakeVLLM]:
    with FakeVLLM(tiny_config()) as server:
        yield server


other = fake  # a second one


@pytest.fixture(scope="session")
def tied(tmp_path_factory) -> Iterator[Real]:
    """A real server that outlives all tests but the last, which suspends it for good."""
    folder = tmp_path_factory.mktemp("tied") / "base"
    yield from serve(write_base(folder, tie_word_embeddings=True, **SIZES))


@pytest.fixture(scope="session")
def untied(tmp_path_factory) -> Iterator[Real]:
    """A real server that test_recovery.py adopts and kills."""
    yield from serve(write_base(tmp_path_factory.mktemp("untied") / "base", **SIZES))
