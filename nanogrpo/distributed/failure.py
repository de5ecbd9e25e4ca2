"""End all ranks of a run together, without ever hanging.

    normally     every rank exits after the same step (world.join defines the order of teardown)
    on request   SIGTERM or Ctrl-C at any rank: `Stop` records it; at the end of the step the ranks
                 agree to stop, save and exit
    on failure   the failing rank writes its error to the store that all ranks share. The others
                 read it within a second, complete the save in progress, and exit. Only the first
                 failing rank prints its error; the others would only report a lost peer.
    on silence   a rank that was killed or suspended, or whose machine is down, writes nothing. The
                 previous rank in the ring no longer receives its heartbeat and fails in its place.

In: the store and signals. Out: exit statuses. 0: done, or stopped on request; 2: a user's mistake;
1: a bug, or a failure of another rank; 128 + n: a second signal. Read before: world.py. Read next:
run/state.py (the save that is completed).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable

import torch.distributed as dist

from nanogrpo.errors import UserError, first_sentence

log = logging.getLogger("nanogrpo")

LOST = "find out what ended it, then continue with --resume."


class Watch:
    """End this process when another rank fails or goes silent, and the others when this one fails.

    Two threads share the work. The main thread cannot do it because it may be inside a collective,
    waiting for the lost rank: gloo notices a closed connection, but NCCL across machines does not
    before --ddp-timeout.

        exchange   twice a second, send a heartbeat to the store, and read the next rank's heartbeat
                   and any failure. It may block if the store's process is suspended.
        poll       fail when nothing `exchange` reads has changed for `timeout` seconds. It never
                   blocks.

    Each rank watches only the next one, so the load on the store grows linearly with the number of
    ranks, not quadratically. We count missed polls rather than wall-clock time, so a rank that was
    itself suspended does not declare its peers dead when it resumes.

    Sending a heartbeat requires Python's global lock (the GIL), which torch, safetensors and NCCL
    release while they work. A single C call that keeps it for more than `timeout` seconds, such as
    a regular expression with exponential backtracking, makes its rank look dead. Only a rollout
    function, or a reward with --reward-timeout 0, can do that; in that case, increase
    --heartbeat-timeout.
    """

    interval = 0.5  # seconds between heartbeats, and between polls
    grace = 2.0  # seconds rank 0 keeps the store alive so its peers can read the error

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: float):
        self.store, self.rank, self.size, self.timeout = store, rank, size, timeout
        self.next = (rank + 1) % size
        # set by `exchange`: the next rank's heartbeat, the first failure, a lost connection
        self.heartbeat, self.failure, self.lost = -1, b"", ""
        self.stopped, self.ending = threading.Event(), threading.Lock()
        self.threads = [
            threading.Thread(target=work, name="watch", daemon=True)
            for work in (self._exchange, self._poll)
        ]
        for thread in self.threads:
            thread.start()
        watches.append(self)

    def stop(self) -> None:
        watches.remove(self)
        self.stopped.set()
        for thread in self.threads:
            thread.join(self.timeout)

    def _exchange(self) -> None:
        while not self.stopped.wait(self.interval):
            try:
                self.store.add(f"heartbeat {self.rank}", 1)
                self.heartbeat = self.store.add(f"heartbeat {self.next}", 0)
                self.failure = self.store.get("failed") if self.store.check(["failed"]) else b""
            except RuntimeError:
                self.lost = "the process that holds the store (rank 0, or torchrun) is gone"
                return

    def _poll(self) -> None:
        last, silence = self.heartbeat, 0.0
        while not self.stopped.wait(self.interval):
            silence = 0.0 if self.heartbeat != last else silence + self.interval
            last = self.heartbeat
            if silence >= self.timeout:
                self.lost = (
                    f"no heartbeat from rank {self.next} or the store for {self.timeout:g} s "
                    "(--heartbeat-timeout)"
                )
            if (self.failure or self.lost) and self.ending.acquire(blocking=False):
                self._leave(1, self.failure or self._report(f"{self.lost}: {LOST}"))

    def end_all(self, error: BaseException) -> None:
        """Report the error, unless another rank failed first, and exit without waiting."""
        self.ending.acquire()  # never released: `poll` must not exit before this thread reports
        message, status, bug = str(error), 1, None
        if isinstance(error, (UserError, FloatingPointError)):
            status = 2
        elif isinstance(error, dist.DistError) or "gloo" in message:
            # no exception type distinguishes a lost peer from a bug in a collective
            message = (
                f"rank {self.rank} lost its connection to another process "
                f"({first_sentence(error)}): {LOST}"
            )
        else:
            message, bug = f"rank {self.rank} failed: {type(error).__name__}: {error}", error
        self._leave(status, self._report(message, bug))

    def _report(self, message: str, bug: BaseException | None = None) -> bytes:
        """Print why the run ends if this rank is the first to fail; return the first report."""
        mine = f"{self.rank} error: {message}"  # two ranks may send the same message
        first = [mine.encode()]  # if the store does not answer, no other rank can report

        def write() -> None:
            with contextlib.suppress(RuntimeError):
                first[0] = self.store.compare_set("failed", "", mine)

        run_with_timeout(self.timeout / 2, write)
        if first[0] == mine.encode():
            if bug is not None:
                traceback.print_exception(bug)
            write_error(message)
        return first[0]

    def _leave(self, status: int, report: bytes) -> None:
        """Complete the save in progress, pass the report to torchrun, and exit.

        Without torchrun the store lives in rank 0, which waits until the others have exited or are
        presumed dead.
        """
        # the others can read the report by now, so they complete their parts of the save too
        finish_saves(LOST.encode() in report)
        if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
            # torchrun prints the content of this file as `traceback` in its closing report
            message = {
                "message": report.decode().partition(" ")[2],
                "timestamp": str(int(time.time())),
            }
            with contextlib.suppress(OSError), open(path, "w") as f:
                json.dump(message, f)

        def wait_for_the_others() -> None:
            with contextlib.suppress(RuntimeError):
                self.store.add("left", 1)
                ours = self.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
                while ours and self.store.add("left", 0) < self.size:
                    time.sleep(0.05)

        run_with_timeout(self.grace, wait_for_the_others)
        leave(status)


# the watch of this process, if the run has several ranks
watches: list[Watch] = []


def end_with(error: UserError) -> None:
    """End this process, and with it all ranks, where raising the error would not end anything."""
    if watches:
        watches[0].end_all(error)  # does not return
    try:
        write_error(str(error))
        finish_saves()
    finally:
        leave(2)


def write_error(message: str) -> None:
    """Write to stderr, even if a signal has interrupted a `print`, where `print` would fail."""
    with contextlib.suppress(OSError):  # a closed pipe
        os.write(2, f"error: {message}\n".encode(errors="backslashreplace"))


def leave(status: int) -> None:
    """Exit immediately. An ordinary exit would destroy the process group, which waits for ranks
    that have already ended.
    """
    try:
        for stream in (sys.stdout, sys.stderr):
            # a closed pipe, or a flush that a signal interrupted
            with contextlib.suppress(OSError, RuntimeError, ValueError):
                stream.flush()
    finally:
        os._exit(status)


def run_with_timeout(seconds: float, work: Callable[[], None]) -> None:
    """Run `work` in a thread and abandon it if it takes longer."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)


