"""serve.py before it loads vLLM: options, secret, port and version; and the end of its processes.

Needs no vLLM. Read next: test_access.py.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

import serve
from nanogrpo.vllm.auth import SECRET
from nanogrpo.vllm.process import kill_group, on_end
from tests.conftest import refused
from tests.ranks import PATIENCE, ROOT, alive, until

LONG = "0123456789abcdef"


# --- options ---


def test_unknown_options_go_to_vllm():
    words = ["--dtype", "float32", "--enforce-eager", "--max-model-len=9", "-tp", "2"]
    ours, given = serve.options(["--model", "m", "--port", "1234", *words])
    assert ours.port == 1234
    assert given[: len(words)] == words


@pytest.mark.parametrize(
    "word",
    [
        *sorted(serve.FIXED),
        "--logprobs_mode=raw_logprobs",
        "--weight-transfer-config.backend",
        "--no-enable-scale-out",
    ],
)
def test_options_that_training_relies_on_cannot_be_changed(word):
    with refused("cannot be set: training or access control relies on it"):
        serve.options(["--model", "m", word, "x"])


@pytest.mark.parametrize("word", ["--api-key", "--api_key=x"])
def test_options_that_would_weaken_access_control_are_refused(word):
    with refused(r"^--api-key cannot be set: .* access control") as e:
        serve.options(["--model", "m", word, "a-secret"])
    assert "a-secret" not in str(e.value)


def test_no_other_spelling_changes_what_was_checked():
    """vLLM accepts abbreviations, and the last of several options counts."""
    words = ["--hos", "0.0.0.0", "--por=1", "--logprobs-m", "raw_logprobs"]
    _, given = serve.options(["--model", "m", *words])
    assert given[: len(words)] == words
    assert given[len(words) :][:6] == ["--model", "m", "--host", "127.0.0.1", "--port", "8000"]
    assert given[-len(serve.FIXED) * 2 + 2 :][:2] == ["--logprobs-mode", "processed_logprobs"]


def test_a_key_for_vllm_itself_is_ignored():
    """vLLM would require it for completions, where trainers send our secret."""
    with mock.patch.dict(os.environ, {"VLLM_API_KEY": "x"}):
        serve.set_environment()
        assert "VLLM_API_KEY" not in os.environ


# --- before the start ---


def test_a_missing_vllm_and_an_untested_version_are_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with refused(r"vLLM is not installed in .*; install vllm==0.32.0 there"):
        serve.check_vllm()
    vllm = types.ModuleType("vllm")
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    vllm.__version__ = "0.33.0"
    with refused(r"vLLM 0.33.0 is installed, but the sidecar was tested with 0.32.0; install that"):
        serve.check_vllm()
    vllm.__version__ = "0.32.0+cpu"
    serve.check_vllm()


@pytest.mark.parametrize("secret", ["", "short", "ünïcödé-ünïcödé-ünïcödé"])
def test_without_a_good_secret_no_server_starts(monkeypatch, secret):
    monkeypatch.setenv(SECRET, secret)
    with refused("at least 16 printable ASCII characters, and its trainers"):
        serve.check_secret()
    monkeypatch.setenv(SECRET, LONG)
    serve.check_secret()


def test_a_port_in_use_is_reported(capsys):
    with socket.create_server(("127.0.0.1", 0)) as running:
        port = running.getsockname()[1]
        assert serve.main(["--model", "m", "--port", str(port)]) == 2
    assert f"--port {port} on 127.0.0.1 cannot be used" in capsys.readouterr().err
    serve.check_port("127.0.0.1", port)


# --- the end ---


def test_the_end_of_a_process_is_noticed_even_if_it_was_before():
    process = subprocess.Popen(["sleep", "600"])
    later, before = threading.Event(), threading.Event()
    on_end(process.pid, later.set)
    process.kill()
    assert later.wait(PATIENCE)
    process.wait()
    on_end(process.pid, before.set)
    assert before.is_set()


GROUP = """
import os, subprocess, sys, time
from nanogrpo.vllm.process import kill_group
from multiprocessing.resource_tracker import _resource_tracker
from multiprocessing.shared_memory import SharedMemory
memory = SharedMemory(create=True, size=64)
worker = subprocess.Popen(["sleep", "600"])
print(memory.name, _resource_tracker._pid, worker.pid, flush=True)
sys.stdin.readline()
kill_group(os.getpid())
"""


@contextlib.contextmanager
def group() -> Iterator[tuple[subprocess.Popen, Path, int, int]]:
    """Run a process with a worker and shared memory. Yield it, the segment, and the ids of its
    resource tracker and worker.
    """
    leader = subprocess.Popen(
        [sys.executable, "-c", GROUP],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        start_new_session=True,
    )
    try:
        name, *pids = leader.stdout.readline().split()
        yield leader, Path("/dev/shm") / name, *map(int, pids)
        leader.kill()
        leader.communicate()
    except BaseException:
        os.killpg(leader.pid, signal.SIGKILL)
        raise


@pytest.mark.parametrize("how", ["running", "suspended", "by itself"])
def test_killed_workers_leave_no_shared_memory(how):
    with group() as (leader, memory, tracker, worker):
        if how == "by itself":
            leader.stdin.write("\n")
            leader.stdin.flush()
            assert leader.wait(PATIENCE) == -signal.SIGKILL
        else:
            if how == "suspended":
                os.killpg(leader.pid, signal.SIGSTOP)
            kill_group(leader.pid)
        until(lambda: not alive(worker))
    until(lambda: not memory.exists() and not alive(tracker))
