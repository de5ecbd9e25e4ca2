"""A pretended machine with GPUs, for tests of what a GPU run does around its computations.

    with cuda("A", "B"):                # two GPUs, with these UUIDs; tensors stay on the CPU
        BroadcastGroup(info, 0, torch.device("cuda", 0))        # by a pretended NCCL

The pretended NCCL passes tensors on with gloo. Like torch's, it has a watchdog, which ends the
process if an operation takes longer than the timeout of the group, and its `wait` blocks only with
a timeout.
"""

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist

from nanogrpo.distributed.world import World
from nanogrpo.vllm import buckets, sync

WORLD = World(0, 1, torch.device("cuda", 0))
# These groups are kept: the destructor of a gloo group waits for its operations, and the garbage
# collector would call it in the middle of another broadcast.
ABORTED = []


class Work:
    def __init__(self, group: "PretendedNCCL", work: dist.Work):
        self.group, self.work, self.begin = group, work, time.monotonic()
        self.watchdog = threading.Timer(group.timeout.total_seconds(), self._watch)
        self.watchdog.daemon = True
        self.watchdog.start()

    def _watch(self) -> None:
        if not self.is_completed():
            os.abort()

    def is_completed(self) -> bool:
        return self.group.aborted or self.work.is_completed()

    def wait(self, timeout: timedelta | None = None) -> None:
        while timeout is not None and not self.is_completed():
            if time.monotonic() - self.begin > timeout.total_seconds():
                self.group.late += 1
                self.group.abort()
                self.watchdog.cancel()
                raise RuntimeError("the operation timed out")
            time.sleep(0.001)
        if self.is_completed():
            self.watchdog.cancel()
        if self.work.is_completed() and not self.group.aborted:
            self.work.wait()


class PretendedNCCL:
    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta):
        self.timeout, self.aborted, self.late = timeout, False, 0
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=120)
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        self.gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, options)

    def broadcast(self, tensors: list[torch.Tensor], options: dist.BroadcastOptions) -> Work:
        return Work(self, self.gloo.broadcast(tensors, options))

    def abort(self) -> None:
        if not self.aborted:
            self.aborted = True
            self.gloo.abort()
            ABORTED.append(self)


@contextlib.contextmanager
def cuda(*uuids: str, free: float = 70.0, total: float = 80.0) -> Iterator[SimpleNamespace]:
    """Pretend that torch sees these GPUs, each with so many GiB. Yield what is called."""
    called = SimpleNamespace(empty_cache=0)
    zeros, shared = torch.zeros, buckets.SharedBuckets

    def count() -> None:
        called.empty_cache += 1

    def properties(device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(uuid=uuids[device.index or 0], total_memory=int(total * 2**30))

    patches = {
        torch: {"zeros": lambda *size, device=None, **more: zeros(*size, **more)},
        torch.cuda: {
            "device_count": lambda: len(uuids),
            "get_device_properties": properties,
            "synchronize": lambda device: None,
            "empty_cache": count,
            "mem_get_info": lambda device: (int(free * 2**30), int(total * 2**30)),
            "memory_allocated": lambda device: 0,
        },
        torch.cuda.nccl: {"version": lambda: (2, 29, 7)},
        dist: {"ProcessGroupNCCL": PretendedNCCL},
        sync: {"SharedBuckets": lambda sizes, device: shared(sizes, torch.device("cpu"))},
    }
    with contextlib.ExitStack() as stack:
        for module, values in patches.items():
            stack.enter_context(mock.patch.multiple(module, create=True, **values))
        yield called
