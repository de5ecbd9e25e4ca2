"""The Triton kernels against the equations in float64: in Triton's interpreter where there is no GPU, on the GPU where there is.

The yardstick is eager PyTorch in float32 on the same numbers: a kernel may be at most twice as far from float64, plus a few units
in the last place of float32, since eager PyTorch is sometimes exact by luck. Read next: test_kernels_contracts.py.
"""

import math

import pytest
import torch
from aot import exact_fma
from conftest import CUDA, DEVICE
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from nanogrpo.kernels.reference import Objective

from nanogrpo import ops
from nanogrpo.kernels import log_softmax, policy, reference, rows

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy remarks on the 0 · -inf that the kernels provide for

if not CUDA:
    exact_fma()

# The interpreter is slow: few examples, the same ones each time, and a failure is shown as found, not shrunk for minutes.
FEW = settings(max_examples=8, deadline=None, derandomize=True, database=None, phases=[Phase.explicit, Phase.generate])
ULP = 2.0**-22  # two units in the last place of 1.0 in float32


def _eager(logits, targets, temperature):
    """log-prob and entropy as one would write them in PyTorch, in the type given."""
    logp_all = torch.log_softmax(logits / temperature, -1)
    seen = torch.where(logp_all > -math.inf, logp_all, 0.0)
    return logp_all.gather(1, targets[:, None]).squeeze(1), -(logp_all.exp() * seen).sum(-1)


def _as_exact_as_eager(got, eager, exact, scale=1.0):
    """scale: the size of the numbers that were added up to give these."""
    error, allowed = (got.double() - exact).abs(), 2 * (eager.double() - exact).abs().max() + ULP * (scale + exact.abs())
    assert (error <= allowed).all(), f"error {error.max():.3g}, eager's {(eager.double() - exact).abs().max():.3g}"


def _rows(count, vocab, kind, dtype, seed):
    g = torch.Generator().manual_seed(seed)
    z = 4 * torch.randn(count, vocab, generator=g)
    targets = torch.randint(vocab, (count,), generator=g)
    targets[0], targets[-1] = 0, vocab - 1  # first and last column
    if kind == "dominant":
        z[torch.arange(count), targets] = 60.0
    elif kind == "equal":
        z[:] = 2.5
    elif kind == "far below":
        z -= 10_000.0
    elif kind == "-inf":
        z[torch.rand(count, vocab, generator=g) < 0.4] = -math.inf
        z[torch.arange(count), targets] = 1.0
    return z.to(dtype).to(DEVICE), targets.to(DEVICE)


KINDS = ["normal", "dominant", "equal", "far below", "-inf"]


@pytest.mark.parametrize("kind", KINDS)
@given(
    vocab=st.integers(1, 300),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    temperature=st.sampled_from([0.3, 1.0, 2.0]),
    split=st.booleans(),
    seed=st.integers(0, 99),
)
@FEW
def test_log_softmax_is_as_exact_as_eager(vocab, kind, dtype, temperature, split, seed):
    z, targets = _rows(3, vocab, kind, dtype, seed)
    logp, entropy, _ = log_softmax.log_softmax_forward(z, targets, temperature, lanes=4, few_rows=9 if split else 0)
    exact, eager = _eager(z.double(), targets, temperature), _eager(z.float(), targets, temperature)
    _as_exact_as_eager(logp, eager[0], exact[0])
    _as_exact_as_eager(entropy, eager[1], exact[1])
    assert (logp <= ULP).all()
    assert (entropy >= -ULP * 8).all()
    assert (entropy <= math.log(vocab) + ULP * 8).all()


