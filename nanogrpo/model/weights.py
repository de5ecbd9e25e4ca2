"""The weights of a model under the names that they have in a checkpoint.

In: a model, full or sharded over the ranks. Out: the parameters that a checkpoint contains, or the
full tensors. Engines, checkpoints and the memory estimate all use the functions of this file.

Some layers of extras do not store their weight as one parameter. Such a layer defines some of these
attributes:

    `internal` contains the names of the parameters that are not in checkpoints.
    `full_weight()` returns the full matrix that the layer computes with.
    `stored` receives the weight of a checkpoint (see `Stored`).

Read next: checkpoint.py (the files), engine/local.py (which copies the weights).
"""

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn


class Stored(Protocol):
    """The object that receives a checkpoint's weight if a layer has its own storage format."""

    shape: torch.Size
    dtypes: tuple[str, ...]  # further accepted dtypes, named as in safetensors

    def fill(self, source: Any) -> None: ...


def parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter | Stored]]:
    """Yield (name, parameter) once for each parameter that a checkpoint contains."""
    layers = dict(model.named_modules())
    for name, p in model.named_parameters():
        prefix, _, own = name.rpartition(".")
        layer = layers[prefix]
        if own not in getattr(layer, "internal", ()):
            yield name, getattr(layer, "stored", p) if own == "weight" else p


def sizes(model: nn.Module) -> tuple[int, int]:
    """Return the number of trained weights, and the number of all weights."""
    kept = {name: p.shape.numel() for name, p in parameters(model)}
    trained = {name: p.numel() for name, p in model.named_parameters() if p.requires_grad}
    return sum(trained.values()), sum((trained | kept).values())


def gathered(p: Tensor) -> Tensor:
    """Return a parameter, detached. If a parameter is sharded, a collective gathers its shards,
    unless one rank has all shards.
    """
    whole: Any = p.detach()
    if not hasattr(whole, "full_tensor"):  # only a DTensor has it
        return whole
    return whole.to_local() if whole.device_mesh.size() == 1 else whole.full_tensor()


def full_parameters(model: nn.Module, computed: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, full tensor) for each parameter that a checkpoint contains.

    Under FSDP2, every rank must iterate to the end, because shards are gathered by collectives. By
    default, the tensors are the master weights, gathered one by one. With `computed`, FSDP gathers
    each unit in one collective, on the device and in the dtype of training. The values are then
    exactly the values that the model computes with. Each of these tensors is valid only until the
    next tensor is requested.
    """
    names = dict(parameters(model))  # lists a tied parameter only once

    def walk(module: nn.Module, prefix: str) -> Iterator[tuple[str, Tensor]]:
        unit: Any = module if computed and hasattr(module, "unshard") else None  # an FSDPModule
        if unit:
            unit.unshard()
        whole: Any = getattr(module, "full_weight", None)
        for name, p in module.named_parameters(recurse=False):
            if prefix + name in names:
                yield prefix + name, whole() if whole and name == "weight" else gathered(p)
        for name, child in module.named_children():
            yield from walk(child, f"{prefix}{name}.")
        if unit:
            unit.reshard()

    return walk(model, "")


@torch.no_grad()
def host_weights(
    model: nn.Module, dtype: torch.dtype | None = None, keep: bool = True
) -> dict[str, Tensor]:
    """Return copies of the full weights in host memory, without a tied head.

    Shards are gathered one by one, so every rank must call this function. If `keep` is off, a rank
    discards each tensor immediately.
    """
    # if head and embedding are tied, only the embedding is yielded
    return {
        name: full.to("cpu", dtype, copy=True).contiguous()
        for name, full in full_parameters(model)
        if keep
    }
