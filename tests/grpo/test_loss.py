"""The loss by hand: token weights, the clipped objective and its KL, each against its definition
(invariant 7).

test_trl_parity.py compares the same functions with TRL's code. Read next: test_objectives.py.
"""

import math

import pytest
import torch
from nanogrpo.kernels.reference.policy import Clip, LossInputs, k3, policy_terms

import nanogrpo.extras.objectives  # noqa: F401 (adds its losses to DIVISORS)
from nanogrpo import Config
from nanogrpo.extras.options import CHOICES
from nanogrpo.grpo import loss as grpo
from tests.kernels import autograd

CLIP = Clip(epsilon=0.2, epsilon_high=0.3)


# --- which tokens are trained, and how much each counts ---


def test_weights_follow_their_definitions():
    lengths, limit = [3, 1, 6], 8
    n_tokens = sum(lengths)
    loss = {  # Σ weight: what each definition makes of a loss that is 1 for every token
        "grpo": 1.0,
        "dr_grpo": n_tokens / (3 * limit),
        "sapo": 1.0,
        "luspo": n_tokens / 3,
        **dict.fromkeys(("dapo", "bnpo", "cispo", "vespo", "dppo_tv", "dppo_kl"), 1.0),
    }
    assert set(loss) == set(CHOICES["loss_type"])
    for name, expected in loss.items():
        cfg = Config(loss_type=name, max_completion_length=limit)
        weights = [grpo.token_weight(n, 3, n_tokens, cfg) for n in lengths]
        assert sum(w * n for w, n in zip(weights, lengths)) == pytest.approx(expected)
        # only there does a token of a short completion count more
        alike = name not in ("grpo", "sapo")
        assert (max(weights) == min(weights)) == alike
        assert grpo.token_weight(0, 3, 0, cfg) > 0  # and nothing divides by zero


# --- the objective ---


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
        (3.9, -2.0, 0),
        (4.1, -2.0, 0),  # unless it is above delta: dual clip
    ],
)
def test_clipping_zeroes_the_gradient_exactly_where_it_should(ratio, advantage, clipped):
    logp, a = torch.tensor([[math.log(ratio)], [advantage]], dtype=torch.float64)
    _, gradient, flag, _ = policy_terms(logp, LossInputs(a, a, 0 * a), CLIP._replace(delta=4.0))
    zero = clipped or ratio > 4
    assert (flag, gradient) == (clipped, 0 if zero else pytest.approx(-advantage * ratio))


# --- the KL ---


def test_the_corrected_kl_has_the_gradient_of_the_true_kl():
    """Summed over the vocabulary with its probabilities, ratio · k3 gives ∇ KL(π‖ref). k3 alone
    gives another gradient.
    """
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(7, generator=g, dtype=torch.float64).requires_grad_()
    ref = torch.log_softmax(torch.randn(7, generator=g, dtype=torch.float64), -1)
    logp = torch.log_softmax(logits, -1)
    (true,) = torch.autograd.grad((logp.exp() * (logp - ref)).sum(), logits, retain_graph=True)
    probability = logp.exp().detach()  # the weight of each token is how often it is sampled
    inputs = LossInputs(torch.zeros_like(ref), probability, ref_logp=ref)
    corrected = autograd.policy_loss(logp, inputs, CLIP._replace(beta=1.0)).loss
    plain = (probability * k3(ref - logp)).sum()
    for loss in (corrected, plain):
        (estimate,) = torch.autograd.grad(loss, logits, retain_graph=True)
        # both are right in value
        assert loss.item() == pytest.approx((probability * (logp.detach() - ref)).sum().item())
        assert torch.allclose(estimate, true, rtol=1e-9) is (loss is corrected)
