"""The client of the vLLM sidecar: an engine (engine/base.py) that samples from servers over HTTP.

In: prompts (token ids). Out: `Sample`s: token ids, their log-probs at the sampling temperature,
whether the completion stopped, and the version of the weights that sampled each token. One request
is sent per group (n = G), with up to `window` requests in progress on each server:

    waiting groups ──► any server with room ──► checked ──► samples, in the order of the prompts
          ▲                     │ it dies, hangs, or answers with an error
          └──── the group ◄─────┘ is requested again with the same seeds

Three rules let the trainer trust a reply. A request contains every sampling field, so
no default of the server applies. Each token is returned with the label of the weights that sampled
it. A server that returns unknown labels (because it was restarted, or another trainer uses it)
counts as lost. The prefix cache is salted with the label, so keys computed with older weights are
never reused.

With several ranks, rank 0 sends all requests, and shares the results and errors. Read next:
sync.py, sleeping.py, extras/ahead.py.
"""

import functools
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import wait
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import nn

from nanogrpo.distributed.failure import asked
from nanogrpo.distributed.world import World
from nanogrpo.engine.base import SamplingParams
from nanogrpo.errors import UserError
from nanogrpo.model.decoder import Decoder
from nanogrpo.types import Prompt, Sample
from nanogrpo.vllm import protocol
from nanogrpo.vllm.auth import INFO
from nanogrpo.vllm.buckets import device_facts
from nanogrpo.vllm.protocol import GroupRequest
from nanogrpo.vllm.server import Server, ServerError, ServerLost, Sidecar
from nanogrpo.vllm.sync import WeightSync, on_thread

logger = logging.getLogger(__name__)

HEARTBEAT = 5.0  # seconds between health checks of a server
PATIENCE = 600.0  # seconds to wait for a server that we cannot restart
PAUSE = 2.0  # seconds between two attempts to reach a lost server
# The run ends if no server finishes a group in this number of consecutive attempts.
# More attempts would rarely help: a restarted server usually fails like the old server.
ATTEMPTS = 2

ALONE = World(0, 1, torch.device("cpu"))


