"""What must hold of the kernels to the last bit, whatever the size of the numbers: the same run
twice, rows in another order, a gradient written in place, results in float32; and how many kernels
a loss launches.

In Triton's interpreter where there is no GPU, on the GPU where there is. Read next:
test_kernels_contracts.py.
"""

import pytest
import torch
from nanogrpo.kernels.reference import Objective
from torch.utils._python_dispatch import TorchDispatchMode

from nanogrpo.kernels import head, log_softmax, policy, rows
from nanogrpo.model import head as ops
from tests.conftest import DEVICE
from tests.kernels.inputs import placed, rows_of_logits, token_vectors

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
KL = Objective(0.2, 0.28, beta=0.1)
ORDER = torch.tensor([3, 1, 5, 0, 2, 4])


def _same(a, b):
    return all(x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(a, b, strict=True))


def _rows(dtype, wide, order=None, few_rows=0, in_place=False):
    """Log-softmax of six rows, forward and backward, in the order given: log-prob, entropy, norm,
    dlogits.
    """
    order = torch.arange(6) if order is None else order
    z, targets = rows_of_logits(6, 150, "normal", dtype, 7)
    z, targets = placed(z[order], wide), targets[order]
    dlogp, dentropy = torch.randn(2, 6, generator=torch.Generator().manual_seed(5))[:, order].to(
        DEVICE
    )
    logp, entropy, norm = log_softmax.log_softmax_forward(
        z, targets, 0.7, lanes=4, few_rows=few_rows
    )
    args = targets, 0.7, norm, entropy, dlogp, dentropy
    dz = log_softmax.log_softmax_backward(z, *args, in_place=in_place, block=32)
    assert (dz is z) == in_place
    return logp, entropy, norm.T, dz


