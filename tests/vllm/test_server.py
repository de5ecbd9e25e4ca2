"""Servers that die, hang, come back, or belong to another trainer; and the process of our own one.

Against the fake server, or a process that only answers /health. Read before: test_client.py. With
a real vLLM: test_recovery.py.
"""

import os
import re
import signal
import socket
import sys
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import train
from nanogrpo.distributed.failure import asked
from nanogrpo.distributed.world import World
from nanogrpo.logs.files import checkpoints
from nanogrpo.vllm import server
from nanogrpo.vllm.auth import DISCONNECT, INFO
from nanogrpo.vllm.client import VLLMEngine
from nanogrpo.vllm.server import Server, ServerError, ServerLost, Sidecar, root_cause
from tests.conftest import arguments, refused, steps, tiny_config, tiny_model
from tests.ranks import run, until
from tests.vllm.fake import (
    MODEL,
    PARAMS,
    PROMPTS,
    FakeSidecar,
    FakeVLLM,
    engine_of,
    sample,
)

LOST = ServerError("for the test")


def alive(engine: VLLMEngine) -> list[bool]:
    return [server.alive for server in engine.servers]


# --- servers that the user has started ---


def test_a_server_that_was_started_again_is_sent_the_weights_again(fake):
    engine = engine_of(fake)
    expected = sample(engine)
    fake.label, fake.weights = "default", {}
    assert sample(engine) == expected
    assert fake.weights.keys() == dict(MODEL.named_parameters()).keys()
    assert engine.restarts == 1


def test_when_one_of_two_servers_dies_the_other_does_the_work(fake, other):
    engine = engine_of(fake, other, window=1)
    expected = sample(engine)
    dead = threading.Event()

    def die(method, path, body):
        other.http.server_close()
        dead.set()
        return 500

    other.disturb = die
    # so the other server gets a group before all are done, unless a busy machine delays a heartbeat
    fake.disturb = lambda m, path, b: dead.wait(60) and None
    assert sample(engine) == expected
    assert alive(engine) == [True, False]
    engine.load(MODEL, 1)  # the sync continues without it
    assert [s.versions[0] for s in engine.sample(PROMPTS[:2], 1, PARAMS, step=1)] == [1, 1]


def test_all_servers_get_the_weights_at_the_same_time(fake, other):
    together = threading.Barrier(2, timeout=60)

    def wait(method, path, body):
        if path == "/update_weights":
            together.wait()

    fake.disturb = other.disturb = wait
    engine = engine_of(fake, other)
    assert alive(engine) == [True, True]
    for one in (fake, other):
        assert one.label == engine.sync.label(0)
        assert all(torch.equal(one.weights[n], p) for n, p in MODEL.named_parameters())


def wait_for_a_heartbeat(fake):
    """Wait until a heartbeat that begins now is answered: then the next one arrives."""
    before = len(fake.requests)
    until(lambda: [r[1] for r in fake.requests[before:]].count("/is_paused") > 1)


@pytest.mark.parametrize("status", [401, 500])
@pytest.mark.parametrize("where", ["", "/init_weight_transfer_engine", "/update_weights"])
def test_a_server_that_gets_no_weights_is_named_once_and_used_when_it_does(
    fake, other, caplog, status, where
):
    """It may have been restarted with another secret."""
    engine = engine_of(fake, other, interval=0.02)
    other.disturb = lambda m, path, b: status if where in path else None
    engine._lose(engine.servers[1], LOST)
    for version in (1, 2):
        engine.load(MODEL, version)
    assert alive(engine) == [True, False]
    assert [r.message for r in caplog.records if "lost" in r.message] == [f"lost a server: {LOST}"]
    assert len(sample(engine)) == 12
    other.disturb = lambda *call: None
    wait_for_a_heartbeat(other)
    engine.load(MODEL, 3)
    assert alive(engine) == [True, True]
    assert other.label == fake.label == engine.sync.label(3)
    before = fake.label
    engine.load(MODEL, 3)  # these could be other weights, so no cached prefix may be used again
    assert before != fake.label == engine.sync.label(3)


