"""The models of transformers that ours are compared with.

Out: `peer` makes one with the same weights, `hugging_face` loads one from a folder; `theirs_alone`
and `theirs` run them. Read next: test_decoder.py.
"""

import dataclasses
from pathlib import Path

import torch
import transformers

from nanogrpo.extras.rope_scaling import Scaling
from nanogrpo.extras.window import FULL, SLIDING, Windows
from nanogrpo.model.decoder import Decoder
from tests.conftest import random_tokens, tiny_config

CONFIGS = {
    "qwen3": tiny_config(),
    "qwen3_tied": tiny_config(tie_word_embeddings=True),
    "qwen3_multi_head": tiny_config(num_key_value_heads=4),
    "qwen3_multi_query": tiny_config(num_key_value_heads=1, rms_norm_eps=1e-5),
    "qwen3_attention_bias": tiny_config(attention_bias=True),
    "qwen2": tiny_config(model_type="qwen2", head_dim=12),
    "qwen2_tied": tiny_config(
        model_type="qwen2", head_dim=12, tie_word_embeddings=True, rope_theta=1e6
    ),
    "qwen2_linear": tiny_config(
        model_type="qwen2", head_dim=12, rope_scaling=Scaling("linear", 4.0)
    ),
    "qwen3_yarn": tiny_config(
        head_dim=32, rope_scaling=Scaling("yarn", 4.0, original_max_position_embeddings=64)
    ),
    "llama": tiny_config(model_type="llama", head_dim=12, rms_norm_eps=1e-5),
    "llama_biases": tiny_config(
        model_type="llama",
        head_dim=16,
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
    ),
    "llama_scaled": tiny_config(
        model_type="llama",
        head_dim=12,
        rope_theta=5e5,
        rope_scaling=Scaling(
            "llama3",
            8.0,
            original_max_position_embeddings=64,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
        ),
    ),
    "mistral": tiny_config(model_type="mistral", head_dim=16, num_key_value_heads=1),
    "mistral_window": tiny_config(model_type="mistral", head_dim=12, layers=Windows(8)),
    "ministral": tiny_config(model_type="ministral", layers=Windows(1, (SLIDING, FULL))),
    "qwen2_window": tiny_config(
        model_type="qwen2", head_dim=12, layers=Windows(30, (FULL, SLIDING))
    ),
    "qwen3_window": tiny_config(layers=Windows(5, (SLIDING, FULL))),
}
CLASSES = {
    "qwen3": "Qwen3",
    "qwen2": "Qwen2",
    "llama": "Llama",
    "mistral": "Mistral",
    "ministral": "Ministral",
}


def peer(model: Decoder) -> torch.nn.Module:
    """Return transformers' model with the same weights. Its config is built here by hand, because
    `to_dict` is under test.
    """
    fields = dataclasses.asdict(model.cfg)
    theta, scaling = fields.pop("rope_theta"), fields.pop("rope_scaling")
    name, layers = CLASSES[fields.pop("model_type")], fields.pop("layers") or {}
    fields |= {"sliding_window": layers.get("sliding_window"), "use_sliding_window": bool(layers)}
    if types := layers.get("layer_types"):
        fields["layer_types"] = [*types]
    config = getattr(transformers, f"{name}Config")(
        **fields,
        rope_parameters={**(scaling or {"rope_type": "default"}), "rope_theta": theta},
        attn_implementation="eager",
    )
    theirs = (
        getattr(transformers, f"{name}ForCausalLM")(config).to(model.lm_head.weight.dtype).eval()
    )
    theirs.load_state_dict(model.state_dict(), strict=True)  # parameters have the same names
    return theirs


def theirs_alone(theirs, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return the logits [T, V] of one sequence. Without a mask, transformers would take a jump in
    the positions for packed sequences.
    """
    inputs = {
        "input_ids": tokens[None],
        "position_ids": positions[None],
        "attention_mask": torch.ones_like(tokens)[None],
    }
    return theirs(**inputs).logits[0]


def theirs(model: torch.nn.Module, seed: int = 5) -> torch.Tensor:
    """Return the logits that `lora_models.logits` computes with our model."""
    tokens = random_tokens(17, 104, seed)
    with torch.no_grad():
        return torch.cat([model(tokens[None, :11]).logits[0], model(tokens[None, 11:]).logits[0]])


def hugging_face(folder: Path) -> torch.nn.Module:
    """Load a checkpoint folder with transformers."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
