"""Access control for the sidecar: ASGI middleware in front of vLLM's HTTP server.

In: every request. Out: status 401 for requests without the secret, 400 or 403 for those of web
pages and for upgrades, 409 for a trainer while another trainer uses the server, and 404 for every
route that GRPO does not need. It adds one route, `GET /nanogrpo`, which describes the server to a
trainer.

vLLM's own `--api-key` leaves the weight routes open, and some of its development routes
(collective_rpc, server_info, profiling) should not be reachable by anyone. serve.py passes this
class to vLLM. Read next: limits.py, client.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import json
import os
import re
import time

from nanogrpo.errors import UserError
from nanogrpo.model import rope

# The environment variable that contains the secret. It is never passed on a command line, which
# other users of the machine can read.
SECRET = "NANOGRPO_SECRET"
SHORTEST = 16  # minimum length of a secret in characters

# The environment variable with the host names of the server, separated by commas.
NAMES = "NANOGRPO_SERVER_NAMES"

HEALTH, INFO, CONNECT = "/health", "/nanogrpo", "/init_weight_transfer_engine"
DISCONNECT = "/shutdown_weight_transfer_engine"
GENERATE = "/inference/v1/generate"
# All routes of the server: path → (method, purpose). A test compares docs/vllm.md with this table.
ROUTES = {
    INFO: ("GET", "what the server serves: the trainer checks it before it sends weights"),
    HEALTH: ("GET", "whether the engine runs; the trainer renews its lease with it"),
    "/is_paused": ("GET", "heartbeat, which the engine itself answers"),
    "/metrics": ("GET", "vLLM's counters, for monitoring; the trainer does not use them"),
    GENERATE: ("POST", "completions of a prompt"),
    CONNECT: ("POST", "sync: connect a trainer"),
    "/pause": ("POST", "sync: let requests wait"),
    "/update_weight_version": ("POST", "sync: label the weights as incomplete"),
    "/start_weight_update": ("POST", "sync: begin"),
    "/update_weights": ("POST", "sync: receive the weights"),
    "/finish_weight_update": ("POST", "sync: label the new weights"),
    "/resume": ("POST", "sync: continue with the requests"),
    "/sleep": ("POST", "sleep mode: free the memory while the trainer trains"),
    "/wake_up": ("POST", "sleep mode: allocate the memory again"),
    DISCONNECT: ("POST", "sync: release the server for other trainers"),
}
# Before the server refuses a request, it reads at most this many bytes of the body, for at most
# this many seconds.
REFUSED_BYTES, REFUSED_SECONDS = 1 << 16, 2.0
# This many bodies of refused requests are read at a time. Those of further ones are not read.
reading_refused = asyncio.Semaphore(256)
TRAINER = "X-Nanogrpo-Trainer"  # the header with a trainer's random id
LEASE = 20.0  # seconds for which a trainer keeps the server to itself after its last request

# The fields of ModelConfig that must match before a server can accept a trainer's weights.
FIELDS = (
    *("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta"),
    *("rope_scaling", "tie_word_embeddings"),
)


def loopback(address: str) -> bool:
    """Return whether only this machine can reach the address."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:  # a name
        return address.lower() == "localhost"