@pytest.mark.parametrize("front_end", [False, True], ids=["all of it", "its engine"])
def test_a_hanging_server_delays_neither_samples_nor_syncs(fake, other, front_end):
    """And it is used again once it answers."""
    engine = engine_of(fake, other, interval=0.05, window=2)
    engine.servers[1].timeout = 0.4
    held, given = threading.Event(), threading.Event()

    def hang(method, path, body):
        if not (front_end and path in (INFO, "/health")):
            given.set()
            held.wait(100)

    other.disturb = hang
    # so the other server gets a group before all are done, unless a busy machine delays a heartbeat
    fake.disturb = lambda m, path, b: given.wait(20) and None
    begin = time.monotonic()
    assert len(sample(engine)) == 12
    for version in range(1, 4):
        engine.load(MODEL, version)
        assert alive(engine) == [True, False]
    assert time.monotonic() - begin < 60  # less than one timeout
    held.set()
    wait_for_a_heartbeat(other)
    engine.load(MODEL, 5)
    assert alive(engine) == [True, True]


def test_without_any_server_the_run_stops_after_its_patience(fake):
    engine = engine_of(fake, patience=0.6)
    fake.stop()
    begin = time.monotonic()
    message = r"No vLLM server is left \(.*\); the run stops; .* continue with --resume"
    with pytest.raises(ServerLost, match=message):
        sample(engine)
    assert 0.6 <= time.monotonic() - begin < 60
    with pytest.raises(ServerLost):
        engine.load(MODEL, 1)


@pytest.mark.parametrize("status", [None, 401, 500])
def test_the_end_of_a_run_releases_its_servers_and_fails_for_none(fake, status):
    engine = engine_of(fake)
    fake.disturb = lambda *call: status
    engine.close()
    assert fake.requests[-1][1] == DISCONNECT


# --- our own server ---


def test_our_own_server_is_restarted_unless_that_fails(fake):
    engine = FakeSidecar(fake, fails=3).engine()
    expected = sample(engine)
    fake.disturb = lambda *call: 500
    assert sample(engine) == expected
    fake.disturb = lambda *call: 500
    with pytest.raises(ServerLost, match=r"No vLLM server is left \(.*no memory is free"):
        sample(engine)


def test_our_own_server_is_not_restarted_again_and_again_over_the_same_groups(fake):
    """Each restart of vLLM takes a minute, and a request that ended it once will do so again."""
    engine = FakeSidecar(fake).engine()
    answer = fake.answer

    def die(path, body):
        if path == "/inference/v1/generate":
            fake.disturb = lambda *call: 500  # until it is restarted
            return {"choices": []}
        return answer(path, body)

    fake.answer = die
    message = r"No vLLM server returns completions .* 0 of 2 completions"
    with pytest.raises(ServerLost, match=message):
        engine.sample(PROMPTS[:1], 2, PARAMS, step=0)
    assert engine.sidecar.starts == 2


def test_no_server_is_started_after_the_end(fake):
    engine = FakeSidecar(fake).engine()
    engine._lose(engine.servers[0], LOST)
    # the run ends while a thread tries what is left of the server
    fake.disturb = lambda *call: engine.over.set() or 500
    with pytest.raises(ServerLost):
        engine.request(PROMPTS, 2, PARAMS, step=0)
    assert engine.sidecar.starts == 1
    engine.close()
    assert engine.sidecar.stopped


@pytest.fixture
def script(tmp_path, monkeypatch):
    """Return a function: make a sidecar that runs this program instead of serve.py."""
    monkeypatch.setattr(server, "script", lambda name: tmp_path / name)

    def make(text: str, **options) -> Sidecar:
        (tmp_path / "serve.py").write_text(text)
        return Sidecar(tmp_path, [], sys.executable, tmp_path / "serve.log", **options)

    return make


