"""The client of the vLLM sidecar: the training loop's engine (rollout.Engine), whose samples come
from a server over HTTP.

In: prompts (token ids). Out: `Sample`s: ids, their log-probs at the sampling temperature, stopped
or cut, the version that wrote each token. One request a group (n = G), as many under way as
`window` allows, on as many servers as there are:

    groups that wait ──► whichever server has room ──► checked ──► samples, in the order asked
          ▲                        │ it dies, hangs, or answers 5xx
          └── the whole group ◄────┘ again, with the same seeds: nothing is counted twice, nothing half done is kept

Three rules make an answer trustworthy. Every sampling field is sent, so that no default of the
server's leaks in. Each token carries the label of the weights that wrote it, and a label that is
not ours (a server that was restarted, another trainer's) is treated as a lost server. The prefix
cache is salted with the label, so that no prompt meets keys of older weights. With several trainer
processes rank 0 talks to the servers and shares what it gets, errors too. Read next: sync.py,
staleness.py.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from torch import nn

from nanogrpo.distributed.failure import asked
from nanogrpo.distributed.world import ALONE, World
from nanogrpo.engine.base import SamplingParams
from nanogrpo.errors import UserError
from nanogrpo.types import Prompt, Sample
from nanogrpo.vllm.auth import FACTS
from nanogrpo.vllm.protocol import Group, ask, check, fits, read
from nanogrpo.vllm.server import Server, ServerError, ServerLost, Sidecar, until
from nanogrpo.vllm.sync import WeightSync

log = logging.getLogger(__name__)

ATTEMPTS = 3  # of one request on one server that answers 5xx, before the server counts as lost


class VLLMEngine:
    """Samples from vLLM servers, and keeps their weights those of the trainer (rollout.Served)."""

    def __init__(
        self,
        # a Decoder, whole or sharded: its configuration must be the servers', its parameters are
        # what is sent
        model: nn.Module,
        *,
        max_len: int,  # of the context: prompt and completion
        servers: Sequence[str] = (),  # addresses; or
        sidecar: Sidecar | None = None,  # the process to start
        secret: str = "",
        transport: str = "broadcast",  # how weights travel: see wire.py
        window: int = 64,  # groups under way on one server
        # seconds in which a healthy server gives a sign of life, and takes the weights
        timeout: float = 60.0,
        patience: float = 600.0,  # seconds that a server which is not ours may be away
        world: World = ALONE,
    ):
        if bool(servers) == bool(sidecar):
            raise ValueError("give the addresses of servers, or a sidecar to start, and not both")
        self.world = world.patient()
        self.cfg, self.max_len, self.sidecar, self.patience = model.cfg, max_len, sidecar, patience
        self.window, self.timeout, self.transport = window, timeout, transport
        self.version, self.dtype = -1, ""  # of the weights; the dtype is the servers'
        self.over = threading.Event()  # set by `close`
        self.restarts = 0  # of our sidecar, and reconnections, for the log
        # seconds between two looks whether a server that works still answers
        self.beat = timeout / 4
        self.problem: Exception | None = None  # why the last server was lost
        # of weights to a server: counted at the start and at the end, so that it is odd in between
        self.sends = 0
        # held while weights are gathered or sent: by the loop, or by a recovery
        self.lock = threading.RLock()
        self.workers: dict[Server, int] = {}
        self.sync: WeightSync | None = None
        self.servers = (
            [Server(url, secret, timeout, self.over) for url in servers] if world.main else []
        )
        try:
            self.world.once(self._start)
        except BaseException:
            self.over.set()  # nobody will close what was refused: its threads end now
            raise
        self.sync = WeightSync(
            model,
            self.world.once(lambda: self.dtype),
            world.device,
            transport,
            timeout=timeout,
            first=world.main,
        )

    # --- the interface of rollout.Served ---

    def sample(
        self,
        prompts: Sequence[Prompt],
        n: int,
        params: SamplingParams,
        step: int,
        limits: Sequence[int] | None = None,
    ) -> list[Sample]:
        """n completions of each prompt, ordered prompt by prompt. UserError, ServerLost,
        FloatingPointError: on every rank. Every rank calls, each with its own prompts; rank 0 asks
        for all of them.
        """
        limits = limits or [params.max_tokens] * len(prompts)
        parts = self.world.gather([[p.id, p.token_ids, most] for p, most in zip(prompts, limits)])
        everyone = [Prompt(i, "", ids) for part in parts for i, ids, _ in part]
        limits = [most for part in parts for _, _, most in part]
        return self.scatter(lambda: self.request(everyone, n, params, step, limits), prompts, n)

    def load(self, model: nn.Module, version: int) -> None:
        """Gathers the weights (every rank calls) and has every server take them. ServerLost when
        none could be brought to.
        """
        with self.lock:
            # While rank 0 waits for the lock, the others wait here, and not in a collective that
            # has a limit.
            self.world.once(lambda: None)
            self.sync.gather(model)
            self.version = version
            self.world.once(self._send)

    def metrics(self) -> dict[str, float]:
        return {"vllm/restarts": self.restarts}

    def close(self) -> None:
        """Releases the servers; ends the one that we started. What a thread still asks for raises
        ServerLost there.
        """
        self.over.set()
        for server in self.servers:  # of rank 0: the others have none
            server.alive = False
            server.abort()
        if self.world.main and self.sync is not None:
            self.sync.close()
        if self.world.main and self.sidecar is not None:
            self.sidecar.stop()

    # --- sampling: on rank 0 ---

    def request(
        self,
        prompts: Sequence[Prompt],
        n: int,
        params: SamplingParams,
        step: int,
        limits: Sequence[int] | None = None,
    ) -> list[Sample]:
        """`sample` without telling the other ranks: what a thread may call while the loop trains
        (staleness.py).
        """
        if self.version < 0:
            raise RuntimeError("VLLMEngine.load must be called before sample.")
        each = [
            dataclasses.replace(params, max_tokens=most)
            for most in limits or [params.max_tokens] * len(prompts)
        ]
        check(prompts, each, self.max_len)
        groups = [Group(p, n, ask(p, n, own, step)) for p, own in zip(prompts, each)]
        idle = 0  # rounds in which no group was finished, although a server could be brought up
        while waiting := [g for g in groups if g.samples is None]:
            self._recover()
            self._run(waiting)
            idle = idle + 1 if all(g.samples is None for g in waiting) else 0
            if idle == ATTEMPTS:
                raise ServerLost(
                    f"No vLLM server gives completions ({self.problem}); the run stops; go on with --resume."
                )
        return [s for g in groups for s in g.samples]

    def _run(self, groups: list[Group]) -> None:
        """Works on the groups with every living server until all are done, or no server lives.
        Other errors are raised.
        """
        waiting, errors, changed = deque(groups), [], threading.Condition()

        def work(server: Server) -> None:
            while server.alive and not errors:
                with changed:
                    if not waiting:
                        return
                    group = waiting.popleft()
                try:
                    group.samples = self._ask(server, group)
                # what it refuses now it did not before: it was started anew, otherwise
                except (ServerError, UserError) as e:
                    if not errors:  # else we ended the request ourselves
                        self._lose(server, e)
                    with changed:
                        waiting.append(group)
                except Exception as e:  # carried to the caller's thread, which raises it
                    errors.append(e)
                finally:
                    with changed:
                        changed.notify()

        threads = {
            threading.Thread(target=work, args=(s,), daemon=True): s
            for s in self.servers
            for _ in range(min(self.window, len(groups)) if s.alive else 0)
        }
        for t in threads:
            t.start()
        beat = time.monotonic()
        while any(t.is_alive() for t in threads):
            with changed:
                changed.wait(timeout=0.05 if errors or not waiting else 0.25)
            if errors:
                for s in self.servers:
                    s.abort()
            if time.monotonic() - beat > self.beat:
                for s in {s for t, s in threads.items() if t.is_alive() and s.alive}:
                    self._beat(s)
                beat = time.monotonic()
        if errors:
            raise errors[0]

    def _beat(self, server: Server) -> None:
        """The heart beat: a question that the server's engine, not only its front, must answer. So
        one that is stopped is noticed although its connections stay open; and one that another
        trainer paused and then died, although it is healthy.
        """
        before = self.sends
        try:
            if server.get("/is_paused")["is_paused"] and before % 2 == 0 and before == self.sends:
                raise ServerError(f"{server} is paused, and not by this trainer")
        except (ServerError, UserError) as e:
            self._lose(server, e)

    def _ask(self, server: Server, group: Group) -> list[Sample]:
        for attempt in range(ATTEMPTS):
            # not ours: while `load` is under way in another thread, the server is still behind
            oldest = server.version
            try:
                # No limit of its own: a long group takes long. The heart beat ends the connection
                # of a server that hangs.
                reply = server.work(
                    "/inference/v1/generate", group.body | {"cache_salt": self.sync.label(oldest)}
                )
                return read(reply, group, self.sync.version_of, oldest, self.version, str(server))
            except ServerError as e:
                if attempt + 1 == ATTEMPTS or e.status < 500 or not server.alive:
                    raise
                log.warning("%s; asking again", e)
                time.sleep(0.2 * 2**attempt)

    # --- servers that come and go: on rank 0 ---

    def _start(self) -> None:
        if len({s.url for s in self.servers}) < len(self.servers):
            raise UserError(
                "--server names an address twice; name each server once: it takes weights over one connection."
            )
        if self.sidecar is not None:
            self.servers = [self.sidecar.start(self.timeout)]
        deadline = time.monotonic() + (self.timeout if self.sidecar else min(self.patience, 30.0))
        for server in self.servers:
            if problem := until(deadline, lambda s=server: self._meet(s), self.over):
                advice = "; start serve.py there first, or leave the option out to have it started"
                # 409 says itself what to do
                raise UserError(f"--server: {problem}{'' if problem.status == 409 else advice}.")

    def _meet(self, server: Server) -> None:
        """Learns what the server is, and refuses one that cannot serve this trainer. UserError,
        ServerError.
        """
        facts = server.get(FACTS, timeout=min(self.timeout, 10.0))
        fits(str(server), facts, self.cfg, self.max_len, self.dtype)
        self.dtype, self.workers[server] = facts["dtype"], facts["workers"]

    def _bring_up(self, server: Server) -> None:
        """Connects a server and gives it the current weights; it is alive afterwards. UserError,
        ServerError.
        """
        self.sends += 1
        try:
            if server not in self.sync.groups:
                self._meet(server)
                self.sync.connect(server, self.workers[server])
            self.sync.send(server, self.version)
        except UserError as e:
            if server.version < 0:
                raise
            # it has had our weights before: another took its place, and may leave it again
            raise ServerError(str(e)) from e
        finally:
            self.sends += 1
        server.alive, server.version, server.told = not self.over.is_set(), self.version, False

    def _lose(self, server: Server, error: Exception) -> None:
        # one that was never alive is told of too, once
        if server.alive or not (server.told or self.over.is_set()):
            log.warning("lost a server: %s" if server.alive else "goes without a server: %s", error)
            self.problem = error
        server.alive, server.told = False, True
        server.abort()

    def _send(self) -> None:
        """The current weights to every server: those that are alive, and those whose engine, not
        only the front, is back.
        """
        for server in self.servers:
            try:
                if (
                    server.alive
                    or len(self.servers) == 1
                    or server.answers("/is_paused", self.over)
                ):
                    self._bring_up(server)
                elif not server.told:
                    self._lose(server, server.silence)
            except ServerError as e:
                self._lose(server, e)
                self.sync.disconnect(server)
        self._recover()

    def _recover(self) -> None:
        """Returns when at least one server lives and has the current weights. ServerLost when
        patience is over.
        """
        with self.lock:
            if self.over.is_set():
                raise ServerLost("the run has ended")
            if any(s.alive for s in self.servers):
                return
            for s in self.servers:
                self.sync.disconnect(s)
            self.restarts += 1
            # Ours is tried once as it is: it may have lost no more than a connection. Then it is
            # started again.
            problem = until(
                time.monotonic() + (0.0 if self.sidecar else self.patience),
                self._bring_up_any,
                self.over,
            )
            for _ in range(ATTEMPTS if self.sidecar is not None else 0):
                if problem is None or self.over.is_set() or asked.is_set():
                    break
                log.warning("%s; starting the sidecar again", problem)
                try:
                    self.servers = [self.sidecar.start(self.timeout)]
                except UserError as e:  # the memory of the one before may not be free yet
                    problem = e
                else:
                    problem = until(time.monotonic() + self.timeout, self._bring_up_any, self.over)
            if problem is not None:
                raise ServerLost(
                    f"No vLLM server is left ({problem}); the run stops; start the server and go on with --resume."
                )

    def _bring_up_any(self) -> None:
        for i, server in enumerate(self.servers):
            try:
                return self._bring_up(server)
            except ServerError:
                self.sync.disconnect(server)
                if i + 1 == len(self.servers):
                    raise

    # --- several ranks ---

    def scatter(
        self, requested: Callable[[], list[Sample]], prompts: Sequence[Prompt], n: int
    ) -> list[Sample]:
        """Of what `requested` returns on rank 0, this rank's: those after the prompts of the ranks
        before. Errors reach all.
        """

        def fields() -> list[tuple]:
            """All samples, without their prompts: every rank has its own."""
            return [(s.index, s.token_ids, s.logp, s.stopped, s.versions) for s in requested()]

        skip = sum(self.world.gather(len(prompts))[: self.world.rank])
        mine = self.world.once(fields)[skip * n : (skip + len(prompts)) * n]
        return [Sample(prompts[i // n], *sample) for i, sample in enumerate(mine)]
