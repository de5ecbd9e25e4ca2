"""The decoder gives the numbers of transformers. Packed samples give the numbers they give alone,
and nothing leaks between them.

The weights are random and their logits have the scale of a trained model (conftest.tiny_model), so
a missing norm, bias or rotation shows. Read next: test_checkpoint.py (the same weights in files).
"""

import pytest
import torch
import transformers

from nanogrpo.model.decoder import Decoder
from nanogrpo.model.hf_config import ModelConfig
from tests.conftest import positions_of, random_tokens, tiny_config, tiny_model
from tests.model.peers import CLASSES, CONFIGS, peer, theirs_alone

RAGGED = [7, 1, 33, 2, 20]

# --- parity with transformers ---


@pytest.mark.parametrize("name", CONFIGS)
def test_a_packed_forward_gives_transformers_logits_one_by_one(name):
    model = tiny_model(CONFIGS[name], seed=1)
    tokens = random_tokens(sum(RAGGED))
    positions, attend = positions_of(RAGGED)
    ours = model(tokens, positions, attend)  # [T, V]
    # the scale of a trained model; a bound of 1e-5 would mean nothing for logits of 1e-4
    assert 1 < ours.std() < 10
    theirs = peer(model)
    pairs = zip(tokens.split(RAGGED), positions.split(RAGGED))
    expected = torch.cat([theirs_alone(theirs, *pair) for pair in pairs])
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["qwen3", "qwen2", "llama_scaled"])
def test_bfloat16_is_about_as_far_from_float32_as_transformers_is(name):
    """The root mean square error over all logits is at most twice that of transformers."""
    model = tiny_model(CONFIGS[name], seed=3)
    tokens = random_tokens(64)
    positions, attend = positions_of([64])
    with torch.no_grad():
        exact = model(tokens, positions, attend)
        model = model.to(torch.bfloat16)  # rounds the weights of both sides
        ours = model(tokens, positions, attend)
        expected = theirs_alone(peer(model), tokens, positions)
    assert ours.dtype == torch.bfloat16
    error, allowed = ((x.float() - exact).square().mean().sqrt() for x in (ours, expected))
    assert 0 < error <= 2 * allowed


def test_rotary_angles_stay_float32_in_a_bfloat16_model():
    """bfloat16 has no 257: rounded positions would rotate distant neighbors alike."""
    model = tiny_model().to(torch.bfloat16)
    seen = []

    def spy(layer, q, k, v, window):
        seen.append(k)
        return torch.zeros_like(q)

    model(torch.full((3,), 7), torch.tensor([20_000, 20_001, 20_002]), spy)
    assert (seen[0][0] - seen[0][1]).abs().max() > 0.1
    assert (seen[0][1] - seen[0][2]).abs().max() > 0.1


# --- packing changes nothing ---


def test_a_nan_does_not_leak_between_samples():
    """Masking by multiplication, or a merely tiny weight, would let it through (0 · NaN is NaN)."""
    model = tiny_model()
    tokens = random_tokens(sum(RAGGED)).clamp(min=1)
    parts = list(tokens.split(RAGGED))
    parts[2] = torch.zeros_like(parts[2])
    with torch.no_grad():
        model.model.embed_tokens.weight[0] = float("nan")
        out = model(torch.cat(parts), *positions_of(RAGGED)).split(RAGGED)
    assert [bool(x.isnan().any()) for x in out] == [False, False, True, False, False]
    assert out[2].isnan().all()


# --- construction and config.json ---


def test_a_new_model_is_initialized_as_in_transformers():
    model = Decoder(tiny_config(hidden_size=256, vocab_size=500, model_type="qwen2"))
    for name, p in model.named_parameters():
        if p.ndim > 1:
            assert p.std().item() == pytest.approx(0.02, rel=0.05), name
        else:
            assert torch.equal(p, torch.full_like(p, float(name.endswith("norm.weight")))), name


QWEN3_RAW = dict(
    model_type="qwen3",
    vocab_size=9,
    hidden_size=64,
    intermediate_size=8,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=99,
)


def test_defaults_of_config_json_are_those_of_transformers():
    """An absent field has the same default here and there: head_dim is 128 in Qwen3, not D / H."""
    for kind, name in CLASSES.items():
        raw = {**QWEN3_RAW, "model_type": kind, "sliding_window": None}
        if kind == "llama":
            del raw["num_key_value_heads"]  # the first Llama models have none
        ours, expected = ModelConfig.from_dict(raw), getattr(transformers, f"{name}Config")(**raw)
        assert ours.head_dim == (getattr(expected, "head_dim", None) or 64 // 4)
        assert ours.rope_theta == expected.rope_parameters["rope_theta"]
        for field in ("num_key_value_heads", "rms_norm_eps", "tie_word_embeddings"):
            assert getattr(ours, field) == getattr(expected, field)
        for field in ("attention_bias", "mlp_bias"):
            assert getattr(ours, field) == getattr(expected, field, False)


def test_a_vocabulary_of_a_million_is_read():
    assert ModelConfig.from_dict({**QWEN3_RAW, "vocab_size": 2**20}).vocab_size == 2**20
