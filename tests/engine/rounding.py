"""How far from the truth may a log-prob be that was computed in float32? Asked of the model itself,
token by token.

`exact` computes the trainer's log-probs in float64, and again several times with noise on all that
a module hands on, as large as rounding to float32 would be (Monte Carlo arithmetic: Parker 1997).
How far that moves a token's log-prob is how far rounding may move it on any side that computes the
same function in float32, in whatever order it adds. docs/log.md has the figures.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor

from nanogrpo.config import Config
from nanogrpo.data.tasks import problems
from nanogrpo.model.decoder import Block, Decoder
from nanogrpo.model.tokenizer import Tokenizer
from nanogrpo.run import warmup
from nanogrpo.types import Prompt, Sample
from tests.conftest import logp_of

ULP = 2.0**-24  # relative: what rounding a number to float32 changes at most


def trained(model: Decoder, tokenizer: Tokenizer, steps: int = 160) -> list[Prompt]:
    """Trains a model on the built-in task until its distributions are sharp; returns prompts for
    it.
    """
    warmup.teach(model.requires_grad_(True), tokenizer, seed=0, steps=steps)
    model.requires_grad_(False)
    texts = [f"{text}=" for text in problems("train", 32, seed=1)]
    return [
        Prompt(i, t, tokenizer.encode_prompt([{"role": "user", "content": t}]))
        for i, t in enumerate(texts)
    ]


def of_all(model: Decoder, samples: Sequence[Sample], cfg: Config) -> Tensor:
    """[M] float64: the trainer's log-probs of all tokens, in the samples' order, by its own strips
    and head operation.
    """
    return torch.cat(logp_of(model, samples, cfg)).double()


@torch.no_grad()
def exact(
    model: Decoder, samples: Sequence[Sample], cfg: Config, draws: int = 8
) -> tuple[Tensor, Tensor]:
    """([M], [M]) float64: log-probs of a float32 model's weights in float64, and by how much
    float32's rounding may move each.
    """
    model, generator = copy.deepcopy(model).double(), torch.Generator().manual_seed(0)
    truth = of_all(model, samples, cfg)

    def noisy(x: object) -> object:
        if not (isinstance(x, Tensor) and x.is_floating_point()):
            return x
        return x * (1 + ULP * (2 * torch.rand(x.shape, generator=generator, dtype=x.dtype) - 1))

    for module in model.modules():
        if isinstance(module, Block) or not list(module.children()):
            module.register_forward_pre_hook(lambda module, inputs: tuple(map(noisy, inputs)))
            module.register_forward_hook(lambda module, inputs, out: noisy(out))
    squares = [(of_all(model, samples, cfg) - truth).square() for _ in range(draws)]
    # the last: the log-softmax's own rounding
    return truth, torch.stack(squares).mean(0).sqrt() + ULP * (1 - truth)


def agree(model: Decoder, samples: Sequence[Sample], temperature: float) -> None:
    """Asserts that engine and trainer are both as near to float64 as float32 allows, in units of
    what rounding may do to a token.

    Measured, over all tokens: root mean square 0.5 of random models, 2 of trained ones, 2.6 at
    most; the largest 20.
    """
    cfg = Config(temperature=temperature)
    truth, unit = exact(model, samples, cfg)
    engine = torch.tensor([x for s in samples for x in s.logp], dtype=torch.float64)  # [M]
    sides = [(logp - truth).abs() / unit for logp in (engine, of_all(model, samples, cfg))]
    rms = [side.square().mean().sqrt().item() for side in sides]
    assert max(rms) <= 4, rms
    assert max(side.max().item() for side in sides) <= 40, [side.max() for side in sides]
    assert 0.75 < rms[0] / rms[1] < 1.33, rms  # neither side is worse
