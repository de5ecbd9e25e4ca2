"""Servers that the trainer cannot use: one that hangs, one that another trainer holds, and one that
has died.

Against the fake server, or a process that only answers /health.

Read before: test_client.py. The server's end of the lease: test_serve.py. Read next:
test_trouble.py.
"""

from __future__ import annotations

import re
import socket
import sys
import threading
import time

import pytest

from nanogrpo.errors import UserError
from nanogrpo.vllm import protocol
from nanogrpo.vllm.auth import CONNECT, INFO
from nanogrpo.vllm.server import Server, ServerError, ServerLost, Sidecar, retry
from serve import check_port
from tests.conftest import tiny_config
from tests.vllm.fake import MODEL, FakeVLLM, engine_of, wait_until


@pytest.mark.parametrize("front_end", [False, True], ids=["all of it", "its engine"])
def test_a_hanging_server_does_not_delay_syncs_and_is_used_again_once_it_answers(fake, front_end):
    """Even if its front end answers, no weights may be sent, because that would take a timeout."""
    with FakeVLLM(tiny_config()) as other:
        engine = engine_of(fake, other, interval=0.02)
        held, asked = threading.Event(), set()

        def hang(method, path, body):
            if not (front_end and path in (INFO, "/health")):
                asked.add(path)
                held.wait(100)

        other.disturb = hang
        engine._lose(engine.servers[1], ServerError("for the test"))
        begin = time.monotonic()
        for version in range(1, 4):
            engine.load(MODEL, version)
            assert [s.alive for s in engine.servers] == [True, False]
        assert time.monotonic() - begin < 60  # less than one timeout
        assert asked <= {"/is_paused", "/health"}
        held.set()
        wait_until(lambda: engine.servers[1].error is None)
        engine.load(MODEL, 5)
        assert [s.alive for s in engine.servers] == [True, True]
        assert other.label == engine.sync.label(5)


@pytest.mark.parametrize("load", [True, False], ids=["loaded", "before the first load"])
def test_an_answer_from_before_the_loss_does_not_bring_a_server_back(fake, monkeypatch, load):
    """Or the next sync would send it weights, and wait."""
    is_paused, lost, again, held = protocol.is_paused, *(threading.Event() for _ in range(3))
    with FakeVLLM(tiny_config()) as other:
        engine = engine_of(fake, other, interval=0.02, load=load)

        def late(reply: dict, name: str) -> bool:
            if name == other.url and not lost.is_set():
                other.disturb = lambda *call: again.set() or held.wait(100)
                engine._lose(engine.servers[1], ServerError("for the test"))
                lost.set()
            return is_paused(reply, name)

        monkeypatch.setattr(protocol, "is_paused", late)
        assert lost.wait(60)
        assert again.wait(60)  # the heartbeat after the one that was answered
        assert str(engine.servers[1].error) == "for the test"
        held.set()


def test_a_server_that_another_trainer_holds_is_waited_for_and_then_reported(fake):
    left = [2]

    def taken(method, path, body):
        left[0] -= 1
        return 409 if left[0] >= 0 else None

    fake.disturb = taken
    engine_of(fake, patience=30.0)  # its trainer was killed a moment ago
    left[0] = 10**6
    with pytest.raises(
        UserError, match=r"is taken \(disturbed\); give each trainer a server of its own"
    ):
        engine_of(fake)


def test_the_lease_is_renewed_while_the_trainer_trains(fake, monkeypatch):
    monkeypatch.setattr("nanogrpo.vllm.server.RENEW", 0.02)
    heard = threading.Event()
    engine = engine_of(fake)
    fake.disturb = lambda m, path, b: (path == "/health" and heard.set()) or None
    assert heard.wait(60)
    engine.close()


def test_the_lease_is_renewed_during_a_long_first_load(fake, monkeypatch):
    monkeypatch.setattr("nanogrpo.vllm.server.RENEW", 0.02)
    heard, loading = threading.Event(), threading.Event()

    def disturb(method, path, body):
        if path == "/update_weights":
            loading.set()
            assert heard.wait(60)
        if path == "/health" and loading.is_set():
            heard.set()

    fake.disturb = disturb
    engine_of(fake)
    assert heard.is_set()


def test_an_engine_that_failed_to_start_leaves_no_thread_behind(fake, monkeypatch):
    monkeypatch.setattr("nanogrpo.vllm.server.RENEW", 0.02)
    before = set(threading.enumerate())
    fake.facts["model"]["vocab_size"] = 77
    with pytest.raises(UserError, match="serves another model"):
        engine_of(fake)
    # one of the fake's threads may be about to start, so it could not be joined
    left = set(threading.enumerate()) - before
    wait_until(lambda: not any(thread.is_alive() for thread in left))


def test_a_server_whose_engine_has_died_is_reported_at_the_start(fake):
    """Its front end still describes the model."""
    fake.disturb = lambda m, path, b: 503 if path == "/health" else None
    with pytest.raises(UserError, match=r"answers, but its engine has died; start serve.py there"):
        engine_of(fake, load=False)


def test_the_first_sync_does_not_wait_for_as_long_as_a_later_one(fake, monkeypatch):
    monkeypatch.setattr("nanogrpo.vllm.client.FIRST", 0.0)
    fake.disturb = lambda m, path, b: 500 if path == CONNECT else None
    with pytest.raises(ServerLost, match=r"No vLLM server is left \(.*status 500"):
        engine_of(fake, patience=10_000.0)


