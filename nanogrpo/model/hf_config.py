"""The model configuration: read, check and write Hugging Face's config.json.

In: the dict of a config.json. Out: `ModelConfig`, the fields that decide what the decoder computes,
or a UserError that names the field. Read next: decoder.py, which uses the configuration.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from nanogrpo.errors import UserError

ARCHITECTURES = {"qwen3": "Qwen3ForCausalLM", "qwen2": "Qwen2ForCausalLM"}
NUMBERS = {"int": ((int,), "a whole number"), "float": ((int, float), "a number")}
# Larger numbers must be mistakes: such a model would take too long to build or overflow 64 bits.
LIMITS: dict[str, float] = {
    "num_hidden_layers": 2**12,
    "max_position_embeddings": 2**31,
    "rope_theta": 1e30,
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
    # Qwen3 only: a bias on q, k, v and o. Qwen2 always has one on q, k and v.
    attention_bias: bool = False

    @property
    def pair_cost(self) -> float:
        """Return the cost of attention for one query-key pair, 4·H·E FLOP, in units of the matrix
        products of one token, 2 FLOP per weight. Both are counted for a single layer.
        """
        heads = self.num_attention_heads * self.head_dim
        kv_heads = self.num_key_value_heads * self.head_dim
        weights = self.hidden_size * (2 * heads + 2 * kv_heads + 3 * self.intermediate_size)
        return 2 * heads / weights

    @classmethod
    def from_dict(cls, raw: dict, where: str = "config.json") -> ModelConfig:
        """Read the dict of a config.json. A missing field gets its default value from transformers.

        Raises UserError on a missing or wrong field, and on an architecture or feature that the
        decoder does not support. `where` is the name of the file in the message.
        """

        def require(ok: bool, problem: str, advice: str = "use the model's original file") -> None:
            if not ok:
                raise UserError(f"{where}: {problem}; {advice}.")

        # rope_parameters in transformers 5, rope_scaling in 4
        rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
        require(isinstance(rope, dict), f"rope_parameters is {rope!r:.60} but must be an object")
        for name, given, supported in (
            ("model_type", raw.get("model_type"), [*ARCHITECTURES]),
            ("rope_type", rope.get("rope_type", rope.get("type", "default")), ["default"]),
            ("hidden_act", raw.get("hidden_act", "silu"), ["silu"]),
            ("use_sliding_window", raw.get("use_sliding_window") or False, [False]),
        ):
            names = " or ".join(map(str, supported))
            require(given in supported, f"{name} {given!r} is not supported", f"it must be {names}")

        theta = rope.get("rope_theta") or raw.get("rope_theta") or 10_000.0
        found: dict = {"model_type": raw["model_type"]}
        for field in dataclasses.fields(cls)[1:]:
            value: Any = theta if field.name == "rope_theta" else raw.get(field.name)
            if value is None and field.name == "head_dim":
                # Qwen3's default is a constant, which may differ from D / H
                qwen2 = found["model_type"] == "qwen2"
                value = found["hidden_size"] // found["num_attention_heads"] if qwen2 else 128
            if value is None and field.default is not dataclasses.MISSING:
                continue
            require(value is not None, f"the field {field.name} is missing")
            if field.type == "bool":
                right, wanted = isinstance(value, bool), "true or false"
            else:
                types, kind = NUMBERS[str(field.type)]
                limit = LIMITS.get(field.name, 2**24)
                right = type(value) in types and 0 < value < limit
                wanted = f"{kind} above 0 and below {limit}"
            require(right, f"{field.name} is {value!r:.60} but must be {wanted}")
            found[field.name] = value

        cfg = cls(**found)
        require(
            cfg.num_attention_heads % cfg.num_key_value_heads == 0,
            "num_attention_heads must be a multiple of num_key_value_heads",
        )
        require(
            cfg.head_dim % 2 == 0,
            f"head_dim {cfg.head_dim} is odd, but the rotary embedding pairs dimensions",
        )
        return cfg

    def to_dict(self) -> dict:
        """Return the dict of a config.json that transformers (4 and 5) and vLLM can read."""
        return {
            "architectures": [ARCHITECTURES[self.model_type]],
            **dataclasses.asdict(self),
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "hidden_act": "silu",
            "use_sliding_window": False,
        }
