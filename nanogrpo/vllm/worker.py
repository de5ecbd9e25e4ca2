"""The server's end of the weight sync: a weight-transfer engine for vLLM. No other file uses vLLM's
internals.

In: buckets of checkpoint tensors (buckets.py), by broadcast or by shared memory. Out: these weights
in vLLM's model, fused, sharded or packed as vLLM's kernels need them. Every worker of vLLM imports
this file before it loads the model (`--worker-extension-cls`, see serve.py). The trainer never
imports this file. vLLM calls these methods for the routes of the same names:

* init_transfer_engine joins the group, or maps the memory, once per trainer.
* start_weight_update does nothing, so the old weights stay usable until the first bucket arrives.
* update_weights receives and loads one bucket after another.
* finish_weight_update does nothing.
* shutdown disconnects from the trainer.

Read before: buckets.py, sync.py. Read next: serve.py.
"""

import os
import signal
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

from nanogrpo.vllm.buckets import BroadcastGroup, InitInfo, attach, checksum, device_facts
from nanogrpo.vllm.process import on_end


class Transfer(WeightTransferEngine):
    """Receives a trainer's weights. After an error, the server replies 500 and keeps running."""

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
            # With VLLM_BATCH_INVARIANT=1, vLLM sets NCCL variables that the trainer does not set.
            # If the processes of a group have different variables, the group hangs.
            with unpinned_nccl_env():
                self.group = BroadcastGroup(info, rank, device)
        self.info = info

    def start_weight_update(self) -> None:
        """Do nothing. vLLM's own engines discard the old weights here. Our engine discards the old
        weights in `update_weights`. So a start without an update does no harm.
        """

    def update_weights(self, update_info: dict) -> None:
        """update_info: {"checksums": [of each bucket]}."""
        if self.info is None:
            raise RuntimeError("no trainer is connected: call /init_weight_transfer_engine first")
        loaded: set[str] = set()
        initialize_layerwise_reload(self.model)
        try:
            for i, expected in enumerate(update_info["checksums"]):
                if self.mapped is not None:
                    bucket = self.mapped[i]
                else:
                    # a new buffer each time: vLLM uses the tensors until their layer is complete
                    size = self.info.plan.sizes[i]
                    bucket = torch.empty(size, dtype=torch.uint8, device=self.device)
                    self.group.broadcast(bucket)
                if checksum(bucket) != expected:
                    raise RuntimeError(f"bucket {i} does not have the bytes that were sent")
                loaded |= self.model.load_weights(self.info.plan.views(bucket, i))
        finally:  # after a failed broadcast, this restores the old values of missing weights
            finalize_layerwise_reload(self.model, self.model_config)
            self._repack_tied_head()
        if missing := sorted({name for name, _ in self.model.named_parameters()} - loaded):
            raise RuntimeError(f"{len(missing)} parameters did not arrive, such as {missing[0]}")
        if torch.device(self.device).type == "cuda":
            # once this method returns, the trainer may overwrite shared buckets
            torch.cuda.synchronize(self.device)

    receive_weights = update_weights  # vLLM requires this method, but never calls it

    def _repack_tied_head(self) -> None:
        """Refresh the packed copy of the head that vLLM uses on a CPU.

        A reload of the weights refreshes the copy, except when the head is tied to the embedding.
        """
        head = getattr(getattr(self.model, "language_model", self.model), "lm_head", None)
        if torch.device(self.device).type == "cpu" and getattr(head, "weight", None) is not None:
            dispatch_cpu_unquantized_gemm(head, remove_weight=False)

    def finish_weight_update(self) -> None:
        """Do nothing, because `update_weights` has already cleaned up, even if it failed."""

    def shutdown(self) -> None:
        if self.group is not None:
            self.group.close()
        self.group = self.mapped = self.info = None


class Extension:
    """The class that --worker-extension-cls names, so that vLLM imports this file. vLLM adds the
    class to the bases of its worker.
    """

    device: torch.device  # the worker's

    def device_facts(self) -> dict[str, str]:
        """Return the GPU's UUID and the NCCL version, for auth.describe in the HTTP process."""
        return device_facts(torch.device(self.device))


def end_with(server: int) -> None:
    """Kill this worker, and the engine process that started it, when process `server` ends.

    When its HTTP server is killed, vLLM 0.32.0 leaves the worker and the engine process running,
    with all their memory.
    """
    parent = os.getppid()

    def kill() -> None:
        if parent != server:
            os.kill(parent, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    on_end(server, kill)


end_with(int(os.environ["NANOGRPO_SERVER"]))  # set by serve.py
WeightTransferEngineFactory.register_engine("nanogrpo", Transfer)  # --weight-transfer-config
