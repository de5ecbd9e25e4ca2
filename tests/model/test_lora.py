"""Adapters: the equation and its gradient, disabled and merged adapters, and their cost.

Read next: test_peft.py (files), test_lora_runs.py (ranks and full runs).
"""

import dataclasses

import pytest
import torch
from torch.func import functional_call

from nanogrpo import Config
from nanogrpo.extras.lora import adapters, lora
from nanogrpo.extras.lora.options import LORA_TARGETS
from nanogrpo.grpo import loss as grpo
from nanogrpo.model import weights
from nanogrpo.run import optim
from tests.conftest import positions_of, random_batch, tiny_model
from tests.engine.small import make_engine
from tests.model.lora_models import adapted, batch_in_float64, gradient, logits, nudge

LORA = Config(lora_r=4, lora_alpha=10)


# --- the equation ---


@pytest.mark.parametrize("shape", [{}, {"tie_word_embeddings": True}, {"model_type": "qwen2"}])
def test_the_gradient_equals_that_of_the_dense_formulation(shape):
    """In float64: autograd through W + alpha/r · B A, in place of W in a model without adapters."""
    model = adapted(LORA, tiny_model(**shape).double())
    batch = batch_in_float64()
    plain = tiny_model(**shape).double().requires_grad_(False)
    pairs = {
        n: p.detach().clone().requires_grad_()
        for n, p in model.named_parameters()
        if lora.is_adapter(n)
    }
    weights = dict(plain.named_parameters())
    for name in [n.removesuffix(".lora_A") for n in pairs if n.endswith(".lora_A")]:
        delta = pairs[f"{name}.lora_B"] @ pairs[f"{name}.lora_A"]
        weights[f"{name}.weight"] = weights[f"{name}.weight"].detach() + 10 / 4 * delta
    attend, loss = positions_of([12, 9, 16])[1], grpo.objective(batch, LORA)
    arguments = batch.tokens, batch.positions, attend, batch.rows, loss
    functional_call(plain, weights, arguments).loss.backward()
    found = gradient(model, batch, LORA)
    assert found.keys() == pairs.keys()
    assert len(found) == 2 * 2 * len(LORA_TARGETS)
    for name, g in found.items():
        torch.testing.assert_close(g, pairs[name].grad, rtol=1e-9, atol=1e-12)
    assert all(g.abs().max() > 1e-6 for g in found.values())


def test_the_first_policy_and_disabled_adapters_are_the_base_exactly():
    base, model = tiny_model(), tiny_model()
    lora.attach(model, LORA)
    adapters.initialize(model, LORA)
    assert torch.equal(logits(model), logits(base))
    nudge(model)
    assert not torch.allclose(logits(model), logits(base), atol=0.1)
    with lora.disabled(model):
        assert torch.equal(logits(model), logits(base))
    assert not torch.allclose(logits(model), logits(base), atol=0.1)
    with pytest.raises(ZeroDivisionError), lora.disabled(model):
        raise ZeroDivisionError
    assert all(m.enabled for m in model.modules() if isinstance(m, lora.LoRALinear))


def test_a_is_drawn_as_in_peft_and_depends_only_on_the_seed():
    first, again, other = (
        adapted(dataclasses.replace(LORA, seed=s), fresh=True) for s in (0, 0, 1)
    )
    a, b, c = (
        dict(m.named_parameters())["model.layers.1.mlp.down_proj.lora_A"]
        for m in (first, again, other)
    )
    assert torch.equal(a, b)
    assert not torch.equal(a, c)
    assert a.shape == (4, 80)
    assert 0.9 / 80**0.5 < a.abs().max() <= 1 / 80**0.5
    assert abs(a.std() / (80 * 3) ** -0.5 - 1) < 0.1  # uniform within ±1/√80
    everything = [
        p.flatten()[:8].tolist() for n, p in first.named_parameters() if n.endswith("lora_A")
    ]
    assert len({tuple(x) for x in everything}) == len(everything)  # no two layers start equal


@pytest.mark.parametrize("names", [("q_proj", "v_proj"), ("down_proj",), ()])
def test_only_the_chosen_layers_are_adapted_and_only_adapters_are_trained(names):
    cfg = dataclasses.replace(LORA, lora_target_modules=names)
    model = adapted(cfg)
    found = {n.split(".")[-1] for n, m in model.named_modules() if isinstance(m, lora.LoRALinear)}
    assert found == set(names or LORA_TARGETS)
    optimizer = optim.make_optimizer(model, cfg)
    before = {n: p.clone() for n, p in model.named_parameters()}
    gradient(model, random_batch([(3, 9), (5, 4)]), cfg)
    optim.clip_and_step(model, optimizer, 1e-2, 1.0)
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name]) != lora.is_adapter(name), name


# --- merged ---


def test_the_embedded_engine_receives_the_merged_weights():
    model = adapted(LORA)
    merged = dict(weights.full_parameters(model))
    engine = make_engine(model)
    assert all(torch.equal(p, merged[n]) for n, p in engine.model.named_parameters())


# --- a base in bfloat16 ---

HALF = dataclasses.replace(LORA, dtype="bfloat16")


def test_a_bfloat16_base_computes_what_a_float32_base_computes_in_bfloat16():
    """Bit for bit, the log-probs, which stay in float32, and the gradients of the adapters: a GPU
    rounds a float32 base to bfloat16 before it computes.
    """
    batch = random_batch([(3, 9), (5, 4), (2, 14)])
    half, rounded = adapted(HALF), adapted(LORA).bfloat16()
    kinds = {p.requires_grad: p.dtype for p in half.parameters()}
    assert kinds == {False: torch.bfloat16, True: torch.float32}
    a, b = (model.forward_strip(batch, grpo.objective(batch, LORA)) for model in (half, rounded))
    assert a.logp.dtype == a.loss.dtype == torch.float32
    assert torch.equal(a.logp, b.logp)
    found, expected = gradient(half, batch, LORA), gradient(rounded, batch, LORA)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[n], expected[n].float()) for n in found)
    with lora.disabled(half), lora.disabled(rounded):
        assert torch.equal(logits(half), logits(rounded))


def test_adapters_are_merged_into_a_bfloat16_base_without_rounding():
    half = adapted(HALF)
    merged, name = dict(weights.full_parameters(half)), "model.layers.0.mlp.up_proj"
    layer = half.model.layers[0].mlp.up_proj
    exact = layer.weight.double() + 2.5 * layer.lora_B.double() @ layer.lora_A.double()
    assert merged[f"{name}.weight"].dtype == torch.float32
    torch.testing.assert_close(merged[f"{name}.weight"].double(), exact, rtol=1e-6, atol=1e-6)
    # the base was rounded once, when it was loaded
    before = dict(tiny_model().named_parameters())["model.norm.weight"]
    assert torch.equal(merged["model.norm.weight"], before.bfloat16())


def test_the_base_has_the_dtype_of_the_device_unless_the_user_chooses():
    def base(choice: str, device: str) -> torch.dtype:
        model = tiny_model()
        lora.attach(model, dataclasses.replace(LORA, dtype=choice), device)
        return model.model.embed_tokens.weight.dtype

    assert (base("auto", "cpu"), base("auto", "cuda")) == (torch.float32, torch.bfloat16)
    for choice in ("bfloat16", "float16"):
        assert base(choice, "cpu") == base(choice, "cuda") == getattr(torch, choice)