def test_a_start_ends_with_the_run_or_when_it_takes_too_long(script, monkeypatch):
    sidecar, over = script("import time; time.sleep(600)"), threading.Event()
    threading.Thread(target=lambda: (until(lambda: sidecar.process), over.set())).start()
    with refused("was stopped before it was healthy"):
        sidecar.start(5.0, over)
    assert sidecar.process is None
    monkeypatch.setattr(server, "STARTUP", 0.5)
    before = sidecar.process = sidecar._run(1)
    with refused("was stopped before it was healthy"):
        sidecar.start(5.0, threading.Event())
    assert before.poll() is not None


HEALTHY = """
import http.server, os, signal, sys
class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/nanogrpo" else 500)
        self.end_headers()
        self.wfile.write(b'{"error": "EngineCore encountered an issue. See stack trace"}')
port = int(sys.argv[sys.argv.index("--port") + 1])
server = http.server.HTTPServer(("127.0.0.1", port), Healthy)
server.handle_request()
"""


@pytest.mark.parametrize(
    ("end", "why"),
    [
        ("raise RuntimeError('no such luck')", r"status 1 \(RuntimeError: no such luck\)"),
        ("sys.exit('serve.py: error: unknown option')", r"status 1 \(.*error: unknown option\)"),
        ("sys.exit(3)", r"status 3 \(.*GET /nanogrpo"),
        ("os.kill(os.getpid(), signal.SIGKILL)", r"killed \(if not by you, the machine ran out"),
    ],
)
def test_the_error_says_why_a_process_of_our_own_has_ended(script, end, why):
    """From its own part of the log."""
    sidecar = script(HEALTHY + end)
    sidecar.output.write_text("Traceback (most recent call last):\nOSError: old\n")
    server = sidecar.start(60.0, threading.Event())
    sidecar.process.wait(60)
    with pytest.raises(ServerError, match=f"The vLLM sidecar .*{why}"):
        server.get("/is_paused")
    sidecar.stop()


def test_a_request_to_a_dead_engine_of_our_own_gives_the_cause_in_its_log(script):
    sidecar = script(f"{HEALTHY}\nprint('IndexError: x', flush=True); server.handle_request()")
    server = sidecar.start(60.0, threading.Event())
    with pytest.raises(ServerError, match=r"/is_paused with status 500: IndexError: x$"):
        server.get("/is_paused")
    sidecar.stop()


@pytest.mark.parametrize(("gpus", "visible"), [("", "6"), ("7,GPU-b", "7,GPU-b")])
def test_our_own_server_finds_our_package_and_sees_the_gpus_that_it_was_given(
    script, tmp_path, monkeypatch, gpus, visible
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6")
    shows = "sys.exit(os.environ['CUDA_VISIBLE_DEVICES'] + nanogrpo.__file__)"
    sidecar = script(f"import nanogrpo, os, sys; {shows}", gpus=gpus)
    path = re.escape(f"{tmp_path}/.serve/nanogrpo/__init__.py")
    with refused(rf"status 1 \({visible}{path}\)"):
        sidecar.start(60.0, threading.Event())
    sidecar.stop()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["serve.log", "serve.py"]


FIRST = """(EngineCore pid=9) ERROR 11-22 04:43:15 [core.py:1750] Traceback (most recent call last):
(EngineCore pid=9) ERROR 11-22 04:43:15 [core.py:1750]   File "core.py", line 7, in run
(EngineCore pid=9) ERROR 11-22 04:43:15 [core.py:1750]     raise ValueError("not this line")
(EngineCore pid=9) ERROR 11-22 04:43:15 [core.py:1750] ValueError: No available memory
"""
THEN = """(APIServer pid=7) Traceback (most recent call last):
(APIServer pid=7)   File "serve.py", line 1
(APIServer pid=7) RuntimeError: Engine core initialization failed. See root cause above.
"""
PYDANTIC = """(APIServer pid=7) pydantic_core._pydantic_core.ValidationError: 1 error for Model
(APIServer pid=7)   Value error, the context is too long
(APIServer pid=7)     For further information visit
"""


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        (FIRST + THEN, "ValueError: No available memory"),
        (THEN, ""),
        (
            PYDANTIC,
            "pydantic_core._pydantic_core.ValidationError: 1 error for Model Value error, the"
            " context is too long",
        ),
        ("INFO: all is well\nUserWarning: leaked", ""),
    ],
)
def test_the_cause_of_an_end_is_the_exception_that_the_others_refer_to(log, cause):
    assert root_cause(log) == cause


