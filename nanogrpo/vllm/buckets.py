"""The format of a weight sync, which trainer and server share: where each tensor is in the buckets,
and the two ways in which buckets are sent.

In: the names, dtypes and shapes of a checkpoint. Out: a `Layout`, which maps each tensor to a byte
range in a bucket, and two transports from the trainer to the workers of a server:

* broadcast: the trainer and all workers form a process group, with NCCL on GPUs and gloo on CPUs.
* memory: the workers map the trainer's own buckets, by CUDA IPC on a GPU and by shared memory on a
  CPU.

Nothing is pickled. vLLM's workers import this file too, so it imports neither vLLM nor our model.
Read next: sync.py (the trainer's end), then worker.py (the server's end).
"""

import math
import mmap
import os
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# large enough for the full bandwidth, but small compared with a model
BUCKET_BYTES = 256 << 20
ALIGN = 64  # bytes; each tensor starts at a multiple of this number, which suits every dtype
FAR = timedelta(days=7)  # the timeout of an NCCL group, far longer than our own timeout
POLL = 0.0005  # seconds between two checks of an NCCL broadcast; NCCL's own wait takes up to 10 ms


def device_facts(device: torch.device) -> dict[str, str]:
    """Return the UUID of this process's GPU and the version of NCCL; both are "" on a CPU."""
    if device.type != "cuda":
        return {"gpu": "", "nccl": ""}
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    return {"gpu": uuid, "nccl": ".".join(map(str, torch.cuda.nccl.version()))}


# --- the layout ---


