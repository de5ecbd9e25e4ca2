"""QK-norm and rotary embedding of all query and key heads of a token, in one kernel. The decoder
uses this kernel on CUDA.

In: q [T, H, E] and k [T, K, E], the weights [E] of the two norms or None (only Qwen3 has these
norms), cos and sin [T, E] float32 (each with two equal halves). Out: q and k, normalized and
rotated, in their dtype. The heads of a token must be adjacent in memory. There may be gaps between
tokens, for example if q, k and v are slices of one product. Read next: swiglu.py.

Equation.   n = x (mean(x²) + ε)^{-1/2};  u = n · weight, in halves (a, b);
            y = (a cos - b sin, b cos + a sin).  Without a norm, u = x.
            The RMSNorm is per head as in Qwen3. The rotation is from Su et al. 2021 (arXiv
            2104.09864), but dimensions i and i + E/2 form a pair.
Derivation. The rotation is linear, and its transpose is da = dya cos + dyb sin,
            db = dyb cos - dya sin. The derivative of RMSNorm is then applied: g = du · weight;
            dx = r (g - n mean(g n)); dweight = Σ du n. The factor r is recomputed from x, which is
            loaded anyway. Without a norm, dx = du, and x is neither saved nor loaded.
Sums.       For dweight, a fixed number of programs each compute a partial sum. The partial sums are
            then added in a fixed order.
Bytes.      With N = T·(H + K)·E numbers in q and k, the forward moves 4·N bytes in bfloat16, and
            the backward 6·N. Separate kernels for norm and rotation would move 8·N or more in the
            forward. For T = 8192, H = 32, K = 8, E = 128 at 4.3 TB/s, the forward takes 39 µs.
            FLOP: 12 per element.
Reference.  `norm_rope` in reference/rope.py also rounds between the norm and the rotation.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

import triton
import triton.language as tl

from .memory import load

PROGRAMS = 512  # number of programs in the backward; each program fills two rows of PARTS

# Constants of both kernels: H query heads and KV key heads of size 2·HALF.


@triton.jit
def places(HEADS, HALF):
    """Return the offsets [heads, half] of the first halves of adjacent heads, and a mask of the
    offsets that exist. Block sizes in Triton are powers of two, so both sizes are padded.
    """
    head = tl.arange(0, triton.next_power_of_2(HEADS))[:, None]
    j = tl.arange(0, triton.next_power_of_2(HALF))[None, :]
    return head * (2 * HALF) + j, (head < HEADS) & (j < HALF)


@triton.jit
def load_halves(X, HEADS, HALF):
    """Return the two halves of the heads at X in float32."""
    at, here = places(HEADS, HALF)
    return load(X + at, here), load(X + at + HALF, here)


@triton.jit
def store_halves(X, a, b, HEADS, HALF):
    at, here = places(HEADS, HALF)
    tl.store(X + at, a, mask=here)
    tl.store(X + at + HALF, b, mask=here)


@triton.jit
def mean(a, b, HALF):
    """Return the mean over the two halves of each head, [heads, 1]."""
    return ((tl.sum(a, 1) + tl.sum(b, 1)) / (2 * HALF))[:, None]


@triton.jit
def forward_heads(X, WEIGHT, Y, cos, sin, eps, HEADS, HALF):
    """Normalize and rotate the heads at X, and write them to Y."""
    a, b = load_halves(X, HEADS, HALF)
    if WEIGHT is not None:
        wa, wb = load_halves(WEIGHT, 1, HALF)
        r = 1.0 / tl.sqrt(mean(a * a, b * b, HALF) + eps)
        a = a * r * wa
        b = b * r * wb
    store_halves(Y, a * cos - b * sin, b * cos + a * sin, HEADS, HALF)


@triton.jit
def forward_kernel(
    Q, K, WQ, WK, COS, SIN, YQ, YK, q_stride, k_stride, eps,
    H: tl.constexpr, KV: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Each program processes one token. WQ and WK may be None."""
    token = tl.program_id(0).to(tl.int64)
    at, here = places(1, HALF)
    cos = load(COS + token * (2 * HALF) + at, here)
    sin = load(SIN + token * (2 * HALF) + at, here)
    yq = YQ + token * (2 * HALF * H)
    yk = YK + token * (2 * HALF * KV)
    forward_heads(Q + token * q_stride, WQ, yq, cos, sin, eps, H, HALF)
    forward_heads(K + token * k_stride, WK, yk, cos, sin, eps, KV, HALF)


@triton.jit
def backward_heads(X, x_offset, WEIGHT, DY, DX, cos, sin, eps, dwa, dwb, HEADS, HALF):
    """Write the gradients of a token's heads to DX. Return dwa and dwb [heads, half] with this
    token's terms added.

    X and WEIGHT may be None.
    """
    dya, dyb = load_halves(DY, HEADS, HALF)
    da = dya * cos + dyb * sin
    db = dyb * cos - dya * sin
    if WEIGHT is not None:
        a, b = load_halves(X + x_offset, HEADS, HALF)
        wa, wb = load_halves(WEIGHT, 1, HALF)
        r = 1.0 / tl.sqrt(mean(a * a, b * b, HALF) + eps)
        na = a * r
        nb = b * r
        dwa += da * na
        dwb += db * nb
        ga = da * wa
        gb = db * wb
        m = mean(ga * na, gb * nb, HALF)
        da = r * (ga - na * m)
        db = r * (gb - nb * m)
    store_halves(DX, da, db, HEADS, HALF)
    return dwa, dwb


