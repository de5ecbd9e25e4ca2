"""The loss of a token by hand: where clipping leaves no gradient (invariant 3), and the gradient of
the KL (invariant 7).

test_trl_parity.py compares the same functions with TRL's code. Read next: test_objectives.py.
"""

import math

import pytest
import torch
from nanogrpo.kernels.reference.policy import Clip, LossInputs, k3, policy_terms

CLIP = Clip(epsilon=0.2, epsilon_high=0.3)


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
    terms, gradient, *_ = policy_terms(logp.detach(), inputs, CLIP._replace(beta=1.0))
    corrected, plain = probability * terms, probability * k3(ref - logp)
    value = (probability * (logp.detach() - ref)).sum()
    assert corrected.sum() == pytest.approx(value)
    assert plain.sum().item() == pytest.approx(value)
    (estimate,) = torch.autograd.grad(logp, logits, probability * gradient, retain_graph=True)
    assert torch.allclose(estimate, true, rtol=1e-9)
    (estimate,) = torch.autograd.grad(plain.sum(), logits)
    assert not torch.allclose(estimate, true)
