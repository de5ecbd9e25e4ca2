"""A real vLLM, or its trainer, is killed or suspended at bad moments, and recovers or ends.

Each test checks that the samples equal those of an undisturbed run (same seeds, none lost, none
twice), and that the recovered server has the trainer's weights. Marked `vllm`: each recovery starts
vLLM, which takes about half a minute.
"""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from nanogrpo.model import checkpoint
from nanogrpo.vllm.client import VLLMEngine
from nanogrpo.vllm.server import Server, ServerError
from tests.conftest import refused
from tests.engine.rounding import agree
from tests.ranks import alive, until
from tests.vllm.real import (
    PROMPTS,
    ROOT,
    gap,
    params,
    processes,
    shared_memory,
    sidecar,
    train_a_little,
)

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
TIMEOUT = 10.0  # seconds within which a healthy server answers a heartbeat, even on a busy machine


@pytest.fixture(scope="module")
def trained(untied):
    """Return (model, engine). The engine owns a running sidecar and has sent it the model, which
    has moved away from its checkpoint, as version 1.
    """
    model, process = checkpoint.load_model(untied.folder), untied.process
    start = process.start
    process.start = lambda timeout, over: warm(Server(untied.server.url, process.secret, timeout))
    engine = VLLMEngine(model, max_len=256, sidecar=process, window=2, timeout=TIMEOUT)
    process.start = lambda *args: warm(start(*args))  # the next one is real
    train_a_little(model, seed=0)
    engine.load(model, 1)
    yield model, engine
    engine.close()


def warm(server: Server) -> Server:
    """Let vLLM answer once, before the engine sends heartbeats: it compiles the computation of
    log-probs for its first reply, which may take longer than the timeout of these tests.
    """
    wanted = {"max_tokens": 2, "n": 4, "logprobs": 0}
    body = {"token_ids": [1], "sampling_params": wanted}
    timeout, server.timeout = server.timeout, 120
    server.post("/inference/v1/generate", body)
    server.timeout = timeout
    return server


def content(samples):
    return [(s.prompt.id, s.index, s.token_ids, s.stopped) for s in samples]


def kill(engine: VLLMEngine, how: int = signal.SIGKILL) -> None:
    """Send a signal to the sidecar's HTTP process. SIGSTOP goes to its workers too, as if the
    machine hung.
    """
    pid = engine.sidecar.process.pid
    if how == signal.SIGKILL:
        os.kill(pid, how)
    else:
        os.killpg(pid, how)


def check(model, engine, before, expected) -> None:
    """Check that the engine has the same samples and weights as before, and one more restart."""
    samples = engine.sample(PROMPTS, 4, params(1.0), step=1)
    assert content(samples) == expected
    assert gap(model, samples, 1.0) <= 1e-5
    assert engine.restarts == before + 1


def test_a_start_that_fails_is_reported_with_its_cause(untied, tmp_path, monkeypatch):
    """Three processes fail one after the other, and only the first one knows why."""
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "9999")
    process = sidecar(untied.folder, tmp_path / "serve.log")
    with refused(r"ended with status 1 \(ValueError: Available memory on"):
        process.start(TIMEOUT, threading.Event())
    assert process.process.poll() is not None


def test_a_server_suspended_while_sampling_is_noticed_and_replaced(trained, monkeypatch):
    model, engine = trained
    expected, before = content(engine.sample(PROMPTS, 4, params(1.0), step=1)), engine.restarts
    start, started = engine.sidecar.start, []
    monkeypatch.setattr(
        engine.sidecar, "start", lambda *args: started.append(time.monotonic()) or start(*args)
    )
    memory = shared_memory(processes(engine.sidecar.process.pid))
    assert memory
    # its connections stay open, and the kernel continues to accept new ones
    kill(engine, signal.SIGSTOP)
    begin = time.monotonic()
    results = engine.sample(PROMPTS, 4, params(1.0), step=1)
    assert content(results) == expected
    # a heartbeat notices it, an attempt to use it again fails, and the machine may be busy
    assert started[0] - begin < 3 * TIMEOUT + 30
    until(lambda: not any(path.exists() for path in memory))
    check(model, engine, before, expected)


def test_a_server_killed_while_sampling_loses_no_group_and_leaves_no_worker(trained):
    model, engine = trained
    expected, before = content(engine.sample(PROMPTS * 4, 4, params(1.0), step=1)), engine.restarts
    results = []
    thread = threading.Thread(
        target=lambda: results.extend(engine.sample(PROMPTS * 4, 4, params(1.0), step=1))
    )
    thread.start()
    until(lambda: engine.servers[0].open)  # requests are under way
    pids = processes(engine.sidecar.process.pid)
    kill(engine)
    # vLLM alone would leave its workers behind
    until(lambda: not any(map(alive, pids[1:])), seconds=60.0)
    thread.join()
    assert content(results) == expected
    check(model, engine, before, expected[: len(PROMPTS) * 4])


def test_a_server_killed_in_the_middle_of_a_sync_gets_all_weights_again(trained):
    model, engine = trained
    train_a_little(model, seed=7)
    before, group = engine.restarts, engine.servers[0].group
    broadcast = group.broadcast

    def kill_first(bucket):
        kill(engine)
        broadcast(bucket)  # nobody receives it any more

    group.broadcast = kill_first
    engine.load(model, 2)
    assert engine.restarts == before + 1
    samples = engine.sample(PROMPTS, 4, params(0.7), step=2)
    assert {v for s in samples for v in s.versions} == {2}
    agree(model, samples, 0.7)  # the logits have grown, so a bound on the gap would be arbitrary


def test_a_trainer_killed_in_the_middle_of_a_sync(trained, tmp_path):
    """A server that it did not start stays paused with torn weights until the next trainer repairs
    it. A server that it started ends with it.
    """
    model, engine = trained
    script = tmp_path / "dies.py"
    script.write_text(DIES)
    (server,) = engine.servers
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script), engine.sidecar.model, server.url, engine.sidecar.secret]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=250)
    assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]
    assert server.get("/is_paused") == {"is_paused": True}
    restarts, pid = engine.restarts, engine.sidecar.process.pid
    engine._lose(server, ServerError("another trainer has used it"))
    # the weights are sent again
    samples = engine.sample(PROMPTS, 4, params(1.0), step=2)
    assert gap(model, samples, 1.0) <= 1e-5
    assert (engine.restarts, engine.sidecar.process.pid) == (restarts + 1, pid)


DIES = """
import os, signal, sys
from pathlib import Path
from nanogrpo.model import checkpoint
from nanogrpo.vllm.client import VLLMEngine

folder, url, secret = sys.argv[1:]
model = checkpoint.load_model(Path(folder))
engine = VLLMEngine(model, max_len=256, urls=[url], secret=secret)
engine.load(model, 0)
engine.servers[0].group.broadcast = lambda bucket: os.kill(os.getpid(), signal.SIGKILL)
engine.load(model, 1)
"""
