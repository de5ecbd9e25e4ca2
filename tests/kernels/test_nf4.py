"""Weights in four bits: equal to bitsandbytes on a CPU, bit for bit, in PyTorch and in Triton.

bitsandbytes gets every weight as one row: of several rows whose length is a multiple of 16 but not
of 64, 0.50.2 dequantizes all but the first with wrong values, on CPUs with AVX-512. Read next:
test_contracts.py.
"""

from pathlib import Path

import bitsandbytes.functional as bnb
import pytest
import torch
import torch.nn.functional as F
from nanogrpo.kernels.reference import DYNAMIC, NF4, Quantized, midpoints
from triton.runtime import interpreter

from nanogrpo.kernels import nf4, reference
from tests.conftest import CUDA, DEVICE
from tests.kernels.inputs import as_exact_as_eager
from tests.kernels.traffic import Traffic

ROOT = Path(__file__).resolve().parents[2]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [
    *[(n,) for n in (1, 2, 31, 63, 64, 65, 100, 127, 128, 1000, 1024, 16_384, 16_450, 33_333)],
    *[(3, 64), (5, 192), (2, 3, 64), (7, 66), (33, 65), (256, 64), (257, 128), (40, 320), (4, 48)],
]
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # NumPy's
BOTH = pytest.mark.parametrize("functions", [reference, nf4])


@pytest.fixture(autouse=True)
def rounded_bfloat16(monkeypatch):
    """Round to bfloat16 as a GPU does. The interpreter truncates."""
    cast = interpreter.InterpreterBuilder.cast_impl

    def cast_impl(self, x, dtype):
        if (x.dtype.scalar.name, dtype.scalar.name) != ("fp32", "bf16"):
            return cast(self, x, dtype)
        bits = torch.from_numpy(x.data.copy()).bfloat16().view(torch.uint16).numpy()
        return interpreter.TensorHandle(bits, dtype.scalar)

    if not CUDA:
        monkeypatch.setattr(interpreter.InterpreterBuilder, "cast_impl", cast_impl)


