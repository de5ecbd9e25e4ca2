"""AdamW, its learning-rate schedule, and one optimizer step with gradient clipping.

In: a model with gradients. Out: updated weights and the gradient norm. Read next: state.py (how the
optimizer's state is saved).
"""

from __future__ import annotations

import math
from math import ceil
from typing import Any

import torch
from torch import Tensor, nn

from nanogrpo.config import Config
from nanogrpo.errors import UserError


def make_optimizer(model: nn.Module, cfg: Config) -> torch.optim.Optimizer:
    """Return AdamW in the parameters' precision (float32), with weight decay on matrices only.

    It is fused: one kernel for all tensors instead of a dozen for each. We create its state here as
    zeros, not at the first step, so a run that does not fit into memory fails before it samples,
    and a checkpoint can be read directly into it. With --optim adamw_torch_8bit the optimizer is
    torchao's, which stores large moments in 8 bits.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": cfg.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    betas = (cfg.adam_beta1, cfg.adam_beta2)
    if cfg.optim == "adamw_torch_8bit":
        return _eight_bit(groups, cfg, betas)
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


def _eight_bit(
    groups: list[dict[str, Any]], cfg: Config, betas: tuple[float, float]
) -> torch.optim.Optimizer:
    """Return torchao's AdamW. A moment with at least 4,096 numbers on this rank, in full blocks of
    256, has one byte per number and one scale per block. Smaller ones stay in float32.
    """
    try:
        from torchao.optim import AdamW8bit
    except ImportError as e:
        raise UserError(
            "--optim adamw_torch_8bit needs its package: pip install 'nanogrpo[torchao]'."
        ) from e
    optimizer = AdamW8bit(groups, lr=cfg.learning_rate, betas=betas, eps=cfg.adam_epsilon)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for p in parameters:
        moments = {
            name: optimizer._new_buffer(p, signed)
            for name, signed in (("exp_avg", True), ("exp_avg_sq", False))
        }
        optimizer.state[p] = {"step": torch.tensor(0.0), **moments}
    if all(p.device.type == "cpu" for p in parameters):
        # torchao compiles its update, for which a CPU would need a C++ compiler
        optimizer.step = torch.compiler.set_stance("force_eager")(optimizer.step)
    return optimizer


def learning_rate(update: int, cfg: Config) -> float:
    """Return the rate of optimizer step `update` (0, 1, …), the same as transformers' schedules.

    The warmup begins at 0. One difference: `constant` warms up, too, where transformers ignores
    --warmup-steps.
    """
    total, settings = cfg.max_steps * cfg.updates_per_step, cfg.scheduler_kwargs
    warmup = int(cfg.warmup_steps) if cfg.warmup_steps >= 1 else ceil(total * cfg.warmup_steps)
    return cfg.learning_rate * _factor(cfg.lr_scheduler_type, update, warmup, total, settings, cfg)


def _factor(
    kind: str, update: int, warmup: int, total: int, settings: dict[str, Any], cfg: Config
) -> float:
    """Return the fraction of the peak learning rate."""
    left = max(1, total - warmup)  # updates after the warmup
    done = (update - warmup) / left  # the share of them that is over: 0 … 1
    cycles, low = settings.get("num_cycles", 0.5), settings.get("min_lr_rate") or 0.0
    if settings.get("min_lr") is not None:
        low = settings["min_lr"] / cfg.learning_rate

    if kind == "warmup_stable_decay":
        return _stable(update, warmup, total, settings)
    if update < warmup:
        if kind != "cosine_warmup_with_min_lr":
            return update / warmup
        first = settings["warmup_lr_rate"]
        if first is None:
            return (update + 1) / warmup
        return first + (1 - first) * update / max(1, warmup - 1)
    if kind == "linear":
        return 1 - done
    if kind == "cosine":
        return _cosine(done, cycles)
    if kind == "cosine_with_restarts":
        return _cosine(cycles * done % 1, 0.5)
    if kind == "cosine_with_min_lr":
        return low + (1 - low) * _cosine(done, cycles)
    if kind == "cosine_warmup_with_min_lr":  # one update ahead of the others
        return low + (1 - low) * _cosine(done + 1 / left, cycles)
    if kind == "polynomial":
        end = settings["lr_end"] / cfg.learning_rate
        return end + (1 - end) * (1 - done) ** settings["power"]
    if kind == "inverse_sqrt":
        timescale = settings["timescale"] or warmup or 10_000
        return math.sqrt(timescale / (timescale + update - warmup))
    return 1.0


def _cosine(done: float, cycles: float) -> float:
    """Return a cosine that falls from 1 to 0 in half a cycle, the default."""
    return 0.5 * (1 + math.cos(2 * math.pi * cycles * done))


def _stable(update: int, warmup: int, total: int, settings: dict[str, Any]) -> float:
    """Return the fraction of the peak rate for warmup_stable_decay: up, constant, down, low."""
    low, decay = settings["min_lr_ratio"], int(settings["num_decay_steps"])
    stable = settings["num_stable_steps"]
    stable = total - warmup - decay if stable is None else int(stable)
    after = update - warmup - stable  # updates since the decay began
    if warmup <= update < warmup + stable:
        return 1.0
    if after >= decay:
        return low
    if update < warmup:  # the same shapes as in the decay, in the other direction
        shape, done, cycles = settings["warmup_type"], 1 - update / warmup, 0.5
    else:
        shape, done, cycles = settings["decay_type"], after / decay, settings["num_cycles"]
    height = {"linear": 1 - done, "cosine": _cosine(done, cycles), "1-sqrt": 1 - math.sqrt(done)}
    return low + (1 - low) * height[shape]


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
        if isinstance(group["lr"], Tensor):  # torchao's compiled update takes a tensor
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm.item()
