"""Inputs for the tests of the head: hidden states, an output head, and the vectors of a batch.

    from tests.model.head_inputs import CLIP, D, M, T, V, draw    # M tokens, width D, V words

Read next: test_head.py.
"""

import torch
from nanogrpo.kernels.reference.policy import Clip, LossInputs

M, D, V, T = 13, 7, 29, 0.7
CLIP = Clip(epsilon=0.2, epsilon_high=0.28)


def draw(dtype=torch.float64, seed=0):
    """Return hidden, head, targets and LossInputs in which every kind of token occurs."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)

    hidden, head = normal(M, D).requires_grad_(), normal(V, D).requires_grad_()
    targets = torch.randint(V, (M,), generator=g)
    logp_all = torch.log_softmax(hidden.detach() @ head.detach().T / T, -1)
    logp = logp_all.gather(1, targets[:, None]).squeeze(1)
    old, ref = logp + 0.3 * normal(M), logp + 0.2 * normal(M)
    advantage, weight, importance = normal(M), normal(M).abs(), normal(M).abs()
    advantage[3], weight[5], importance[7] = 0.0, 0.0, 0.0
    entropy_weight = 0.1 * normal(M).abs()
    entropy_weight[2] = 0.0
    acc = torch.float64 if dtype == torch.float64 else torch.float32
    inputs = LossInputs(advantage, weight, old, ref, importance, entropy_weight)
    return hidden, head, targets, inputs.map(lambda v: v.to(acc))
