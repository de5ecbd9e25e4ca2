"""Access control for the sidecar: ASGI middleware in front of vLLM's HTTP server.

In: every request. Out: status 401 for requests without the secret, 409 for a trainer while another
trainer uses the server, and 404 for every route that GRPO does not need. It adds one route,
`GET /nanogrpo`, which describes the server to a trainer.

vLLM's own `--api-key` leaves the weight routes open, and some of its development routes
(collective_rpc, server_info, profiling) should not be reachable by anyone. serve.py passes this
class to vLLM. Read next: client.py.
"""

from __future__ import annotations

import hmac
import json
import os
import time

from nanogrpo.errors import UserError
from nanogrpo.model import rope

# The environment variable that contains the secret. It is never passed on a command line, which
# other users of the machine can read.
SECRET = "NANOGRPO_SECRET"
SHORTEST = 16  # minimum length of a secret in characters

HEALTH, INFO, CONNECT = "/health", "/nanogrpo", "/init_weight_transfer_engine"
DISCONNECT = "/shutdown_weight_transfer_engine"
ROUTES = {
    *(HEALTH, "/v1/models", "/version", "/metrics"),
    *("/v1/completions", "/inference/v1/generate", "/pause", "/resume", "/is_paused"),
    *("/abort_requests", "/reset_prefix_cache", "/sleep", "/wake_up", "/is_sleeping"),
    *("/get_world_size", "/weight_info", "/update_weight_version"),
    *(CONNECT, "/start_weight_update", "/update_weights", "/finish_weight_update", DISCONNECT),
}
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
    return address in ("localhost", "::1") or address.startswith("127.")


class AccessControl:
    """Pure ASGI middleware (https://asgi.readthedocs.io). It reads the secret only once."""

    def __init__(self, app):
        self.app = app
        self.secret = os.environ.get(SECRET, "").encode()
        self.holder, self.last_seen = b"", -LEASE  # the trainer whose weights are here

    async def __call__(self, scope, receive, send):
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        if scope["type"] != "http":  # GRPO needs no websockets
            return await send({"type": "websocket.close", "code": 1008})
        headers, path = dict(scope["headers"]), scope["path"]
        if not self.authorized(headers.get(b"authorization", b"")):
            return await answer(send, 401, {"error": "the secret is missing or wrong"})
        age = self.renew(headers.get(TRAINER.lower().encode(), b""), path)
        if age is not None:
            error = f"another trainer uses this server; its last request came {age:.0f} s ago"
            return await answer(send, 409, {"error": error})
        if path == INFO and scope["method"] == "GET":
            return await answer(send, 200, describe(scope["app"].state))
        if path not in ROUTES:
            return await answer(send, 404, {"error": "this server only samples and takes weights"})
        await self.app(scope, receive, send)

    def authorized(self, header: bytes) -> bool:
        # The comparison takes constant time, so the secret cannot be guessed byte by byte.
        return not self.secret or hmac.compare_digest(header, b"Bearer " + self.secret)

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


async def answer(send, status: int, content: dict) -> None:
    body = json.dumps(content).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def scaling(angles: dict, raw: dict) -> dict | None:
    """Return the scaling of a model's rotary embedding as a trainer writes it, or None."""

    def require(ok: bool, *problem: str) -> None:
        if not ok:
            raise UserError(*problem)

    try:
        found = rope.read(angles, raw, require)
    except UserError:  # no trainer computes this kind, so it differs from every trainer's
        return angles
    return found.to_dict() if found else None


def describe(state) -> dict:
    """Return the facts that a trainer checks before it uses this server.

    state: the state of the application, as filled in by vLLM.
    """
    config = state.engine_client.vllm_config
    model = config.model_config
    raw = model.hf_config.to_dict()
    if raw.get("head_dim") is None:
        raw["head_dim"] = raw["hidden_size"] // raw["num_attention_heads"]
    raw["rope_theta"] = raw["rope_parameters"]["rope_theta"]
    raw["rope_scaling"] = scaling(raw["rope_parameters"], raw)
    return {
        "model": {name: raw.get(name) for name in FIELDS},
        "dtype": str(model.dtype).removeprefix("torch."),
        "max_model_len": model.max_model_len,
        "workers": config.parallel_config.world_size_across_dp,
    }
