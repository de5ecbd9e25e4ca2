"""More options for the optimizer: AdamW's constants, 8-bit moments, and two more learning-rate
schedules.

In: parameter groups, or the number of an optimizer step. Out: an optimizer, or a learning rate.
Read before: run/optim.py (the default optimizer and the other schedules).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nanogrpo.config import Config, option
from nanogrpo.errors import UserError
from nanogrpo.feature import Feature
from nanogrpo.run import optim

# Schedules that the core lacks, each with its settings.
# A run must set exactly one of the settings of its schedule.
SCHEDULES = {
    "cosine_with_min_lr": ("min_lr", "min_lr_rate"),
    "warmup_stable_decay": ("num_decay_steps",),
}


LR_SCHEDULER_TYPE = option(
    "constant",
    "learning rate after the warmup; the schedules are those of transformers",
    choices=("constant", "constant_with_warmup", "linear", "cosine", *SCHEDULES),
)  # instead of the core's


@dataclass(frozen=True)
class OptimOptions(Config):
    """Other optimizers and schedules."""

    optim: str = option(
        "adamw_torch_fused",
        "AdamW with float32 moments, or with 8-bit moments (pip install 'nanogrpo[torchao]')",
        choices=("adamw_torch_fused", "adamw_torch_8bit"),
        words={"adamw_torch": "adamw_torch_fused", "adamw_8bit": "adamw_torch_8bit"},
    )
    adam_beta1: float = option(0.9, "AdamW: decay of the mean of the gradients", ">= 0", "< 1")
    adam_beta2: float = option(
        0.999, "AdamW: decay of the mean of the squared gradients", ">= 0", "< 1"
    )
    adam_epsilon: float = option(
        1e-8, "AdamW: constant added to the denominator, for stability", "> 0"
    )
    lr_scheduler_kwargs: dict[str, Any] | None = option(  # noqa: RUF009 (a field, like others)
        None, 'JSON object with settings of the schedule, such as {"min_lr_rate": 0.1}'
    )

    def problems(self) -> Iterator[str]:
        kind, given = self.lr_scheduler_type, self.lr_scheduler_kwargs or {}
        known = SCHEDULES.get(kind, ())
        for name, value in given.items():
            if name not in known:
                yield (
                    f"--lr-scheduler-kwargs: --lr-scheduler-type {kind} has no setting {name}:"
                    f" give {' or '.join(known) or 'none'}."
                )
            elif type(value) not in (int, float) or not 0 <= value < math.inf:
                yield f"--lr-scheduler-kwargs: {name} is {value!r}: give a number, 0 or more."
            elif name == "min_lr" and value >= self.learning_rate:
                yield (
                    f"--lr-scheduler-kwargs: min_lr {value} is not below --learning-rate"
                    f" {self.learning_rate}: lower it."
                )
        if known and len(given) != 1:
            yield (
                f"--lr-scheduler-type {kind} needs {' or '.join(known)}: give exactly one in"
                " --lr-scheduler-kwargs."
            )

    @property
    def other_optimizer(self) -> bool:
        """Whether any option of the optimizer or the schedule differs from its default."""
        own = OptimOptions.__annotations__  # the names of the options above
        return any(getattr(self, name) != getattr(OptimOptions, name) for name in own)


class Optim(Feature):
    def __init__(self, cfg: OptimOptions):
        self.cfg = cfg
        self.made: torch.optim.Optimizer | None = None

    def optimizer(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        cfg = self.cfg
        constants = {"betas": (cfg.adam_beta1, cfg.adam_beta2), "eps": cfg.adam_epsilon}
        if cfg.optim == "adamw_torch_8bit":
            self.made = eight_bit(groups, constants)
            return self.made
        return optim.adamw(groups, **constants)

    def tensors(self) -> dict[str, Tensor]:
        """Return the codes and scales of the moments in 8 bits. Each rank divides its own shard
        into blocks, so the names of these tensors contain the rank.
        """
        from nanogrpo.run.state import local

        rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        out = {}
        for i, state in enumerate(self.made.state.values() if self.made else ()):
            for kind in ("exp_avg", "exp_avg_sq"):
                moment = local(state[kind])
                for part in ("codes", "scale") if hasattr(moment, "codes") else ():
                    out[f"{kind}.{i}.{part}@{rank}/{size}"] = getattr(moment, part)
        return out

    def learning_rate(self, update: int, cfg: Any) -> float | None:
        """Return the rate of optimizer step `update` (0, 1, …) in one of SCHEDULES."""
        (total, warmup), settings = optim.lengths(cfg), cfg.lr_scheduler_kwargs
        if not settings or update < warmup:
            return None  # as in the core
        # done: the fraction of the decay that is over, from 0 to 1
        done, low = (update - warmup) / max(1, total - warmup), settings.get("min_lr_rate", 0.0)
        if "min_lr" in settings:
            low = settings["min_lr"] / cfg.learning_rate
        if "num_decay_steps" in settings:
            done = max(0.0, 1 - (total - update) / max(1, settings["num_decay_steps"]))
        return cfg.learning_rate * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * done)))


def eight_bit(groups: list[dict[str, Any]], constants: dict) -> torch.optim.Optimizer:
    """Return torchao's AdamW. A moment with at least 4,096 numbers on this rank, in full blocks of
    256, has one byte per number and one scale per block. Other moments stay in float32.
    """
    try:
        from torchao.optim import AdamW8bit
    except ImportError as e:
        raise UserError(
            "--optim adamw_torch_8bit needs its package: pip install 'nanogrpo[torchao]'."
        ) from e
    optimizer = AdamW8bit(groups, **constants)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for p in parameters:
        optimizer.state[p] = {
            "step": torch.tensor(0.0),
            "exp_avg": optimizer._new_buffer(p, signed=True),
            "exp_avg_sq": optimizer._new_buffer(p, signed=False),
        }
    if all(p.device.type == "cpu" for p in parameters):
        # torchao compiles its update, which would need a C++ compiler on a CPU
        optimizer.step = torch.compiler.set_stance("force_eager")(optimizer.step)
    return optimizer
