"""Check exercise 12 against `log_softmax_forward` in float64."""

from collections.abc import Iterator

import torch
from torch import Tensor

from exercises.hints import Counted, Hint, expect, given, matches
from nanogrpo.kernels import reference

START = "Begin with q = -inf and l = s = 0, and look at the first block: q_new = max(q, z.max())."


def blocks_of(row: Tensor, size: int) -> Iterator[Tensor]:
    """Yield the blocks of a row in the same memory."""
    block = torch.empty(size, dtype=row.dtype)
    for part in row.split(size):
        yield block.copy_(part)


def check(answer) -> None:
    g = torch.Generator().manual_seed(0)
    rising = torch.randn(160, generator=g, dtype=torch.float64) + torch.arange(160) / 40
    rows = {
        "small": rising,
        "large": rising + 1000.0,
        "low": rising - 1000.0,
        "falling": rising - 1000.0 * torch.arange(160).div(80, rounding_mode="floor"),
    }
    for name, row in rows.items():
        logp, H, _ = reference.log_softmax_forward(row[None], torch.tensor([0]), 1.0)
        lse, H = row[0] - logp[0], H[0]
        with Counted() as counted:
            result = given(answer.statistics(blocks_of(row, 4)), "statistics")
        expect(
            isinstance(result, tuple | list) and len(result) == 2,
            "`statistics` must return two numbers: lse and H.",
        )
        if name != "small" and not all(torch.as_tensor(x).isfinite() for x in result):
            raise Hint(
                "With logits around 1000 or -1000, something overflows or becomes 0. Take exp only"
                " of z - q, where q is the largest logit of all blocks so far."
            )
        # mistakes: nothing rescaled, only l rescaled, kept blocks, the last block only, upside down
        q, l, s, s_old = torch.tensor(-torch.inf, dtype=torch.float64), 0.0, 0.0, 0.0
        plain = 0.0
        for z in row.split(4):
            top = torch.maximum(q, z.max())
            old, e = (q - top).exp(), (z - top).exp()
            plain, l = plain + e.sum(), l * old + e.sum()
            s, s_old = s * old + (e * z).sum(), s_old + (e * z).sum()
            q = top
        last = row[-4:]
        wrong = {
            "At the first block q rises from -inf, so rescale by e^(q_old - q_new), and not by"
            " e^(q_new - q_old).": q * torch.nan,
            "l is not rescaled. When q rises, what was summed before must be multiplied by"
            " e^(q_old - q_new).": q + plain.log(),
            "You have kept the blocks. Each one is overwritten by the next, so you see the last one"
            " several times. Update q, l and s instead.": last.repeat(40).logsumexp(0),
            "This is only the last block.": last.logsumexp(0),
            "This is log l. Add q to it.": l.log(),
        }
        matches("lse", result[0], lse, wrong, "Rescale, then add the new block.", 1e-9)
        wrong = {
            "s is not rescaled. It is relative to q, as l is.": lse - s_old / l,
            "The sign of the entropy is wrong: H = lse - s/l.": s / l - lse,
            "This is s/l, the mean logit. H = lse - s/l.": s / l,
        }
        matches("H", result[1], H, wrong, "H = lse - s/l.", 1e-9)
        expect(
            counted.most < 80,
            f"Both are right, but at one time you hold {counted.most} numbers. Keep q, l and s from"
            " block to block, and nothing else.",
        )
