"""Compute the log-prob of one target per row of logits, the entropy of the row, and their
gradients.

In: logits [N, V] of any float type, targets [N], temperature. Out: vectors [N] in float32 (float64
if the logits are float64, as in tests). Read next: fused_rows.py.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

# Number of logits processed at a time (see `blocks`): 1 MB in float32.
BLOCK = 1 << 18


def accumulate(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which statistics and losses are computed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def blocks(logits: Tensor) -> Iterator[slice]:
    """Yield the rows of logits [N, V] in blocks that fit into the cache of a CPU core.

    A softmax takes about fifteen passes over its rows. If all rows were processed at once, each
    pass would read and write main memory, and a softmax would take six times as long (docs/log.md).
    """
    size = max(1, BLOCK // logits.shape[1])
    return (slice(start, start + size) for start in range(0, len(logits), size))


def log_softmax_forward(
    logits: Tensor, targets: Tensor, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the log-prob of the target [N], the entropy [N] in nats, and (Q, log S) [2, N].

    Q = max_j x_j;  t_j = (x_j - Q) / T;  S = Σ_j e^{t_j};  logp = t_y - log S;
    H = log S - Σ_j e^{t_j} t_j / S.
    The maximum Q is subtracted first, so a row of logits near -10,000 is as exact as one near 0. An
    entry of -inf has probability 0 and adds 0 to H. The backward needs Q and log S.
    """
    # logp, entropy, Q and log S of each row
    out = logits.new_empty(4, len(logits), dtype=accumulate(logits.dtype))
    for rows in blocks(logits):
        x = logits[rows].to(out.dtype)  # [n, V]
        q = x.amax(-1)  # [n]
        t = (x - q[:, None]) / temperature
        e = t.exp()
        # If there is only one long row, torch divides its sum among threads.
        # The order of the sum would then change, which --bitwise does not allow.
        s = e.expand(max(2, len(e)), -1).sum(-1)[: len(e)]  # [n]
        # `where` instead of a product, because 0 · -inf is NaN
        entropy = s.log() - torch.where(e > 0, e * t, 0.0).sum(-1) / s
        logp = t.gather(1, targets[rows, None]).squeeze(1) - s.log()
        out[:, rows] = torch.stack([logp, entropy, q, s.log()])
    return out[0], out[1], out[2:]


def log_softmax_backward_(
    logits: Tensor,
    targets: Tensor,
    temperature: float,
    norm: Tensor,
    entropy: Tensor,
    dlogp: Tensor,
    dentropy: Tensor | None,
    out: Tensor | None = None,
) -> Tensor:
    """Write the gradient of the logits [N, V] to `out`, and return it. By default, it overwrites
    the logits.

    logp = z_y - lse and dlse/dz_j = p_j give dlogp/dz_j = 1[j = y] - p_j. H = -Σ p log p with
    dp_i/dz_j = p_i (1[i = j] - p_j) gives dH/dz_j = -p_j (log p_j + H). dlogits = dz / T.
    """
    out = logits if out is None else out
    for rows in blocks(logits):
        q, log_s = norm[:, rows, None]  # [n, 1] each
        logp_all = (logits[rows].to(norm.dtype) - q) / temperature - log_s  # [n, V]
        p = logp_all.exp()
        dz = -dlogp[rows, None] * p
        if dentropy is not None:
            dp = torch.where(p > 0, p * (logp_all + entropy[rows, None]), 0.0)
            dz -= dentropy[rows, None] * dp
        dz.scatter_add_(1, targets[rows, None], dlogp[rows, None])
        dz /= temperature
        out[rows] = dz
    return out
