"""Check the gradient of exercise 3 against the fused rows, `policy_rows_`, in float64."""

import torch
from nanogrpo.kernels.reference.policy import Clip, LossInputs

from exercises.hints import expect, matches, tensor
from nanogrpo.kernels import reference

START = (
    "logits.log_softmax(dim=-1) has the log-probs of all tokens, [M, V]. `gather` then picks one"
    " column per row: that of the token."
)


def check(answer) -> None:
    g = torch.Generator().manual_seed(0)
    logits, M = torch.randn(6, 7, generator=g, dtype=torch.float64), 6
    tokens = torch.tensor([0, 6, 2, 3, 3, 5])
    advantage = torch.tensor([1.5, 1.5, -0.5, -0.5, 2.0, 0.0], dtype=torch.float64)
    right = logits.clone()
    inputs = LossInputs(advantage, torch.full((M,), 1 / M, dtype=torch.float64))
    reference.policy_rows_(right, tokens, 1.0, inputs, Clip(0.2, 0.2))

    def gradient(loss):
        z = logits.clone().requires_grad_()
        value = loss(z)
        tensor(value, "loss", ())
        expect(
            isinstance(value, torch.Tensor) and value.requires_grad,
            "The loss has no gradient. Compute it from `logits` with torch's functions, without"
            " .detach(), .item() or no_grad.",
        )
        return torch.autograd.grad(value, z)[0]

    def picked(x):
        return x.gather(1, tokens[:, None]).squeeze(1)

    found = gradient(lambda z: answer.loss(z, tokens.clone(), advantage.clone()))
    mistakes = {
        "The sign is wrong: an optimizer goes down, so this makes good tokens less likely.": -right,
        "This is the sum over the tokens: divide by M.": right * M,
        "This is the gradient of the probability. Use log_softmax instead of softmax.": (
            gradient(lambda z: -(advantage * picked(z.softmax(-1))).mean())
        ),
        "You pick raw logits. Without log_softmax the other tokens' logits have no gradient.": (
            gradient(lambda z: -(advantage * picked(z)).mean())
        ),
        "The softmax runs over the tokens (dim 0). It must run over the vocabulary: dim=-1.": (
            gradient(lambda z: -(advantage * picked(z.log_softmax(0))).mean())
        ),
        "You use the log-probs of all tokens of the vocabulary. Pick that of the sampled token.": (
            gradient(lambda z: -(advantage[:, None] * z.log_softmax(-1)).mean())
        ),
        "Two things are wrong: use log_softmax instead of softmax, and .squeeze(1) after gather, so"
        " that the shape is [M] and not [M, 1].": (
            gradient(lambda z: -(advantage * picked(z.softmax(-1))[:, None]).mean())
        ),
        "Each advantage must meet its own token only, before the mean. With cross_entropy, use"
        " reduction='none'. With gather, use .squeeze(1): [M, 1] times [M] is [M, M].": (
            gradient(lambda z: -picked(z.log_softmax(-1)).mean() * advantage.mean())
        ),
        "The advantage has no effect: this raises the probability of every sampled token.": (
            gradient(lambda z: -picked(z.log_softmax(-1)).mean())
        ),
    }
    matches("the gradient", found, right, mistakes)
