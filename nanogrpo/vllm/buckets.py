"""What the two ends of the weight sync agree on: how weights lie in buckets, and how the buckets
cross.

In: the names, dtypes and shapes of a checkpoint. Out: a `Layout` (which bytes of which bucket are
which tensor), and two ways to bring buckets from the trainer to the workers of a server:

    broadcast  a process group of one trainer and all workers: NCCL between GPUs, gloo between CPUs (`Group`)
    memory     the workers map the trainer's own buckets: shared memory on a CPU, CUDA IPC on one GPU (`share`, `attach`)

Everything that a peer says is JSON and is checked here, before anything is allocated, mapped or
joined; nothing is pickled. Imported by both ends, so that it may import neither vLLM nor our model.
Read next: sync.py (the trainer's end), then engine_worker.py (the server's).
"""

from __future__ import annotations

import base64
import mmap
import os
import re
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from nanogrpo.vllm.auth import loopback

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# one broadcast carries so much: large enough for full bandwidth, small beside a model
BUCKET_BYTES = 256 << 20
ALIGN = 64  # bytes: tensors start on cache lines, and on multiples of every dtype's size
# bytes before the first tensor of bucket 0: the sequence number of the update, in 8 of them
HEADER = 64
LARGEST = 1 << 44  # bytes of a model: 16 TiB, far above any, far below where sizes overflow


# --- the layout -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Slot:
    """Where one tensor lies."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    bucket: int
    offset: int  # bytes from the start of the bucket
    nbytes: int


class Layout:
    """Tensors in their order, laid one after the other into buckets of at most `bucket_bytes` (a
    larger tensor gets its own).

    entries: (name, dtype name, shape) of each tensor, in the order of the model's layers: vLLM then
    finishes one layer after the other and keeps no more than one waiting. Raises ValueError on
    anything that no model could be.

    >>> Layout([("a", "float32", [2, 3]), ("b", "float32", [1])]).sizes      # 64 (header) + 24, aligned to 128, + 4
    [132]
    """

    def __init__(self, entries: Sequence[Sequence], bucket_bytes: int = BUCKET_BYTES):
        _whole("bucket_bytes", bucket_bytes, 1, LARGEST)
        if not isinstance(entries, (list, tuple)) or not entries:
            raise ValueError(
                "the layout must be a list of [name, dtype, shape] with at least one entry"
            )
        self.entries = [_entry(e) for e in entries]
        self.bucket_bytes = bucket_bytes
        self.slots: list[Slot] = []
        self.sizes = [HEADER]  # bytes of each bucket
        for name, dtype, shape in self.entries:
            nbytes = DTYPES[dtype].itemsize
            for n in shape:
                nbytes *= n
            start = -(-self.sizes[-1] // ALIGN) * ALIGN
            # the first tensor joins the header whatever its size
            if self.slots and start + nbytes > bucket_bytes:
                self.sizes.append(0)
                start = 0
            self.slots.append(
                Slot(name, DTYPES[dtype], tuple(shape), len(self.sizes) - 1, start, nbytes)
            )
            self.sizes[-1] = start + nbytes
        if sum(self.sizes) > LARGEST:
            raise ValueError(f"the layout holds {sum(self.sizes)} bytes, more than any model")
        if len({s.name for s in self.slots}) < len(self.slots):
            raise ValueError("the layout names a tensor twice")

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, without header and padding."""
        return sum(s.nbytes for s in self.slots)

    def views(self, bucket: Tensor, index: int) -> Iterator[tuple[str, Tensor]]:
        """The tensors of one bucket, [size] uint8, as views into it."""
        for s in self.slots:
            if s.bucket == index:
                yield s.name, bucket[s.offset : s.offset + s.nbytes].view(s.dtype).view(s.shape)


def sequence_of(bucket: Tensor) -> Tensor:
    """[1] int64: the view of bucket 0 that numbers the update it holds."""
    return bucket[:8].view(torch.int64)


def _whole(name: str, value: object, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"{name} is {value!r} but must be a whole number from {low} to {high}")
    return value


