"""Forged requests against access control, behind the HTTP server that vLLM uses: none gets through,
and none stays without an answer.

The app behind it is a stub that answers everything; test_real.py repeats the main test with a real
vLLM. Read next: forge.py, test_serve.py.
"""

from __future__ import annotations

import asyncio
import select
import socket
import time

import pytest

from nanogrpo.vllm import auth, limits
from nanogrpo.vllm.auth import INFO, ROUTES
from tests.vllm.forge import (
    CLOSED,
    METHODS,
    REFUSED,
    SECRET,
    Door,
    forged,
    not_http,
    request,
    status,
)

RIGHT = f"Authorization: Bearer {SECRET}"


@pytest.fixture(scope="module")
def shared():
    with Door() as door:
        yield door


@pytest.fixture
def door(shared):
    shared.reached.clear()
    shared.delay = 0.0
    return shared


def send(sock: socket.socket, data: bytes, most: int, pause: float = 0.0) -> int:
    """Send data again and again until the server closes the connection. Return the bytes sent."""
    sent, deadline = 0, time.monotonic() + 60
    try:
        while sent < most and time.monotonic() < deadline:
            sock.sendall(data)
            sent += len(data)
            time.sleep(pause)
    except ConnectionError:
        return sent
    pytest.fail(f"the server took {sent} bytes")


def answer(sock: socket.socket) -> bytes:
    """Return everything that the server sends until it closes the connection."""
    answer = b""
    try:
        while part := sock.recv(1 << 16):
            answer += part
    except ConnectionResetError:  # it closed the connection before it had read everything
        pass
    return answer


# --- who gets in ---


def test_no_forged_request_gets_through_and_each_is_answered(door):
    count, wrong = 0, []
    for label, data in forged(door.port, SECRET, [*ROUTES, *CLOSED]):
        found = door.status(data)
        count += 1
        if found not in (400, 401, 403):
            wrong.append((label, found))
    assert not wrong
    assert door.reached == []
    assert count > 5000


def test_requests_that_are_not_quite_http_get_an_answer_but_not_through(door):
    found = {name: door.status(data) for name, data in not_http(door.port).items()}
    assert {name: code for name, code in found.items() if code not in (400, 401, 403)} == {}
    assert door.reached == []


def test_the_secret_opens_the_routes_of_the_table_with_their_methods_and_nothing_else(door):
    for path in [*ROUTES, *CLOSED]:
        for method in METHODS:
            expected = 200 if path in ROUTES and method == ROUTES[path][0] else 404
            assert door.status(request(method, path, door.port, [RIGHT])) == expected
    assert door.reached == [(method, path) for path, (method, _) in ROUTES.items() if path != INFO]


@pytest.mark.parametrize(
    "path",
    [
        *("/HEALTH", "/health/", "//health", "/health;x", "/health%00", "/health%2f"),
        *("/health/../sleep", "/x/../health", "/pause/../collective_rpc", "/./health"),
        *("http://127.0.0.1/sleep", "/health/%2e%2e/sleep", "/health%20", "/health\\", "/*"),
    ],
)
def test_other_spellings_of_a_path_open_nothing(door, path):
    assert door.status(request("GET", path, door.port, [RIGHT])) in (400, 404)
    assert door.reached == []


def test_trainers_reach_the_server_by_address_or_by_its_names(door):
    names = ["127.0.0.1", f"127.0.0.1:{door.port}", "localhost", "LOCALHOST:80", "gpu7", "gpu7.:1"]
    names += ["[::1]", "[::1]:8000", "10.0.0.5:8000", "[fe80::1%25eth0]", "192.168.0.2"]
    for host in names:
        data = request("GET", "/health", door.port, [RIGHT, f"Host: {host}"])
        assert door.status(data) == 200, host
    for host in ["gpu7.evil.example", "evil.example", "gpu", "127.1", "[gpu7]", "gpu7:x", "a b"]:
        data = request("GET", "/health", door.port, [RIGHT, f"Host: {host}"])
        assert door.status(data) in (400, 403), host


