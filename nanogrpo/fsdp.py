"""Many processes: who is here, what they tell each other, and the model cut into shards (FSDP2). Everything from outside the
model.

In: the environment that torchrun sets, a model. Out: a `World`; the same model with its parameters sharded. One process without
torchrun is a world of one and needs none of it, so the loop is written once.

What the ranks share in a step, in order: each other's rewards and sizes (a few numbers a sample: they fix the baseline, the token
count and the plan), the samples that the plan moves, and inside the model the shards themselves. The gradient is then that of
one process: every loss is divided by the token count of the whole step, and the sum over ranks is taken, never a mean of means.
Read next: packing.py (the plan), train.py.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from nanogrpo.batch import Sample
from nanogrpo.config import Config
from nanogrpo.errors import UserError
from nanogrpo.model import Decoder


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
        """This rank's part of a list that all ranks hold: a run of equal length (the last may be shorter)."""
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
        """The ranks' lists, one behind the other."""
        return [item for part in self.gather(mine) for item in part]

    def exchange(self, mine: Sequence[Sample], wanted: Sequence[set[int]]) -> Mapping[int, Sample]:
        """The samples that this rank trains, by their index in the generation. Only those that change rank are sent.

        mine: the samples this rank drew, a run of the generation in the order of ranks; wanted[r]: the indices that rank r
        trains.
        """
        start = sum(self.gather(len(mine))[: self.rank])
        own = dict(enumerate(mine, start))
        moving = {i: own[i] for i in own.keys() - wanted[self.rank]}
        for given in self.gather(moving):
            own |= given
        return {i: own[i] for i in wanted[self.rank]}

    def any(self, flag: bool) -> bool:
        """Whether any rank says so."""
        return any(self.gather(flag))


def start(cfg: Config) -> World:
    """Joins the process group that torchrun describes; without torchrun, a world of one."""
    cuda = cfg.device == "cuda" or (cfg.device == "auto" and torch.cuda.is_available())
    rank, size, local = (
        int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0))
    )
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    timeout = datetime.timedelta(seconds=cfg.ddp_timeout)
    if "WORLD_SIZE" in os.environ:
        try:
            dist.init_process_group("nccl" if cuda else "gloo", timeout=timeout)
        except (dist.DistError, RuntimeError, ValueError) as e:
            where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
            raise UserError(
                f"rank {rank} could not join the {size} processes at {where} within {cfg.ddp_timeout} s ({e})."
            ) from e
    elif cuda:  # FSDP2 also computes in bfloat16 from float32 masters, which one GPU wants as much as eight
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    return World(rank, size, device)


def stop() -> None:
    """Leaves the process group. The barrier first: gloo aborts a process whose peer has already torn down its connections."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def shard(model: Decoder, world: World, cfg: Config) -> None:
    """Cuts the parameters over the ranks: one unit a block, one for an untied head, the rest at the root.

    Float32 masters; on GPUs bfloat16 compute and float32 reduction. A tied head is the embedding: both belong to the root,
    whose parameters stay gathered between forward and backward. `cast_forward_inputs` would turn the float32 rotary angles into
    bfloat16.
    """
    if not dist.is_initialized():
        return
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    options: dict = {"mp_policy": policy} if world.device.type == "cuda" else {}
    for block in model.model.layers:
        fully_shard(block, reshard_after_forward=cfg.reshard_after_forward, **options)
    if not model.cfg.tie_word_embeddings:
        fully_shard(model.lm_head, reshard_after_forward=False, **options)  # its backward follows its forward at once
    fully_shard(model, reshard_after_forward=False, **options)


def sync_gradients(model: nn.Module, on: bool) -> None:
    """Off for all but the last micro-batch of a step: gradients accumulate unsharded, and are reduced once."""
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(on)
