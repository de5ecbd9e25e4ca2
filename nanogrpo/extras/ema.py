"""Evaluate an exponential moving average of the weights (`--ema-decay`).

    average ← d · average + (1 - d) · weights        after each step, from the initial weights

In: the trained weights. Out: evaluations of their average. The average changes neither training nor
the weights in a checkpoint. The average is part of the state that `--resume` restores. Every rank
averages its own shards. Read before: nanogrpo/feature.py. Read next: extras/attach.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nanogrpo.distributed import fsdp
from nanogrpo.engine.base import Engine, SamplingParams
from nanogrpo.extras.wrapper import Wrapper
from nanogrpo.feature import Feature
from nanogrpo.model.decoder import Decoder
from nanogrpo.types import Prompt, Sample

if TYPE_CHECKING:
    from nanogrpo.run.setup import Run


class EMA(Feature):
    def __init__(self, cfg: Any):
        self.decay = cfg.ema_decay
        self.average: dict[str, Tensor] = {}

    def loaded(self, model: Decoder) -> None:
        if not self.average:  # the policy is loaded first, and then a reference model
            parameters = model.named_parameters()
            self.average = {n: p.detach().clone() for n, p in parameters if p.requires_grad}

    def tensors(self) -> dict[str, Tensor]:
        return {f"ema.{name}": x for name, x in self.average.items()}

    def step(self, run: Run, step: int, samples: list[Sample]) -> None:
        fsdp.reshard(run.model)
        with torch.no_grad():
            for name, p in run.model.named_parameters():
                if name in self.average:
                    self.average[name].lerp_(p, 1 - self.decay)

    def swap(self, model: Decoder) -> None:
        """Swap the weights and their average."""
        fsdp.reshard(model)
        with torch.no_grad():
            weights = dict(model.named_parameters())
            for name, mine in self.average.items():
                p = weights[name]
                kept = p.detach().clone()
                p.copy_(mine)
                mine.copy_(kept)

    def wrap(self, engine: Engine, run: Run) -> Engine:
        return Averaged(engine, run, self)


class Averaged(Wrapper):
    """An engine that samples evaluations with the averaged weights."""

    def __init__(self, engine: Engine, run: Run, ema: EMA):
        self.engine, self.run, self.ema, self.averaged = engine, run, ema, False

    @property
    def version(self) -> int:
        """Return -1 while the engine has the average, so that the weights are sent again."""
        return -1 if self.averaged else self.engine.version

    def load(self, model: Any, version: int) -> None:
        self.engine.load(model, version)
        self.averaged = False

    def sample(
        self, prompts: Sequence[Prompt], n: int, params: SamplingParams, step: int
    ) -> list[Sample]:
        from nanogrpo.step import evaluation_sampling  # which imports the run

        evaluation = evaluation_sampling(self.run.cfg, self.run.sampling)
        if params == evaluation and not self.averaged:
            self.ema.swap(self.run.model)
            self.engine.load(self.run.model, self.engine.version)
            self.ema.swap(self.run.model)
            self.averaged = True
        return self.engine.sample(prompts, n, params, step)
