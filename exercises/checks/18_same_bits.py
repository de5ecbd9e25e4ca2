"""Check exercise 18: the bits of each row in batches of several sizes, and its sum in float64."""

import torch
from torch import Tensor

from exercises import library
from exercises.hints import Counted, expect, given, tensor

START = "Begin with one call of `matmul` for each tile of a.split(ROWS), and look at the last tile."
N, K, M, HARD = 200, 96, 50, 3
ORDER = (
    "The library chooses the order of its sums by the number of rows, so always call it with the"
    " same number"
)


def check(answer) -> None:
    g = torch.Generator().manual_seed(0)
    a, b = torch.randn(N, K, generator=g), torch.randn(M, K, generator=g)
    # In one row, two large terms cancel. Even in float64, its sum depends on the order.
    a[HARD, 0], a[HARD, K - 1] = 2.0**40, -(2.0**40)
    b[:, K - 1] = b[:, 0]

    def product(rows: Tensor) -> tuple[Tensor, int]:
        """Return the answer's product, and the number of matrix products that it has used."""
        library.calls.clear()
        with Counted() as counted:
            found = given(answer.product(rows.clone(), b.clone()), "product")
        tensor(found, "product", (len(rows), M))  # checks the shape
        expect(found.dtype == torch.float32, f"The result is {found.dtype}: return float32.")
        return found, len(library.calls) + counted.products

    whole, count = product(a)
    calls = list(library.calls)
    expect(
        count <= N / 16,
        f"There are {count} calls of `matmul` for {N} rows, and each call reads all of b. With"
        f" tiles of 64 rows, {-(-N // 64)} calls are enough.",
    )
    easy = torch.arange(N) != HARD
    coarse = [whole.bfloat16().float(), whole.half().float()]
    coarse += [whole.round(decimals=decimals) for decimals in range(6)]
    expect(
        not any(torch.equal(whole[easy], rounded[easy]) for rounded in coarse),
        "You round the result. Two sums that differ in the last bit may lie on two sides of a"
        " boundary, and then rounding makes their difference larger. Keep the order of the sum"
        " fixed instead.",
    )
    wanted = a.double() @ b.double().T
    error = (whole.double() - wanted).abs()[easy].max()
    expect(
        error < 1e-4,
        f"The result differs from a bᵀ by up to {error:.2g}: add up all K products a[i, k] ·"
        " b[j, k] of each row.",
    )
    batches = [[0], [HARD], [HARD, 0], [199, 7], range(7), range(64), range(100, 164)]
    batches += [torch.randperm(N, generator=g)[:size].tolist() for size in (65, 128, N)]
    for each in batches:
        rows = torch.tensor(each)
        found, _ = product(a[rows])
        expect(torch.equal(found, whole[rows]), hint(len(rows), calls + library.calls, len(calls)))
    others = torch.randn(N, K, generator=g).index_copy(0, torch.tensor([5]), a[5, None])
    expect(
        torch.equal(product(others)[0][5], whole[5]),
        "The bits of a row change if the other rows of the batch have other numbers.",
    )


def hint(rows: int, calls: list[tuple[int, torch.dtype]], first: int) -> str:
    """Return the hint if the bits of some rows differ from those in the whole batch.

    calls: the calls for the whole batch, which are the first ones, and for the smaller batch.
    """
    differ = f"A row has other bits in a batch of {rows} than in a batch of {N}."
    sizes = sorted({size for size, _ in calls})
    if any(dtype == torch.float64 for _, dtype in calls) and len(sizes) > 1:
        return (
            "In float64, most differences vanish when you round to float32, but not all: here, two"
            f" large terms of a row cancel. {ORDER}, in float32."
        )
    if calls[:first] == [(N, torch.float32)]:
        return f"{differ} {ORDER}."
    if len(sizes) > 1 and sizes[-1] > 2 * 64:
        return (
            f"You fill up the batch, but call the library with {sizes[-1]} rows or with {sizes[0]}."
            f" {ORDER}: divide the batch into tiles."
        )
    if len(sizes) > 1:
        return (
            f"You call the library with {sizes[-1]} rows, and for the last tile with {sizes[0]}."
            f" {ORDER}: fill up the last tile with rows of zeros."
        )
    return (
        f"{differ} Either your code reads other rows, or you use functions of torch, which choose"
        " the order of a sum by the shape of a tensor: give them a shape that is always the same."
    )
