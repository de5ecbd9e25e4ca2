"""Check exercise 8, its value and its gradient, against `loss` of nanogrpo/grpo/loss.py."""

import torch

from exercises.hints import expect, matches, tensor
from nanogrpo.config import Config
from nanogrpo.grpo import loss as grpo
from nanogrpo.types import PackedBatch

START = "The log of s_i is the mean over the tokens of logp - old_logp."


def theirs(logp, old, advantage, epsilon):
    """Return the project's loss for completions of these log-probs."""
    lengths = torch.tensor([len(x) for x in logp])
    empty = torch.zeros(0, dtype=torch.int64)
    batch = PackedBatch(
        *(empty, empty, empty, 0, None, None, 0, empty, empty),
        sample=torch.arange(len(logp)).repeat_interleave(lengths),
        advantage=advantage.repeat_interleave(lengths),
        weight=(1.0 / (len(logp) * lengths.double())).repeat_interleave(lengths),
        sampling_logp=torch.cat(old),
        old_logp=torch.cat(old),
    )
    cfg = Config(loss_type="grpo", importance_sampling_level="sequence", epsilon=epsilon)
    joined = torch.cat(logp)
    return grpo.loss(joined, torch.zeros_like(joined), batch, cfg).loss


def check(answer) -> None:
    g = torch.Generator().manual_seed(3)
    old = [-3 * torch.rand(n, generator=g, dtype=torch.float64) for n in (3, 9, 6, 2)]
    moved = (0.02, 0.3, -0.3, -0.01)
    new = [
        x + shift + 0.2 * torch.randn(len(x), generator=g, dtype=torch.float64)
        for x, shift in zip(old, moved)
    ]
    A = torch.tensor([1.0, 1.5, 0.7, -1.2], dtype=torch.float64)

    def surrogate(s):
        return -torch.minimum(s * A, s.clamp(0.8, 1.2) * A).mean()

    def by(f):
        return surrogate(torch.stack([f(a, b) for a, b in zip(new, old)]))

    def per_token(a, b, A):
        ratio = (a - b).exp()
        return -torch.minimum(ratio * A, ratio.clamp(0.8, 1.2) * A).mean()

    right = theirs(new, old, A, 0.2)
    mistakes = {
        "The power 1/|y| is missing: the log of s is the mean of the log-ratios, not their sum.": (
            by(lambda a, b: (a - b).sum().exp())
        ),
        "You average the tokens' ratios. Average their logarithms, then take one exp.": (
            by(lambda a, b: (a - b).exp().mean())
        ),
        "Each token still has a ratio and a clip of its own. GSPO has one per completion.": (
            torch.stack([per_token(*x) for x in zip(new, old, A)]).mean()
        ),
        "Your ratio is upside down: π is the new policy, π_old the one that sampled.": (
            by(lambda a, b: (b - a).mean().exp())
        ),
        "The sign is wrong: the paper maximizes, an optimizer minimizes.": -right,
        "This is the sum over the completions. Take the mean.": right * 4,
        "You take the larger of the two products. It must be the smaller one.": (
            -torch.stack(
                [
                    torch.maximum(s * a, s.clamp(0.8, 1.2) * a)
                    for s, a in zip([(x - y).mean().exp() for x, y in zip(new, old)], A)
                ]
            ).mean()
        ),
    }
    leaves = [x.clone().requires_grad_() for x in new]
    found = answer.loss(leaves, [x.clone() for x in old], A.clone(), 0.2)
    matches("loss", found, right, mistakes)
    tensor(found, "loss", ())
    expect(found.requires_grad, "The loss has no gradient. Do not detach the log-probs.")
    wanted = [x.clone().requires_grad_() for x in new]
    gradient = torch.autograd.grad(theirs(wanted, old, A, 0.2), wanted)
    grads = torch.autograd.grad(found, leaves, allow_unused=True, materialize_grads=True)
    matches("the gradient", torch.cat(grads), torch.cat(gradient))
