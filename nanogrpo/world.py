"""The processes of a run: who is here, what they tell each other, and how they end, together.

In: the environment that torchrun sets (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT). Out: a `World`. One process
without torchrun is a world of one and needs none of it, so the loop is written once.

Ends are of three kinds, and none is a hang:

    by itself    every rank leaves after the same step; a barrier, then the process group is taken down
    asked to     SIGTERM or Ctrl-C at any rank: `Stop` remembers it, the ranks agree at the end of the step, save, and leave
    by failure   a rank writes "failed" into the store that all ranks share; the others look there twice a second and leave too
                 (a save under way comes first). A killed rank cannot write: gloo notices its closed connection, torchrun
                 ends its neighbours on the machine, and NCCL across machines waits for --ddp-timeout.
                 The first to write it speaks, the others are silent: what they would say is only that a neighbour is gone.

Read next: fsdp.py (the model cut into shards), train.py.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from nanogrpo.batch import Sample
from nanogrpo.config import Config
from nanogrpo.errors import UserError

log = logging.getLogger("nanogrpo")


@dataclass(frozen=True)
class World:
    """The processes of a run. Example, the second of four: World(rank=1, size=4, device=cuda:1)"""

    rank: int
    size: int
    device: torch.device

    @property
    def main(self) -> bool:
        """The rank that writes and talks."""
        return self.rank == 0

    def share(self, items: Sequence) -> Sequence:
        """This rank's part of a list that all ranks hold: a run of equal length (the last ones may be shorter, or empty)."""
        part = -(-len(items) // self.size)
        return items[self.rank * part : (self.rank + 1) * part]

    def gather(self, mine: Any) -> list:
        """What every rank gave, in the order of ranks, on every rank."""
        if self.size == 1:
            return [mine]
        everyone: list = [None] * self.size
        dist.all_gather_object(everyone, mine)
        return everyone

    def concat(self, mine: list) -> list:
        """The ranks' lists, concatenated."""
        return [item for part in self.gather(mine) for item in part]

    def exchange(self, mine: Sequence[Sample], wanted: Sequence[set[int]]) -> Mapping[int, Sample]:
        """The samples that this rank trains, by their index in the generation. Those that change rank are sent, to all.

        mine: what this rank drew, a run of the generation in the order of ranks; wanted[r]: the indices that rank r trains.
        """
        start = sum(self.gather(len(mine))[: self.rank])
        own = dict(enumerate(mine, start))
        elsewhere = set().union(*wanted) - wanted[self.rank]  # what nobody trains stays where it is
        moving = {i: own[i] for i in own.keys() & elsewhere}
        for given in self.gather(moving):
            own |= given
        return {i: own[i] for i in wanted[self.rank]}

    def agree(self, flag: bool = False, error: UserError | None = None) -> bool:
        """Whether any rank says so; an error of any rank is raised on all of them. Every rank must call."""
        said = self.gather((flag, error))
        for _, error in said:
            if error is not None:
                raise error
        return any(flag for flag, _ in said)

    def once(self, work: Callable[[], Any]) -> Any:
        """What `work` returns or raises (UserError) on the main rank, on every rank: for what one alone must do to the disk."""
        done = error = None
        if self.main:
            try:
                done = work()
            except UserError as e:
                error = e
        self.agree(error=error)
        return self.gather(done)[0]


# --- together into the run, and out of it -------------------------------------------------------------------------------------


@contextlib.contextmanager
def join(cfg: Config) -> Iterator[World]:
    """The world, for the time of a run. With several ranks, an exception inside ends this process and all others."""
    cuda = cfg.device == "cuda" or (cfg.device == "auto" and torch.cuda.is_available())
    rank, size, local = (
        int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0))
    )
    if cuda and local >= torch.cuda.device_count():
        raise UserError(
            f"--device {cfg.device}: rank {rank} needs a GPU of its own but torch sees {torch.cuda.device_count()} on this "
            "machine: use --device cpu or fewer processes."
        )
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    world = World(rank, size, device)
    watch = _connect(cfg, world)
    try:
        yield world
    except BaseException as e:
        if watch is not None:
            watch.end_all(e)  # does not return
        if dist.is_initialized():
            dist.destroy_process_group()
        raise
    if watch is not None:
        watch.stop()  # before the barrier: behind it the store may go first, which would look like a failure after a good run
    if dist.is_initialized():
        dist.barrier()  # gloo aborts a process whose peer has already torn down its connections
        dist.destroy_process_group()


def _connect(cfg: Config, world: World) -> Watch | None:
    """Joins the process group that torchrun describes; within the timeout, or with a sentence."""
    # NCCL for the tensors on GPUs, gloo for what lies on the host: the small Python objects, and offloaded shards.
    backend = "cpu:gloo,cuda:nccl" if world.device.type == "cuda" else "gloo"
    timeout = datetime.timedelta(seconds=cfg.ddp_timeout)
    if "WORLD_SIZE" not in os.environ:
        if world.device.type == "cuda":  # FSDP2 also computes in bfloat16 from float32 masters: one GPU wants it as much as eight
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        return None
    try:
        store, _, _ = next(dist.rendezvous("env://", timeout=timeout))
        # A store keeps the keys of whoever used it before: under torchrun, a restarted run must not read its ancestor's.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        group = dist.PrefixStore(f"group {attempt}", store)
        dist.init_process_group(backend, store=group, rank=world.rank, world_size=world.size, timeout=timeout)
    except (dist.DistError, RuntimeError, ValueError) as e:
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        taken = "EADDRINUSE" in str(e) or "address already in use" in str(e).lower()
        advice = "choose another port (torchrun --master-port)" if taken else "see that all are started and reach that address"
        reason = "the port is in use" if taken else first_sentence(e)
        raise UserError(
            f"rank {world.rank} could not join the {world.size} processes at {where} within {cfg.ddp_timeout} s ({reason}): "
            f"{advice}."
        ) from e
    # The watch has a connection of its own: a rank may wait in the other for the one that failed.
    return Watch(dist.PrefixStore(f"watch {attempt}", store.clone()), world) if world.size > 1 else None


