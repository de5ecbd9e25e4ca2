"""The exact functions of kernels/exact.py and kernels/triton/exact.py: right, and the same bits for
a row in every batch.

Triton's kernels run in its interpreter where there is no GPU. Read next:
tests/engine/test_bitwise.py.
"""

import functools

import numpy as np
import pytest
import torch
from nanogrpo.kernels.triton import exact as triton

from nanogrpo.extras import head_dtype
from nanogrpo.extras.bitwise import paged_attention, strip_attention
from nanogrpo.kernels import exact, reference
from tests.conftest import DEVICE
from tests.kernels.masks import draw, moved, pages_of, strip_of
from tests.kernels.masks import exact as equation

BOTH = pytest.mark.parametrize("how", [exact, triton], ids=["cpu", "triton"])
PROMPT, LENGTHS = 35, (1, 17, 40)  # one prompt, and its completions


@pytest.fixture(autouse=True)
def all_rows_of_a_tile_are_added_up_in_one_order(monkeypatch):
    """Let Triton's interpreter multiply tiles as a GPU does. Its BLAS library may add up the rows
    of a tile in several orders: OpenBLAS does on an AMD processor without AVX-512.
    """

    def matmul(a: np.ndarray, b: np.ndarray, dtype: np.dtype) -> np.ndarray:
        return (a[:, :, None].astype(dtype) * b).sum(1)

    monkeypatch.setattr(np, "matmul", matmul)


@BOTH
@pytest.mark.parametrize(("K", "M"), [(96, 700), (40, 130)])
def test_a_row_of_a_product_has_the_same_bits_in_every_batch(how, K, M):
    g = torch.Generator().manual_seed(0)
    a, b = torch.randn(70, K, generator=g), torch.randn(M, K, generator=g)
    wide = functools.partial(head_dtype.product, of=how.product)
    for product, dtype in ((how.product, torch.float32), (wide, torch.bfloat16)):
        x, y = a.to(DEVICE, dtype), b.to(DEVICE, dtype)
        whole = product(x, y)  # float32
        torch.testing.assert_close(whole.double(), x.double() @ y.double().T, rtol=0, atol=2e-5)
        for rows in ([3], [69, 0], range(7), torch.randperm(70, generator=g)[:65]):
            rows = torch.as_tensor(rows, device=DEVICE)
            assert torch.equal(product(x[rows], y), whole[rows])
    assert how.product(a[:0].to(DEVICE), b.to(DEVICE)).shape == (0, M)


def test_a_long_row_has_the_same_log_prob_alone_also_with_two_threads():
    g, threads = torch.Generator().manual_seed(0), torch.get_num_threads()
    z, ids = 6 * torch.randn(100, 49_152, generator=g), torch.arange(100)
    torch.set_num_threads(2)
    try:
        whole = reference.log_softmax_forward(z, ids, 1.0)[0]
        alone = [reference.log_softmax_forward(z[i, None], ids[i, None], 1.0)[0] for i in ids]
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(torch.cat(alone), whole)


@BOTH
@pytest.mark.parametrize(("H", "K", "E"), [(4, 2, 16), (3, 1, 24)])
def test_a_query_has_the_same_bits_in_a_strip_and_in_the_cache(how, H, K, E):
    strip = strip_of([[PROMPT, *LENGTHS]])
    q, k, v, dy = draw(strip, H, K, E)
    expected = equation(q, k, v, dy, strip)[0]
    kv = strip.kv_rows.split(strip.bounds.cu_k.diff().tolist())  # all see the prompt
    on = [x.to(DEVICE) for x in (q, k, v)]
    y = strip_attention(how.attend, *on, moved(strip, DEVICE)).cpu()
    torch.testing.assert_close(y.double(), expected, rtol=0, atol=2e-6)
    # each completion in a strip of its own, with a copy of the prompt
    for rows in kv:
        alone = moved(strip_of([[len(rows)]]), DEVICE)
        again = strip_attention(how.attend, *(x[rows].contiguous() for x in on), alone).cpu()
        assert torch.equal(again, y[rows])
    # the last token of each sequence, in a decode step
    past = [torch.stack((k[rows[:-1]], v[rows[:-1]])) for rows in kv]
    table, pages = pages_of(past, torch.Generator().manual_seed(0))
    last = torch.stack([rows[-1] for rows in kv])
    where = torch.tensor([len(rows) - 1 for rows in kv]), table, *pages
    one = torch.ones(len(last), 1, E, device=DEVICE)
    rotation = None, None, one, 0 * one, 1e-6
    newest = (x[last] for x in on)
    got = paged_attention(how.attend, *newest, rotation, *(x.to(DEVICE) for x in where))
    assert torch.equal(got.cpu(), y[last])
