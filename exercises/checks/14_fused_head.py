"""Check exercise 14 against autograd in float64, and count its products and its memory."""

import torch

from exercises.hints import Counted, by_hand, expect, given, matches

START = "Begin with a loop over range(0, len(hidden), chunk) that adds up the loss."
M, D, V, CHUNK = 78, 3, 50, 4


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

    inputs = hidden.clone(), head.clone(), tokens, c.clone()
    with Counted() as counted:
        found = given(by_hand(answer.fused_head, *inputs, CHUNK), "fused_head")
    expect(
        isinstance(found, tuple | list) and len(found) == 3,
        "`fused_head` must return three tensors: the loss, dhidden and dhead.",
    )
    mistakes = {
        "The sign of the loss is wrong.": -right,
        "The loss of a token is multiplied by its c.": -logp.sum(),
        "The last chunk is missing. It has fewer rows, as M is not a multiple of `chunk`.": (
            -(c * logp)[: M // CHUNK * CHUNK].sum()
        ),
    }
    matches("the loss", found[0], right, mistakes)
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
    expect(
        counted.most < M * V,
        f"All three are right, but at one time you hold {counted.most:,} numbers, and all logits"
        f" are {M * V:,}. A chunk has {CHUNK * V}: forget it before the next one.",
    )
    chunks = -(-M // CHUNK)
    expect(
        counted.products == 3 * chunks,
        f"All three are right, but you make {counted.products} matrix products for {chunks} chunks."
        " Three per chunk are enough: logits, dhidden and dhead.",
    )
