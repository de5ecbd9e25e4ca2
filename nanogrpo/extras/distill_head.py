"""The policy loss plus a divergence from one or several teachers over the full vocabulary. Both are
computed in the same pass over the student's logits. Only one chunk of rows exists at a time.

In: a batch, teachers with a factor for each token [M], and a divergence between two distributions.
Out: a head operation, whose loss is the policy loss plus Σ_i weight_i Σ_teachers factor_i ·
divergence_i. Its metric `distill/divergence` is the inner sum. Autograd differentiates the
divergence of a chunk while its logits exist.

Work. The student needs three matrix products, with or without a teacher. Each teacher needs one
more product. Memory. A chunk needs about ten float32 tensors of the size of its logits, so it has
fewer rows than without a teacher. No tensor of a teacher is kept for the backward pass.

Read before: kernels/head.py, which calls `policy_rows_` on each chunk. Read next:
examples/recipes/distill.py.
"""

from types import SimpleNamespace

import torch

from nanogrpo.errors import UserError
from nanogrpo.grpo.loss import clip_of, loss_inputs
from nanogrpo.model import head
from nanogrpo.model.dispatch import functions_for
from nanogrpo.model.head import PolicyOut, default_chunk


def distill_objective(batch, cfg, teachers, divergence):
    """Return the head operation.

    `teachers` has (decoder, factor [M]) of each teacher. `divergence` maps the log-probs of the
    student [C, V] and of the teacher [C, V] to [C].
    """
    if batch.head:
        raise UserError(
            "--top-k, --top-p and --min-p cannot be used with a teacher over the full vocabulary: "
            "leave them out."
        )
    values, ops = torch.zeros_like(batch.weight), functions_for(batch.weight.device)  # [M]

    def op(hidden, lm_head):  # inside the student's forward pass
        with torch.no_grad():
            heads = [(*t.forward_strip(batch, lambda *head: head), f) for t, f in teachers]

        def policy_rows_(logits, rows, T, inputs, clip):
            """Do the same as `policy_rows_` of the kernels, but with row numbers in place of
            targets."""

            def log_softmax(x):
                return (x.to(values.dtype) / T).log_softmax(-1)  # [C, V]

            z = logits.detach().requires_grad_()
            with torch.enable_grad():
                p = log_softmax(z)
                each = ((f[rows], ops.product(h[rows], w)) for h, w, f in heads)
                total = sum(f * divergence(p, log_softmax(theirs)) for f, theirs in each)
            (dlogits,) = torch.autograd.grad(total, z, inputs.weight)
            values[rows] = total.detach()
            logp, entropy, l, *more = ops.policy_rows_(logits, batch.targets[rows], T, inputs, clip)
            more[-1].add_(dlogits)
            return logp, entropy, l + values[rows], *more

        own = SimpleNamespace(product=ops.product, policy_rows_=policy_rows_)
        chunk = default_chunk(10 * len(lm_head), values.dtype, hidden.device)
        how = loss_inputs(batch), clip_of(cfg), cfg.temperature, chunk, own
        rows = torch.arange(len(hidden)).to(batch.targets)  # [M]
        loss, logp, entropy, clip, kl = head.HeadPolicyLoss.apply(hidden, lm_head, rows, *how)
        return PolicyOut(loss, logp, entropy, kl, {"clip": clip, "distill/divergence": values})

    return op
