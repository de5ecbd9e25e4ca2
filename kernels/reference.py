"""The GRPO loss, the log-softmax and the elementwise parts of a decoder block in plain PyTorch: the
code that runs on a CPU, and the results that kernels must match.

In: logits [N, V] or per-token vectors [M], any float type. Out: float32 (float64 for float64
inputs, which finite differences need). The functions of a block keep the dtype of their input.

**Start with `policy_terms`.** It is the loss of the default run: the ratio, clip and KL of each
token, with each equation above the line that computes it. On a CPU, exactly this function runs,
three calls below train.py:

    objective (nanogrpo/grpo/loss.py)       picks the vectors of the batch and the constants
    └─ head_policy_loss (model/head.py)     multiplies hidden states by the output head, in chunks
       └─ policy_rows_ (below)              turns a chunk of logits into log-probs and gradients
          └─ policy_terms (below)           the loss of each token, and its derivative

On a GPU, Triton kernels take the place of the last two. They have the same names and arguments,
and fused.py lists them:

| here | kernel |
|---|---|
| `log_softmax_forward`, `log_softmax_backward_` | log_softmax.py |
| `policy_forward`, and `policy_terms` for one token | policy.py |
| `policy_rows_` | fused_rows.py |
| `rms_norm`, `add_rms_norm` | norm.py |
| `norm_rope` | rope.py |
| `swiglu` | swiglu.py |
| `gather_rows` | gather.py |
| `paged_attention` | paged.py |
| `sample_tokens` | sample.py |
| `nf4_quantize`, `nf4_dequantize`, `nf4_matmul` | nf4.py |

Derivatives of the loss are written out and not left to autograd, because they specify the kernels
and because the fused head needs them during its forward pass. tests/model/test_head.py checks them
against autograd and finite differences. Read next: log_softmax.py.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

# Log-ratios are clamped here before exp. e^20 and its square are finite in float32.
LOG_RATIO_MAX = 20.0
# Number of logits that are processed at a time, 1 MB in float32: see `blocks`.
BLOCK = 1 << 18


class Objective(NamedTuple):
    """The constants of the loss."""

    epsilon: float
    epsilon_high: float
    delta: float = math.inf  # upper bound of the ratio, for either sign of the advantage
    beta: float = 0.0  # factor of the KL
    bias_correction: bool = True  # True: KL = ratio · k3, differentiated through both; False: k3


class LossInputs(NamedTuple):
    """The per-token vectors of the loss, all [M] float32."""

    advantage: Tensor
    weight: Tensor  # mask × normalizer, fixed before the forward pass
    old_logp: Tensor | None = None  # None: on policy, the ratio is 1
    ref_logp: Tensor | None = None  # None: no KL
    importance: Tensor | None = None  # multiplies the clipped term, never the KL
    entropy_weight: Tensor | None = None  # None: no entropy bonus

    def map(self, function: Callable[[Tensor], Tensor]) -> LossInputs:
        """Apply a function to every vector that is not None."""
        return LossInputs._make(None if v is None else function(v) for v in self)

    def at(self, index: Tensor) -> LossInputs:
        """Return the vectors of the tokens in `index`."""
        return self.map(lambda v: v[index])


def accumulate(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which statistics and losses are computed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


# --- the loss of a token ---


def exp(log_ratio: Tensor) -> Tensor:
    """Return e^x with x clamped to ±20."""
    return log_ratio.clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX).exp()


def k3(x: Tensor) -> Tensor:
    """Return e^x - x - 1 with x clamped to ±20: never negative, and 0 where x = 0.

    expm1 keeps its precision near 0, where e^x - x - 1 would suffer from cancellation.
    """
    x = x.clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX)
    return torch.expm1(x) - x


def clipped(ratio: Tensor, advantage: Tensor, o: Objective) -> tuple[Tensor, Tensor, Tensor]:
    """PPO's clipped surrogate: l = -min(min(r, δ)·A, clamp(r, 1 - ε, 1 + ε_high)·A).

    Schulman et al. 2017 (1707.06347), equation 7; ε_high: DAPO (2503.14476); δ: INTELLECT-2
    (2505.07291). Returns l, whether l is constant in r (its gradient is zero there), and the clip
    flag: int8, -1 below 1 - ε with A < 0, +1 above 1 + ε_high with A > 0, else 0.
    """
    low, high = 1.0 - o.epsilon, 1.0 + o.epsilon_high
    capped = ratio.clamp(max=o.delta)
    free, held = capped * advantage, ratio.clamp(low, high) * advantage
    constant = torch.where(free < held, ratio > o.delta, (ratio < low) | (ratio > high))
    too_high, too_low = (capped > high) & (advantage > 0), (capped < low) & (advantage < 0)
    return -torch.minimum(free, held), constant, too_high.to(torch.int8) - too_low.to(torch.int8)


def policy_terms(
    logp: Tensor, inputs: LossInputs, o: Objective
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return for each token the loss l, dl/dlogp, the clip flag (int8) and the KL (or None).

    l = -min(min(r, δ)·A, clamp(r, 1 - ε, 1 + ε_high)·A) · importance + β · KL. A NaN log-prob gives
    a NaN loss and gradient, so the trainer notices it. To this end, every comparison below tests
    for the case in which the derivative is zero, and NaN fails such a test.
    """
    # ratio: r = π(token) / π_old(token) = exp(logp - old_logp), so dr/dlogp = r, or 0 if clamped
    log_ratio = torch.zeros_like(logp) if inputs.old_logp is None else logp - inputs.old_logp
    ratio = exp(log_ratio)
    dratio = torch.where(log_ratio.abs() > LOG_RATIO_MAX, 0.0, ratio)

    # clip: l = -min(min(r, δ)·A, clamp(r, 1 - ε, 1 + ε_high)·A), so dl/dr = -A, or 0 if clipped
    l, constant, clip = clipped(ratio, inputs.advantage, o)
    dl = -torch.where(constant, 0.0, dratio * inputs.advantage)
    if inputs.importance is not None:
        l, dl = l * inputs.importance, dl * inputs.importance
    if inputs.ref_logp is None:
        return l, dl, clip, None

    # KL: k3 = e^x - x - 1 with x = ref_logp - logp, so dk3/dlogp = 1 - e^x
    x = inputs.ref_logp - logp
    kl, dkl = k3(x), torch.where(x.abs() > LOG_RATIO_MAX, 0.0, -torch.expm1(x))
    if o.bias_correction:  # KL = r·k3, so dKL = r·dk3 + dr·k3
        kl, dkl = ratio * kl, ratio * dkl + dratio * kl
    if o.beta != 0.0:  # l + β·KL
        l, dl = l + o.beta * kl, dl + o.beta * dkl
    return l, dl, clip, kl


