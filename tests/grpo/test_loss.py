"""GRPO by hand: advantages, token weights, the clipped objective and its KL, each against its
definition (invariants 3, 4, 5, 7).

test_trl_parity.py holds the same functions to another implementation, this file to arithmetic. Read
next: test_packing.py.
"""

import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nanogrpo.config import CHOICES, Config
from nanogrpo.grpo import loss as grpo
from nanogrpo.model import head as ops
from nanogrpo.types import Prompt, Sample
from tests.conftest import assign_advantages, random_batch

REWARD = st.floats(-1e3, 1e3, allow_nan=False) | st.sampled_from([0.0, 0.1, 1.0, 1 / 3, math.nan])
REWARDS = st.integers(1, 6).flatmap(
    lambda g: st.lists(st.lists(REWARD, min_size=g, max_size=g), min_size=1, max_size=4)
)
SCALES = ["group", "batch", "none"]


def config(**options) -> Config:
    return dataclasses.replace(
        Config(model="-", data="-", epsilon=0.2, epsilon_high=0.3), **options
    )


def sample(n: int, stopped: bool = True, **fields) -> Sample:
    return Sample(
        Prompt(0, "", [1]), 0, list(range(2, 2 + n)), [0.0] * n, stopped, [0] * n, **fields
    )


# ---- advantages ----------------------------------------------------------------------------------


@given(REWARDS, st.sampled_from(SCALES))
def test_advantages_sum_to_zero_in_each_group_and_are_finite(rewards, scale):
    values, _ = grpo.advantages(torch.tensor(rewards, dtype=torch.float64), scale)
    assert values.isfinite().all()
    assert values.sum(1).abs().max() < 1e-9 * max(1.0, values.abs().max().item())


@given(st.floats(-1e6, 1e6, allow_nan=False), st.integers(1, 16), st.sampled_from(SCALES))
def test_equal_rewards_give_exactly_zero(reward, size, scale):
    """Exactly: a rounding residue of 1e-17 divided by a standard deviation near zero would be an
    update in a random direction.
    """
    values, _ = grpo.advantages(torch.full((2, size), reward, dtype=torch.float64), scale)
    assert (values == 0).all()


@pytest.mark.parametrize("scale", SCALES)
def test_rewards_that_do_not_exist(scale):
    nan = torch.nan
    values, std = grpo.advantages(
        torch.tensor([[nan, nan, nan], [nan, 2.0, nan], [1.0, nan, 0.0]]), scale
    )
    assert (values[:2] == 0).all()  # nobody, or nobody to compare with
    assert values[2, 1] == 0  # left out of the baseline, which stays 1/2
    assert values[2, 0] == -values[2, 2] > 0
    assert std.shape == ((1, 1) if scale == "batch" else (3, 1))


def test_advantages_of_a_worked_example():
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0], [3.0, 1.0, 1.0, 1.0]], dtype=torch.float64)
    centred = torch.tensor([[0.5, -0.5, -0.5, 0.5], [1.5, -0.5, -0.5, -0.5]], dtype=torch.float64)
    first, second = math.sqrt(1 / 3), 1.0  # with Bessel's correction: sqrt(1/3), sqrt(3/3)
    # the mean of all eight is 1
    everything = math.sqrt(sum((r - 1) ** 2 for r in rewards.flatten().tolist()) / 7)
    for scale, std in (
        ("group", torch.tensor([[first], [second]])),
        ("batch", torch.tensor([[everything]])),
        ("none", None),
    ):
        values, told = grpo.advantages(rewards, scale)
        torch.testing.assert_close(
            values, centred if std is None else centred / (std.double() + 1e-4)
        )
        if std is not None:
            torch.testing.assert_close(told, std.double(), rtol=1e-7, atol=0)


def test_groups_are_g_samples_in_a_row():
    samples = [sample(1, reward=r) for r in (1.0, 0.0, 5.0, None)]
    assign_advantages(samples, config(num_generations=2, scale_rewards="none"))
    assert [s.advantage for s in samples] == [0.5, -0.5, 0.0, 0.0]


def test_leave_one_out_compares_with_the_others():
    rewards = torch.tensor(
        [[1.0, 0.0, 0.0, 3.0], [math.nan, 2.0, 0.0, math.nan]], dtype=torch.float64
    )
    values, std = grpo.leave_one_out(rewards)
    torch.testing.assert_close(
        values[0], torch.tensor([0.0, -4 / 3, -4 / 3, 8 / 3], dtype=torch.float64)
    )
    assert values[1].tolist() == [0.0, 2.0, -2.0, 0.0]
    assert std.shape == (2, 1)
    alone, _ = grpo.leave_one_out(torch.tensor([[math.nan, 5.0]]))
    assert alone.tolist() == [[0.0, 0.0]]  # nobody to compare with


