"""Shard the model over the ranks (FSDP2), and recompute activations.

In: a model without weights, and the world. Out: the same model with DTensor parameters. Each rank
holds some rows of every parameter (possibly none) as float32 master weights. The weights of a block
are gathered in the compute dtype just before the block runs, and freed afterwards:

    forward   gather block 0 │ compute 0 ∥ gather 1 │ compute 1 ∥ gather 2 │ …  (∥: another stream)
    backward  … │ compute 1 ∥ gather 0 ∥ reduce-scatter the gradients of 2 │ …

The gradient is the same as in a run with one process. For this, every loss is divided by the token
count of the full step (grpo/packing.py), and gradients are summed over the ranks. FSDP itself
averages gradients over the ranks. The function `backward` below turns this average into a sum, so
every training loop must call `backward`. Read next: run/optim.py (the step), run/state.py (how
shards are saved).
"""

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint, noop_context_fn

from nanogrpo.config import Config
from nanogrpo.distributed.world import World


@dataclass(frozen=True)
class Sharding:
    """How a model is sharded: `model.sharding`, or these defaults."""

    keep_gathered: bool = False  # keep a block's weights gathered until the optimizer step
    reduce_each: bool = False  # reduce gradients after each micro-batch
    offload: bool = False  # keep the shards in host memory
    whole: bool = False  # do not shard the model; the caller handles its weights
    dtype: torch.dtype = torch.float32  # of the computation
    # tells torch's `checkpoint` which results to keep instead of recomputing them
    contexts: Callable[[], Any] = noop_context_fn


def prepare(model: Any, world: World, cfg: Config) -> None:
    """Wrap each block in activation checkpointing, then shard the model.

    The order matters. FSDP's hooks gather the weights of a block, and must run before the forward
    pass of the block and before its recomputation.
    """
    model.sharding = model.sharding or Sharding()
    if cfg.checkpointing != "none":
        for block in model.blocks:
            # `forward` is replaced, because a wrapper module would change parameter names.
            block.forward = _recomputed(block.forward, model.sharding.contexts)
    if dist.is_initialized() and not model.sharding.whole:
        _shard(model, world)


def _recomputed(forward: Callable[..., Any], contexts: Callable[[], Any]) -> Callable[..., Any]:
    """Wrap a block's `forward` so that the backward pass recomputes its activations.

    A decoder block returns two tensors, but only their sum is kept between two blocks.
    """

    def summed(*args: Any) -> Any:
        out = forward(*args)
        return (out[0] + out[1], None) if isinstance(out, tuple) else out

    @functools.wraps(forward)
    def run(*args: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args)
        return checkpoint(
            summed, *args, use_reentrant=False, preserve_rng_state=False, context_fn=contexts
        )

    return run


def _shard(model: Any, world: World) -> None:
    """Shard each block as one unit, an untied head as one unit, and all other parameters as the
    root unit.

    Master weights are float32, and gradients are reduced in float32. `cast_forward_inputs` is off
    because it would turn the float32 rotary angles into 16-bit numbers. A tied head is the same
    parameter as the embedding, so it belongs to the root unit. The parameters of the root unit stay
    gathered between the forward and the backward pass. If a tied head were a separate unit, the
    same matrix would be gathered twice and receive gradients from two places.
    """
    # Without a mesh, FSDP2 chooses the machine's accelerator, even for a model on the CPU.
    options: dict[str, Any] = {"mesh": init_device_mesh(world.device.type, (world.size,))}
    cuda = world.device.type == "cuda"
    if model.sharding.dtype != torch.float32:
        options["mp_policy"] = MixedPrecisionPolicy(
            model.sharding.dtype, torch.float32, cast_forward_inputs=False
        )
    if model.sharding.offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=cuda)
    blocks = model.blocks  # `fully_shard` makes them FSDPModules
    for block in blocks:
        fully_shard(block, reshard_after_forward=not model.sharding.keep_gathered, **options)
    if not model.cfg.tie_word_embeddings:
        # the head stays gathered: its backward pass directly follows its forward pass
        fully_shard(model.lm_head, reshard_after_forward=False, **options)
    fully_shard(model, reshard_after_forward=False, **options)
    # By default, FSDP2 starts to gather a block when the host reaches this block.
    # This would be too late, because the host often waits for the GPU.
    # So each block explicitly prefetches the next block, in both passes.
    for block, following in itertools.pairwise(blocks):
        block.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([block])


def reshard(model: nn.Module) -> None:
    """Free the gathered parameters, so that their shards can be accessed. After a forward pass
    without a backward pass, the root's parameters stay gathered until `reshard` is called.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def backward(model: nn.Module, loss: Tensor, world: World, last: bool) -> None:
    """Add the gradient of a micro-batch to the sum over all micro-batches and ranks.

    Each loss is already divided by the token count of the full optimizer step, so gradients are
    summed over the ranks. FSDP computes the mean over the ranks, so the loss is multiplied by the
    number of ranks. Each rank accumulates unsharded gradients, which are reduced once, after the
    `last` micro-batch. With `reduce_each`, gradients are reduced after each micro-batch, so each
    rank accumulates only its own shard. With `keep_gathered`, the weights stay gathered until the
    last micro-batch.
    """
    if isinstance(model, FSDPModule):
        how: Any = model.sharding
        model.set_requires_gradient_sync(last or how.reduce_each)
        model.set_reshard_after_backward(last or not how.keep_gathered)
    (loss * world.size).backward()
