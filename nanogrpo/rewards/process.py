"""Run the user's reward functions in a process that can be killed if a function hangs.

In: the names of the functions to import, and then calls of these functions. Out: the answer to each
call, or the error `CallLost` if the call takes too long or the process dies. Read next:
rewards/scorer.py, which decides what happens after a lost call.

    trainer: RewardProcess.call ── pickle over a socket ──→ process: main → call.call
                                ←──────── JSON ───────────

Answers are JSON, which can represent only plain data. So the trainer never unpickles data from user
code. The process is a new program, not a fork: it shares nothing with the trainer, in particular no
CUDA context and no open connections. The process starts once and runs all calls. A call takes about
0.1 ms longer than the function itself. When the trainer ends for any reason, the process ends, too.
"""

import contextlib
import faulthandler
import os
import pickle
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Sequence
from json import dumps, loads  # the user's code may replace json.dumps
from multiprocessing.connection import Connection, Pipe
from typing import Any

from nanogrpo.distributed.parent import Console, signaled_with
from nanogrpo.errors import UserError
from nanogrpo.rewards.call import call, name_of, users_code
from nanogrpo.rewards.plugin import load_reward

# Time limit in seconds for importing the functions; a user's file may load a model.
IMPORT_TIMEOUT = 300
LONGEST = 1 << 27  # maximum bytes of an answer; user code could write to the connection


class CallLost(UserError):
    """Raised if a call gets no answer: "the reward function brevity gave no answer within 60 s"."""


# --- in the trainer ---


class RewardProcess:
    """The functions named by `specs`, in a separate process.

    >>> process = RewardProcess(["my_rewards.py:brevity"], timeout=60.0)
    >>> process.names
    {"my_rewards.py:brevity": "brevity"}
    >>> process.call("my_rewards.py:brevity", {"completions": ["a"], "completion_ids": [[5]]}, {})
    [[-0.5], [], []]
    """

    def __init__(self, specs: Sequence[str], timeout: float | None):
        self.specs, self.timeout = specs, timeout  # seconds for a call; None: no limit
        self.start()

    def start(self) -> None:
        """Start the process and wait for its imports. Raises UserError if they fail."""
        self.connection, theirs = Pipe()
        program = (
            f"import sys; sys.path[:] = {sys.path}; from nanogrpo.rewards.process import main; "
            f"main({theirs.fileno()}, {os.getpid()})"
        )
        # The process has its own session, so it does not receive Ctrl-C from the terminal.
        # This session also makes it possible to kill the process together with its children.
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", program],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        # The finalizer also runs when the interpreter exits.
        self.kill = weakref.finalize(self, _kill, self.process, self.connection)
        self.names = self._ask(
            f"--reward-funcs: the process that imports {', '.join(self.specs)}",
            self.specs,
            IMPORT_TIMEOUT,
        )

    def call(self, spec: str, arguments: dict, shared: dict) -> Any:
        """Return what `call.call` returns, within `timeout` seconds.

        If the time runs out or the process dies, kill the process and its children, and raise
        CallLost.
        """
        if self.process.poll() is not None:
            # Kill its children now. Later, another process may have its ID.
            self.kill()
            self.start()
        return self._ask(
            f"the reward function {self.names[spec]}", (spec, arguments, shared), self.timeout
        )

    def _ask(self, what: str, message: Any, timeout: float | None) -> Any:
        """Return the answer to a message. If the call is lost, the error message begins with
        `what`.
        """
        try:
            data = pickle.dumps(message)
        except Exception as e:  # a column of the data may hold any object
            raise UserError(_not_copied(e)) from e
        try:
            self.connection.send_bytes(data)
            if not self.connection.poll(timeout):
                self.process.send_signal(signal.SIGUSR1)  # makes the process print where it hangs
                time.sleep(0.05)
                self.kill()
                raise CallLost(f"{what} gave no answer within {timeout:.3g} s")
            answer = loads(self.connection.recv_bytes(LONGEST))
        except (EOFError, OSError, ValueError) as e:  # the process ended, or its answer is invalid
            self.kill()
            status = self.process.returncode
            killed = f"was killed by {signal.Signals(-status).name}" if status < 0 else ""
            raise CallLost(f"{what} {killed or f'exited with status {status}'}") from e
        if isinstance(answer, str):
            raise UserError(answer)
        return answer


def _kill(process: subprocess.Popen, connection: Connection) -> None:
    connection.close()
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)  # its children too
    process.wait()


def _not_copied(error: Exception) -> str:
    return (
        "the data cannot be copied to the process of the reward functions "
        f"({type(error).__name__}: {error}): use plain values, or --reward-timeout 0"
    )


# --- in the process ---


def main(descriptor: int, trainer: int) -> None:
    """Import the functions, then answer calls until the trainer has ended. The answer is a string
    only if it reports an error.
    """
    signaled_with(trainer)  # ends this process even if it hangs in C code
    sys.stdout, sys.stderr = Console(sys.stdout), Console(sys.stderr)
    faulthandler.enable()  # reports where a segmentation fault happened
    faulthandler.register(signal.SIGUSR1)  # traces of all threads
    connection = Connection(descriptor)
    functions: dict = {}
    answer: Any
    with contextlib.suppress(EOFError, ConnectionError):  # the trainer is gone
        while True:
            data = connection.recv_bytes()
            try:
                request = pickle.loads(data)
                if functions:
                    spec, arguments, shared = request
                    answer = call(functions[spec], arguments, shared)
                else:
                    with users_code():
                        functions = {spec: load_reward(spec) for spec in request}
                    answer = {spec: name_of(f) for spec, f in functions.items()}
            except UserError as error:
                answer = str(error)
            except Exception as error:  # for example, the class of a value cannot be imported
                answer = _not_copied(error)
            connection.send_bytes(dumps(answer).encode())
    os._exit(0)  # do not wait for threads of the user's code