@dataclass(eq=False, repr=False)  # `repr` would show the secret
class VLLMEngine:
    """An engine (engine/base.py) that samples from vLLM servers and sends them the weights."""

    # full or sharded; the servers must have a model with the same configuration
    model: Decoder
    _: KW_ONLY
    max_len: int  # the context: prompt and completion
    urls: Sequence[str] = ()  # addresses of servers, or
    sidecar: Sidecar | None = None  # a process to start
    secret: str = ""
    # how weights are sent: auto, broadcast or memory (buckets.py)
    transport: str = "auto"
    window: int = 64  # groups in progress on one server
    # seconds within which a healthy server answers a heartbeat and accepts the weights
    timeout: float = 60.0
    # whether the servers sleep while the trainer trains: see `wake`
    sleeps: bool = False
    masks: bool = False  # whether the servers return sampling masks: see protocol.body
    min_p: float = 0.0  # as in vLLM
    head_dtype: str = "model"  # of the logits: see `check_server`
    dtype: str = "auto"  # of the computation: see `check_server`
    world: World = ALONE

    def __post_init__(self) -> None:
        self.world = self.world.patient()
        self.interval, self.patience = HEARTBEAT, PATIENCE
        self.version = -1  # version of the weights
        self.restarts = 0  # how often all servers were lost
        self.problem: Exception | None = None  # why the last server was lost
        self.over = threading.Event()  # set by `close`
        # held by the thread that gathers or sends weights: the loop, or a recovery
        self.lock = threading.RLock()
        self.servers: list[Server] = []  # on rank 0
        dtype, device = self.world.once(self._start), self.world.device
        self.sync = WeightSync(
            self.model, dtype, device, timeout=self.timeout, main=self.world.main
        )
        for server in self.servers:
            self._watch(server)
        if self.sleeps:
            self.sleep()

    # --- the engine's interface ---

    def load(self, model: nn.Module, version: int) -> None:
        """Gather the model's weights and send them to every server. Every rank must call it.

        Raises ServerLost if no server accepts the weights. In sleep mode, `wake` sends the weights.
        """
        with self.lock:
            # Rank 0 may have to wait for the lock.
            # The other ranks wait here, because the collectives in `gather` have a timeout.
            self.world.once(lambda: None)
            self.sync.gather(model)
            if version == self.version:  # these may be other weights, with other cached keys
                self.sync.run = secrets.token_hex(6)
            self.version = version
            if not self.sleeps:
                self.world.once(self._send_to_all)

    def wake(self) -> None:
        """In sleep mode, wake the servers, and send them the weights. Every rank must call it.

        Raises ServerLost if no server accepts the weights.
        """
        if self.world.device.type == "cuda":
            torch.cuda.empty_cache()  # releases cached memory, so that the servers can use it
        with self.lock:
            self.world.once(self._send_to_all)

    def sleep(self) -> None:
        """In sleep mode, free the memory of the servers. Every rank must call it."""
        with self.lock:
            self.world.once(self._put_to_sleep)

    def sample(
        self, prompts: Sequence[Prompt], n: int, params: SamplingParams, step: int
    ) -> list[Sample]:
        """Return n completions of each prompt of this rank, in order. Every rank must call it.

        Raises UserError, ServerLost or FloatingPointError, on every rank.
        """
        everyones = self.world.concat(list(prompts))
        return self.scatter(lambda: self.request(everyones, n, params, step), prompts, n)

    def metrics(self) -> dict[str, float]:
        return {"vllm/restarts": self.restarts}

    def close(self) -> None:
        """Disconnect from the servers, and end our own server if we started one.

        Requests in progress in other threads raise ServerLost.
        """
        self.over.set()
        connected = [s for s in self.servers if s.alive and s.sidecar is None]
        for server in self.servers:
            server.alive = False
            server.abort()
        self.sync.close(connected)
        if self.sidecar:
            self.sidecar.stop()

    def request(
        self, prompts: Sequence[Prompt], n: int, params: SamplingParams, step: int
    ) -> list[Sample]:
        """Sample for the prompts of all ranks, on rank 0 alone.

        A thread may call this method while the loop trains (extras/ahead.py).
        """
        how = n, params, step, self.masks, self.min_p
        groups = [GroupRequest(p, n, protocol.body(p, *how)) for p in prompts]
        idle = 0  # consecutive rounds in which a server was alive, but no group was finished
        while waiting := [g for g in groups if g.samples is None]:
            self._recover()
            self._run(waiting)
            idle = idle + 1 if all(g.samples is None for g in waiting) else 0
            if idle == ATTEMPTS:
                raise ServerLost(
                    f"No vLLM server returns completions ({self.problem}); the run stops; continue "
                    "with --resume."
                )
        return [sample for g in groups for sample in g.samples or ()]

    def scatter(
        self, requested: Callable[[], list[Sample]], prompts: Sequence[Prompt], n: int
    ) -> list[Sample]:
        """Return this rank's part of the samples that `requested` returns on rank 0.

        Every rank must call this method, with its own prompts. An error on rank 0 is raised on
        every rank.
        """
        first = n * sum(self.world.gather(len(prompts))[: self.world.rank])
        mine = self.world.once(requested)[first : first + n * len(prompts)]
        for i, sample in enumerate(mine):
            sample.prompt = prompts[i // n]  # this rank's own object
        return mine

    # --- sampling, on rank 0 ---

    def _run(self, groups: list[GroupRequest]) -> None:
        """Request the groups from all servers that are alive, until all groups are done or no
        server is alive. If an error was not caused by a server, raise it.
        """
        waiting = deque(groups)

        def work(server: Server) -> None:
            while server.alive:
                try:
                    group = waiting.popleft()
                except IndexError:
                    return
                try:
                    group.samples = self._request(server, group)
                except ServerError as e:
                    waiting.append(group)
                    self._lose(server, e)

        alive = [server for server in self.servers if server.alive]
        each(work, alive * min(self.window, len(groups)))

    def _request(self, server: Server, group: GroupRequest) -> list[Sample]:
        # While `load` runs in another thread, the server may still have older weights.
        oldest = server.version
        label = self.sync.label(oldest)
        body = group.body | protocol.pictures(group.prompt, label)
        reply = server.generate(body | {"cache_salt": label})
        known = {self.sync.label(v): v for v in range(oldest, self.version + 1)}
        try:
            return protocol.read(reply, group, known, server.url)
        except (LookupError, TypeError, ValueError, AttributeError) as e:
            raise ServerError(f"{server.url} returned a reply that cannot be read ({e!r})") from e

    # --- sending weights, on rank 0 ---

    def _send_to_all(self) -> None:
        """Send the weights to all servers. Raise ServerLost if no server accepts the weights in
        time.
        """
        self._send_to_those_that_answer()
        self._recover()

    def _send_to_those_that_answer(self) -> None:
        """Send the weights to all servers at the same time. Skip servers that are lost and do not
        answer heartbeats.
        """
        answering = [server for server in self.servers if server.alive or server.answers]
        each(self._send, answering or self.servers)

    def _send(self, server: Server) -> None:
        """Connect to a server, unless it is already alive, and send it the weights. After this
        call, the server counts as alive or as lost.
        """
        try:
            if not server.alive:
                info = self._greet(server)
                self.sync.connect(server, info["transport"], info["workers"])
            self.sync.send(server, self.version, wake=self.sleeps)
        except (ServerError, UserError) as e:
            # UserError means that another server has the address now, perhaps only for a while
            self._lose(server, e)
            return
        server.alive, server.version, server.problem = True, self.version, None

    def _put_to_sleep(self) -> None:
        for server in self.servers:
            try:
                # free the memory of the weights and of the KV cache, until `send` wakes the server
                server.post("/sleep?level=2&mode=abort")
            except ServerError as e:
                self._lose(server, e)

    def _greet(self, server: Server) -> dict:
        """Check that the server can serve this trainer. Return the server's description, with
        the transport of the weights.
        """
        info, ours = server.get(INFO), device_facts(self.world.device)
        protocol.check_server(
            server.url, info, self.model.cfg, self.max_len, self.head_dtype, self.dtype
        )
        return info | {"transport": protocol.transport(self.transport, server.url, info, ours)}

    # --- losing and recovering servers, on rank 0 ---

    def _start(self) -> str:
        """Find the servers, or start our own server. Return their dtype."""
        self.servers = [Server(url, self.secret, self.timeout) for url in self.urls]
        if self.sidecar:
            self.servers = [self.sidecar.start(self.timeout, self.over)]
        try:
            dtypes = {self._greet(server)["dtype"] for server in self.servers}
        except ServerError as e:
            raise UserError(f"--server: {e}; start serve.py there first.") from e
        if len(dtypes) > 1:
            raise UserError(f"--server: the servers use {dtypes}; start all with the same --dtype.")
        return dtypes.pop()

    def _watch(self, server: Server) -> None:
        """Start a thread that checks regularly whether the server's engine answers.

        The answer must come from the engine, not only from the HTTP process. So the check detects
        even a suspended server, whose connections stay open.
        """

        def loop() -> None:
            while not self.over.wait(self.interval) and server in self.servers:
                try:
                    server.get("/is_paused")
                    server.answers = True
                except ServerError as e:
                    server.answers = False
                    if server.alive:
                        self._lose(server, e)

        on_thread(loop)

    def _lose(self, server: Server, error: Exception) -> None:
        """Stop using a server and end its requests. Log the first reason."""
        with server.lock:
            server.alive, first, server.problem = False, server.problem is None, error
        if first and not self.over.is_set():
            logger.warning("lost a server: %s", error)
        self.problem = error
        server.abort()

    def _recover(self) -> None:
        """Wait until at least one server is alive. Raise ServerLost if the wait is too long."""
        with self.lock:
            if any(server.alive for server in self.servers):
                return
            self.restarts += 1
            deadline = time.monotonic() + self.patience
            # Perhaps our own server only lost a connection, so first try without a restart.
            self._send_to_those_that_answer()
            while not any(server.alive for server in self.servers):
                if self.over.is_set() or asked.is_set() or time.monotonic() > deadline:
                    raise ServerLost(
                        f"No vLLM server is left ({self.problem}); the run stops; start the server "
                        "and continue with --resume."
                    )
                logger.warning("%s; trying again", self.problem)
                if self.sidecar is None:
                    self.over.wait(PAUSE)
                else:
                    deadline = 0.0  # a second restart would fail like the first
                    try:
                        self.servers = [self.sidecar.start(self.timeout, self.over)]
                    except UserError as e:
                        self.problem = e
                        continue
                    self._watch(self.servers[0])
                self._send_to_those_that_answer()


def each(work: Callable[[Any], None], items: Iterable) -> None:
    """Call `work` on all items at the same time. After the last call, raise the first error."""
    done = [on_thread(functools.partial(work, item)) for item in items]
    wait(done)
    for future in done:
        future.result()