@pytest.fixture
def dying(tmp_path, monkeypatch):
    """Return a function: start a sidecar that answers /health, then fails to stay alive."""
    monkeypatch.setattr("nanogrpo.vllm.server.script", lambda name: tmp_path / name)

    def start(end: str) -> tuple[Sidecar, Server]:
        (tmp_path / "serve.py").write_text(HEALTHY + end)
        sidecar = Sidecar(tmp_path, [], sys.executable, tmp_path / "serve.log")
        (tmp_path / "serve.log").write_text("Traceback (most recent call last):\nOSError: old\n")
        return sidecar, sidecar.start(60.0)

    return start


def test_a_sidecar_keeps_its_port_and_leaves_nothing_but_its_log(tmp_path, monkeypatch):
    """While the server loads, or ends and is started again, nobody else may take the port."""
    monkeypatch.setattr("nanogrpo.vllm.server.script", lambda name: tmp_path / name)
    (tmp_path / "serve.py").write_text("import nanogrpo; print(nanogrpo.__file__)")
    (tmp_path / ".serve").mkdir()
    (tmp_path / ".serve" / "nanogrpo").symlink_to(tmp_path)  # by a run that was killed
    sidecar = Sidecar(tmp_path, [], sys.executable, tmp_path / "serve.log")
    with pytest.raises(UserError, match=re.escape(f"({tmp_path}/.serve/nanogrpo/__init__.py)")):
        sidecar.start(60.0)
    port = sidecar.reserved.getsockname()[1]
    with socket.socket() as other:
        with pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        check_port("127.0.0.1", port)  # serve.py may
        sidecar.stop()
        other.bind(("127.0.0.1", port))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["serve.log", "serve.py"]


def test_a_log_that_cannot_be_written_is_named(tmp_path):
    sidecar = Sidecar(tmp_path, [], sys.executable, tmp_path / "gone" / "serve.log")
    message = rf"{tmp_path}/gone/serve\.log, the log of .* cannot be written \(No such file"
    with pytest.raises(UserError, match=message):
        sidecar.start(60.0)


@pytest.mark.parametrize(("gpus", "visible"), [("", "6"), ("7,GPU-b", "7,GPU-b")])
def test_our_own_server_sees_the_gpus_that_it_was_given(tmp_path, monkeypatch, gpus, visible):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6")
    monkeypatch.setattr("nanogrpo.vllm.server.script", lambda name: tmp_path / name)
    (tmp_path / "serve.py").write_text(
        "import os, sys; sys.exit(os.environ['CUDA_VISIBLE_DEVICES'])"
    )
    sidecar = Sidecar(tmp_path, [], sys.executable, tmp_path / "serve.log", gpus=gpus)
    with pytest.raises(UserError, match=rf"status 1 \({visible}\)"):
        sidecar.start(60.0)


HEALTHY = """
import http.server, os, signal, sys
class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 500)
        self.end_headers()
        if self.path != "/health":
            self.wfile.write(b'{"error": "EngineCore encountered an issue. See stack trace"}')
port = int(sys.argv[sys.argv.index("--port") + 1])
print("serve: KV cache of 1.0 GiB, chosen from 4.0 GiB", flush=True)
server = http.server.HTTPServer(("127.0.0.1", port), Healthy)
server.handle_request()
"""
LEFT = """a/resource_tracker.py:254: UserWarning: resource_tracker: there appear to be 2 leaked
  warnings.warn("""


@pytest.mark.parametrize(
    ("end", "why"),
    [
        ("raise RuntimeError('no such luck')", r"status 1 \(RuntimeError: no such luck\)"),
        ("sys.exit('serve.py: error: unknown option')", r"status 1 \(unknown option\)"),
        ("sys.exit(3)", r"status 3 \(.*GET /health"),
        (f"print({LEFT!r}, file=sys.stderr); sys.exit(3)", r"status 3 \(.*GET /health"),
        (f"sys.stderr.write({LEFT.splitlines()[0]!r}); sys.exit(3)", r"status 3 \(.*GET /health"),
        ("from os import resource_tracker", r"\(ImportError: cannot import name 'resource_tra"),
        ("os.kill(os.getpid(), signal.SIGKILL)", r"killed \(if not by you, the machine ran out"),
    ],
)
def test_a_process_of_our_own_that_has_ended_is_not_waited_for(dying, caplog, end, why):
    """And the error says why it ended, from its own part of the log."""
    caplog.set_level("INFO")
    sidecar, server = dying(end)
    assert "; KV cache of 1.0 GiB, chosen from 4.0 GiB" in caplog.messages[-1]
    sidecar.process.wait(60)
    begin = time.monotonic()
    problem = retry(10_000.0, lambda: server.get("/is_paused"), threading.Event())
    assert time.monotonic() - begin < 60
    assert re.search(f"The vLLM sidecar .*{why}", str(problem))
    sidecar.stop()


def test_a_request_to_a_dead_engine_of_our_own_gives_the_cause_in_its_log(dying):
    end = "server.handle_request()"  # answers 500 …
    sidecar, server = dying(
        f"print('Traceback (most recent call last):\\nIndexError: x', flush=True)\n{end}"
    )
    with pytest.raises(ServerError, match=r"its engine has died \(IndexError: x\)$") as e:
        server.get("/is_paused")
    assert e.value.status == 0  # otherwise each request would be sent three times
    sidecar.stop()


@pytest.mark.parametrize("status", [409, 500])
@pytest.mark.parametrize("where", ["", "/init_weight_transfer_engine"])
def test_a_server_that_is_never_used_is_reported_once(fake, caplog, status, where):
    with FakeVLLM(tiny_config()) as other:
        engine = engine_of(fake, other, load=False, interval=0.02)
        other.disturb = lambda m, path, b: status if where in path else None
        for version in range(3):
            engine.load(MODEL, version)
        assert [s.alive for s in engine.servers] == [True, False]
        messages = [r.message for r in caplog.records if "without this server" in r.message]
        assert len(messages) == 1
        assert other.url in messages[0]
        assert other.url in str(engine.problem)