def test_maxrl_weighs_a_success_by_its_rarity():
    rewards = torch.tensor(
        [
            [1.0, 0, 0, 0],
            [1.0, 1, 1, 0],
            [0.0, 0, 0, 0],
            [-1.0, 0, -1, -2],
            [math.nan, 1.0, 0.0, 0.0],
        ]
    )
    values, _ = grpo.maxrl(rewards)
    assert values[0].tolist() == [3.0, -1.0, -1.0, -1.0]  # of a success rate p: 1/p - 1, and -1
    assert values[1].tolist() == pytest.approx([1 / 3, 1 / 3, 1 / 3, -1.0])
    assert (values[2:4] == 0).all()  # a mean that is not above 0 is no scale
    assert values[4].tolist() == pytest.approx([0.0, 2.0, -1.0, -1.0])
    # whose mean is 0 and some 1e-17
    rounding = torch.tensor([[0.1, 0.2, -0.3, math.nan]], dtype=torch.float64)
    assert rounding.nanmean() != 0
    assert (grpo.maxrl(rounding)[0] == 0).all()


def test_each_reward_is_scaled_alone():
    """Two rewards of which one is a thousand times larger: summed it would be all there is,
    decoupled both count the same.
    """
    small, large = torch.tensor([[0.0, 1.0, 0.0, 1.0]]), torch.tensor([[0.0, 0.0, 1000.0, 1000.0]])
    table = torch.stack([small, large], dim=2).double()  # [1, 4, 2]
    values, std = grpo.decoupled(table, torch.tensor([1.0, 1.0], dtype=torch.float64))
    # one has the first, one the second
    assert values[0, 1].item() == pytest.approx(values[0, 2].item(), abs=2e-3)
    assert values[0].tolist() == pytest.approx(
        [-values[0, 3].item(), 0, 0, values[0, 3].item()], abs=1e-3
    )
    summed, _ = grpo.advantages((small + large).double())
    assert summed[0, 2] - summed[0, 1] > 1.7
    assert std.shape == (1, 1)
    cfg = config(num_generations=4, multi_objective_aggregation="normalize_then_sum")
    told, _ = grpo.step_advantages([0.0, 1.0, 1000.0, 1001.0], cfg, table[0].tolist())
    assert told == pytest.approx(values[0].tolist())
    negative, _ = grpo.decoupled(table, torch.tensor([1.0, -1.0], dtype=torch.float64))
    assert negative[0, 1] > 0 > negative[0, 2]
    for seed in range(20):  # a mean that were subtracted would be 1e-17 for every other one
        some = torch.rand(
            5, 4, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
        )
        values, _ = grpo.decoupled(
            torch.cat([some, torch.full((1, 4, 2), 0.1)]),
            torch.tensor([1.0, 0.3], dtype=torch.float64),
        )
        assert (values[:-1] != 0).all()
        assert (values[-1] == 0).all()  # to the last bit, which --max-resample-times asks for


ESTIMATORS = [{"advantage_estimator": "rloo"}, {"advantage_estimator": "maxrl"}]
ESTIMATORS += [
    {"multi_objective_aggregation": "normalize_then_sum"},
    *({"scale_rewards": scale} for scale in SCALES),
]


@given(
    st.lists(st.lists(REWARD, min_size=3, max_size=3), min_size=2, max_size=4),
    st.sampled_from(ESTIMATORS),
)
def test_every_estimator_is_finite_and_silent_where_nothing_differs(groups, options):
    cfg = config(num_generations=3, **options)
    flat = [None if math.isnan(r) else r for row in groups for r in row]
    values, _ = grpo.step_advantages(flat, cfg, [[r] for r in flat])
    assert all(math.isfinite(a) for a in values)
    assert all(a == 0 for a, r in zip(values, flat) if r is None)
    same = [groups[0][0]] * (3 * len(groups))
    same = [None if math.isnan(r) else r for r in same]
    values, _ = grpo.step_advantages(same, cfg, [[r] for r in same])
    assert set(values) == {0.0}


# ---- which tokens are trained, and how much each counts ------------------------------------------


