"""The trainer's view of one vLLM sidecar: an HTTP client with the server's state (`Server`), and
the server process if we start it ourselves (`Sidecar`).

In: a URL and a secret. Out: `get` and `post`, which raise two kinds of errors. A `ServerError` (no
answer in time, a lost connection, a status 5xx) may be solved by another attempt or another server.
A UserError (a wrong address, secret or model) must be solved by the user. HTTP requests use the
standard library, with a new connection for each request, so a retry never uses a stale connection.
Read before: engine/base.py. Read next: cause.py, sync.py, client.py.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import os
import re
import reprlib
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import nanogrpo
from nanogrpo.commands import script
from nanogrpo.distributed.failure import asked
from nanogrpo.distributed.parent import kill_workers
from nanogrpo.errors import UserError
from nanogrpo.vllm import secret as stored
from nanogrpo.vllm.auth import (
    CONNECT,
    DISCONNECT,
    GENERATE,
    HEALTH,
    INFO,
    LEASE,
    SECRET,
    TRAINER,
    loopback,
)
from nanogrpo.vllm.buckets import BroadcastGroup
from nanogrpo.vllm.cause import DEATH, root_cause

log = logging.getLogger(__name__)

RENEW = LEASE / 4  # seconds between two requests that renew the lease of a server
DAY = 86400.0  # seconds: the timeout of a request for completions, which may take a long time
# Maximum bytes of an answer: of any, and more for each requested token (vLLM sends about 100).
ANSWER, ANSWER_TOKEN = 4 << 20, 1 << 10
# Shows values from a server in messages: JSON may be long, or too deep for `repr`.
shown = reprlib.Repr()
shown.maxdict, shown.maxstring, shown.maxother = 16, 300, 300


class ServerError(Exception):
    """A server has died, hangs or reports an error. `status` is 0 if there was no answer.

    final: the server is a process of our own that has ended, so no retry can succeed.
    """

    def __init__(self, message: str, status: int = 0, final: bool = False):
        super().__init__(message)
        self.status, self.final = status, final


class ServerLost(UserError):
    """No server is left after all retries. The loop saves a checkpoint and stops."""


class Server:
    """An HTTP client of one server, and what is known about it. Its requests are thread-safe.

    secret: ""; the one that serve.py has stored, if it runs on this machine and by this user.
    lease: reserve the server for this trainer, with regular requests until the event is set.
    sidecar: the process, if it is our own.
    """

    def __init__(
        self,
        url: str,
        secret: str = "",
        timeout: float = 60.0,
        lease: threading.Event | None = None,
        sidecar: Sidecar | None = None,
    ):
        form = r"(?:(https?)://)?([\w-]{1,63}(?:\.[\w-]{1,63})*|\[[\w:.%]+\]):(\d{1,5})/?"
        parts = re.fullmatch(form, url, re.ASCII)
        if parts is None or not 0 < int(parts[3]) < 65536:
            raise UserError(f"--server {url} is not an address; write it as http://127.0.0.1:8000.")
        scheme, self.host, self.port = parts[1] or "http", parts[2].strip("[]"), int(parts[3])
        self.secret = secret
        self.url = f"{scheme}://{parts[2]}:{self.port}"
        self.kind: type[http.client.HTTPConnection] = (
            http.client.HTTPSConnection if scheme == "https" else http.client.HTTPConnection
        )
        self.timeout = timeout  # seconds for every request except sampling
        self.sidecar = sidecar
        self.headers = {"Content-Type": "application/json"}
        self.authorize()
        # State, set by client.py and sync.py:
        self.alive = False  # it is connected, has the current weights, and receives requests
        self.asleep = False  # the same, but without its weights, until they are sent again
        self.version = -1  # the version of the last weights it received
        self.error: Exception | None = None  # why the last heartbeat failed, or it was lost
        self.reported = False  # whether the outage has already been logged
        self.taken = False  # it may still be reserved for this trainer, so it must be released
        self.complete = False  # it has received all weights since it was connected
        # the connection for weights, if they are broadcast
        self.group: BroadcastGroup | None = None
        self.open: set[http.client.HTTPConnection] = set()
        self.lock = threading.Lock()
        self.over = lease or threading.Event()  # set at the end of the run
        if lease is not None:
            self.headers[TRAINER] = secrets.token_hex(8)
            threading.Thread(target=self._renew, args=(lease,), daemon=True).start()

    def __repr__(self) -> str:
        return self.url

    def authorize(self) -> None:
        """Put the secret into the headers: the one given, or the one that serve.py has stored."""
        secret = self.secret
        if not secret and loopback(self.host):
            secret = stored.find(self.port)
        if not secret.isascii() or not secret.isprintable():
            raise UserError(
                f"{SECRET} must be printable ASCII characters; use the secret that serve.py was "
                "started with."
            )
        if secret:
            self.headers["Authorization"] = f"Bearer {secret}"

    def get(self, path: str, timeout: float | None = None) -> dict:
        return self._request("GET", path, None, timeout or self.timeout)

    def post(self, path: str, body: dict | None = None, timeout: float | None = None) -> dict:
        return self._request("POST", path, body or {}, timeout or self.timeout)

    def generate(self, body: dict) -> dict:
        """Request completions. This may take a long time, but ends early if the server is lost."""
        params = body.get("sampling_params", {})
        tokens = params.get("n", 1) * params.get("max_tokens", 0)
        most = ANSWER + ANSWER_TOKEN * tokens
        return self._request("POST", GENERATE, body, DAY, most, only_if_alive=True)

    def release(self) -> None:
        """Disconnect from the server, which is then free for other trainers.

        `abort` does not end this request, because other threads may still report the loss of the
        server.
        """
        self._request("POST", DISCONNECT, {}, min(self.timeout, 5.0), abortable=False)
        self.taken = False

    def _request(
        self,
        method: str,
        path: str,
        body: Any,
        timeout: float,
        most: int = ANSWER,  # bytes of the answer
        only_if_alive: bool = False,
        abortable: bool = True,
    ) -> dict:
        limit = min(timeout, self.timeout)  # to connect
        connection = self.kind(self.host, self.port, timeout=limit)
        if abortable:
            with self.lock:
                self.open.add(connection)
        try:
            connection.connect()
            limit = timeout
            connection.sock.settimeout(limit)
            lost = abortable and connection not in self.open
            lost |= path == CONNECT and self.over.is_set()  # it has been released
            if lost or (only_if_alive and not self.alive):
                raise ServerError(f"{self.url} was lost before {path} was sent")
            data = None if body is None else json.dumps(body)
            with deadline(connection, timeout):
                connection.request(method, path, data, self.headers)
                reply = connection.getresponse()
                raw = bytearray()
                # not `read`, which has no limit if the size of a chunk is negative
                while len(raw) <= most and (part := reply.read1(1 << 20)):
                    raw += part
            if len(raw) > most:
                raise ServerError(f"{self.url} answered {path} with more than {most:,} bytes")
            if reply.length:  # which the server has announced, but not sent
                raise http.client.IncompleteRead(bytes(raw), reply.length)
        except TimeoutError as e:
            raise ServerError(f"{self.url} did not answer {path} within {limit:g} s") from e
        except (OSError, http.client.HTTPException) as e:
            if self.sidecar is not None and (end := self.sidecar.end()):
                raise ServerError(end, final=True) from e
            reason = str(e) or type(e).__name__
            raise ServerError(f"{self.url} did not answer {path} ({reason})") from e
        finally:
            with self.lock:
                self.open.discard(connection)
            connection.close()
        try:
            content = {} if path == HEALTH and not raw else json.loads(raw)  # that has no body
        # not a vLLM server, or one that is failing; RecursionError: nested too deeply
        except (ValueError, RecursionError):
            content = raw[:200].decode(errors="replace")
        if reply.status == 200 and isinstance(content, dict):
            return content
        raise self._error(path, reply.status, content)

    def _error(self, path: str, status: int, content: Any) -> ServerError | UserError:
        message = content.get("error") if isinstance(content, dict) else content
        message = message.get("message", message) if isinstance(message, dict) else message
        message = message if isinstance(message, str) else shown.repr(message)
        message = (message.strip().splitlines() or [""])[-1][:300]
        if status >= 500:
            dead = DEATH.search(message)
            if self.sidecar is not None:
                message = self.sidecar.cause() or message  # which may only refer to the log
            if dead:  # so there is no status for which a request is sent again
                return ServerError(f"{self.url} is lost, because its engine has died ({message})")
        if status == 409 and TRAINER in self.headers:
            return ServerError(
                f"{self.url} is taken ({message}); give each trainer a server of its own", 409
            )
        if status == 401:
            self.authorize()  # a server that is started again creates a new secret
            return UserError(
                f"{self.url} refuses the secret; set {SECRET} to the one of the server, which says "
                "at its start where it is."
            )
        if status == 403:
            return UserError(f"{self.url} refuses this trainer ({message}).")
        if status in (200, 404) and path == INFO:
            return UserError(
                f"{self.url} is not a sidecar of this project; start it with serve.py."
            )
        if status == 503 and path == HEALTH:
            return ServerError(f"{self.url} answers, but its engine has died", status)
        if 400 <= status < 500 and status not in (408, 425, 429):
            return UserError(
                f"{self.url} refuses {path} ({status}: {message}); trainer and server are not of "
                "the same version."
            )
        return ServerError(f"{self.url} answered {path} with status {status}: {message}", status)

    def _renew(self, over: threading.Event) -> None:
        """Renew the lease regularly, because the trainer may send no other requests for a long
        time. If another trainer holds the lease, these requests have no effect.
        """
        while not over.wait(RENEW):
            # errors are reported by the requests that need the server
            with contextlib.suppress(ServerError, UserError):
                self.get(HEALTH, timeout=RENEW)

    def abort(self) -> None:
        """End all requests in progress in other threads, which then raise ServerError."""
        with self.lock:
            for connection in self.open:
                shut(connection)
            self.open.clear()  # requests that are still connecting check this


def shut(connection: http.client.HTTPConnection) -> None:
    """End a request in progress in another thread."""
    if connection.sock is not None:
        with contextlib.suppress(OSError):  # it may have just ended
            connection.sock.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def deadline(connection: http.client.HTTPConnection, seconds: float) -> Iterator[None]:
    """Raise TimeoutError if a request takes longer than this. The timeout of a socket starts again
    with every byte that arrives.
    """
    over, late = threading.Event(), threading.Event()

    def watch() -> None:
        # It waits twice: if this process was suspended, it can still read what has arrived.
        if not (over.wait(seconds) or over.wait(0.5)):
            late.set()
            shut(connection)

    if seconds < DAY:
        threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        over.set()
        if late.is_set():
            raise TimeoutError


def retry(
    seconds: float, attempt: Callable[[], object], over: threading.Event
) -> ServerError | None:
    """Call `attempt` until it succeeds, with exponential back-off. Return None, or its last error.

    Give up after `seconds`, when our own server has ended, at the end of the run, or when a signal
    asks the run to stop.
    """
    deadline, pause = time.monotonic() + seconds, 0.5
    while True:
        try:
            attempt()
            return None
        except ServerError as e:
            left = deadline - time.monotonic()
            if e.final or left <= 0 or over.is_set() or asked.is_set():
                return e
            log.warning("%s; retrying for another %.0f s", e, left)
            over.wait(min(pause, left))
            pause = min(2 * pause, 10.0)


class Sidecar:
    """A server process of our own, which can be restarted with the same options.

    It listens on loopback only, with a random secret that is passed in the environment. It ends
    when this process ends, for whatever reason: it reads a pipe that we keep open, and watches our
    process id.
    """

    def __init__(
        self,
        model: str | Path,
        options: Sequence[str],  # options for serve.py and vLLM
        python: str,  # the interpreter that has vLLM
        output: Path,  # the file for the server's messages
        startup_timeout: float = 900.0,
        gpus: str = "",  # its CUDA_VISIBLE_DEVICES, if not ours
    ):
        self.model, self.options, self.output = str(model), options, output
        self.python = python or sys.executable
        given = re.search(r"--startup-timeout[= ](\d+(?:\.\d+)?)(?: |$)", " ".join(options))
        self.startup_timeout = float(given[1]) if given else startup_timeout
        self.environment = {"CUDA_VISIBLE_DEVICES": gpus} if gpus else {}
        self.secret = secrets.token_urlsafe(32)
        self.process: subprocess.Popen | None = None
        self.logged = 0  # bytes in `output` before the process started
        # A folder that contains only a link to our package, for the server's interpreter. If our
        # package is installed, its folder also contains others, such as torch, which that
        # interpreter must not find. It is next to the log: a killed run leaves nothing elsewhere.
        self.path = output.absolute().with_name(f".{output.stem}")
        self.reserved: socket.socket | None = None  # holds the port of the process
        self.over = threading.Event()  # set by `stop`; nothing is started afterwards

    def start(self, timeout: float) -> Server:
        """Start the process and wait until it is healthy. timeout: for requests to it.

        Raises UserError if the process ends, does not become healthy in time, or `stop` is called
        in the meantime.
        """
        self.kill()
        # While this socket is bound, no other process gets the port, unless it also asks for the
        # very port with SO_REUSEADDR, as serve.py does.
        self.reserved = sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
        command = [self.python, str(script("serve.py")), "--model", self.model, "--port", str(port)]
        command += ["--owner", str(os.getpid()), *self.options]
        path = filter(None, [str(self.path), os.environ.get("PYTHONPATH")])
        try:
            self.path.mkdir(exist_ok=True)
            (self.path / "nanogrpo").unlink(missing_ok=True)
            (self.path / "nanogrpo").symlink_to(Path(nanogrpo.__file__).resolve().parent)
            output = self.output.open("ab")
        except OSError as e:
            raise UserError(
                f"{self.output}, the log of the vLLM sidecar, cannot be written ({e.strerror}): "
                "choose another --output-dir."
            ) from e
        try:
            with output:
                self.logged = output.tell()
                process = self.process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=output,
                    env=os.environ
                    | self.environment
                    | {SECRET: self.secret, "PYTHONPATH": os.pathsep.join(path)},
                    start_new_session=True,  # a process group, so its workers can be killed too
                )
        except OSError as e:
            raise UserError(
                f"--vllm-python {self.python} cannot be run ({e.strerror}); name the interpreter "
                "that has vLLM."
            ) from e
        server = Server(f"http://127.0.0.1:{port}", self.secret, timeout, sidecar=self)
        begin, seconds = time.monotonic(), 0.0
        log.info("starting the vLLM sidecar; its messages go to %s", self.output)
        while seconds < self.startup_timeout and not self.over.is_set():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=0.25)
                end = self.end() or "The vLLM sidecar was stopped"
                raise UserError(f"{end}; see {self.output}.")
            seconds = time.monotonic() - begin
            with contextlib.suppress(ServerError):
                server.get(HEALTH, timeout=5)
                log.info("the vLLM sidecar is ready after %.0f s%s", seconds, self._memory())
                return server
        self.kill()
        raise UserError(
            f"The vLLM sidecar was not healthy within {seconds:.0f} s; see {self.output}."
        )

    def end(self) -> str:
        """Return how and why the process ended, or "" if it is running."""
        process = self.process
        if process is None or (status := process.poll()) is None:
            return ""
        if status == -signal.SIGKILL:  # it could not write a message
            return "The vLLM sidecar was killed (if not by you, the machine ran out of memory)"
        text = self._log().strip() or "it wrote no message"
        # messages of serve.py itself, and of vLLM's parser of options
        errors = re.findall("^(?:[\\w. ]+: )?error: (.*)", text, re.MULTILINE)
        reason = errors[-1] if errors else root_cause(text) or text.splitlines()[-1][:300]
        return f"The vLLM sidecar ended with status {status} ({reason.rstrip('.')})"

    def cause(self) -> str:
        """Return the last exception in the log of the current process, or ""."""
        return root_cause(self._log())

    def _memory(self) -> str:
        """Return the memory that serve.py chose, or "" if the user did."""
        chosen = re.search("^serve: (KV cache .*)", self._log(), re.MULTILINE)
        return f"; {chosen[1]}" if chosen else ""

    def _log(self) -> str:
        """Return what the current process has written, without the resource tracker's warnings
        about shared memory, which may come from a killed predecessor.
        """
        with self.output.open("rb") as file:
            file.seek(self.logged)
            text = file.read().decode(errors="replace")
        return re.sub(r"(?m)^.*resource_tracker\.py:\d+: UserWarning: .*\n?(?: .*\n?)?", "", text)

    def stop(self, timeout: float = 15.0) -> None:
        """End the process by closing its pipe. Kill it after `timeout` seconds."""
        self.over.set()
        if (process := self.process) is not None and process.poll() is None:
            process.stdin.close()  # type: ignore[union-attr]  # it is a pipe
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout)
        self.kill()
        shutil.rmtree(self.path, ignore_errors=True)

    def kill(self) -> None:
        """Kill the process and all its workers, even if it hangs, or has ended without them.

        multiprocessing's resource tracker then removes their shared memory, and ends by itself.
        """
        process, self.process = self.process, None
        if self.reserved is not None:
            self.reserved.close()
        if process is None:
            return
        process.kill()
        kill_workers(process.pid)
        process.wait()
        process.stdin.close()  # type: ignore[union-attr]  # it is a pipe
