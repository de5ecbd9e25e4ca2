"""Check exercise 15 against `rms_norm`."""

import ast
import inspect
import os
import textwrap

import torch

from exercises.hints import NotYet, expect, matches
from nanogrpo.kernels import reference

START = (
    "Begin with row = tl.program_id(0) and j = tl.arange(0, BLOCK); the row's numbers are at"
    " X + row * D + j."
)
T, D, BLOCK, EPS = 3, 100, 128, 0.1


def check_masks(kernel) -> None:
    """Read the code: the interpreter returns 0 where a load has a mask and no `other`, and a load
    of W without a mask changes no result.
    """
    source = textwrap.dedent(inspect.getsource(kernel.fn))
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    for call in calls:
        name, names = ast.unparse(call.func), {keyword.arg for keyword in call.keywords}
        positions = {"tl.load": 1, "tl.store": 2}.get(name)  # of the mask, if it has no name
        if positions is None:
            continue
        expect(
            "mask" in names or len(call.args) > positions,
            f"`{ast.unparse(call)}` has no mask, so it goes beyond the D numbers: add mask=j < D.",
        )
        defined = "other" in names or len(call.args) > 2 or "tl.where" in source
        expect(
            name == "tl.store" or defined or "W" in ast.unparse(call.args[0]),
            f"y is right here, but where the mask of `{ast.unparse(call)}` is False, a GPU may"
            " return anything, and you add it up: use other=0.0.",
        )


def check(answer) -> None:
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    device = "cpu" if interpreted or not torch.cuda.is_available() else "cuda"
    g = torch.Generator().manual_seed(0)
    # with other numbers behind the rows and the weight, which a kernel without masks would read
    X, W = torch.full((T + 2, D), 9.0), torch.full((2 * BLOCK,), 9.0)
    X[:T], W[:D] = torch.randn(T, D, generator=g), torch.randn(D, generator=g)
    Y = torch.full((T + 2, D), torch.nan)
    X, W, Y = X.to(device), W.to(device), Y.to(device)
    answer.norm_kernel[(T,)](X, W, Y, D, EPS, BLOCK=BLOCK)
    x, w, y = X[:T], W[:D], Y[:T]
    if Y.isnan().all():
        raise NotYet("`norm_kernel` stores nothing yet")
    expect(
        Y[T:].isnan().all(),
        "The kernel writes past the end of the last row: its store needs the mask j < D.",
    )
    squares = x.square()
    beyond = X.flatten()[: T * D + BLOCK].unfold(0, BLOCK, D)[:T]  # [T, BLOCK]

    def by(mean_square, weight=w):
        return x * torch.rsqrt(mean_square) * weight

    mean = squares.mean(1, keepdim=True)
    mistakes = {
        "The mean is over BLOCK numbers. The row has only D: divide by D.": (
            by(squares.sum(1, keepdim=True) / BLOCK + EPS)
        ),
        "The load of x has no mask, so the next row is part of the sum: mask=j < D, other=0.0.": (
            by(beyond.square().sum(1, keepdim=True) / D + EPS)
        ),
        "eps is missing: a row of zeros would give NaN.": by(mean),
        "The weight is missing.": by(mean + EPS, torch.ones_like(w)),
        "This is the sum of squares: divide it by D.": by(squares.sum(1, keepdim=True) + EPS),
        "eps is added after the root. It belongs to the mean of the squares.": (
            x / (mean.sqrt() + EPS) * w
        ),
        "The square root is missing.": x / (mean + EPS) * w,
        "Each program computes row 0. Row `row` begins at X + row * D.": (
            by(mean + EPS)[:1].expand(T, D)
        ),
    }
    expect(not y.isnan().any(), "Some numbers of y are never stored, or are NaN.")
    matches("y", y, reference.rms_norm(x, w, EPS), mistakes, tolerance=1e-5)
    check_masks(answer.norm_kernel)
