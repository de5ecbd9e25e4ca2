"""The model configuration: read, check and write Hugging Face's config.json.

In: the dict of a config.json. Out: `ModelConfig`, the fields that decide what the decoder computes,
or a UserError that names the field. Read next: rope.py (the fields of rotary embedding), then
decoder.py, which uses the configuration.
"""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass
from typing import Any

from nanogrpo.errors import UserError
from nanogrpo.model import rope

log = logging.getLogger("nanogrpo")

ARCHITECTURES = {
    "qwen3": "Qwen3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
}
NUMBERS = {"int": ((int,), "a whole number"), "float": ((int, float), "a number")}
# Larger numbers must be mistakes: such a model would take too long to build or overflow 64 bits.
LIMITS: dict[str, float] = {
    "num_hidden_layers": 2**12,
    "max_position_embeddings": 2**31,
    "rope_theta": 1e30,
}
# Fields that would change the computation in transformers, vLLM or both, and the only value (next
# to null) with which the decoder computes the same.
NEUTRAL: dict[str, Any] = {
    "hidden_act": "silu",
    "use_sliding_window": False,
    "partial_rotary_factor": 1,
    "is_causal": True,
    "qk_norm": False,
    "embedding_multiplier": 1,
    "residual_multiplier": 1,
    "attention_multiplier": None,
    "logit_scale": 1,
    "logits_scaling": 1,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "per_layer_config": None,
}
# The fields of quantization_config whose weights nf4.py can read: those of bitsandbytes in four
# bits. The last one may be missing.
FOUR_BITS: dict[str, Any] = {
    "quant_method": "bitsandbytes",
    "load_in_4bit": True,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True,
    "bnb_4bit_quant_storage": "uint8",
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
    # Qwen3 and Llama only: a bias on q, k, v and o. Qwen2 always has one on q, k and v.
    attention_bias: bool = False
    mlp_bias: bool = False  # Llama only: a bias on gate, up and down
    rope_scaling: rope.Scaling | None = None
    vision: Any = None  # of a vision-language model: a vision.config.VisionConfig

    @property
    def qk_norm(self) -> bool:
        """Whether each head's query and key are normalized before the rotation."""
        return self.model_type == "qwen3"

    @property
    def block_weights(self) -> int:
        """The number of weights in the matrices of a layer."""
        heads = 2 * (self.num_attention_heads + self.num_key_value_heads) * self.head_dim
        return self.hidden_size * (heads + 3 * self.intermediate_size)

    @property
    def pair_cost(self) -> float:
        """Return the cost of attention for one query-key pair, 4·H·E FLOP, in units of the matrix
        products of one token, 2 FLOP per weight. Both are counted for a single layer.
        """
        return 2 * self.num_attention_heads * self.head_dim / self.block_weights

    @classmethod
    def from_dict(cls, raw: dict, where: str = "config.json") -> ModelConfig:
        """Read the dict of a config.json. A missing field gets its default value from transformers.

        Raises UserError on a missing or wrong field, and on an architecture or feature that the
        decoder does not support. `where` is the name of the file in the message.
        """

        def require(ok: bool, problem: str, advice: str = "use the model's original file") -> None:
            if not ok:
                raise UserError(f"{where}: {problem}; {advice}.")

        vision = None
        if raw.get("model_type") == "qwen3_vl":
            from nanogrpo.vision import config  # only such a model needs this folder

            raw, vision = config.read(raw, require)
        kind, names = raw.get("model_type"), [*ARCHITECTURES]
        advice = f"it must be {', '.join(names)} or qwen3_vl"
        require(kind in names, f"model_type {kind!r:.60} is not supported", advice)
        for name, neutral in NEUTRAL.items():
            given = raw.get(name)
            advice = f"it must be {'null' if neutral is None else neutral}"
            require(given in (None, neutral), f"{name} {given!r:.60} is not supported", advice)
        stored = raw.get("quantization_config") or {}
        require(isinstance(stored, dict), f"quantization_config is {stored!r:.60}")
        for name, needed in FOUR_BITS.items() if stored else ():
            given = stored.get(name, needed if name == "bnb_4bit_quant_storage" else None)
            require(
                given == needed,
                f"quantization_config with {name} {given!r:.60} is not supported",
                f"it must be null, or have {name} {needed}",
            )
        # Mistral has a window of 4096 tokens in transformers unless the field is null.
        window = raw.get("sliding_window", 4096 if kind == "mistral" else None)
        ignored = kind in ("qwen2", "qwen3")  # which have use_sliding_window
        require(
            ignored or window is None,
            f"sliding_window {window!r:.60} is not supported",
            "it must be null",
        )
        layers = raw.get("layer_types") or []
        require(
            isinstance(layers, list) and all(layer == "full_attention" for layer in layers),
            f"layer_types {layers!r:.60} is not supported",
            "every layer must be full_attention",
        )

        # transformers 5 writes rope_parameters, but reads rope_scaling of transformers 4 first.
        source = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
        angles = raw.get(source) or {}
        require(isinstance(angles, dict), f"{source} is {angles!r:.60} but must be an object")
        scaling = rope.read(angles, raw, require)
        theta = angles.get("rope_theta") or raw.get("rope_theta") or 10_000.0

        found: dict = {"model_type": kind}
        for field in dataclasses.fields(cls)[1:-2]:
            name = field.name
            value: Any = theta if name == "rope_theta" else raw.get(name)
            if value is None and name == "head_dim":
                # Qwen3's default is a constant, which may differ from D / H
                divided = found["hidden_size"] // found["num_attention_heads"]
                value = 128 if kind == "qwen3" else divided
            if value is None and name == "num_key_value_heads" and (kind == "llama" or name in raw):
                value = found["num_attention_heads"]  # the first Llama models have no such field
            if value is None and field.default is not dataclasses.MISSING:
                continue
            require(value is not None, f"the field {name} is missing")
            if field.type == "bool":
                right, wanted = isinstance(value, bool), "true or false"
            else:
                types, number = NUMBERS[str(field.type)]
                limit = LIMITS.get(name, 2**24)
                right = type(value) in types and 0 < value < limit
                wanted = f"{number} above 0 and below {limit}"
            require(right, f"{name} is {value!r:.60} but must be {wanted}")
            found[name] = value

        # transformers reads these fields for some architectures only
        found["attention_bias"] = kind in ("qwen3", "llama") and found.get("attention_bias", False)
        found["mlp_bias"] = kind == "llama" and found.get("mlp_bias", False)
        cfg = cls(**found, rope_scaling=scaling, vision=vision)
        require(
            cfg.num_attention_heads % cfg.num_key_value_heads == 0,
            "num_attention_heads must be a multiple of num_key_value_heads",
        )
        require(
            cfg.head_dim % 2 == 0,
            f"head_dim {cfg.head_dim} is odd, but the rotary embedding pairs dimensions",
        )
        require(
            scaling is None or theta > 1,
            f"rope_theta {theta} cannot be scaled, because it is not above 1",
        )
        other = raw.get("rope_parameters")
        unused = other.get("rope_theta", theta) if isinstance(other, dict) else theta
        if unused != theta:
            log.warning(
                "%s: rope_theta is %s, because rope_scaling takes the place of rope_parameters with"
                " %s; write rope_theta into rope_scaling",
                where,
                theta,
                unused,
            )
        return cfg

    def to_dict(self) -> dict:
        """Return the dict of a config.json that transformers (4 and 5) and vLLM can read."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)[:-2]}
        if self.model_type != "llama":
            del fields["mlp_bias"]
        scaling = self.rope_scaling.to_dict() if self.rope_scaling else {"rope_type": "default"}
        angles = {**scaling, "rope_theta": self.rope_theta}
        window = "sliding_window" if self.model_type == "mistral" else "use_sliding_window"
        text = {
            "architectures": [ARCHITECTURES[self.model_type]],
            **fields,
            "rope_parameters": angles,
            **({"rope_scaling": angles} if self.rope_scaling else {}),  # for transformers 4
            "hidden_act": "silu",
            window: None if self.model_type == "mistral" else False,
        }
        return self.vision.to_dict(text) if self.vision else text
