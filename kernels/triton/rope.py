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

PROGRAMS = 512  # number of programs in the backward; each program fills two rows of PARTS

# Constants of both kernels: H query heads and KV key heads of size 2·HALF.
# Block sizes in Triton are powers of two, so H, KV and HALF are padded to H_PAD, KV_PAD and PAD.


@triton.jit
def places(HEADS: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr, PAD: tl.constexpr):
    """Return the offsets [ROWS, PAD] of the first halves of adjacent heads, and a mask of the
    offsets that exist.
    """
    head = tl.arange(0, ROWS)[:, None]
    j = tl.arange(0, PAD)[None, :]
    return head * (2 * HALF) + j, (head < HEADS) & (j < HALF)


@triton.jit
def load_halves(X, at, here, HALF: tl.constexpr):
    """Return the two halves of the heads in float32."""
    a = tl.load(X + at, mask=here, other=0.0).to(tl.float32)
    b = tl.load(X + at + HALF, mask=here, other=0.0).to(tl.float32)
    return a, b


@triton.jit
def store_halves(X, at, here, a, b, HALF: tl.constexpr):
    tl.store(X + at, a.to(X.dtype.element_ty), mask=here)
    tl.store(X + at + HALF, b.to(X.dtype.element_ty), mask=here)


@triton.jit
def inverse_rms(a, b, eps, HALF: tl.constexpr):
    """Return (mean(x²) + ε)^{-1/2} of each head, [heads, 1]."""
    return (1.0 / tl.sqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / (2 * HALF) + eps))[:, None]


