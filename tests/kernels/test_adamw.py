"""One step of AdamW with clipping and a 16-bit copy, against torch's functions in float64.

Read next: tests/gpu/test_host.py.
"""

import contextlib

import pytest
import torch

from nanogrpo.extras import one_gpu
from nanogrpo.run import optim
from tests.conftest import DEVICE

SIZES = [(3, 700), (48,)]


def updated(dtype, fused, limit, bad=False):
    """Return weights, moments, steps and copies after three steps, the last one with a gradient
    that may be infinite.
    """
    g = torch.Generator().manual_seed(0)
    model = torch.nn.ParameterList(torch.randn(size, generator=g) for size in SIZES)
    model.to(DEVICE, dtype)
    optimizer = optim.adamw([{"params": [*model], "weight_decay": 0.1}])
    copies = {p: p.detach().bfloat16() for p in model}
    if fused:
        one_gpu.fuse(optimizer, copies)
    for step in range(3):
        for p in model:
            p.grad = torch.randn(p.shape, generator=g).to(p)
            p.grad[..., 0] += torch.inf if bad and step == 2 else 0
        with pytest.raises(FloatingPointError) if bad and step == 2 else contextlib.nullcontext():
            optim.clip_and_step(model, optimizer, 1e-2 / (1 + step), limit)
    states = [x for p in model for x in optimizer.state[p].values()]
    return [*map(torch.clone, [*model, *states]), *copies.values()]


@pytest.mark.parametrize("limit", [1.0, 0.0])
@pytest.mark.parametrize("bad", [False, True])
def test_an_update_is_as_exact_as_that_of_torch(limit, bad):
    *found, copy, other = updated(torch.float32, True, limit, bad)
    every = updated(torch.float32, False, limit, bad), updated(torch.float64, False, limit, bad)
    for x, eager, exact in zip(found, *every):
        error, allowed = ((y.double() - exact).abs().max() for y in (x, eager))
        assert error <= 2 * allowed + 2.0**-23 * exact.abs().max()
    for weight, rounded in zip(found, (copy, other)):  # the interpreter truncates
        torch.testing.assert_close(rounded.float(), weight.detach(), rtol=2.0**-7, atol=0)
