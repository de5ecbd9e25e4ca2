"""A process ends with the one that started it (distributed/parent.py). A reward process that hangs
in C code: tests/rewards/test_ends.py. vLLM's workers: tests/vllm/test_recovery.py.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from nanogrpo.distributed.parent import kill_workers, on_end
from tests.ranks import PATIENCE, ROOT, alive, until

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
import subprocess, sys, time
from multiprocessing.resource_tracker import _resource_tracker
from multiprocessing.shared_memory import SharedMemory
memory = SharedMemory(create=True, size=64)
worker = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE)
worker.stdout.readline()
print(memory.name, _resource_tracker._pid, worker.pid, flush=True)
time.sleep(600)
"""
WAITS = "import time; print(flush=True); time.sleep(600)"
# only its main thread has ended, but it looks like a zombie
HALF = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(600,)).start()
print(flush=True)
ctypes.CDLL(None).pthread_exit(None)
"""
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@contextlib.contextmanager
def group(worker: str) -> Iterator[tuple[subprocess.Popen, Path, int, int]]:
    """Run a process with a worker and shared memory. Yield it, the segment, and the ids of its
    resource tracker and worker.
    """
    command = [sys.executable, "-c", GROUP, worker]
    leader = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        name, *pids = leader.stdout.readline().split()
        yield leader, Path("/dev/shm") / name, *map(int, pids)
        leader.kill()
        leader.communicate()
    except BaseException:
        os.killpg(leader.pid, signal.SIGKILL)
        raise


def threads(pid: int) -> int:
    """Return the number of threads of a process."""
    return len(os.listdir(f"/proc/{pid}/task")) if Path(f"/proc/{pid}").exists() else 0


@linux
@pytest.mark.parametrize("worker", [WAITS, HALF])
@pytest.mark.parametrize("suspended", [False, True])
def test_killed_workers_leave_no_shared_memory(worker, suspended):
    with group(worker) as (leader, memory, tracker, pid):
        until(lambda: alive(pid) == (worker is WAITS))
        assert threads(pid) == (2 if worker is HALF else 1)
        if suspended:
            os.killpg(leader.pid, signal.SIGSTOP)
        kill_workers(leader.pid)
        until(lambda: threads(pid) <= 1 and not alive(pid))
        assert leader.poll() is None
        assert alive(tracker)
        assert memory.exists()
    until(lambda: not memory.exists() and not alive(tracker))


@linux
def test_if_processes_cannot_be_listed_the_whole_group_is_killed(monkeypatch):
    def full(path):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with group(WAITS) as (leader, memory, tracker, pid):
        monkeypatch.setattr(os, "listdir", full)
        kill_workers(leader.pid)
        monkeypatch.undo()
        until(lambda: not alive(pid) and not alive(tracker))
        assert leader.wait(PATIENCE) == -signal.SIGKILL
    memory.unlink(missing_ok=True)
