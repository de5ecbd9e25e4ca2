"""The averages, draws and masks of two recipes are those of their docstrings. Rows of
tests/configurations.py show that runs resume, and that two ranks are one.

Read next: examples/recipes/scale_rl.py and examples/recipes/rejection.py.
"""

import functools
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from examples.recipes import rejection, scale_rl
from nanogrpo.extras.view.tokens import gradient
from nanogrpo.model.head import head_logp
from nanogrpo.types import Prompt, Sample
from tests.conftest import SOLO, completion, packed, random_batch

G = 3
PROMPTS = [Prompt(i, "", [1, 2]) for i in range(9)]


def samples(rng: np.random.Generator, prompt: Prompt, rewards: list[float]) -> list[Sample]:
    out = []
    for j, (n, r) in enumerate(zip(rng.integers(1, 9, len(rewards)), rewards)):
        ids = rng.integers(0, 99, n).tolist()
        more = {"rewards": {"right": r}, "advantage": r - float(np.mean(rewards))}
        out.append(completion(prompt, ids, j, stopped=bool(n % 4), **more))
    return out


@pytest.mark.parametrize("masked", [False, True])
def test_each_prompt_has_the_same_weight(masked):
    cfg = scale_rl.Options(num_generations=G, mask_truncated_completions=masked)
    rng, feature = np.random.default_rng(1), scale_rl.ScaleRL()
    feature.model(None, SimpleNamespace(prompts=PROMPTS))
    groups = [samples(rng, p, r) for p, r in zip(PROMPTS, ([1, 0, 0], [1, 1, 1], [0, 0, 1]))]
    every = [s for group in groups for s in group]
    run = SimpleNamespace(cfg=cfg, world=SOLO)
    feature.scored(run, every, 0)
    batches = packed(every, cfg)
    feature.batches(run, batches)
    terms = [rng.normal(size=len(s.token_ids)) for s in every]
    found = 0.0
    for batch in batches:
        for i in batch.sample.unique().tolist():
            found += float(batch.weight[batch.sample == i].double().numpy() @ terms[i])
    means = []
    for g in (0, 2):  # all completions of the other prompt have the advantage 0
        trained = [i for i in range(g * G, g * G + G) if every[i].stopped or not masked]
        length = sum(len(terms[i]) for i in trained)
        means.append(sum(terms[i].sum() for i in trained if every[i].advantage) / length)
    assert found == pytest.approx(np.mean(means), rel=1e-6)


def test_mastered_prompts_are_not_drawn_again():
    feature, first = scale_rl.ScaleRL(), PROMPTS[:4]
    run = SimpleNamespace(
        cfg=scale_rl.Options(num_generations=G, max_pass_rate=0.6),
        world=SOLO,
        prompts=PROMPTS,
    )
    feature.model(None, run)
    draw = functools.partial(feature.draw, run, first, step=0)
    rng = np.random.default_rng(0)
    assert draw(seed=0) == first
    # the pass rates are 2/3, 1/3 and 1/2 (of six completions)
    for i, rewards in ((0, [1, 1, 0]), (1, [0, 1, 0]), (2, [1, 1, 1]), (2, [0, 0, 0])):
        feature.scored(run, samples(rng, PROMPTS[i], rewards), 0)
    drawn = [[p.id for p in draw(seed=seed)] for seed in range(100)]
    assert all(ids[:3] == [1, 2, 3] for ids in drawn)
    assert {ids[3] for ids in drawn} == {4, 5, 6, 7, 8}
    for prompt in PROMPTS[1:]:
        feature.scored(run, samples(rng, prompt, [1, 1, 1] * 2), 0)
    assert [p.id for p in draw(seed=0)] == [0, 1, 2, 3]  # none is left


@pytest.mark.parametrize("rule", ["geometric", "worst"])
@pytest.mark.parametrize("loss_type", ["dapo", "cispo"])
def test_rejected_completions_have_no_gradient(rule, loss_type):
    lengths = [5, 1, 7, 3]
    batch = random_batch([(2, n) for n in lengths])
    hidden, lm_head = torch.randn(16, 4, requires_grad=True), torch.randn(151, 4)
    logp, _ = head_logp(hidden, lm_head, batch.targets)
    # log-ratios
    deltas = [[0.1] * 5, [-0.9], [0.2] * 6 + [0.8], [0.9, -0.9, 0.0]]
    batch.sampling_logp = (logp - torch.tensor([x for d in deltas for x in d])).detach()
    keep = {"geometric": [1, 0, 1, 1], "worst": [1, 0, 0, 0]}[rule]
    cfg = rejection.Options(rejection=rule, rejection_bound=2.0, loss_type=loss_type)
    ratios = [np.exp(d) for d in deltas]
    for r, kept in zip(ratios, keep):
        chosen = [np.prod(r) ** (1 / len(r))] if rule == "geometric" else r
        assert kept == all(0.5 <= x <= 2 for x in chosen)

    feature, following = rejection.Rejection(), rejection.Feature()
    feature.model(None, SimpleNamespace(features=[following, feature]))
    assert feature.features == [feature, following]
    out = feature.objective(batch, cfg)(hidden, lm_head)
    out.loss.backward()
    rows = hidden.grad.abs().sum(1).split(lengths)
    assert [bool((g > 0).any()) for g in rows] == list(map(bool, keep))
    plain = rejection.loss.objective(batch, cfg, [])(hidden.detach(), lm_head)
    kept_rows = torch.tensor(keep).repeat_interleave(torch.tensor(lengths)).bool()
    assert out.metrics["rejected"].tolist() == (~kept_rows).float().tolist()
    np.testing.assert_allclose(out.logp, plain.logp, atol=1e-6)
    assert not gradient(batch, out, cfg)[~kept_rows].any()  # what --log-tokens shows
