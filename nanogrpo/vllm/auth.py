"""Access control for the sidecar: ASGI middleware in front of vLLM's HTTP server.

In: every request. Out: status 401 for requests without the secret, and 404 for every route that
GRPO does not need. The middleware adds a route, `GET /nanogrpo`, which describes the server to a
trainer. Web pages cannot use the server, because no browser adds the secret by itself.

vLLM's own `--api-key` does not protect the weight routes. Some development routes of vLLM
(collective_rpc, server_info, profiling) should not be reachable at all. The script serve.py passes
this class to vLLM. Read next: client.py.
"""

import hmac
import json
import os

# The environment variable with the secret.
# The secret must not be on a command line, which other users of the machine can read.
SECRET = "NANOGRPO_SECRET"

INFO, CONNECT = "/nanogrpo", "/init_weight_transfer_engine"
DISCONNECT = "/shutdown_weight_transfer_engine"
GENERATE = "/inference/v1/generate"
# All routes of the server, by method. The page docs/vllm.md explains each route.
ROUTES = {
    "GET": (INFO, "/health", "/is_paused", "/metrics"),
    "POST": (
        GENERATE,
        CONNECT,
        "/pause",
        "/start_weight_update",
        "/update_weights",
        "/finish_weight_update",
        "/resume",
        "/sleep",
        "/wake_up",
        DISCONNECT,
    ),
}


class AccessControl:
    """ASGI middleware without a framework (https://asgi.readthedocs.io). It reads the secret only
    once."""

    def __init__(self, app):
        self.app = app
        self.secret = os.environ.get(SECRET, "")

    async def __call__(self, scope, receive, send):
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        if scope["type"] != "http":  # GRPO needs no websockets
            return await send({"type": "websocket.close", "code": 1008})
        # imported here, because the trainer's interpreter may lack this package
        from starlette.responses import JSONResponse

        headers, path = dict(scope["headers"]), scope["path"]
        # The comparison takes constant time, so the secret cannot be guessed byte by byte.
        expected = f"Bearer {self.secret}".encode()
        given = headers.get(b"authorization", b"")
        app = self.app
        if not (self.secret and hmac.compare_digest(given, expected)):
            app = JSONResponse({"error": "the secret is missing or wrong"}, 401)
        elif path not in ROUTES.get(scope["method"], ()):
            error = "this server has no such route (docs/vllm.md lists its routes)"
            app = JSONResponse({"error": error}, 404)
        elif path == INFO:
            app = JSONResponse(await describe(scope["app"].state))
        await app(scope, receive, send)


async def describe(state) -> dict:
    """Return the facts that a trainer checks before it uses this server.

    `state` is the state of the application, as filled in by vLLM. The facts come from the workers,
    so a reply also shows that the engine runs.
    """
    client = state.engine_client
    workers = await client.collective_rpc("device_facts")
    config = client.vllm_config
    model = config.model_config
    return {
        "config": json.loads(model.hf_config.to_json_string()),  # as in a config.json
        "dtype": str(model.dtype).removeprefix("torch."),
        "max_model_len": model.max_model_len,
        "workers": config.parallel_config.world_size_across_dp,
        "gpus": [facts["gpu"] for facts in workers if facts["gpu"]],
        "nccl": workers[0]["nccl"],
    }
