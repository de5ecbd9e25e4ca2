"""Shard the model over the ranks (FSDP2), recompute activations, and compile blocks.

In: a model without weights, and the world. Out: the same model with DTensor parameters. Each rank
holds some rows of every parameter (possibly none) as float32 master weights. A block is gathered
just before it computes, in the dtype it computes in, and freed afterwards:

    forward   gather block 0 │ compute 0 ∥ gather 1 │ compute 1 ∥ gather 2 │ …  (∥: another stream)
    backward  … │ compute 1 ∥ gather 0 ∥ reduce-scatter the gradients of 2 │ …

The gradient equals that of one process, because every loss is divided by the token count of the
full step (grpo/packing.py) and gradients are summed over the ranks. FSDP takes their mean instead,
so every training loop must call `backward` below. Read next: run/optim.py (the step), run/state.py
(how shards are saved).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from nanogrpo.config import Config
from nanogrpo.distributed.world import World
from nanogrpo.errors import UserError
from nanogrpo.model.decoder import Attend, Block, Decoder

# Selective checkpointing keeps the results of matrix products and attention, which cost most to
# recompute. The operations between them (norms, rotation, SwiGLU) are cheap to recompute but their
# results use most of the memory. The list contains parts of operation names, because not every
# installation has all of them.
KEPT: tuple[str, ...] = (
    "aten.mm.",
    "aten.addmm.",
    "aten.bmm.",
    "aten.linear.",
    "mkldnn._linear_pointwise",
)
KEPT += ("_scaled_dot_product_", "varlen_attn", "flash_attn")


def prepare(model: Decoder, world: World, cfg: Config) -> None:
    """Compile each block, then wrap it in activation checkpointing, then shard the model. Blocks
    of a vision encoder are not compiled.

    The order matters: FSDP's hooks, which gather a block, must run only once around the forward
    pass and once around its recomputation, and the compiler must not see them.
    """
    known = torch.compiler.list_backends(exclude_tags=()) if cfg.torch_compile else []
    if cfg.torch_compile and cfg.torch_compile_backend not in known:
        raise UserError(
            f"--torch-compile-backend {cfg.torch_compile_backend} is not known to torch: "
            f"choose one of {', '.join(known)}."
        )
    for block in model.blocks:
        # Replacing `forward` on the instance needs no wrapper module, so parameters keep the names
        # they have in checkpoints.
        if cfg.torch_compile and isinstance(block, Block):
            block.forward = _compiled(  # type: ignore[method-assign]
                block, cfg.torch_compile_backend
            )
        if cfg.checkpointing != "none":
            block.forward = _recomputed(block.forward, cfg.checkpointing, cfg.lora_dropout > 0)
    if dist.is_initialized():
        _shard(model, world, cfg)


class _Opaque:
    """Call `attend` without tracing it: its kernels are compiled already, and its bounds change
    with every strip.
    """

    def __init__(self, attend: Attend):
        self.attend = attend

    @torch.compiler.disable
    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.attend(layer, q, k, v)


def _compiled(block: Block, backend: str) -> Callable[..., Tensor]:
    """Compile a block's forward into two graphs, before and after attention, shared by all blocks.

    Lengths are symbolic (dynamic=True), so all strips share the graphs too. But the compiler treats
    a module's integers as constants: with distinct layer numbers, each block would get its own
    graph, and blocks beyond the eighth would not be compiled. Attention in training does not use
    the number, so we set it to 0 everywhere.
    """
    block.self_attn.layer = 0
    forward = torch.compile(block.forward, dynamic=True, backend=backend)

    def run(x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        return forward(x, cos, sin, _Opaque(attend))

    return run


def _recomputed(forward: Callable[..., Tensor], kind: str, dropout: bool) -> Callable[..., Tensor]:
    """Wrap `forward` so that the backward pass recomputes its activations. With `dropout`, the
    random state of the forward pass is restored for it.
    """
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": dropout}
    if kind == "selective":
        options["context_fn"] = functools.partial(
            create_selective_checkpoint_contexts, lambda _context, op, *_, **__: _policy(op)
        )

    @functools.wraps(forward)
    def run(*args):
        return checkpoint(forward, *args, **options) if torch.is_grad_enabled() else forward(*args)

    return run


@functools.cache
def _policy(op: torch._ops.OpOverload) -> CheckpointPolicy:
    kept = any(part in str(op) for part in KEPT)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def _shard(model: Decoder, world: World, cfg: Config) -> None:
    """Shard each block as one unit, an untied head as another, and all other parameters at the
    root.

    Master weights are float32; GPUs compute in bfloat16 and reduce in float32. So does any device
    if frozen weights are stored in bfloat16 (--lora-base-dtype). `cast_forward_inputs` is off
    because it would turn the float32 rotary angles into bfloat16. A tied head is the embedding and
    belongs to the root, whose parameters stay gathered between forward and backward. If it were a
    separate unit, the same matrix would be gathered twice and receive gradients from two places.
    """
    # Without a mesh, FSDP2 chooses the machine's accelerator, even for a model on the CPU.
    options: dict[str, Any] = {"mesh": init_device_mesh(world.device.type, (world.size,))}
    cuda = world.device.type == "cuda"
    if cuda or any(p.dtype == torch.bfloat16 for p in model.parameters()):
        options["mp_policy"] = MixedPrecisionPolicy(
            torch.bfloat16, torch.float32, cast_forward_inputs=False
        )
    if cfg.cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=cuda)
    keeps = cfg.reshard_after_forward == "never"
    blocks: list[Any] = model.blocks  # `fully_shard` makes them FSDPModules
    with _shards_of_bytes():
        for block in blocks:
            fully_shard(block, reshard_after_forward=not keeps, **options)
        if not model.cfg.tie_word_embeddings:
            # its backward pass immediately follows its forward pass
            fully_shard(model.lm_head, reshard_after_forward=False, **options)
        fully_shard(model, reshard_after_forward=False, **options)
    sharded: Any = model
    sharded.keeps_gathered = keeps  # both are read by `backward`
    sharded.reduces_each = cfg.reduce_gradients == "micro_batch"
    # FSDP2 prefetches only when the host reaches the next block. With packed strips the host often
    # waits for the GPU (to read their bounds), so we prefetch one block ahead explicitly in both
    # passes.
    for block, following in itertools.pairwise(blocks):
        block.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([block])


@contextlib.contextmanager
def _shards_of_bytes() -> Iterator[None]:
    """Let FSDP2 shard the bytes of --load-in-4bit with torch 2.11, where every new shard first
    requires a gradient, which only floats can.
    """
    plain = DTensor.requires_grad_

    def floats_only(self: DTensor, requires_grad: bool = True) -> Tensor:
        return plain(self, requires_grad and self.is_floating_point())

    # mypy would allow only the method itself, with any tensor as self
    DTensor.requires_grad_ = floats_only  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        DTensor.requires_grad_ = plain  # type: ignore[method-assign]


def reshard(model: nn.Module) -> None:
    """Free the gathered parameters. After a forward pass without a backward pass the root is still
    gathered, and its shards are not accessible.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def backward(model: nn.Module, loss: Tensor, world: World, last: bool) -> None:
    """Add the gradient of a micro-batch to the sum over all micro-batches and ranks.

    Each loss is already divided by the token count of the full optimizer step, so gradients are
    summed over the ranks. FSDP takes their mean: scaling the loss by the number of ranks turns that
    mean into the sum. Gradients accumulate unsharded, in place of the shards, and are reduced once,
    after the `last` micro-batch. With --reduce-gradients micro_batch they are reduced after each
    one, so only a rank's shard accumulates. A loss without a graph, from a strip that is only
    measured, adds nothing. With --reshard-after-forward never, the weights stay gathered until the
    last micro-batch.
    """
    if not loss.requires_grad:
        return
    if isinstance(model, FSDPModule):
        sharded: Any = model
        sharded.set_requires_gradient_sync(last or sharded.reduces_each)
        sharded.set_reshard_after_backward(last or not sharded.keeps_gathered)
    (loss * world.size).backward()


@torch.no_grad()
def update_reference(
    reference: Decoder | None, model: Decoder, cfg: Config, finished_steps: int
) -> None:
    """Move the reference model towards the policy every `ref_model_sync_steps` steps.

    reference ← α · model + (1 - α) · reference, with α = `ref_model_mixup_alpha`. Both models are
    sharded in the same way, so each rank mixes its own shards without communication. Does nothing
    without --sync-ref-model.
    """
    if reference is None or not cfg.sync_ref_model or finished_steps % cfg.ref_model_sync_steps:
        return
    reshard(reference)
    reshard(model)
    alpha = cfg.ref_model_mixup_alpha
    for mine, policy in zip(reference.parameters(), model.parameters(), strict=True):
        mine.mul_(1 - alpha).add_(policy, alpha=alpha)
