"""The server's end of the weight sync: a weight-transfer engine for vLLM. No other file uses vLLM's
internals.

In: buckets of checkpoint tensors (buckets.py), by broadcast or by shared memory. Out: these weights
in vLLM's model, fused, sharded or packed as its kernels need them. vLLM imports this file in every
worker before it loads the model (`--worker-extension-cls`, see serve.py). The trainer never imports
it. vLLM calls these methods for the routes of the same names:

    init_transfer_engine     once per trainer: join the group, or map the memory
    start_weight_update      does nothing: weights stay usable until the first bucket arrives
    update_weights           receives and loads one bucket after the other
    finish_weight_update     does nothing
    shutdown                 the trainer is gone

Read before: buckets.py, sync.py. Read next: serve.py.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.utils.nccl import unpinned_nccl_env

from nanogrpo.distributed.parent import on_end
from nanogrpo.vllm.buckets import (
    BroadcastGroup,
    InitInfo,
    attach,
    checksum,
    device_facts,
    sequence_of,
)

NAME = "nanogrpo"  # the engine's name in --weight-transfer-config


class Transfer(WeightTransferEngine):
    """Receives a trainer's weights. After an error, it answers status 500 and keeps running."""

    init_info_cls = InitInfo
    supports_draft_weight_update = False
    info: InitInfo | None = None
    group: Any = None  # broadcast: a BroadcastGroup
    mapped: list[torch.Tensor] | None = None  # memory: the trainer's buckets

    def init_transfer_engine(self, info: InitInfo) -> None:
        self.shutdown()  # a trainer that reconnects replaces its earlier connection
        device = torch.device(self.device)
        if info.transport == "memory":
            self.mapped = [attach(h, n, device) for h, n in zip(info.handles, info.plan.sizes)]
        else:
            p = self.parallel_config
            rank = 1 + p.data_parallel_index * p.world_size + p.rank  # the trainer is rank 0
            # With VLLM_BATCH_INVARIANT=1, vLLM sets NCCL variables that the trainer does not have.
            # A group of processes with different settings would hang.
            with unpinned_nccl_env():
                self.group = BroadcastGroup(info, rank, device)
        self.info = info

    def start_weight_update(self) -> None:
        """Do nothing. vLLM's own engines discard the old weights here. We do this in
        `update_weights`, so a start that is not followed by an update does no harm.
        """

    def update_weights(self, update_info: dict) -> None:
        """update_info: {"sequence": n, "checksums": [of each bucket]}. n is the number in the
        trainer's store, or in bucket 0. If the buckets of the encoder are left out, it keeps its
        weights.
        """
        info = update_info if isinstance(update_info, dict) else {}
        sequence, checksums = info.get("sequence"), info.get("checksums")
        if type(sequence) is not int or not isinstance(checksums, list) or len(info) != 2:
            raise ValueError('update_info must be {"sequence": number, "checksums": numbers}')
        self.receive_weights(info)

    def receive_weights(self, update: dict) -> None:
        sequence, checksums = update["sequence"], update["checksums"]
        if self.info is None:
            raise RuntimeError("no trainer is connected: call /init_weight_transfer_engine first")
        sizes = self.info.plan.sizes
        first = len(sizes) - len(checksums)
        if first not in (0, self.info.plan.encoder):
            raise ValueError(f"there are {len(checksums)} checksums for {len(sizes)} buckets")
        if self.mapped is not None:
            announced = int(sequence_of(self.mapped[0])) == sequence
        else:
            announced = self.group.announced(sequence)
        if not announced:
            raise RuntimeError(f"the trainer has not announced update {sequence}")
        loaded: set[str] = set()
        part = "language_model" if first else ""
        module = self.model.get_submodule(part)
        initialize_layerwise_reload(module)
        try:
            for i, expected in enumerate(checksums, first):
                if self.mapped is not None:
                    bucket = self.mapped[i]
                else:
                    # Allocate a new buffer each time, because vLLM keeps a layer's tensors until
                    # the layer is complete.
                    bucket = torch.empty(sizes[i], dtype=torch.uint8, device=self.device)
                    self.group.broadcast(bucket)
                if checksum(bucket) != expected:
                    raise RuntimeError(f"bucket {i} arrived with other bytes than the trainer sent")
                loaded |= self.model.load_weights(self.info.plan.views(bucket, i))
        finally:  # after a failed broadcast, this restores the weights that did not arrive
            finalize_layerwise_reload(module, self.model_config)
            self._repack_tied_head()
        expected = {n for n, _ in self.model.named_parameters() if n.startswith(part)}
        if missing := sorted(expected - loaded):
            raise RuntimeError(f"{len(missing)} parameters did not arrive, such as {missing[0]}")
        if torch.device(self.device).type == "cuda":
            # the trainer may overwrite shared buckets as soon as this returns
            torch.cuda.synchronize(self.device)

    def _repack_tied_head(self) -> None:
        """Refresh the packed copy of the head that vLLM uses on a CPU.

        Reloading the weights refreshes it too, except when the head is tied to the embedding.
        """
        head = getattr(getattr(self.model, "language_model", self.model), "lm_head", None)
        if torch.device(self.device).type == "cpu" and getattr(head, "weight", None) is not None:
            dispatch_cpu_unquantized_gemm(head, remove_weight=False)

    def finish_weight_update(self) -> None:
        """Do nothing. `update_weights` cleans up after itself, even when it fails."""

    def shutdown(self) -> None:
        if self.group is not None:
            self.group.close()
        self.group = self.mapped = self.info = None


class Extension:
    """The class that --worker-extension-cls names, to import this file. vLLM adds it to the bases
    of its worker.
    """

    device: torch.device  # the worker's

    def device_facts(self) -> dict[str, str]:
        """Answer auth.describe, in the HTTP process."""
        return device_facts(torch.device(self.device))


def end_with(server: int) -> None:
    """Kill this worker and the engine process above it when process `server` ends.

    vLLM 0.32.0 leaves both running, with all their memory, when its HTTP server is killed.
    """
    chain = [os.getpid()]
    while True:
        parent = int(Path(f"/proc/{chain[-1]}/stat").read_text().rsplit(")", 1)[1].split()[1])
        if parent == server:
            break
        if parent <= 1:
            raise RuntimeError(f"worker {os.getpid()} is not a descendant of server {server}")
        chain.append(parent)

    def kill() -> None:
        for pid in reversed(chain):  # the engine first, this process last
            os.kill(pid, signal.SIGKILL)

    on_end(server, kill)


end_with(int(os.environ["NANOGRPO_SERVER"]))  # set by serve.py
if NAME not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(NAME, Transfer)
