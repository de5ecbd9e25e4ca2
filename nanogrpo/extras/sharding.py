"""The options for sharding the model, for selective recomputation, and for determinism on GPUs.

In: the options, after all automatic settings are chosen. Out: `model.sharding`, which
distributed/fsdp.py reads. Read next: distributed/fsdp.py.
"""

import functools
import os
from typing import Any

import torch
from torch.optim import AdamW
from torch.utils.checkpoint import (
    CheckpointPolicy,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

from nanogrpo.distributed.fsdp import Sharding
from nanogrpo.distributed.world import World
from nanogrpo.extras.one_gpu import copy_weights, fuse
from nanogrpo.feature import Feature
from nanogrpo.model.dispatch import uses_triton
from nanogrpo.run.setup import Inputs, Run

# Selective checkpointing keeps the results of matrix products and attention.
# It recomputes norms, rotation and SwiGLU, which takes little time and saves most of the memory.
# The entries are parts of operation names. The names of our own operators contain flash_attn.
# Some versions of torch do not have all of these operations.
KEPT = """
    aten.mm. aten.addmm. mkldnn._linear_pointwise
    _scaled_dot_product_ varlen_attn _flash_attention_forward flash_attn
"""


class Sharded(Feature):
    def __init__(self, cfg: Any):
        if cfg.full_determinism:
            be_deterministic()

    def settings(self, cfg: Any, inputs: Inputs) -> None:
        """Use the settings that earlier features have chosen. This feature attaches after them."""
        shard(inputs.model, cfg, inputs.world)

    def loaded(self, model: Any) -> None:
        if model.sharding.whole:
            copy_weights(model, model.sharding.dtype)

    def running(self, run: Run) -> None:
        model: Any = run.model
        if model.sharding.whole and type(run.optimizer) is AdamW and uses_triton(run.world.device):
            fuse(run.optimizer, model.copies)


def is_whole(cfg: Any, world: World) -> bool:
    """Return whether one process trains with 16-bit copies of the weights, without FSDP2
    (one_gpu.py). On a GPU, FSDP2 is needed for adapters, for offloading, and for a model whose
    16-bit copy does not fit into memory. On a CPU, adapters need no copies (lora.py), and there is
    nothing to offload.
    """
    if world.device.type == "cuda":
        wanted = cfg.reshard_after_forward == "never" and not cfg.cpu_offload
    else:
        wanted = cfg.dtype != "auto"
    return wanted and world.size == 1 and not cfg.lora_r


def compute_dtype(cfg: Any, device: str) -> torch.dtype:
    """Return the dtype of the computation on a type of device."""
    auto = torch.bfloat16 if device == "cuda" else torch.float32
    return getattr(torch, cfg.dtype, auto)  # torch has no dtype called auto


def shard(model: Any, cfg: Any, world: World) -> None:
    """Pass the options for sharding to fsdp.py."""
    contexts = functools.partial(
        create_selective_checkpoint_contexts, lambda _context, op, *_, **__: _policy(op)
    )
    model.sharding = Sharding(
        keep_gathered=cfg.reshard_after_forward == "never",
        reduce_each=cfg.reduce_gradients == "micro_batch",
        offload=cfg.cpu_offload,
        whole=is_whole(cfg, world),
        dtype=compute_dtype(cfg, world.device.type),
        contexts=contexts if cfg.checkpointing == "selective" else noop_context_fn,
    )


@functools.cache
def _policy(op: Any) -> CheckpointPolicy:
    kept = any(part in str(op) for part in KEPT.split())
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def be_deterministic() -> None:
    """Use only deterministic operations on a GPU."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
    # In this mode, torch fills new tensors by default, which is slow.
    # The comment on the next line is needed because mypy does not know the property.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)
