"""The server's end of the weight sync: a weight-transfer engine for vLLM. The only file that
touches vLLM's insides.

In: buckets of checkpoint tensors (wire.py), by broadcast or by shared memory. Out: vLLM's model
holds them, in whatever fused, sharded or packed form its kernels want. vLLM imports this file in
every worker (`--worker-extension-cls`, see serve.py) before it loads the model; the trainer never
does. The order of calls, made by vLLM for the routes of the same names:

    parse_init_info, init_transfer_engine    once a trainer: the layout is checked, the group joined or the memory mapped
    start_weight_update                      nothing yet: weights stay usable until the first bucket is here
    update_weights                           one bucket after the other, loaded as it arrives
    finish_weight_update                     nothing left to do
    shutdown                                 the trainer is gone

Read before: wire.py, sync.py. Read next: serve.py.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from nanogrpo.distributed.parent import on_end
from nanogrpo.vllm.buckets import Greeting, Group, attach, sequence_of

NAME = "nanogrpo"  # of the engine, in --weight-transfer-config


class Transfer(WeightTransferEngine):
    """Receives a trainer's weights. Every error is raised, becomes status 500 of the route, and
    leaves the server alive.
    """

    init_info_cls = Greeting
    supports_draft_weight_update = False
    group: Group | None = None  # broadcast
    mapped: list[torch.Tensor] | None = None  # memory: the trainer's buckets
    greeting: Greeting | None = None

    def init_transfer_engine(self, greeting: Greeting) -> None:
        self.shutdown()  # a trainer that comes back replaces the one that was
        sizes = greeting.plan.sizes
        if greeting.transport == "memory":
            self.mapped = [attach(h, n, self.device) for h, n in zip(greeting.handles, sizes)]
        else:
            p = self.parallel_config
            rank = 1 + p.data_parallel_index * p.world_size + p.rank  # the trainer is rank 0
            where = (greeting.address, greeting.port, greeting.room)
            self.group = Group(
                *where, rank, greeting.world, greeting.timeout, torch.device(self.device)
            )
        self.greeting = greeting

    def start_weight_update(self) -> None:
        """Nothing. vLLM's own engines prepare the model here, which takes its weights away until
        new ones arrive; that waits for `update_weights`, so that a start which nothing follows
        harms nobody.
        """

    def update_weights(self, update_info: dict) -> None:
        """update_info: {"sequence": n}, the number that the trainer put into the store, or into the
        header of bucket 0.
        """
        sequence = (
            update_info.get("sequence")
            if isinstance(update_info, dict) and len(update_info) == 1
            else None
        )
        if isinstance(sequence, bool) or not isinstance(sequence, int):
            raise ValueError('update_info must be {"sequence": number}')
        self.receive_weights(sequence)

    def receive_weights(self, sequence: int) -> None:
        if self.greeting is None:
            raise RuntimeError(
                "no trainer has introduced itself: call /init_weight_transfer_engine first"
            )
        if not self._announced(sequence):
            raise RuntimeError(f"the trainer announces no update {sequence}")
        plan, loaded = self.greeting.plan, set()
        initialize_layerwise_reload(self.model)
        try:
            for i, size in enumerate(plan.sizes):
                if self.mapped is not None:
                    bucket = self.mapped[i]
                else:
                    # A new one each time: vLLM keeps the tensors of a layer until the layer is
                    # complete.
                    bucket = torch.empty(size, dtype=torch.uint8, device=self.device)
                    self.group.broadcast(bucket)
                loaded |= self.model.load_weights(plan.views(bucket, i))
        finally:  # also puts the weights back whose turn had not come, when a broadcast fails
            finalize_layerwise_reload(self.model, self.model_config)
            self._repack_tied_head()
        wanted = {name for name, _ in self.model.named_parameters()}
        if missing := sorted(wanted - loaded):
            raise RuntimeError(f"{len(missing)} parameters did not arrive, {missing[0]} among them")
        if torch.device(self.device).type == "cuda":
            # the trainer may overwrite shared buckets as soon as this returns
            torch.cuda.synchronize(self.device)

    def _announced(self, sequence: int) -> bool:
        if self.mapped is not None:
            return int(sequence_of(self.mapped[0])) == sequence
        return self.group.announced(sequence)

    def _repack_tied_head(self) -> None:
        """On a CPU vLLM multiplies with a packed copy of the head. Reloading refreshes a head's
        copy, not that of a tied one.
        """
        head = getattr(self.model, "lm_head", None)
        if torch.device(self.device).type == "cpu" and getattr(head, "weight", None) is not None:
            dispatch_cpu_unquantized_gemm(head, remove_weight=False)

    def finish_weight_update(self) -> None:
        """Nothing: `update_weights` finishes what it starts, also when it fails."""

    def shutdown(self) -> None:
        if self.group is not None:
            self.group.close()
        self.group = self.mapped = self.greeting = None


class Extension:
    """What --worker-extension-cls names: importing this file is all it is for."""


def die_with(server: int) -> None:
    """Kills this worker, and the engine process above it, when the process `server` ends: vLLM
    leaves both behind, and the memory that they hold, when its HTTP server is killed (0.32.0).
    """
    chain = [os.getpid()]
    while (
        parent := int(Path(f"/proc/{chain[-1]}/stat").read_text().rsplit(")", 1)[1].split()[1])
    ) != server:
        if parent <= 1:
            raise RuntimeError(f"worker {os.getpid()} does not descend from the server {server}")
        chain.append(parent)

    def kill() -> None:
        for pid in reversed(chain):  # the engine first, ourselves last
            os.kill(pid, signal.SIGKILL)

    on_end(server, kill)


die_with(int(os.environ["NANOGRPO_SERVER"]))  # set by serve.py
if NAME not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(NAME, Transfer)
