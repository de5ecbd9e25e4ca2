"""The trainer's view of one vLLM sidecar: an HTTP client with the server's state (`Server`), and
the server process if we start it ourselves (`Sidecar`).

In: a URL and a secret. Out: the methods `get` and `post`. They raise a `ServerError` if no answer
arrives in time, if the connection is lost, or if the status is not 200. Another attempt or another
server may then help. HTTP uses the standard library. Each request uses a new connection, so a retry
never uses a broken connection. Read before: engine/base.py. Read next: sync.py, client.py.
"""

import contextlib
import http.client
import json
import logging
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nanogrpo
from nanogrpo.distributed.failure import asked
from nanogrpo.errors import UserError
from nanogrpo.extras.commands import script
from nanogrpo.vllm.auth import GENERATE, INFO, SECRET
from nanogrpo.vllm.buckets import BroadcastGroup
from nanogrpo.vllm.process import kill_group

logger = logging.getLogger(__name__)

STARTUP = 1800.0  # seconds for our own server to load its model

# An exception in a server's log, and the next line if the message continues there.
# For example, "(Worker pid=7) ERROR 11-22 04:43:15 [core.py:17] ValueError: no memory".
# The text before the name of the exception may be missing.
EXCEPTION = re.compile(
    r"^(?:\([\w-]+ pid=\d+\) )?(?:[A-Z]+ [\d-]+ [\d:]+ \[[^\]]+\] )?"
    r"((?:\w+\.)*\w*(?:Error|Exception)\b.*(?:\n(?:\([\w-]+ pid=\d+\) )? +\S.*)?)",
    re.MULTILINE,
)
# The message of an exception that was raised because another process had failed.
REFERS = re.compile("root cause|stack trace|Engine core initialization failed", re.IGNORECASE)
DEATH = "EngineCore encountered an issue"  # the HTTP process sends this text if the engine has died


class ServerError(Exception):
    """A server has died, hangs or reports an error."""


class ServerLost(UserError):
    """No server is left after all retries. The loop saves a checkpoint and stops."""


@dataclass(eq=False, repr=False)  # `repr` would show the secret
class Server:
    """An HTTP client of one server, and the server's state. Requests are thread-safe.

    If `secret` is "", the secret comes from the environment. `sidecar` is the server's process, if
    we started it.
    """

    url: str
    secret: str = ""
    timeout: float = 60.0  # seconds for every request except sampling
    sidecar: "Sidecar | None" = None
    # State, set by client.py and sync.py:
    alive = False  # whether the server is connected, has current weights and gets requests
    answers = True  # whether the server answered the last heartbeat
    version = -1  # version of the weights that the server received last
    problem: Exception | None = field(default=None, init=False)  # why it was lost
    # the connection for weights if the transport is broadcast
    group: BroadcastGroup | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        parts = re.fullmatch(r"(https?://)?([\w.-]+|\[[\w:.%]+\]):(\d{1,5})/?", self.url)
        if parts is None:
            raise UserError(
                f"--server {self.url} is not an address: write it like http://127.0.0.1:8000."
            )
        scheme, host, port = parts.groups("http://")
        self.url, self.host, self.port = f"{scheme}{host}:{port}", host.strip("[]"), int(port)
        secure = http.client.HTTPSConnection
        self.kind = secure if scheme == "https://" else http.client.HTTPConnection
        secret = self.secret or os.environ.get(SECRET, "")
        self.headers = {"Content-Type": "application/json", "Authorization": f"Bearer {secret}"}
        self.open: set[http.client.HTTPConnection] = set()  # with requests in progress
        self.lock = threading.Lock()

    def get(self, path: str) -> dict:
        return self._request("GET", path, None, self.timeout)

    def post(self, path: str, body: dict | None = None) -> dict:
        return self._request("POST", path, json.dumps(body or {}), self.timeout)

    def generate(self, body: dict) -> dict:
        """Request completions, without a timeout. The request fails if the server is lost."""
        return self._request("POST", GENERATE, json.dumps(body), None)

    def _request(self, method: str, path: str, data: str | None, timeout: float | None) -> dict:
        connection = self.kind(self.host, self.port, timeout=self.timeout)
        try:
            connection.connect()
            connection.sock.settimeout(timeout)
            # the address at which the server can reach this machine
            self.reached_from = connection.sock.getsockname()[0]
            self.open.add(connection)  # from here on, `abort` ends the request
            if timeout is None and not self.alive:
                raise ServerError(f"the server {self.url} was lost before {path} was sent")
            connection.request(method, path, data, self.headers)
            reply = connection.getresponse()
            raw = reply.read()
        except TimeoutError as e:
            raise ServerError(f"{self.url} did not answer {path} within {self.timeout:g} s") from e
        except (OSError, http.client.HTTPException) as e:
            end = self.sidecar.end() if self.sidecar else ""
            raise ServerError(end or f"{self.url} did not answer {path} ({e!r})") from e
        finally:
            self.open.discard(connection)
            connection.close()
        try:
            content = json.loads(raw)
        except ValueError:  # not a vLLM server, or a proxy
            content = raw[:300].decode(errors="replace")
        if reply.status == 200 and isinstance(content, dict):
            return content
        raise self._error(path, reply.status, content)

    def _error(self, path: str, status: int, content: Any) -> ServerError:
        for name in ("error", "message"):
            content = content.get(name) if isinstance(content, dict) else content
        message = (str(content).strip().splitlines() or [""])[-1][:300]
        if status == 401:
            problem = f"refuses the secret; {SECRET} must be the same here and there"
        elif 400 <= status < 500:
            problem = f"refuses {path} ({status}: {message}); is it a serve.py of this version?"
        else:
            if self.sidecar and DEATH in message:
                message = root_cause(self.sidecar.log()) or message
            problem = f"answered {path} with status {status}: {message}"
        return ServerError(f"{self.url} {problem}")

    def abort(self) -> None:
        """End all requests in progress in other threads, which then raise ServerError."""
        for connection in [*self.open]:
            with contextlib.suppress(OSError, AttributeError):  # the connection may have just ended
                connection.sock.shutdown(socket.SHUT_RDWR)