def test_weights_are_the_definitions():
    lengths, limit = [3, 1, 6], 8
    n_tokens = sum(lengths)
    loss = {  # of ones: Σ weight is what each definition makes of a loss that is 1 everywhere
        "grpo": 1.0,
        "dapo": 1.0,
        "bnpo": 1.0,
        "dr_grpo": n_tokens / (3 * limit),
        "sapo": 1.0,
        "luspo": n_tokens / 3,
        **dict.fromkeys(("cispo", "vespo", "dppo_tv", "dppo_kl"), 1.0),
    }
    assert set(loss) == set(CHOICES["loss_type"])
    for name, expected in loss.items():
        cfg = config(loss_type=name, max_completion_length=limit)
        weights = [grpo.token_weight(n, 3, n_tokens, cfg) for n in lengths]
        assert sum(w * n for w, n in zip(weights, lengths)) == pytest.approx(expected)
        # only there does a token of a short completion count more
        alike = name not in ("grpo", "sapo")
        assert (max(weights) == min(weights)) == alike
        assert grpo.token_weight(0, 3, 0, cfg) > 0  # and nothing divides by zero


@pytest.mark.parametrize("masked", [False, True])
def test_a_cut_completion_is_trained_unless_masked(masked):
    cfg = config(mask_truncated_completions=masked)
    assert grpo.is_trained(sample(2, stopped=True), cfg)
    assert grpo.is_trained(sample(2, stopped=False), cfg) is not masked


# ---- the objective -------------------------------------------------------------------------------


def head(seed: int = 0, M: int = 6, D: int = 5, V: int = 11) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(n, D, generator=g).requires_grad_() for n in (M, V))


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_on_policy_loss_is_minus_the_mean_advantage_and_its_gradient_is_reinforce(temperature):
    """loss = -Σ A·m/n in value, whatever the log-probs; gradient = -Σ A/n · ∇ log π(token),
    Williams 1992.
    """
    batch = random_batch([(2, 2), (2, 1), (3, 3)], vocab_size=11, off_policy=False)
    hidden, weight = head()
    out = grpo.objective(batch, config(temperature=temperature))(hidden, weight)
    assert out.loss.item() == pytest.approx(-batch.advantage.mean().item(), rel=1e-6)
    gradients = torch.autograd.grad(out.loss, (hidden, weight))

    logp = torch.log_softmax(hidden @ weight.T / temperature, -1).gather(1, batch.targets[:, None])[
        :, 0
    ]
    expected = torch.autograd.grad(-(batch.advantage * logp).mean(), (hidden, weight))
    for ours, reinforce in zip(gradients, expected):
        torch.testing.assert_close(ours, reinforce, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(out.logp, logp.detach())
    assert (out.clip == 0).all()


def test_objective_is_the_policy_loss_of_the_log_probs():
    """The fused head and the two-phase path agree on loss and gradients, off policy and with every
    option on.
    """
    cfg = config(temperature=0.8, epsilon=0.02, epsilon_high=0.04, delta=1.02, beta=0.2)
    batch = random_batch([(2, 2), (2, 1), (3, 3)], vocab_size=11)
    hidden, weight = head()
    with torch.no_grad():
        logp, _ = grpo.logp_of(batch, cfg)(hidden, weight)
    batch.old_logp = logp + torch.tensor([0.05, -0.05, 0.0, 0.01, -0.01, 0.1])
    batch.ref_logp = logp - 0.3
    fused = grpo.objective(batch, cfg)(hidden, weight)
    logp, _ = grpo.logp_of(batch, cfg)(hidden, weight)
    numbers = dict(epsilon=0.02, epsilon_high=0.04, delta=1.02, ref_logp=batch.ref_logp, beta=0.2)
    plain = ops.policy_loss(logp, batch.old_logp, batch.advantage, batch.weight, **numbers)
    torch.testing.assert_close(fused.loss, plain.loss)
    for a, b in zip(
        torch.autograd.grad(fused.loss, (hidden, weight)),
        torch.autograd.grad(plain.loss, (hidden, weight)),
    ):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def token_gradient(ratio: float, advantage: float, **numbers) -> tuple[float, int]:
    """d loss / d logp of one token of weight 1, and its clip flag."""
    logp = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    zero, a, one = (torch.tensor([x], dtype=torch.float64) for x in (0.0, advantage, 1.0))
    out = ops.policy_loss(logp, zero, a, one, **{"epsilon": 0.2, "epsilon_high": 0.3, **numbers})
    (gradient,) = torch.autograd.grad(out.loss, logp)
    return gradient.item(), out.clip.item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "clipped"),
    [
        (0.5, 2.0, 0),  # the token became rarer though it was good: nothing holds it back
        (0.81, 2.0, 0),
        (1.29, 2.0, 0),
        (1.31, 2.0, 1),  # good, and already likelier by more than 1 + epsilon_high: enough
        (3.0, 2.0, 1),
        (0.5, -2.0, -1),  # bad, and already rarer than 1 - epsilon: enough
        (0.79, -2.0, -1),
        (0.81, -2.0, 0),
        (1.31, -2.0, 0),  # bad and likelier than before: the full gradient, however large the ratio
        (3.0, -2.0, 0),
    ],
)
def test_clipping_zeroes_the_gradient_exactly_where_it_should(ratio, advantage, clipped):
    gradient, flag = token_gradient(ratio, advantage)
    assert flag == clipped
    assert gradient == (0.0 if clipped else pytest.approx(-advantage * ratio, rel=1e-12))


