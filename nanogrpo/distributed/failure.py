"""How a run ends: by itself, because somebody asks, or because a process fails; together, and never
in a hang.

    by itself    every rank leaves after the same step (world.join: the order in which all is taken down)
    asked to     SIGTERM or Ctrl-C at any rank: `Stop` remembers it, the ranks agree at the end of the step, save, and leave
    by failure   a rank writes "failed" into the store that all ranks share; the others see it within a second, complete the save
                 that is under way, and leave too. The first to write speaks, the others are silent: what they would say is only
                 that a neighbour is gone.
    by silence   a rank that is killed or stopped, or whose machine is gone, writes nothing: the rank before it in the ring misses
                 its beat, and fails in its place

In: the store; signals. Out: exit statuses: 0 done or stopped as asked, 2 a mistake of the user's, 1
a bug or somebody else's failure, 128 + n a second signal. Read before: world.py. Read next:
state.py (the save that is completed).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable

import torch.distributed as dist

from nanogrpo.errors import UserError

log = logging.getLogger("nanogrpo")

LOST = "see what ended it, and continue with --resume."
GONE = (dist.DistError, RuntimeError)  # what a store raises whose process is no more


class Watch:
    """Ends this process when another one fails or falls silent, and the others when this one fails.
    Two threads:

        talk    twice a second: counts this rank's beat in the store up, reads the next rank's, and whether anybody has failed
        look    never waits for anybody: what `talk` hears must change within `patience` seconds

    Threads, because the main one may be inside a collective, waiting for the very rank that is
    gone: gloo notices a closed connection, NCCL across machines does not before --ddp-timeout. Two,
    because `talk` may wait for a store whose process is stopped. Each rank listens to the next one
    only: who is dead has a neighbour, and the load on the store grows with the ranks and not with
    their pairs.

    No clocks of two machines are compared. Even this one's is not: silence is how often `look` has
    looked in vain, so that a rank which was itself stopped for an hour accuses nobody when it goes
    on. A beat needs Python's lock, which torch, safetensors and NCCL give back while they work. One
    C call of the user's that takes more than `patience` seconds (a regular expression that
    explodes) does not, and its rank counts as dead: in a rollout function, or in a reward under
    --reward-timeout 0 (others have a process of their own). Then --heartbeat-timeout must be longer
    than that call.
    """

    pause = 0.5  # seconds between two beats, and between two looks
    # seconds that the rank which holds the store stays for the others to read there who speaks
    grace = 2.0

    def __init__(self, store: dist.Store, rank: int, size: int, patience: float):
        self.store, self.rank, self.size, self.patience = store, rank, size, patience
        self.next = (rank + 1) % size
        # by `talk`: the next rank's beats; what ended another; what is missing
        self.heard, self.told, self.lost = -1, b"", ""
        self.over, self.failing = threading.Event(), threading.Lock()
        self.threads = [
            threading.Thread(target=work, name="watch", daemon=True)
            for work in (self._talk, self._look)
        ]
        for thread in self.threads:
            thread.start()

    def stop(self) -> None:
        self.over.set()
        for thread in self.threads:
            thread.join(self.patience)

    def _talk(self) -> None:
        while not self.over.wait(self.pause):
            try:
                self.store.add(f"beat {self.rank}", 1)
                self.heard = self.store.add(f"beat {self.next}", 0)
                self.told = self.store.get("failed") if self.store.check(["failed"]) else b""
            except GONE:
                self.lost = "the process that holds the store (rank 0, or torchrun) is gone"
                return

    def _look(self) -> None:
        before, silence = self.heard, 0.0
        while not self.over.wait(self.pause):
            silence = 0.0 if self.heard != before else silence + self.pause
            before = self.heard
            if silence >= self.patience:
                self.lost = f"rank {self.next}, or the store, gives no sign of life for {self.patience:g} s (--heartbeat-timeout)"
            if (self.told or self.lost) and self.failing.acquire(blocking=False):
                told = self.told or self._tell(f"{self.lost}: {LOST}")
                self._leave(1, told)

    def end_all(self, error: BaseException) -> None:
        """Tells what happened, unless another rank has told before, and leaves without waiting for
        any of them.
        """
        # never released: `look` must not leave before this thread has spoken
        self.failing.acquire()
        known, sentence = isinstance(error, (UserError, FloatingPointError)), str(error)
        lost = isinstance(error, dist.DistError) or "gloo" in sentence
        if lost and not known:
            # No exception type tells a lost neighbour from a bug in a collective; the reason names
            # the address.
            reason = first_sentence(error)
            sentence = f"rank {self.rank} has lost another process ({reason}): {LOST}"
        elif not known:
            sentence = f"rank {self.rank} failed: {type(error).__name__}: {error}"
        told = self._tell(sentence, None if known or lost else error)
        self._leave(2 if known else 1, told)

    def _tell(self, sentence: str, bug: BaseException | None = None) -> bytes:
        """Says why the run ends, unless another rank has; returns what the first one said."""
        mine = f"{self.rank} error: {sentence}".encode()  # with the rank: two may fail of the same
        told = [mine]  # if the store is gone or does not answer, then nobody else can tell

        def ask() -> None:
            with contextlib.suppress(*GONE):
                told[0] = self.store.compare_set("failed", "", mine)

        within(self.patience / 2, ask)
        if told[0] == mine:
            if bug is not None:
                traceback.print_exception(bug)
            print(f"error: {sentence}", file=sys.stderr)
        return told[0]

    def _leave(self, status: int, told: bytes) -> None:
        """Without torchrun, the store lives in rank 0: it stays until the others have read there
        who speaks, or are dead.
        """
        # after the word is out: the others are told meanwhile, and complete their parts
        finish_saves(LOST.encode() in told)
        _tell_torchrun(told.decode().partition(" ")[2])

        def wait_for_the_others() -> None:
            with contextlib.suppress(*GONE):
                self.store.add("left", 1)
                ours = self.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
                while ours and self.store.add("left", 0) < self.size:
                    time.sleep(0.05)

        within(self.grace, wait_for_the_others)
        leave(status)


def first_sentence(error: BaseException) -> str:
    """Of a message from C++, which goes on with advice and a stack, and begins with the place in
    its source.
    """
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return re.sub(r"^\[\S+:\d+\] ", "", lines[0]).split(". ")[0].rstrip(".")


def _tell_torchrun(sentence: str) -> None:
    """torchrun closes with a report on who failed first. Its line `traceback :` shows what this
    file holds.
    """
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        with contextlib.suppress(OSError), open(path, "w") as f:
            json.dump({"message": sentence, "timestamp": str(int(time.time()))}, f)


def leave(status: int) -> None:
    """Ends the process now. An ordinary exit would take down the process group, which waits for
    ranks that are gone.
    """
    try:
        for stream in (sys.stdout, sys.stderr):
            # a closed pipe, or a flush that a signal interrupted
            with contextlib.suppress(OSError, RuntimeError, ValueError):
                stream.flush()
    finally:
        os._exit(status)


def within(seconds: float, work: Callable[[], None]) -> None:
    """Does `work` in a thread, which is left behind if it takes longer."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)


