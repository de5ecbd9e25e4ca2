"""More options for the optimizer: AdamW's constants, 8-bit moments, and two more learning-rate
schedules.

In: parameter groups, or the number of an optimizer step. Out: an optimizer, or a learning rate.
Read before: run/optim.py (the default optimizer and the other schedules).
"""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nanogrpo.errors import UserError
from nanogrpo.feature import Feature
from nanogrpo.run import optim


class Optim(Feature):
    def __init__(self, cfg: Any):
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
        into blocks. So the names of codes and scales contain the rank.
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
        # done: how much of the decay is over, from 0 to 1
        done, low = (update - warmup) / max(1, total - warmup), settings.get("min_lr_rate", 0.0)
        if "min_lr" in settings:
            low = settings["min_lr"] / cfg.learning_rate
        if "num_decay_steps" in settings:
            done = max(0.0, 1 - (total - update) / max(1, settings["num_decay_steps"]))
        return cfg.learning_rate * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * done)))


def eight_bit(groups: list[dict[str, Any]], constants: dict) -> torch.optim.Optimizer:
    """Return torchao's AdamW. If a moment's size on this rank is at least 4,096 and a multiple of
    256, the moment takes one byte per number and one scale per block of 256. Other moments stay in
    float32.
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
        # torchao compiles its update; on a CPU, this would need a C++ compiler
        optimizer.step = torch.compiler.set_stance("force_eager")(optimizer.step)
    return optimizer