def _entry(entry: object) -> tuple[str, str, list[int]]:
    if not isinstance(entry, (list, tuple)) or len(entry) != 3:
        raise ValueError(f"the layout's entry {entry!r} is not [name, dtype, shape]")
    name, dtype, shape = entry
    if not isinstance(name, str) or not re.fullmatch(r"[\w.]{1,300}", name):
        raise ValueError(f"the layout's name {str(name)[:80]!r} is not that of a parameter")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"the dtype {dtype!r} of {name} is none of {', '.join(DTYPES)}")
    if not isinstance(shape, (list, tuple)) or len(shape) > 4:
        raise ValueError(f"the shape of {name} is not a list of at most 4 sizes")
    return name, dtype, [_whole(f"a size of {name}", n, 1, 1 << 32) for n in shape]


# --- what the trainer tells the workers -----------------------------------------------------------


@dataclass
class Greeting:
    """`init_info` of the route /init_weight_transfer_engine: what stays the same between updates.
    All of it is JSON.
    """

    transport: str  # broadcast or memory
    layout: list  # [[name, dtype, shape], …]
    bucket_bytes: int
    timeout: float  # seconds that a worker waits for the trainer before it gives up
    address: str = ""  # broadcast: where the trainer's store listens,
    port: int = 0
    # the name of this group in it: a random word, so that two groups never mix,
    room: str = ""
    world: int = 0  #        and how many take part: the trainer is rank 0, the workers 1 …
    handles: tuple = ()  # memory: one a bucket, as `share` made them

    def __post_init__(self):
        self.plan = Layout(self.layout, self.bucket_bytes)
        if (
            isinstance(self.timeout, bool)
            or not isinstance(self.timeout, (int, float))
            or not 0 < self.timeout <= 86400
        ):
            raise ValueError(
                f"timeout is {self.timeout!r} but must be seconds, above 0 and at most a day"
            )
        if self.transport == "broadcast":
            _whole("port", self.port, 1, 65535)
            _whole("world", self.world, 2, 65536)
            for name in ("address", "room"):
                if not isinstance(getattr(self, name), str) or not re.fullmatch(
                    r"[\w.:%-]{1,255}", getattr(self, name)
                ):
                    raise ValueError(f"{name} is missing or holds characters that it cannot have")
        elif self.transport == "memory":
            if not isinstance(self.handles, (list, tuple)) or len(self.handles) != len(
                self.plan.sizes
            ):
                raise ValueError(
                    f"the layout has {len(self.plan.sizes)} buckets, each of which needs one handle"
                )
        else:
            raise ValueError(f"transport is {self.transport!r} but must be broadcast or memory")


# --- broadcast ------------------------------------------------------------------------------------


