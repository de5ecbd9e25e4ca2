"""The model cut into shards (FSDP2), and what else is done to it from outside: activation
checkpointing, torch.compile.

In: a model whose weights are not yet there, the world. Out: the same model, its parameters
DTensors: every rank holds a run of rows of each (maybe none), as float32 masters. A block is
gathered just before it computes, in the dtype it computes in, and given back after:

    forward     gather block 0 │ compute 0 ∥ gather 1 │ compute 1 ∥ gather 2 │ …            (∥: on a stream of its own)
    backward    … │ compute 1 ∥ gather 0 ∥ sum over ranks and scatter the gradients of 2 │ …

The gradient is that of one process: every loss is divided by the token count of the whole step
(packing.py), and the sum over ranks is taken, never a mean of means. FSDP by itself takes the mean:
train.py multiplies each loss by the number of ranks, and so must every other loop. Read next:
optim.py (the step), state.py (how shards are saved).
"""

from __future__ import annotations

import functools
import itertools

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from nanogrpo.config import Config
from nanogrpo.distributed.world import World
from nanogrpo.errors import UserError
from nanogrpo.model.decoder import Attend, Block, Decoder

aten = torch.ops.aten
# What selective checkpointing keeps: the results of matrix products and of attention, which cost
# most to make again. What lies between them (norms, rotation, SwiGLU) is cheap to repeat but makes
# up most of the memory.
KEPT = {
    *(aten.mm.default, aten.addmm.default, aten.bmm.default, aten.linear.default),
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
}
# operations that not every installation has
KEPT_NAMES = ("varlen_attn", "flash_attn", "mkldnn._linear_pointwise")


def prepare(model: Decoder, world: World, cfg: Config) -> None:
    """Everything, in the order that works: compilation innermost, recomputation around it, sharding
    outermost.

    FSDP's hooks, which gather a block, then run once around both passes over its forward, and the
    compiler never sees them.
    """
    known = torch.compiler.list_backends(exclude_tags=()) if cfg.torch_compile else []
    if cfg.torch_compile and cfg.torch_compile_backend not in known:
        raise UserError(
            f"--torch-compile-backend {cfg.torch_compile_backend} is not known to torch: choose one of {', '.join(known)}."
        )
    for block in model.model.layers:
        # `forward` is replaced on the instance: no wrapper module, so parameters keep their names
        # for checkpoints.
        if cfg.torch_compile:
            block.forward = _compiled(block, cfg.torch_compile_backend)
        if cfg.gradient_checkpointing != "none":
            block.forward = _recomputed(block.forward, cfg.gradient_checkpointing)
    shard(model, world, cfg)


class _Opaque:
    """`attend`, called without being traced: its kernels are compiled already, and its bounds
    change with every strip.
    """

    def __init__(self, attend: Attend):
        self.attend = attend

    @torch.compiler.disable
    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.attend(layer, q, k, v)


def _compiled(block: Block, backend: str):
    """A block's forward in two graphs, before and after attention, that all blocks and all strips
    share.

    Lengths are symbols (dynamic). But a module's numbers are constants to the compiler: with the
    layer's in it, each block would be another graph, and beyond the eighth none at all. Attention
    in training does not ask for it, so here every block is 0.
    """
    block.self_attn.layer = 0
    forward = torch.compile(block.forward, dynamic=True, backend=backend)

    def run(x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        return forward(x, cos, sin, _Opaque(attend))

    return run


def _recomputed(forward, kind: str):
    """`forward`, whose intermediate results are computed again in the backward instead of being
    kept.
    """
    # there is no dropout whose state could matter
    options: dict = {"use_reentrant": False, "preserve_rng_state": False}
    if kind == "selective":
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _policy)

    @functools.wraps(forward)
    def run(*args):
        return checkpoint(forward, *args, **options) if torch.is_grad_enabled() else forward(*args)

    return run


def _policy(_context, op, *_args, **_kwargs) -> CheckpointPolicy:
    kept = op in KEPT or any(name in str(op) for name in KEPT_NAMES)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def shard(model: Decoder, world: World, cfg: Config) -> None:
    """Cuts the parameters over the ranks: one unit a block, one for an untied head, the rest at the
    root.

    Float32 masters; on GPUs bfloat16 compute and float32 reduction. `cast_forward_inputs` would
    turn the float32 rotary angles into bfloat16. A tied head is the embedding: both belong to the
    root, whose parameters stay gathered between forward and backward; a unit of its own would
    gather the one matrix twice and see its gradient come from two places.
    """
    if not dist.is_initialized():
        return
    options: dict = {}
    if world.device.type == "cuda":
        options["mp_policy"] = MixedPrecisionPolicy(
            torch.bfloat16, torch.float32, cast_forward_inputs=False
        )
    if cfg.cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=world.device.type == "cuda")
    blocks = list(model.model.layers)
    for block in blocks:
        fully_shard(block, reshard_after_forward=cfg.reshard_after_forward, **options)
    if not model.cfg.tie_word_embeddings:
        # its backward follows its forward at once
        fully_shard(model.lm_head, reshard_after_forward=False, **options)
    fully_shard(model, reshard_after_forward=False, **options)
    # FSDP2 gathers ahead by itself, but only when the host reaches the next block. Packed strips
    # make the host wait (their bounds are read back), so the next gather is asked for before: one
    # block ahead, in the order of each pass.
    for block, following in itertools.pairwise(blocks):
        block.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([block])


def home(world: World, cfg: Config) -> torch.device:
    """Where the shards live."""
    return torch.device("cpu") if cfg.cpu_offload else world.device


def reshard(model: nn.Module) -> None:
    """Makes the parameters shards again: after a forward without a backward the root is still
    gathered, and its shards hidden.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@torch.no_grad()
def mix(reference: Decoder, model: Decoder, alpha: float) -> None:
    """reference ← alpha · model + (1 - alpha) · reference. Both are cut alike: each rank mixes its
    shards, nothing is sent.
    """
    reshard(reference)
    reshard(model)
    for mine, theirs in zip(reference.parameters(), model.parameters(), strict=True):
        mine.mul_(1 - alpha).add_(theirs, alpha=alpha)


def sync_gradients(model: nn.Module, on: bool) -> None:
    """Off for all but the last micro-batch of a step: gradients accumulate unsharded, and are
    reduced once.
    """
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(on)
