"""Strips and pages for the tests of attention, and attention with an explicit mask in float64.

Read next: test_attention.py.
"""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from nanogrpo.model.attention import StripAttention

PAGE = 16


def strip_of(groups: Sequence[Sequence[int]], shared: bool = True) -> StripAttention:
    """Return the strip of groups: the length of a prompt, then of its completions.

    If not shared, each completion starts with a copy of the prompt.
    """
    sees, lengths = [], []
    for prompt, *completions in groups:
        if completions and not shared:
            sees += [0] * len(completions)
            lengths += [prompt + n for n in completions]
        else:
            sees += [0, *[prompt] * len(completions)]
            lengths += [prompt, *completions]
    ends = [0, *itertools.accumulate(lengths)]
    rows, first = [], 0
    for past, own in zip(sees, map(range, ends, ends[1:])):
        first = first if past else own.start
        rows.append([*range(first, first + past), *own])
    tensors = torch.tensor(ends, dtype=torch.int32), torch.tensor([*itertools.chain(*rows)])
    keys = torch.tensor([0, *itertools.accumulate(map(len, rows))], dtype=torch.int32)
    if not any(sees):
        return StripAttention(tensors[0], max(lengths))
    return StripAttention(tensors[0], max(lengths), tensors[1], keys, max(map(len, rows)))


def moved(strip: StripAttention, device: str) -> StripAttention:
    """Move the tensors of a strip to a device, and return the strip."""
    for name, x in vars(strip).items():
        setattr(strip, name, x.to(device) if isinstance(x, Tensor) else x)
    return strip


def pages_of(past: Sequence[Tensor], generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return the pages of rows with these keys and values [2, n, K, E], in a random order.

    Returns a table, with two rows more than are decoded, and pages [2, P, K, PAGE, E]. The pages
    have NaN wherever no token is, and a place for the newest token of each row.
    """
    used = [x.shape[1] // PAGE + 1 for x in past]
    order = (1 + torch.randperm(sum(used), generator=generator)).split(used)
    table = torch.zeros(len(past) + 2, max(used) + 1, dtype=torch.int32)
    _, _, K, E = past[0].shape
    pages = torch.full((2, 1 + sum(used), K, PAGE, E), torch.nan)
    for row, mine in enumerate(order):
        table[row, : len(mine)] = mine
        for i, token in enumerate(past[row].unbind(1)):
            pages[:, mine[i // PAGE], :, i % PAGE] = token
    return table, pages


def visible(strip: StripAttention, window: int = 0) -> Tensor:
    """Return which keys each query sees, [T, T] bool."""
    ends = strip.cu_seqlens.tolist()
    mask = torch.zeros(ends[-1], ends[-1], dtype=torch.bool)
    at = strip.bounds.cu_k.tolist()
    for n, (first, end) in enumerate(itertools.pairwise(ends)):
        rows = range(first, end) if strip.kv_rows is None else strip.kv_rows[at[n] : at[n + 1]]
        for i, key in itertools.product(range(first, end), range(len(rows))):
            age = i - first + len(rows) - (end - first) - key  # 0: the query's own token
            mask[i, rows[key]] = 0 <= age < (window or len(mask)) or not strip.causal
    return mask


def products(q: Tensor, k: Tensor) -> Tensor:
    """Return the products of queries [Tq, H, E] and keys [Tk, K, E], [H, Tq, Tk]."""
    return torch.einsum("qhe,khe->hqk", q, k.repeat_interleave(q.shape[1] // k.shape[1], 1))


def part(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return outputs [Tq, H, E] and log-sum-exps [H, Tq]. A query without keys gets 0 and -inf,
    as in flash-attn 4.
    """
    x = products(q, k) / q.shape[2] ** 0.5
    lse = x.masked_fill(~mask, -1e30).logsumexp(2)
    weights = (x - lse[..., None]).masked_fill(~mask, -torch.inf).exp()
    v = v.repeat_interleave(q.shape[1] // v.shape[1], 1)
    return torch.einsum("hqk,khe->qhe", weights, v), lse.where(mask.any(1), -torch.inf)


def exact(
    q: Tensor, k: Tensor, v: Tensor, dy: Tensor, strip: StripAttention, window: int = 0
) -> list[Tensor]:
    """Return output and gradients in float64."""
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    out, _ = part(*wide, visible(strip, window).to(q.device))
    return [out.detach(), *torch.autograd.grad(out, wide, dy.double())]


def draw(strip: StripAttention, H: int, K: int, E: int) -> list[Tensor]:
    """Return q, k, v and the gradient of the output."""
    g = torch.Generator().manual_seed(0)
    count = int(strip.cu_seqlens[-1])
    return [torch.randn(count, heads, E, generator=g) for heads in (H, K, K, H)]