def root_cause(text: str) -> str:
    """Return the message of the exception that ended a server, from its log, or "".

    vLLM consists of several processes. If a process fails, it logs its exception. Each process that
    depends on the failed process then logs another exception, which refers to the first exception.
    """
    found = [message for message in EXCEPTION.findall(text) if not REFERS.search(message)]
    return re.sub(r"\n(\([\w-]+ pid=\d+\))? +", " ", found[-1])[:300] if found else ""


@dataclass(eq=False)
class Sidecar:
    """Our own server process, which can be restarted with the same options.

    The server listens on loopback only, with a random secret that is passed in the environment. The
    server watches our process id, so it ends when this process ends for any reason.
    """

    model: str | Path
    options: Sequence[str]  # options for serve.py and vLLM
    python: str  # the interpreter that has vLLM; "" if it is our own interpreter
    output: Path  # the file for the server's messages
    gpus: str = ""  # its CUDA_VISIBLE_DEVICES; "" if they are the same as ours

    def __post_init__(self) -> None:
        self.secret = secrets.token_urlsafe(32)
        self.process: subprocess.Popen | None = None
        self.logged = 0  # bytes in `output` before the process started
        # This folder has a link to our package, so that the server's interpreter can import it.
        # If the server searched our site-packages instead, it would also import our torch.
        # The folder is next to the log, so that a killed run leaves nothing elsewhere.
        self.path = self.output.absolute().with_name(f".{self.output.stem}")

    def start(self, timeout: float, over: threading.Event) -> Server:
        """Start the process and wait until it is healthy. `timeout` is the limit for a request, in
        seconds.

        Raises UserError if the process ends, or does not become healthy in time. Also raises
        UserError if `over` is set, or if a signal asks the run to stop.
        """
        self.kill()
        # While this socket is bound, no other process gets the port by chance.
        # But serve.py can bind this port, because it uses SO_REUSEADDR, too.
        with socket.socket() as reserved:
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            reserved.bind(("127.0.0.1", 0))
            port = reserved.getsockname()[1]
            server = Server(f"http://127.0.0.1:{port}", self.secret, timeout, sidecar=self)
            logger.info("starting the vLLM sidecar; its messages go to %s", self.output)
            self.process = self._run(port)
            deadline = time.monotonic() + STARTUP
            while time.monotonic() < deadline and not (over.wait(0.25) or asked.is_set()):
                if end := self.end():
                    raise UserError(f"{end}; see {self.output}.")
                with contextlib.suppress(ServerError):
                    server.get(INFO)
                    return server
        self.kill()
        raise UserError(f"The vLLM sidecar was stopped before it was healthy; see {self.output}.")

    def _run(self, port: int) -> subprocess.Popen:
        command = [self.python or sys.executable, str(script("serve.py")), *self.options]
        command += ["--model", str(self.model), "--host", "127.0.0.1", "--port", str(port)]
        command += ["--owner", str(os.getpid())]
        path = os.pathsep.join(filter(None, [str(self.path), os.environ.get("PYTHONPATH")]))
        variables = {SECRET: self.secret, "PYTHONPATH": path}
        if self.gpus:
            variables["CUDA_VISIBLE_DEVICES"] = self.gpus
        self.path.mkdir(exist_ok=True)
        link = self.path / "nanogrpo"
        link.unlink(missing_ok=True)
        link.symlink_to(Path(nanogrpo.__file__).resolve().parent)
        with self.output.open("ab") as output:
            self.logged = output.tell()
            try:
                return subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env=os.environ | variables,
                    start_new_session=True,  # a process group, so that workers can be killed, too
                )
            except OSError as e:
                raise UserError(
                    f"NANOGRPO_VLLM_PYTHON {self.python} cannot be run ({e.strerror}); set it to "
                    "the Python interpreter that has vLLM."
                ) from e

    def end(self) -> str:
        """Return how and why the process ended, or "" if it is running."""
        if self.process is None or (status := self.process.poll()) is None:
            return ""
        if status == -signal.SIGKILL:  # a killed process cannot write a message
            return "The vLLM sidecar was killed (if not by you, the machine ran out of memory)"
        text = self.log().strip() or "it wrote no message"
        reason = root_cause(text) or text.splitlines()[-1][:300]
        return f"The vLLM sidecar ended with status {status} ({reason.rstrip('.')})"

    def log(self) -> str:
        """Return what the current process has written."""
        with self.output.open("rb") as file:
            file.seek(self.logged)
            return file.read().decode(errors="replace")

    def stop(self) -> None:
        """End the process for good."""
        self.kill()
        shutil.rmtree(self.path, ignore_errors=True)

    def kill(self) -> None:
        """Kill the process and all its workers, even if the process hangs or has already ended."""
        process, self.process = self.process, None
        if process is not None:
            kill_group(process.pid)
            process.wait()
