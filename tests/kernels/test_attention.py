"""The kernels of attention against float64 autograd of an explicit mask, and their machine code.

They run in Triton's interpreter where there is no GPU. Read next: tests/model/test_attention.py.
"""

import importlib
import itertools

import pytest
import torch

from nanogrpo.model.gpu_attention import sdpa
from tests.conftest import CUDA, DEVICE
from tests.kernels import aot
from tests.kernels.masks import draw, exact, moved, strip_of
from tests.kernels.test_contracts import reports

kernels = importlib.import_module("nanogrpo.kernels.triton.attention")
# Shared memory of a program in bytes, by architecture (CUDA C++ Programming Guide, section 20.2).
SHARED = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
# lengths of a prompt and its completions: 1, 2, one less and one more than a block of 16, many
ALONE = [[1], [2], [15], [16], [17], [50]]
MIXED = [[3], [5, 1, 0, 2, 16], [2], [16, 15, 33, 0], [17, 0], [1, 1], [1]]
SHAPES = [(2, 2, 64), (4, 2, 64), (3, 1, 16), (8, 1, 128)]


def results(function, strip, dtype, *shape):
    """Return output and gradients, and the same in float64 of the same numbers."""
    *inputs, dy = (x.to(DEVICE, dtype).requires_grad_() for x in draw(strip, *shape))
    truth = exact(*inputs, dy, strip)
    out = function(*inputs, moved(strip, DEVICE))
    return [out, *torch.autograd.grad(out, inputs, dy)], truth


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("groups", "shared"), [(ALONE, True), (MIXED, True), (MIXED, False)])
def test_attention_and_its_gradients(groups, shared, shape, monkeypatch):
    small = tuple((kernel, 16, 16) for kernel, *_ in kernels.KERNELS)
    monkeypatch.setattr(kernels, "KERNELS", small)
    found = results(kernels.attention, strip_of(groups, shared), torch.float32, *shape)
    for got, want in zip(*found):
        assert (got - want).abs().max() <= 1e-6 * want.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16 if CUDA else torch.float16])
@pytest.mark.parametrize("first", [63, 64, 129])
def test_tiles_of_real_size(first, dtype):
    """Compared with the reference in the same dtype."""
    groups, shape = [[first, 127, 128], [200, 1]], (4, 2, 64)
    found = results(kernels.attention, strip_of(groups), dtype, *shape)
    eager, _ = results(sdpa, strip_of(groups), dtype, *shape)
    for got, want, usual in zip(*found, eager):
        error, usual = ((x.double() - want).abs().max() for x in (got, usual))
        assert error <= 2 * usual + 2.0**-22 * want.abs().max()


def test_products_use_tensor_cores_and_fit_every_gpu():
    for name, arch in itertools.product((*aot.ATTENTION, *aot.FOUR_BITS.values()), aot.ARCHS):
        narrow = name in aot.ATTENTION and arch not in (90, 100)
        facts = reports()[name + ", narrow" * narrow, arch]
        assert facts["products"] > 0, facts
        assert facts["atomics"] == 0, facts
        assert facts["shared"] <= SHARED[arch], facts
