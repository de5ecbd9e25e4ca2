"""The trainer's end of the weight sync: gather the weights into buckets, then send them to servers.

In: the model, full or sharded by FSDP2, on every rank. Out: each server has the weights, and a
label with their version.

    every rank   gather   full parameters, cast to the servers' dtype, into the buckets of rank 0
    rank 0       send     pause → start → update ∥ broadcast → finish, with a new label → resume

With sleep mode, the server has no weights and no KV cache while the trainer trains (client.py).
`send` allocates the weights again before the update, and the KV cache after the update.

All gathers end before the first send, because NCCL can deadlock if two ranks use the same two
communicators at the same time. Rank 0 may send to several servers at the same time, because their
communicators share only rank 0. Rank 0 stores a full copy of the weights. So rank 0 can send the
same weights again when a server restarts, even after the model has changed. No call in this file
waits forever. The broadcast on a daemon thread has a timeout, and so has the HTTP request on the
caller's thread. Read before: buckets.py.
Read next: worker.py (the other end), client.py (the caller).
"""

import contextlib
import dataclasses
import itertools
import secrets
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch
from torch import nn

from nanogrpo.errors import UserError
from nanogrpo.model import weights
from nanogrpo.vllm.auth import CONNECT, DISCONNECT
from nanogrpo.vllm.buckets import (
    BUCKET_BYTES,
    BroadcastGroup,
    InitInfo,
    Layout,
    SharedBuckets,
    checksum,
)
from nanogrpo.vllm.process import listen
from nanogrpo.vllm.server import Server, ServerError


class WeightSync:
    """Buckets with the current weights, which can be sent to any connected server."""

    def __init__(
        self,
        model: nn.Module,
        dtype: str,  # the dtype of the servers: float32, bfloat16 or float16
        device: torch.device,
        bucket_bytes: int = BUCKET_BYTES,
        timeout: float = 60.0,  # seconds for each request, and for each broadcast
        main: bool = True,  # whether this is rank 0, which has the buckets
    ):
        entries = [(n, dtype, list(p.shape)) for n, p in weights.parameters(model)]
        self.layout = Layout(entries, bucket_bytes)
        self.device, self.timeout = device, timeout
        self.checksums: list[int] = []  # one per bucket; the workers verify them
        # makes this run's labels and cached prefixes differ from those of other runs
        self.run = secrets.token_hex(6)
        try:
            self.shared = SharedBuckets(self.layout.sizes if main else [], device)
        except OSError as e:
            raise UserError(
                f"shared memory for the weights could not be allocated ({e.strerror}): raise the "
                "limit on file sizes (ulimit -f)."
            ) from e
        self.buckets = self.shared.buckets
        self.slots = dict(itertools.chain(*map(self.layout.views, self.buckets, itertools.count())))

    def label(self, version: int) -> str:
        """Return the name by which servers identify a version of this trainer's weights."""
        return f"{self.run}.{version}"

    @torch.no_grad()
    def gather(self, model: nn.Module) -> None:
        """Fill rank 0's buckets with the model's current weights. Every rank must call it."""
        for name, full in weights.full_parameters(model, computed=True):
            if self.buckets:
                self.slots[name].copy_(full)
        if self.device.type == "cuda":
            # the buckets must be complete before another process or communicator reads them
            torch.cuda.synchronize(self.device)
        self.checksums = [checksum(bucket) for bucket in self.buckets]

    def connect(self, server: Server, transport: str, workers: int) -> None:
        """Tell a server the layout and transport of the buckets. `workers` is the server's number
        of workers.
        """
        self.disconnect(server)
        info = InitInfo(transport, self.layout.entries, self.layout.bucket_bytes, self.timeout)
        joining = None
        if transport == "memory":
            info.handles = self.shared.handles()
        else:
            # without this socket, torch's store would listen on every network interface
            sock = listen(server.reached_from)
            info.address, info.port = server.reached_from, sock.getsockname()[1]
            info.group, info.size = secrets.token_hex(8), 1 + workers
            joining = on_thread(lambda: BroadcastGroup(info, 0, self.device, sock))
        server.post(CONNECT, {"init_info": dataclasses.asdict(info)})
        if joining:
            server.group = _result(joining, server)

    def disconnect(self, server: Server) -> None:
        group, server.group = server.group, None
        if group is not None:
            group.close()

    def send(self, server: Server, version: int, wake: bool = False) -> None:
        """Send the buckets to a connected server, as `version`.

        After a ServerError, `connect` must be called again. Requests in progress are paused, keep
        their KV cache, and continue with the new weights. New requests never reuse prefixes that
        were cached with older weights, because the prefix cache is salted (see client.py).

        If `wake` is True, the server uses sleep mode, so this method also wakes it.
        """
        group = server.group
        if wake:
            server.post("/wake_up?tags=weights")
        server.post("/pause?mode=keep&clear_cache=false")
        try:
            server.post("/start_weight_update")
        except ServerError:  # an earlier trainer ended between start and finish
            server.post("/finish_weight_update")
            server.post("/start_weight_update")
        sending = on_thread(lambda: group.send(self.buckets)) if group else None
        try:
            server.post("/update_weights", {"update_info": {"checksums": self.checksums}})
            if sending is not None:
                _result(sending, server)
        except BaseException:
            self.disconnect(server)  # ends the broadcast
            raise
        server.post("/finish_weight_update", {"weight_version": self.label(version)})
        if wake:
            server.post("/wake_up?tags=kv_cache")
        server.post("/resume")

    def close(self, servers: list[Server]) -> None:
        """Disconnect from the servers, so that they release our memory."""
        for server in servers:
            self.disconnect(server)
            # the server may be gone, or another server may have its address
            with contextlib.suppress(ServerError):
                server.post(DISCONNECT)
        self.shared.close()


def on_thread(call: Callable[[], Any]) -> Future:
    """Start a call on a daemon thread, which cannot keep the process from ending."""
    future: Future = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except Exception as e:  # raised when the result is read
            future.set_exception(e)

    threading.Thread(target=run, daemon=True).start()
    return future


def _result(future: Future, server: Server) -> Any:
    try:
        return future.result()  # the call has its own timeout
    except Exception as e:  # torch.distributed raises many kinds of errors
        raise ServerError(f"the broadcast to {server.url} failed: {e}") from e
