"""Siblings branch off where the trunk is most uncertain, and their stem is computed once. A row of
tests/configurations.py shows that two ranks are one, and that a run resumes.

Read next: examples/recipes/branch.py.
"""

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from examples.recipes import branch
from nanogrpo.engine.base import SamplingParams
from nanogrpo.types import Prompt
from tests.conftest import SOLO, arguments, logp_alone, packed, positions_of, steps, tiny_model
from tests.engine.small import make_engine
from tests.recipes import run

N, K, LENGTHS = 6, 3, (5, 9)
CFG = branch.Options(num_generations=N, branches=K, generation_batch_size=N * len(LENGTHS))


@pytest.fixture(scope="module")
def branched():
    """A model, samples of two prompts with two trunks of three siblings each, before and after
    `scored`, and the number of tokens that the engine prefilled for the siblings.
    """
    model = tiny_model(std=0.1).requires_grad_()
    engine, prefilled = make_engine(model), []
    real = engine.runner.prefill

    def prefill(waiting):
        out = real(waiting)
        prefilled.append(sum(p.kv.shape[3] for p in out.values()))
        return out

    engine.runner.prefill = prefill
    how = SamplingParams(max_tokens=20, stop_token_ids=[7])
    run = SimpleNamespace(cfg=CFG, model=model, world=SOLO, sampling=how)
    feature = branch.Branch()
    prompts = [Prompt(i, "", list(range(20, 20 + n))) for i, n in enumerate(LENGTHS)]
    samples = feature.wrap(engine, run).sample(prompts, N, how, step=3)
    whole = [copy.copy(s) for s in samples]
    feature.scored(run, samples, 3)
    return model, engine.sample(prompts, N // K, how, step=3), whole, samples, prefilled[1]


def test_siblings_continue_the_trunk_from_its_most_uncertain_token(branched):
    model, trunks, whole, samples, _ = branched
    lengths = []
    for i, trunk in enumerate(trunks):
        tokens = torch.tensor(trunk.prompt.token_ids + trunk.token_ids)
        z = model(tokens, *positions_of([len(tokens)])).detach().double().numpy()
        z = z[len(trunk.prompt.token_ids) - 1 : -1]
        p = np.exp(z) / np.exp(z).sum(1, keepdims=True)
        t = int(np.argmax(-(p * np.log(p)).sum(1)))
        lengths.append(t)
        siblings = samples[i * K : (i + 1) * K]
        for before, s in zip(whole[i * K : (i + 1) * K], siblings):
            prompt, ids = before.prompt, before.token_ids
            assert prompt is trunk.prompt
            assert ids[:t] == trunk.token_ids[:t]
            assert (s.prompt.token_ids, s.token_ids) == (prompt.token_ids + ids[:t], ids[t:])
            assert s.logp == before.logp[t:]
            np.testing.assert_allclose(before.logp, logp_alone(model, before).detach(), atol=1e-4)
            assert len(ids) <= 20
        assert len({tuple(s.token_ids) for s in siblings}) == K
    assert len({*lengths}) > 1
    assert [s.index for s in samples] == 2 * list(range(N))


def test_a_stem_is_computed_once_in_sampling_and_in_training(branched):
    _, _, _, samples, prefilled = branched
    stems = {id(s.prompt): len(s.prompt.token_ids) for s in samples}
    assert len(stems) == len(samples) // K
    assert prefilled == sum(stems.values()) - len(stems)  # without the last tokens
    (batch,) = packed(samples, CFG, all_gradients=True)
    own = sum(len(s.token_ids) - 1 for s in samples)
    assert len(batch.tokens) == sum(stems.values()) + own
    assert len(batch.targets) == sum(len(s.token_ids) for s in samples)


def test_the_baseline_is_the_mean_of_the_siblings_so_the_stem_has_no_gradient(branched):
    model, _, whole, samples, _ = branched
    rewards = np.random.default_rng(0).normal(size=(2, N))
    feature = branch.Branch()
    feature.k, feature.scale = K, "group"
    values, std = feature.advantages(torch.tensor(rewards), None)
    groups = rewards.reshape(-1, K)
    deviations = groups.std(1, ddof=1, keepdims=True)
    expected = (groups - groups.mean(1, keepdims=True)) / (deviations + 1e-4)
    np.testing.assert_allclose(values, expected.reshape(2, N))
    np.testing.assert_allclose(std, deviations)

    def gradient(samples) -> torch.Tensor:
        """Return the gradient of Σ A·log π over all tokens of the samples."""
        pairs = zip(samples, values.flatten())
        total = sum(advantage * logp_alone(model, s).sum() for s, advantage in pairs)
        return torch.cat([g.flatten() for g in torch.autograd.grad(total, model.parameters())])

    continuation, everything = gradient(samples), gradient(whole)
    assert (continuation - everything).norm() < 1e-5 * everything.norm()


def test_reward_functions_get_the_log_probs_of_the_whole_completion(tiny_base, files, tmp_path):
    (tmp_path / "own.py").write_text(
        "def own(completion_ids, logp, **kwargs):\n"
        "    return [float(len(a) == len(b)) for a, b in zip(completion_ids, logp)]\n"
    )
    more = f"--branches 2 --reward-funcs {tmp_path}/own.py:own"
    assert run(branch, arguments(tiny_base, files, tmp_path / "run", more)) == 0
    assert {row["reward"] for row in steps(tmp_path / "run")} == {1.0}