class AccessControl:
    """Pure ASGI middleware (https://asgi.readthedocs.io). It reads the environment only once."""

    def __init__(self, app):
        self.app = app
        self.secret = os.environ.get(SECRET, "").encode()
        self.names = {"localhost", *os.environ.get(NAMES, "").lower().split(",")} - {""}
        self.holder, self.last_seen = b"", -LEASE  # the trainer whose weights are here

    async def __call__(self, scope, receive, send):
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        if scope["type"] != "http":  # GRPO needs no websockets
            return await send({"type": "websocket.close", "code": 1008})
        if refusal := self.refusal(scope["headers"]):
            return await refuse(receive, send, *refusal)
        headers, path = dict(scope["headers"]), scope["path"]
        age = self.renew(headers.get(TRAINER.lower().encode(), b""), path)
        if age is not None:
            error = f"another trainer uses this server; its last request came {age:.0f} s ago"
            return await answer(send, 409, {"error": error})
        method, _ = ROUTES.get(path, ("", ""))
        if scope["method"] != method:
            error = "this server has no such route (docs/vllm.md lists its routes)"
            return await answer(send, 404, {"error": error})
        if path == INFO:
            return await answer(send, 200, await describe(scope["app"].state))
        await self.app(scope, receive, send)

    def refusal(self, headers: list[tuple[bytes, bytes]]) -> tuple[int, str] | None:
        """Return the status and the message for a request that is not a trainer's, or None."""

        def values(name: bytes) -> list[bytes]:
            return [value for key, value in headers if key == name]

        if values(b"upgrade"):
            return 400, "this server does not upgrade connections"
        if values(b"origin"):  # browsers add it to the requests that a page makes to other servers
            return 403, "this server does not answer web pages"
        hosts = b", ".join(values(b"host")).decode("latin-1")
        if not self.is_name(hosts):
            return 403, (
                f"the host {hosts[:100]!r} in the request is neither an IP address nor a name of"
                " this server; start serve.py with --allowed-hosts and this name"
            )
        # The comparison takes constant time, so the secret cannot be guessed byte by byte.
        given = b", ".join(values(b"authorization"))
        if not (self.secret and hmac.compare_digest(given, b"Bearer " + self.secret)):
            return 401, "the secret is missing or wrong"
        return None

    def is_name(self, host: str) -> bool:
        """Return whether a Host header is an address, or one of the names of this server.

        An attacker can let the name of a web page point to this machine (DNS rebinding). The
        browser then treats the server as a part of that page, and sends the page's name. It never
        sends an address instead, so any address is accepted: behind a NAT, the server does not know
        by which address it is reached.
        """
        if not (parts := re.fullmatch(r"(\[[\w.:%]+\]|[\w.-]+)(:\d{1,5})?", host, re.ASCII)):
            return False
        with contextlib.suppress(ValueError):
            return bool(ipaddress.ip_address(parts[1].strip("[]")))
        return parts[1].lower().rstrip(".") in self.names

    def renew(self, trainer: bytes, path: str) -> float | None:
        """Renew the trainer's lease. If another trainer holds the lease, return the seconds since
        its last request instead.

        Without a lease, two trainers would keep overwriting each other's weights. If there are
        several API processes, each only knows about the requests that it has received itself.
        """
        now = time.monotonic()
        if not trainer:
            return None
        if trainer != self.holder:
            if now - self.last_seen < LEASE:
                return now - self.last_seen
            if path != CONNECT:
                return None
        self.holder, self.last_seen = (b"", -LEASE) if path == DISCONNECT else (trainer, now)
        return None


async def refuse(receive, send, status: int, error: str) -> None:
    """Answer a request that is not a trainer's, and close the connection.

    A small body is read first: if a connection is closed with unread data, the other side may not
    see the answer.
    """

    async def discard() -> None:
        size, more = 0, True
        while more and size <= REFUSED_BYTES:
            message = await receive()
            size, more = size + len(message.get("body", b"")), message.get("more_body", False)

    if not reading_refused.locked():
        async with reading_refused:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(discard(), REFUSED_SECONDS)
    await answer(send, status, {"error": error}, (b"connection", b"close"))


async def answer(send, status: int, content: dict, *headers: tuple[bytes, bytes]) -> None:
    body = json.dumps(content).encode()
    about = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    start = {"type": "http.response.start", "status": status, "headers": [*about, *headers]}
    await send(start)
    await send({"type": "http.response.body", "body": body})


def scaling(angles: dict, raw: dict) -> dict | None:
    """Return the scaling of a model's rotary embedding as a trainer writes it, or None.

    angles: rope_parameters of the model's configuration; raw: all of the configuration.
    """

    def require(ok: bool, *problem: str) -> None:
        if not ok:
            raise UserError(*problem)

    try:
        found = rope.read(angles, raw, require)
    except UserError:  # the trainer does not support this kind, so it must not compare as equal
        return angles
    return found.to_dict() if found else None


async def describe(state) -> dict:
    """Return the facts that a trainer checks before it uses this server.

    state: the state of the application, as filled in by vLLM. The workers tell which GPUs they use,
    when the first request asks for it.
    """
    if not hasattr(state, "device_facts"):
        state.device_facts = await state.engine_client.collective_rpc("device_facts")
    config = state.engine_client.vllm_config
    model = config.model_config
    whole = model.hf_config.to_dict()
    raw = model.hf_text_config.to_dict()  # the same, unless the model sees pictures
    raw["tie_word_embeddings"] = whole.get("tie_word_embeddings")
    if raw.get("head_dim") is None:
        raw["head_dim"] = raw["hidden_size"] // raw["num_attention_heads"]
    raw["rope_theta"] = raw["rope_parameters"]["rope_theta"]
    raw["rope_scaling"] = scaling(raw["rope_parameters"], raw)
    # with the fields of vision/config.py, if the model sees pictures
    vision = whole.get("vision_config", {}) | raw["rope_parameters"] | whole
    limits = model.multimodal_config
    return {
        "model": {name: raw.get(name) for name in FIELDS},
        "vision": {name: x for name, x in vision.items() if isinstance(x, int | list)},
        "images": limits.get_limit_per_prompt("image") if limits else 0,
        "dtype": str(model.dtype).removeprefix("torch."),
        "max_model_len": model.max_model_len,
        "workers": config.parallel_config.world_size_across_dp,
        "gpus": [facts["gpu"] for facts in state.device_facts if facts["gpu"]],
        "nccl": state.device_facts[0]["nccl"],
    }
