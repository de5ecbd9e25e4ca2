"""On-policy distillation: the losses are TRL's, and logits are never stored.

Read next: examples/recipes/distill.py, nanogrpo/extras/distill_head.py.
"""

from types import SimpleNamespace

import pytest
import torch
from nanogrpo.kernels.reference.policy import LossInputs

from examples.recipes import distill
from nanogrpo.extras import distill_head
from nanogrpo.model.decoder import logits
from nanogrpo.types import Prompt
from tests.conftest import (
    SOLO,
    arguments,
    one_sentence,
    packed,
    tiny_model,
    write_base,
)
from tests.kernels.test_head_work import _Results
from tests.model.head_inputs import T, draw
from tests.recipes import run, two_groups


def holder(hidden, head):
    """A model of which only the last hidden states and the head matter."""
    return SimpleNamespace(forward_strip=lambda batch, op: op(hidden, head))


def trained(hidden, head, inputs, teachers, beta, targets=None):
    """Return the loss of a full-vocabulary distillation, and its gradients."""
    batch = SimpleNamespace(**inputs._asdict(), targets=targets, head=None)
    cfg = distill.Options(temperature=T)
    op = distill_head.distill_objective(
        batch, cfg, teachers, lambda p, q: distill.divergence(p, q, beta)
    )
    loss = op(hidden, head).loss
    return loss, *torch.autograd.grad(loss, (hidden, head))


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_full_vocabulary_loss_and_gradients_are_trls(beta, monkeypatch):
    """TRL's own loss functions: that of DistillationTrainer in float32, and GKD's in float64, which
    stores the logits.
    """
    pytest.importorskip("trl")
    from trl.experimental.gkd import GKDTrainer
    from trl.trainer.distillation_trainer import _chunked_divergence_loss

    monkeypatch.setattr(distill_head, "default_chunk", lambda *_: 4)
    torch.manual_seed(0)
    for dtype, limit in ((torch.float32, 1e-6), (torch.float64, 1e-12)):
        hidden, head, targets, inputs = draw(dtype)
        theirs = torch.randn(len(hidden), 5, dtype=dtype), torch.randn(len(head), 5, dtype=dtype)
        mask = torch.arange(len(hidden)) % 4 > 0
        weight = mask.to(dtype) / mask.sum()
        plain = inputs._replace(advantage=0 * weight, weight=weight, ref_logp=None)
        plain = plain._replace(entropy_weight=None)
        teachers = [(holder(*theirs), torch.ones_like(weight))]
        ours = trained(hidden, head, plain, teachers, beta, targets)
        if dtype == torch.float32:
            loss, _, count = _chunked_divergence_loss(
                hidden[None], theirs[0][None], head, theirs[1], mask[None], beta, temperature=T
            )
            assert count == mask.sum()
        else:
            logits = hidden @ head.T, theirs[0] @ theirs[1].T
            loss = GKDTrainer.generalized_jsd_loss(*logits, torch.where(mask, 0, -100), beta, T)
        expected = loss, *torch.autograd.grad(loss, (hidden, head))
        torch.testing.assert_close(ours, expected, rtol=limit, atol=limit)


def test_the_divergence_from_several_teachers_adds_to_the_policy_loss():
    """In the same pass, with all terms of the policy's loss: the sum of separate losses."""
    hidden, head, targets, inputs = draw()
    pair = [torch.randn(len(x), 5, dtype=x.dtype) for x in (hidden, head)]
    other = hidden.detach() + 0.1, head.detach()
    teachers = [(holder(*pair), inputs.weight.cos()), (holder(*other), inputs.weight.sin())]
    whole = trained(hidden, head, inputs, teachers, 1.0, targets)
    parts = [trained(hidden, head, inputs, [(holder(*pair), 0 * inputs.weight)], 1.0, targets)]
    nothing = inputs._replace(advantage=0 * inputs.weight, ref_logp=None, entropy_weight=None)
    parts += [trained(hidden, head, nothing, [each], 1.0, targets) for each in teachers]
    for total, *each in zip(whole, *parts):
        torch.testing.assert_close(total, sum(each))


def test_logits_are_never_more_than_a_chunk(monkeypatch):
    monkeypatch.setattr(distill_head, "default_chunk", lambda *_: 8)
    hidden, head = torch.randn(64, 4).requires_grad_(), torch.randn(512, 4).requires_grad_()
    targets, ones = torch.randint(512, (64,)), torch.ones(64)
    inputs = LossInputs(ones, ones)
    teachers = [(holder(torch.randn(64, 6), torch.randn(512, 6)), ones)] * 2
    with _Results() as results:
        trained(hidden, head, inputs, teachers, 0.5, targets)
    assert max(numel for numel, _ in results.made) == 8 * 512


def test_sampled_tokens_have_the_gradient_of_trls_loss():
    """The sum of TRL's sampled-token loss, for the teacher that a prompt's column names, and of the
    policy's loss.
    """
    pytest.importorskip("trl")
    from trl.experimental.sdpo.loss_utils import compute_sampled_token_self_distillation_loss

    student, teachers = tiny_model(), [tiny_model(seed=1), tiny_model(seed=2)]
    cfg = distill.Options(teacher=("a", "b"), teacher_coef=0.7, reward_coef=0.5, teacher_column="t")
    samples = two_groups([Prompt(0, "", [1, 2, 3], {"t": 1}), Prompt(1, "", [4, 5], {"t": None})])
    (feature,) = distill.features(cfg)
    feature.frozen = teachers
    own = SimpleNamespace(world=SOLO, model=student, cfg=cfg)
    feature.scored(own, samples, 0)
    (batch,) = packed(samples, cfg, all_gradients=True)
    ours = student.forward_strip(batch, logits).detach()[None].requires_grad_()  # [1, M, V]
    logp = ours.log_softmax(-1)[0].gather(1, batch.targets[:, None]).squeeze(1)
    loss = compute_sampled_token_self_distillation_loss(
        ours,
        teachers[1].forward_strip(batch, logits)[None],
        batch.targets[None],
        distillation_alpha=1.0,
    )
    distilled = (loss[0] * (batch.sample < 2)).mean()  # the other prompt has no teacher
    policy = (-batch.advantage * logp).mean()
    (expected,) = torch.autograd.grad(0.7 * distilled + 0.5 * policy, ours, retain_graph=True)
    feature.batches(own, [batch])
    (found,) = torch.autograd.grad((-batch.advantage * batch.weight * logp).sum(), ours)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


# --- complete runs ---


@pytest.mark.parametrize("form", ["", "--jsd-beta 1"])
def test_the_student_approaches_its_teacher(form, tmp_path, learned):
    """Without rewards, the loss of a step is the mean divergence."""
    teacher = write_base(tmp_path / "teacher", seed=1)
    more = f"--teacher {teacher} --max-steps 40 --learning-rate 3e-3 {form}"
    first, last = learned(distill, "loss", more)
    assert last < 0.75 * first


def test_padded_vocabularies_and_other_losses_are_refused(tmp_path, tiny_base, files, capsys):
    options = f"--teacher {write_base(tmp_path / 'teacher', vocab_size=120)} --jsd-beta 1"
    for more, problem in (
        ("", "--jsd-beta needs vocabularies of equal size"),
        ("--loss-type cispo", "--jsd-beta replaces the loss: leave out"),
        ("--log-completions --log-tokens", "leave out --log-tokens"),
    ):
        argv = arguments(tiny_base, files, tmp_path / "run", f"{options} {more}")
        assert run(distill, argv) == 2
        assert problem in one_sentence(capsys)
