"""The processes of a run, and how they exchange values.

In: the environment that torchrun sets (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT).
Out: a `World`. Without torchrun it has one process and needs none of these variables, so the loop
is the same for one process and for many. Read next: failure.py (how all ranks end together),
fsdp.py (the sharded model), train.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
import pickle
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from nanogrpo.config import Config
from nanogrpo.distributed.failure import Watch, finish_saves
from nanogrpo.errors import UserError, first_sentence
from nanogrpo.types import Sample


@dataclass(frozen=True)
class World:
    """The processes of a run and the exchanges between them. Every rank must call each exchange.

    >>> World(rank=1, size=4, device=torch.device("cuda:1"))  # the second of four processes
    """

    rank: int
    size: int
    device: torch.device
    group: dist.ProcessGroup | None = None  # used by the exchanges; None: torch's default group

    @property
    def main(self) -> bool:
        """Whether this is the rank that writes files, logs, and talks to servers."""
        return self.rank == 0

    def patient(self) -> World:
        """Return the same world with its own process group, whose exchanges time out only after a
        week.

        The other ranks wait in these exchanges while rank 0 samples from a server or restarts one,
        which may take longer than --ddp-timeout. failure.Watch still notices when a rank is gone.
        """
        if self.size == 1:
            return self
        group = dist.new_group(backend="gloo", timeout=datetime.timedelta(days=7))
        return dataclasses.replace(self, group=group)

    def part(self, items: Sequence) -> Sequence:
        """Return this rank's part of a list that every rank has.

        Parts are contiguous and of equal length, but the last ones may be shorter or empty.
        """
        part = -(-len(items) // self.size)
        return items[self.rank * part : (self.rank + 1) * part]

    def gather(self, mine: Any) -> list:
        """Return every rank's value, in rank order."""
        if self.size == 1:
            return [mine]
        everyone: list = [None] * self.size
        dist.all_gather_object(everyone, mine, group=self.group)
        return everyone

    def concat(self, mine: list) -> list:
        """Return the concatenation of the ranks' lists."""
        return [item for part in self.gather(mine) for item in part]

    def exchange(self, mine: Sequence[Sample], wanted: Sequence[set[int]]) -> Mapping[int, Sample]:
        """Return the samples that this rank trains on, by their index in the generation.

        A sample that moves to a different rank is sent only to that rank. mine: the samples of this
        rank's prompts, a contiguous part of the generation, in rank order. wanted[r]: the indices
        that rank r trains on.
        """
        start = sum(self.gather(len(mine))[: self.rank])
        own = dict(enumerate(mine, start))
        outgoing = [
            {i: own[i] for i in own.keys() & there} if rank != self.rank else {}
            for rank, there in enumerate(wanted)
        ]
        for received in self._deliver(outgoing) if self.size > 1 else ():
            own |= received
        return {i: own[i] for i in sorted(wanted[self.rank])}

    def _deliver(self, parcels: Sequence[Any]) -> list:
        """Send parcels[r] to rank r. Return the parcels for this rank, in rank order."""
        pickled = [pickle.dumps(parcel) for parcel in parcels]
        sizes = self.gather([len(p) for p in pickled])  # [from][to]
        outgoing = torch.frombuffer(bytearray(b"".join(pickled)), dtype=torch.uint8)
        lengths = [row[self.rank] for row in sizes]
        incoming = torch.empty(sum(lengths), dtype=torch.uint8)
        dist.all_to_all_single(incoming, outgoing, lengths, sizes[self.rank], group=self.group)
        return [pickle.loads(part.numpy().tobytes()) for part in incoming.split(lengths)]

    def any(self, flag: bool = False, error: UserError | None = None) -> bool:
        """Return whether the flag is set on any rank. Raise any rank's error on all of them."""
        everyone = self.gather((flag, error))
        for _, problem in everyone:
            if problem is not None:
                raise problem
        return any(flag for flag, _ in everyone)

    def once(self, work: Callable[[], Any]) -> Any:
        """Call `work` on the main rank. Return its result, or raise its error, on every rank.

        Only errors that end a run with a message are shared. On any other exception the main rank
        fails alone, and failure.Watch stops the others.
        """
        result, error = None, None
        if self.main:
            try:
                result = work()
            except (UserError, FloatingPointError) as e:
                error = e
        if self.size > 1:
            shared = [(result, error)]
            dist.broadcast_object_list(shared, src=0, group=self.group)
            result, error = shared[0]
        if error is not None:
            raise error
        return result