def test_a_server_without_a_secret_lets_nobody_in():
    """serve.py always sets one. If it did not, the server would be closed, not open."""
    with Door(secret="") as door:
        for header in ("", "Authorization: Bearer ", "Authorization: ", "Authorization: Bearer"):
            assert door.status(request("GET", "/health", door.port, [header])) == 401
        assert door.reached == []


# --- what a stranger can cost ---


@pytest.fixture
def hasty(monkeypatch):
    monkeypatch.setattr(limits, "HEADER_SECONDS", 1.0)
    monkeypatch.setattr(auth, "REFUSED_SECONDS", 0.2)


@pytest.mark.parametrize(
    "start", [b"", b"GET /hea", b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nX: y"]
)
def test_headers_that_do_not_arrive_end_the_connection(door, hasty, start):
    with door.connect() as sock:
        sock.sendall(start)
        assert answer(sock).startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize("drop", [b"\r\n", b"X: y\r\n"])
def test_headers_that_arrive_drop_by_drop_end_the_connection(door, hasty, drop):
    with door.connect() as sock:
        if drop != b"\r\n":  # empty lines may come before a request
            sock.sendall(b"GET /health HTTP/1.1\r\n")
        send(sock, drop, 1 << 16, pause=0.01)


def test_a_connection_that_is_kept_alive_has_the_same_limit(door, hasty):
    with door.connect() as sock:
        sock.sendall(request("GET", "/health", door.port, [RIGHT]) + b"GET /hea")
        replies = answer(sock)
    assert replies.startswith(b"HTTP/1.1 200 ")
    assert b"HTTP/1.1 408 " in replies


def test_headers_without_end_are_not_kept(door):
    with door.connect() as sock:
        try:
            sock.sendall(b"GET /health HTTP/1.1\r\nX: " + b"x" * (1 << 20))
        except ConnectionError:  # it was closed earlier
            return
        assert answer(sock)[:13] in (b"HTTP/1.1 431 ", b"")


@pytest.mark.parametrize("more", [b"X: y\r\n", b"X"])
def test_headers_after_a_body_have_the_same_limit(door, monkeypatch, more):
    """A body in chunks may be followed by headers, and the size of a chunk by anything."""
    monkeypatch.setattr(auth, "REFUSED_SECONDS", 60.0)
    size = b"0\r\n" if more.endswith(b"\n") else b"1;"
    with door.connect() as sock:
        sock.sendall(request("POST", "/pause", door.port, ["Transfer-Encoding: chunked"]) + size)
        assert send(sock, more * 10_000, 400 << 20) < 64 << 20
    assert door.reached == []


@pytest.mark.parametrize("after", [False, True])
def test_many_headers_are_refused_whole(door, after):
    """Each takes up more memory than its bytes. None may be skipped: one may be an Origin."""
    for count, expected in ((90, 200), (limits.HEADERS, 400), (9000, 400)):
        many, headers = "A: b\r\n" * count, [RIGHT, "Transfer-Encoding: chunked"]
        if after:  # a body in chunks
            data = request("POST", "/pause", door.port, headers, f"0\r\n{many}\r\n")
        else:
            data = request("POST", "/pause", door.port, [*headers, many.strip()], "0\r\n\r\n")
        assert door.status(data) == expected, count
    assert after or len(door.reached) == 1  # the headers after a body come too late to matter


def test_a_large_body_of_a_trainer_is_no_header(door):
    body = "x" * (1 << 20)
    data = request("POST", "/pause", door.port, [RIGHT, f"Content-Length: {len(body)}"], body)
    assert door.status(data) == 200


def test_a_body_without_end_is_not_read(door):
    """The stranger is refused and the connection closed, long before 400 MB."""
    head = request("POST", "/pause", door.port, [f"Content-Length: {400 << 20}"])
    with door.connect() as sock:
        sock.sendall(head)
        # what fits into the buffers of the sockets
        assert send(sock, b"x" * (1 << 20), 400 << 20) < 64 << 20
    assert door.reached == []


def test_a_body_that_does_not_arrive_delays_the_refusal_only_shortly(door, hasty):
    with door.connect() as sock:
        sock.sendall(request("POST", "/pause", door.port, ["Content-Length: 10"], "{"))
        replies = answer(sock)
    assert replies.startswith(b"HTTP/1.1 401 ")
    assert b"\r\nconnection: close\r\n" in replies


def test_a_small_body_does_not_hide_the_refusal(door):
    """A trainer with a wrong secret sends its body after the headers, and must see the reason."""
    for _ in range(20):
        with door.connect() as sock:
            sock.sendall(request("POST", "/pause", door.port, ["Content-Length: 9000"]))
            time.sleep(0.001)
            sock.sendall(b"x" * 9000)
            assert answer(sock).startswith(b"HTTP/1.1 401 ")


def test_the_limits_do_not_end_a_request_that_takes_long(door, hasty):
    door.delay = 1.5
    slow = request("GET", "/health", door.port, [RIGHT])
    assert door.status(slow) == 200
    with door.connect() as sock:  # also of requests that are sent at once
        sock.sendall(slow + slow + slow)
        assert answer(sock).count(b"HTTP/1.1 200 ") == 3


def test_many_unfinished_connections_do_not_keep_a_trainer_out(door):
    waiting = [door.connect() for _ in range(200)]
    for sock in waiting:
        sock.sendall(b"GET /health HTTP/1.1\r\n")
    assert door.status(request("GET", "/health", door.port, [RIGHT])) == 200
    for sock in waiting:
        sock.close()


def test_of_many_connections_without_a_request_the_oldest_are_closed(door, monkeypatch):
    monkeypatch.setattr(limits, "UNFINISHED", 5)
    waiting = [door.connect() for _ in range(20)]
    for sock in waiting:
        sock.sendall(b"GET /health HTTP/1.1\r\n")
    for sock in waiting[:15]:
        assert answer(sock).startswith(b"HTTP/1.1 503 ")
    assert door.status(request("GET", "/health", door.port, [RIGHT])) == 200
    assert answer(waiting[15]).startswith(b"HTTP/1.1 503 ")  # closed for the trainer
    for sock in waiting[16:]:
        sock.sendall(f"Host: 127.0.0.1\r\n{RIGHT}\r\nConnection: close\r\n\r\n".encode())
        assert answer(sock).startswith(b"HTTP/1.1 200 ")
    for sock in waiting:
        sock.close()
    assert len(limits.Limited.unfinished) <= 5


def test_of_many_refused_requests_only_some_bodies_are_read(door, monkeypatch):
    monkeypatch.setattr(auth, "reading_refused", asyncio.Semaphore(3))
    monkeypatch.setattr(auth, "REFUSED_SECONDS", 60.0)
    waiting = {door.connect() for _ in range(10)}
    for sock in waiting:
        sock.sendall(request("POST", "/pause", door.port, ["Content-Length: 10"], "{"))
    refused: set[socket.socket] = set()
    while len(refused) < 7:
        (ready, _, _) = select.select([*(waiting - refused)], [], [], 30)
        assert ready
        refused |= {*ready}
    for sock in refused:
        assert answer(sock).startswith(b"HTTP/1.1 401 ")
    assert door.status(request("GET", "/health", door.port, [RIGHT])) == 200
    for sock in waiting - refused:  # the server still waits for their bodies
        sock.sendall(b"123456789")
        assert answer(sock).startswith(b"HTTP/1.1 401 ")
    for sock in waiting:
        sock.close()


@pytest.mark.parametrize("trick", [name for name in REFUSED if "websocket" in name])
def test_a_request_for_a_websocket_is_refused_like_any_other(door, trick):
    for headers in (REFUSED[trick], f"{REFUSED[trick]}\r\n{RIGHT}"):
        for method in ("GET", "POST"):
            data = request(method, "/v1/realtime", door.port, [headers])
            assert status(("127.0.0.1", door.port), data) == 400
