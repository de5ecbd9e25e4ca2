"""Choose between two implementations of the same functions, Triton kernels and PyTorch code.

In: the device that computes. Out: the package kernels/triton/ or kernels/reference/ (PyTorch). Both
have the same functions. The option `--kernels` sets the choice for the whole process. Read next:
kernels/reference/policy.py.
"""

from types import ModuleType

import torch

from nanogrpo.errors import UserError
from nanogrpo.kernels import reference

choice = "auto"  # or triton, or torch; `--kernels` sets it (run/setup.py)


def uses_triton(device: torch.device) -> bool:
    """Return whether Triton kernels process the tensors of a device. The choice `auto` uses Triton
    only on CUDA.
    """
    return choice == "triton" or (choice == "auto" and device.type == "cuda")


def functions_for(device: torch.device) -> ModuleType:
    """Return the package with the functions for tensors on a device."""
    if not uses_triton(device):
        return reference
    try:
        from nanogrpo.kernels import triton  # a CPU does not need Triton
    except ImportError as e:
        raise UserError(
            f"--kernels {choice} needs Triton, which cannot be imported ({e}): install it, or use "
            "--kernels torch."
        ) from e
    return triton
