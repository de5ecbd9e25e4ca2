"""`terms` of kernels/triton/policy.py applied to a vector of tokens, as its tests need it.

In a training step only the kernel of fused_rows.py calls `terms`, on the log-prob of its row. Read
next: test_policy.py.
"""

import torch
import triton
import triton.language as tl
from nanogrpo.kernels.reference.policy import Clip, LossInputs
from nanogrpo.kernels.triton.policy import numbers_of, terms

BLOCK = 32


@triton.jit
def terms_kernel(
    LOGP, ADV, OLD, REF, IMP, L, DL, CLIP, KL, count, low, high, delta, beta, BLOCK: tl.constexpr
):  # fmt: skip
    j = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = j < count
    logp = tl.load(LOGP + j, mask=here, other=0.0)
    adv = tl.load(ADV + j, mask=here, other=0.0)
    old = None
    ref = None
    imp = None
    if OLD is not None:
        old = tl.load(OLD + j, mask=here, other=0.0)
    if REF is not None:
        ref = tl.load(REF + j, mask=here, other=0.0)
    if IMP is not None:
        imp = tl.load(IMP + j, mask=here, other=0.0)
    l, dl, clip, kl = terms(logp, adv, old, ref, imp, low, high, delta, beta)
    tl.store(L + j, l, mask=here)
    tl.store(DL + j, dl, mask=here)
    tl.store(CLIP + j, clip.to(tl.int8), mask=here)
    if REF is not None:
        tl.store(KL + j, kl, mask=here)


def kernel_terms(logp: torch.Tensor, inputs: LossInputs, c: Clip):
    """Return l, dl/dlogp, the clip flags and the KL or None, as `policy_terms` does."""
    count, flags = len(logp), logp.new_empty(len(logp), dtype=torch.int8)
    l, dl, kl = (torch.empty_like(logp) for _ in range(3))
    out = l, dl, flags, None if inputs.ref_logp is None else kl
    vectors = logp, inputs.advantage, inputs.old_logp, inputs.ref_logp, inputs.importance
    grid = (triton.cdiv(count, BLOCK),)
    terms_kernel[grid](*vectors, *out, count, *numbers_of(c), BLOCK=BLOCK)
    return out