class Layout:
    """Tensors stored one after another in buckets of at most `bucket_bytes`. A larger tensor gets
    its own bucket.

    `entries` has [name, dtype name, shape] of each tensor, in the order of the model's layers. In
    this order, vLLM can load one layer after another, and at most one layer is incomplete at any
    time.

    >>> Layout([("a", "float32", [2, 3]), ("b", "float32", [1])]).sizes  # 24 → 64, + 4
    [68]
    """

    def __init__(self, entries: Sequence[Sequence], bucket_bytes: int = BUCKET_BYTES):
        self.entries, self.bucket_bytes = entries, bucket_bytes
        self.sizes = [0]  # bytes of each bucket
        # the tensors of each bucket: name, dtype, shape, first byte, and the byte after the last
        self.contents: list[list[tuple]] = [[]]
        for name, dtype, shape in entries:
            nbytes = DTYPES[dtype].itemsize * math.prod(shape)
            start = -(-self.sizes[-1] // ALIGN) * ALIGN
            if start and start + nbytes > bucket_bytes:
                self.sizes.append(0)
                self.contents.append([])
                start = 0
            self.sizes[-1] = end = start + nbytes
            self.contents[-1].append((name, DTYPES[dtype], shape, start, end))

    def views(self, bucket: Tensor, index: int) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of one bucket, [size] uint8, as views of it."""
        for name, dtype, shape, start, end in self.contents[index]:
            yield name, bucket[start:end].view(dtype).view(shape)


def checksum(bucket: Tensor) -> int:
    """Return the sum of a bucket's 64-bit words, modulo 2^64. Left-over bytes are added singly."""
    words = len(bucket) // 8 * 8
    return int(bucket[:words].view(torch.int64).sum() + bucket[words:].sum())


# --- the connection ---


@dataclass
class InitInfo:
    """The body of /init_weight_transfer_engine: everything that does not change between updates."""

    transport: str  # broadcast or memory
    layout: Sequence  # [[name, dtype, shape], …]
    bucket_bytes: int
    timeout: float  # seconds for which a worker waits for the trainer
    address: str = ""  # broadcast: the address of the trainer's store
    port: int = 0
    group: str = ""  # a random name, so two groups never mix
    size: int = 0  # number of ranks: the trainer is rank 0, the workers are ranks 1, 2, …
    handles: Sequence = ()  # memory: one per bucket, from `SharedBuckets.handles`

    def __post_init__(self):
        self.plan = Layout(self.layout, self.bucket_bytes)


# --- broadcast ---


class BroadcastGroup:
    """A process group of the trainer (rank 0) and the workers, separate from their other groups."""

    def __init__(
        self,
        info: InitInfo,
        rank: int,
        device: torch.device,
        sock: socket.socket | None = None,  # the trainer's socket for the store
    ):
        self.timeout = timedelta(seconds=info.timeout)
        store = dist.TCPStore(
            info.address,
            info.port,
            is_master=sock is not None,
            timeout=self.timeout,
            wait_for_workers=False,
            master_listen_fd=sock.detach() if sock else None,  # the store closes it
        )
        self.store = dist.PrefixStore(info.group, store)
        # NCCL itself would wait forever for a missing rank. `store.wait` has a timeout.
        self.store.set(f"rank {rank}", "")
        self.store.wait([f"rank {other}" for other in range(info.size)])
        self.device = device
        if device.type == "cuda":
            self.group = _nccl(self.store, rank, info.size)
        else:
            gloo: Any = dist.ProcessGroupGloo  # its type stub lacks _Options
            options = gloo._Options()
            options._timeout = self.timeout
            # by default, gloo would use the interface to which the machine's name resolves
            options._devices = [
                gloo.create_device(hostname=info.address)
                if info.address in ("127.0.0.1", "::1")
                else gloo.create_default_device()
            ]
            self.group = gloo(self.store, rank, info.size, options)
        # NCCL connects the ranks and reads its settings only in the first operation.
        self.broadcast(torch.zeros(1, dtype=torch.uint8, device=device))

    def broadcast(self, bucket: Tensor) -> None:
        """Copy the trainer's bucket, [size] uint8 on the group's device, into the buckets of all
        workers. Raises RuntimeError after the timeout, or if a peer is gone. After an error, the
        group cannot be used again.
        """
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        work = self.group.broadcast([bucket], options)
        if self.device.type == "cuda":
            deadline = time.monotonic() + self.timeout.total_seconds()
            while not work.is_completed() and time.monotonic() < deadline:
                time.sleep(POLL)
        # With a timeout, NCCL's wait also blocks the host, and aborts an operation that is late.
        work.wait(self.timeout)

    def send(self, buckets: Sequence[Tensor]) -> None:
        for bucket in buckets:
            self.broadcast(bucket)

    def close(self) -> None:
        self.group.abort()  # this also ends a broadcast for which a peer is waiting


def _nccl(store: dist.Store, rank: int, size: int) -> Any:
    """Return an NCCL group that never ends this process.

    A group has a watchdog, which ends the process if an operation exceeds the group's timeout or a
    peer dies. The group has no watchdog if TORCH_NCCL_BLOCKING_WAIT is set while the group is
    created. Instead of the watchdog, `broadcast` has a timeout, after which it raises an error.
    """
    os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"
    try:
        nccl: Any = dist.ProcessGroupNCCL  # torch's type stub lacks this constructor
        return nccl(store, rank, size, FAR)
    finally:
        os.environ.pop("TORCH_NCCL_BLOCKING_WAIT", None)


# --- memory ---


class SharedBuckets:
    """Buckets that other processes of the same user on this machine can map.

    On a GPU, torch's allocator must not use expandable segments: see distributed/world.py.
    """

    def __init__(self, sizes: Sequence[int], device: torch.device):
        self.files = []
        self.buckets = []  # [size] uint8 each
        for size in sizes:
            if device.type == "cuda":
                self.buckets.append(torch.zeros(size, dtype=torch.uint8, device=device))
            else:
                # This memory has no file name, so nothing is left behind, however the process ends.
                self.files.append(fd := os.memfd_create("nanogrpo"))
                os.ftruncate(fd, size)
                self.buckets.append(torch.frombuffer(mmap.mmap(fd, size), dtype=torch.uint8))

    def handles(self) -> list[list]:
        """Return one handle per bucket, made of JSON types, for `attach`."""
        if self.files:
            return [[os.getpid(), fd] for fd in self.files]
        shared = [b.untyped_storage()._share_cuda_()[1:] for b in self.buckets]
        return [[p.hex() if isinstance(p, bytes) else p for p in parts] for parts in shared]

    def close(self) -> None:
        while self.files:
            os.close(self.files.pop())


def attach(handle: list, size: int, device: torch.device) -> Tensor:
    """Map a bucket of another process: [size] uint8."""
    if device.type != "cuda":
        pid, fd = handle  # both parts are numbers, so a handle cannot name a file
        with open(f"/proc/{pid:d}/fd/{fd:d}", "r+b") as file:
            return torch.frombuffer(mmap.mmap(file.fileno(), size), dtype=torch.uint8)
    raw = [bytes.fromhex(p) if isinstance(p, str) else p for p in handle]
    # This starts CUDA in a process that has not used it yet. The next call does not.
    bucket = torch.empty(0, dtype=torch.uint8, device=device)
    storage = torch.UntypedStorage._new_shared_cuda(device.index or 0, *raw)
    return bucket.set_(storage, 0, (size,), (1,))
