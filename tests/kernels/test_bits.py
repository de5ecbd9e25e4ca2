"""Properties of the kernels that hold to the last bit: repeated runs, permuted rows, gradients in
place, float32 results.

They run in Triton's interpreter where there is no GPU, and on the GPU where there is one. Read
next: test_contracts.py.
"""

import pytest
import torch
from nanogrpo.kernels.reference.policy import LossInputs
from nanogrpo.kernels.triton import fused_rows, log_softmax

from tests.conftest import DEVICE
from tests.kernels.inputs import CLIP, placed, rows_of_logits, small_blocks, token_vectors

KL = CLIP._replace(beta=0.1)
ORDER = torch.tensor([3, 1, 5, 0, 2, 4])
FIRST = torch.arange(6)


def _same(a, b):
    return all(x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(a, b, strict=True))


def _log_softmax(dtype, wide, order=FIRST):
    """Log-softmax of six rows in the order given: log-prob, entropy, norm, dlogits."""
    z, targets = rows_of_logits(6, 100, "normal", dtype, 7)
    z, targets = placed(z[order], wide), targets[order]
    upstream = torch.randn(2, 6, generator=torch.Generator().manual_seed(5))[:, order].to(DEVICE)
    with small_blocks():
        logp, entropy, norm = log_softmax.log_softmax_forward(z, targets, 0.7)
        args = targets, 0.7, norm, entropy, *upstream
        log_softmax.log_softmax_backward_(z, *args)
    return logp, entropy, norm.T, z


def _visit(dtype, wide, order=FIRST):
    """One visit of the same rows: log-prob, entropy, l, clip flag, KL, gradient of the logits."""
    z, targets = rows_of_logits(6, 100, "normal", dtype, 7)
    mine, (_, inputs) = placed(z[order], wide), token_vectors(6, 4)
    with small_blocks():
        return fused_rows.policy_rows_(mine, targets[order], 0.7, inputs.at(order), KL)


@pytest.mark.parametrize(
    ("dtype", "wide"),
    [
        (torch.float32, True),
        (torch.float32, False),
        (torch.bfloat16, True),
        (torch.float16, False),
    ],
)
def test_rows_repeated_and_permuted(dtype, wide):
    f32, args = torch.float32, (dtype, wide)
    first = _log_softmax(*args)
    assert [v.dtype for v in first] == [f32, f32, f32, dtype]
    assert _same(first, _log_softmax(*args))
    assert _same([v[ORDER] for v in first], _log_softmax(*args, order=ORDER))
    first = _visit(dtype, wide)
    assert [v.dtype for v in first] == [f32, f32, f32, torch.int8, f32, dtype]
    assert _same(first, _visit(dtype, wide))
    assert _same([v[ORDER] for v in first], _visit(dtype, wide, ORDER))


def test_offsets_pass_two_to_the_31():
    # Row 2 starts where a 32-bit offset ends. Only the pages that are touched take memory.
    stride = 2**30
    memory = torch.empty(2 * stride + 64, dtype=torch.bfloat16, device=DEVICE)
    far = memory.as_strided((3, 40), (stride, 1))
    far.copy_(torch.randn(3, 40))
    near = placed(far, wide=True)  # the same rows, adjacent
    targets, ones = torch.tensor([1, 2, 39]).to(DEVICE), torch.ones(3, device=DEVICE)
    results = []
    for z in (far, near):
        with small_blocks(lanes=2):
            out = [*log_softmax.log_softmax_forward(z, targets, 1.0)]
            args = targets, 1.0, out[2], out[1], ones, 0 * ones
            out.append(log_softmax.log_softmax_backward_(z, *args).clone())
            out += fused_rows.policy_rows_(z, targets, 1.0, LossInputs(ones, ones), CLIP)[:4]
        results.append([*out, z])
    assert _same(*results)
