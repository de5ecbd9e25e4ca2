"""The door of the sidecar: an ASGI middleware in front of vLLM's HTTP server.

In: every request. Out: 404 unless its route is one that GRPO needs, 401 unless it knows the secret
(when there is one), 409 for a trainer while another one has the server, and the route `GET
/nanogrpo`, by which a trainer learns whose weights these are. vLLM's own `--api-key` leaves the
weight routes open, and some of its development routes (collective_rpc, server_info, profiling)
should be reachable by nobody. Read before: serve.py, which names this class to vLLM. Read next:
vllm_engine.py, the client.
"""

from __future__ import annotations

import hmac
import json
import os
import time

# environment variable with the secret; never on a command line, which others can read
SECRET = "NANOGRPO_SECRET"
SHORTEST = 16  # characters of a secret

ROUTES = {
    *("/health", "/v1/models", "/version", "/metrics"),
    *("/v1/completions", "/inference/v1/generate", "/abort_requests"),
    *("/get_world_size", "/weight_info", "/weight_checker", "/update_weight_version"),
    *("/init_weight_transfer_engine", "/shutdown_weight_transfer_engine"),
    *("/start_weight_update", "/update_weights", "/finish_weight_update"),
    *(
        "/pause",
        "/resume",
        "/is_paused",
        "/reset_prefix_cache",
        "/sleep",
        "/wake_up",
        "/is_sleeping",
    ),
}
FACTS = "/nanogrpo"
# the header by which a trainer is told from another one: a random word
TRAINER = "X-Nanogrpo-Trainer"
# seconds without a word from the trainer whose weights are here, after which another may bring its
# own
QUIET = 20.0

# What must be equal for a server to take a trainer's weights: the fields of ModelConfig that decide
# shapes and results.
FIELDS = (
    *(
        "model_type",
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
    ),
    *("num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta", "tie_word_embeddings"),
)


def loopback(address: str) -> bool:
    """Whether only this machine reaches it."""
    return address == "localhost" or address == "::1" or address.startswith("127.")


class Guard:
    """Pure ASGI (https://asgi.readthedocs.io): `await guard(scope, receive, send)`. The secret is
    read once, at the start.
    """

    def __init__(self, app):
        self.app = app
        self.secret = os.environ.get(SECRET, "").encode()
        # who has introduced itself, and when it was heard last
        self.trainer, self.heard = b"", -QUIET

    async def __call__(self, scope, receive, send):
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        if scope["type"] != "http":  # websockets: GRPO needs none
            return await send({"type": "websocket.close", "code": 1008})
        if not self.knows(scope["headers"]):
            return await answer(send, 401, {"error": "the secret is missing or wrong"})
        path = scope["path"]
        if (silent := self.taken(scope["headers"], path)) is not None:
            return await answer(
                send,
                409,
                {"error": f"another trainer uses this server: it was heard {silent:.0f} s ago"},
            )
        if path == FACTS and scope["method"] == "GET":
            return await answer(send, 200, facts(scope["app"].state))
        # its action "reset" would wipe the weights: only checksums are let through
        weights = path == "/weight_checker"
        if path not in ROUTES or (weights and not await self.checksum_only(receive)):
            return await answer(
                send, 404, {"error": "this server samples and takes weights, and nothing else"}
            )
        if weights:
            receive = replay(b'{"action":"checksum"}')
        await self.app(scope, receive, send)

    def knows(self, headers: list[tuple[bytes, bytes]]) -> bool:
        if not self.secret:
            return True
        given = next((v for k, v in headers if k == b"authorization"), b"")
        # in constant time: no guessing byte by byte
        return hmac.compare_digest(given, b"Bearer " + self.secret)

    def taken(self, headers: list[tuple[bytes, bytes]], path: str) -> float | None:
        """Seconds since the trainer that has this server was heard, if this is a request of another
        one; else None. Without this, two trainers would replace each other's weights for ever. With
        several API processes each knows only what it was told.
        """
        who = next((v for k, v in headers if k == TRAINER.lower().encode()), b"")
        now = time.monotonic()
        if who and who != self.trainer and now - self.heard < QUIET:
            return now - self.heard
        if who and path == "/init_weight_transfer_engine":
            self.trainer = who
        if who and who == self.trainer:
            self.trainer, self.heard = (
                (b"", -QUIET) if path == "/shutdown_weight_transfer_engine" else (who, now)
            )
        return None

    async def checksum_only(self, receive) -> bool:
        body, more = b"", True
        while more and len(body) < 1000:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        try:
            return json.loads(body) == {"action": "checksum"}
        except ValueError:
            return False


def replay(body: bytes):
    """An ASGI `receive` that gives a body once more."""

    async def receive():
        return {"type": "http.request", "body": body, "more_body": False}

    return receive


async def answer(send, status: int, content: dict) -> None:
    body = json.dumps(content).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def facts(state) -> dict:
    """What a trainer must know of this server before it relies on it; from the application's state
    that vLLM sets.
    """
    config = state.engine_client.vllm_config
    model, parallel = config.model_config, config.parallel_config
    raw = model.hf_config.to_dict()
    if raw.get("head_dim") is None:
        raw["head_dim"] = raw["hidden_size"] // raw["num_attention_heads"]
    # transformers 5 and 4 keep it in different places
    raw["rope_theta"] = (raw.get("rope_parameters") or raw)["rope_theta"]
    return {
        "model": {name: raw.get(name) for name in FIELDS},
        "name": state.openai_serving_models.base_model_paths[0].name,
        "dtype": str(model.dtype).removeprefix("torch."),
        "max_model_len": model.max_model_len,
        "logprobs_mode": str(getattr(model.logprobs_mode, "value", model.logprobs_mode)),
        "workers": parallel.world_size_across_dp,
        "device": config.device_config.device_type,
    }