def policy_forward(
    logp: Tensor, inputs: LossInputs, o: Objective
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the loss Σ weight · l [], dloss/dlogp [M], the clip flags [M] and the KL [M] or None.

    For tokens with weight 0 all results are zero, even if their inputs are NaN.
    """
    l, dl, clip, kl = policy_terms(logp, inputs, o)
    on = inputs.weight != 0
    # `where` instead of a product: NaN · 0 is NaN
    l, dl, clip = (torch.where(on, x, 0) for x in (l, dl, clip))
    kl = None if kl is None else torch.where(on, kl, 0.0)
    return (l * inputs.weight).sum(), dl * inputs.weight, clip, kl


# --- the log-softmax of a row of logits ---


def blocks(logits: Tensor) -> Iterator[slice]:
    """Yield the rows of logits [N, V] in blocks that fit into the cache of a CPU core.

    A softmax makes about fifteen passes over its rows. If all rows were processed at once, each
    pass would read and write main memory, which took six times as long (docs/log.md).
    """
    size = max(1, BLOCK // max(1, logits.shape[1]))
    return (slice(start, start + size) for start in range(0, len(logits), size))


def log_softmax_forward(
    logits: Tensor, targets: Tensor, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the log-prob of the target [N], the entropy [N] in nats, and (Q, log S) [2, N].

    Q = max_j x_j;  t_j = (x_j - Q) / T;  S = Σ_j e^{t_j};  logp = t_y - log S;
    H = log S - Σ_j e^{t_j} t_j / S.
    Everything is relative to Q, so a row of logits around -10,000 is as exact as one around 0. An
    entry of -inf has probability 0 and adds 0 to H. (Q, log S) is what the backward needs.
    """
    # logp, entropy, Q and log S of each row
    out = logits.new_empty(4, len(logits), dtype=accumulate(logits.dtype))
    for rows in blocks(logits):
        x = logits[rows].to(out.dtype)  # [n, V]
        q = x.amax(-1) if x.numel() else x.new_zeros(x.shape[0])  # [n]
        t = (x - q[:, None]) / temperature
        e = t.exp()
        s = e.sum(-1)  # [n]
        # `where` instead of a product: 0 · -inf is NaN
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
) -> Tensor:
    """Overwrite the logits [N, V] with their gradient, and return them.

    logp = z_y - lse and dlse/dz_j = p_j give dlogp/dz_j = 1[j = y] - p_j. H = -Σ p log p with
    dp_i/dz_j = p_i (1[i = j] - p_j) gives dH/dz_j = -p_j (log p_j + H). dlogits = dz / T.
    """
    for rows in blocks(logits):
        x, (q, log_s) = logits[rows], norm[:, rows, None]  # [n, V], [n, 1] each
        logp_all = (x.to(norm.dtype) - q) / temperature - log_s
        p = logp_all.exp()
        dz = -dlogp[rows, None] * p
        if dentropy is not None:
            dp = torch.where(p > 0, p * (logp_all + entropy[rows, None]), 0.0)
            dz -= dentropy[rows, None] * dp
        dz.scatter_add_(1, targets[rows, None], dlogp[rows, None])
        dz /= temperature
        x.copy_(dz)
    return logits