@pytest.mark.parametrize("kind", KINDS)
@given(vocab=st.integers(1, 200), temperature=st.sampled_from([0.3, 1.0]), seed=st.integers(0, 99))
@FEW
def test_gradient_of_log_softmax(vocab, kind, temperature, seed):
    z, targets = _rows(3, vocab, kind, torch.float32, seed)
    dlogp, dentropy = torch.randn(2, 3, generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    dentropy[0] = 0.0

    def gradient(module, z):
        logp, entropy, norm = module.log_softmax_forward(z, targets, temperature)
        upstream = dlogp.to(logp.dtype), dentropy.to(logp.dtype)
        return module.log_softmax_backward(z, targets, temperature, norm, entropy, *upstream)

    got, exact = gradient(log_softmax, z), gradient(reference, z.double())
    scale = float(dlogp.abs().max() + dentropy.abs().max()) / temperature
    _as_exact_as_eager(got, gradient(reference, z), exact, scale)
    assert got.sum(-1).abs().max() <= 1e-5 / temperature  # adding a number to a row changes nothing


def test_rows_may_be_strided_masked_and_none():
    wide = torch.randn(4, 90).to(DEVICE)
    z, targets = wide[:, 7:60], torch.tensor([0, 52, 9, 9]).to(DEVICE)
    mask = torch.tensor([True, True, False, True]).to(DEVICE)
    z[2] = math.nan
    for few_rows in (0, 9):
        got = log_softmax.log_softmax_forward(z, targets, 0.7, mask, lanes=2, few_rows=few_rows)
        expected = reference.log_softmax_forward(z, targets, 0.7, mask)
        torch.testing.assert_close(got[:2], expected[:2], rtol=1e-5, atol=1e-6)
    ones = torch.ones(4, device=DEVICE)
    dz = log_softmax.log_softmax_backward(z, targets, 0.7, got[2], got[1], ones, ones, mask, block=16)
    torch.testing.assert_close(dz, reference.log_softmax_backward(z, targets, 0.7, expected[2], expected[1], ones, ones, mask))
    assert not dz[2].any()
    assert log_softmax.log_softmax_forward(z[:0], targets[:0], 1.0)[0].shape == (0,)
    assert log_softmax.log_softmax_backward(z[:0], targets[:0], 1.0, got[2][:, :0], *(ones[:0],) * 3).shape == (0, 53)
    with pytest.raises(ValueError, match="stride"):
        log_softmax.log_softmax_forward(wide.T, targets, 1.0)


def test_offsets_pass_two_to_the_31():
    stride = 2**30  # row 2 begins where a 32-bit offset ends; only the pages that are touched take memory
    memory = torch.empty(2 * stride + 64, dtype=torch.bfloat16, device=DEVICE)
    z = memory.as_strided((3, 40), (stride, 1))
    z.copy_(torch.randn(3, 40))
    targets = torch.tensor([1, 2, 39]).to(DEVICE)
    got = log_softmax.log_softmax_forward(z, targets, 1.0)
    torch.testing.assert_close(got[0], reference.log_softmax_forward(z, targets, 1.0)[0], rtol=1e-5, atol=1e-6)
    ones = torch.ones(3, device=DEVICE)
    dz = log_softmax.log_softmax_backward(z, targets, 1.0, got[2], got[1], ones, None, in_place=True)
    assert dz[2, 39] > 0 > dz[2, 0]


def test_the_whole_vocabulary_of_qwen3():
    z, targets = _rows(2, 151_936, "normal", torch.bfloat16, 0)
    exact, eager = _eager(z.double(), targets, 0.7), _eager(z.float(), targets, 0.7)
    ones, mine, theirs = torch.ones(2, device=DEVICE), z.clone(), z.double()
    objective = Objective(0.2, 0.2)
    logp, entropy, _ = rows.policy_rows_(mine, targets, 0.7, None, ones, ones, None, None, None, objective)
    reference.policy_rows_(theirs, targets, 0.7, None, ones.double(), ones.double(), None, None, None, objective)
    for got in ((logp, entropy), log_softmax.log_softmax_forward(z, targets, 0.7)[:2]):  # whole rows, and rows in parts
        _as_exact_as_eager(got[0], eager[0], exact[0])
        _as_exact_as_eager(got[1], eager[1], exact[1])
    torch.testing.assert_close(mine.double(), theirs, rtol=2**-7, atol=1e-10)


def _vectors(count, seed, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)
    logp, d_old, d_ref, advantage, weight, importance, entropy_weight = torch.randn(7, count, generator=g, dtype=torch.float64)
    weight[::5], advantage[1::7] = 0.0, 0.0
    if seed % 2:
        d_old[2], d_ref[3] = 150.0, -150.0  # beyond the clamp
    vectors = -logp.abs(), -logp.abs() + 0.4 * d_old, -logp.abs() + 0.3 * d_ref, advantage, weight.abs(), importance.abs()
    return [v.to(dtype).to(DEVICE) for v in (*vectors, 0.1 * entropy_weight.abs())]


OBJECTIVES = st.builds(
    Objective,
    epsilon=st.just(0.2),
    epsilon_high=st.sampled_from([0.2, 0.28]),
    delta=st.sampled_from([math.inf, 1.5, 1.1]),
    beta=st.sampled_from([0.0, 0.04]),
    bias_correction=st.sampled_from([0.0, 1.0]),
)


@given(objective=OBJECTIVES, count=st.integers(8, 200), parts=st.tuples(*[st.booleans()] * 3), seed=st.integers(0, 99))
@settings(FEW, max_examples=25)
def test_policy_loss_gradient_and_statistics(objective, count, parts, seed):
    logp, old, ref, advantage, weight, importance, _ = _vectors(count, seed)
    old, ref, importance = (v if on else None for v, on in zip((old, ref, importance), parts))
    logp[0] = math.nan  # its weight is 0
    args = advantage, weight, ref, importance
    got = policy.policy_forward(logp, old, *args, objective, block=32)

    def wide(v):
        return None if v is None else v.double()

    exact = reference.policy_forward(wide(logp), wide(old), *map(wide, args), objective)
    eager = reference.policy_forward(logp, old, *args, objective)
    for a, b, c in zip(got, eager, exact):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        if a.dtype == torch.int8:
            assert torch.equal(a, b)
        elif a.numel():
            scale = 8 * ULP * c.abs().max()  # exp of a clamped log-ratio is 5e8; a float32 of that size has that error
            assert ((a.double() - c).abs() <= 2 * (b.double() - c).abs().max() + scale + ULP).all()


def test_kl_is_exact_from_nothing_to_the_clamp():
    x = torch.cat([torch.linspace(-19.9, 19.9, 4001), 10.0 ** -torch.arange(1.0, 15.0), torch.zeros(1)]).to(DEVICE)
    ones = torch.ones_like(x)
    _, grad, _, kl, _ = policy.policy_forward(
        0 * x, None, 0 * x, ones, x, None, Objective(0.2, 0.2, beta=1.0, bias_correction=0.0)
    )
    wide = x.double()
    series = wide**2 / 2 + wide**3 / 6  # float64 itself cancels below 1e-5
    torch.testing.assert_close(kl.double(), torch.where(wide.abs() < 1e-5, series, torch.expm1(wide) - wide), rtol=1e-5, atol=0)
    torch.testing.assert_close(grad.double(), -torch.expm1(wide), rtol=1e-5, atol=0)


def test_policy_sums_over_many_blocks_and_over_none():
    count = 70_000  # more rows of the table than the second kernel takes at a time
    ones = torch.ones(count, device=DEVICE)
    loss, grad, _, _, stats = policy.policy_forward(-ones, None, ones, ones, None, None, Objective(0.2, 0.2))
    assert loss == -count
    assert stats.tolist() == [count, count, 0, 0, 0, 0]
    assert (grad == -1).all()
    empty = ones[:0]
    loss, grad, clip, kl, stats = policy.policy_forward(empty, None, empty, empty, None, None, Objective(0.2, 0.2))
    assert loss == 0
    assert not stats.any()
    assert grad.shape == clip.shape == kl.shape == (0,)


@pytest.mark.parametrize("kind", KINDS)
@given(
    objective=OBJECTIVES,
    vocab=st.integers(1, 120),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    parts=st.tuples(*[st.booleans()] * 4),
    seed=st.integers(0, 99),
)
@FEW
def test_one_visit_rows(objective, vocab, kind, dtype, parts, seed):
    z, targets = _rows(8, vocab, kind, dtype, seed)
    _, old, ref, advantage, weight, importance, entropy_weight = _vectors(8, seed)
    old = torch.where(old > 40, 0.0, old)  # ratios of e^20 belong to the test above
    old, ref, importance, entropy_weight = (v if on else None for v, on in zip((old, ref, importance, entropy_weight), parts))
    z[5 if entropy_weight is None else 7] = math.nan  # rows 0 and 5 have weight 0; row 7 has both weights
    if entropy_weight is not None:
        entropy_weight[7] = weight[7] = 0.0
    args = targets, 0.7, old, advantage, weight, ref, importance, entropy_weight

    def wide(v):
        return v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v

    mine, theirs, exact = z.clone(), z.float(), z.double()
    got = rows.policy_rows_(mine, *args, objective, lanes=4)
    eager = reference.policy_rows_(theirs, *args, objective)
    truth = reference.policy_rows_(exact, *map(wide, args), objective)
    for a, b, c in zip(got, eager, truth):
        scale = 8 * ULP * c.abs().max()
        assert ((a.double() - c).abs() <= 2 * (b.double() - c).abs().max() + scale + ULP).all()
    # The gradient is stored in the logits' type: half a unit in its last place (a whole one in the interpreter, which truncates).
    unit = 2.0**-7 if dtype == torch.bfloat16 else 8 * ULP
    g = reference.policy_terms(*map(wide, (truth[0], old, advantage, ref, importance)), objective)[1] * weight
    coefficient = torch.where(weight != 0, g, 0.0).abs().max() + (0 if entropy_weight is None else entropy_weight.max())
    slack = unit * exact.abs() + 2 * (theirs.double() - exact).abs().max() + ULP * 8 * coefficient
    assert ((mine.double() - exact).abs() <= slack).all()


def test_the_target_of_a_near_certain_row_keeps_its_gradient():
    z = torch.zeros(1, 64)
    z[0, 3] = 11.0  # p = 0.999: 1 - p must be formed before it is rounded to bfloat16
    z = z.bfloat16().to(DEVICE)
    one = torch.ones(1, device=DEVICE)
    p = torch.softmax(z.double(), -1)[0, 3]
    rows.policy_rows_(z, torch.tensor([3]).to(DEVICE), 1.0, None, one, one, None, None, None, Objective(0.2, 0.2))
    assert float(z[0, 3]) == pytest.approx(float(p - 1), rel=2**-7)


@pytest.fixture
def triton_ops():
    ops.use("triton")
    yield
    ops.use(None)


def test_finite_differences_through_the_kernels(triton_ops):
    g = torch.Generator().manual_seed(1)

    def normal(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(DEVICE)

    targets = torch.tensor([0, 6]).to(DEVICE)
    logits = normal(2, 7).requires_grad_()
    assert torch.autograd.gradcheck(lambda z: ops.selective_log_softmax(z, targets, 0.5, entropy=True), (logits,))
    hidden, head = normal(2, 2).requires_grad_(), normal(7, 2).requires_grad_()
    old, advantage, weight, ref, entropy_weight = -normal(5, 2).abs()

    def loss(hidden, head):
        more = dict(ref_logp=ref, beta=0.1, entropy_weight=entropy_weight, temperature=0.5, epsilon=0.2, epsilon_high=0.3)
        return ops.head_policy_loss(hidden, head, targets, old, advantage, weight, **more).loss

    assert torch.autograd.gradcheck(loss, (hidden, head))


def test_ops_with_the_kernels_equal_ops_with_the_reference():
    g = torch.Generator().manual_seed(2)
    hidden = torch.randn(9, 5, generator=g).to(DEVICE).requires_grad_()
    head = torch.randn(33, 5, generator=g).to(DEVICE).requires_grad_()
    targets = torch.randint(33, (9,), generator=g).to(DEVICE)
    _, old, ref, advantage, weight, importance, _ = _vectors(9, 4)
    old = torch.where(old > 10, 0.0, old)

    def step(hidden, head):
        more = dict(ref_logp=ref, beta=0.1, importance=importance, epsilon=0.2, epsilon_high=0.3, chunk=4)
        out = ops.head_policy_loss(hidden, head, targets, old, advantage, weight, **more)
        logp, entropy = ops.head_logp(hidden, head, targets, 0.7, entropy=True, chunk=4)
        other = ops.policy_loss(logp, old, advantage, weight, epsilon=0.2, epsilon_high=0.3)
        selected, _ = ops.selective_log_softmax(hidden @ head.T, targets)
        return out.loss + other.loss + entropy.sum() + selected.sum()

    results = {}
    for name in ("torch", "triton"):
        ops.use(name)
        for how in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
            loss = how(hidden, head)
            results[name, how is step] = (loss.detach(), *torch.autograd.grad(loss, (hidden, head)))
    ops.use(None)
    for result in results.values():
        torch.testing.assert_close(result, results["torch", True], rtol=2e-5, atol=2e-5)


def test_repeated_runs_are_the_same_and_permuting_rows_permutes_the_result():
    z, targets = _rows(6, 150, "normal", torch.bfloat16, 7)
    _, old, ref, advantage, weight, importance, entropy_weight = _vectors(6, 7)
    vectors = old, advantage, weight, ref, importance, entropy_weight

    def run(order):
        mine = z[order].clone()
        picked = [v[order] for v in vectors]
        out = rows.policy_rows_(mine, targets[order], 0.7, *picked, Objective(0.2, 0.28, beta=0.1), lanes=4)
        return (*out, mine, *log_softmax.log_softmax_forward(z[order], targets[order], 0.7, lanes=4, few_rows=9)[:2])

    same = torch.arange(6, device=DEVICE)
    first, order = run(same), torch.tensor([3, 1, 5, 0, 2, 4], device=DEVICE)
    for again in (run(same), run(same)):
        assert all(torch.equal(a, b) for a, b in zip(first, again))
    assert all(torch.equal(a[order], b) for a, b in zip(first, run(order)))
