"""What the tests of ops.py are fed: hidden states, an output head and the vectors of a batch with
every kind of token.

    from tests.model.head_inputs import CLIP, draw, D, M, V        # M tokens, of width D, V words; CLIP: the two bounds, as settings

Read next: test_ops.py.
"""

import torch

M, D, V, T = 13, 7, 29, 0.7
CLIP = dict(epsilon=0.2, epsilon_high=0.28)


def draw(dtype=torch.float64, seed=0):
    """hidden, head, targets and the vectors of a batch in which every kind of token occurs."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)

    hidden, head = normal(M, D).requires_grad_(), normal(V, D).requires_grad_()
    targets = torch.randint(V, (M,), generator=g)
    logp = (
        torch.log_softmax(hidden.detach() @ head.detach().T / T, -1)
        .gather(1, targets[:, None])
        .squeeze(1)
    )
    acc = torch.float64 if dtype == torch.float64 else torch.float32
    old, ref = (logp + 0.3 * normal(M)).to(acc), (logp + 0.2 * normal(M)).to(acc)
    advantage, weight, importance = (
        normal(M).to(acc),
        normal(M).abs().to(acc),
        normal(M).abs().to(acc),
    )
    advantage[3], weight[5], importance[7] = 0.0, 0.0, 0.0
    entropy_weight = 0.1 * normal(M).abs().to(acc)
    entropy_weight[2] = 0.0
    return (
        hidden,
        head,
        targets,
        dict(
            old=old, ref=ref, advantage=advantage, weight=weight, imp=importance, ew=entropy_weight
        ),
    )
