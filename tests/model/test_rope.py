"""Frequencies and angles with RoPE scaling equal those of transformers, whichever way a config.json
describes the scaling.

Read next: test_bad_input.py, where other kinds of scaling are refused.
"""

import copy

import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from nanogrpo.model import rope
from nanogrpo.model.hf_config import ModelConfig

SHAPE = {
    "model_type": "llama",
    "vocab_size": 9,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
TRAINED = st.sampled_from([32, 2048, 8192, 32768])
FACTORS = st.sampled_from([1, 1.5, 4.0, 8, 40])
THETAS = st.sampled_from([1e4, 5e5, 1_000_000])
NAMES = st.sampled_from(["rope_type", "type"])


def optional(**fields):
    return st.fixed_dictionaries({}, optional=fields)


@st.composite
def scalings(draw) -> dict:
    """Return an object for rope_scaling or rope_parameters."""
    kind = draw(st.sampled_from(["default", "linear", "llama3", "yarn"]))
    fields = {draw(NAMES): kind}
    if kind != "default":
        fields["factor"] = draw(FACTORS)
    if kind == "llama3":
        fields["low_freq_factor"] = draw(st.sampled_from([1, 2.0]))
        fields["high_freq_factor"] = draw(st.sampled_from([4, 8.0]))
    if kind in ("llama3", "yarn"):
        fields |= draw(optional(original_max_position_embeddings=TRAINED))
    if kind == "yarn":
        fields |= draw(
            optional(
                attention_factor=st.none(),
                mscale=st.sampled_from([None, 0]),
                beta_fast=st.sampled_from([None, 32]),
                beta_slow=st.sampled_from([None, 1]),
                truncate=st.just(True),
            )
        )
    return fields | draw(optional(rope_theta=THETAS))


@given(
    size=st.sampled_from([4, 64, 80, 128]),
    context=st.sampled_from([64, 2048, 131_072]),
    fields=st.fixed_dictionaries(
        {},
        optional={
            "rope_scaling": st.none() | scalings(),
            "rope_parameters": st.none() | scalings(),
            "rope_theta": THETAS,
            "original_max_position_embeddings": TRAINED,
        },
    ),
)
@settings(max_examples=100)
def test_frequencies_and_angles_equal_transformers(size, context, fields):
    """For every spelling, also when both objects are there; and again after writing the config."""
    raw = {
        **SHAPE,
        "hidden_size": 2 * size,
        "head_dim": size,
        "max_position_embeddings": context,
        **fields,
    }
    theirs = LlamaRotaryEmbedding(transformers.LlamaConfig(**copy.deepcopy(raw)))
    ours = ModelConfig.from_dict(raw)
    written = ours.to_dict()
    assert ModelConfig.from_dict(written) == ours
    again = LlamaRotaryEmbedding(transformers.LlamaConfig(**written))
    positions = torch.tensor([0, 1, 31, 4095, 131_071])
    for expected in (theirs, again):
        found, factor = rope.frequencies(
            ours.rope_theta, size, ours.rope_scaling, torch.device("cpu")
        )
        assert torch.equal(*found.chunk(2))
        found = found[: size // 2]
        torch.testing.assert_close(found, expected.inv_freq, rtol=1e-6, atol=0)
        cos, sin = expected(torch.zeros(()), positions[None])
        angles = positions[:, None].float() * found
        for table, function in ((cos, torch.cos), (sin, torch.sin)):
            mine = function(angles) * factor
            torch.testing.assert_close(mine, table[0, :, : size // 2], rtol=0, atol=1e-5)
