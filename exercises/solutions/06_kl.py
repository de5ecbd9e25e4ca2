"""Solution of exercise 6.

Σ π (e^x - 1) = Σ π (ref/π - 1) = Σ ref - Σ π = 1 - 1 = 0. So k3 = k1 + (e^x - 1) has the mean of
k1. It is never negative because e^x lies above its tangent 1 + x.

The project's function is `k3` in kernels/reference/policy.py. It uses expm1, which is exact near 0,
and clamps x, so that one unlikely token cannot make the loss infinite.
"""

from torch import Tensor


def k1(logp: Tensor, ref_logp: Tensor) -> Tensor:
    return logp - ref_logp


def k3(logp: Tensor, ref_logp: Tensor) -> Tensor:
    x = ref_logp - logp
    return x.exp() - x - 1


MEAN_OF_THE_DIFFERENCE = 0
