"""Access control, behind the HTTP server that vLLM uses: no forged request gets through, and each
gets an answer.

The app behind it is a stub that answers everything; test_real.py repeats the main test with a real
vLLM. Read next: forge.py, test_serve.py.
"""

import re
from pathlib import Path

import pytest

from nanogrpo.vllm.auth import INFO, ROUTES
from tests.ranks import ROOT
from tests.vllm.forge import CLOSED, METHODS, Door, forged

OPEN = {path: method for method, paths in ROUTES.items() for path in paths}


@pytest.fixture(scope="module")
def shared():
    with Door() as door:
        yield door


@pytest.fixture
def door(shared):
    shared.reached.clear()
    return shared


def test_no_forged_request_gets_through_and_each_is_answered(door):
    requests = forged(door.port, "a-secret-of-the-tests-only", [*OPEN, *CLOSED[::4]])
    found = {label: door.status(data) for label, data in requests.items()}
    assert {label: code for label, code in found.items() if code not in (400, 401)} == {}
    assert door.reached == []
    assert len(found) > 1500


def test_the_secret_opens_the_routes_of_the_table_with_their_methods_and_nothing_else(door):
    for path in [*OPEN, *CLOSED]:
        for method in METHODS:
            expected = 200 if OPEN.get(path) == method else 404
            assert door.ask(path, method) == expected
    others = ["/HEALTH", "/health/", "//health", "/health;x", "/health%00", "/health%2f", "/*"]
    others += ["/health/../sleep", "/x/../health", "/./health", "http://127.0.0.1/sleep", "/sleep "]
    for path in others:
        assert door.ask(path, "GET") in (400, 404)
    assert door.reached == [(method, path) for path, method in OPEN.items() if path != INFO]


def test_a_request_for_a_websocket_is_refused(door):
    """vLLM has one at /v1/realtime."""
    headers = "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
    headers += "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ=="
    for secret in ("x" * 20, "a-secret-of-the-tests-only"):
        assert door.ask("/v1/realtime", "GET", headers, secret=secret) >= 400
    assert door.reached == []


def test_a_server_without_a_secret_lets_nobody_in():
    """serve.py always sets one. If it did not, the server would be closed, not open."""
    with Door(secret="") as door:
        assert [door.ask("/health", "GET", secret=secret) for secret in ("", " ", "x")] == [401] * 3
        assert door.reached == []


def test_the_routes_in_the_documentation_are_those_of_the_table():
    text = Path(ROOT / "docs" / "vllm.md").read_text()
    rows = re.findall(r"^\| `(GET|POST) (\S+)` \|", text, re.MULTILINE)
    assert rows == [(method, path) for path, method in OPEN.items()]
