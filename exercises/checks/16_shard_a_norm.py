"""Check exercise 16 on four ranks, against the norm of the full gradient in float64."""

import torch

from exercises.hints import Hint, expect, given, matches
from exercises.ranks import on_ranks

START = "Begin on one rank: the sum of shard.square().sum() over its shards, or 0 without shards."


def check(answer) -> None:
    g = torch.Generator().manual_seed(0)
    full = [torch.randn(n, 3, generator=g, dtype=torch.float64) for n in (9, 4)]
    # the last rank has no shards
    shards = [[full[0][:5]], [full[0][5:], full[1][:1]], [full[1][1:]], []]
    sent: list = []

    def work(rank, gather):
        def counted(value):
            sent.append(torch.as_tensor(value).numel() if not isinstance(value, list) else 99)
            return gather(value)

        return answer.global_norm([x.clone() for x in shards[rank]], counted)

    def alone(value):
        return [value]

    answer.global_norm([x.clone() for x in full], alone)
    try:
        answer.global_norm([], alone)
    except (RuntimeError, ValueError, IndexError, TypeError) as e:
        what = f"{type(e).__name__}: {e}".partition("\n")[0].rstrip(".")
        raise Hint(f"A rank without shards raises {what}. Its sum of squares is 0.") from e

    results = [float(given(x, "global_norm")) for x in on_ranks(len(shards), work)]
    flat = torch.cat([x.flatten() for x in full])
    right = flat.norm()
    each = torch.stack([sum((x.square().sum() for x in mine), right * 0).sqrt() for mine in shards])
    expect(
        len({round(x, 9) for x in results}) == 1,
        f"The ranks have different norms: {', '.join(f'{x:.4g}' for x in results)}. Each must"
        " combine the numbers of all ranks, which `gather` returns.",
    )
    mistakes = {
        "Norms do not add up, but their squares do: send the squares, and take the root last.": (
            each.sum()
        ),
        "The sum of squares is right. Take its root.": right**2,
        "This is the largest norm of a rank.": each.max(),
        "This is a mean over the ranks. Shards are parts of one vector: add them up.": (
            right / len(shards) ** 0.5
        ),
        "This is the mean of the norms. Add up their squares, and take the root last.": each.mean(),
        "The ranks are combined well, but the shards of one rank are not: add up their squares.": (
            torch.stack([sum((x.norm() for x in mine), right * 0) for mine in shards]).norm()
        ),
    }
    matches("global_norm", torch.tensor(results[0], dtype=torch.float64), right, mistakes)
    expect(
        max(sent, default=0) <= 1,
        "The norm is right, but a rank sends more than one number. Its sum of squares is enough.",
    )
    expect(
        len(sent) <= len(shards),
        "The norm is right, but each rank calls `gather` several times. Once is enough.",
    )
