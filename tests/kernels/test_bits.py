"""Properties of the kernels that hold to the last bit: repeated runs, permuted rows, gradients in
place, float32 results; and the number of launches of a loss.

They run in Triton's interpreter where there is no GPU, and on the GPU where there is one. Read
next: test_contracts.py.
"""

import pytest
import torch
from nanogrpo.kernels.reference import LossInputs
from torch.utils._python_dispatch import TorchDispatchMode

from nanogrpo.kernels import fused_rows, log_softmax, policy
from nanogrpo.model import dispatch
from nanogrpo.model import head as ops
from nanogrpo.model import ops as kernel_ops
from tests.conftest import DEVICE
from tests.kernels.inputs import CLIP, DTYPES, placed, rows_of_logits, small_blocks, token_vectors

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
    """One visit of the same rows: log-prob, entropy, gradient of the logits."""
    z, targets = rows_of_logits(6, 100, "normal", dtype, 7)
    mine, (_, inputs) = placed(z[order], wide), token_vectors(6, 4)
    with small_blocks():
        out = fused_rows.policy_rows_(mine, targets[order], 0.7, inputs.at(order), KL)
    return *out, mine


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
    assert [v.dtype for v in first] == [f32, f32, dtype]
    assert _same(first, _visit(dtype, wide))
    assert _same([v[ORDER] for v in first], _visit(dtype, wide, ORDER))


def test_policy_repeated_and_permuted(monkeypatch):
    monkeypatch.setattr(policy, "BLOCK", 32)
    logp, inputs = token_vectors(100, 4)
    order = torch.randperm(100, generator=torch.Generator().manual_seed(0))
    first = policy.policy_forward(logp, inputs, KL)
    f32 = torch.float32
    assert [v.dtype for v in first] == [f32, f32, torch.int8, f32]
    # the loss too: no atomics
    assert _same(first, policy.policy_forward(logp, inputs, KL))
    permuted = policy.policy_forward(logp[order], inputs.at(order), KL)
    # the loss is not compared: a sum in another order is another sum
    assert _same([v[order] for v in first[1:]], permuted[1:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_head_repeated_and_results_in_float32(dtype, monkeypatch):
    monkeypatch.setattr(dispatch, "choice", "triton")
    g = torch.Generator().manual_seed(1)
    hidden, lm_head = (
        torch.randn(n, 5, generator=g).to(dtype).to(DEVICE).requires_grad_() for n in (9, 33)
    )
    targets = torch.randint(33, (9,), generator=g).to(DEVICE)
    _, inputs = token_vectors(9, 4)

    def run():
        out = ops.head_policy_loss(hidden, lm_head, targets, inputs, KL, temperature=0.7, chunk=4)
        logp, entropy = ops.head_logp(hidden, lm_head, targets, 0.7, chunk=4)
        values = [out.loss, out.logp, out.entropy, out.kl, logp, entropy]
        values += kernel_ops.selective_log_softmax(hidden @ lm_head.T, targets)
        assert {v.dtype for v in values} == {torch.float32}
        return values + [
            gradient
            for root in (out.loss, (logp + entropy).sum())
            for gradient in torch.autograd.grad(root, (hidden, lm_head))
        ]

    first = run()
    assert {v.dtype for v in first[-4:]} == {dtype}
    assert _same(first, run())


class _Calls(TorchDispatchMode):
    """Names of torch's own operations, and the kernels launched.

    Operations with which Triton's interpreter runs a kernel do not count.
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


def test_a_loss_takes_two_launches(monkeypatch):
    logp, inputs = token_vectors(2000, 4)
    with _Calls(monkeypatch) as calls:
        policy.policy_forward(logp, inputs, KL)
    assert calls.kernels == [policy.policy_kernel, policy.sum_kernel]
    assert calls.names <= {"empty", "new_empty", "empty_like"}  # memory only: no launch


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
            out += fused_rows.policy_rows_(z, targets, 1.0, LossInputs(ones, ones), CLIP)
        results.append([*out, z])
    assert _same(*results)
