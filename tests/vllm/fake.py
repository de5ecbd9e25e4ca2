"""A fake sidecar that samples nonsense, for tests of the client.

    with FakeVLLM(tiny_config()) as server:     # on a free port of this machine
        engine = engine_of(server)              # a client that has sent it MODEL's weights

Completions are a hash of their seed, so equal requests get equal replies. Weights really arrive:
`server.weights` holds those of the last sync. `server.disturb` may replace any reply: (method,
path, body with query) → None for the usual one, a status, a reply, or its bytes. Its secret is in
the environment while it runs.

In sleep mode, it answers 500 to requests that would use memory that is not there. `server.wrong`
lists them; a real server would crash.
"""

import contextlib
import json
import os
import random
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from unittest import mock
from urllib.parse import parse_qsl

import torch

from nanogrpo.engine.base import Engine, SamplingParams
from nanogrpo.errors import UserError
from nanogrpo.types import Prompt, Sample
from nanogrpo.vllm import client
from nanogrpo.vllm.auth import SECRET
from nanogrpo.vllm.buckets import BroadcastGroup, InitInfo, attach, checksum
from nanogrpo.vllm.client import VLLMEngine
from nanogrpo.vllm.server import Server
from tests.conftest import tiny_model

MODEL = tiny_model()
PROMPTS = [Prompt(i, "", [1 + i, 2, 3]) for i in range(6)]
PARAMS = SamplingParams(max_tokens=8, stop_token_ids=(7, 9), seed=3)


class FakeVLLM:
    def __init__(self, cfg, max_model_len: int = 256, workers: int = 1, port: int = 0):
        self.facts = {
            "config": cfg.to_dict(),
            "dtype": "float32",
            "max_model_len": max_model_len,
            "workers": workers,
            "gpus": [],
            "nccl": "",
        }
        self.vocab_size = cfg.vocab_size
        self.group: BroadcastGroup | None = None
        self.label, self.weights, self.requests = "default", {}, []
        self.disturb = lambda *call: None
        self.asleep: set[str] = set()  # the memory that is freed: weights, kv_cache
        self.garbage = False  # whether the weights have been freed since they last arrived
        self.wrong: list[str] = []
        self.engines: list[VLLMEngine] = []  # that engine_of made
        self.running = threading.Event()  # cleared by /pause, set by /resume
        self.running.set()
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                body = json.loads(
                    self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}"
                )
                path, _, query = self.path.partition("?")
                call = (self.command, path, body | dict(parse_qsl(query)))
                fake.requests.append(call)
                known = self.headers["Authorization"] == f"Bearer {fake.secret}"
                reply = fake.disturb(*call) if known else 401
                reply = fake.answer(*call[1:]) if reply is None else reply
                status, content = (
                    (reply, {"error": {"message": "disturbed"}})
                    if isinstance(reply, int)
                    else (200, reply)
                )
                self.send_response(status)
                self.end_headers()
                data = content if isinstance(content, bytes) else json.dumps(content).encode()
                with contextlib.suppress(ConnectionError):  # the client has read enough
                    self.wfile.write(data)

            do_POST = do_GET

            def log_message(self, *_):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        self.secret = "a-secret-of-the-tests-only"
        self.environment = mock.patch.dict(os.environ, {SECRET: self.secret})

    def __enter__(self):
        self.environment.start()
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self.stop()
        self.environment.stop()
        for engine in self.engines:
            engine.over.set()  # or its threads would send requests to the next user of the port

    def stop(self) -> None:
        self.http.shutdown()
        self.http.server_close()  # from now on: connection refused
        if self.group is not None:
            self.group.close()
            self.group = None

    def answer(self, path: str, body: dict) -> dict | int:
        if path in ("/pause", "/resume"):
            (self.running.set if path == "/resume" else self.running.clear)()
        if path == "/sleep":
            assert body["level"] == "2"
            self.running.clear()
            self.asleep, self.garbage, self.weights = {"weights", "kv_cache"}, True, {}
        if path == "/wake_up":
            self.asleep.discard(body["tags"])
            if not self.asleep:  # vLLM then continues by itself
                self.running.set()
        if path == "/inference/v1/generate":
            self.running.wait(20)
        if (
            (path == "/resume" and self.asleep)
            or (path == "/update_weights" and (self.running.is_set() or "weights" in self.asleep))
            or ("generate" in path and (self.asleep or self.garbage))
        ):
            self.wrong.append(path)
            return 500
        if path == "/inference/v1/generate":
            return {
                "choices": [
                    self.choice(i, body["sampling_params"])
                    for i in range(body["sampling_params"]["n"])
                ]
            }
        if path == "/init_weight_transfer_engine":
            self.init_info = info = InitInfo(**body["init_info"])
            self.mapped = [
                attach(h, n, torch.device("cpu")) for h, n in zip(info.handles, info.plan.sizes)
            ]
            device = torch.device("cuda" if self.facts["gpus"] else "cpu")
            self.group = None if self.mapped else BroadcastGroup(info, 1, device)
        if path == "/update_weights":
            sizes, checksums = self.init_info.plan.sizes, body["update_info"]["checksums"]
            if self.group is not None:
                self.mapped = [torch.empty(n, dtype=torch.uint8) for n in sizes]
                self.group.send(self.mapped)
            if [checksum(bucket) for bucket in self.mapped] != checksums:
                return 500
            self.weights = {
                n: t.clone()
                for i, b in enumerate(self.mapped)
                for n, t in self.init_info.plan.views(b, i)
            }
            self.garbage = False
        self.label = body.get("weight_version") or self.label
        return (
            self.facts
            if path == "/nanogrpo"
            else {"weight_version": self.label, "is_paused": not self.running.is_set()}
        )

    def choice(self, i: int, params: dict) -> dict:
        rng = random.Random(params["seed"] + i)
        size, stops = rng.randint(1, params["max_tokens"]), params["stop_token_ids"]
        others = [t for t in range(self.vocab_size) if t not in stops]
        ids = [rng.choice(others) for _ in range(params["max_tokens"])]
        if stops and size < len(ids):
            ids[size - 1 :] = [rng.choice(stops)]
        content = [{"token_id": t, "logprob": -rng.random()} for t in ids]
        reason = "stop" if ids[-1] in stops else "length"
        spans = [{"version": self.label, "start": 0, "end": len(ids)}]
        masks = [sorted({t, *rng.sample(others, 3)}) for t in ids] if params["top_k"] else None
        return {
            "sampling_mask": masks,
            "index": i,
            "token_ids": ids,
            "logprobs": {"content": content},
            "finish_reason": reason,
            "weight_versions": spans,
        }

    def generated(self) -> list[dict]:
        """The bodies of the requests for completions, in the order they came."""
        return [body for _, path, body in self.requests if path == "/inference/v1/generate"]


