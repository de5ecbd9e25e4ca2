"""Failures at bad moments, against the fake server: while the client closes, recovers or connects,
and servers that come back as different ones.

Read before: test_client.py. Read next: test_recovery.py.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import train
from nanogrpo.distributed.failure import asked
from nanogrpo.distributed.world import World
from nanogrpo.errors import UserError
from nanogrpo.model import checkpoint
from nanogrpo.model.tokenizer import Tokenizer
from nanogrpo.vllm import secret, sync
from nanogrpo.vllm.auth import CONNECT, DISCONNECT, HEALTH
from nanogrpo.vllm.client import VLLMEngine
from nanogrpo.vllm.server import Server, ServerError, ServerLost, Sidecar
from tests.conftest import arguments, steps, tiny_config, tiny_model
from tests.ranks import run
from tests.vllm.fake import MODEL, PARAMS, PROMPTS, FakeVLLM, content, engine_of, wait_until

# --- servers that come back as other ones ---


def test_a_single_completion_is_not_mistaken_for_a_greedy_reply(fake):
    engine = engine_of(fake)
    expected = content(engine.sample(PROMPTS[:1], 4, PARAMS, step=0))
    left = [1]

    def cut(method, path, body):
        if path == "/inference/v1/generate" and left.pop() if left else False:
            return {"choices": fake.answer(path, body)["choices"][:1]}

    fake.disturb = cut
    assert content(engine.sample(PROMPTS[:1], 4, PARAMS, step=0)) == expected


def test_an_address_given_twice_is_refused(fake):
    with pytest.raises(UserError, match="--server names an address twice"):
        engine_of(fake, f"{fake.url}/", load=False)


def test_servers_of_different_dtypes_are_refused(fake):
    with FakeVLLM(tiny_config()) as other:
        other.facts["dtype"] = "bfloat16"
        with pytest.raises(
            UserError, match=r"runs in bfloat16, but another server runs in float32; start all"
        ):
            engine_of(fake, other, load=False)


@pytest.mark.parametrize("reply", [{"hello": "world"}, b"<html>", b"[" * 200_000, b"null", b"[]"])
def test_a_server_that_accepts_every_request_is_not_a_sidecar(fake, reply):
    fake.disturb = lambda m, path, b: reply
    with pytest.raises(UserError, match="is not a sidecar of this project"):
        engine_of(fake, load=False)


def test_the_others_continue_when_a_server_comes_back_with_another_model(fake):
    with FakeVLLM(tiny_config()) as other:
        engine = engine_of(fake, other, interval=0.02)
        engine._lose(engine.servers[1], ServerError("for the test"))
        wait_until(lambda: engine.servers[1].error is None)
        other.facts["model"]["vocab_size"] = 77
        engine.load(MODEL, 1)
        assert [s.alive for s in engine.servers] == [True, False]
        assert len(engine.sample(PROMPTS, 2, PARAMS, step=1)) == 12
        other.facts["model"]["vocab_size"] = MODEL.cfg.vocab_size
        wait_until(lambda: engine.servers[1].error is None)
        engine.load(MODEL, 2)
        assert [s.alive for s in engine.servers] == [True, True]


def test_a_server_that_was_started_again_with_a_new_secret_is_used_again(fake):
    engine = engine_of(fake)
    expected = content(engine.sample(PROMPTS, 2, PARAMS, step=0))
    old, (fake.secret, _) = fake.secret, secret.create(fake.http.server_port)
    fake.label, fake.weights = "default", {}
    assert fake.secret != old
    assert content(engine.sample(PROMPTS, 2, PARAMS, step=0)) == expected
    assert engine.restarts == 1


@pytest.mark.parametrize("where", ["/pause", "/update_weights", "/finish_weight_update", "/resume"])
@pytest.mark.parametrize("data", [b"<html>", b""])
def test_an_answer_that_is_no_json_does_not_count_as_success(fake, where, data):
    """A proxy may answer with a page and status 200."""
    engine = engine_of(fake)
    fake.disturb = lambda m, path, b: data if path == where else None
    with pytest.raises(ServerLost, match=f"answered {where}.* with status 200: {data.decode()}"):
        engine.load(MODEL, 1)


@pytest.mark.parametrize("where", ["generate", "/pause", "/is_paused"])
def test_a_refusal_during_a_run_loses_the_server_but_not_the_checkpoint(fake, where):
    """It may have been restarted with another secret. A UserError would end the run at once and
    without its checkpoint.
    """
    engine = engine_of(fake, interval=0.05)
    held = threading.Event()

    def disturb(method, path, body):
        if where == "/is_paused" and "generate" in path:
            held.wait(100)  # so the heartbeat comes first
        return 401 if where in path else None

    fake.disturb = disturb
    with pytest.raises(ServerLost, match=r"refuses the secret|was lost|did not answer"):
        engine.sample(PROMPTS, 2, PARAMS, step=0) if where != "/pause" else engine.load(MODEL, 1)
    held.set()


# --- the end of a run ---


@pytest.mark.parametrize("where", ["heartbeat", "first sync"])
def test_a_lost_server_is_released(fake, where):
    """Another trainer need not wait until the lease has expired."""
    engine = engine_of(fake, load=False)
    if where == "first sync":
        fake.disturb = lambda m, path, b: 500 if path == "/update_weights" else None
        with pytest.raises(ServerLost):
            engine.load(MODEL, 0)
    else:
        engine.load(MODEL, 0)
        engine._lose(engine.servers[0], ServerError("for the test"))
    engine.close()
    paths = [path for _, path, _ in fake.requests if path != HEALTH]  # these renew the lease
    assert paths[-1] == DISCONNECT
    assert not engine.servers[0].taken


def test_a_thread_that_finds_out_late_does_not_end_the_release(fake):
    """When requests in progress are ended, each of their threads reports the loss."""
    engine = engine_of(fake)
    lost = ServerError("for the test")

    def lose(method, path, body):
        if path == DISCONNECT:
            engine._lose(engine.servers[0], lost)

    fake.disturb = lose
    engine.close()
    assert not engine.servers[0].taken


def test_a_server_is_not_connected_again_after_its_release(fake):
    """The run ends while a thread tries to use a server that comes back."""
    engine = engine_of(fake, patience=60.0)
    engine._lose(engine.servers[0], ServerError("for the test"))
    greet = engine._greet

    def greet_and_close(server: Server) -> tuple[str, int]:
        found = greet(server)
        engine.close()
        return found

    engine._greet = greet_and_close
    with pytest.raises(ServerLost):
        engine.request(PROMPTS, 2, PARAMS, step=0)
    paths = [path for _, path, _ in fake.requests]
    assert [path for path in paths if path in (CONNECT, DISCONNECT)] == [CONNECT, DISCONNECT]


def test_servers_are_released_at_the_same_time(fake, monkeypatch):
    """A server that hangs would delay the others."""
    both, released = threading.Barrier(2, timeout=60), []
    monkeypatch.setattr(Server, "release", lambda server: released.append(both.wait()))
    with FakeVLLM(tiny_config()) as other:
        engine_of(fake, other).close()
    assert sorted(released) == [0, 1]


@pytest.mark.parametrize("status", [401, 409, 500])
def test_a_server_that_is_not_ours_any_more_does_not_disturb_the_end(fake, status):
    engine = engine_of(fake)
    fake.disturb = lambda *call: status
    engine.close()


# --- our own server ---


class Starts:
    """A sidecar whose n-th start succeeds if `goes[n]`, and fails otherwise."""

    def __init__(self, fake: FakeVLLM, *goes: bool):
        self.fake, self.goes, self.count = fake, list(goes), 0
        self.stopped = False

    def start(self, timeout: float) -> Server:
        self.count += 1
        if not self.goes.pop(0):
            raise UserError("The vLLM sidecar ended with status 1 (no memory is free)")
        self.fake.disturb = lambda *call: None
        return Server(self.fake.url, timeout=timeout)

    def stop(self) -> None:
        self.stopped = True


def owner(fake: FakeVLLM, *goes: bool) -> VLLMEngine:
    engine = VLLMEngine(MODEL, max_len=32, transport="memory", sidecar=Starts(fake, *goes))
    fake.engines.append(engine)
    engine.load(MODEL, 0)
    return engine


def test_a_restart_that_fails_is_retried(fake):
    """The memory of the dead server may not be free at once."""
    engine = owner(fake, True, False, False, True)
    expected = content(engine.sample(PROMPTS, 2, PARAMS, step=0))
    fake.disturb = lambda *call: 500
    assert content(engine.sample(PROMPTS, 2, PARAMS, step=0)) == expected


def test_restarts_that_all_fail_lose_the_server_but_not_the_checkpoint(fake):
    engine = owner(fake, True, False, False, False)
    fake.disturb = lambda *call: 500
    with pytest.raises(ServerLost, match=r"No vLLM server is left \(.*no memory is free"):
        engine.sample(PROMPTS, 2, PARAMS, step=0)


def test_our_own_server_is_not_restarted_again_and_again_over_the_same_groups(fake):
    """Each restart of vLLM takes a minute, and a request that ended it once will do so again."""
    engine = owner(fake, True, True, True, True)
    answer = fake.answer

    def die(path, body):
        if path == "/inference/v1/generate":
            fake.disturb = lambda *call: 500  # until it is restarted
            return {"choices": []}
        return answer(path, body)

    fake.answer = die
    with pytest.raises(
        ServerLost, match=r"No vLLM server returns completions .* 0 of 2 completions"
    ):
        engine.sample(PROMPTS[:1], 2, PARAMS, step=0)
    assert engine.sidecar.count == 2


def test_no_server_is_started_after_the_end(fake):
    engine = owner(fake, True, True)
    engine._lose(engine.servers[0], ServerError("for the test"))
    # the run ends while a thread tries what is left of the server
    fake.disturb = lambda *call: engine.over.set() or 500
    with pytest.raises(ServerLost):
        engine.request(PROMPTS, 2, PARAMS, step=0)
    assert engine.sidecar.count == 1


def test_a_lost_server_of_our_own_is_ended_but_not_asked(fake):
    """It may hang."""
    engine = owner(fake, True)
    (server,) = engine.servers
    server.sidecar = engine.sidecar
    engine._lose(server, ServerError("for the test"))
    fake.requests.clear()
    engine.close()
    assert engine.sidecar.stopped
    assert fake.requests == []


def test_a_start_can_be_stopped_from_another_thread(tmp_path):
    slow = tmp_path / "slow"
    slow.write_text("#!/bin/sh\nexec sleep 600\n")
    slow.chmod(0o755)
    sidecar = Sidecar(tmp_path, [], str(slow), tmp_path / "serve.log")
    stopper = threading.Thread(
        target=lambda: (wait_until(lambda: sidecar.process), sidecar.stop(timeout=0.1))
    )
    stopper.start()
    begin = time.monotonic()
    with pytest.raises(UserError):
        sidecar.start(5.0)
    assert time.monotonic() - begin < 60  # `slow` would take ten minutes, and a start fifteen
    stopper.join()
    with pytest.raises(UserError, match="was not healthy within 0 s"):
        sidecar.start(5.0)
    assert sidecar.process is None


@pytest.mark.parametrize("option", [["--startup-timeout", "0.5"], ["--startup-timeout=0.5"]])
def test_a_start_waits_as_long_as_serve_py_is_told_to(tmp_path, option):
    slow = tmp_path / "slow"
    slow.write_text("#!/bin/sh\nexec sleep 600\n")
    slow.chmod(0o755)
    sidecar = Sidecar(tmp_path, ["--seed", "1", *option], str(slow), tmp_path / "serve.log")
    with pytest.raises(UserError, match=r"was not healthy within [01] s"):
        sidecar.start(5.0)


# --- connections ---


@contextlib.contextmanager
def unreachable():
    """Yield the port of a socket with a full queue, where clients wait and get no answer."""
    with socket.socket() as sock, contextlib.ExitStack() as stack:
        sock.bind(("127.0.0.1", 0))
        sock.listen(0)
        for n in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(sock.getsockname())
            if n == 0:
                select.select([], [waiting], [], 60)  # it is in the queue, which is full with one
        yield sock.getsockname()[1]


def test_connecting_has_a_time_limit_even_when_the_reply_has_none():
    with unreachable() as port:
        server = Server(f"http://127.0.0.1:{port}", timeout=0.3)
        server.alive = True
        begin = time.monotonic()
        with pytest.raises(
            ServerError, match=r"did not answer /inference/v1/generate within 0.3 s"
        ):
            server.generate({})
        assert time.monotonic() - begin < 60


def test_a_request_that_was_connecting_when_the_server_was_lost_is_not_sent(fake):
    server, connect = Server(fake.url), Server(fake.url).kind.connect

    class Slow(server.kind):
        def connect(self):
            connect(self)
            server.abort()  # in another thread, at this moment

    server.kind, server.alive = Slow, True
    with pytest.raises(ServerError, match="was lost before"):
        server.generate({})
    assert fake.requests == []


def test_no_request_for_completions_is_sent_to_a_lost_server(fake):
    """A thread may retry after the server was lost. If it hangs, the request would wait for a day,
    because heartbeats do not end the requests of lost servers.
    """
    with pytest.raises(ServerError, match="was lost before"):
        Server(fake.url).generate({})
    assert fake.requests == []


def test_a_server_that_cannot_be_reached_for_our_own_address_is_reported(monkeypatch):
    server = Server("http://127.0.0.1:9")
    monkeypatch.setattr(sync, "loopback", lambda host: False)
    with pytest.raises(ServerError, match="cannot be reached"):
        sync.own_address(server)


# --- several ranks ---


def late_to_load(url: str, secret: str) -> float:
    """Let a recovery hold rank 0's lock for longer than a collective may take."""
    dist.init_process_group("gloo")
    model = tiny_model()
    world = World(dist.get_rank(), 2, torch.device("cpu"))
    dist.barrier()  # from here on the ranks run in step
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=5))
    engine = VLLMEngine(
        model,
        max_len=32,
        servers=[url],
        secret=secret,
        transport="memory",
        timeout=60.0,  # the fake server may be slow on a busy machine
        world=world,
    )
    gather = engine.sync.gather
    engine.sync.gather = lambda m: (dist.barrier(), gather(m))  # as FSDP2 does
    if world.main:
        held = threading.Event()

        def recovery() -> None:
            with engine.lock:
                held.set()
                time.sleep(7)

        threading.Thread(target=recovery, daemon=True).start()
        held.wait()
    engine.load(model, 0)
    return engine.version


