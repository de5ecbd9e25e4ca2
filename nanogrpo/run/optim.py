"""AdamW, its schedule, and one clipped step. In: a model with gradients. Out: updated weights and
the gradient's norm.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from nanogrpo.config import Config


def make_optimizer(model: nn.Module, cfg: Config) -> torch.optim.AdamW:
    """AdamW in the parameters' own precision (float32 masters); weight decay on matrices only, not
    on norms and biases.

    Fused: one kernel for all tensors instead of a dozen for each. Its state, as zeros, exists from
    the start and not from the first step: what does not fit fails before the first sample is drawn,
    and a checkpoint is read straight into it.
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
    # as AdamW itself would make it: the counter a float32 on the parameter's device, the moments
    # sharded
    for p in parameters:
        step = torch.zeros((), dtype=torch.float32, device=p.device)
        optimizer.state[p] = {
            "step": step,
            "exp_avg": torch.zeros_like(p),
            "exp_avg_sq": torch.zeros_like(p),
        }
    return optimizer


def learning_rate(update: int, cfg: Config) -> float:
    """The rate of optimizer step `update` (0, 1, …): linear warm-up, then constant, or linear or
    cosine decay to zero.
    """
    total = cfg.max_steps * cfg.updates_per_step
    if update < cfg.warmup_steps:
        return cfg.learning_rate * (update + 1) / cfg.warmup_steps
    done = (update - cfg.warmup_steps) / max(total - cfg.warmup_steps, 1)  # 0 … 1
    shape = {
        "constant": 1.0,
        "linear": 1.0 - done,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * done)),
    }[cfg.lr_scheduler_type]
    return cfg.learning_rate * shape


def clip_and_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, rate: float, max_grad_norm: float
) -> float:
    """One update. Gradients are scaled to `max_grad_norm` when their global norm exceeds it; the
    norm before that is returned.

    A norm that is not finite raises before any weight is touched: the checkpoint on disk stays the
    last good one.
    """
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm or math.inf)
    norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # of all ranks' shards
    if not norm.isfinite():
        raise FloatingPointError(
            f"the gradient's norm is {norm.item()}, so no update was made: lower --learning-rate in "
            "a new run, or bound the rewards and --resume from the last checkpoint"
        )
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm.item()
