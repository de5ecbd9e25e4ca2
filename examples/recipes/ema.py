"""Evaluate an exponential moving average of the weights (Polyak and Juditsky 1992).

    average ← d · average + (1 - d) · weights        after each step, from the initial weights

The average changes neither training nor the exported weights. A checkpoint also contains the
average, so a resumed run continues with it. Each rank averages its own shards.

    python examples/recipes/ema.py --model runs/base --data arithmetic --eval-steps 10 \\
        --ema-decay 0.99 --output-dir runs/ema
"""

from __future__ import annotations

from dataclasses import dataclass

from nanogrpo.config import option
from nanogrpo.distributed import fsdp
from nanogrpo.extras.options import Config
from nanogrpo.extras.recipe import main
from nanogrpo.extras.wrapper import Wrapper
from nanogrpo.feature import Feature
from nanogrpo.step import evaluation_sampling


@dataclass(frozen=True)
class Options(Config):
    ema_decay: float = option(0.99, "share kept at each step", ">= 0", "< 1", needs="eval_steps")

    def problems(self):
        if self.max_staleness:
            yield "--max-staleness must be 0: evaluations change the weights of the engine."


class EMA(Feature):
    def __init__(self):
        self.average = {}

    def loaded(self, model):
        if not self.average:  # the policy is loaded first, and then a reference model
            parameters = model.named_parameters()
            self.average = {n: p.detach().clone() for n, p in parameters if p.requires_grad}

    def tensors(self):
        return {f"ema.{name}": x for name, x in self.average.items()}

    def pairs(self, model):
        """Return this rank's part of each weight, and of its average."""
        fsdp.reshard(model)
        masters = dict(model.named_parameters())  # `get_parameter` could return 16-bit copies
        return [(masters[name].detach(), x) for name, x in self.average.items()]

    def step(self, run, step, samples):
        for weight, average in self.pairs(run.model):
            average.lerp_(weight, 1 - run.cfg.ema_decay)

    def swap(self, model):
        """Swap the weights and their average."""
        for weight, average in self.pairs(model):
            kept = weight.clone()
            weight.copy_(average)
            average.copy_(kept)

    def wrap(self, engine, run):
        return Averaged(engine, run, self)


class Averaged(Wrapper):
    """An engine that samples evaluations with the averaged weights."""

    def __init__(self, engine, run, ema):
        self.engine, self.run, self.ema, self.averaged = engine, run, ema, False

    @property
    def version(self):
        """Return -1 while the engine has the average, so that the weights are sent again."""
        return -1 if self.averaged else self.engine.version

    def load(self, model, version):
        self.engine.load(model, version)
        self.averaged = False

    def sample(self, prompts, n, params, step):
        evaluation = evaluation_sampling(self.run.cfg, self.run.sampling)
        if params == evaluation and not self.averaged:
            self.ema.swap(self.run.model)
            self.engine.load(self.run.model, self.engine.version)
            self.ema.swap(self.run.model)
            self.averaged = True
        return self.engine.sample(prompts, n, params, step)


def features(cfg):
    return [EMA()]


if __name__ == "__main__":
    raise SystemExit(main(Options, features))