def policy_rows_(
    logits: Tensor, targets: Tensor, temperature: float, inputs: LossInputs, o: Objective
) -> tuple[Tensor, Tensor]:
    """Return log-prob and entropy [N]; overwrite the logits [N, V] with the gradient of the loss.

    loss = Σ weight · l - entropy_weight · H. A row whose weight is 0 must still be finite. Rows
    whose weight and entropy_weight are both 0 never reach this function: head.py skips them.
    """
    logp, entropy, norm = log_softmax_forward(logits, targets, temperature)
    _, dl, _, _ = policy_terms(logp, inputs, o)
    dlogp = torch.where(inputs.weight != 0, inputs.weight * dl, 0.0)
    dentropy = None if inputs.entropy_weight is None else -inputs.entropy_weight
    log_softmax_backward_(logits, targets, temperature, norm, entropy, dlogp, dentropy)
    return logp, entropy


# --- the elementwise parts of a decoder block ---


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / √(mean(x²) + ε) · weight for the rows of x [T, D] (Zhang and Sennrich 2019)."""
    return F.rms_norm(x, weight.shape, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the norm of x + residual, and x + residual, which is the next residual [T, D]."""
    total = residual + x
    return rms_norm(total, weight, eps), total


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary position embedding (Su et al. 2021). It pairs dimensions i and i + E/2, as
    Hugging Face does.

    x: [T, heads, E]; cos, sin: [T, 1, E] float32. The computation is at least in float32, and the
    result has x's dtype.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    a, b = wide.chunk(2, dim=-1)
    return (wide * cos + torch.cat((-b, a), dim=-1) * sin).to(x.dtype)


def norm_rope(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Return q [T, H, E] and k [T, K, E], each head normalized and rotated.

    Without a norm, as in all models but Qwen3, the weights [E] are None.
    """
    if q_weight is not None and k_weight is not None:
        q, k = rms_norm(q, q_weight, eps), rms_norm(k, k_weight, eps)
    return rotate(q, cos, sin), rotate(k, cos, sin)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) · up [T, F] (Shazeer 2020)."""
    return F.silu(gate) * up


# How `gather_rows` sums gradients: see gather.py. The code below does not need it.
Order = tuple[Tensor, Tensor] | None


def row_order(index: Tensor, count: int) -> Order:
    return None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, index):
        ctx.save_for_backward(index)
        ctx.count = len(x)
        return x.index_select(0, index)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        (index,) = ctx.saved_tensors
        total = torch.zeros(ctx.count, *dy.shape[1:], dtype=accumulate(dy.dtype), device=dy.device)
        return total.index_add_(0, index, dy.to(total.dtype)).to(dy.dtype), None


def gather_rows(x: Tensor, index: Tensor, order: Order = None) -> Tensor:
    """Return x[index] [n, …]. The gradients of a row that is gathered several times are added in
    float32.
    """
    return _Gather.apply(x, index)


# --- decoding ---


def paged_attention(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, table: Tensor, keys: Tensor, values: Tensor
) -> Tensor:
    """Write k and v [b, K, E] to the pages of b rows, and return what q [b, H, E] attends to.

    positions [b] int64; table [B, pages of a row] int32; keys and values [pages, K, PAGE, E]. The
    key of row r goes to place positions[r] % PAGE of page table[r, positions[r] // PAGE].
    """
    (b, K), size = k.shape[:2], keys.shape[2]
    pages = table[:b].long()  # [b, pages of a row]
    newest = pages.gather(1, positions[:, None] // size)[:, 0]  # [b]
    keys[newest, :, positions % size] = k
    values[newest, :, positions % size] = v
    columns = torch.arange(pages.shape[1] * size, device=q.device)
    seen = (columns <= positions[:, None])[:, None]  # [b, 1, S]
    # zeros, because a NaN that is left in a page would spread
    k, v = (
        x[pages].transpose(1, 2).flatten(2, 3).masked_fill(~seen[..., None], 0.0)  # [b, K, S, E]
        for x in (keys, values)
    )
    q = q.unflatten(1, (K, -1))  # [b, K, H/K, E]
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None])
    return out.flatten(1, 2)


