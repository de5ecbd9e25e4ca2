"""The model configuration: read, check and write Hugging Face's config.json.

In: the dict of a config.json. Out: a `ModelConfig`, which has all fields that affect the decoder.
Raises UserError, with the name of a field. Read next: decoder.py, which uses the configuration.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nanogrpo.errors import check
from nanogrpo.model.rope import SCALINGS

ARCHITECTURES = {
    "qwen3": "Qwen3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
}
# Functions that read how the layers of a model differ.
# A function gets the dict of config.json and the name of the file.
# It returns the dict without the differences, and puts them into a new field `layers`.
READERS: list[Callable[[dict, str], dict]] = []
# Fields that can change what transformers computes.
# The decoder supports only the value given here for each field, or null.
NEUTRAL: dict[str, Any] = {
    "hidden_act": "silu",
    "use_sliding_window": False,
    "partial_rotary_factor": 1,
    "is_causal": True,
    "quantization_config": None,
}


@dataclass(frozen=True)
class ModelConfig:
    """The fields of config.json that affect the computation, under their Hugging Face names."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rope_theta: float
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    # Qwen3 and Llama only: a bias on q, k, v and o. Qwen2 always has a bias on q, k and v.
    attention_bias: bool = False
    mlp_bias: bool = False  # Llama only: a bias on gate, up and down
    rope_scaling: Any = None  # one of rope.SCALINGS
    # None, or the object that one of READERS has stored under `layers`.
    # This object has `to_dict`, and `window(layer)`: how many tokens a token attends to (0: all).
    layers: Any = None

    @property
    def qk_norm(self) -> bool:
        """Whether the query and key of each head are normalized before the rotation."""
        return self.model_type == "qwen3"

    @property
    def block_weights(self) -> int:
        """The number of weights in the matrices of a layer."""
        heads = 2 * (self.num_attention_heads + self.num_key_value_heads) * self.head_dim
        return self.hidden_size * (heads + 3 * self.intermediate_size)

    @property
    def pair_cost(self) -> float:
        """Return the cost of attention for one query-key pair, relative to the matrix products of
        one token. In one layer, a pair costs 4·H·E FLOP, and a token costs 2 FLOP per weight.
        """
        return 2 * self.num_attention_heads * self.head_dim / self.block_weights

    @classmethod
    def from_dict(cls, raw: dict, where: str = "config.json") -> "ModelConfig":
        """Read the dict of a config.json. A missing optional field gets the same default as in
        transformers.

        Raises UserError if the decoder does not support an architecture or feature, and KeyError or
        TypeError if a required field is missing. `where` is the name of the file in messages.
        """
        for read in READERS:
            raw = read(raw, where)
        kind = raw.get("model_type")
        check(where, "model_type", kind, [*ARCHITECTURES])
        # transformers 5 writes rope_parameters, but reads the older rope_scaling first.
        angles = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
        for name, neutral in NEUTRAL.items():
            for fields in raw, angles:  # partial_rotary_factor may be in either dict
                check(where, name, fields.get(name), [neutral, None])
        for layer in raw.get("layer_types") or []:
            check(where, "layer_types", layer, ["full_attention"])
        if kind == "mistral":  # by default, a Mistral model has a window of 4096 tokens
            check(where, "sliding_window", raw.get("sliding_window", 4096), [None])

        scaled = angles.get("rope_type", angles.get("type", "default"))
        check(where, "rope_type", scaled, ["default", *SCALINGS])
        scaling = scaled in SCALINGS and SCALINGS[scaled](scaled, angles, raw, where)
        theta = angles.get("rope_theta", raw.get("rope_theta", 10_000.0))
        heads = raw["num_attention_heads"]
        # Qwen3's default head size is a constant, which may differ from D / H
        size = 128 if kind == "qwen3" else raw["hidden_size"] // heads
        names = ModelConfig.__annotations__  # of the fields
        given = {name: raw[name] for name in names if raw.get(name) is not None}
        found = {"head_dim": size, "num_key_value_heads": heads, **given, "rope_theta": theta}
        for name in ("rope_theta", "rms_norm_eps"):
            x = found.get(name, 1e-6)
            check(where, name, x, [x if 0 < x < math.inf else "a number above 0"])
        return cls(**{**found, "rope_theta": float(theta), "rope_scaling": scaling or None})

    def to_dict(self) -> dict:
        """Return the dict of a config.json that transformers (4 and 5) can read."""
        fields = {**vars(self), "sliding_window": None}
        layers = fields.pop("layers")
        return {
            "architectures": [ARCHITECTURES[self.model_type]],
            **fields,
            "rope_scaling": self.rope_scaling and self.rope_scaling.to_dict(),
            **(layers.to_dict() if layers else {}),
        }
