"""AdamW, its learning-rate schedule, and one optimizer step with gradient clipping.

In: a model with gradients. Out: updated weights and the gradient norm. Read next: state.py (how the
optimizer's state is saved).
"""

from __future__ import annotations

import math

import torch
from torch import nn

from nanogrpo.config import Config


def make_optimizer(model: nn.Module, cfg: Config) -> torch.optim.AdamW:
    """Return AdamW in the parameters' precision (float32), with weight decay on matrices only.

    It is fused: one kernel for all tensors instead of a dozen for each. We create its state here as
    zeros, not at the first step, so a run that does not fit into memory fails before it samples,
    and a checkpoint can be read directly into it.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": cfg.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    betas = (cfg.adam_beta1, cfg.adam_beta2)
    optimizer = torch.optim.AdamW(
        groups, lr=cfg.learning_rate, betas=betas, eps=cfg.adam_epsilon, fused=True
    )
    # the same state that AdamW would create: a float32 counter on the parameter's device, and
    # sharded moments
    for p in parameters:
        step = torch.zeros((), dtype=torch.float32, device=p.device)
        moments = {name: torch.zeros_like(p) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[p] = {"step": step, **moments}
    return optimizer


def learning_rate(update: int, cfg: Config) -> float:
    """Return the rate of optimizer step `update` (0, 1, …): linear warm-up, then constant, or
    linear or cosine decay to zero.
    """
    if update < cfg.warmup_steps:
        return cfg.learning_rate * (update + 1) / cfg.warmup_steps
    total = cfg.max_steps * cfg.updates_per_step
    done = (update - cfg.warmup_steps) / max(total - cfg.warmup_steps, 1)  # 0 … 1
    shape = {
        "constant": 1.0,
        "linear": 1.0 - done,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * done)),
    }
    return cfg.learning_rate * shape[cfg.lr_scheduler_type]


def clip_and_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, rate: float, max_grad_norm: float
) -> float:
    """Clip the gradient to a global norm of `max_grad_norm` (0: no clipping), update the weights,
    and return the norm before clipping.

    A norm that is not finite raises before any weight changes, so the checkpoint on disk remains
    the last good one.
    """
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm or math.inf)
    norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # over all ranks' shards
    if not norm.isfinite():
        raise FloatingPointError(
            f"the gradient's norm is {norm.item()}, so no update was made: lower --learning-rate "
            "in a new run, or bound the rewards and --resume from the last checkpoint"
        )
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm.item()
