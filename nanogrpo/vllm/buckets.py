"""The format of a weight sync, shared by the trainer and the server: how weights are laid out in
buckets, and the two ways in which buckets are sent.

In: the names, dtypes and shapes of a checkpoint. Out: a `Layout`, which maps each tensor to a byte
range in a bucket, and two transports from the trainer to the workers of a server:

    broadcast  a process group of the trainer and all workers: NCCL on GPUs, gloo on CPUs
    memory     the workers map the trainer's own buckets: shared memory on a CPU, CUDA IPC on a GPU

Everything that a peer sends is JSON and is checked here before anything is allocated, mapped or
joined. Nothing is pickled. vLLM's workers import this file too, so it imports neither vLLM nor our
model. Read next: sync.py (the trainer's end), then worker.py (the server's end).
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import re
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nanogrpo.errors import UserError
from nanogrpo.vllm.auth import loopback

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Large enough to reach full bandwidth, but small compared with a model.
BUCKET_BYTES = 256 << 20
ALIGN = 64  # bytes; each tensor starts on a cache line, which suits every dtype
# Bytes before the first tensor of bucket 0. The first 8 contain the number of the update.
HEADER = 64
# A part of the names of a vision encoder's weights, which come before those of the decoder.
ENCODER = ".visual."
LARGEST = 1 << 44  # maximum bytes of a model, 16 TiB: above any model, below integer overflow
FAR = timedelta(days=7)  # the timeout of a NCCL group: far above ours, which acts first
POLL = 0.0005  # seconds between two looks at a NCCL broadcast; its own wait takes up to 10 ms


def device_facts(device: torch.device) -> dict[str, str]:
    """Return the UUID of a process's GPU and its version of NCCL; both are "" on a CPU."""
    if device.type != "cuda":
        return {"gpu": "", "nccl": ""}
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    return {"gpu": uuid, "nccl": ".".join(map(str, torch.cuda.nccl.version()))}


# --- the layout ---


@dataclass(frozen=True)
class Slot:
    """The position of one tensor in a bucket."""

    name: str
    dtype: torch.dtype
    shape: list[int]
    bucket: int
    offset: int  # bytes from the start of the bucket
    nbytes: int


