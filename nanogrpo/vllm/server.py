"""One vLLM sidecar as the trainer sees it: an address that answers JSON (`Server`), or a process
that we started (`Sidecar`).

In: a URL and a secret. Out: `get` and `post`, whose failures are of two kinds: `ServerError`, which
another attempt or another server may cure (no answer in time, connection lost, status 5xx), and
UserError, which only the user can (the wrong address, secret or model). HTTP is the standard
library's: one connection a request, so that no retry can meet a stale one. Read before: rollout.py.
Read next: sync.py, vllm_engine.py.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable, Sequence
from pathlib import Path

from nanogrpo.distributed.failure import asked
from nanogrpo.errors import UserError
from nanogrpo.vllm.auth import FACTS, QUIET, SECRET, TRAINER

log = logging.getLogger(__name__)

RENEW = QUIET / 4  # seconds between two words to a server that is ours


class ServerError(Exception):
    """A server that does not answer as it should: dead, hung, or in trouble. `status` is that of
    HTTP, 0 without an answer.
    """

    def __init__(self, message: str, status: int = 0):
        super().__init__(message)
        self.status = status


class ServerLost(UserError):
    """No server answers any more, and patience is over. The loop saves a checkpoint and stops."""


class Server:
    """HTTP to one server. `alive` says whether it is given work; the engine sets it. Safe to use
    from several threads.
    """

    def __init__(
        self,
        url: str,
        secret: str = "",
        timeout: float = 60.0,
        until: threading.Event | None = None,
    ):
        """until: keeps the server for this trainer (guard.py), which renews its claim all the time
        until the event is set.
        """
        parts = urllib.parse.urlsplit(url if "//" in url else f"http://{url}")
        try:
            port = parts.port
        except ValueError:  # not a number, or too large a one
            port = None
        if (
            parts.scheme not in ("http", "https")
            or not parts.hostname
            or port is None
            or parts.path.strip("/")
        ):
            raise UserError(f"--server {url} is not an address; write it as http://127.0.0.1:8000.")
        if not secret.isascii() or not secret.isprintable():
            raise UserError(
                f"{SECRET} must be printable ASCII characters; use the secret that serve.py was started with."
            )
        self.url, self.host, self.port = f"{parts.scheme}://{parts.netloc}", parts.hostname, port
        self.kind = (
            http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        )
        self.timeout = timeout  # seconds for everything but sampling
        self.headers = {"Content-Type": "application/json"} | (
            {"Authorization": f"Bearer {secret}"} if secret else {}
        )
        # seconds in which one that was lost, and is well again, answers: on a busy machine too
        self.moment = 2.0
        self.alive = False
        self.version = -1  # of the weights that it was given last
        self.told = False  # whether the user knows that it is not in use
        # why it does not `answer`: the last reason
        self.silence = ServerError(f"{self.url} has not answered yet")
        self.open: set[http.client.HTTPConnection] = set()
        self.lock = threading.Lock()
        self.knocking: threading.Thread | None = None  # at its door, while it is lost
        if until is not None:
            self.headers[TRAINER] = secrets.token_hex(8)
            threading.Thread(target=self._renew, args=(until,), daemon=True).start()

    def __repr__(self) -> str:
        return self.url

    def get(self, path: str, timeout: float | None = None) -> dict:
        return self._request("GET", path, None, timeout)

    def post(self, path: str, body: dict | None = None, timeout: float | None = None) -> dict:
        return self._request("POST", path, body or {}, timeout)

    def work(self, path: str, body: dict) -> dict:
        """A `post` that takes as long as it takes, if the server is alive; `alive = False` and then
        `abort` end it for sure.
        """
        return self._request("POST", path, body, 86400.0, work=True)

    def _request(
        self, method: str, path: str, body: dict | None, timeout: float | None, work: bool = False
    ) -> dict:
        timeout = timeout or self.timeout
        # to connect: never as long as sampling
        connection = self.kind(self.host, self.port, timeout=min(timeout, self.timeout))
        with self.lock:
            self.open.add(connection)
        try:
            connection.connect()
            connection.sock.settimeout(timeout)
            if connection not in self.open or (work and not self.alive):
                raise ServerError(f"{self.url} was given up before {path} was sent")
            connection.request(
                method, path, None if body is None else json.dumps(body), self.headers
            )
            reply = connection.getresponse()
            raw = reply.read()
        except TimeoutError as e:
            waited = connection.timeout if connection.sock is None else timeout
            raise ServerError(f"{self.url} did not answer {path} within {waited:g} s") from e
        except (OSError, http.client.HTTPException) as e:
            raise ServerError(
                f"{self.url} did not answer {path} ({str(e) or type(e).__name__})"
            ) from e
        finally:
            with self.lock:
                self.open.discard(connection)
            connection.close()
        try:
            content = json.loads(raw) if raw.strip() else {}
        # /health answers nothing; what is not JSON is no server of ours, or one in trouble
        except ValueError:
            content = {"error": raw[:200].decode(errors="replace")}
        if reply.status == 200 and isinstance(content, dict):
            return content
        message = content.get("error") if isinstance(content, dict) else content
        message = (
            str(message.get("message", message) if isinstance(message, dict) else message)
            .strip()
            .splitlines()
        )
        message = message[-1][:300] if message else ""
        if reply.status == 409 and TRAINER in self.headers:
            raise ServerError(
                f"{self.url} is taken ({message}); give each trainer a server of its own", 409
            )
        if reply.status == 401:
            raise UserError(
                f"{self.url} refuses the secret; set {SECRET} to the one that the server was started with."
            )
        if reply.status == 404 and path == FACTS:
            raise UserError(
                f"{self.url} is a server, but not a sidecar of this project; start it by serve.py."
            )
        if 400 <= reply.status < 500 and reply.status not in (408, 425, 429):
            raise UserError(
                f"{self.url} refuses {path} ({reply.status}: {message}); trainer and server do not fit together."
            )
        raise ServerError(
            f"{self.url} answered {path} with status {reply.status}: {message}", reply.status
        )

    def _renew(self, over: threading.Event) -> None:
        """A word now and then, for a trainer may be silent for long while it trains, and while it
        brings a server up. From who is not its trainer the word changes nothing.
        """
        while not over.wait(RENEW):
            # if it matters, who tries to use the server is told
            with contextlib.suppress(ServerError, UserError):
                self.get("/health", timeout=RENEW)

    def answers(self, path: str, over: threading.Event) -> bool:
        """Whether a lost server has answered since it was lost. A thread asks until it does, or
        until `over`: a server that hangs costs the first call a moment, and the others nothing.
        """

        def knock() -> None:
            while not over.is_set():
                try:
                    self.get(path, timeout=min(self.timeout, 10.0))
                except ServerError as e:
                    self.silence = e
                    over.wait(1.0)
                    continue
                except UserError:  # a refusal is an answer: who tries to use the server is told
                    pass
                return

        if (thread := self.knocking) is None:
            thread = self.knocking = threading.Thread(target=knock, daemon=True)
            thread.start()
            thread.join(self.moment)
        if thread.is_alive():
            return False
        self.knocking = None
        return True

    def abort(self) -> None:
        """Ends the requests under way in other threads: they raise ServerError, also those that are
        still connecting.
        """
        with self.lock:
            for connection in self.open:
                if connection.sock is not None:
                    with contextlib.suppress(OSError):  # it may have ended by itself meanwhile
                        connection.sock.shutdown(socket.SHUT_RDWR)
            self.open.clear()


def until(
    deadline: float, attempt: Callable[[], object], over: threading.Event
) -> ServerError | None:
    """Calls `attempt` until it works (None), or the deadline, the end, or a signal to stop (its
    last error). Tells failures.
    """
    pause = 0.5
    while True:
        try:
            attempt()
            return None
        except ServerError as e:
            left = deadline - time.monotonic()
            if left <= 0 or over.is_set() or asked.is_set():
                return e
            log.warning("%s; trying for another %.0f s", e, left)
            over.wait(min(pause, left))
            pause = min(2 * pause, 10.0)


class Sidecar:
    """A server process of ours: `python serve.py`, started, killed, and started again, always with
    the same options.

    It listens on loopback only, with a random secret that the environment carries. It ends when
    this process does, however that ends: it holds the reading end of a pipe whose writing end we
    have, and watches our process id.
    """

    def __init__(
        self,
        model: str | Path,
        options: Sequence[str],
        python: str,
        output: Path,
        startup_timeout: float = 900.0,
    ):
        """options: for serve.py and vLLM. python: the interpreter that has vLLM. output: the file
        that its messages go to.
        """
        self.model, self.options, self.output = str(model), list(options), Path(output)
        self.python, self.startup_timeout = python or sys.executable, startup_timeout
        self.secret = secrets.token_urlsafe(32)
        self.process: subprocess.Popen | None = None
        self.over = threading.Event()  # set by `stop`: nothing is started any more

    def start(self, timeout: float) -> Server:
        """Starts the process and waits until it is healthy. UserError when it ends before, is late,
        or `stop` is called in another thread. timeout: the Server's.
        """
        self.kill()
        # a free port: another process could take it in between, and serve.py would say so
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            port = sock.getsockname()[1]
        script = Path(__file__).resolve().parents[2] / "serve.py"
        who = ["--model", self.model, "--port", str(port), "--owner", str(os.getpid())]
        command = [self.python, str(script), *who, *self.options]
        try:
            self.output.parent.mkdir(parents=True, exist_ok=True)
            output = self.output.open("ab")
        except OSError as e:
            raise UserError(
                f"{self.output} cannot be written ({e.strerror}); the sidecar's messages go there."
            ) from e
        try:
            with output:
                process = self.process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=output,
                    env=os.environ | {SECRET: self.secret},
                    # a process group of its own: its workers can be killed with it
                    start_new_session=True,
                )
        except OSError as e:
            raise UserError(
                f"--vllm-python {self.python} cannot be run ({e.strerror}); name the interpreter that has vLLM."
            ) from e
        server = Server(f"http://127.0.0.1:{port}", self.secret, timeout)
        begin = time.monotonic()
        log.info("starting the vLLM sidecar; its messages go to %s", self.output)
        while (
            seconds := time.monotonic() - begin
        ) < self.startup_timeout and not self.over.is_set():
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = process.wait(timeout=0.25)
                raise UserError(
                    f"The vLLM sidecar ended with status {status} ({self._last_words()}); see {self.output}."
                )
            with contextlib.suppress(ServerError):
                server.get("/health", timeout=5)
                log.info("the vLLM sidecar is ready after %.0f s", seconds)
                return server
        self.kill()
        raise UserError(
            f"The vLLM sidecar was not healthy within {seconds:.0f} s; see {self.output}."
        )

    def _last_words(self) -> str:
        lines = [x for x in self.output.read_text(errors="replace").splitlines() if x.strip()]
        errors = [x for x in lines if x.startswith("error: ")]
        return (
            (errors or lines or ["it said nothing"])[-1]
            .removeprefix("error: ")
            .strip()
            .rstrip(".")[:300]
        )

    def stop(self, timeout: float = 15.0) -> None:
        """Ends the process in good order, by closing the pipe; kills it when that takes longer than
        `timeout` seconds.
        """
        self.over.set()
        if (process := self.process) is not None and process.poll() is None:
            process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout)
        self.kill()

    def kill(self) -> None:
        """Kills the process and all its workers, also when it hangs or has left them behind."""
        process, self.process = self.process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):  # the group is empty: everyone has ended
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdin.close()