# waits for saves that are not to be cut short: state.Saver puts itself here
unfinished: list[Callable[[], None]] = []


def finish_saves(lost: bool = False) -> None:
    """Waits for what is unfinished: as long as a large model takes, or a minute where a rank is
    lost, whose part never comes.
    """
    seconds = 60.0 if lost else 600.0
    while unfinished:
        within(seconds, unfinished.pop())


# --- asked to stop --------------------------------------------------------------------------------

# by a signal, during the run that is under way: who waits for a server gives up, so that it is
# saved
asked = threading.Event()


class Stop:
    """Whether somebody has asked for the end: `with Stop() as stop: … if stop.asked: …`. A second
    signal ends at once.

    Signals that arrive within a second are one: a scheduler tells every process, and torchrun
    passes on what it is told.
    """

    signals = (signal.SIGTERM, signal.SIGINT)

    def __init__(self):
        self.first: float | None = None

    @property
    def asked(self) -> bool:
        return self.first is not None

    def __enter__(self) -> Stop:
        self.before = {number: signal.signal(number, self._handle) for number in self.signals}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)
        asked.clear()

    def _handle(self, number: int, _frame: object) -> None:
        if self.first is None:
            self.first = time.monotonic()
            asked.set()
            name = signal.Signals(number).name
            log.warning(
                "%s: this step is finished and saved, then the run ends; once more ends it at once.",
                name,
            )
        elif time.monotonic() - self.first > 1.0:
            leave(128 + number)