class Layout:
    """Tensors stored one after another in buckets of at most `bucket_bytes`. A larger tensor gets a
    bucket of its own.

    entries: [name, dtype name, shape] of each tensor, in the order of the model's layers. vLLM can
    then load one layer after another, and never has more than one incomplete layer. Raises
    ValueError if the entries cannot describe a model.

    >>> Layout([("a", "float32", [2, 3]), ("b", "float32", [1])]).sizes  # 64 + 24 → 128, + 4
    [132]
    """

    def __init__(self, entries: Sequence[Sequence], bucket_bytes: int = BUCKET_BYTES):
        _integer("bucket_bytes", bucket_bytes, 1, LARGEST)
        if not isinstance(entries, (list, tuple)) or not entries:
            raise ValueError("the layout must be a list with at least one [name, dtype, shape]")
        self.entries = [_entry(e) for e in entries]
        self.bucket_bytes = bucket_bytes
        self.slots: list[Slot] = []
        self.sizes = [HEADER]  # bytes of each bucket
        for name, dtype, shape in self.entries:
            nbytes = DTYPES[dtype].itemsize * math.prod(shape)
            start = -(-self.sizes[-1] // ALIGN) * ALIGN
            # the first tensor follows the header, whatever its size
            full = start + nbytes > bucket_bytes
            if self.slots and (full or (ENCODER in self.slots[-1].name and ENCODER not in name)):
                self.sizes.append(0)
                start = 0
            bucket = len(self.sizes) - 1
            self.slots.append(Slot(name, DTYPES[dtype], shape, bucket, start, nbytes))
            self.sizes[-1] = start + nbytes
        if sum(self.sizes) > LARGEST:
            raise ValueError(f"the layout has {sum(self.sizes)} bytes, more than any model")
        if len({s.name for s in self.slots}) < len(self.slots):
            raise ValueError("the layout names a tensor twice")
        # the number of buckets with the weights of the encoder, and only these
        self.encoder = max((s.bucket + 1 for s in self.slots if ENCODER in s.name), default=0)

    def views(self, bucket: Tensor, index: int) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of one bucket, [size] uint8, as views of it."""
        for s in self.slots:
            if s.bucket == index:
                yield s.name, bucket[s.offset : s.offset + s.nbytes].view(s.dtype).view(s.shape)


def sequence_of(bucket: Tensor) -> Tensor:
    """Return a view of bucket 0, [1] int64: the number of the update that it contains."""
    return bucket[:8].view(torch.int64)


def checksum(bucket: Tensor) -> int:
    """Return the sum of the bytes of a bucket in words of 64 bits, modulo 2^64."""
    words = len(bucket) // 8 * 8
    return int(bucket[:words].view(torch.int64).sum() + bucket[words:].sum())


def _integer(name: str, value: Any, low: int, high: int) -> int:
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"{name} is {value!r} but must be an integer from {low} to {high}")
    return value


def _entry(entry: Any) -> tuple[str, str, list[int]]:
    name, dtype, shape = entry if isinstance(entry, (list, tuple)) and len(entry) == 3 else [""] * 3
    known = re.fullmatch(r"[\w.]{1,300}", str(name)) and str(dtype) in DTYPES
    if not known or not isinstance(shape, (list, tuple)) or len(shape) > 5:
        raise ValueError(f"the layout's entry {entry!r} is not [name, dtype, at most 5 sizes]")
    return str(name), str(dtype), [_integer(f"a size of {name}", n, 1, 1 << 32) for n in shape]


# --- the connection ---


@dataclass
class InitInfo:
    """The body of /init_weight_transfer_engine: everything that does not change between updates."""

    transport: str  # broadcast or memory
    layout: list  # [[name, dtype, shape], …]
    bucket_bytes: int
    timeout: float  # seconds for which a worker waits for the trainer
    address: str = ""  # broadcast: the address of the trainer's store
    port: int = 0
    group: str = ""  # a random name, so two groups never mix
    size: int = 0  # number of ranks: the trainer is rank 0, the workers are ranks 1, 2, …
    handles: Sequence = ()  # memory: one per bucket, from `SharedBuckets.handles`

    def __post_init__(self):
        self.plan = Layout(self.layout, self.bucket_bytes)
        if type(self.timeout) not in (int, float) or not 0 < self.timeout <= 86400:
            raise ValueError(f"timeout is {self.timeout!r} but must be seconds, at most a day")
        if self.transport == "broadcast":
            _integer("port", self.port, 1, 65535)
            _integer("size", self.size, 2, 65536)
            for name in ("address", "group"):
                if not re.fullmatch(r"[\w.:%-]{1,255}", str(getattr(self, name))):
                    raise ValueError(f"{name} is missing or has characters that are not allowed")
        elif self.transport == "memory":
            buckets = len(self.plan.sizes)
            if not isinstance(self.handles, (list, tuple)) or len(self.handles) != buckets:
                raise ValueError(f"the layout has {buckets} buckets and needs one handle for each")
        else:
            raise ValueError(f"transport is {self.transport!r} but must be broadcast or memory")


# --- broadcast ---


def listen(address: str) -> socket.socket:
    """Return a socket that listens on a free port of one address.

    By default, torch's store would listen on every network interface of the machine.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.bind((address, 0))
    sock.listen(64)
    return sock


class BroadcastGroup:
    """A process group of the trainer (rank 0) and the workers, separate from their other groups.

    The store through which the ranks connect also contains the number of the update that the
    trainer is about to send. So if anyone but the trainer tells a worker to receive, the worker
    refuses immediately instead of waiting for a broadcast that never comes.
    """

    def __init__(
        self,
        info: InitInfo,
        rank: int,
        device: torch.device,
        sock: socket.socket | None = None,  # the trainer's socket, which serves the store
    ):
        self.timeout = timedelta(seconds=info.timeout)
        # the store closes the socket
        serve: dict[str, Any] = (
            {"is_master": True, "master_listen_fd": sock.detach()} if sock else {}
        )
        store = dist.TCPStore(
            info.address, info.port, None, timeout=self.timeout, wait_for_workers=False, **serve
        )
        self.store = dist.PrefixStore(info.group, store)
        # NCCL itself would wait forever for a rank that never comes. This wait has a timeout.
        self.store.set(f"rank {rank}", "")
        self.store.wait([f"rank {other}" for other in range(info.size)])
        self.device = device
        self.group: Any
        if device.type == "cuda":
            self.group = _nccl(self.store, rank, info.size)
        else:
            gloo: Any = dist.ProcessGroupGloo  # its type stub lacks _Options
            options = gloo._Options()
            options._timeout = self.timeout
            # by default gloo uses the interface that the machine's name resolves to
            options._devices = [
                gloo.create_device(hostname="127.0.0.1")
                if loopback(info.address)
                else gloo.create_default_device()
            ]
            self.group = gloo(self.store, rank, info.size, options)
        # NCCL connects the ranks, and reads its settings, in the first operation.
        self.broadcast(torch.zeros(1, dtype=torch.uint8, device=device))

    def announce(self, sequence: int) -> None:
        """Publish the number of the next update. Return when the workers can see it."""
        self.store.set("update", str(sequence))
        # `set` only sends. An answer to `get` means that the store has processed the `set`.
        self.store.get("update")

    def announced(self, sequence: int) -> bool:
        return self.store.check(["update"]) and self.store.get("update") == str(sequence).encode()

    def broadcast(self, bucket: Tensor) -> None:
        """Copy the trainer's bucket, [size] uint8 on the group's device, into the buckets of all
        workers. Raises RuntimeError after the timeout, or if a peer is gone; the group cannot be
        used afterwards.
        """
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        work = self.group.broadcast([bucket], options)
        if self.device.type == "cuda":
            deadline = time.monotonic() + self.timeout.total_seconds()
            while not work.is_completed() and time.monotonic() < deadline:
                time.sleep(POLL)
        # With a timeout, NCCL's wait blocks the host too, and aborts an operation that is late.
        work.wait(self.timeout)

    def send(self, buckets: Sequence[Tensor]) -> None:
        for bucket in buckets:
            self.broadcast(bucket)

    def close(self) -> None:
        self.group.abort()  # also releases a peer that is blocked in a broadcast
        del self.group, self.store


def _nccl(store: dist.Store, rank: int, size: int) -> Any:
    """Return a NCCL group that never ends this process.

    A group has a watchdog, which ends the process if an operation exceeds the group's timeout or a
    peer dies. There is none if this variable is set while the group is created. `broadcast` has a
    timeout of its own instead, and raises.
    """
    variable = "TORCH_NCCL_BLOCKING_WAIT"
    before = os.environ.get(variable)
    os.environ[variable] = "1"
    try:
        nccl: Any = dist.ProcessGroupNCCL  # its type stub lacks this overload
        return nccl(store, rank, size, FAR)
    finally:
        os.environ.pop(variable)
        if before is not None:
            os.environ[variable] = before


# --- memory ---


class SharedBuckets:
    """Buckets that other processes of the same user can map, on this machine or this GPU."""

    def __init__(self, sizes: Sequence[int], device: torch.device):
        self.device = device
        self.files: list[int] = []
        self.buckets: list[Tensor] = []  # [size] uint8 each
        for size in sizes:
            if device.type == "cuda":
                with _fixed_segments():
                    self.buckets.append(torch.zeros(size, dtype=torch.uint8, device=device))
            else:
                # Memory with a file descriptor but no name: nothing is left behind, however this
                # process ends.
                self.files.append(fd := os.memfd_create("nanogrpo"))
                try:
                    os.ftruncate(fd, size)
                except OSError as e:
                    raise UserError(
                        f"{size:,} bytes of shared memory for the weights could not be allocated "
                        f"({e.strerror}): raise the limit on file sizes (ulimit -f)."
                    ) from e
                self.buckets.append(torch.frombuffer(mmap.mmap(fd, size), dtype=torch.uint8))

    def handles(self) -> list[dict]:
        """Return one handle per bucket, made of JSON types, for `attach`."""
        if self.device.type != "cuda":
            return [{"path": f"/proc/{os.getpid()}/fd/{fd}"} for fd in self.files]
        uuid = device_facts(self.device)["gpu"]
        shared = [b.untyped_storage()._share_cuda_()[1:] for b in self.buckets]
        return [
            {"gpu": uuid, "parts": [p.hex() if isinstance(p, bytes) else p for p in parts]}
            for parts in shared
        ]

    def close(self) -> None:
        while self.files:
            os.close(self.files.pop())


@contextlib.contextmanager
def _fixed_segments() -> Iterator[None]:
    """Allocate memory that other processes can map, which those of expandable segments cannot."""
    conf = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    if "expandable_segments:True" not in conf:
        yield
        return
    # torch resets all settings that are not named, so all are passed again.
    torch._C._accelerator_setAllocatorSettings(conf.replace("segments:True", "segments:False"))
    try:
        yield
    finally:
        torch._C._accelerator_setAllocatorSettings(conf)


def attach(handle: Any, size: int, device: torch.device) -> Tensor:
    """Map a bucket of another process: [size] uint8. Raises ValueError for a bad handle."""
    if not isinstance(handle, dict):
        raise ValueError("a handle must be an object")
    if device.type != "cuda":
        path = handle.get("path")
        # A trainer may ask a worker to open an anonymous file of its own, but no other file.
        if not isinstance(path, str) or not re.fullmatch(r"/proc/\d{1,10}/fd/\d{1,7}", path):
            raise ValueError("the handle's path is not a shared bucket")
        try:
            if not os.readlink(path).startswith("/memfd:nanogrpo"):
                raise ValueError("the handle's path is not a shared bucket")
            with open(path, "r+b") as file:
                return torch.frombuffer(mmap.mmap(file.fileno(), size), dtype=torch.uint8)
        except OSError as e:
            raise ValueError(
                f"the shared bucket cannot be opened ({e.strerror}): are trainer and server on one "
                "machine?"
            ) from e
    if handle.get("gpu") != device_facts(device)["gpu"]:
        raise ValueError("the shared bucket is on another GPU: use the broadcast transport")
    parts = handle.get("parts")
    if not isinstance(parts, list) or len(parts) != 7:
        raise ValueError("the handle's parts are not a CUDA allocation")
    raw = [bytes.fromhex(p) if isinstance(p, str) else p for p in parts]
    storage = torch.UntypedStorage._new_shared_cuda(device.index or 0, *raw)
    if storage.nbytes() < size:
        raise ValueError("the shared bucket is smaller than its layout")
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (size,), (1,))