# --- connections ---


def test_connecting_has_a_time_limit_even_when_the_reply_has_none():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen(0)
        waiting = [socket.socket() for _ in range(4)]
        for client in waiting:  # they fill the queue
            client.setblocking(False)
            client.connect_ex(sock.getsockname())
        time.sleep(0.1)
        server = Server(f"http://127.0.0.1:{sock.getsockname()[1]}", timeout=0.3)
        server.alive = True
        with pytest.raises(ServerError, match=r"did not answer /inference.* within 0.3 s"):
            server.generate({})
        for client in waiting:
            client.close()


def test_no_request_for_completions_is_sent_to_a_lost_server(fake):
    """It has no time limit, because heartbeats end it; but only while the server is alive."""
    with pytest.raises(ServerError, match="was lost before"):
        Server(fake.url).generate({})
    server, connect = Server(fake.url), Server(fake.url).kind.connect

    class Slow(server.kind):
        def connect(self):
            connect(self)
            server.alive = False  # in another thread, at this moment
            server.abort()

    server.kind, server.alive = Slow, True
    with pytest.raises(ServerError, match="was lost before"):
        server.generate({})
    assert fake.requests == []


# --- several ranks, and full runs ---


def late_to_load(url: str, secret: str) -> int:
    """Let a recovery hold rank 0's lock for longer than a collective may take."""
    dist.init_process_group("gloo")
    model = tiny_model()
    world = World(dist.get_rank(), 2, torch.device("cpu"))
    dist.barrier()  # from here on the ranks run in step
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=2))
    engine = VLLMEngine(
        model, max_len=32, urls=[url], secret=secret, transport="memory", world=world
    )
    gather = engine.sync.gather
    engine.sync.gather = lambda m: (dist.barrier(), gather(m))  # as FSDP2 does
    if world.main:
        held = threading.Event()

        def recovery() -> None:
            with engine.lock:
                held.set()
                time.sleep(3)

        threading.Thread(target=recovery, daemon=True).start()
        held.wait()
    engine.load(model, 0)
    return engine.version


def test_the_other_ranks_wait_for_a_recovery_longer_than_for_a_collective(fake):
    assert run(2, late_to_load, fake.url, fake.secret) == [0, 0]


@pytest.mark.parametrize("ahead", ["0", "1"])
def test_a_signal_ends_the_wait_for_a_server_and_the_run_saves(
    tiny_base, tiny_tokenizer, files, tmp_path, capsys, ahead
):
    """A scheduler waits for half a minute, but the patience is ten minutes. A second signal, or the
    scheduler's kill, would lose the checkpoint.
    """

    def disturb(method, path, body):
        if len(fake.generated()) <= 9 or path == INFO:
            return None
        if not asked.is_set():
            signalled.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGTERM)
        return 500

    signalled = []
    with FakeVLLM(tiny_config(vocab_size=tiny_tokenizer.vocab_size)) as fake:
        fake.disturb = disturb
        options = ["--engine", "vllm", "--server", fake.url, "--weight-transport", "memory"]
        options += ["--max-staleness", ahead, "--max-steps", "5"]
        status = train.main(arguments(tiny_base, files, tmp_path, *options))
    assert time.monotonic() - signalled[0] < 60
    # 0: the step in hand was finished
    assert "continue with --resume" in capsys.readouterr().err if status == 2 else ahead == "1"
    (saved,) = checkpoints(tmp_path)
    assert saved.name == f"checkpoint-{len(steps(tmp_path))}"
