"""Adapters: the equation and its gradient, disabled and merged adapters, and their cost.

Read next: test_peft.py (files), test_lora_runs.py (ranks and full runs).
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.func import functional_call

from nanogrpo.config import LORA_TARGETS, Config
from nanogrpo.distributed import fsdp
from nanogrpo.engine.local import LocalEngine
from nanogrpo.grpo import loss as grpo
from nanogrpo.model import adapters, lora
from nanogrpo.model.decoder import Decoder
from nanogrpo.run import memory, optim
from nanogrpo.types import PackedBatch
from nanogrpo.vllm.sync import WeightSync
from tests.conftest import SOLO, positions_of, random_batch, random_tokens, tiny_config, tiny_model
from tests.model.lora_ranks import adapted, logits, nudge
from tests.run.test_memory import Live

LORA = Config(lora_r=4, lora_alpha=10)


def gradient(model: Decoder, batch: PackedBatch, cfg: Config = LORA) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model.forward_packed(batch, grpo.objective(batch, cfg)).loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


# --- the equation ---


@pytest.mark.parametrize("shape", [{}, {"tie_word_embeddings": True}, {"model_type": "qwen2"}])
def test_the_gradient_equals_that_of_the_dense_formulation(shape):
    """In float64: autograd through W + alpha/r · B A, in place of W in a model without adapters."""
    model = adapted(LORA, tiny_model(**shape).double())
    batch = random_batch([(3, 9), (5, 4), (2, 14)])
    batch.advantage, batch.weight, batch.old_logp = (
        x.double() for x in (batch.advantage, batch.weight, batch.old_logp)
    )
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
    tied = model.cfg.tie_word_embeddings
    head = weights["model.embed_tokens.weight" if tied else "lm_head.weight"]

    def dense(hidden, _):
        logp = torch.log_softmax(hidden @ head.T, -1)[
            torch.arange(len(batch.targets)), batch.targets
        ]
        ratio = (logp - batch.old_logp).exp()
        held = torch.minimum(ratio * batch.advantage, ratio.clamp(0.8, 1.2) * batch.advantage)
        return -(batch.weight * held).sum()

    attend = positions_of([12, 9, 16])[1]
    functional_call(
        plain, weights, (batch.tokens, batch.positions, attend, batch.rows, dense)
    ).backward()
    found = gradient(model, batch)
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


def test_only_adapters_have_optimizer_moments():
    """In bytes: 8 for each of the r·(in + out) numbers of each layer."""
    model, cfg = adapted(LORA), tiny_config()
    optimizer = optim.make_optimizer(model, LORA)
    held = sum(s[k].nbytes for s in optimizer.state.values() for k in ("exp_avg", "exp_avg_sq"))
    q, kv, D, F = 64, 32, cfg.hidden_size, cfg.intermediate_size
    assert held == 8 * 2 * 4 * ((D + q) + 2 * (D + kv) + (q + D) + 2 * (D + F) + (F + D))
    assert held < 8 * sum(p.numel() for p in tiny_model().parameters()) / 4
    table = {row.name: row.bytes for row in memory.table(model, LORA, SOLO, 10)}
    assert table["optimizer"] == held
    assert table["gradients"] == held // 2


# --- merged ---


def test_merging_gives_the_same_model_and_changes_no_weight():
    model = adapted(LORA)
    before = {n: p.clone() for n, p in model.named_parameters()}
    plain = tiny_model(seed=9)
    for _ in range(3):
        plain.load_state_dict(dict(lora.full_parameters(model)))
    torch.testing.assert_close(logits(plain), logits(model), rtol=1e-5, atol=1e-5)
    # bit for bit, so nothing drifts
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("lora_B"):
                p.zero_()
    base = dict(tiny_model().named_parameters())
    assert all(torch.equal(p, base[n]) for n, p in lora.full_parameters(model))


def test_bfloat16_weights_are_merged_in_float32_and_rounded_once():
    model = adapted(LORA).bfloat16()
    layer = model.model.layers[0].mlp.up_proj
    w, a, b = (p.detach().double() for p in (layer.weight, layer.lora_A, layer.lora_B))
    merged = dict(lora.full_parameters(model))["model.layers.0.mlp.up_proj.weight"]
    exact = w + 2.5 * b @ a
    assert merged.dtype == torch.bfloat16
    # half a unit in the last place plus the error of float32
    assert ((merged.double() - exact).abs() <= exact.abs() * 2**-8 * 1.001 + 1e-6).all()


@pytest.mark.parametrize("tied", [False, True])
def test_engines_receive_the_merged_weights(tied):
    model = adapted(LORA, tiny_model(tie_word_embeddings=tied))
    merged = {n: p.clone() for n, p in lora.full_parameters(model)}
    assert list(merged) == [n for n, _ in tiny_model(tie_word_embeddings=tied).named_parameters()]
    engine = LocalEngine(model.cfg, max_len=32, slots=2, device="cpu")
    engine.load(model, version=1)
    assert all(torch.equal(p, merged[n]) for n, p in engine.model.named_parameters())
    sync = WeightSync(model, "float32", torch.device("cpu"))
    sync.gather(model)
    assert sync.slots.keys() == merged.keys()
    assert all(torch.equal(sync.slots[n], p) for n, p in merged.items())


# --- a base in bfloat16 ---

HALF = dataclasses.replace(LORA, lora_base_dtype="bfloat16")


def test_a_bfloat16_base_computes_what_a_float32_base_computes_in_bfloat16():
    """Bit for bit, the log-probs, which stay in float32, and the gradients of the adapters: a GPU
    rounds a float32 base to bfloat16 before it computes.
    """
    batch = random_batch([(3, 9), (5, 4), (2, 14)])
    half, rounded = adapted(HALF), adapted(LORA).bfloat16()
    kinds = {p.requires_grad: p.dtype for p in half.parameters()}
    assert kinds == {False: torch.bfloat16, True: torch.float32}
    a, b = (model.forward_packed(batch, grpo.objective(batch, LORA)) for model in (half, rounded))
    assert a.logp.dtype == a.loss.dtype == torch.float32
    assert torch.equal(a.logp, b.logp)
    found, expected = gradient(half, batch), gradient(rounded, batch)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[n], expected[n].float()) for n in found)
    with lora.disabled(half), lora.disabled(rounded):
        assert torch.equal(logits(half), logits(rounded))


def test_a_bfloat16_base_differs_from_a_float32_base_by_its_rounding():
    """The error of the log-probs is that of bfloat16's 8 bits, and the gradients point the same
    way.
    """
    batch = random_batch([(3, 9), (5, 4), (2, 14)])
    half, exact = adapted(HALF), adapted(LORA)
    a, b = (
        model.forward_packed(batch, grpo.objective(batch, LORA)).logp for model in (half, exact)
    )
    assert 0 < (a - b).abs().mean() < 2**-8 * b.abs().mean() * 4
    mine, theirs = (
        torch.cat([g.flatten() for g in gradient(m, batch).values()]) for m in (half, exact)
    )
    assert torch.cosine_similarity(mine, theirs, dim=0) > 0.999


def test_adapters_are_merged_into_a_bfloat16_base_without_rounding():
    half = adapted(HALF)
    merged, name = dict(lora.full_parameters(half)), "model.layers.0.mlp.up_proj"
    layer = half.model.layers[0].mlp.up_proj
    exact = layer.weight.double() + 2.5 * layer.lora_B.double() @ layer.lora_A.double()
    assert merged[f"{name}.weight"].dtype == torch.float32
    torch.testing.assert_close(merged[f"{name}.weight"].double(), exact, rtol=1e-6, atol=1e-6)
    # the base was rounded once, when it was loaded
    before = dict(tiny_model().named_parameters())["model.norm.weight"]
    assert torch.equal(merged["model.norm.weight"], before.bfloat16())


def test_a_bfloat16_base_takes_half_the_memory():
    half, full = adapted(HALF), adapted(LORA)
    adapters_bytes = sum(p.nbytes for p in full.parameters() if p.requires_grad)
    sizes = [
        {row.name: row.bytes for row in rows_of(model, cfg)}["parameters"]
        for model, cfg in ((half, HALF), (full, LORA))
    ]
    assert sizes[0] - adapters_bytes == (sizes[1] - adapters_bytes) / 2
    assert sizes[0] == sum(p.nbytes for p in half.parameters())


def test_the_base_has_the_dtype_of_the_device_unless_the_user_chooses():
    def base(choice: str, device: str) -> torch.dtype:
        model = tiny_model()
        lora.attach(model, dataclasses.replace(LORA, lora_base_dtype=choice), device)
        return model.model.embed_tokens.weight.dtype

    half, full = torch.bfloat16, torch.float32
    for choice, cpu, cuda in (
        ("auto", full, half),
        ("float32", full, full),
        ("bfloat16", half, half),
    ):
        assert (base(choice, "cpu"), base(choice, "cuda")) == (cpu, cuda)


# --- what they cost ---


def test_the_frozen_head_saves_a_matrix_product(reference_ops):
    """In units of M·V·D multiply-adds: the logits and the gradient of the hidden states remain."""
    model, batch = (
        adapted(LORA, tiny_model(vocab_size=1999)),
        random_batch([(3, 9), (5, 4)], vocab_size=1999),
    )

    def products(model: Decoder) -> float:
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True
        ) as profile:
            model.forward_packed(batch, grpo.objective(batch, LORA)).loss.backward()
        first = {"aten::mm": 0, "aten::addmm": 1}
        pairs = [
            e.input_shapes[first[e.name] : first[e.name] + 2]
            for e in profile.events()
            if e.name in first
        ]
        sizes = [a[0] * a[1] * b[1] for a, b in pairs if 1999 in (a[0], a[1], b[1])]
        return sum(sizes) / (len(batch.rows) * 1999 * 48)

    assert products(model) == pytest.approx(2)
    assert products(tiny_model(vocab_size=1999)) == pytest.approx(3)
    assert model.lm_head.weight.grad is None


def test_dropout_is_for_gradients_only_and_the_same_when_it_is_recomputed():
    """Log-probs without a gradient, merged weights and the reference have none. Recomputation in
    the backward pass restores the random state.
    """
    cfg = dataclasses.replace(LORA, lora_dropout=0.5)
    batch = random_batch([(3, 9), (5, 4), (2, 14)])
    assert torch.equal(logits(adapted(cfg)), logits(adapted(LORA)))  # under no_grad
    found = []
    for kind in ("none", "full", "selective"):
        model = adapted(cfg)
        fsdp.prepare(model, SOLO, dataclasses.replace(cfg, gradient_checkpointing=kind))
        torch.manual_seed(3)
        found.append(gradient(model, batch, cfg))
    none, full, selective = found
    assert all(torch.equal(none[n], full[n]) and torch.equal(none[n], selective[n]) for n in none)
    plain, again = gradient(adapted(LORA), batch), gradient(adapted(cfg), batch, cfg)
    name = "model.layers.1.mlp.down_proj.lora_A"
    assert not torch.allclose(none[name], plain[name])
    assert not torch.allclose(none[name], again[name])  # other random numbers
    with lora.disabled(model):
        positions, attend = positions_of([30])
        args = random_tokens(30), positions, attend
        assert torch.equal(model(*args), tiny_model()(*args))


@pytest.mark.parametrize(
    ("kind", "dropout"), [("none", 0), ("full", 0), ("selective", 0), ("none", 0.1)]
)
def test_activations_are_as_large_as_estimated(kind, dropout):
    """As in test_memory.py, with adapters of a rank high enough to show."""
    shape = {
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
    }
    cfg = Config(gradient_checkpointing=kind, lora_r=64, lora_dropout=dropout)
    model = adapted(cfg, tiny_model(tiny_config(num_hidden_layers=4, **shape), std=0.05))
    fsdp.prepare(model, SOLO, cfg)
    batch = random_batch([(40, 60)] * 6)
    attend = positions_of([100] * 6)[1]
    with Live(model) as live:
        hidden = model.model(batch.tokens, batch.positions, attend)
        kept = live.bytes
    (row,) = [
        r
        for r in rows_of(
            model, dataclasses.replace(cfg, token_budget=600, max_completion_length=61)
        )
        if "activ" in r.name
    ]
    _, again = memory.activation_bytes(model.cfg, 4, kind)
    _, more = memory.adapter_bytes(model, 4, kind)
    assert row.name == "activations of 600 tokens"
    assert 0.8 < kept / (row.bytes - 600 * (again + more)) < 1.25
    assert hidden.requires_grad


def rows_of(model: Decoder, cfg: Config) -> list[memory.Row]:
    return memory.table(model, cfg, SOLO, 40)


def test_the_memory_table_has_no_second_model_and_no_gradient_of_the_head():
    model, plain = adapted(LORA), tiny_model()
    with_kl = dataclasses.replace(LORA, beta=0.1)
    names = {row.name for row in rows_of(model, with_kl)}
    assert "reference model" not in names
    assert "reference model" in {row.name for row in rows_of(plain, Config(beta=0.1))}
    sizes = [
        {row.name.split(" of ")[0]: row.bytes for row in rows_of(m, c)}
        for m, c in ((model, LORA), (plain, Config()))
    ]
    n, t = (
        sum(p.nbytes for p in plain.parameters()),
        sum(p.nbytes for p in model.parameters() if p.requires_grad),
    )
    assert sizes[0]["parameters"] == n + t
    assert sizes[0]["engine: weights"] == sizes[1]["engine: weights"] == n
    # the accumulator and the part of one chunk
    assert sizes[1]["logits"] - sizes[0]["logits"] == 2 * plain.lm_head.weight.nbytes
    assert sizes[0]["a checkpoint that is being written"] == 3 * t + n + t
    alone = rows_of(model, dataclasses.replace(LORA, save_merged=False))
    assert alone[-1] == ("a checkpoint that is being written", 3 * t + t, True, False)