class Watch:
    """Ends this process when another rank has failed, and the others when this one has.

    A thread, because the main one may be waiting inside a collective for the very rank that is gone: gloo notices a closed
    connection, NCCL does not before its timeout.
    """

    delay = 0.5  # seconds between two looks at the store
    grace = 1.5  # seconds that the rank which holds the store stays for the others to look there

    def __init__(self, store: dist.Store, world: World):
        self.store, self.rank, self.size, self.over = store, world.rank, world.size, threading.Event()
        self.failing = threading.Lock()
        self.thread = threading.Thread(target=self._look, name="watch", daemon=True)
        self.thread.start()

    def _look(self) -> None:
        while not self.over.wait(self.delay):
            try:
                told = self.store.get("failed") if self.store.check(["failed"]) else b""
            except (dist.DistError, RuntimeError):  # the rank that holds the store is gone, and has told why if it could
                told = b"0 error: the process that holds the store is gone."
            if told and self.failing.acquire(blocking=False):
                finish_in_time()
                self._leave(1, told)

    def stop(self) -> None:
        self.over.set()
        self.thread.join()

    def end_all(self, error: BaseException) -> None:
        """Tells what happened, unless another rank has told before, and leaves without waiting for anybody."""
        self.failing.acquire()  # never released: the other thread must not leave before this one has spoken
        known, bug, sentence = isinstance(error, (UserError, FloatingPointError)), False, str(error)
        if not known and (isinstance(error, dist.DistError) or "gloo" in sentence):
            # No exception type tells a lost neighbour from a bug in a collective; the reason names the address.
            reason = first_sentence(error)
            sentence = f"rank {self.rank} has lost another process ({reason}): see what ended it, and continue with --resume."
        elif not known:
            bug, sentence = True, f"rank {self.rank} failed: {type(error).__name__}: {error}"
        mine = f"{self.rank} error: {sentence}".encode()  # with the rank: two may fail of the same
        try:
            told = self.store.compare_set("failed", "", mine)
        except (dist.DistError, RuntimeError):  # the rank that holds the store is gone: then nobody else can tell
            told = mine
        if told == mine:
            if bug:
                traceback.print_exception(error)
            print(f"error: {sentence}", file=sys.stderr)
        self._leave(2 if known else 1, told)

    def _leave(self, status: int, told: bytes) -> None:
        """Without torchrun, the store lives in rank 0: it stays until the others have read there who speaks, or are dead."""
        _tell_torchrun(told.decode().partition(" ")[2])
        with contextlib.suppress(dist.DistError, RuntimeError):
            self.store.add("left", 1)
            ours = self.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
            end = time.monotonic() + self.grace
            while ours and self.store.add("left", 0) < self.size and time.monotonic() < end:
                time.sleep(0.05)
        _leave(status)


def first_sentence(error: BaseException) -> str:
    """Of a message from C++, which goes on with advice and a stack, and begins with the place in its source."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return re.sub(r"^\[\S+:\d+\] ", "", lines[0]).split(". ")[0].rstrip(".")


def _tell_torchrun(sentence: str) -> None:
    """torchrun closes with a report on who failed first. Its line `traceback :` shows what this file holds."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        with contextlib.suppress(OSError), open(path, "w") as f:
            json.dump({"message": sentence, "timestamp": str(int(time.time()))}, f)


def _leave(status: int) -> None:
    """Ends the process now. An ordinary exit would take down the process group, which waits for ranks that are gone."""
    try:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, RuntimeError, ValueError):  # a closed pipe, or a flush that a signal interrupted
                stream.flush()
    finally:
        os._exit(status)


unfinished: list[Callable[[], None]] = []  # not to be cut short when another rank fails: state.Saver puts itself here


def finish_in_time(seconds: float = 60.0) -> None:
    """Gives what is unfinished a minute, in a thread that is left behind after it."""
    for work in list(unfinished):
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        thread.join(seconds)


# --- asked to stop ------------------------------------------------------------------------------------------------------------


class Stop:
    """Whether somebody has asked for the end: `with Stop() as stop: … if stop.asked: …`. A second signal ends at once.

    Signals that arrive within a second are one: a scheduler tells every process, and torchrun passes on what it is told.
    """

    signals = (signal.SIGTERM, signal.SIGINT)

    def __init__(self):
        self.first: float | None = None

    @property
    def asked(self) -> bool:
        return self.first is not None

    def __enter__(self) -> Stop:
        self.before = {number: signal.signal(number, self._handle) for number in self.signals}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _frame: object) -> None:
        if self.first is None:
            self.first = time.monotonic()
            name = signal.Signals(number).name
            log.warning("%s: this step is finished and saved, then the run ends; once more ends it at once.", name)
        elif time.monotonic() - self.first > 1.0:
            _leave(128 + number)
