"""Create AdamW, compute the learning rate, and take an optimizer step with gradient clipping.

In: a model with gradients. Out: updated weights and the gradient norm. Read next: state.py (how the
optimizer's state is saved).
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nanogrpo.config import Config
from nanogrpo.feature import Feature, first
from nanogrpo.model.weights import gathered


def make_optimizer(
    model: nn.Module, cfg: Config, features: Sequence[Feature] = ()
) -> torch.optim.Optimizer:
    """Return AdamW, or a feature's optimizer, with weight decay on matrices only."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": cfg.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return first(feature.optimizer(groups) for feature in features) or adamw(groups)


def adamw(groups: list[dict[str, Any]], **constants: Any) -> torch.optim.Optimizer:
    """Return AdamW in the parameters' precision (float32). `constants` are its betas and eps.

    The optimizer is fused: it runs one kernel for all tensors instead of a dozen for each tensor.
    The state of the optimizer is created here, as zeros, and not in the first step. So a run that
    does not fit into memory fails before it samples, and a checkpoint can be read directly into the
    state.
    """
    optimizer = torch.optim.AdamW(groups, fused=True, **constants)
    # AdamW would create the same state: a float32 counter on the device, and sharded moments.
    for group in groups:
        for p in group["params"]:
            step = torch.zeros((), device=p.device)
            moments = {name: torch.zeros_like(p) for name in ("exp_avg", "exp_avg_sq")}
            optimizer.state[p] = {"step": step, **moments}
    return optimizer


def lengths(cfg: Config) -> tuple[int, int]:
    """Return the number of optimizer steps of the run, and the number of its warmup steps."""
    total, warmup = cfg.max_steps * cfg.updates_per_step, cfg.warmup_steps
    return total, int(warmup) if warmup >= 1 else math.ceil(total * warmup)


def learning_rate(update: int, cfg: Config) -> float:
    """Return the learning rate of optimizer step `update` (0, 1, …), as in transformers.

    The warmup begins at 0. Unlike in transformers, the schedule `constant` also has a warmup.
    """
    total, warmup = lengths(cfg)
    if update < warmup:
        return cfg.learning_rate * (update / warmup)
    done = (update - warmup) / max(1, total - warmup)  # progress after the warmup: 0 … 1
    falling = {"linear": 1 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done))}
    return cfg.learning_rate * falling.get(cfg.lr_scheduler_type, 1.0)


def clip_and_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, rate: float, max_grad_norm: float
) -> float:
    """Clip the gradient to a global norm of `max_grad_norm` (0: no clipping), update the weights,
    and return the norm before clipping.

    If the norm is not finite, no weight changes, and FloatingPointError is raised. A fused
    optimizer checks this on the device, so the host waits for the device only after the update.
    """
    clip = getattr(optimizer, "clip", nn.utils.clip_grad_norm_)  # an optimizer may define `clip`
    norm = gathered(clip(model.parameters(), max_grad_norm or math.inf))  # over all ranks' shards
    finite = norm.isfinite()
    if fused := optimizer.defaults.get("fused"):
        optimizer.found_inf = 1.0 - finite.float()  # type: ignore[attr-defined]
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):  # the rate of a compiled optimizer is a tensor
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
    if fused or finite:
        optimizer.step()
    optimizer.zero_grad()
    if not finite:
        raise FloatingPointError(
            f"the gradient's norm is {norm.item()}, so no update was made: lower --learning-rate "
            "in a new run, or bound the rewards and --resume from the last checkpoint"
        )
    return norm.item()
