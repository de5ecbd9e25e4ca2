"""Forged requests, and a server for them: uvicorn with our access control and limits, as serve.py
starts it, in front of an app that answers everything.

    with Door() as door:
        for label, request in forged(door.port, SECRET, ["/pause"]):
            assert door.status(request) >= 400, label
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from unittest import mock

import uvicorn

from nanogrpo.vllm import auth, limits

SECRET = "a-secret-of-the-tests-only"
METHODS = ("GET", "POST", "DELETE", "HEAD", "OPTIONS", "CONNECT")
# Routes of vLLM that are closed.
CLOSED = [
    *("/", "/docs", "/openapi.json", "/redoc", "/ping", "/invocations", "/version", "/load"),
    *("/server_info", "/tokenize", "/v1/models", "/v1/completions", "/v1/chat/completions"),
    *("/v1/responses", "/v1/realtime", "/collective_rpc", "/is_sleeping"),
    *("/reset_prefix_cache", "/abort_requests", "/get_world_size", "/weight_info"),
    *("/weight_checker", "/start_draft_weight_update", "/inference/v1/abort_requests"),
    "/release_kv_cache_memory",
]

# Headers that a stranger may add. "{secret}" is the right one, in the wrong place.
STRANGE = {
    "nothing": "",
    "a wrong secret": "Authorization: Bearer 0123456789abcdef0123456789abcdef",
    "an empty secret": "Authorization: Bearer ",
    "a part of the secret": "Authorization: Bearer {part}",
    "another scheme": "Authorization: Basic {basic}",
    "the secret without a scheme": "Authorization: {secret}",
    "the secret elsewhere": "X-Api-Key: {secret}\r\nCookie: secret={secret}",
    "a secret in two headers": "Authorization: Bearer \r\nAuthorization: {secret}",
    "two secrets": "Authorization: Bearer x\r\nAuthorization: Bearer {secret}",
    "a proxy": "X-Forwarded-For: 127.0.0.1\r\nForwarded: for=127.0.0.1;host=localhost",
    "another path": "X-Original-URL: /health\r\nX-Rewrite-URL: /health",
    "another method": "X-HTTP-Method-Override: GET\r\nX-Method: GET",
    "a trainer": "X-Nanogrpo-Trainer: 0123456789abcdef",
}
# Headers that are refused with and without the secret.
REFUSED = {
    "a websocket": "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
    "a websocket without a key": "Upgrade: websocket\r\nConnection: Upgrade",
    "HTTP/2": "Upgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAMAAABk",
    "a web page": "Origin: http://evil.example",
    "a web page on this machine": "Origin: http://localhost:3000",
    "a page without an origin": "Origin: null",
    "another host": "Host: evil.example:{port}",
    "a host that looks like an address": "Host: 127.0.0.1.evil.example",
    "a host with a user": "Host: 127.0.0.1@evil.example",
    "two hosts": "Host: 127.0.0.1\r\nHost: evil.example",
    "an empty host": "Host: ",
}
BODIES = {
    "": ("", ""),
    "JSON": ("Content-Type: application/json\r\nContent-Length: 2", "{}"),
    "a form": ("Content-Type: text/plain\r\nContent-Length: 2", "{}"),
    "chunks": ("Transfer-Encoding: chunked", "2\r\n{}\r\n0\r\n\r\n"),
}


def request(method: str, path: str, port: int, headers: Sequence[str], body: str = "") -> bytes:
    """Return a request. A Host header is added unless there is one."""
    lines = [f"{method} {path} HTTP/1.1", *filter(None, headers)]
    if not any(line.lower().startswith("host:") for line in "\r\n".join(lines).split("\r\n")):
        lines.append(f"Host: 127.0.0.1:{port}")
    return "\r\n".join([*lines, "", body]).encode()


def forged(port: int, secret: str, paths: Sequence[str]) -> Iterator[tuple[str, bytes]]:
    """Yield requests that must all be refused, with a label: paths × methods × headers × bodies."""
    known = {"secret": secret, "part": secret[:-1], "port": port}
    known["basic"] = base64.b64encode(f":{secret}".encode()).decode()
    tricks = [(name, text.format(**known)) for name, text in (STRANGE | REFUSED).items()]
    right = f"Authorization: Bearer {secret}\r\n"
    tricks += [
        (f"the secret, {name}", right + text.format(**known)) for name, text in REFUSED.items()
    ]
    for path in paths:
        for k, (trick, headers) in enumerate(tricks):
            for method in METHODS:
                # each trick with each method, and with one of the bodies in turn
                kind = [*BODIES][k % len(BODIES)] if method not in ("GET", "HEAD") else ""
                more, body = BODIES[kind]
                label = f"{method} {path} with {trick} {kind}"
                yield label, request(method, path, port, [headers, more], body)


def not_http(port: int) -> dict[str, bytes]:
    """Return requests that are not quite HTTP, without the secret."""
    host = f"Host: 127.0.0.1:{port}\r\n"
    post = f"POST /pause HTTP/1.1\r\n{host}"
    smuggled = f"POST /resume HTTP/1.1\r\n{host}\r\n"
    texts = {
        "two lengths": f"{post}Content-Length: 0\r\nContent-Length: 9\r\n\r\n",
        "a length and chunks": f"{post}Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n"
        f"0\r\n\r\n{smuggled}",
        "a length with a sign": f"{post}Content-Length: +2\r\n\r\n{{}}",
        "chunks of no size": f"{post}Transfer-Encoding: chunked\r\n\r\nxyz\r\n\r\n",
        "an encoding twice": f"{post}Transfer-Encoding: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        "0\r\n\r\n",
        "a folded header": f"{post}Authorization: Bearer\r\n {SECRET}\r\n\r\n",
        "a header with NUL": f"{post}X: a\0b\r\n\r\n",
        "a space before the colon": f"{post}Authorization : Bearer {SECRET}\r\n\r\n",
        "only line feeds": post.replace("\r\n", "\n") + "\n",
        "HTTP/1.0": "POST /pause HTTP/1.0\r\n\r\n",
        "HTTP/0.9": "GET /health\r\n\r\n",
        "HTTP/2": "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        "HTTP/9": "GET /health HTTP/9.9\r\n\r\n",
        "a full address": f"POST http://127.0.0.1:{port}/pause HTTP/1.1\r\nHost: a.example\r\n\r\n",
        "a star": f"OPTIONS * HTTP/1.1\r\n{host}\r\n",
        "an unknown method": f"SNEAK /pause HTTP/1.1\r\n{host}\r\n",
        "no HTTP": "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 hello over TLS\r\n\r\n",
        "two requests": f"GET /health HTTP/1.1\r\n{host}\r\n{smuggled}",
    }
    return {name: text.encode("latin-1") for name, text in texts.items()}


def status(address: tuple[str, int], data: bytes, seconds: float = 30.0) -> int:
    """Send bytes on a new connection. Return the status of the answer, or 0 without an answer."""
    with socket.create_connection(address, timeout=seconds) as sock:
        sock.sendall(data)
        answer = b""
        with contextlib.suppress(TimeoutError, ConnectionError):
            while b"\r\n" not in answer and (part := sock.recv(1 << 16)):
                answer += part
        line = answer.split(b"\r\n")[0].split()
        return int(line[1]) if line[:1] in ([b"HTTP/1.1"], [b"HTTP/1.0"]) else 0


class Door:
    """The server. `reached` lists the requests that came past access control."""

    def __init__(self, secret: str = SECRET, names: str = "gpu7,127.0.0.1"):
        self.reached: list[tuple[str, str]] = []
        self.delay = 0.0  # seconds that the app takes
        environment = {auth.SECRET: secret, auth.NAMES: names}
        with mock.patch.dict(os.environ, environment):
            control = auth.AccessControl(self.app)

        async def entry(scope, receive, send):
            await control(scope | {"app": SimpleNamespace(state=None)}, receive, send)

        config = uvicorn.Config(entry, lifespan="off", log_level="critical", **limits.OPTIONS)
        self.server = uvicorn.Server(config)
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.port = self.socket.getsockname()[1]
        self.thread = threading.Thread(target=self.server.run, args=([self.socket],), daemon=True)

    async def app(self, scope, receive, send) -> None:
        self.reached.append((scope["method"], scope["path"]))
        await asyncio.sleep(self.delay)
        await auth.answer(send, 200, {})

    def __enter__(self) -> Door:
        self.patch = mock.patch.object(auth, "describe", return_value={"model": {}})
        self.patch.start()
        self.thread.start()
        while not self.server.started:
            time.sleep(0.01)
        return self

    def __exit__(self, *_) -> None:
        self.server.should_exit = self.server.force_exit = True
        self.thread.join()
        self.patch.stop()

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=30)

    def status(self, data: bytes) -> int:
        return status(("127.0.0.1", self.port), data)
