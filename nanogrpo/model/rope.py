"""Compute the frequencies of rotary position embedding.

In: the base theta and the size E of a head. Out: the frequencies [E], and a factor for cosines
and sines. Dimensions i and i + E/2 of a head are rotated by the angle position · f_i, with
f_i = theta^(-2i/E). Read next: decoder.py, which rotates queries and keys.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# Some models change the frequencies for longer contexts.
# SCALINGS maps a rope_type to a function that reads this change from config.json.
# Its arguments are the rope_type, the JSON object that contains the rope_type, all of config.json,
# and the file's name.
# It returns an object with `frequencies` and `to_dict`.
SCALINGS: dict[str, Callable[[str, dict, dict, str], Any]] = {}


@functools.cache  # cached, because a decode step should launch few kernels
def frequencies(
    theta: float, size: int, scaling: Any, device: torch.device
) -> tuple[Tensor, float]:
    """Return the frequencies [E] float32 of a head, and a factor for cosines and sines. `size` is
    the head size E.
    """
    # always float32, because bf16 cannot represent all positions above 256
    even = torch.arange(0, size, 2, device=device, dtype=torch.float32)
    powers = theta ** (even / size)  # [E/2]
    half, factor = scaling.frequencies(powers, theta) if scaling else (1.0 / powers, 1.0)
    return torch.cat((half, half)), factor
