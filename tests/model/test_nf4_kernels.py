"""Weights in four bits: equal to bitsandbytes on a CPU, bit for bit, in PyTorch and in Triton.

bitsandbytes gets every weight as one row: of several rows whose length is a multiple of 16 but not
of 64, 0.50.2 dequantizes all but the first with wrong values, on CPUs with AVX-512. Read next:
test_contracts.py.
"""

from pathlib import Path

import pytest
import torch
from triton.runtime import interpreter

from nanogrpo.extras.lora import nf4_kernels, nf4_reference
from nanogrpo.extras.lora.nf4_reference import NF4, Quantized, midpoints
from tests.conftest import CUDA, DEVICE
from tests.kernels.inputs import ULP, UNIT, as_exact_as_eager
from tests.kernels.traffic import Traffic

bnb = pytest.importorskip("bitsandbytes.functional")
ROOT = Path(__file__).resolve().parents[2]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [
    *[(n,) for n in (64, 128, 1024, 16_384, 16_448, 33_344)],
    *[(3, 64), (5, 192), (2, 3, 64), (32, 66), (256, 64), (257, 128), (40, 320), (4, 48)],
]
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # NumPy's
BOTH = pytest.mark.parametrize("functions", [nf4_reference, nf4_kernels])


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
    """Return bitsandbytes' packed codes and state for a weight."""
    arguments = dict(blocksize=64, quant_type="nf4", compress_statistics=nested)
    return bnb.quantize_4bit(w.flatten(), **arguments)


def quantized(w):
    packed, absmax = nf4_reference.nf4_quantize(w.to(DEVICE))
    return Quantized(packed, *nf4_reference.quantize_absmax(absmax), w.shape)


def on(device, q):
    return Quantized(*(x.to(device) for x in q[:4]), q.shape)


def same(a, b):
    return a.dtype == b.dtype and torch.equal(a.cpu().nan_to_num(7), b.cpu().nan_to_num(7))


def check_blocks(w):
    """Assert that the codes, and the statistics of each block, are those of bitsandbytes."""
    packed, absmax = nf4_reference.nf4_quantize(w.to(DEVICE))
    found, state = theirs(w, nested=False)
    assert same(packed, found.flatten())
    assert same(absmax, state.absmax)
    return absmax


def check(functions, w, dtypes=DTYPES):
    """Assert that codes, statistics and dequantized values are those of bitsandbytes."""
    check_blocks(w)
    q = quantized(w)
    assert q.shape == w.shape
    found, state = theirs(w, nested=True)
    assert same(q.packed, found.flatten())
    # CUDA's sum for the mean has another order, so it may differ in the last bit
    if same(q.nested_offset, state.offset):
        assert same(q.absmax, state.absmax)
    else:
        assert CUDA
    if not CUDA:
        assert same(q.nested_absmax, state.state2.absmax)
    expected = Quantized(found, state.absmax, state.state2.absmax, state.offset, w.shape)
    for state.dtype in dtypes:
        # for odd sizes bitsandbytes uses torch.compile, which takes long
        with torch.compiler.set_stance("force_eager"):
            values = bnb.dequantize_4bit(found, state).view(w.shape)
        assert same(functions.nf4_dequantize(on(DEVICE, expected), state.dtype), values)


@BOTH
@pytest.mark.parametrize("shape", SHAPES)
def test_it_equals_bitsandbytes(shape, functions):
    w = draw(*shape)
    # the interpreter is slow
    for dtype in DTYPES if functions is nf4_reference or w.numel() < 2000 else DTYPES[1:2]:
        check(functions, w.to(dtype), DTYPES if w.numel() < 2000 else [dtype])


def one_outlier():
    w = draw(20, 64)
    w[3, 5] = -1e4
    return w


def blocks_with_zeros():
    w = draw(260, 64)
    w[::3] = 0.0
    w[1] = -0.0
    return w


def subnormal():
    """Below 1e-38, where the divisor is clamped."""
    smallest = torch.zeros(128)
    smallest[[3, 70]] = 2.0**-149
    return torch.cat([draw(64 * 20) * 10.0**-n for n in range(34, 43)] + [smallest])


EDGES = {
    "zeros": torch.zeros(5, 64),
    "blocks with zeros": blocks_with_zeros(),
    "one outlier": one_outlier(),
    "equal weights": torch.full((20, 64), -0.3),
    "a one": torch.eye(64),
    "large": draw(4, 128) * 1e36,
    "overflow in float16": draw(4, 128) * 1e8,
    "subnormal": subnormal(),
    "different sizes": draw(270, 64) * torch.logspace(-20, 20, 270)[:, None],
}


@BOTH
@pytest.mark.parametrize("name", EDGES)
def test_edge_cases_equal_bitsandbytes(name, functions):
    """bitsandbytes flushes subnormal bfloat16 to zero where the CPU has an instruction for it
    (AVX512-BF16), so it is not compared.
    """
    check(functions, EDGES[name], DTYPES[:: 2 if name == "subnormal" else 1])


def neighbors(x, count):
    """Return x [n] (no zeros) with the `count` floats on either side of each: [n, 2·count + 1]."""
    steps = torch.arange(-count, count + 1, dtype=torch.int32)
    return (x.view(torch.int32)[:, None] + steps).view(torch.float32)


