"""A process ends with the one that started it (distributed/parent.py). A reward process that hangs
in C code: tests/rewards/test_ends.py. vLLM's workers: tests/vllm/test_recovery.py.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from nanogrpo.distributed.parent import kill_workers, on_end
from tests.ranks import PATIENCE, ROOT
from tests.vllm.fake import wait_until
from tests.vllm.real import alive

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


GROUP = """
import subprocess, sys
from multiprocessing.resource_tracker import _resource_tracker
from multiprocessing.shared_memory import SharedMemory
memory = SharedMemory(create=True, size=64)
worker = subprocess.Popen(["sleep", "600"])
print(memory.name, _resource_tracker._pid, worker.pid, flush=True)
worker.wait()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("suspended", [False, True])
def test_killed_workers_leave_no_shared_memory(suspended):
    leader = subprocess.Popen(
        [sys.executable, "-c", GROUP], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    name, *pids = leader.stdout.readline().split()
    tracker, worker = map(int, pids)
    memory = Path("/dev/shm") / name
    assert memory.exists()
    if suspended:
        os.killpg(leader.pid, signal.SIGSTOP)
    kill_workers(leader.pid)
    wait_until(lambda: not alive(worker))
    assert leader.poll() is None
    assert alive(tracker)
    assert memory.exists()
    leader.kill()
    leader.communicate()
    wait_until(lambda: not memory.exists() and not alive(tracker))
