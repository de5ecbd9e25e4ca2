"""The output head whose logits are never more than a chunk: log-probs, entropies, the policy loss
and its gradients.

In: hidden [M, D], lm_head [V, D], per-token vectors [M]. Out: vectors [M], dhidden [M, D], dhead
[V, D]. This file holds only the loop over chunks: matrix products by cuBLAS (or the CPU's library)
and, between them, the row functions of `rows` (reference.py, or the Triton kernels of the same
names), so that both implementations share one loop. Read next: nanogrpo/custom_ops.py.

Equation.   z_i = h_i Wᵀ / T;  logp_i = z_{i,y_i} - lse(z_i);  L = Σ_i weight_i l(logp_i) - entropy_weight_i H_i.
Derivation. Token i's part of L depends on h_i and W alone, and weight_i is known beforehand, so
dL/dz_i = weight_i l'(logp_i)
            (1[j = y_i] - p_ij) / T + … is known as soon as row i of the logits is. Hence the gradients are taken while the
            chunk's logits exist:  dh = dz W,  dW = Σ_chunks dzᵀ h.  The backward only multiplies by the upstream scalar.
Work.       Three matrix products, 6·M·V·D FLOP, where recomputing the logits in the backward needs four (8·M·V·D); at
            M = 8192, V = 151,936 and 790 TFLOP/s: 9.7 / 19.4 / 38.7 ms for D = 1024 / 2048 / 4096.
Memory.     One chunk of logits, C·V·2 bytes in bfloat16 (2.5 GB at C = 8192), dW in float32 (4·V·D bytes) and dh.
Bytes.      Rows read and written once in place: 4·M·V (1.16 ms at 4.3 TB/s); each chunk after the first reads and writes dW
            again, 8·V·D bytes, 245/C of the time of its products whatever D is: one chunk of 8192 rows, not many small ones.
Reference.  `log_softmax_forward` and `policy_rows_` on the whole logits (tests/model/test_head.py).

When the gradients may not be taken in the forward: a ratio or a mask of whole sequences, anything
where a token's coefficient depends on other tokens' log-probs. Then `logp_forward` /
`logp_backward` are the two phases (four products).

Rows are chosen by `nonzero`, which waits for the device: twice in `policy_forward`, once in
`logp_backward`, never in `logp_forward`. The head is milliseconds of work, a wait microseconds.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from .linear import by_onednn, product
from .reference import Objective, accumulate


def logp_forward(
    rows: ModuleType,
    hidden: Tensor,
    lm_head: Tensor,
    targets: Tensor,
    temperature: float,
    chunk: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-prob [M], entropy [M] and norm [2, M], which belongs to `rows`: opaque here, only handed
    back to its backward.

    One product, 2·M·V·D FLOP.
    """
    count, acc = hidden.shape[0], accumulate(hidden.dtype)
    logp, entropy = (torch.empty(count, dtype=acc, device=hidden.device) for _ in range(2))
    norm = torch.empty(2, count, dtype=acc, device=hidden.device)
    buffer = hidden.new_empty(min(chunk, count), lm_head.shape[0])  # [C, V]
    for start in range(0, count, chunk):
        part = slice(start, start + chunk)
        h = hidden[part]
        logits = _logits(h, lm_head, buffer)
        logp[part], entropy[part], norm[:, part] = rows.log_softmax_forward(
            logits, targets[part], temperature
        )
    return logp, entropy, norm


def logp_backward(
    rows: ModuleType,
    hidden: Tensor,
    lm_head: Tensor,
    targets: Tensor,
    temperature: float,
    chunk: int,
    norm: Tensor,
    entropy: Tensor,
    dlogp: Tensor,
    dentropy: Tensor,
) -> tuple[Tensor, Tensor]:
    """dhidden [M, D], dhead [V, D] in the types of their inputs; rows whose two upstream gradients
    are 0 are not computed.
    """
    dhidden, dhead = torch.zeros_like(hidden), _Sum(lm_head)
    live = torch.nonzero((dlogp != 0) | (dentropy != 0)).squeeze(1)
    buffer = hidden.new_empty(min(chunk, len(live)), lm_head.shape[0])  # [C, V]
    for index in live.split(chunk):
        if len(index) == 0:
            continue
        h = hidden[index]  # [C, D]
        logits = _logits(h, lm_head, buffer)
        per_row = (
            targets[index],
            temperature,
            norm[:, index],
            entropy[index],
            dlogp[index],
            dentropy[index],
        )
        dlogits = rows.log_softmax_backward(logits, *per_row, in_place=True)
        dhidden[index] = product(dlogits, lm_head.T)
        dhead.add(dlogits, h)
    return dhidden, dhead.value().to(lm_head.dtype)


