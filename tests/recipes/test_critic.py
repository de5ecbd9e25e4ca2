"""The critic's advantages and losses are those of the papers. Its rows in tests/configurations.py
show that a resumed run is the uninterrupted one, and that two ranks are one.

Read next: examples/recipes/critic.py.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from examples.recipes import critic
from nanogrpo.logs.files import checkpoints
from nanogrpo.model import checkpoint
from tests import configurations
from tests.conftest import SOLO, random_batch

LAM, CLIP = 0.7, 0.2


def estimates(reward: float, values: np.ndarray) -> np.ndarray:
    """Return GAE as the paper defines it: the mean of all k-step advantages, where the k-step one
    has weight (1 - λ)·λ^(k-1), and the last one all weight that is left.
    """
    T, out = len(values), []
    for t in range(T):
        steps = [values[t + k] - values[t] for k in range(1, T - t)] + [reward - values[t]]
        shares = [(1 - LAM) * LAM**k for k in range(T - t - 1)] + [LAM ** (T - t - 1)]
        out.append(np.dot(shares, steps))
    return np.array(out)


def test_advantages_values_and_loss_are_those_of_the_papers():
    lengths, rewards = [5, 1, 7], [1.0, float("nan"), 0.5]
    rng = np.random.default_rng(0)
    values, w = (rng.normal(size=n) for n in (13, 4))
    moved, hidden = values + rng.normal(scale=0.3, size=13), torch.randn(13, 4)
    parts = np.split(values, np.cumsum(lengths)[:-1])
    raw = np.concatenate([np.nan_to_num(estimates(r, v)) for r, v in zip(rewards, parts)])
    worst = [
        max((v - t) ** 2, (np.clip(v, o - CLIP, o + CLIP) - t) ** 2)
        for v, o, t in zip(moved, values, raw + values)
    ]

    batch = random_batch([(2, n) for n in lengths], off_policy=False)
    cfg = critic.Options(lam=LAM, cliprange_value=CLIP, vf_coef=0.5)
    model = SimpleNamespace(forward_strip=lambda *_: torch.tensor(values, dtype=torch.float32))
    feature = critic.Critic()
    feature.features, feature.values = [feature], lambda hidden, _: torch.tensor(moved).float()
    feature.advantages(torch.tensor(rewards), None)
    feature.batches(SimpleNamespace(cfg=cfg, model=model, world=SOLO), [batch])
    expected = (raw - raw.mean()) / raw.std(ddof=1)
    np.testing.assert_allclose(batch.advantage, expected, atol=1e-6)
    np.testing.assert_allclose(batch.returns, raw + values, atol=1e-6)

    lm_head = torch.randn(151, 4)
    both = feature.objective(batch, cfg)(hidden, lm_head)
    policy = critic.loss.objective(batch, cfg)(hidden, lm_head)
    assert float(both.loss - policy.loss) == pytest.approx(0.5 * np.mean(worst) / 2, abs=1e-6)

    # the factor multiplies the value and its learning rate, but not the gradient
    feature = critic.Critic()
    feature.policy = SimpleNamespace(critic=torch.nn.Linear(4, 1, bias=False))
    feature.policy.critic.weight.data[:] = torch.tensor(w)
    feature.factor = 30.0
    value = feature.values(hidden, None)
    np.testing.assert_allclose(value.detach(), 30 * (hidden.numpy() @ w), rtol=1e-5)
    (gradient,) = torch.autograd.grad(value.sum(), feature.policy.critic.weight)
    np.testing.assert_allclose(gradient[0], hidden.sum(0), rtol=1e-5)


def test_the_critic_is_not_exported():
    checkpoint.load_model(checkpoints(str(configurations.uninterrupted("critic")))[-1])