def draw(*shape, dtype=torch.float32, seed=0):
    return (0.02 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def theirs(w, nested):
    """Return bitsandbytes' packed codes and state for a weight, and both as `Quantized`."""
    arguments = dict(blocksize=64, quant_type="nf4", compress_statistics=nested)
    packed, state = bnb.quantize_4bit(w.flatten(), **arguments)
    more = (state.state2.absmax, state.offset) if nested else (None, None)
    return packed, state, Quantized(packed.flatten(), state.absmax, *more, w.shape)


def on(device, q):
    return Quantized(*(x if x is None else x.to(device) for x in q[:4]), q.shape)


def same(a, b):
    return a.dtype == b.dtype and torch.equal(a.cpu().nan_to_num(7), b.cpu().nan_to_num(7))


def check(functions, w, nested=True, dtypes=DTYPES):
    """Assert that codes, statistics and dequantized values are those of bitsandbytes."""
    packed, state, expected = theirs(w, nested)
    q = functions.nf4_quantize(w.to(DEVICE), nested)
    assert q.shape == w.shape
    assert same(q.packed, expected.packed)
    # CUDA's sum for the mean has another order, so it may differ in the last bit
    if q.nested_offset is None or same(q.nested_offset, expected.nested_offset):
        assert same(q.absmax, expected.absmax)
    else:
        assert CUDA
    if nested and not CUDA:
        assert same(q.nested_absmax, expected.nested_absmax)
    for state.dtype in dtypes:
        # for odd sizes bitsandbytes uses torch.compile, which takes long
        with torch.compiler.set_stance("force_eager"):
            values = bnb.dequantize_4bit(packed, state).view(w.shape)
        assert same(functions.nf4_dequantize(on(DEVICE, expected), state.dtype), values)


@BOTH
@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_it_equals_bitsandbytes(shape, nested, functions):
    w = draw(*shape)
    # the interpreter is slow
    for dtype in DTYPES if functions is reference or w.numel() < 2000 else DTYPES[1:2]:
        check(functions, w.to(dtype), nested, DTYPES if w.numel() < 2000 else [dtype])


def one_outlier():
    w = draw(20, 64)
    w[3, 5] = -1e4
    return w


def blocks_with_zeros():
    w = draw(260, 64)
    w[::3] = 0.0
    w[1] = -0.0
    return w


EDGES = {
    "zeros": torch.zeros(5, 64),
    "zeros in a short block": torch.zeros(100),
    "blocks with zeros": blocks_with_zeros(),
    "one outlier": one_outlier(),
    "equal weights": torch.full((20, 64), -0.3),
    "a one": torch.eye(64),
    "large": draw(4, 100) * 1e36,
    "overflow in float16": draw(4, 100) * 1e8,
    "different sizes": draw(270, 64) * torch.logspace(-20, 20, 270)[:, None],
}


@BOTH
@pytest.mark.parametrize("name", EDGES)
def test_edge_cases_equal_bitsandbytes(name, functions):
    for nested in (True, False):
        check(functions, EDGES[name], nested)


@BOTH
def test_subnormal_weights_equal_bitsandbytes(functions):
    """Below 1e-38 the divisor is clamped. bitsandbytes flushes subnormal bfloat16 to zero where the
    CPU has an instruction for it (AVX512-BF16), so bfloat16 is not compared.
    """
    w = torch.cat([draw(64 * 20) * 10.0**-n for n in range(34, 43)])
    for nested in (True, False):
        check(functions, w, nested, [torch.float32, torch.float16])
    smallest = torch.zeros(100)
    smallest[[3, 70]] = 2.0**-149
    check(functions, smallest, False, [torch.float32])


def neighbors(x, count):
    """Return x [n] (no zeros) with the `count` floats on either side of each: [n, 2·count + 1]."""
    steps = torch.arange(-count, count + 1, dtype=torch.int32)
    return (x.view(torch.int32)[:, None] + steps).view(torch.float32)


@BOTH
@pytest.mark.parametrize("absmax", [1.0, 3.0, 0.7, 0.0123, 1.5e-38])
def test_ties_between_two_codes_equal_bitsandbytes(absmax, functions):
    """A tie goes to the lower code. The floats around it show how w/absmax is rounded."""
    near = neighbors(midpoints(NF4) * absmax, 3).flatten()  # [105]
    for w in (near, F.pad(near, (0, 2))):  # the last block is short, and is divided
        blocks = torch.cat([torch.tensor([absmax]), w[:63], torch.tensor([-absmax]), w[63:]])
        check(functions, blocks, False, [torch.float32])
    exact = torch.cat([midpoints(NF4), torch.ones(49)])
    q = functions.nf4_quantize(exact.to(DEVICE), False)
    codes = torch.stack([q.packed >> 4, q.packed & 15], 1).flatten()
    assert codes[:15].tolist() == [*range(15)]


def test_ties_in_the_second_level_equal_bitsandbytes():
    """Around each edge between two of the 2¹⁶ points to which bitsandbytes rounds first."""
    edges = ((2 * torch.arange(65_535) + 1).double() / 65_535 - 1).float()
    x = neighbors(edges[edges != 0], 2).flatten()
    x = F.pad(x, (0, -len(x) % 255)).view(-1, 255)
    ends = torch.tensor([1.0, -1.0]).repeat(len(x))[: len(x), None]
    absmax = torch.cat([ends, x], 1).flatten()
    codes, nested_absmax, offset = reference.quantize_absmax(absmax)
    assert offset.abs() < 1e-5
    expected, state = bnb.quantize_blockwise(absmax - offset, blocksize=256)
    assert torch.equal(codes, expected)
    assert torch.equal(nested_absmax, state.absmax)


@BOTH
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_block_with_inf_or_nan_has_no_finite_weights(bad, functions):
    w = draw(4, 64)
    w[1, 7] = bad
    packed, state, _ = theirs(w, nested=False)
    q = functions.nf4_quantize(w.to(DEVICE), nested=False)
    w_hat = functions.nf4_dequantize(q, torch.float32).cpu()
    assert same(w_hat, bnb.dequantize_4bit(packed, state).view(4, 64))
    assert w_hat.isfinite().all(1).tolist() == [True, False, True, True]
    assert not w_hat[1].isfinite().any()
    q = functions.nf4_quantize(w.to(DEVICE))  # with the mean of absmax, none is left
    assert not functions.nf4_dequantize(q, torch.float32).isfinite().any()


def test_the_code_books_are_the_quantiles_of_the_normal_distribution_and_bitsandbytes_own():
    delta = 1 - (1 / 32 + 1 / 30) / 2
    above, below = (
        torch.special.ndtri(torch.linspace(delta, 0.5, n, dtype=torch.float64)[:-1]) for n in (9, 8)
    )
    derived = torch.cat([-below, torch.zeros(1), above]).sort().values / above.max()
    assert (derived - NF4).abs().max() < 2e-7
    assert torch.equal(NF4, bnb.get_4bit_type("nf4", "cpu"))
    assert torch.equal(DYNAMIC, bnb.create_dynamic_map())


@BOTH
def test_each_weight_gets_the_nearest_code(functions):
    w = draw(50, 64)
    q = functions.nf4_quantize(w.to(DEVICE), nested=False)
    error = (functions.nf4_dequantize(q, torch.float32).cpu() - w).abs()
    choices = w.abs().amax(1)[:, None, None] * NF4  # [50, 1, 16]
    assert (error <= (choices - w[..., None]).abs().amin(-1) + 1e-8).all()
    assert (error / w.abs().amax(1, keepdim=True)).max() > 0.1  # half of the widest gap is 0.15


@BOTH
def test_a_weight_that_is_not_contiguous_is_read_by_rows(functions):
    w = draw(128, 6).to(DEVICE).T
    for a, b in zip(functions.nf4_quantize(w)[:4], functions.nf4_quantize(w.contiguous())[:4]):
        assert same(a, b)


@BOTH
def test_rows_of_whole_blocks_can_be_sharded(functions):
    """In any shape, and with the second level of the whole weight undone first."""
    w = draw(300, 128).to(DEVICE)
    q = functions.nf4_quantize(w)
    whole = functions.nf4_dequantize(q, torch.float32)
    packed, absmax = q.packed.view(300, 64), q.absmax.view(300, 2)
    gathered = q._replace(packed=packed, absmax=absmax)
    assert same(functions.nf4_dequantize(gathered, torch.float32), whole)
    absmax = reference.nf4_absmax(q).view(300, 2)[70:200]
    shard = Quantized(packed[70:200], absmax, None, None, torch.Size([130, 128]))
    assert same(functions.nf4_dequantize(shard, torch.float32), whole[70:200])


# --- the product ---


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize(
    ("rows", "outs", "width"),
    [(1, 64, 64), (3, 40, 320), (16, 200, 448), (17, 40, 64), (2, 30, 100)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16 if CUDA else torch.float16])
def test_the_product_is_as_exact_as_with_the_dequantized_weight(
    dtype, rows, outs, width, nested, monkeypatch
):
    q = reference.nf4_quantize(draw(outs, width), nested)
    x = draw(rows, width, dtype=dtype, seed=1) / 0.02
    eager = reference.nf4_matmul(x, q)
    exact = x.double() @ reference.nf4_dequantize(q, dtype).double().T
    for programs in (1, 512):  # each program reads whole rows, or two blocks of them
        monkeypatch.setattr(nf4, "PROGRAMS", programs)
        y = nf4.nf4_matmul(x.to(DEVICE), on(DEVICE, q)).cpu()
        assert (y.shape, y.dtype) == ((rows, outs), dtype)
        unit = {torch.float32: 0.0, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}[dtype]
        as_exact_as_eager(y, eager, exact, scale=1 + unit / 2.0**-22)


def test_the_product_keeps_the_leading_dimensions_and_the_bits_of_each_row():
    q = on(DEVICE, reference.nf4_quantize(draw(40, 320)))
    x = draw(2, 1, 3, 320).to(DEVICE)
    y = nf4.nf4_matmul(x, q)
    assert y.shape == (2, 1, 3, 40)
    assert same(nf4.nf4_matmul(x, q), y)
    assert same(nf4.nf4_matmul(x[1], q), y[1])


@BOTH
def test_empty_tensors_work(functions):
    for nested in (True, False):
        q = functions.nf4_quantize(torch.zeros(0, 64, device=DEVICE), nested)
        assert functions.nf4_dequantize(q, torch.bfloat16).shape == (0, 64)
    q = functions.nf4_quantize(draw(8, 64).to(DEVICE))
    assert functions.nf4_matmul(torch.zeros(0, 64, device=DEVICE), q).shape == (0, 8)


def test_the_kernels_move_the_planned_bytes():
    """4096 · 12,288 weights, on meta tensors: each kernel reads and writes everything once."""
    outs, width, rows, tables = 4096, 12_288, 16, 4 * (16 + 256)
    n = outs * width
    w = torch.empty(outs, width, dtype=torch.bfloat16, device="meta")
    x = torch.empty(rows, width, dtype=torch.bfloat16, device="meta")

    def moved(call):
        traffic = Traffic()
        with traffic.counting():
            out = call()
        count = traffic.elementwise
        kernels = [name for name in count.names if name.endswith("_kernel")]
        return kernels, count.bytes, out

    def names(*kernels):
        return [f"nanogrpo.kernels.nf4.{kernel}_kernel" for kernel in kernels]

    reference.nf4_tables(w.device)  # copied once
    readme = (ROOT / "kernels" / "README.md").read_text()

    kernels, count, q = moved(lambda: nf4.nf4_quantize(w, nested=False))
    assert (kernels, q.absmax.dtype) == (names("quantize"), torch.float32)
    stored = n // 2 + 4 * n // 64
    # the midpoints are copied to the device, and computed there
    assert stored + 2 * n <= count <= stored + 2 * n + 1024
    for nested, per_weight in ((False, 0.5625), (True, 0.5 + 1 / 64 + 4 / 2**14)):
        _, _, q = moved(lambda nested=nested: nf4.nf4_quantize(w, nested))
        stored = int(per_weight * n) + 4 * nested
        assert stored == sum(t.numel() * t.itemsize for t in q[:4] if t is not None)
        kernels, count, _ = moved(lambda q=q: nf4.nf4_dequantize(q, torch.bfloat16))
        assert (kernels, count) == (names("dequantize"), stored + tables + 2 * n)
        assert not nested or f"| {count / 1e6:.1f} MB |" in readme
        kernels, count, _ = moved(lambda q=q: nf4.nf4_matmul(x, q))
        sums = 2 * 4 * rows * outs * 8  # 8 parts, written and read
        assert kernels == names("matmul", "sum")
        assert count == stored + tables + sums + 2 * rows * (outs + width)
        assert not nested or f"| {count / 1e6:.1f} MB |" in readme