def test_the_other_ranks_wait_for_a_recovery_longer_than_for_a_collective(fake):
    assert run(2, late_to_load, fake.url, fake.secret) == [0, 0]


# --- full runs ---


@pytest.mark.parametrize("ahead", ["0", "1"])
def test_a_signal_ends_the_wait_for_a_server_and_the_run_saves(
    tiny_base, files, tmp_path, capsys, ahead
):
    """A scheduler waits for half a minute, but --server-patience is ten minutes. A second signal,
    or the scheduler's kill, would lose the checkpoint.
    """

    def disturb(method, path, body):
        if len(fake.generated()) <= 9 or path == "/nanogrpo":
            return None
        if not asked.is_set():
            signalled.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGTERM)
        return 500

    signalled = []
    with FakeVLLM(tiny_config(vocab_size=Tokenizer(tiny_base).vocab_size)) as fake:
        fake.disturb = disturb
        options = [
            "--engine",
            "vllm",
            "--server",
            fake.url,
            "--weight-transport",
            "memory",
            "--max-staleness",
            ahead,
        ]
        status = train.main(arguments(tiny_base, files, tmp_path, *options, "--max-steps", "5"))
    assert time.monotonic() - signalled[0] < 60
    # 0: the step in hand was finished
    assert "continue with --resume" in capsys.readouterr().err if status == 2 else ahead == "1"
    assert [p.name for p in checkpoint.checkpoints(tmp_path)] == [
        f"checkpoint-{len(steps(tmp_path))}"
    ]