def listen(address: str) -> socket.socket:
    """A socket for the store on a free port of one address. torch alone would listen on every
    interface of the machine.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.bind((address, 0))
    sock.listen(64)
    return sock


class Group:
    """A process group of one trainer (rank 0) and the workers (1 …), beside whatever groups either
    side has already.

    The store that the ranks meet in also says which update the trainer is about to send: so a
    worker that is told to receive by someone else refuses at once, instead of waiting for a
    broadcast that never comes.
    """

    def __init__(
        self,
        address: str,
        port: int,
        room: str,
        rank: int,
        world: int,
        timeout: float,
        device: torch.device,
        sock: socket.socket | None = None,  # the trainer's, which then serves the store
    ):
        wait = timedelta(seconds=timeout)
        fd = {"master_listen_fd": sock.detach()} if sock else {}  # the store closes it
        host = dist.TCPStore(
            address, port, None, is_master=bool(fd), timeout=wait, wait_for_workers=False, **fd
        )
        self.store = dist.PrefixStore(room, host)
        if device.type == "cuda":
            self.group = dist.ProcessGroupNCCL(self.store, rank, world, wait)
        else:
            options = dist.ProcessGroupGloo._Options()
            options._timeout = wait
            # the default is the interface that the machine's name resolves to
            if loopback(address):
                options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
            else:
                options._devices = [dist.ProcessGroupGloo.create_default_device()]
            self.group = dist.ProcessGroupGloo(self.store, rank, world, options)
        self.device = device

    def announce(self, sequence: int) -> None:
        """Returns when the workers can see it."""
        self.store.set("update", str(sequence))
        # `set` only sends; an answer means that the store has taken what was sent before
        self.store.get("update")

    def announced(self, sequence: int) -> bool:
        return self.store.check(["update"]) and self.store.get("update") == str(sequence).encode()

    def broadcast(self, bucket: Tensor) -> None:
        """bucket: [size] uint8, on the group's device; the trainer's content arrives everywhere.
        Returns when it has.
        """
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        self.group.broadcast([bucket], options).wait()
        if self.device.type == "cuda":  # NCCL's wait only orders streams
            torch.cuda.current_stream(self.device).synchronize()

    def close(self) -> None:
        if hasattr(self.group, "abort"):
            self.group.abort()  # also frees a peer that is inside a broadcast
        del self.group, self.store


# --- memory ---------------------------------------------------------------------------------------


class SharedBuckets:
    """The trainer's buckets, which processes of the same user on this machine (CPU), or on this
    GPU, can map.
    """

    def __init__(self, sizes: Sequence[int], device: torch.device):
        self.device = device
        self.files: list[int] = []
        self.buckets: list[Tensor] = []  # [size] uint8 each
        for size in sizes:
            if device.type == "cuda":
                self.buckets.append(torch.zeros(size, dtype=torch.uint8, device=device))
            else:
                # Memory behind a file descriptor, without a name: nothing is left behind, however
                # this process ends.
                fd = os.memfd_create("nanogrpo")
                os.ftruncate(fd, size)
                self.files.append(fd)
                self.buckets.append(torch.frombuffer(mmap.mmap(fd, size), dtype=torch.uint8))

    def handles(self) -> list[dict]:
        """One a bucket, of JSON types."""
        if self.device.type != "cuda":
            return [{"path": f"/proc/{os.getpid()}/fd/{fd}"} for fd in self.files]
        uuid = str(torch.cuda.get_device_properties(self.device).uuid)
        out = []
        for b in self.buckets:
            parts = b.untyped_storage()._share_cuda_()
            coded = [
                {"base64": base64.b64encode(p).decode()} if isinstance(p, bytes) else p
                for p in parts[1:]
            ]
            out.append({"gpu": uuid, "offset": b.storage_offset(), "parts": coded})
        return out

    def close(self) -> None:
        for fd in self.files:
            os.close(fd)
        self.files = []


def attach(handle: object, size: int, device: torch.device) -> Tensor:
    """The other side of `SharedBuckets.handles`: [size] uint8, the very bytes of the trainer.
    ValueError on any other handle.
    """
    if not isinstance(handle, dict):
        raise ValueError("a handle must be an object")
    if device.type != "cuda":
        path = handle.get("path")
        # Only this form: the worker may be asked to open an anonymous file of a process, and
        # nothing else of the machine.
        if not isinstance(path, str) or not re.fullmatch(r"/proc/\d{1,10}/fd/\d{1,7}", path):
            raise ValueError("the handle's path is not that of a shared bucket")
        try:
            if not os.readlink(path).startswith("/memfd:nanogrpo"):
                raise ValueError("the handle's path is not that of a shared bucket")
            with open(path, "r+b") as file:
                return torch.frombuffer(mmap.mmap(file.fileno(), size), dtype=torch.uint8)
        except OSError as e:
            raise ValueError(
                f"the shared bucket cannot be opened ({e.strerror}): are trainer and server on one machine?"
            ) from e
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    if handle.get("gpu") != uuid:
        raise ValueError("the shared bucket is on another GPU: use the broadcast transport")
    parts = handle.get("parts")
    if not isinstance(parts, list) or len(parts) != 7:
        raise ValueError("the handle's parts are not those of a CUDA allocation")
    try:
        raw = [
            base64.b64decode(p["base64"], validate=True) if isinstance(p, dict) else p
            for p in parts
        ]
    except (KeyError, TypeError, ValueError) as e:
        raise ValueError("the handle's parts are not those of a CUDA allocation") from e
    storage = torch.UntypedStorage._new_shared_cuda(device.index or 0, *raw)
    offset = _whole("offset", handle.get("offset"), 0, storage.nbytes())
    if storage.nbytes() - offset < size:
        raise ValueError("the shared bucket is smaller than its layout")
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, offset, (size,))
