"""Scale rotary position embeddings for longer contexts, as Llama 3 does.

In: the field `rope_scaling` or `rope_parameters` of a config.json. Out: a `Scaling`, which scales
the frequencies. Raises UserError if a field is not supported. Importing this file adds the kinds of
scaling below to `SCALINGS`, where hf_config.py finds them. The model was trained on a limited range
of angles. Scaling by a factor s keeps the angles of later positions in this range:

* linear: all frequencies become f_i / s.
* llama3: a frequency becomes f_i / s if its wavelength 2π / f_i exceeds the trained context divided
  by low_freq_factor. The frequency does not change if its wavelength is below the trained context
  divided by high_freq_factor. Between these bounds, it becomes a mixture of both values.
* yarn: the same three cases as in llama3, but the mixture is linear in i, and the bounds are
  numbers of rotations per trained context. Cosines and sines are multiplied by 0.1 · ln s + 1,
  which sharpens attention (Peng et al. 2023, arXiv 2309.00071).

The operations are done in the same order as in transformers, because at position 100,000 even the
last bit of f_i changes the angle. Read before: model/rope.py.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from nanogrpo.errors import check
from nanogrpo.model.rope import SCALINGS

# The fields that each kind of scaling reads, named as in transformers.
TRAINED = "original_max_position_embeddings"
NUMBERS = {
    "linear": ("factor",),
    "llama3": ("factor", TRAINED, "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", TRAINED),
}
# yarn: a dimension with more than FAST rotations in the trained context keeps its frequency.
# The frequency of a dimension with fewer than SLOW rotations is divided by the full factor.
FAST, SLOW = 32, 1
# Unsupported fields, each with the only accepted value, which changes nothing.
NEUTRAL = {
    "mscale": 0,
    "mscale_all_dim": 0,
    "truncate": True,
    "attention_factor": None,
    "beta_fast": FAST,
    "beta_slow": SLOW,
}


@dataclass(frozen=True)
class Scaling:
    """The fields of `rope_parameters` that affect the computation, with the same names."""

    rope_type: str
    factor: float
    original_max_position_embeddings: float = 0  # the trained context
    low_freq_factor: float = 0
    high_freq_factor: float = 0

    def frequencies(self, powers: Tensor, theta: float) -> tuple[Tensor, float]:
        """Return f_i and the factor for cosines and sines. `powers`: the unscaled 1 / f_i [E/2]."""
        plain = 1.0 / powers
        if self.rope_type == "linear":
            return plain / self.factor, 1.0
        if self.rope_type == "llama3":
            return _llama3(plain, self), 1.0
        return _yarn(plain, powers, theta, self), 0.1 * math.log(self.factor) + 1.0

    def to_dict(self) -> dict:
        """Return the fields that this kind of scaling has."""
        return {name: value for name, value in vars(self).items() if value}


def read(kind: str, rope: dict, raw: dict, where: str) -> Scaling:
    """Return the scaling of a config.json.

    `rope` is the object that transformers would read, `raw` is all of config.json, and `where` is
    the file's name.
    """
    for name, plain in NEUTRAL.items():
        check(where, f"rope_type {kind} with {name}", rope.get(name), [plain, None])
    # As in transformers: the field in `raw`, else the field in `rope`, else the model's context.
    trained = raw.get(TRAINED) or rope.get(TRAINED) or raw.get("max_position_embeddings")
    given = {**rope, TRAINED: trained}
    return Scaling(kind, **{name: float(given[name]) for name in NUMBERS[kind]})


SCALINGS |= dict.fromkeys(NUMBERS, read)


def _llama3(plain: Tensor, s: Scaling) -> Tensor:
    trained, low, high = s.original_max_position_embeddings, s.low_freq_factor, s.high_freq_factor
    wavelength = 2 * math.pi / plain
    # from 0 for the longest wavelengths to 1 for the shortest
    kept = ((trained / wavelength - low) / (high - low)).clamp(0, 1)  # [E/2]
    return (1 - kept) * plain / s.factor + kept * plain


def _yarn(plain: Tensor, powers: Tensor, theta: float, s: Scaling) -> Tensor:
    trained, E = s.original_max_position_embeddings, 2 * len(plain)

    def index(rotations: float) -> float:
        """Return the index of a dimension that makes this many rotations in the trained context."""
        return E * math.log(trained / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = max(math.floor(index(FAST)), 0), min(math.ceil(index(SLOW)), E - 1)
    i = torch.arange(len(plain), device=plain.device, dtype=torch.float32)
    # 1 for fast dimensions, which keep their frequency, and 0 for slow dimensions
    kept = 1 - ((i - low) / (high - low)).clamp(0, 1)  # [E/2]
    return 1.0 / (s.factor * powers) * (1 - kept) + plain * kept
