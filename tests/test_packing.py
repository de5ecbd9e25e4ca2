"""Packing: strips under a budget, minibatches of whole groups, and every vector of a strip (invariants 1 and 5 start here).

Read next: test_invariants.py, where packed and unpacked gradients are compared.
"""

import dataclasses
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanogrpo import packing
from nanogrpo.batch import Prompt, Sample
from nanogrpo.config import Config
from nanogrpo.grpo import token_weight


def config(**options) -> Config:
    return dataclasses.replace(Config(model="-", data="-"), **options)


@st.composite
def sample_lists(draw) -> list[Sample]:
    """Up to twelve samples of random lengths; tokens are all different, so that a misplaced one cannot hide."""
    fresh = iter(range(10_000))
    out = []
    for i in range(draw(st.integers(0, 12))):
        p, c = draw(st.integers(1, 9)), draw(st.integers(0, 9))
        prompt = Prompt(i, "", [next(fresh) for _ in range(p)])
        logp = [-float(draw(st.integers(0, 50))) for _ in range(c)]
        ids = [next(fresh) for _ in range(c)]
        out.append(Sample(prompt, 0, ids, logp, draw(st.booleans()), [0] * c, advantage=draw(st.sampled_from([-1.0, 0.0, 2.0]))))
    return out


@settings(deadline=None)
@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 120))
def test_strips_take_each_sequence_once_and_keep_to_the_budget(lengths, budget):
    strips = packing.strips(lengths, budget)
    assert sorted(i for strip in strips for i in strip) == list(range(len(lengths)))
    for strip in strips:
        assert strip == sorted(strip) != []
        assert sum(lengths[i] for i in strip) <= budget or len(strip) == 1  # a sequence above the budget goes alone
    if lengths and max(lengths) <= budget:  # first fit: at most one strip is half empty
        assert sum(sum(lengths[i] for i in strip) * 2 <= budget for strip in strips) <= 1


@settings(deadline=None)
@given(sample_lists(), st.integers(1, 40), st.booleans(), st.sampled_from(["grpo", "dapo", "dr_grpo"]))
def test_every_vector_of_a_strip(samples, budget, masked, loss_type):
    cfg = config(token_budget=budget, mask_truncated_completions=masked, loss_type=loss_type, max_completion_length=9)
    n_tokens = packing.trained_tokens(samples, cfg)
    seen = []
    for b in packing.pack(samples, cfg, len(samples), n_tokens):
        bounds = list(pairwise(b.cu_seqlens.tolist()))
        assert b.cu_seqlens.dtype == torch.int32
        assert (bounds[0][0], bounds[-1][1]) == (0, len(b.tokens))
        assert b.max_len == max(end - start for start, end in bounds)
        assert b.positions.tolist() == [i for start, end in bounds for i in range(end - start)]
        assert (b.old_logp, b.ref_logp) == (None, None)
        per_token = (b.rows, b.targets, b.sample, b.advantage, b.weight, b.sampling_logp)
        assert len({len(x) for x in per_token}) == 1
        assert torch.equal(b.tokens[b.rows + 1], b.targets)  # each row predicts the token that follows it
        order = b.sample.unique_consecutive().tolist()
        assert len(order) == len(bounds)
        for i, (start, end) in zip(order, bounds):
            s, mine = samples[i], b.sample == i
            assert s.stopped or not masked
            assert b.tokens[start:end].tolist() == s.prompt.token_ids + s.token_ids
            assert b.targets[mine].tolist() == s.token_ids  # the whole completion, stop token included, and no prompt token
            assert b.rows[mine].tolist() == list(range(start + len(s.prompt.token_ids) - 1, end - 1))
            assert b.sampling_logp[mine].tolist() == s.logp
            assert set(b.advantage[mine].tolist()) == {s.advantage}
            expected = token_weight(len(s.token_ids), len(samples), n_tokens, cfg)
            assert b.weight[mine].tolist() == pytest.approx([expected] * len(s.token_ids), rel=1e-6)
        seen += order
    trained = [i for i, s in enumerate(samples) if s.token_ids and (s.stopped or not masked)]
    assert sorted(seen) == trained  # no trained sample: no batch at all
    assert n_tokens == sum(len(samples[i].token_ids) for i in trained)


def test_the_example_of_the_docstring():
    prompt = Prompt(0, "", [100, 101])
    first = Sample(prompt, 0, [7, 8], [-0.1, -0.2], True, [0, 0], advantage=1.0)
    second = Sample(prompt, 1, [9], [-0.3], True, [0], advantage=-1.0)
    first.old_logp, second.old_logp = torch.tensor([-0.5, -0.6]), torch.tensor([-0.7])
    (b,) = packing.pack([first, second], config(token_budget=7), n_samples=2, n_tokens=3)
    assert b.tokens.tolist() == [100, 101, 7, 8, 100, 101, 9]
    assert b.positions.tolist() == [0, 1, 2, 3, 0, 1, 2]
    assert b.cu_seqlens.tolist() == [0, 4, 7]
    assert b.rows.tolist() == [1, 2, 5]
    assert b.targets.tolist() == [7, 8, 9]
    assert b.sample.tolist() == [0, 0, 1]
    assert b.advantage.tolist() == [1, 1, -1]
    assert b.weight.tolist() == pytest.approx([1 / 3] * 3)
    assert b.old_logp.tolist() == pytest.approx([-0.5, -0.6, -0.7])
    assert len(packing.pack([first, second], config(token_budget=6))) == 2


@settings(deadline=None)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.integers(2, 4), st.integers(0, 99), st.integers(0, 99))
def test_minibatches_partition_whole_groups(per_part, parts, passes, G, seed, step):
    cfg = config(num_generations=G, steps_per_generation=parts, num_iterations=passes, seed=seed)
    samples = [Sample(Prompt(i // G, "", [1]), i % G, [2], [0.0], True, [0]) for i in range(per_part * parts * G)]
    found = list(packing.minibatches(samples, cfg, step))
    assert len(found) == cfg.updates_per_step
    for i in range(0, len(found), parts):  # one pass: every sample once
        together = [s for part in found[i : i + parts] for s in part]
        assert sorted((s.prompt.id, s.index) for s in together) == [(s.prompt.id, s.index) for s in samples]
    for part in found:
        assert len(part) == per_part * G
        for i in range(0, len(part), G):  # whole groups, in order
            assert len({s.prompt.id for s in part[i : i + G]}) == 1
            assert [s.index for s in part[i : i + G]] == list(range(G))
    again = list(packing.minibatches(samples, cfg, step))
    assert [[id(s) for s in part] for part in again] == [[id(s) for s in part] for part in found]


def test_minibatches_change_with_the_step_the_pass_and_the_seed():
    samples = [Sample(Prompt(i // 2, "", [1]), i % 2, [2], [0.0], True, [0]) for i in range(32)]
    cfg = config(num_generations=2, steps_per_generation=4, num_iterations=2)

    def order(cfg: Config, step: int) -> list[int]:
        return [s.prompt.id for part in packing.minibatches(samples, cfg, step) for s in part]

    first = order(cfg, 0)
    assert first[:32] != first[32:] != order(cfg, 1)[:32] != first[:32] != order(dataclasses.replace(cfg, seed=1), 0)[:32]


def test_nothing_trained_nothing_packed():
    cut = Sample(Prompt(0, "", [1]), 0, [2, 3], [0.0, 0.0], False, [0, 0])
    cfg = config(mask_truncated_completions=True)
    assert packing.pack([cut, cut], cfg, 2, packing.trained_tokens([cut, cut], cfg)) == []
    assert packing.pack([], cfg) == []
