"""A process for the user's reward functions, which may hang or crash: then it is killed, and
another one started.

In: functions by name, which the process imports itself; then calls. Out: what they returned, or
`Lost` after the time limit or the end of the process. Whose fault that was, and what it costs, is
reward_runner.py's to find out: read it next.

    trainer ── RewardProcess.call ──(socket, pickled)──→ main() in the process: Functions.call → its answer, as JSON

The way back is JSON, which carries numbers and texts and no classes: nothing that the process sends
is run by the trainer. It is a program of its own and no fork: it has nothing of the trainer's, CUDA
and open connections above all. It starts once and stays; a call costs a tenth of a millisecond
beyond the function. When the trainer dies, however it does, so does the process.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import time
import weakref
from array import array
from collections.abc import Sequence
from typing import Any

from nanogrpo.distributed.parent import killed_with
from nanogrpo.errors import UserError
from nanogrpo.rewards.builtin import load_function
from nanogrpo.rewards.call import Functions, Returned

START = 300.0  # seconds for the process to import the functions: a file may load a model of its own
# seconds between two looks whether the process lives, for its children may keep the socket open
GLANCE = 0.5
SIZE = struct.Struct("!Q")  # before each message: its length in bytes


class Lost(Exception):
    """A call that will never be answered; says why: "gave no answer within 60 s"."""


# ---- in the trainer ------------------------------------------------------------------------------


class RewardProcess:
    """The functions that `specs` name, in a process of their own.

    >>> process = RewardProcess(["my_rewards.py:brevity"])
    >>> process.call([(0, "brevity")], {"completions": ["a", "bb"]}, ["sample 0", "sample 1"], limit=60.0).rewards
    """

    def __init__(self, specs: Sequence[str]):
        """UserError when a spec names no function, with what importing it raised."""
        self.specs = list(specs)
        self.starts = 0
        self.start()

    def start(self) -> None:
        """Starts the process and waits for its imports; UserError if they fail."""
        ours, theirs = socket.socketpair()
        program = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from nanogrpo.rewards.process import main; main()"
        argv = [
            sys.executable,
            "-c",
            program,
            json.dumps(sys.path),
            str(theirs.fileno()),
            str(os.getpid()),
        ]
        # In a session of its own: Ctrl-C in the terminal is the trainer's to hear, and its own
        # children can be killed with it.
        with theirs:
            process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], start_new_session=True
            )
        self.socket, self.process, self.starts = ours, process, self.starts + 1
        self.end = weakref.finalize(self, _end, process, ours)  # also when the interpreter ends
        try:
            self.names, self.awaited = self._ask(self.specs, START)
        except Lost as why:
            raise UserError(
                f"reward_funcs: the process that imports {', '.join(self.specs)} {why}; mend the import"
            ) from why

    def revive(self) -> None:
        """Starts another process if the last one has ended."""
        if not self.end.alive:
            self.start()

    def call(
        self,
        which: Sequence[tuple[int, str]],
        arguments: dict[str, Any],
        places: Sequence[str],
        limit: float,
    ) -> Returned:
        """As `Functions.call`, within `limit` seconds; beyond them, and when the process dies,
        Lost.
        """
        self.revive()
        # read faster than as pickled ints
        ids = [array("i", row).tobytes() for row in arguments.get("completion_ids", ())]
        return Returned(*self._ask((which, {**arguments, "completion_ids": ids}, places), limit))

    def _ask(self, message: Any, limit: float) -> Any:
        deadline = time.monotonic() + limit
        try:
            self.socket.settimeout(limit)
            data = pickle.dumps(message)
            self.socket.sendall(SIZE.pack(len(data)) + data)
            kind, answer = json.loads(
                self._receive(SIZE.unpack(self._receive(SIZE.size, deadline))[0], deadline)
            )
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGUSR1)  # it writes to stderr where it hangs
                time.sleep(0.05)
            self.end()
            raise Lost(f"gave no answer within {limit:.3g} s") from None
        except (ConnectionError, EOFError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(GLANCE)
            status = self.process.poll()
            self.end()
            how = "closed its connection" if status is None else f"exited with status {status}"
            raise Lost(
                f"was killed by {signal.Signals(-status).name}" if (status or 0) < 0 else how
            ) from None
        if kind == "error":
            raise UserError(answer)
        return answer

    def _receive(self, size: int, deadline: float) -> bytes:
        data = bytearray()
        while len(data) < size:
            left = deadline - time.monotonic()
            self.socket.settimeout(max(min(left, GLANCE), 1e-3))
            try:
                part = self.socket.recv(min(size - len(data), 1 << 20))
            except TimeoutError:
                if left <= 0:
                    raise
                part = b"" if self.process.poll() is not None else None
            if part == b"":
                raise EOFError
            data += part or b""
        return bytes(data)


def _end(process: subprocess.Popen, connection: socket.socket) -> None:
    connection.close()
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)  # with whatever it has started
    process.wait()


# ---- in the process ------------------------------------------------------------------------------


def main() -> None:
    """Imports the functions, then answers calls until the trainer is gone."""
    descriptor, parent = map(int, sys.argv[2:])
    killed_with(parent)
    faulthandler.enable()  # a segmentation fault tells where
    faulthandler.register(signal.SIGUSR1, all_threads=False)
    connection = socket.socket(fileno=descriptor)
    connection.set_inheritable(False)
    with contextlib.suppress(ConnectionError, EOFError):  # the trainer is gone
        try:
            functions = Functions([load_function(spec) for spec in _read(connection)])
        except UserError as error:
            _write(connection, ("error", str(error)))
            os._exit(0)
        _write(connection, ("done", (functions.names, functions.awaited)))
        me = os.getpid()
        while True:
            which, arguments, places = _read(connection)
            arguments["completion_ids"] = [
                memoryview(row).cast("i").tolist() for row in arguments["completion_ids"]
            ]
            try:
                answer = ("done", tuple(functions.call(which, arguments, places)))
            except UserError as error:
                answer = ("error", str(error))
            # a child that the user's code has forked and not ended: the answer is its parent's to
            # give
            if os.getpid() != me:
                os._exit(0)
            _write(connection, answer)
    os._exit(0)  # without waiting for the threads of the user's code


def _write(connection: socket.socket, message: Any) -> None:
    data = json.dumps(message).encode()
    connection.sendall(SIZE.pack(len(data)) + data)


def _read(connection: socket.socket) -> Any:
    (size,) = SIZE.unpack(_exactly(connection, SIZE.size))
    return pickle.loads(_exactly(connection, size))


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        if not (part := connection.recv(min(size - len(data), 1 << 20))):
            raise EOFError
        data += part
    return bytes(data)
