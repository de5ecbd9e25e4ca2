"""Check exercise 8, its value and its gradient, against `loss` of nanogrpo/extras/objectives.py."""

import torch

from exercises.hints import expect, matches, tensor
from nanogrpo import Config
from nanogrpo.extras.objectives import loss
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
    return loss(joined, torch.zeros_like(joined), batch, cfg).loss


def check(answer) -> None:
    g = torch.Generator().manual_seed(3)
    # Both signs of the advantage, with ratios near 1, above and below it. The last completion is so
    # long that its probability is 0 in float64.
    lengths, moved = (3, 9, 6, 2, 5, 4, 600), (0.02, 0.4, -0.4, -0.01, 0.4, -0.4, 0.05)
    old = [-3 * torch.rand(n, generator=g, dtype=torch.float64) for n in lengths]
    new = [
        x + shift + 0.2 * torch.randn(len(x), generator=g, dtype=torch.float64)
        for x, shift in zip(old, moved)
    ]
    A = torch.tensor([1.0, 1.5, 0.7, -1.2, -0.9, -0.4, 0.6], dtype=torch.float64)
    epsilon = 0.15

    def terms(s, A, epsilon=epsilon):
        return -torch.minimum(s * A, s.clamp(1 - epsilon, 1 + epsilon) * A)

    def ratios(f):
        return torch.stack([f(a, b) for a, b in zip(new, old)])

    def by(f):
        return terms(ratios(f), A).mean()

    s = ratios(lambda a, b: (a - b).mean().exp())
    held = s.clamp(1 - epsilon, 1 + epsilon)
    right = theirs(new, old, A, epsilon)
    mistakes = {
        "The loss is NaN: the probability of 600 tokens is 0 in float64. Stay with log-probs.": (
            right * torch.nan
        ),
        "Nothing is clipped yet.": -(s * A).mean(),
        "You take only the clamped product, and not the smaller of the two.": -(held * A).mean(),
        "The minimum is that of the two products with A, and not of the two ratios.": (
            -(torch.minimum(s, held) * A).mean()
        ),
        "The clip has the bounds 1 - epsilon and 1 + epsilon; yours is fixed at 0.2.": (
            terms(s, A, 0.2).mean()
        ),
        "The clip has the bounds 1 - epsilon and 1 + epsilon; the lower one is missing.": (
            -torch.minimum(s * A, s.clamp(max=1 + epsilon) * A).mean()
        ),
        "Long completions count more. Take the mean over completions, not over tokens.": (
            terms(s, A) @ torch.tensor(lengths).double() / sum(lengths)
        ),
        "The power 1/|y| is missing: the log of s is the mean of the log-ratios, not their sum.": (
            by(lambda a, b: (a - b).sum().exp())
        ),
        "You average the tokens' ratios. Average their logarithms, then take one exp.": (
            by(lambda a, b: (a - b).exp().mean())
        ),
        "Each token still has a ratio and a clip of its own. GSPO has one per completion.": (
            torch.stack([terms((a - b).exp(), x).mean() for a, b, x in zip(new, old, A)]).mean()
        ),
        "Your ratio is upside down: π is the new policy, π_old the one that sampled.": (
            by(lambda a, b: (b - a).mean().exp())
        ),
        "The sign is wrong: the paper maximizes, an optimizer minimizes.": -right,
        "This is the sum over the completions. Take the mean.": right * len(lengths),
        "You take the larger of the two products. It must be the smaller one.": (
            -torch.maximum(s * A, held * A).mean()
        ),
    }
    leaves = [x.clone().requires_grad_() for x in new]
    found = answer.loss(leaves, [x.clone() for x in old], A.clone(), epsilon)
    matches("loss", found, right, mistakes)
    tensor(found, "loss", ())
    expect(found.requires_grad, "The loss has no gradient. Do not detach the log-probs.")
    wanted = [x.clone().requires_grad_() for x in new]
    gradient = torch.autograd.grad(theirs(wanted, old, A, epsilon), wanted)
    grads = torch.autograd.grad(found, leaves, allow_unused=True, materialize_grads=True)
    matches("the gradient", torch.cat(grads), torch.cat(gradient))
