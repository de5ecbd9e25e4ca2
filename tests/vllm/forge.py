"""Forged requests, and a server for them: uvicorn with our access control, as vLLM runs it, in
front of an app that answers everything.

    with Door() as door:
        for label, data in forged(door.port, SECRET, ["/pause"]).items():
            assert door.status(data) >= 400, label
"""

import base64
import contextlib
import os
import socket
import threading
import time
from collections.abc import Sequence
from types import SimpleNamespace
from unittest import mock

import uvicorn
from starlette.responses import JSONResponse

from nanogrpo.vllm import auth

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

# Headers of strangers. "{secret}" is the right one, in the wrong place.
STRANGE = {
    "nothing": "",
    "a wrong secret": "Authorization: Bearer 0123456789abcdef0123456789abcdef",
    "an empty secret": "Authorization: Bearer ",
    "a part of the secret": "Authorization: Bearer {part}",
    "another scheme": "Authorization: Basic {basic}",
    "the secret without a scheme": "Authorization: {secret}",
    "the secret elsewhere": "X-Api-Key: {secret}\r\nCookie: secret={secret}",
    "a secret in two headers": "Authorization: Bearer \r\nAuthorization: {secret}",
    "a proxy": "X-Forwarded-For: 127.0.0.1\r\nForwarded: for=127.0.0.1;host=localhost",
    "another path": "X-Original-URL: /health\r\nX-Rewrite-URL: /health",
    "another method": "X-HTTP-Method-Override: GET\r\nX-Method: GET",
    "HTTP/2": "Upgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAMAAABk",
    "a web page": "Origin: null",
}
BODIES = [
    ("", ""),
    ("Content-Type: application/json\r\nContent-Length: 2", "{}"),
    ("Transfer-Encoding: chunked", "2\r\n{}\r\n0\r\n\r\n"),
]


def request(method: str, path: str, port: int, headers: Sequence[str], body: str = "") -> bytes:
    lines = [f"{method} {path} HTTP/1.1", f"Host: 127.0.0.1:{port}", *filter(None, headers)]
    return "\r\n".join([*lines, "", body]).encode()


def forged(port: int, secret: str, paths: Sequence[str]) -> dict[str, bytes]:
    """Return requests that must all be refused, by label: paths × headers × methods, with one of
    the bodies in turn; and some that are not quite HTTP.
    """
    known = {"secret": secret, "part": secret[:-1]}
    known["basic"] = base64.b64encode(f":{secret}".encode()).decode()
    found = {}
    for path in paths:
        for k, (trick, text) in enumerate(STRANGE.items()):
            for method in METHODS:
                more, body = BODIES[k % 3 if method not in ("GET", "HEAD") else 0]
                data = request(method, path, port, [text.format(**known), more], body)
                found[f"{method} {path} with {trick}"] = data
    host = f"Host: 127.0.0.1:{port}\r\n"
    strange = {
        "HTTP/1.0": "POST /pause HTTP/1.0\r\n\r\n",
        "a full address": f"POST http://127.0.0.1:{port}/pause HTTP/1.1\r\nHost: a.example\r\n\r\n",
        "an unknown method": f"SNEAK /pause HTTP/1.1\r\n{host}\r\n",
        "no HTTP": "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 hello over TLS\r\n\r\n",
    }
    return found | {name: text.encode("latin-1") for name, text in strange.items()}


def status(address: tuple[str, int], data: bytes) -> int:
    """Send bytes on a new connection. Return the status of the answer, or 0 without an answer."""
    with socket.create_connection(address, timeout=30.0) as sock:
        sock.sendall(data)
        answer = b""
        with contextlib.suppress(TimeoutError, ConnectionError):
            while b"\r\n" not in answer and (part := sock.recv(1 << 16)):
                answer += part
        line = answer.split(b"\r\n")[0].split()
        return int(line[1]) if line[:1] in ([b"HTTP/1.1"], [b"HTTP/1.0"]) else 0


class Door:
    """The server. `reached` lists the requests that came past access control."""

    def __init__(self, secret: str = SECRET):
        self.reached: list[tuple[str, str]] = []
        with mock.patch.dict(os.environ, {auth.SECRET: secret}):
            control = auth.AccessControl(self.app)

        async def entry(scope, receive, send):
            await control(scope | {"app": SimpleNamespace(state=None)}, receive, send)

        config = uvicorn.Config(entry, lifespan="off", log_level="critical")
        self.server = uvicorn.Server(config)
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.port = self.socket.getsockname()[1]
        self.thread = threading.Thread(target=self.server.run, args=([self.socket],), daemon=True)

    async def app(self, scope, receive, send) -> None:
        self.reached.append((scope["method"], scope["path"]))
        await JSONResponse({})(scope, receive, send)

    def __enter__(self) -> "Door":
        self.patch = mock.patch.object(auth, "describe", return_value={"config": {}})
        self.patch.start()
        self.thread.start()
        while not self.server.started:
            time.sleep(0.01)
        return self

    def __exit__(self, *_) -> None:
        self.server.should_exit = self.server.force_exit = True
        self.thread.join()
        self.patch.stop()

    def status(self, data: bytes) -> int:
        return status(("127.0.0.1", self.port), data)

    def ask(self, path: str, method: str, *headers: str, secret: str = SECRET) -> int:
        right = f"Authorization: Bearer {secret}"
        return self.status(request(method, path, self.port, [right, *headers]))
