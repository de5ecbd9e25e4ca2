"""The choice between two implementations of the same functions: Triton kernels, or PyTorch.

In: the device that computes. Out: kernels/fused.py (Triton) or kernels/reference.py (PyTorch),
which have the same functions. `--kernels` chooses for the whole process: the trainer, the local
engine and reward models. Read next: kernels/reference.py.
"""

from __future__ import annotations

import functools
from types import ModuleType

import torch

from nanogrpo.errors import UserError
from nanogrpo.kernels import reference

choice = "auto"  # or triton, or torch; `--kernels` sets it (run/setup.py)


def functions_for(device: torch.device) -> ModuleType:
    """Return the functions for tensors on a device. auto means Triton on CUDA, PyTorch elsewhere.

    Code that torch.compile traces gets PyTorch's, because the compiler fuses them itself.
    """
    return reference if torch.compiler.is_compiling() else _module(device.type, choice)


@functools.cache
def _module(device: str, name: str) -> ModuleType:
    if name == "torch" or (name == "auto" and device != "cuda"):
        return reference
    try:
        from nanogrpo.kernels import fused  # imports Triton, which a CPU does not need
    except ImportError as e:
        raise UserError(
            f"--kernels {name} needs Triton, which cannot be imported ({e}): install it, or use "
            "--kernels torch."
        ) from e
    return fused
