"""The fake server that most tests of the client use."""

from __future__ import annotations

import pytest

from tests.conftest import tiny_config
from tests.vllm.fake import FakeVLLM


@pytest.fixture
def fake():
    with FakeVLLM(tiny_config()) as server:
        yield server
