"""Exercise 18: the same bits in every batch.

Float addition is not associative: in float32, (1e8 + 1) - 1e8 is 0, but (1e8 - 1e8) + 1 is 1. A
library chooses the order of a sum by the shape of the matrices. So the engine, which decodes a few
rows, and the trainer, which computes thousands of rows, get different bits for the same token. The
policy that samples is then not exactly the policy that is trained.

`matmul(a, b)` in exercises/library.py is such a library. It returns a bᵀ, and divides the sum over
K into 8, 4, 2 or 1 parts. The number of parts depends on the number of rows of a. Try it:

    >>> import torch; from exercises.library import matmul
    >>> a, b = torch.randn(64, 96), torch.randn(50, 96)
    >>> (matmul(a[:1], b) == matmul(a, b)[:1]).all()        # False

Write `product` with the help of `matmul`, without changing the library. All bits of a row of the
result must depend only on this row of a and on b, and neither on the number of rows nor on the
other rows. A call of `matmul` reads all of b, which takes long, so a call for each row is too slow.

    python -m exercises.check 18
"""

from torch import Tensor

from exercises.library import matmul

ROWS = 64


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return a bᵀ: [N, K], [M, K] → [N, M], in float32."""
    ...
