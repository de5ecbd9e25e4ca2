"""A process ends with the one that started it (distributed/parent.py). A reward process that hangs
in C code: tests/rewards/test_ends.py. vLLM's workers: tests/vllm/test_recovery.py.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest

from nanogrpo.distributed.parent import on_end
from tests.ranks import PATIENCE, ROOT

OWNER = """
import os, subprocess, sys, time
watch = "import os, sys, time; from nanogrpo.distributed.parent import on_end; "
watch += f"on_end({os.getpid()}, lambda: os._exit(0), sys.stdin.fileno()); time.sleep(600)"
watcher = subprocess.Popen([sys.executable, "-c", watch], stdin=subprocess.PIPE)
child = os.fork()
if child:
    print(watcher.pid, child, flush=True)
time.sleep(600)
"""


def test_the_end_is_seen_although_a_child_of_the_process_holds_the_pipe():
    """A user's rollout may fork: the child inherits the writing end and keeps the pipe open."""
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, env=env)
    watcher, child = map(int, owner.stdout.readline().split())
    try:
        owner.kill()
        owner.wait()
        gone = threading.Event()
        on_end(watcher, gone.set)
        assert gone.wait(PATIENCE)
        os.kill(child, 0)  # it is alive
    finally:
        os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("error", [PermissionError(1, "forbidden"), AttributeError("pidfd_open")])
def test_the_pipe_is_enough_where_no_process_can_be_watched(monkeypatch, error):
    def refuse(pid):
        raise error

    monkeypatch.setattr(os, "pidfd_open", refuse, raising=False)
    reading, writing = os.pipe()
    ended = threading.Event()
    on_end(os.getppid(), ended.set, reading)
    os.write(writing, b"not the end")
    assert not ended.wait(0.05)
    os.close(writing)
    assert ended.wait(PATIENCE)
    os.close(reading)


def test_a_process_that_has_already_ended_is_noticed():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    ended = threading.Event()
    on_end(process.pid, ended.set)
    assert ended.wait(PATIENCE)