@BOTH
@pytest.mark.parametrize("absmax", [1.0, 3.0, 0.7, 0.0123, 1.5e-38])
def test_ties_between_two_codes_equal_bitsandbytes(absmax, functions):
    """A tie goes to the lower code. The floats around it show how w/absmax is rounded."""
    near = neighbors(midpoints(NF4) * absmax, 3).flatten()  # [105]
    ends = torch.tensor([absmax]), torch.tensor([-absmax])
    check(functions, torch.cat([ends[0], near[:63], ends[1], near[-63:]]), [torch.float32])
    exact = torch.cat([midpoints(NF4), torch.ones(49)])
    packed, _ = nf4_reference.nf4_quantize(exact.to(DEVICE))
    codes = torch.stack([packed >> 4, packed & 15], 1).flatten()
    assert codes[:15].tolist() == [*range(15)]


def test_ties_in_the_second_level_equal_bitsandbytes():
    """Around each edge between two of the 2¹⁶ points to which bitsandbytes rounds first."""
    edges = ((2 * torch.arange(65_535) + 1).double() / 65_535 - 1).float()
    x = neighbors(edges[edges != 0], 2).flatten()
    x = torch.nn.functional.pad(x, (0, -len(x) % 255)).view(-1, 255)
    ends = torch.tensor([1.0, -1.0]).repeat(len(x))[: len(x), None]
    absmax = torch.cat([ends, x], 1).flatten()
    codes, nested_absmax, offset = nf4_reference.quantize_absmax(absmax)
    assert offset.abs() < 1e-5
    expected, state = bnb.quantize_blockwise(absmax - offset, blocksize=256)
    assert torch.equal(codes, expected)
    assert torch.equal(nested_absmax, state.absmax)


@BOTH
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_block_with_inf_or_nan_has_no_finite_weights(bad, functions):
    w = draw(4, 64)
    w[1, 7] = bad
    assert check_blocks(w).isfinite().tolist() == [True, False, True, True]
    q = quantized(w)  # with the mean of absmax, none is left
    assert not functions.nf4_dequantize(q, torch.float32).isfinite().any()


def test_a_weight_that_is_not_contiguous_is_read_by_rows():
    w = draw(128, 6).to(DEVICE).T
    for a, b in zip(*map(nf4_reference.nf4_quantize, (w, w.contiguous()))):
        assert same(a, b)


# --- the product ---


@pytest.mark.parametrize(
    ("rows", "outs", "width"),
    [(1, 64, 64), (3, 40, 320), (16, 200, 448), (17, 70, 192), (128, 64, 192)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16 if CUDA else torch.float16])
def test_the_product_is_as_exact_as_with_the_dequantized_weight(
    dtype, rows, outs, width, monkeypatch
):
    q = quantized(draw(outs, width))
    x = draw(rows, width, dtype=dtype, seed=1) / 0.02
    eager = nf4_reference.nf4_matmul(x, q)
    exact = x.double() @ nf4_reference.nf4_dequantize(q, dtype).double().T
    for programs in (1, 512):  # each program reads whole rows, or two blocks of them
        monkeypatch.setattr(nf4_kernels, "PROGRAMS", programs)
        y = nf4_kernels.nf4_matmul(x.to(DEVICE), on(DEVICE, q)).cpu()
        assert (y.shape, y.dtype) == ((rows, outs), dtype)
        as_exact_as_eager(y, eager, exact, scale=1 + UNIT[dtype] / ULP)


def test_the_product_keeps_the_bits_of_each_row():
    q = on(DEVICE, quantized(draw(40, 320)))
    x = draw(6, 320).to(DEVICE)
    y = nf4_kernels.nf4_matmul(x, q)
    assert same(nf4_kernels.nf4_matmul(x, q), y)
    assert same(nf4_kernels.nf4_matmul(x[3:], q), y[3:])


@BOTH
def test_empty_tensors_work(functions):
    q = quantized(torch.zeros(0, 64))
    assert functions.nf4_dequantize(q, torch.bfloat16).shape == (0, 64)
    q = quantized(draw(8, 64))
    assert functions.nf4_matmul(torch.zeros(0, 64, device=DEVICE), q).shape == (0, 8)


def test_the_kernels_move_the_planned_bytes():
    """4096 · 12,288 weights, on meta tensors: each kernel reads and writes everything once."""
    outs, width, tables = 4096, 12_288, 4 * (16 + 256)
    n = outs * width
    w = torch.empty(outs, width, dtype=torch.bfloat16, device="meta")

    def moved(call):
        traffic = Traffic()
        with traffic.counting():
            out = call()
        count = traffic.elementwise
        kernels = [name for name in count.names if name.endswith("_kernel")]
        return kernels, count.bytes, out

    def names(*kernels):
        return [f"nanogrpo.extras.lora.nf4_kernels.{kernel}_kernel" for kernel in kernels]

    nf4_reference.nf4_tables(w.device)  # copied once
    readme = (ROOT / "kernels" / "README.md").read_text()

    packed, absmax = nf4_reference.nf4_quantize(w)
    q = Quantized(packed, *nf4_reference.quantize_absmax(absmax), w.shape)
    stored = int((0.5 + 1 / 64 + 4 / 2**14) * n) + 4
    assert stored == sum(t.numel() * t.itemsize for t in q[:4])
    kernels, count, _ = moved(lambda: nf4_kernels.nf4_dequantize(q, torch.bfloat16))
    assert (kernels, count) == (names("dequantize"), stored + tables + 2 * n)
    assert f"| {count / 1e6:.1f} MB |" in readme
    for rows, parts in ((16, 8), (64, 4), (128, 4)):
        x = torch.empty(rows, width, dtype=torch.bfloat16, device="meta")
        kernels, count, _ = moved(lambda x=x: nf4_kernels.nf4_matmul(x, q))
        sums = 2 * 4 * rows * outs * parts  # written and read
        assert kernels == names("matmul", "sum")
        assert count == stored + tables + sums + 2 * rows * (outs + width)
        assert f"| {count / 1e6:.1f} MB |" in readme
