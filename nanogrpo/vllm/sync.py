"""The trainer's end of the weight sync: gathers the weights into buckets, and has a server take
them.

In: the model, whole or sharded by FSDP2, on every rank. Out: each server holds the weights, under a
version's label.

    every rank   gather   full parameters, in the dtype that the servers run, copied into the buckets of rank 0      (collective)
    rank 0       send     pause → start → update ∥ broadcast → finish, with the new label → resume                      (a server)

All gathers are over before anything is sent: a rank never has two communicators in flight, which is
how NCCL deadlocks. The price is one copy of the model on rank 0, and it buys something: a server
that starts again can be given the same weights at any time, while the model is already being
trained further. Nothing here waits without a limit: a broadcast cannot be timed out from outside,
so it runs on a daemon thread, while the HTTP call that can be stays on the caller's. Read before:
wire.py. Read next: engine_worker.py (the other end), vllm_engine.py (who calls this).
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
import threading

import torch
from torch import Tensor, nn

from nanogrpo.model import lora
from nanogrpo.vllm.auth import loopback
from nanogrpo.vllm.buckets import (
    BUCKET_BYTES,
    DTYPES,
    Greeting,
    Group,
    Layout,
    SharedBuckets,
    listen,
    sequence_of,
)
from nanogrpo.vllm.server import Server, ServerError

log = logging.getLogger(__name__)

TORN = "torn"  # the label of weights that are being replaced: it stays when that fails midway
TRANSPORTS = ("broadcast", "memory")


# --- the sync -------------------------------------------------------------------------------------


class WeightSync:
    """Buckets of the current weights, and a connection to each server that takes them."""

    def __init__(
        self,
        model: nn.Module,
        dtype: str,  # that the servers run: float32, bfloat16 or float16
        device: torch.device,
        transport: str = "broadcast",
        bucket_bytes: int = BUCKET_BYTES,
        timeout: float = 60.0,  # seconds for each request, and for each broadcast
        first: bool = True,  # whether this is rank 0, which holds the buckets
    ):
        self.layout = Layout(
            [(n, dtype, list(p.shape)) for n, p in lora.base_parameters(model)], bucket_bytes
        )
        self.device, self.transport, self.timeout, self.first = device, transport, timeout, first
        self.dtype = DTYPES[dtype]
        self.sequence = 0  # numbers the updates; 0: nothing gathered yet
        # tells this trainer's labels and cached prefixes from another's, or an earlier run's
        self.run = secrets.token_hex(6)
        self.shared: SharedBuckets | None = None
        self.buckets: list[Tensor] = []  # [size] uint8 each
        if first and transport == "memory":
            self.shared = SharedBuckets(self.layout.sizes, device)
            self.buckets = self.shared.buckets
        elif first:
            self.buckets = [
                torch.zeros(n, dtype=torch.uint8, device=device) for n in self.layout.sizes
            ]
        self.slots = {
            name: v for i, b in enumerate(self.buckets) for name, v in self.layout.views(b, i)
        }
        self.groups: dict[Server, Group | None] = {}  # the servers that are connected

    def label(self, version: int) -> str:
        """The weight version as the servers know it."""
        return f"{self.run}.{version}"

    def version_of(self, label: str) -> int | None:
        """The other way round; None for weights that are not this trainer's."""
        run, _, version = str(label).partition(".")
        return int(version) if run == self.run and version.isdecimal() else None

    @torch.no_grad()
    def gather(self, model: nn.Module) -> None:
        """Fills the buckets with the model's current weights. Every rank must call it; the others'
        gathers are thrown away.
        """
        for name, full in lora.full_parameters(model, self.dtype):
            if self.first:
                self.slots[name].copy_(full)
        self.sequence += 1
        if self.first:
            sequence_of(self.buckets[0]).fill_(self.sequence)
        if self.device.type == "cuda":
            # another process, or another communicator, reads the buckets next
            torch.cuda.synchronize(self.device)

    def connect(self, server: Server, workers: int) -> None:
        """Introduces this trainer to a server: the layout, and how the bytes will come. workers: of
        the server.
        """
        self.disconnect(server)
        greeting = {
            "transport": self.transport,
            "layout": self.layout.entries,
            "bucket_bytes": self.layout.bucket_bytes,
            "timeout": self.timeout,
        }
        if self.shared is not None:
            server.post(
                "/init_weight_transfer_engine",
                {"init_info": {**greeting, "handles": self.shared.handles()}},
            )
            self.groups[server] = None
            return
        address = own_address(server)
        sock = listen(address)
        where = {
            "address": address,
            "port": sock.getsockname()[1],
            "room": secrets.token_hex(8),
            "world": 1 + workers,
        }
        Greeting(**greeting, **where)  # what the worker would refuse is refused here

        def join() -> Group:
            return Group(
                address,
                where["port"],
                where["room"],
                0,
                where["world"],
                self.timeout,
                self.device,
                sock,
            )

        joining = _Daemon(join)
        server.post(
            "/init_weight_transfer_engine",
            {"init_info": {**greeting, **where}},
            timeout=self.timeout + 10,
        )
        self.groups[server] = joining.result(self.timeout)

    def disconnect(self, server: Server) -> None:
        if (group := self.groups.pop(server, None)) is not None:
            group.close()

    def send(self, server: Server, version: int) -> None:
        """Gives a server the buckets' content, as `version`. ServerError when it fails; the server
        must then be connected anew.

        Requests under way are paused, keep their cache, and go on with the new weights. New ones do
        not meet old prefixes: they salt the cache (see vllm_engine.py).
        """
        group = self.groups[server]
        server.post("/pause?mode=keep&clear_cache=false")
        try:
            server.post("/update_weight_version", {"new_version": TORN})
            try:
                server.post("/start_weight_update")
            except ServerError:  # a trainer before us ended between its start and its finish
                server.post("/finish_weight_update")
                server.post("/start_weight_update")
            sending = None
            if group is not None:
                group.announce(self.sequence)
                sending = _Daemon(lambda: [group.broadcast(b) for b in self.buckets])
            server.post(
                "/update_weights",
                {"update_info": {"sequence": self.sequence}},
                timeout=self.timeout + 10,
            )
            if sending is not None:
                sending.result(self.timeout)
            server.post("/finish_weight_update", {"weight_version": self.label(version)})
        except BaseException:
            self.disconnect(server)
            # the first error is the one to tell; if it was a hang, so is this
            with contextlib.suppress(ServerError):
                server.post("/resume", timeout=min(self.timeout, 5.0))
            raise
        server.post("/resume")

    def close(self) -> None:
        for server in list(self.groups):
            self.disconnect(server)
            with contextlib.suppress(ServerError):  # it may be gone already
                server.post("/shutdown_weight_transfer_engine", timeout=5)
        if self.shared is not None:
            self.shared.close()


class _Daemon:
    """A call on a thread that nobody has to wait for: if it never returns, the process can still
    end.
    """

    def __init__(self, call):
        self.outcome: list = []
        self.thread = threading.Thread(target=self._run, args=(call,), daemon=True)
        self.thread.start()

    def _run(self, call) -> None:
        try:
            self.outcome = [call(), None]
        # torch.distributed raises many kinds; `result` tells them on the caller's thread
        except Exception as e:
            self.outcome = [None, e]

    def result(self, timeout: float):
        self.thread.join(timeout)
        if not self.outcome:
            raise ServerError(f"the broadcast to the server did not end within {timeout:g} s")
        if self.outcome[1] is not None:
            raise ServerError(
                f"the broadcast to the server failed: {self.outcome[1]}"
            ) from self.outcome[1]
        return self.outcome[0]


def own_address(server: Server) -> str:
    """The address of this machine that the server can reach: the one from which we reach it."""
    if loopback(server.host):
        return "127.0.0.1"
    try:
        with socket.create_connection((server.host, server.port), timeout=server.timeout) as sock:
            return sock.getsockname()[0]
    except OSError as e:
        raise ServerError(f"{server} cannot be reached ({e})") from e
