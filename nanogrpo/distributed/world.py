"""The processes of a run, and how they exchange values.

In: the environment that torchrun sets (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT).
Out: a `World`. Without torchrun, these environment variables are not needed and the world has one
process. The training loop is the same for any number of processes. Read next: failure.py (how all
ranks end together), fsdp.py (the sharded model), train.py.
"""

import contextlib
import dataclasses
import datetime
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from nanogrpo.config import Config
from nanogrpo.distributed import failure
from nanogrpo.distributed.parent import signaled_with
from nanogrpo.errors import UserError, first_sentence
from nanogrpo.types import Sample


class Spread(NamedTuple):
    """The count, the sum and the range of some values. For 1.0 and 4.0: Spread(2, 5.0, min=1.0,
    max=4.0)."""

    n: int
    total: float
    min: float
    max: float

    @property
    def mean(self) -> float:
        return self.total / self.n


@dataclass(frozen=True)
class World:
    """The processes of a run. Every rank must call the methods that exchange values.

    >>> World(rank=1, size=4, device=torch.device("cuda:1"))  # the second of four processes
    """

    rank: int
    size: int
    device: torch.device
    group: dist.ProcessGroup | None = None  # used by the exchanges; None: torch's default group

    @property
    def main(self) -> bool:
        """Whether this rank writes the log and the other files of the whole run."""
        return self.rank == 0

    def patient(self) -> "World":
        """Return the same world with a new process group, in which exchanges time out after a week.
        Use this world where a rank may work for longer than --ddp-timeout while the other ranks
        wait.
        """
        if self.size == 1:
            return self
        group = dist.new_group(backend="gloo", timeout=datetime.timedelta(days=7))
        return dataclasses.replace(self, group=group)

    def part(self, items: Sequence) -> Sequence:
        """Return this rank's part of a list that every rank has.

        Parts are contiguous and of equal length, but the last parts may be shorter or empty.
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

        A sample that moves to a different rank is sent only to that rank. `mine` holds the samples
        of this rank's prompts. The lists `mine` of all ranks, joined in rank order, are the whole
        generation. `wanted[r]` holds the indices of the samples that rank r trains on.
        """
        start = sum(self.gather(len(mine))[: self.rank])
        own = dict(enumerate(mine, start))
        outgoing = [{i: own[i] for i in own.keys() & there} for there in wanted]
        outgoing[self.rank] = {}
        incoming: list = [None]
        for source in range(self.size) if self.size > 1 else ():
            dist.scatter_object_list(incoming, outgoing, source, self.group)
            own |= incoming[0]
        return {i: own[i] for i in sorted(wanted[self.rank])}

    def spreads(self, vectors: Mapping[str, Tensor]) -> dict[str, Spread]:
        """Return the `Spread` of each vector over all ranks, summed in float64.

        `vectors` maps names to vectors [n], where n may differ between ranks. A name that has no
        values on any rank is left out. Each rank reduces its own values, and only the results are
        exchanged.
        """
        mine = {
            name: Spread(len(x), x.sum().item(), x.min().item(), x.max().item())
            for name, values in vectors.items()
            if len(x := values.double())
        }
        parts, out = self.gather(mine), {}
        for name in {name: None for part in parts for name in part}:  # same order on each rank
            counts, totals, lowest, highest = zip(*(part[name] for part in parts if name in part))
            out[name] = Spread(sum(counts), sum(totals), min(lowest), max(highest))
        return out

    def any(self, flag: bool = False, error: UserError | None = None) -> bool:
        """Return whether the flag is set on any rank. If any rank has an error, raise it on all
        ranks.
        """
        flags, errors = zip(*self.gather((flag, error)))
        for problem in filter(None, errors):
            raise problem
        return any(flags)

    def agree(self, facts: dict[str, Any]) -> None:
        """Raise UserError on all ranks if a value in `facts` differs between ranks."""
        everyone = self.gather(facts)
        for rank, theirs in enumerate(everyone):
            for name in everyone[0] | theirs:
                if theirs.get(name) != everyone[0].get(name):
                    raise UserError(
                        f"{name} differs between rank 0 and rank {rank}: give all ranks the same "
                        "options and files."
                    )

    def once(self, work: Callable[[], Any]) -> Any:
        """Call `work` on the main rank. Return its result, or raise its error, on every rank.

        Only a UserError or FloatingPointError is raised on every rank. Any other exception is
        raised on the main rank only, and this failure ends the other ranks (failure.py).
        """
        shared: list = [None, None]  # the result and the error
        if self.main:
            try:
                shared[0] = work()
            except (UserError, FloatingPointError) as e:
                shared[1] = e
        if self.size > 1:
            dist.broadcast_object_list(shared, src=0, group=self.group)
        result, error = shared
        if error:
            raise error
        return result


# --- joining and leaving a run ---


@contextlib.contextmanager
def join(cfg: Config) -> Iterator[World]:
    """Yield the world of a run. With several ranks, an exception in the `with` block ends all
    processes.
    """
    cuda = cfg.device == "cuda" or (cfg.device == "auto" and torch.cuda.is_available())
    rank, size, local = (
        int(os.environ.get(name, default))
        for name, default in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0))
    )
    if cuda and local >= torch.cuda.device_count():
        raise UserError(
            f"--device {cfg.device}: rank {rank} needs its own GPU, but torch sees "
            f"{torch.cuda.device_count()} on this machine; use --device cpu or fewer processes."
        )
    device = torch.device(f"cuda:{local}" if cuda else "cpu")
    if cuda:
        # Memory segments must be able to grow. Otherwise, batches of varying length leave gaps.
        # torch reads this variable at its first allocation; PYTORCH_ALLOC_CONF overrides it.
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
        torch.cuda.set_device(device)
    world = World(rank, size, device)
    if "TORCHELASTIC_RUN_ID" in os.environ:  # if torchrun is killed, the ranks end, too
        signaled_with(os.getppid(), signal.SIGTERM)
    _connect(cfg, world)
    try:
        world.agree(vars(cfg))
        yield world
        if size > 1:
            # Wait for all ranks, because gloo aborts a process when its peer disconnects.
            dist.barrier()
    except BaseException as e:
        if size > 1:
            failure.end(e)  # does not return
        raise
    finally:
        failure.store = None
        if dist.is_initialized():
            dist.destroy_process_group()


def _connect(cfg: Config, world: World) -> None:
    """Join the process group that torchrun describes. Raise UserError after --ddp-timeout."""
    launched = "WORLD_SIZE" in os.environ
    if not launched and world.device.type == "cpu":
        return
    # NCCL exchanges tensors on GPUs; gloo exchanges small Python objects and offloaded shards.
    backend = "cpu:gloo,cuda:nccl" if world.device.type == "cuda" else "gloo"
    timeout = datetime.timedelta(seconds=cfg.ddp_timeout)
    try:
        # FSDP2, which casts the float32 weights to bfloat16, needs a group even on a single GPU.
        store: Any = dist.HashStore()
        if launched:
            store, _, _ = next(dist.rendezvous("env://", timeout=timeout))
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("group", store),
            rank=world.rank,
            world_size=world.size,
            timeout=timeout,
        )
    except (dist.DistError, RuntimeError, ValueError) as e:
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise UserError(
            f"rank {world.rank} could not join the {world.size} processes at {where} within "
            f"{cfg.ddp_timeout} s ({first_sentence(e)}): check that all processes are started and "
            "can reach that address, or choose another port (torchrun --master-port)."
        ) from e
    if world.size > 1:
        # Another thread may block the connection of `store`, so the clone has its own connection.
        failure.store = dist.PrefixStore("failure", store.clone())