def policy_forward(
    rows: ModuleType,
    hidden: Tensor,
    lm_head: Tensor,
    targets: Tensor,
    temperature: float,
    old_logp: Tensor | None,
    advantage: Tensor,
    weight: Tensor,
    ref_logp: Tensor | None,
    importance: Tensor | None,
    entropy_weight: Tensor | None,
    o: Objective,
    chunk: int,
    need_dhidden: bool,
    need_dhead: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Log-prob [M], entropy [M], dL/dhidden [M, D] and dL/dlm_head [V, D] (float32), each gradient
    None where not needed.

    The loss is not among them: it, the clip flags and the statistics are of all M tokens, whatever
    their kind and chunk, and custom_ops.py takes them from the log-probs by `rows.policy_forward`:
    microseconds beside these products.

    Tokens are sorted into three kinds. Neither weight nor entropy weight: not computed, zeros. No
    advantage, KL or entropy term: their gradient is zero, so one product (the forward) instead of
    three. The rest: three products.
    """
    count, acc = hidden.shape[0], accumulate(hidden.dtype)
    logp, entropy = (torch.zeros(count, dtype=acc, device=hidden.device) for _ in range(2))
    dhidden, dhead = torch.zeros_like(hidden) if need_dhidden else None, _Sum(lm_head)
    forward_only, three_products = _kinds(
        advantage, weight, ref_logp, importance, entropy_weight, o
    )
    if not (need_dhidden or need_dhead):
        forward_only, three_products = (
            forward_only | three_products,
            torch.zeros_like(three_products),
        )
    forward_only, three_products = (
        torch.nonzero(kind).squeeze(1) for kind in (forward_only, three_products)
    )
    # [C, V]
    buffer = hidden.new_empty(
        min(chunk, max(len(forward_only), len(three_products))), lm_head.shape[0]
    )

    for index in forward_only.split(chunk) if len(forward_only) else ():
        h = hidden[index]  # [C, D]
        logits = _logits(h, lm_head, buffer)
        logp[index], entropy[index], _ = rows.log_softmax_forward(
            logits, targets[index], temperature
        )

    for index in three_products.split(chunk) if len(three_products) else ():
        h = hidden[index]  # [C, D]
        logits = _logits(h, lm_head, buffer)
        vectors = (old_logp, advantage, weight, ref_logp, importance, entropy_weight)
        vectors = (None if v is None else v[index] for v in vectors)
        # Its third result, the loss of each row, is not needed: see above.
        logp[index], entropy[index], _ = rows.policy_rows_(
            logits, targets[index], temperature, *vectors, o
        )
        dlogits = logits  # overwritten in place  # [C, V]
        if need_dhidden:
            dhidden[index] = product(dlogits, lm_head.T)
        if need_dhead:
            dhead.add(dlogits, h)
    return logp, entropy, dhidden, dhead.value() if need_dhead else None


def _kinds(
    advantage: Tensor,
    weight: Tensor,
    ref_logp: Tensor | None,
    importance: Tensor | None,
    entropy_weight: Tensor | None,
    o: Objective,
) -> tuple[Tensor, Tensor]:
    """Two masks [M]: the tokens that need the forward product only, and those that need all three."""
    on = weight != 0
    has_gradient = on
    if ref_logp is None or o.beta == 0.0:
        has_gradient = on & (advantage != 0)
        if importance is not None:
            has_gradient = has_gradient & (importance != 0)
    if entropy_weight is not None:
        on, has_gradient = on | (entropy_weight != 0), has_gradient | (entropy_weight != 0)
    return on & ~has_gradient, has_gradient


def _logits(h: Tensor, lm_head: Tensor, buffer: Tensor) -> Tensor:
    """[C, V], in `buffer` where the library can write into it. oneDNN makes a new one: the buffer's
    pages are never touched.
    """
    return (
        product(h, lm_head)
        if by_onednn(h, lm_head)
        else torch.mm(h, lm_head.T, out=buffer[: len(h)])
    )


class _Sum:
    """Σ_chunks dzᵀ h [V, D] in the accumulator's type: bfloat16 sums drift with the number of
    chunks (1.6e-3 → 2.6e-3 over 8).
    """

    def __init__(self, lm_head: Tensor):
        self.like, self.total = lm_head, None

    def add(self, dlogits: Tensor, h: Tensor) -> None:
        first = self.total is None
        if by_onednn(h.T, dlogits.T):
            # [V, D], transposed in memory; what is given back is not, as torch.compile is told
            part = product(h.T, dlogits.T).T
            self.total = part.contiguous() if first else self.total.add_(part)
            return
        if first:  # written by the first product, never zero-filled
            self.total = torch.empty_like(
                self.like, dtype=accumulate(self.like.dtype), memory_format=torch.contiguous_format
            )
        if h.dtype == self.total.dtype:
            torch.addmm(self.total, dlogits.T, h, beta=0.0 if first else 1.0, out=self.total)
        elif h.is_cuda:  # 16-bit operands, float32 accumulator and result in one product
            torch.addmm(
                self.total,
                dlogits.T,
                h,
                out_dtype=torch.float32,
                beta=0.0 if first else 1.0,
                out=self.total,
            )
        else:  # the CPU has no product of 16-bit operands with a float32 result
            torch.addmm(
                self.total, dlogits.float().T, h.float(), beta=0.0 if first else 1.0, out=self.total
            )

    def value(self) -> Tensor:
        return (
            torch.zeros_like(self.like, dtype=accumulate(self.like.dtype))
            if self.total is None
            else self.total
        )