ALONE = World(0, 1, torch.device("cpu"))


# --- joining and leaving a run ---


@contextlib.contextmanager
def join(cfg: Config) -> Iterator[World]:
    """Yield the world of a run. With several ranks, an exception inside ends all processes."""
    cuda = cfg.device == "cuda" or (cfg.device == "auto" and torch.cuda.is_available())
    rank, size, local = (
        int(os.environ.get(name, default))
        for name, default in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0))
    )
    if cuda and local >= torch.cuda.device_count():
        raise UserError(
            f"--device {cfg.device}: rank {rank} needs a GPU of its own, but torch sees "
            f"{torch.cuda.device_count()} on this machine; use --device cpu or fewer processes."
        )
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    if cuda:
        _configure_allocator(cfg)
        torch.cuda.set_device(device)
    world = World(rank, size, device)
    watch = _connect(cfg, world)
    try:
        yield world
        if watch is not None:
            dist.barrier()
            # After this barrier, every rank has done its work. The watches stop before the second
            # barrier: after it, the store in rank 0's process may be gone, which would look like a
            # failure. Connections are closed only after the second barrier, because gloo aborts a
            # process whose peer has already closed its own.
            watch.stop()
            dist.barrier()
    except BaseException as e:
        if watch is not None:
            watch.end_all(e)  # does not return
        finish_saves()
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _configure_allocator(cfg: Config) -> None:
    """Let torch's allocator extend its segments, unless the user has configured it. The lengths of
    strips keep changing, which would leave gaps in segments of fixed sizes.

    With a vLLM server this stays off: trainer and server may share memory by CUDA IPC, and for
    extended segments torch then needs a system call (pidfd_getfd) that containers usually forbid.
    """
    names = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"  # torch prefers the first
    if cfg.engine == "local" and not any(os.environ.get(name) for name in names):
        os.environ[names[1]] = "expandable_segments:True"  # torch reads it at its first allocation


def _connect(cfg: Config, world: World) -> Watch | None:
    """Join the process group that torchrun describes. Raise UserError after --ddp-timeout."""
    launched = "WORLD_SIZE" in os.environ
    if not launched and world.device.type == "cpu":
        return None
    # NCCL for tensors on GPUs, gloo for small Python objects and offloaded shards on the host.
    backend = "cpu:gloo,cuda:nccl" if world.device.type == "cuda" else "gloo"
    timeout = datetime.timedelta(seconds=cfg.ddp_timeout)
    check_torchrun()
    try:
        # A single GPU needs a group too, because FSDP2 is what lets it compute in bfloat16 from
        # float32 master weights.
        store: Any = dist.HashStore()
        if launched:
            store, _, _ = next(dist.rendezvous("env://", timeout=timeout))
        # A store keeps its keys when torchrun restarts a run, and the new run must not read them.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        group = dist.PrefixStore(f"group {attempt}", store)
        dist.init_process_group(
            backend, store=group, rank=world.rank, world_size=world.size, timeout=timeout
        )
    except (dist.DistError, RuntimeError, ValueError) as e:
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise UserError(
            f"rank {world.rank} could not join the {world.size} processes at {where} within "
            f"{cfg.ddp_timeout} s ({first_sentence(e)}): check that all processes are started and "
            "can reach that address, or choose another port (torchrun --master-port)."
        ) from e
    if world.size == 1:
        return None
    # The watch has a separate connection, because the first one may be blocked while this rank
    # waits for the rank that failed.
    watched = dist.PrefixStore(f"watch {attempt}", store.clone())
    return Watch(watched, world.rank, world.size, cfg.heartbeat_timeout)


def check_torchrun() -> None:
    """Raise UserError if torchrun was killed before this rank could connect to its store.

    Torchrun serves the store before it starts a rank. Without this check the rank would outlive it,
    because torch tries to reach the store until --ddp-timeout.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return
    where = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        socket.create_connection(where, timeout=10.0).close()
    except ConnectionRefusedError:
        raise UserError(
            f"torchrun is gone (nobody listens at {where[0]}:{where[1]}): start the run again."
        ) from None
    except OSError:  # torch tries for longer
        pass