@triton.jit
def forward_heads(
    X, WEIGHT, Y, cos, sin, eps,
    HEADS: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    """Normalize and rotate the heads at X, and write them to Y."""
    at, here = places(HEADS, ROWS, HALF, PAD)
    a, b = load_halves(X, at, here, HALF)
    if WEIGHT is not None:
        w_at, w_here = places(1, 1, HALF, PAD)
        wa, wb = load_halves(WEIGHT, w_at, w_here, HALF)
        r = inverse_rms(a, b, eps, HALF)
        a = a * r * wa
        b = b * r * wb
    store_halves(Y, at, here, a * cos - b * sin, b * cos + a * sin, HALF)


@triton.jit
def forward_kernel(
    Q, K, WQ, WK, COS, SIN, YQ, YK, q_stride, k_stride, eps,
    H: tl.constexpr, KV: tl.constexpr, HALF: tl.constexpr,
    H_PAD: tl.constexpr, KV_PAD: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    """Each program processes one token. WQ and WK may be None."""
    token = tl.program_id(0).to(tl.int64)
    at, here = places(1, 1, HALF, PAD)
    cos = tl.load(COS + token * (2 * HALF) + at, mask=here, other=0.0)  # [1, PAD]
    sin = tl.load(SIN + token * (2 * HALF) + at, mask=here, other=0.0)
    yq = YQ + token * (2 * HALF * H)
    yk = YK + token * (2 * HALF * KV)
    forward_heads(Q + token * q_stride, WQ, yq, cos, sin, eps, H, H_PAD, HALF, PAD)
    forward_heads(K + token * k_stride, WK, yk, cos, sin, eps, KV, KV_PAD, HALF, PAD)


@triton.jit
def backward_heads(
    X, x_offset, WEIGHT, DY, DX, cos, sin, eps, dwa, dwb,
    HEADS: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    """Write the gradients of a token's heads to DX. Return dwa and dwb [ROWS, PAD] with this
    token's terms added.

    X and WEIGHT may be None.
    """
    at, here = places(HEADS, ROWS, HALF, PAD)
    dya, dyb = load_halves(DY, at, here, HALF)
    da = dya * cos + dyb * sin
    db = dyb * cos - dya * sin
    if WEIGHT is not None:
        a, b = load_halves(X + x_offset, at, here, HALF)
        w_at, w_here = places(1, 1, HALF, PAD)
        wa, wb = load_halves(WEIGHT, w_at, w_here, HALF)
        r = inverse_rms(a, b, eps, HALF)
        na = a * r
        nb = b * r
        dwa += da * na
        dwb += db * nb
        ga = da * wa
        gb = db * wb
        mean = ((tl.sum(ga * na, 1) + tl.sum(gb * nb, 1)) / (2 * HALF))[:, None]
        da = r * (ga - na * mean)
        db = r * (gb - nb * mean)
    store_halves(DX, at, here, da, db, HALF)
    return dwa, dwb


@triton.jit
def store_parts(PARTS, row, dwa, dwb, HALF: tl.constexpr, PAD: tl.constexpr):
    """Write a program's part of dweight, summed over the heads, to a row of PARTS."""
    j = tl.arange(0, PAD)
    tl.store(PARTS + row * (2 * HALF) + j, tl.sum(dwa, 0), mask=j < HALF)
    tl.store(PARTS + row * (2 * HALF) + HALF + j, tl.sum(dwb, 0), mask=j < HALF)


@triton.jit
def backward_kernel(
    Q, K, WQ, WK, COS, SIN, DYQ, DYK, DX, PARTS, T, q_stride, k_stride, eps,
    H: tl.constexpr, KV: tl.constexpr, HALF: tl.constexpr,
    H_PAD: tl.constexpr, KV_PAD: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    """Program p of P processes tokens p, p + P, …; its partial sums go to rows p (dwq) and P + p
    (dwk) of PARTS [2·P, E].

    Q, K, WQ, WK and PARTS may be None.
    """
    pid = tl.program_id(0)
    at, here = places(1, 1, HALF, PAD)
    # one sum per head: threads exchange data only at the end
    dwqa = tl.zeros((H_PAD, PAD), tl.float32)
    dwqb = tl.zeros((H_PAD, PAD), tl.float32)
    dwka = tl.zeros((KV_PAD, PAD), tl.float32)
    dwkb = tl.zeros((KV_PAD, PAD), tl.float32)
    for t in tl.range(pid, T, tl.num_programs(0)):
        token = tl.full((), t, tl.int64)
        cos = tl.load(COS + token * (2 * HALF) + at, mask=here, other=0.0)  # [1, PAD]
        sin = tl.load(SIN + token * (2 * HALF) + at, mask=here, other=0.0)
        dyq, dyk = DYQ + token * (2 * HALF * H), DYK + token * (2 * HALF * KV)
        dxq = DX + token * (2 * HALF * (H + 2 * KV))
        dxk = dxq + 2 * HALF * H
        dwqa, dwqb = backward_heads(
            Q, token * q_stride, WQ, dyq, dxq, cos, sin, eps, dwqa, dwqb, H, H_PAD, HALF, PAD
        )
        dwka, dwkb = backward_heads(
            K, token * k_stride, WK, dyk, dxk, cos, sin, eps, dwka, dwkb, KV, KV_PAD, HALF, PAD
        )
    if PARTS is not None:
        row = pid.to(tl.int64)
        store_parts(PARTS, row, dwqa, dwqb, HALF, PAD)
        store_parts(PARTS, tl.num_programs(0) + row, dwka, dwkb, HALF, PAD)


def adjacent(x: Tensor) -> Tensor:
    """Return x [T, heads, E], or a copy if the heads of a token are not adjacent."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()


def _shape(q: Tensor, k: Tensor) -> dict[str, int]:
    """Return the constants of the forward and the backward kernel.

    A thread processes about 8 pairs of numbers of q.
    """
    H, KV, HALF = q.shape[1], k.shape[1], q.shape[2] // 2
    pads = [triton.next_power_of_2(n) for n in (H, KV, HALF)]
    warps = max(1, min(16, pads[0] * pads[2] // 256))
    return dict(H=H, KV=KV, HALF=HALF, H_PAD=pads[0], KV_PAD=pads[1], PAD=pads[2], num_warps=warps)


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
        # The caller may add the gradient of v, to multiply all three in one product.
        dx = dyq.new_empty(T, H + 2 * KV, E)[:, : H + KV]
        programs, parts = min(PROGRAMS, T), None
        if ctx.needs_input_grad[2]:
            parts = torch.empty(2, programs, E, dtype=torch.float32, device=dyq.device)
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
