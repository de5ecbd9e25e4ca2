"""A loss scale for `--dtype float16`: the loss is multiplied by a power of two before the backward
pass, and the gradients are divided by it afterwards.

The smallest float16 is 6e-8, and the gradient of a logit is often smaller, because each token has
the weight 1 / (tokens of the step). Without a scale, such a gradient is rounded to 0. The largest
float16 is 65,504. If a gradient is larger than 65,504, the update is skipped and the scale is
halved. After GROWTH updates in a row that are not skipped, the scale is doubled. These are the
rules of torch's GradScaler (Micikevicius et al. 2017, 1710.03740), with two differences:

* The scale does not depend on the number of ranks. The function fsdp.backward multiplies the loss
  by this number, so the scale is divided by it. Also, a sum of finite gradients counts as too large
  if it exceeds 65,504, even if it is computed in float32 and therefore finite.
* If a smaller scale would not help, the run ends with an error, like a run without a scale. This is
  the case if the loss itself is not finite, or if the scale is 1.

In: a run. Out: the same run, with the scale in its checkpoints and in the log. Read before:
kernels/head.py, run/optim.py. Read next: docs/precision.md.
"""

import math
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from nanogrpo.extras.bitwise import swapped
from nanogrpo.feature import Feature
from nanogrpo.kernels.head import HeadPolicyLoss
from nanogrpo.model import dispatch, head
from nanogrpo.model.head import PolicyOut
from nanogrpo.run.state import local

START, GROWTH = 2.0**16, 2000
LARGEST = torch.finfo(torch.float16).max


class LossScale(Feature):
    def __init__(self) -> None:
        # the scale, and the number of updates since its last change
        self.state = torch.tensor([START, 0.0])
        self.finite: Tensor | bool = True  # whether each loss of this update is finite

    def tensors(self) -> dict[str, Tensor]:
        return {"loss_scale": self.state}

    def running(self, run: Any) -> ExitStack:
        optimizer = run.optimizer
        self.world, self.usual = run.world, getattr(optimizer, "clip", nn.utils.clip_grad_norm_)
        optimizer.clip = self.clip  # `clip_and_step` calls it
        run.model.register_forward_hook(self.scaled)
        functions: Any = dispatch.functions_for(run.world.device)
        return swapped(run.world.device, functions, (head, "HeadPolicyLoss", fused(self.state)))

    def scaled(self, model: nn.Module, args: Any, out: Any) -> None:
        """Let the backward pass of a loss start with the scale. The value does not change."""
        if isinstance(out, PolicyOut) and out.loss.requires_grad:
            self.finite = out.loss.detach().isfinite() & self.finite
            factor = float(self.state[0]) / self.world.size
            out.loss.register_hook(lambda gradient: gradient * factor)

    def clip(self, parameters: Iterable[nn.Parameter], limit: float) -> Tensor:
        """Divide the gradients by the scale and clip them, or remove them if they are too large.
        Return their norm before clipping. Every rank must call this method.
        """
        trained = [p for p in parameters if p.grad is not None]
        grads: Any = [p.grad for p in trained]
        parts = [part for part in map(local, grads) if part.numel()]  # a shard may be empty
        largest = nn.utils.get_total_norm(parts, math.inf)  # on this rank
        too_large = self.world.any(not largest <= LARGEST)
        finite, self.finite = self.finite, True
        scale, count = self.state.tolist()
        if too_large and self.world.any(not finite):
            raise FloatingPointError(
                "the loss is not finite in float16, whose largest number is 65,504: use --dtype "
                "bfloat16, or lower --learning-rate in a new run."
            )
        if too_large and scale > 1:
            self.state[:] = torch.tensor([scale / 2, 0.0])
            for p in trained:
                p.grad = None  # without a gradient, the optimizer changes nothing
            return torch.zeros(())
        self.state[1] += 1
        if count + 1 == GROWTH:
            self.state[:] = torch.tensor([scale * 2, 0.0])
        torch._foreach_mul_(grads, self.world.size / scale)
        return self.usual(trained, limit)

    def step(self, *_: Any) -> dict[str, float]:
        return {"loss_scale": float(self.state[0])}


def fused(state: Tensor) -> type[HeadPolicyLoss]:
    """Return HeadPolicyLoss with scaled gradients of the logits. The forward pass computes these
    gradients. It must scale them itself, because autograd passes the scale only to the backward
    pass.
    """

    class Scaled(HeadPolicyLoss):
        @staticmethod
        def forward(ctx, hidden, lm_head, targets, inputs, *more):
            ctx.scale = scale = float(state[0])
            _, weight, *_, entropy_weight = inputs.map(lambda x: x * scale)
            inputs = inputs._replace(weight=weight, entropy_weight=entropy_weight)
            loss, *others = HeadPolicyLoss.forward(ctx, hidden, lm_head, targets, inputs, *more)
            return loss / scale, *others  # exact, because the scale is a power of two

        @staticmethod
        def backward(ctx, upstream, *_):
            return HeadPolicyLoss.backward(ctx, upstream / ctx.scale)

    return Scaled
