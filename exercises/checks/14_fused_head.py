"""Check exercise 14 against autograd in float64, and count its products and its memory."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from exercises.hints import expect, given, matches

START = "Begin with a loop over range(0, len(hidden), chunk) that adds up the loss."
M, D, V, CHUNK = 10, 3, 50, 4


class Seen(TorchDispatchMode):
    """The size of the largest tensor, and the number of matrix products."""

    largest = products = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.products += func.overloadpacket.__name__ in ("mm", "addmm", "bmm", "baddbmm")
        if isinstance(out, torch.Tensor):
            self.largest = max(self.largest, out.numel())
        return out


def check(answer) -> None:
    g = torch.Generator().manual_seed(0)
    hidden, head = (torch.randn(n, D, generator=g, dtype=torch.float64) for n in (M, V))
    tokens = torch.randint(V, (M,), generator=g)
    c = torch.linspace(-1.0, 2.0, M, dtype=torch.float64)
    h, w = hidden.clone().requires_grad_(), head.clone().requires_grad_()
    logp = (h @ w.T).log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    right = -(c * logp).sum()
    dh, dw = torch.autograd.grad(right, (h, w), retain_graph=True)
    last = slice(M // CHUNK * CHUNK, M)
    (dw_last,) = torch.autograd.grad(-(c[last] * logp[last]).sum(), w, retain_graph=True)
    (without_c,) = torch.autograd.grad(-logp.sum(), h, retain_graph=True)
    softmax_only = (c[:, None] * (hidden @ head.T).softmax(-1)) @ head

    with Seen() as seen:
        found = given(
            answer.fused_head(hidden.clone(), head.clone(), tokens, c.clone(), CHUNK), "fused_head"
        )
    expect(
        isinstance(found, tuple | list) and len(found) == 3,
        "`fused_head` must return three tensors: the loss, dhidden and dhead.",
    )
    matches("the loss", found[0], right, {"The sign of the loss is wrong.": -right})
    mistakes = {
        "The sign of dhidden is wrong: dz is c · (p - onehot).": -dh,
        "dz is c · (p - onehot), and the onehot is missing.": softmax_only,
        "dz is c · (p - onehot), and the c is missing.": without_c,
    }
    matches("dhidden", found[1], dh, mistakes)
    mistakes = {
        "dhead is only that of the last chunk: add up all chunks with +=.": dw_last,
        "The sign of dhead is wrong.": -dw,
    }
    matches("dhead", found[2], dw, mistakes)
    allowed = max(CHUNK * V, V * D)
    expect(
        seen.largest <= allowed,
        f"All three are right, but you have made a tensor of {seen.largest} numbers. A chunk of"
        f" logits has {CHUNK * V}, and all logits have {M * V}.",
    )
    chunks = -(-M // CHUNK)
    expect(
        seen.products == 3 * chunks,
        f"All three are right, but you make {seen.products} matrix products for {chunks} chunks."
        " Three per chunk are enough: logits, dhidden and dhead.",
    )
