"""The client of the vLLM sidecar: an engine (engine/base.py) that samples from servers over HTTP.

In: prompts (token ids). Out: `Sample`s: token ids, their log-probs at the sampling temperature,
whether the completion stopped, and the version of the weights that sampled each token. One request
is sent per group (n = G), with up to `window` requests in progress on each server:

    waiting groups ──► any server with room ──► checked ──► samples, in the order of the prompts
          ▲                     │ it dies, hangs, or answers 5xx
          └──── the group ◄─────┘ is requested again with the same seeds

Three rules make a reply trustworthy. Every sampling field is sent, so no default of the server
applies. Each token is returned with the label of the weights that sampled it, and a server that
returns unknown labels (because it was restarted, or another trainer uses it) counts as lost. The
prefix cache is salted with the label, so keys computed with older weights are never reused.

With several trainer processes, rank 0 talks to the servers and shares the results and errors. Read
next: sync.py, sleeping.py, engine/ahead.py.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import nn

from nanogrpo.distributed.failure import asked
from nanogrpo.distributed.world import ALONE, World
from nanogrpo.engine.base import SamplingParams
from nanogrpo.errors import UserError
from nanogrpo.model.decoder import Decoder
from nanogrpo.types import Prompt, Sample
from nanogrpo.vllm import protocol
from nanogrpo.vllm.auth import HEALTH, INFO
from nanogrpo.vllm.buckets import device_facts
from nanogrpo.vllm.protocol import GroupRequest
from nanogrpo.vllm.server import Server, ServerError, ServerLost, Sidecar, retry
from nanogrpo.vllm.sync import WeightSync

log = logging.getLogger(__name__)

HEARTBEAT = 5.0  # seconds between health checks of a server
FIRST = 30.0  # seconds to wait for a server that we have not used before
ATTEMPTS = 3  # attempts at a request that fails with 5xx, before the server counts as lost


class VLLMEngine:
    """An engine (engine/base.Served) that samples from vLLM servers and sends them the weights."""

    def __init__(
        self,
        # The model may be full or sharded. The servers must have the same configuration.
        model: Decoder,
        *,
        max_len: int,  # the context: prompt and completion
        servers: Sequence[str] = (),  # addresses, or
        sidecar: Sidecar | None = None,  # a process to start
        secret: str = "",
        # how weights are sent: auto, or one of the two in buckets.py
        transport: str = "auto",
        window: int = 64,  # groups in progress on one server
        # seconds within which a healthy server answers a heartbeat and accepts the weights
        timeout: float = 60.0,
        patience: float = 600.0,  # seconds to wait for a server that we cannot restart
        # Whether the servers sleep when they are not needed: see `wake`.
        sleeps: bool = False,
        world: World = ALONE,
    ):
        self.world = world.patient()
        self.cfg, self.max_len, self.sidecar, self.patience = model.cfg, max_len, sidecar, patience
        self.window, self.timeout = window, timeout
        self.transport, self.sleeps = transport, sleeps
        self.interval = min(HEARTBEAT, timeout / 4)
        self.version = -1  # version of the weights
        self.dtype = ""  # the dtype of the servers
        self.images = 0  # the number of pictures that they allow in a prompt
        self.restarts = 0  # how many times all servers were lost and one was recovered
        self.problem: Exception | None = None  # why the last server was lost
        self.over = threading.Event()  # set by `close`
        # locked while weights are gathered or sent, by the loop or by a recovery in another thread
        self.lock = threading.RLock()
        self.servers: list[Server] = []  # on rank 0
        try:
            dtype = self.world.once(lambda: self._start(servers, secret))
        except BaseException:
            self.over.set()  # `close` will not be called, so end the threads here
            raise
        self.sync = WeightSync(model, dtype, world.device, timeout=timeout, main=world.main)
        if sleeps:
            self.sleep()

    # --- the engine's interface ---

    def load(self, model: nn.Module, version: int) -> None:
        """Gather the model's weights and send them to every server. Every rank must call.

        Raises ServerLost if no server accepts them. In sleep mode, `wake` sends them.
        """
        with self.lock:
            # Rank 0 may have to wait for the lock. The other ranks wait for rank 0 here, because
            # the collectives that gather the weights have a timeout.
            self.world.once(lambda: None)
            self.sync.gather(model)
            self.version = version
            if not self.sleeps:
                self.world.once(self._send_to_all)

    def wake(self) -> None:
        """In sleep mode: wake the servers, and send them the weights. Every rank must call.

        Raises ServerLost if no server accepts them.
        """
        if self.world.device.type == "cuda":
            torch.cuda.empty_cache()  # memory that we do not use, but the servers will
        with self.lock:
            self.world.once(self._send_to_all)

    def sleep(self) -> None:
        """In sleep mode: free the memory of the servers. Every rank must call."""
        with self.lock:
            self.world.once(self._put_to_sleep)

    def sample(
        self,
        prompts: Sequence[Prompt],
        n: int,
        params: SamplingParams,
        step: int,
    ) -> list[Sample]:
        """Return n completions of each of this rank's prompts, in order. Every rank must call.

        Raises UserError, ServerLost or FloatingPointError, on every rank.
        """
        everyones = self.world.concat(list(prompts))
        return self.scatter(lambda: self.request(everyones, n, params, step), prompts, n)

    def metrics(self) -> dict[str, float]:
        return {"vllm/restarts": self.restarts}

    def close(self) -> None:
        """Release the servers, and end the one that we started.

        Requests that other threads have in progress raise ServerLost.
        """
        self.over.set()
        # Lost servers are released, too: if one answers again, another trainer can use it at once.
        # Our own is ended below, and may hang.
        taken = [s for s in self.servers if s.taken and (s.alive or s.sidecar is None)]
        for server in self.servers:
            server.alive = False
            server.abort()
        self.sync.close(taken)
        if self.world.main and self.sidecar is not None:
            self.sidecar.stop()

    def request(
        self,
        prompts: Sequence[Prompt],
        n: int,
        params: SamplingParams,
        step: int,
    ) -> list[Sample]:
        """Sample for the prompts of all ranks, on rank 0 alone.

        A thread may call this while the loop trains (engine/ahead.py).
        """
        for p in prompts:
            if p.images and (count := len(p.images.sources)) > self.images:
                raise UserError(
                    f"Prompt {p.id} has {count} pictures, but the vLLM server allows "
                    f"{self.images}; start it with --limit-mm-per-prompt.image {count}."
                )
        groups = [GroupRequest(p, n, protocol.body(p, n, params, step)) for p in prompts]
        idle = 0  # consecutive rounds without a finished group, although a server was alive
        # Restarting our own server takes a minute, and the second one fails like the first.
        most = ATTEMPTS if self.sidecar is None else 2
        while waiting := [g for g in groups if g.samples is None]:
            self._recover()
            self._run(waiting)
            idle = idle + 1 if all(g.samples is None for g in waiting) else 0
            if idle == most:
                raise ServerLost(
                    f"No vLLM server returns completions ({self.problem}); the run stops; continue "
                    "with --resume."
                )
        return [sample for g in groups for sample in g.samples or ()]

    def scatter(
        self, requested: Callable[[], list[Sample]], prompts: Sequence[Prompt], n: int
    ) -> list[Sample]:
        """Return this rank's part of the samples that `requested` returns on rank 0.

        Every rank must call, with its own prompts. An error on rank 0 is raised on every rank.
        """
        first = n * sum(self.world.gather(len(prompts))[: self.world.rank])
        mine = self.world.once(requested)[first : first + n * len(prompts)]
        for i, sample in enumerate(mine):
            sample.prompt = prompts[i // n]  # this rank's own object
        return mine

    # --- sampling, on rank 0 ---

    def _run(self, groups: list[GroupRequest]) -> None:
        """Request the groups from all servers that are alive, until all are done or no server is
        alive. Raise every error that was not caused by a server.
        """
        waiting = deque(groups)
        errors: list[Exception] = []

        def work(server: Server) -> None:
            while server.alive and not errors:
                try:
                    group = waiting.popleft()
                except IndexError:
                    return
                try:
                    group.samples = self._request(server, group)
                except (ServerError, UserError) as e:  # UserError: restarted with different options
                    waiting.append(group)
                    if not errors:  # otherwise we ended the request ourselves
                        self._lose(server, e)
                except Exception as e:  # raised below, in the caller's thread
                    errors.append(e)

        threads = [
            threading.Thread(target=work, args=(server,), daemon=True)
            for server in self.servers
            for _ in range(min(self.window, len(groups)) if server.alive else 0)
        ]
        for t in threads:
            t.start()
        for t in threads:
            while t.is_alive():
                t.join(0.05 if errors else 0.25)
                for server in self.servers if errors else ():
                    server.abort()
        if errors:
            raise errors[0]

    def _request(self, server: Server, group: GroupRequest) -> list[Sample]:
        attempt = 1
        while True:
            # While `load` runs in another thread, the server may still have older weights.
            oldest = server.version
            try:
                label = self.sync.label(oldest)
                body = group.body | protocol.pictures(group.prompt, label)
                reply = server.generate(body | {"cache_salt": label})
                known = {self.sync.label(v): v for v in range(oldest, self.version + 1)}
                return protocol.read(reply, group, known, str(server), self.cfg.vocab_size)
            except ServerError as e:
                if attempt == ATTEMPTS or e.status < 500 or not server.alive:
                    raise
                log.warning("%s; retrying", e)
                time.sleep(0.1 * 2**attempt)
                attempt += 1

    # --- sending weights, on rank 0 ---

    def _send_to_all(self) -> None:
        """Send the weights to all servers at the same time, except lost ones that do not answer
        heartbeats.
        """
        problems: dict[Server, Exception] = {}

        def send(server: Server) -> None:
            try:
                if server.error is not None and not server.alive:
                    raise server.error
                self._send(server)
            except ServerError as e:
                self._lose(server, e)
            except Exception as e:  # raised below, in the caller's thread
                problems[server] = e

        threads = [
            threading.Thread(target=send, args=(server,), daemon=True) for server in self.servers
        ]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        found = [problems[server] for server in self.servers if server in problems]
        for problem in found[1:]:
            log.warning("%s", problem)
        if found:
            raise found[0]
        self._recover()

    def _put_to_sleep(self) -> None:
        for server in self.servers:
            if server.error is None:  # lost ones do not answer
                server.asleep = True
                try:
                    self.sync.sleep(server)
                except ServerError as e:
                    self._lose(server, e)

    def _send(self, server: Server) -> None:
        """Connect to a server, unless it is already alive, and send it the weights. Afterwards the
        server counts as alive.
        """
        try:
            if not server.alive:
                self.sync.connect(server, *self._greet(server))
            self.sync.send(server, self.version, wake=self.sleeps)
        except UserError as e:
            if server.version < 0:
                raise
            # A server at this address has accepted our weights before, so the one that refuses them
            # now may be a different server that uses the address temporarily.
            raise ServerError(str(e)) from e
        server.alive, server.version = not self.over.is_set(), self.version
        server.asleep, server.error, server.reported = False, None, False

    def _greet(self, server: Server) -> tuple[str, int]:
        """Check that the server can serve this trainer. Return how weights reach it, and its number
        of workers.
        """
        info = server.get(INFO, timeout=min(self.timeout, 10.0))
        server.get(HEALTH, timeout=min(self.timeout, 10.0))  # INFO need not reach the engine
        protocol.check_server(str(server), info, self.cfg, self.max_len, self.dtype)
        self.dtype, self.images = info["dtype"], info["images"]
        ours = device_facts(self.world.device)
        return protocol.transport(self.transport, str(server), info, ours), info["workers"]

    # --- losing and recovering servers, on rank 0 ---

    def _start(self, urls: Sequence[str], secret: str) -> str:
        """Find the servers. Return their dtype."""
        self.servers = [Server(url, secret, self.timeout, self.over) for url in urls]
        if len({s.url for s in self.servers}) < len(self.servers):
            raise UserError(
                "--server names an address twice; name each server once, because it takes weights "
                "over one connection."
            )
        if self.sidecar is not None:
            self.servers = [self.sidecar.start(self.timeout)]
        for server in self.servers:
            call = functools.partial(self._greet, server)
            if problem := retry(min(self.patience, FIRST), call, self.over):
                if self.sidecar is not None:
                    raise UserError(f"{problem}; see {self.sidecar.output}.")
                advice = "; start serve.py there first, or leave the option out to have it started"
                # the message of status 409 already contains advice
                raise UserError(f"--server: {problem}{'' if problem.status == 409 else advice}.")
            self._watch(server)
        return self.dtype

    def _watch(self, server: Server) -> None:
        """Start a thread that checks regularly whether the server's engine answers.

        The engine must answer, not only its HTTP front end. This detects a suspended server
        although its connections stay open. It also detects a paused server, which would never
        finish a request; a server stays paused if another trainer died while it was sending
        weights.
        """

        def is_paused() -> bool:
            return protocol.is_paused(server.get("/is_paused"), str(server))

        def heartbeat() -> None:
            known = server.error  # a later loss is newer than this answer
            try:
                if is_paused() and server.alive:
                    with self.lock:  # unless one of our own syncs has paused it
                        if server.alive and not server.asleep and is_paused():
                            raise ServerError(f"{server} is paused, but not by this trainer")
                with server.lock:
                    if server.error is known:
                        server.error = None  # weights may be sent to it again
            except (ServerError, UserError) as e:
                if server.alive:
                    self._lose(server, e)
                server.error = ServerError(str(e))

        def loop() -> None:
            while not self.over.wait(self.interval) and server in self.servers:
                heartbeat()

        threading.Thread(target=loop, daemon=True).start()

    def _lose(self, server: Server, error: Exception) -> None:
        """Stop using a server and end its requests. Log the reason once."""
        with server.lock:
            first, server.reported = not server.reported, True
            alive, server.alive, server.error = server.alive, False, ServerError(str(error))
        if first and not self.over.is_set():
            what = "lost a server" if alive else "continuing without this server"
            log.warning("%s: %s", what, error)
            self.problem = error
        server.abort()

    def _recover(self) -> None:
        """Wait until at least one server is alive. Raise ServerLost if that takes too long."""
        with self.lock:
            if self.over.is_set():
                raise ServerLost("the run has ended")
            if any(server.alive for server in self.servers):
                return
            self.restarts += 1
            if self.sidecar is None:
                # A server that was never usable will not become so if we wait long.
                known = any(server.version >= 0 for server in self.servers)
                seconds = self.patience if known else min(self.patience, FIRST)
                problem: Exception | None = retry(seconds, self._send_to_any, self.over)
            else:
                problem = self._restart(self.sidecar)
            if problem is not None:
                raise ServerLost(
                    f"No vLLM server is left ({problem}); the run stops; start the server and "
                    "continue with --resume."
                )

    def _restart(self, sidecar: Sidecar) -> Exception | None:
        """Reconnect to our own server, or restart it. Return the last error, or None."""
        # It may only have lost a connection, so try once without restarting it.
        problem: Exception | None = retry(0.0, self._send_to_any, self.over)
        for _ in range(ATTEMPTS):
            if problem is None or self.over.is_set() or asked.is_set():
                break
            log.warning("%s; restarting the sidecar", problem)
            try:
                self.servers = [sidecar.start(self.timeout)]
            except UserError as e:  # the memory of the old process may not be free yet
                problem = e
            else:
                self._watch(self.servers[0])
                problem = retry(self.timeout, self._send_to_any, self.over)
        return problem

    def _send_to_any(self) -> None:
        """Send the weights to the first server that accepts them. If none does, raise the last
        error.
        """
        for i, server in enumerate(self.servers):
            try:
                return self._send(server)
            except ServerError:
                if i + 1 == len(self.servers):
                    raise