# functions that wait for a save in progress; state.Saver adds its own
unfinished: list[Callable[[], None]] = []


def finish_saves(rank_lost: bool = False) -> None:
    """Wait for saves in progress: long enough for a large model, or one minute if a rank is lost,
    because its part will never arrive.
    """
    while unfinished:
        run_with_timeout(60.0 if rank_lost else 600.0, unfinished.pop())


# --- stop on request ---

# Set by the first signal. Code that waits for a server then gives up, so the run can save.
asked = threading.Event()


class Stop:
    """Record whether a signal asked the run to stop: `with Stop() as stop: … if stop.asked: …`.

    A second signal exits immediately. Signals within one second count as one, because schedulers
    signal every process, and torchrun forwards the signals it receives.
    """

    signals = (signal.SIGTERM, signal.SIGINT)

    @property
    def asked(self) -> bool:
        return asked.is_set()

    def __enter__(self) -> Stop:
        # Python allows signal handlers in the main thread only; elsewhere nothing asks for a stop.
        main = threading.current_thread() is threading.main_thread()
        signals = self.signals if main else ()
        self.before = {number: signal.signal(number, self._handle) for number in signals}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)
        asked.clear()

    def _handle(self, number: int, _frame: object) -> None:
        if not asked.is_set():
            self.first = time.monotonic()
            asked.set()
            log.warning(
                "%s: finishing and saving this step, then the run ends; send it again to exit "
                "at once.",
                signal.Signals(number).name,
            )
        elif time.monotonic() - self.first > 1.0:
            leave(128 + number)