class FakeSidecar:
    """Our own server process, which is a fake server. Each start loses everything, and one may
    fail.
    """

    def __init__(self, fake, model="", options=(), python="", output="", gpus="", fails=0):
        self.fake, self.options, self.output, self.gpus = fake, options, output, gpus
        self.fails, self.starts, self.stopped = fails, 0, False

    def start(self, timeout: float, over: threading.Event) -> Server:
        self.starts += 1
        if self.starts == self.fails:
            raise UserError("The vLLM sidecar ended with status 1 (no memory is free)")
        self.fake.disturb = lambda *call: None
        self.fake.asleep, self.fake.garbage, self.fake.label = set(), True, "default"
        self.fake.running.set()
        return Server(self.fake.url, timeout=timeout)

    def stop(self) -> None:
        self.stopped = True

    def engine(self, **options) -> VLLMEngine:
        engine = VLLMEngine(MODEL, max_len=32, transport="memory", sidecar=self, **options)
        self.fake.engines.append(engine)
        engine.load(MODEL, 0)
        return engine


def content(samples: list[Sample]) -> list[tuple]:
    """Return everything that a repeated request must return again."""
    return [(s.prompt.id, s.index, s.token_ids, s.logp, s.stopped) for s in samples]


def sample(engine: Engine) -> list[tuple]:
    """Return the content of two completions of each of PROMPTS."""
    return content(engine.sample(PROMPTS, 2, PARAMS, step=0))


def engine_of(
    *servers: FakeVLLM | str,
    model=MODEL,
    load: bool = True,
    interval: float = 15.0,
    patience: float = 0.0,
    **options,
) -> VLLMEngine:
    """Return an engine that has sent version 0, unless `load` is off.

    Servers have a minute to answer, so none is lost because the machine is busy. interval: seconds
    between heartbeats.
    """
    options = {"max_len": 32, "transport": "memory", "timeout": 60.0} | options
    urls = [s if isinstance(s, str) else s.url for s in servers]
    with mock.patch.multiple(client, HEARTBEAT=interval, PATIENCE=patience):
        engine = VLLMEngine(model, urls=urls, **options)
    for s in servers:
        if isinstance(s, FakeVLLM):
            s.engines.append(engine)
    if load:
        engine.load(model, 0)
    return engine
