"""How far from the truth may a log-prob be that was computed in float32? The model itself answers,
token by token.

`exact` computes the trainer's log-probs in float64. It then repeats them several times with noise
on everything that a module passes on, as large as rounding to float32 would be (Monte Carlo
arithmetic: Parker 1997). How far the noise moves a token's log-prob is how far rounding may move it
in any float32 program that computes the same function, whatever its order of sums. docs/log.md has
the figures.
"""

import copy
from collections.abc import Sequence

import torch
from torch import Tensor

from nanogrpo import Config
from nanogrpo.model.decoder import Block, Decoder
from nanogrpo.types import Sample
from tests.conftest import logp_of

ULP = 2.0**-24  # the largest relative change when a number is rounded to float32


def of_all(model: Decoder, samples: Sequence[Sample], cfg: Config) -> Tensor:
    """Return the trainer's log-probs of all tokens in order, [M] float64, from its own strips."""
    return torch.cat(logp_of(model, samples, cfg)).double()


@torch.no_grad()
def exact(model: Decoder, samples: Sequence[Sample], cfg: Config) -> tuple[Tensor, Tensor]:
    """Return each log-prob in float64, and how far float32's rounding may move it: [M] float64."""
    model, generator = copy.deepcopy(model).double(), torch.Generator().manual_seed(0)
    truth = of_all(model, samples, cfg)

    def noisy(x: object) -> object:
        if isinstance(x, tuple):
            return tuple(map(noisy, x))
        if not (isinstance(x, Tensor) and x.is_floating_point()):
            return x
        return x * (1 + ULP * (2 * torch.rand(x.shape, generator=generator, dtype=x.dtype) - 1))

    for module in model.modules():
        if isinstance(module, Block) or not list(module.children()):
            module.register_forward_pre_hook(lambda module, inputs: noisy(inputs))
            module.register_forward_hook(lambda module, inputs, out: noisy(out))
    squares = [(of_all(model, samples, cfg) - truth).square() for _ in range(8)]
    # the second term is the log-softmax's own rounding
    return truth, torch.stack(squares).mean(0).sqrt() + ULP * (1 - truth)


def agree(model: Decoder, samples: Sequence[Sample], temperature: float) -> None:
    """Assert that engine and trainer are both as close to float64 as float32 allows.

    Measured in units of what rounding may do to a token: the root mean square over all tokens is
    0.5 for random models, 2 for trained ones and 2.6 at most; the largest is 20.
    """
    cfg = Config(temperature=temperature)
    truth, unit = exact(model, samples, cfg)
    engine = torch.tensor([x for s in samples for x in s.logp], dtype=torch.float64)  # [M]
    sides = [(logp - truth).abs() / unit for logp in (engine, of_all(model, samples, cfg))]
    rms = [side.square().mean().sqrt().item() for side in sides]
    assert max(rms) <= 4, rms
    assert max(side.max().item() for side in sides) <= 40, [side.max() for side in sides]
    assert 0.75 < rms[0] / rms[1] < 1.33, rms  # neither side is worse