def test_delta_bounds_what_a_bad_token_can_do():
    """Dual clip: with A < 0 the ratio is unbounded above, and so is the loss; delta ends it,
    gradient included.
    """
    assert token_gradient(3.9, -1.0, delta=4.0)[0] == pytest.approx(3.9)
    assert token_gradient(4.1, -1.0, delta=4.0)[0] == 0.0
    assert token_gradient(0.5, 1.0, delta=4.0)[0] == pytest.approx(-0.5)


def test_no_token_of_weight_zero_and_no_advantage_of_zero_moves_anything():
    logp = torch.tensor([-1.0, torch.nan, -2.0], requires_grad=True)
    advantage, weight = torch.tensor([0.0, 1.0, 1.0]), torch.tensor([0.5, 0.0, 0.5])
    out = ops.policy_loss(
        logp, torch.tensor([-1.5, 0.0, -2.0]), advantage, weight, epsilon=0.2, epsilon_high=0.2
    )
    (gradient,) = torch.autograd.grad(out.loss, logp)
    assert gradient.tolist() == [0.0, 0.0, -0.5]  # nan · 0 would have been nan


# ---- the KL --------------------------------------------------------------------------------------


@given(st.floats(-30, 0), st.floats(-30, 0))
def test_k3_is_never_negative_and_zero_only_at_equality(logp, ref):
    # the second token is where the two policies agree
    a, b = torch.tensor([logp, ref]), torch.tensor([ref, ref])
    zero, one = torch.zeros(2), torch.ones(2)
    out = ops.policy_loss(a, None, zero, one, epsilon=0.2, epsilon_high=0.2, ref_logp=b, beta=1.0)
    assert out.kl[0] >= 0
    assert out.kl[1] == 0
    if abs(logp - ref) > 1e-3:
        assert out.kl[0] > 0


@pytest.mark.parametrize("corrected", [False, True])
def test_k3_gradient_matches_finite_differences(corrected):
    g = torch.Generator().manual_seed(0)
    logp, old, ref = -2 * torch.rand(3, 50, generator=g, dtype=torch.float64)
    zero, one = torch.zeros_like(logp), torch.ones_like(logp)

    def loss(x: torch.Tensor) -> torch.Tensor:
        numbers = dict(
            epsilon=0.2, epsilon_high=0.2, ref_logp=ref, beta=0.7, use_bias_correction_kl=corrected
        )
        return ops.policy_loss(x, old, zero, one, **numbers).loss

    assert torch.autograd.gradcheck(loss, logp.requires_grad_(), atol=1e-8, rtol=1e-6)


@pytest.mark.parametrize("corrected", [False, True])
def test_the_corrected_kl_has_the_gradient_of_the_true_kl(corrected):
    """Summed over the whole vocabulary with its probabilities, ratio · k3 gives ∇ KL(π‖ref); k3
    alone gives another gradient.
    """
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(7, generator=g, dtype=torch.float64).requires_grad_()
    ref = torch.log_softmax(torch.randn(7, generator=g, dtype=torch.float64), -1)
    logp = torch.log_softmax(logits, -1)
    (true,) = torch.autograd.grad((logp.exp() * (logp - ref)).sum(), logits, retain_graph=True)
    probability = logp.exp().detach()  # the weight of each token is how often it is drawn
    numbers = dict(
        epsilon=0.2, epsilon_high=0.2, ref_logp=ref, beta=1.0, use_bias_correction_kl=corrected
    )
    out = ops.policy_loss(logp, None, torch.zeros_like(ref), probability, **numbers)
    (estimate,) = torch.autograd.grad(out.loss, logits)
    # both are right in value
    assert out.loss.item() == pytest.approx((probability * (logp.detach() - ref)).sum().item())
    assert torch.allclose(estimate, true, rtol=1e-9) is corrected