@triton.jit
def store_part(PARTS, row, dwa, dwb, HALF):
    """Write a program's part of dweight, summed over the heads, to a row of PARTS."""
    store_halves(
        PARTS + row * (2 * HALF), tl.sum(dwa, 0)[None, :], tl.sum(dwb, 0)[None, :], 1, HALF
    )


@triton.jit
def backward_kernel(
    Q, K, WQ, WK, COS, SIN, DYQ, DYK, DX, PARTS, T, q_stride, k_stride, eps,
    H: tl.constexpr, KV: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Program p of P processes tokens p, p + P, …; its partial sums go to rows p (dwq) and P + p
    (dwk) of PARTS [2·P, E].

    Q, K, WQ, WK and PARTS may be None.
    """
    pid = tl.program_id(0)
    at, here = places(1, HALF)
    # one sum per head: threads exchange data only at the end
    dwqa = tl.zeros(places(H, HALF)[0].shape, tl.float32)
    dwka = tl.zeros(places(KV, HALF)[0].shape, tl.float32)
    dwqb, dwkb = dwqa, dwka
    for t in tl.range(pid, T, tl.num_programs(0)):
        token = tl.full((), t, tl.int64)
        cos = load(COS + token * (2 * HALF) + at, here)
        sin = load(SIN + token * (2 * HALF) + at, here)
        dyq, dyk = DYQ + token * (2 * HALF * H), DYK + token * (2 * HALF * KV)
        dxq = DX + token * (2 * HALF * (H + 2 * KV))
        dxk = dxq + 2 * HALF * H
        dwqa, dwqb = backward_heads(
            Q, token * q_stride, WQ, dyq, dxq, cos, sin, eps, dwqa, dwqb, H, HALF
        )
        dwka, dwkb = backward_heads(
            K, token * k_stride, WK, dyk, dxk, cos, sin, eps, dwka, dwkb, KV, HALF
        )
    if PARTS is not None:
        row = pid.to(tl.int64)
        store_part(PARTS, row, dwqa, dwqb, HALF)
        store_part(PARTS, tl.num_programs(0) + row, dwka, dwkb, HALF)


def adjacent(x: Tensor) -> Tensor:
    """Return x [T, heads, E], or a copy if the heads of a token are not adjacent."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()


def _shape(q: Tensor, k: Tensor) -> dict[str, int]:
    """Return the constants of the forward and the backward kernel.

    Each thread processes about 8 pairs of elements of q.
    """
    H, KV, HALF = q.shape[1], k.shape[1], q.shape[2] // 2
    pairs = triton.next_power_of_2(H) * triton.next_power_of_2(HALF)
    return dict(H=H, KV=KV, HALF=HALF, num_warps=max(1, min(16, pairs // 256)))


class _NormRope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, wq, wk, cos, sin, eps):
        q, k, cos, sin = adjacent(q), adjacent(k), cos.contiguous(), sin.contiguous()
        yq, yk = (x.new_empty(x.shape) for x in (q, k))
        args = q, k, wq, wk, cos, sin, yq, yk, q.stride(0), k.stride(0), eps
        forward_kernel[(len(q),)](*args, **_shape(q, k))
        ctx.save_for_backward(*((q, k) if wq is not None else (None, None)), wq, wk, cos, sin)
        ctx.eps = eps
        return yq, yk

    @staticmethod
    @once_differentiable
    def backward(ctx, dyq, dyk):
        q, k, wq, wk, cos, sin = ctx.saved_tensors
        dyq, dyk = dyq.contiguous(), dyk.contiguous()
        (T, H, E), KV = dyq.shape, dyk.shape[1]
        # dx leaves space for the gradient of v, so that one product can use all three gradients.
        dx = dyq.new_empty(T, H + 2 * KV, E)[:, : H + KV]
        programs, parts = min(PROGRAMS, T), None
        if ctx.needs_input_grad[2]:
            parts = dyq.new_empty(2, programs, E, dtype=torch.float32)
        strides = (0, 0) if q is None else (q.stride(0), k.stride(0))
        args = q, k, wq, wk, cos, sin, dyq, dyk, dx, parts, T, *strides, ctx.eps
        backward_kernel[(programs,)](*args, **_shape(dyq, dyk))
        dweights = (None, None) if parts is None else parts.sum(1).to(wq.dtype)
        return dx[:, :H], dx[:, H:], *dweights, None, None, None


def norm_rope(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Return q [T, H, E] and k [T, K, E] normalized and rotated, in their dtype.

    q_weight and k_weight [E] are the weights of the norms. If both are None, there is no norm. cos
    and sin are [T, 1, E] float32.
    """
    return _NormRope.apply(q, k, q_weight, k_weight, cos, sin, eps)
