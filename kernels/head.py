"""Compute log-probs, entropies, the policy loss and its gradients at the output head, in chunks of
tokens, without ever storing all logits.

In: hidden [M, D], lm_head [V, D], targets [M], `LossInputs` [M]. Out: vectors [M]. The backward
returns dhidden [M, D] and dhead [V, D]. Matrix products are computed by cuBLAS, or on a CPU by
linear.py. All other operations are functions of the package `ops`, which is reference/ (PyTorch) or
triton/ (kernels with the same names). So the loop over chunks and the two autograd Functions below
are the same for reference/ and triton/. Read next: nanogrpo/model/head.py.

Equation.   z_i = h_i Wᵀ / T;  logp_i = z_{i,y_i} - lse(z_i);
            L = Σ_i weight_i l(logp_i) - entropy_weight_i H_i.
Derivation. The contribution of token i to L depends only on h_i and W, and weight_i is known
            beforehand. So as soon as row i of the logits is known, dL/dz_i = weight_i l'(logp_i)
            (1[j = y_i] - p_ij) / T + … can be computed. Therefore, the forward already computes the
            gradients while the logits of the chunk exist: dh = dz W, dW = Σ_chunks dzᵀ h. The
            backward only multiplies the gradients by the upstream scalar.
Work.       The head needs three matrix products, or 6·M·V·D FLOP. If the backward recomputed the
            logits, four products (8·M·V·D) would be needed. At M = 8192, V = 151,936 and 790
            TFLOP/s, the three matrix products take 9.7 / 19.4 / 38.7 ms for D = 1024 / 2048 / 4096.
Memory.     The head stores one chunk of C rows of logits (2·C·V bytes in bfloat16, 2.5 GB at C =
            8192), dW in float32 (4·V·D bytes) and dh.
Bytes.      The logits are read and written once, in place: 4·M·V bytes (1.16 ms at 4.3 TB/s). Each
            chunk after the first also reads and writes dW (8·V·D bytes). For any D, reading and
            writing dW takes 245/C of the time of the chunk's matrix products. So one chunk of 8192
            rows is faster than many small chunks.
Reference.  A test compares the results with those of `log_softmax_forward` and `policy_rows_` on
            all logits at once (tests/model/test_head.py).

If the factor of a token depends on the log-probs of other tokens (sequence-level ratios or masks),
the forward pass cannot compute the gradients. Losses in which a token's factor depends on other
tokens use `HeadLogp`. The backward of `HeadLogp` recomputes the logits, so four matrix products are
needed.

The host does not wait for the device in `HeadPolicyLoss`. The backward of `HeadLogp` selects rows
with `nonzero`. To learn the number of rows, the host waits for all kernels that it has launched.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .linear import by_onednn, product
from .reference.log_softmax import accumulate


class HeadLogp(torch.autograd.Function):
    """(hidden, lm_head, targets, temperature, chunk, ops) → log-prob [M], entropy [M].

    The forward needs one matrix product. The backward recomputes the logits and needs three
    products, or two if the head is frozen. The backward skips rows for which both upstream
    gradients are 0.
    """

    @staticmethod
    def forward(ctx, hidden, lm_head, targets, temperature, chunk, ops):
        count, acc = len(hidden), accumulate(hidden.dtype)
        logp, entropy = (hidden.new_empty(count, dtype=acc) for _ in range(2))
        norm = hidden.new_empty(2, count, dtype=acc)  # only `ops` interprets it
        buffer = _buffer(hidden, lm_head, targets.split(chunk))
        for part in _slices(count, chunk):
            logits = ops.product(hidden[part], lm_head, buffer)  # [C, V]
            logp[part], entropy[part], norm[:, part] = ops.log_softmax_forward(
                logits, targets[part], temperature
            )
            del logits
        ctx.save_for_backward(hidden, lm_head, targets, norm, entropy)
        ctx.settings = temperature, chunk, ops
        return logp, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, dlogp, dentropy):
        hidden, lm_head, targets, norm, entropy = ctx.saved_tensors
        temperature, chunk, ops = ctx.settings
        need_dhead = ctx.needs_input_grad[1]
        dhidden, dhead = torch.zeros_like(hidden), None
        chunks = _chunks((dlogp != 0) | (dentropy != 0), chunk)
        buffer = _buffer(hidden, lm_head, chunks)
        for index in chunks:
            h = hidden[index]  # [C, D]
            dlogits = ops.log_softmax_backward_(
                ops.product(h, lm_head, buffer),
                targets[index],
                temperature,
                norm[:, index],
                entropy[index],
                dlogp[index],
                dentropy[index],
            )  # [C, V]
            dhidden[index] = product(dlogits, lm_head.T)
            if need_dhead:
                dhead = add_product(dhead, dlogits, h)
            del dlogits
        dhead = _complete(dhead, lm_head).to(lm_head.dtype) if need_dhead else None
        return dhidden, dhead, None, None, None, None


class HeadPolicyLoss(torch.autograd.Function):
    """(hidden, lm_head, targets, inputs, clip, temperature, chunk, ops) → loss, log-prob [M],
    entropy [M], clip flags [M] and KL [M] or None. Only the loss is differentiable.

    Tokens with weight 0 are computed, too, because packing has already left out the tokens that are
    not trained on.
    """

    @staticmethod
    def forward(ctx, hidden, lm_head, targets, inputs, c, temperature, chunk, ops):
        need_dhidden, need_dhead = ctx.needs_input_grad[:2]
        count, acc = len(hidden), accumulate(hidden.dtype)
        logp, entropy, terms = (hidden.new_zeros(count, dtype=acc) for _ in range(3))
        dhidden, dhead = torch.zeros_like(hidden) if need_dhidden else None, None
        clip = hidden.new_zeros(count, dtype=torch.int8)
        kl = None if inputs.ref_logp is None else torch.zeros_like(logp)
        buffer = _buffer(hidden, lm_head, targets.split(chunk))
        for part in _slices(count, chunk):
            h = hidden[part]  # [C, D]
            logits = ops.product(h, lm_head, buffer)  # [C, V]
            logp[part], entropy[part], terms[part], clip[part], part_kl, dlogits = ops.policy_rows_(
                logits, targets[part], temperature, inputs.at(part), c
            )  # dlogits is [C, V]
            if kl is not None:
                kl[part] = part_kl
            if dhidden is not None:
                dhidden[part] = product(dlogits, lm_head.T)
            if need_dhead:
                dhead = add_product(dhead, dlogits, h)
            del logits, dlogits  # frees the tensors before the next chunk

        loss = (inputs.weight * terms).sum()
        if inputs.entropy_weight is not None:
            loss -= (inputs.entropy_weight * entropy).sum()
        ctx.save_for_backward(dhidden, _complete(dhead, lm_head) if need_dhead else None)
        ctx.dtypes = hidden.dtype, lm_head.dtype
        ctx.mark_non_differentiable(*(x for x in (logp, entropy, clip, kl) if x is not None))
        return loss, logp, entropy, clip, kl

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream, *_):
        # `out` has the final dtype, so no second float32 tensor of the size of dhead is needed.
        return *(
            None if g is None else torch.mul(g, upstream, out=torch.empty_like(g, dtype=dtype))
            for g, dtype in zip(ctx.saved_tensors, ctx.dtypes)
        ), *(None,) * 6


def _slices(count: int, size: int) -> list[slice]:
    """Return `count` rows in pieces of at most `size`."""
    return [slice(start, start + size) for start in range(0, count, size)]


def _chunks(mask: Tensor, size: int) -> Sequence[Tensor]:
    """Return the indices where the mask is True, in pieces of at most `size`."""
    index = mask.nonzero().squeeze(1)
    return index.split(size) if len(index) else ()


def _buffer(hidden: Tensor, lm_head: Tensor, chunks: Sequence[Tensor]) -> Tensor:
    """Return a buffer for the logits [C, V] of the longest chunk. All chunks reuse the buffer."""
    return hidden.new_empty(max(map(len, chunks), default=0), len(lm_head))


def add_product(total: Tensor | None, dlogits: Tensor, h: Tensor) -> Tensor:
    """Add the product dlogitsᵀ h [V, D] to `total` in place. If `total` is None, return the
    product.

    The total has the dtype that `accumulate` returns. A total in bfloat16 would have an error that
    grows with the number of chunks (from 1.6e-3 for one chunk to 2.6e-3 for 8).
    """
    dtype = accumulate(h.dtype)
    if h.is_cpu and h.dtype != dtype:  # on a CPU, torch has no 16-bit product with a float32 result
        h, dlogits = h.to(dtype), dlogits.to(dtype)
    rows = dlogits.T  # [V, T]
    if by_onednn(h.T, rows):
        part = product(h.T, rows).T  # [V, D], transposed in memory
        return part.contiguous() if total is None else total.add_(part)
    beta = 1.0
    if total is None:  # with beta = 0, the values in `total` are ignored
        total, beta = h.new_empty(len(rows), h.shape[1], dtype=dtype), 0.0
    # 16-bit operands, float32 accumulator and result
    more: dict = {} if h.dtype == dtype else {"out_dtype": dtype}
    return torch.addmm(total, rows, h, beta=beta, out=total, **more)


def _complete(total: Tensor | None, lm_head: Tensor) -> Tensor:
    """Return `total`, the gradient summed over all chunks, or zeros if there were no chunks."""
    if total is None:
        return torch.zeros_like(lm_head, dtype=accumulate(lm_head.dtype))
    return total
