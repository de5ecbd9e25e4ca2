"""--top-k, --top-p and --min-p: the loss has the log-probs of the truncated distribution.

tests/configurations.py has the row for two ranks and for resuming, and test_bitwise.py compares the
bits of engine and trainer. Read next: test_sampler.py (the filters).
"""

import copy
import pickle

import pytest
import torch
from transformers import GenerationConfig, GenerationMixin

from nanogrpo.engine.base import SamplingParams
from nanogrpo.extras.objectives import Objectives
from nanogrpo.extras.options import Config
from nanogrpo.extras.truncation import KeepingEngine, Truncation, packed, unpacked
from nanogrpo.grpo import loss, packing
from nanogrpo.grpo.schedule import plan
from nanogrpo.model.decoder import logits
from tests.conftest import one_sentence, positions_of, tiny_model
from tests.engine.small import make_engine, make_prompts

T = 0.8
FILTERS = [
    {"top_k": 9},
    {"top_p": 0.9},
    {"min_p": 0.3},
    {"top_k": 40, "top_p": 0.6, "min_p": 0.3},
]


def changed(model, seed, size=0.02):
    """Return a copy of the model with slightly different weights, in float64."""
    model, generator = copy.deepcopy(model).double(), torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.data += size * torch.randn(p.shape, generator=generator)
    return model


def full(model, sample):
    """Return logits / T of the completion's tokens over the full vocabulary, [tokens, V]."""
    ids = torch.tensor(sample.prompt.token_ids + sample.token_ids)
    z = model(ids, *positions_of([len(ids)]), None, logits)
    return z[len(sample.prompt.token_ids) - 1 : -1] / T


def filtered(z, filters):
    """Return logits / T as transformers filters them, [tokens, V]."""
    config = GenerationConfig(do_sample=True, temperature=T, **{"top_k": 0} | filters)
    return GenerationMixin()._get_logits_processor(config)(None, z)


def keeping(engine, min_p=0.0, **filters):
    """Return an engine that keeps the sets, and the parameters with the other filters."""
    return KeepingEngine(engine, min_p), SamplingParams(
        T, max_tokens=8, stop_token_ids=(99,), **filters
    )


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("loss_type", ["dapo", "cispo"])  # fused, and in two phases
def test_values_and_gradients_are_those_of_a_float64_model_over_the_full_vocabulary(
    filters, loss_type
):
    model = tiny_model()
    local = make_engine(model, max_len=64, slots=5, paged=True, cache_tokens=64)
    local.runner.behind = 1  # as on a GPU
    engine, params = keeping(local, **filters)
    local.runner.stride = 3  # some tokens are discarded
    engine.load(model, 0)
    samples = engine.sample(make_prompts(), 3, params, step=0)
    assert engine.metrics()["sampling/put_back"]
    for i, s in enumerate(samples):
        s.advantage = (-1.0) ** i * (1 + i / 8)
    samples = pickle.loads(pickle.dumps(samples))  # as when a sample moves to another rank
    cfg = Config(temperature=T, beta=0.1, loss_type=loss_type, token_budget=60, epsilon_high=0.3)
    update = plan(range(len(samples)), [s.facts for s in samples], cfg)
    batches = packing.pack(update, samples, cfg)
    assert len(batches) > 1
    assert any(batch.kv_rows is not None for batch in batches)
    Truncation().batches(None, batches)
    # a later update
    first, old, ref, now = (changed(model, seed, 0.02 * (seed > 0)) for seed in range(4))
    total, expected = 0.0, 0.0
    for batch in batches:
        batch.weight = batch.weight.double().fill_(1 / update.n_tokens)
        batch.entropy_weight = 0.1 * batch.weight
        with torch.no_grad():
            batch.old_logp, _ = old.forward_strip(batch, loss.logp_of(batch, cfg))
            batch.ref_logp, _ = ref.forward_strip(batch, loss.logp_of(batch, cfg))
        op = loss.objective(batch, cfg, [Objectives(cfg)])
        total = total + now.forward_strip(batch, op).loss
    for s in samples:
        with torch.no_grad():
            outside = filtered(full(first, s) * T, filters).isinf()  # [tokens, V]
        sets = [(~row).nonzero()[:, 0].tolist() for row in outside]
        assert [unpacked(x.kept).tolist() for x in s.logp] == sets
        at = torch.arange(len(sets)), torch.tensor(s.token_ids)
        logp, entropy = [], []
        for policy in (now, old, ref, first):
            z = full(policy, s).masked_fill(outside, -1e9)  # finite, so that autograd knows p log p
            logp_all = z.log_softmax(-1)
            logp.append(logp_all[at])
            entropy.append(-(logp_all.exp() * logp_all).sum(-1))
        new, before, reference, engines = logp
        # … and the engine's
        torch.testing.assert_close(torch.tensor(s.logp).double(), engines, atol=1e-5, rtol=0)
        ratio, x = (new - before.detach()).exp(), reference.detach() - new
        if loss_type == "cispo":
            l = -ratio.detach().clamp(max=0.3) * s.advantage * new
        else:
            l = -torch.min(ratio * s.advantage, ratio.clamp(0.8, 1.3) * s.advantage)
        l = l + 0.1 * ratio * (x.exp() - x - 1) - 0.1 * entropy[0]
        expected = expected + l.sum() / update.n_tokens
    torch.testing.assert_close(total, expected, rtol=1e-11, atol=1e-11)
    mine, theirs = (torch.autograd.grad(y, [*now.parameters()]) for y in (total, expected))
    torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-11)


def test_a_set_is_never_larger_than_a_bit_for_each_token_of_the_vocabulary():
    generator = torch.Generator().manual_seed(0)
    for share in (1e-4, 0.02, 0.04, 0.5, 1.0):
        ids = (torch.rand(10_000, generator=generator) <= share).nonzero()[:, 0].numpy()
        kept = packed(ids)
        assert unpacked(kept).tolist() == ids.tolist()
        assert kept.nbytes <= min(4 * len(ids), 1250)


def test_log_probs_that_a_rollout_function_has_computed_are_refused(tmp_path, rows_of, capsys):
    (tmp_path / "r.py").write_text(
        """def own(samples, turns):
    turns.generate(samples)
    for s in samples:
        s.logp = [x / 2 for x in s.logp]
"""
    )
    with pytest.raises(AssertionError):
        rows_of(f"--top-k 9 --rollout {tmp_path / 'r.py'}:own")
    assert "need the log-prob objects of turns.generate" in one_sentence(capsys)


EDGES = [{"top_k": 151}, {"top_k": 500}, {"top_p": 1e-6}, {"min_p": 1.0}, {"min_p": 1e-6}]


@pytest.mark.parametrize("filters", [*FILTERS, *EDGES], ids=str)
def test_the_filters_are_applied_in_the_order_of_transformers(filters):
    engine, params = keeping(make_engine(slots=50), **filters)
    logits = torch.randn(50, 151, generator=torch.Generator().manual_seed(0)) * 3
    logits[:, 1] = logits[:, 0] = logits.amax(1)  # ties are kept
    expected = filtered(logits, filters)
    assert torch.equal(engine._filters(logits, params) / T, expected)
    assert torch.equal(engine.newest, expected.isfinite())