# The constants of SplitMix64 as signed 64-bit integers (0x9E3779B97F4A7C15 and so on).
GAMMA, MIX_1, MIX_2 = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15


def uniform(key: Tensor, counter: Tensor) -> Tensor:
    """Hash key and counter, [b] int64 each, to [b] float64 in [0, 1), in multiples of 2⁻⁵³.

    This is SplitMix64 (Steele, Lea and Flood 2014). In + and ·, int64 overflows in the same way as
    uint64. Its right shift copies the sign bit, so a mask turns it into a logical shift.
    """

    def xor_shift(z: Tensor, n: int) -> Tensor:
        return z ^ ((z >> n) & ((1 << (64 - n)) - 1))

    z = xor_shift(key + (counter + 1) * GAMMA, 30) * MIX_1
    z = xor_shift(z, 27) * MIX_2
    return ((xor_shift(z, 31) >> 11) & ((1 << 53) - 1)).double() * 2.0**-53


def sample_tokens(
    logits: Tensor, key: Tensor, counter: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Sample a token [b] int64 from softmax(logits / temperature) for each row of logits [b, V].
    Return it with its log-prob [b] float32. key and counter: [b] int64.

    The inverse CDF needs one uniform random number per token, while the Gumbel trick needs V. The
    CDF is summed in fixed point (2⁻⁴⁰), and integer sums are exact in any order. So on every device
    the CDF increases only where a probability is positive: neither a token of probability 0 nor an
    index past the end can be sampled, however close to 1 the uniform number is.
    """
    logits = logits.float()
    if temperature != 1:
        logits = logits / temperature
    logp = logits.log_softmax(-1)  # [b, V]
    cdf = (logits.softmax(-1) * 2.0**40).long().cumsum(-1)  # [b, V] int64
    target = (uniform(key, counter)[:, None] * cdf[:, -1:]).long()  # [b, 1], below cdf[:, -1]
    token = torch.searchsorted(cdf, target, right=True)  # the first token with CDF > target
    # Only NaN logits give an index beyond the vocabulary. The engine reports them later, so the
    # gather here must not fail.
    token = token.clamp_(max=logits.shape[-1] - 1)
    return token[:, 0], logp.gather(1, token)[:, 0]


# --- weights in four bits ---

# NF4: the quantiles of N(0, 1) that cut [1 - δ, δ] into steps of equal probability, seven below the
# median and eight above, divided by the largest. δ = 1 - (1/32 + 1/30) / 2. So each code is about
# equally frequent in a block of normal numbers, and 0 and ±1 are exact (Dettmers et al. 2023,
# arXiv 2305.14314, appendix E). The digits are those of bitsandbytes.
NF4 = torch.tensor(
    [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453]
    + [-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0]
    + [0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224]
    + [0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0],
    dtype=torch.float32, device="cpu",
)  # fmt: skip


def midpoints(x: Tensor) -> Tensor:
    return (x[:-1] + x[1:]) / 2


def dynamic_codes() -> Tensor:
    """Return the 256 numbers of the 8-bit code for absmax: in each decade from 1e-6 to 1 twice as
    many as in the one below, ±, with 0 and 1 (Dettmers 2015, arXiv 1511.04561).
    """
    ends = [torch.linspace(0.1, 1, 2**i + 1, dtype=NF4.dtype, device="cpu") for i in range(7)]
    positive = torch.cat([10.0 ** (i - 6) * midpoints(ends[i]) for i in range(7)])
    return torch.cat([-positive, positive, NF4[[7, 15]]]).sort().values


DYNAMIC = dynamic_codes()
NF4_BLOCK, ABSMAX_BLOCK = 64, 256  # weights with one absmax; absmax with one nested_absmax


@functools.cache
def nf4_tables(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return NF4 and DYNAMIC on a device, always the same tensors: CUDA graphs cannot copy them."""
    return NF4.to(device), DYNAMIC.to(device)


class Quantized(NamedTuple):
    """A weight in NF4. Its tensors have the values and names that bitsandbytes stores.

    They may have any shape with the same numbers in the same order. If the rows of a weight [out,
    in] are whole blocks (in is a multiple of 64), packed [out, in/2] and absmax [out, in/64] can be
    sharded by rows. The other two are tiny and belong to the whole weight.
    """

    packed: Tensor  # uint8, two codes per byte, the first in the upper half
    absmax: Tensor  # largest magnitude of each block: float32, or uint8 codes if nested
    nested_absmax: Tensor | None  # largest magnitude of 256 absmax - offset; None: not nested
    nested_offset: Tensor | None  # [] float32, the mean of absmax
    shape: torch.Size


def in_blocks(x: Tensor, size: int) -> Tensor:
    """Return x [n] as [blocks, size], filled up with zeros."""
    return F.pad(x, (0, -len(x) % size)).view(-1, size)


def quantize_absmax(absmax: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize absmax [blocks] once more. Return the codes [blocks], and nested_absmax and
    nested_offset.

    Like bitsandbytes on a CPU, this rounds x/nested_absmax to the nearest of 2¹⁶ points in [-1, 1],
    and that point to the nearest code.
    """
    offset = absmax.mean()
    x = in_blocks(absmax - offset, ABSMAX_BLOCK)
    nested_absmax = x.abs().amax(1)
    # 0/0, in a block of zeros: any code will do, and bitsandbytes takes the first
    x = (x * (1.0 / nested_absmax)[:, None]).nan_to_num(nan=-1.0).clamp(-1, 1)
    point = ((x + 1.0) * 0.5 * 65_535 + 0.5).int()
    # a tensor, because CUDA would multiply by the reciprocal of a Python number
    x = 2 * point / x.new_tensor(65_535.0) - 1.0
    codes = torch.bucketize(x, midpoints(DYNAMIC).to(x.device)).to(torch.uint8)
    return codes.flatten()[: len(absmax)], nested_absmax, offset


def nf4_absmax(q: Quantized) -> Tensor:
    """Return absmax [blocks] in float32."""
    if q.nested_absmax is None or q.nested_offset is None:
        return q.absmax.flatten()
    _, dynamic = nf4_tables(q.absmax.device)
    x = in_blocks(dynamic[q.absmax.flatten().int()], ABSMAX_BLOCK) * q.nested_absmax.view(-1, 1)
    return x.flatten()[: q.absmax.numel()] + q.nested_offset


def nf4_quantize(w: Tensor, nested: bool = True) -> Quantized:
    """Quantize a weight of any shape and float type. nested: quantize absmax, too.

    A block with an inf or NaN has no finite weights afterwards, and if nested, the whole weight.
    """
    flat = w.detach().flatten().float()
    x = in_blocks(flat, NF4_BLOCK)  # [blocks, 64]
    absmax = x.abs().amax(1)  # [blocks]
    scaled = x * (1.0 / absmax.clamp(min=1e-38))[:, None]
    if len(flat) % NF4_BLOCK:  # bitsandbytes divides here, and stores the clamped absmax
        absmax[-1] = absmax[-1].clamp(min=1e-38)
        scaled[-1] = x[-1] / absmax[-1]
    codes = torch.full_like(x, 15, dtype=torch.uint8)
    for middle in midpoints(NF4).tolist():  # faster on a CPU than torch.bucketize
        codes -= (scaled <= middle).view(torch.uint8)
    packed = (codes[:, ::2] << 4 | codes[:, 1::2]).flatten()[: -(-len(flat) // 2)]
    if nested:
        return Quantized(packed, *quantize_absmax(absmax), w.shape)
    return Quantized(packed, absmax, None, None, w.shape)


def nf4_dequantize(q: Quantized, dtype: torch.dtype) -> Tensor:
    """Return the weight [*shape]: NF4[code] · absmax, rounded once from float32 to dtype."""
    nf4, _ = nf4_tables(q.packed.device)
    pairs = torch.cartesian_prod(nf4, nf4)  # [256, 2], both numbers of a byte
    packed, absmax = in_blocks(q.packed.flatten(), NF4_BLOCK // 2), nf4_absmax(q)[:, None]
    w = torch.empty(len(packed), NF4_BLOCK, dtype=dtype, device=packed.device)
    for rows in blocks(w) if w.device.type == "cpu" else [slice(None)]:
        x = pairs.index_select(0, packed[rows].flatten().int())  # [bytes, 2]
        w[rows] = x.view(-1, NF4_BLOCK) * absmax[rows]
    return w.flatten()[: q.shape.numel()].view(q.shape)


def nf4_matmul(x: Tensor, q: Quantized) -> Tensor:
    """Return x Wᵀ [..., out] for x [..., in] and a quantized weight W [out, in]."""
    return F.linear(x, nf4_dequantize(q, x.dtype))
