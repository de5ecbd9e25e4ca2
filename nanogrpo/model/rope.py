"""Rotary position embedding: its frequencies, and how scaling changes them for longer contexts.

In: `rope_scaling` or `rope_parameters` of a config.json. Out: a `Scaling`, or a UserError if its
kind is not supported; and the frequencies [E/2], with a factor for cosines and sines.

Dimensions i and i + E/2 of a head are rotated by the angle position · f_i, f_i = theta^(-2i/E).
Scaling by a factor s keeps the angles of later positions in the range that the model was trained
on:

    linear    f_i / s
    llama3    f_i / s if the wavelength 2π / f_i exceeds the trained context / low_freq_factor, f_i
              if it is below the trained context / high_freq_factor, and a mixture in between
    yarn      the same three cases, linear in i, with bounds in rotations per trained context;
              cosines and sines are multiplied by 0.1 · ln s + 1, which sharpens attention
              (Peng et al. 2023, arXiv 2309.00071)

The order of the operations is that of transformers, because at position 100,000 even the last bit
of f_i changes the angle. Read next: decoder.py, which rotates queries and keys.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# The numbers that each kind reads, under their names in transformers.
TRAINED = "original_max_position_embeddings"
REQUIRED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", TRAINED, "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", TRAINED),
}
OPTIONAL = {"yarn": ("attention_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow")}


@dataclass(frozen=True)
class Scaling:
    """The fields of `rope_parameters` that affect the computation, under their names there."""

    rope_type: str
    factor: float
    original_max_position_embeddings: float = 0  # the trained context
    low_freq_factor: float = 0
    high_freq_factor: float = 0
    attention_factor: float | None = None
    mscale: float = 0
    mscale_all_dim: float = 0
    beta_fast: float = 32
    beta_slow: float = 1
    truncate: bool = True

    def to_dict(self) -> dict:
        """Return the fields that differ from the defaults."""
        changed = (f for f in dataclasses.fields(self) if getattr(self, f.name) != f.default)
        return {f.name: getattr(self, f.name) for f in changed}


def read(rope: dict, raw: dict, require: Callable[..., None]) -> Scaling | None:
    """Return the scaling that a config.json describes, or None if there is none.

    rope: the object that transformers would read; raw: all of config.json; require: raises a
    UserError with its second argument if the first is false.
    """
    nested = " and ".join(name for name, value in rope.items() if isinstance(value, dict))
    require(not nested, f"rope_parameters that differ by layer ({nested}) are not supported")
    kind, kinds = rope.get("rope_type", rope.get("type", "default")), [*REQUIRED]
    names = f"{', '.join(kinds[:-1])} or {kinds[-1]}"
    require(kind in kinds, f"rope_type {kind!r:.60} is not supported", f"it must be {names}")
    if kind == "default":
        return None
    # As in transformers: the field outside the object comes first, and the default is the context.
    context = raw.get("max_position_embeddings")
    given = {**rope, TRAINED: raw.get(TRAINED) or rope.get(TRAINED) or context}
    found: dict = {}
    for name in REQUIRED[kind] + OPTIONAL.get(kind, ()):
        value: Any = given.get(name)
        off = (None,) if name == "attention_factor" else (None, 0)  # values that mean the default
        if name in REQUIRED[kind] or value not in off:
            fine = type(value) in (int, float) and 1e-9 <= value <= 2e9
            problem = (
                f"{name} is {value!r:.60} but rope_type {kind} needs a number from 1e-9 to 2e9"
            )
            require(fine, problem)
            found[name] = value
    if kind == "llama3":
        low, high = found["low_freq_factor"], found["high_freq_factor"]
        require(low < high, f"low_freq_factor {low} is not below high_freq_factor {high}")
    if kind == "yarn" and not rope.get("truncate", True):
        found["truncate"] = False
    return Scaling(kind, **found)


def frequencies(
    theta: float, size: int, scaling: Scaling | None, device: torch.device
) -> tuple[Tensor, float]:
    """Return f_i, [E/2] float32 for a head of `size` E, and the factor of cosines and sines."""
    # always float32, because bf16 cannot represent all positions above 256
    even = torch.arange(0, size, 2, device=device, dtype=torch.float32)
    powers = theta ** (even / size)  # [E/2]
    plain = 1.0 / powers
    if scaling is None:
        return plain, 1.0
    if scaling.rope_type == "linear":
        return plain / scaling.factor, 1.0
    if scaling.rope_type == "llama3":
        return _llama3(plain, scaling), 1.0
    return _yarn(plain, powers, theta, scaling), _attention_factor(scaling)


def _llama3(plain: Tensor, s: Scaling) -> Tensor:
    trained, low, high = s.original_max_position_embeddings, s.low_freq_factor, s.high_freq_factor
    wavelength = 2 * math.pi / plain
    # 0 at the longest of the wavelengths between the two bounds, 1 at the shortest
    mixture = (trained / wavelength - low) / (high - low)
    mixed = (1 - mixture) * plain / s.factor + mixture * plain
    slow = torch.where(wavelength > trained / low, plain / s.factor, mixed)
    return torch.where(wavelength < trained / high, plain, slow)


def _yarn(plain: Tensor, powers: Tensor, theta: float, s: Scaling) -> Tensor:
    trained, E = s.original_max_position_embeddings, 2 * len(plain)

    def index(rotations: float) -> float:
        """Return the i for which a dimension rotates this often within the trained context."""
        return E * math.log(trained / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = index(s.beta_fast), index(s.beta_slow)
    if s.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, E - 1)
    if low == high:
        high += 0.001  # as in transformers, against a division by zero
    i = torch.arange(len(plain), device=plain.device, dtype=torch.float32)
    # 1 for the fast dimensions, which keep their frequency; 0 for the slow ones
    kept = 1 - ((i - low) / (high - low)).clamp(0, 1)  # [E/2]
    return 1.0 / (s.factor * powers) * (1 - kept) + plain * kept


def _attention_factor(s: Scaling) -> float:
    def sharper(scale: float) -> float:
        return 0.1 * scale * math.log(s.factor) + 1.0 if s.factor > 1 else 1.0

    if s.attention_factor is not None:
        return s.attention_factor
    if s.mscale and s.mscale_all_dim:
        return sharper(s.mscale) / sharper(s.mscale_all_dim)
    return sharper(1)
