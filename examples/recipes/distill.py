"""On-policy distillation: a teacher judges each token of the student's own completions.

    python examples/recipes/distill.py --model runs/base --teacher runs/large --data prompts.jsonl …

The loss is the reverse KL(π ‖ teacher), on completions that the student π sampled (Agarwal et al.
2023, 2306.13649). The policy gradient of this loss is the gradient of GRPO with one advantage per
token:

    A_t = reward_coef · A_group - teacher_coef · Σ_k share_k (log π(y_t) - log teacher_k(y_t))

By default, `reward_coef` is 0: the rewards are only logged, and the logged loss is the mean
divergence. With several teachers, share_k is 1/K. With `--teacher-column`, a column of the data
contains the number of each prompt's teacher (0, 1, …). For this teacher, share_k is 1. For example,
each domain can have an expert as its teacher. A prompt without a number (null) has no teacher.

With `--jsd-beta β`, the exact divergence D over all tokens of the vocabulary replaces each
difference of log-probs. The gradient of D has less variance. β has the same meaning as in TRL's
DistillationTrainer, and a test compares the loss and the gradients with TRL:

    m = (1 - β) π + β teacher;  D = β KL(teacher ‖ m) + (1 - β) KL(π ‖ m)
    D is KL(π ‖ teacher) at β = 1, and KL(teacher ‖ π) at β = 0

The teachers need the student's tokenizer. With one teacher, without rewards and without --jsd-beta,
train.py can do almost the same: use `--beta 1 --ref-model TEACHER` with `--reward-funcs accuracy`
and `--reward-weights 0`. The results differ if a step has several updates: train.py then compares
the policy with the teacher in each update, but this recipe compares them only once, before the
first update.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass

import torch

from nanogrpo import Config
from nanogrpo.config import option
from nanogrpo.errors import UserError
from nanogrpo.extras.distill_head import distill_objective
from nanogrpo.extras.recipe import main
from nanogrpo.extras.reference import FrozenModels
from nanogrpo.step import logp


@dataclass(frozen=True)
class Options(Config):
    teacher: tuple[str, ...] = option((), "folder or hub id of each teacher", required="name one")
    teacher_column: str = option("", "column with the number of a prompt's teacher; empty: all")
    teacher_coef: float = option(1.0, "factor of the divergence from the teacher", "> 0")
    reward_coef: float = option(0.0, "factor of the rewards' advantages", ">= 0")
    jsd_beta: float | None = option(None, "β; default: sampled tokens only", ">= 0", "<= 1")

    def problems(self):
        if self.jsd_beta is not None and (self.needs_two_phases or self.log_tokens):
            yield "--jsd-beta replaces the loss: leave out --log-tokens and other losses."


def kl(a, b):
    return (a.exp() * (a - b)).sum(-1)  # log-probs [C, V] → [C], nats


def divergence(p, q, beta):
    """Return D [C] for the student's log-probs p [C, V] and the teacher's q [C, V]."""
    if beta in (0, 1):
        return kl(p, q) if beta else kl(q, p)
    m = torch.logaddexp(p + math.log1p(-beta), q + math.log(beta))
    return beta * kl(q, m) + (1 - beta) * kl(p, m)


class Distill(FrozenModels):
    all_gradients = True  # a completion whose advantage is 0 has a gradient, too

    def model(self, model, inputs):
        super().model(model, inputs)
        for name, teacher in zip(self.names, self.frozen):
            if inputs.cfg.jsd_beta is not None and teacher.cfg.vocab_size != model.cfg.vocab_size:
                raise UserError(
                    f"--jsd-beta needs vocabularies of equal size, but --teacher {name} pads its "
                    "vocabulary to a different size: leave --jsd-beta out."
                )

    def scored(self, run, samples, step):
        """Set `share` [P·G, K] on every rank, because samples may move between ranks."""
        column, teachers = run.cfg.teacher_column, range(len(self.frozen))
        named = run.world.concat([s.prompt.columns[column] if column else None for s in samples])
        share = [[float(k == i) if column else 1 / len(teachers) for k in teachers] for i in named]
        self.share = run.cfg.teacher_coef * torch.tensor(share, device=run.world.device)

    def batches(self, run, batches):
        for batch in batches:
            batch.advantage *= run.cfg.reward_coef  # [M]
            if run.cfg.jsd_beta is None:
                theirs = torch.stack([logp(teacher, batch, run.cfg) for teacher in self.frozen])
                gap = theirs - logp(run.model, batch, run.cfg)  # [K, M]
                batch.advantage += (self.share[batch.sample].T * gap).sum(0)

    def objective(self, batch, cfg):
        if cfg.jsd_beta is not None:
            teachers = [*zip(self.frozen, self.share[batch.sample].T)]
            return distill_objective(batch, cfg, teachers, lambda *p: divergence(*p, cfg.jsd_beta))


def features(cfg):
    return [Distill("--teacher", cfg.teacher)]


if __name__ == "__main__":
    sys.exit(main(Options, features))
