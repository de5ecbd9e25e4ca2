"""Run the user's reward functions in a process that can be killed when one hangs or crashes.

In: the names of functions, which the process itself imports; then calls. Out: the result of each
call, or `CallLost` if the time limit is exceeded or the process has died. Read next:
rewards/runner.py, which decides what happens after a lost call.

    trainer: RewardProcess.call ── pickle over a socket ──→ process: main → Functions.call
                                ←── one line of JSON ──────

Answers are JSON, which can only represent plain data, so the trainer never unpickles anything from
user code. The process is a new program, not a fork: it shares nothing with the trainer, in
particular no CUDA context and no open connections. It starts once and serves all calls; a call
costs about 0.1 ms more than the function itself. When the trainer ends for any reason, the process
ends too.

Reward functions may run code that the model has written, so the process does not get the variables
of the environment that usually hold secrets.
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import json
import math
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Sequence
from typing import Any

from nanogrpo.distributed.parent import killed_with
from nanogrpo.errors import UserError, text_of
from nanogrpo.rewards import plugin
from nanogrpo.rewards.call import MAX_REWARD, CallResult, Functions, packed

# Time limit in seconds for importing the functions. It is long because a user's file may load a
# model of its own.
IMPORT_TIMEOUT = 300.0
# Seconds between checks that the process is alive. The socket alone does not show that it has died,
# because children of the process may keep it open.
POLL = 0.5
# Maximum bytes of an answer: a reward function can write to the socket without end.
LONGEST = 1 << 27
# The names of environment variables that usually hold secrets, such as HF_TOKEN, NANOGRPO_SECRET
# and SSH_AUTH_SOCK (but not TOKENIZERS_PARALLELISM and GIT_AUTHOR_NAME).
PRIVATE = re.compile(
    "TOKEN(?!IZER)|SECRET|KEY|PASS|_PWD|_PAT(_|$)|COOKIE|CREDENTIAL|AUTH(?!OR(_|S|$))",
    re.IGNORECASE,
)
# Others hold an address with a user or a password, such as DATABASE_URL=postgres://me:word@host/.
WITH_USER = re.compile(r"://[^/\s@]+@")


NO_ANSWER = (
    "the process of the reward functions sent no answer but other data: a function must not write "
    "to open files that are not its own, or log more than 128 MiB"
)


class CallLost(Exception):
    """Raised if a call gets no answer. The message is the reason: "gave no answer within 60 s"."""


# --- in the trainer ---


class RewardProcess:
    """The functions named by `specs`, in a separate process.

    >>> process = RewardProcess(["my_rewards.py:brevity"])
    >>> process.call([(0, "brevity")], {"completions": ["a"], "completion_ids": [[5]]},
    ...              ["sample 0 of prompt 3"], timeout=60.0).rewards
    """

    def __init__(self, specs: Sequence[str], environment: str = "", passed: Sequence[str] = ()):
        # environment: the class of the objects in `environments`, which is imported as well
        # passed: environment variables that the process gets although their names are PRIVATE
        self.specs, self.environment = specs, environment
        self.variables = public_variables(passed)
        self.starts = 0
        self.start()

    def start(self) -> None:
        """Start the process and wait for its imports. Raises UserError if they fail."""
        self.socket, theirs = socket.socketpair()
        program = (
            "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
            "from nanogrpo.rewards.process import main; main(*map(int, sys.argv[2:]))"
        )
        options = [json.dumps(sys.path), str(theirs.fileno()), str(os.getpid())]
        # With a separate session, Ctrl-C in the terminal only reaches the trainer, and the process
        # can be killed together with its children.
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", program, *options],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=self.variables,
                start_new_session=True,
            )
        self.starts += 1
        self.calls = 0  # of this process; an answer begins with the number of its call
        # The finalizer also runs when the interpreter exits.
        self.kill = weakref.finalize(self, _kill, self.process, self.socket)
        try:
            self.names, self.is_async = self._ask((self.specs, self.environment), IMPORT_TIMEOUT)
        except CallLost as reason:
            raise UserError(
                f"--reward-funcs: the process that imports {', '.join(self.specs)} {reason}; "
                "fix the import"
            ) from reason

    def call(
        self,
        functions: Sequence[tuple[int, str]],
        arguments: dict[str, Any],
        labels: Sequence[str],
        timeout: float,
    ) -> CallResult:
        """Do what `Functions.call` does, within `timeout` seconds.

        If the time runs out or the process dies, kill what is left of it and raise CallLost.
        """
        if "environments" in arguments:
            arguments = arguments | {"environments": packed(arguments["environments"])}
        if not self.kill.alive:
            self.start()
        answer = self._ask((functions, arguments, labels), timeout)
        try:
            return read_result(answer, len(functions), len(labels))
        except (ValueError, TypeError, OverflowError) as e:
            raise UserError(NO_ANSWER) from e

    def _ask(self, message: Any, timeout: float) -> Any:
        deadline = time.monotonic() + timeout
        try:
            data = pickle.dumps(message)
        except Exception as e:  # a column of the data may hold any object
            raise UserError(
                "the data cannot be copied to the process of the reward functions "
                f"({type(e).__name__}: {text_of(e)}): use plain values, or --reward-timeout 0"
            ) from e
        try:
            self.socket.settimeout(timeout)
            self.socket.sendall(data)
            line = self._read_line(deadline)
        except TimeoutError:
            self.process.send_signal(signal.SIGUSR1)  # makes it write to stderr where it hangs
            time.sleep(0.05)
            self.kill()
            raise CallLost(f"gave no answer within {timeout:.3g} s") from None
        except (ConnectionError, EOFError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(POLL)
            status = self.process.poll()  # None if it still runs; `kill` would set it
            self.kill()
            if status is None:
                raise CallLost("closed its connection") from None
            killed = f"was killed by {signal.Signals(-status).name}" if status < 0 else ""
            raise CallLost(killed or f"exited with status {status}") from None
        try:
            number, kind, answer = json.loads(line)
        except (ValueError, TypeError, RecursionError) as e:
            raise UserError(NO_ANSWER) from e
        if number != self.calls:
            raise UserError(NO_ANSWER)
        self.calls += 1
        if kind == "error":
            raise UserError(answer)
        return answer

    def _read_line(self, deadline: float) -> bytearray:
        data = bytearray()
        while not data.endswith(b"\n"):
            left = deadline - time.monotonic()
            self.socket.settimeout(max(min(left, POLL), 1e-3))
            try:
                part = self.socket.recv(1 << 20)
            except TimeoutError:
                if left <= 0:
                    raise
                if self.process.poll() is None:
                    continue
                part = b""
            if not part:
                raise EOFError
            data += part
            if len(data) > LONGEST:
                raise UserError(NO_ANSWER)
        return data


def read_result(answer: Any, functions: int, samples: int) -> CallResult:
    """Return an answer, which a function may have forged, as the result of a call.

    Raises ValueError, TypeError or OverflowError if `Functions.call` cannot have returned it.
    """
    rewards, extra, metrics = answer
    values = [value for row in rewards for value in row if value is not None]
    right = [len(row) for row in rewards] == [samples] * functions
    right = right and all(type(v) is float and abs(v) <= MAX_REWARD for v in values)
    for name, column in extra:
        right = right and type(name) is str and type(column) is list and len(column) == samples
    for name, value in metrics:
        right = right and type(name) is str and math.isfinite(value)
    if not right:
        raise ValueError
    return CallResult(rewards, extra, metrics)


def public_variables(passed: Sequence[str] = ()) -> dict[str, str]:
    """Return the environment without secrets, except for the variables named by `passed`."""
    for name in passed:
        if name not in os.environ:
            raise UserError(
                f"--reward-env {name}: the environment has no such variable; export it first, or "
                "leave the option out"
            )
    return {
        name: value
        for name, value in os.environ.items()
        if name in passed or not (PRIVATE.search(name) or WITH_USER.search(value))
    }


def _kill(process: subprocess.Popen, connection: socket.socket) -> None:
    connection.close()
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)  # its children too
    process.wait()


# --- in the process ---


def main(descriptor: int, trainer: int) -> None:
    """Import the functions, then answer calls until the trainer has ended."""
    killed_with(trainer)  # a loop inside C code would not notice the closed socket
    faulthandler.enable()  # reports where a segmentation fault happened
    faulthandler.register(signal.SIGUSR1)  # of all threads, because async functions have their own
    signal.signal(signal.SIGINT, lambda *_: None)  # so only a function raises KeyboardInterrupt
    connection = socket.socket(fileno=descriptor)
    requests = connection.makefile("rb")
    me, numbers = os.getpid(), itertools.count()

    def send(kind: str, answer: Any) -> None:
        # If user code forked and the child returned here as well, only the parent may answer.
        if os.getpid() != me:
            os._exit(0)
        data = json.dumps(answer)  # which may fail, so the number is taken afterwards
        connection.sendall(f'[{next(numbers)}, "{kind}", {data}]\n'.encode())

    with contextlib.suppress(ConnectionError, EOFError):  # the trainer is gone
        try:
            specs, environment = pickle.load(requests)
            if environment:
                plugin.load(environment, "--environment-factory")
            functions = Functions([plugin.load_reward(spec) for spec in specs])
        except UserError as error:
            send("error", str(error))
            os._exit(0)
        send("done", (functions.names, functions.is_async))
        while True:
            request = pickle.load(requests)
            try:
                send("done", functions.call(*request))
            except UserError as error:
                send("error", str(error))
            except (ConnectionError, EOFError):
                raise
            except BaseException as error:  # for example, a number that is too long for JSON
                names = ", ".join(name for _, name in request[0])
                reason = f"{type(error).__name__}: {text_of(error)}"
                send("error", f"the reward function {names} failed ({reason}); fix the function")
    os._exit(0)  # without waiting for threads that the user's code has started