# whole rows, and rows in parts
@pytest.mark.parametrize(("few_rows", "wide"), [(0, True), (9, True), (9, False)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_log_softmax_in_place_repeated_and_permuted(dtype, few_rows, wide):
    first = _rows(dtype, wide, few_rows=few_rows)
    assert [v.dtype for v in first] == [torch.float32, torch.float32, torch.float32, dtype]
    assert _same(first, _rows(dtype, wide, few_rows=few_rows))
    assert _same(first, _rows(dtype, wide, few_rows=few_rows, in_place=True))
    assert _same([v[ORDER] for v in first], _rows(dtype, wide, ORDER, few_rows))


@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_repeated_and_permuted(dtype, wide):
    z, targets = rows_of_logits(6, 150, "normal", dtype, 7)
    _, old, ref, advantage, weight, importance, entropy_weight = token_vectors(6, 4)
    vectors = old, advantage, weight, ref, importance, entropy_weight

    def run(order):
        mine = placed(z[order], wide)
        out = rows.policy_rows_(
            mine, targets[order], 0.7, *(v[order] for v in vectors), KL, lanes=4
        )
        assert [v.dtype for v in out] == [torch.float32] * 3
        return *out, mine

    first = run(torch.arange(6))
    assert _same(first, run(torch.arange(6)))
    assert _same([v[ORDER] for v in first], run(ORDER))


def test_policy_repeated_and_permuted():
    vectors = token_vectors(100, 4)[:6]
    order = torch.randperm(100, generator=torch.Generator().manual_seed(0))

    def run(order):
        logp, old, ref, advantage, weight, importance = (v[order] for v in vectors)
        return policy.policy_forward(logp, old, advantage, weight, ref, importance, KL, block=32)

    first = run(torch.arange(100))
    assert [v.dtype for v in first] == [
        torch.float32,
        torch.float32,
        torch.int8,
        torch.float32,
        torch.float32,
    ]
    assert _same(first, run(torch.arange(100)))  # the loss and the sums too: no atomics
    # sums in another order are other sums
    assert _same([v[order] for v in first[1:4]], run(order)[1:4])


@pytest.mark.parametrize("dtype", DTYPES)
def test_head_repeated(dtype):
    g = torch.Generator().manual_seed(1)
    hidden, lm_head = (
        torch.randn(9, 5, generator=g).to(dtype).to(DEVICE),
        torch.randn(33, 5, generator=g).to(dtype).to(DEVICE),
    )
    targets = torch.randint(33, (9,), generator=g).to(DEVICE)
    _, old, ref, advantage, weight, importance, entropy_weight = token_vectors(9, 4)
    vectors = old, advantage, weight, ref, importance, entropy_weight

    def run():
        out = head.policy_forward(rows, hidden, lm_head, targets, 0.7, *vectors, KL, 4, True, True)
        logp, entropy, norm = head.logp_forward(rows, hidden, lm_head, targets, 0.7, 4)
        return (
            *out,
            logp,
            entropy,
            norm,
            *head.logp_backward(rows, hidden, lm_head, targets, 0.7, 4, norm, entropy, old, ref),
        )

    first = run()
    f32 = torch.float32
    assert [v.dtype for v in first] == [f32, f32, dtype, f32, f32, f32, f32, dtype, dtype]
    assert _same(first, run())


# ---- launches ------------------------------------------------------------------------------------


class _Calls(TorchDispatchMode):
    """Names of torch's own operations, but for those with which Triton's interpreter runs a kernel;
    and the kernels launched.
    """

    def __init__(self, monkeypatch):
        super().__init__()
        self.names, self.kernels, self.inside = set(), [], False
        kind = type(policy.policy_kernel)
        run = kind.run

        def counted(kernel, *args, **kwargs):
            self.kernels.append(kernel)
            self.inside = True
            try:
                return run(kernel, *args, **kwargs)
            finally:
                self.inside = False

        monkeypatch.setattr(kind, "run", counted)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not self.inside:
            self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_loss_takes_two_launches(monkeypatch):
    logp, old, ref, advantage, weight, importance, _ = token_vectors(5000, 4)
    with _Calls(monkeypatch) as calls:
        policy.policy_forward(logp, old, advantage, weight, ref, importance, KL)
    assert calls.kernels == [policy.policy_kernel, policy.sum_kernel]
    assert calls.names <= {"empty", "new_empty", "empty_like"}  # memory only: nothing that launches


def test_offsets_of_split_rows_and_of_one_visit_pass_two_to_the_31():
    # row 2 begins where a 32-bit offset ends; only the pages that are touched take memory
    stride = 2**30
    z = torch.empty(2 * stride + 64, dtype=torch.bfloat16, device=DEVICE).as_strided(
        (3, 40), (stride, 1)
    )
    z.copy_(torch.randn(3, 40))
    targets, ones = torch.tensor([1, 2, 39]).to(DEVICE), torch.ones(3, device=DEVICE)
    near = placed(z, wide=True)  # the same rows, side by side
    split = [
        log_softmax.log_softmax_forward(v, targets, 1.0, lanes=2, few_rows=9) for v in (z, near)
    ]
    assert _same(*split)
    vectors = None, ones, ones, None, None, None, Objective(0.2, 0.2)
    assert _same(*(rows.policy_rows_(v, targets, 1.0, *vectors, lanes=2) for v in (z, near)))
    assert torch.equal(z, near)


def test_ops_give_float32_for_every_type_of_logits(monkeypatch):
    # undone at the end, so that other tests choose by device again
    monkeypatch.setattr(ops, "_chosen", "triton")
    targets, ones = torch.tensor([0, 6, 1]).to(DEVICE), torch.ones(3, device=DEVICE)
    for dtype in DTYPES:
        hidden, lm_head = (
            torch.randn(3, 4).to(dtype).to(DEVICE),
            torch.randn(7, 4).to(dtype).to(DEVICE),
        )
        out = ops.head_policy_loss(
            hidden, lm_head, targets, None, ones, ones, epsilon=0.2, epsilon_high=0.2
        )
        results = (
            out.loss,
            out.logp,
            out.entropy,
            out.stats,
            *ops.head_logp(hidden, lm_head, targets, entropy=True),
        )
        results += ops.selective_log_softmax(hidden @ lm_head.T, targets, entropy=True)
        assert {v.dtype for v in results} == {torch.float32}
