"""On-policy distillation: the losses are TRL's, logits are never stored, and the laws of every run
hold.
"""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from nanogrpo.kernels.reference.policy import LossInputs

from examples.recipes import distill
from nanogrpo.extras import distill_head
from nanogrpo.model import checkpoint
from nanogrpo.types import Prompt, Sample
from tests import configurations, ranks
from tests.conftest import (
    SOLO,
    arguments,
    assert_same,
    one_sentence,
    packed,
    positions_of,
    steps,
    tiny_model,
    write_base,
    write_files,
)
from tests.kernels.test_head_work import _Results
from tests.model.head_inputs import T, draw


def holder(hidden, head):
    """A model of which only the last hidden states and the head matter."""
    return SimpleNamespace(forward_strip=lambda batch, op: op(hidden, head))


def trained(hidden, head, inputs, teachers, beta, targets=None):
    """Return the loss of a full-vocabulary distillation, and its gradients."""
    batch = SimpleNamespace(**inputs._asdict(), targets=targets)
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
            labels = torch.where(mask, 0, -100)
            loss = GKDTrainer.generalized_jsd_loss(*logits, labels, beta, T)
        expected = loss, *torch.autograd.grad(loss, (hidden, head))
        torch.testing.assert_close(ours, expected, rtol=limit, atol=limit)


def test_the_divergence_from_several_teachers_adds_to_the_policy_loss(monkeypatch):
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


@torch.no_grad()
def dense_logits(model, sample):
    """Return the logits [n, V] for the tokens of a completion, without packing."""
    ids = sample.prompt.token_ids + sample.token_ids
    rows = torch.arange(len(sample.prompt.token_ids), len(ids)) - 1
    return model(torch.tensor(ids), *positions_of([len(ids)]))[rows]


def test_sampled_tokens_have_the_gradient_of_trls_loss():
    """The same gradient as TRL's sampled-token loss, whose first factor has none, plus the
    rewards' advantages.
    """
    pytest.importorskip("trl")
    from trl.experimental.sdpo.loss_utils import compute_sampled_token_self_distillation_loss

    student, teachers = tiny_model(), [tiny_model(seed=1), tiny_model(seed=2)]
    cfg = distill.Options(teacher=("a", "b"), teacher_coef=0.7, reward_coef=0.5, teacher_column="t")
    prompts = [Prompt(0, "", [1, 2, 3], {"t": 1}), Prompt(1, "", [4, 5], {"t": 0})]
    samples = [
        Sample(prompts[i // 2], i % 2, [7 + i] * n, [-5.0] * n, True, [0] * n, advantage=a)
        for i, (n, a) in enumerate([(2, 1.0), (5, -1.0), (4, 0.0), (3, 2.0)])
    ]
    feature, run = distill.Distill(cfg), SimpleNamespace(world=SOLO, model=student)
    feature.teachers = teachers
    feature.scored(run, samples, 0)
    batches = packed(samples, cfg, all_gradients=True)
    feature.batches(run, batches)
    (batch,) = batches
    expected, total = torch.zeros_like(batch.advantage), 0
    for i, sample in enumerate(samples):
        logits = dense_logits(student, sample)[None].requires_grad_()
        theirs = dense_logits(teachers[sample.prompt.columns["t"]], sample)[None]
        ids = torch.tensor(sample.token_ids)[None]
        loss = compute_sampled_token_self_distillation_loss(
            logits, theirs, ids, distillation_alpha=1.0
        )
        logp = logits.log_softmax(-1).gather(-1, ids[..., None])[..., 0]  # [1, n]
        (loss_gradient,) = torch.autograd.grad(loss.sum(), logits, retain_graph=True)
        # d(-A·logp)/dlogits is linear in A, so the gradient tells A
        (unit,) = torch.autograd.grad(-logp.sum(), logits)
        advantage = (loss_gradient * unit).sum(-1) / (unit * unit).sum(-1)
        expected[batch.sample == i] = 0.7 * advantage[0] + 0.5 * sample.advantage
        total += len(sample.token_ids)
    torch.testing.assert_close(batch.advantage, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(batch.weight, torch.full((total,), 1 / total))


# --- complete runs ---


def command(folder, output, *more):
    """Return the options of a run with two teachers, of which each prompt names one or none."""
    data = folder / "data.jsonl"
    if not data.exists():
        rows = [{"prompt": f"{i}+{i}=", "t": (0, 1, None)[i % 3]} for i in range(12)]
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "files").mkdir()
        write_files(folder / "files")
        write_base(folder / "base", tie_word_embeddings=True)
        write_base(folder / "a", seed=1)
        write_base(folder / "b", seed=2, hidden_size=32, num_hidden_layers=1)
    teachers = ["--teacher", str(folder / "a"), str(folder / "b")]
    argv = arguments(folder / "base", folder / "files", output, "--data", str(data), *teachers)
    return [*argv, "--teacher-column", "t", "--max-steps", "4", "--reward-coef", "0.5", *more]


def train(argv):
    return distill.main(distill.Options, distill.features, argv)


FORMS = [["--num-iterations", "2"], ["--jsd-beta", "0.5"]]


@pytest.mark.parametrize("form", FORMS)
def test_two_ranks_are_one_and_a_resumed_run_is_the_uninterrupted_one(form, tmp_path):
    one, two, again = tmp_path / "one", tmp_path / "two", tmp_path / "again"
    assert train(command(tmp_path, one, *form, "--save-steps", "2")) == 0
    assert ranks.run(2, train, command(tmp_path, two, *form)) == [0, 0]
    for a, b in zip(steps(one), steps(two), strict=True):
        for name in ("loss", "grad_norm", "reward"):
            assert a.get(name) == pytest.approx(b.get(name), rel=1e-6, abs=1e-6), name
    shutil.copytree(one, again)
    shutil.rmtree(again / "checkpoint-4")
    assert train(command(tmp_path, again, *form, "--save-steps", "2", "--resume")) == 0
    assert steps(again) == steps(one)
    assert_same(configurations.saved(again), configurations.saved(one))


@pytest.mark.parametrize("form", [[], ["--jsd-beta", "1"]])
def test_the_student_approaches_its_teacher(form, tmp_path, tiny_base, files):
    teacher = write_base(tmp_path / "teacher", seed=1)
    more = ["--teacher", str(teacher), "--max-steps", "60", "--learning-rate", "3e-3", *form]
    assert train(arguments(tiny_base, files, tmp_path / "run", *more)) == 0
    before, after = (
        checkpoint.load_model(tiny_base),
        checkpoint.load_model(checkpoint.checkpoints(str(tmp_path / "run"))[-1]),
    )
    ids = Sample(Prompt(0, "", [20, 21, 22]), 0, [23, 24, 25], [], True, [])
    q = dense_logits(checkpoint.load_model(teacher), ids).log_softmax(-1)
    first, last = (
        distill.divergence(dense_logits(model, ids).log_softmax(-1), q, 1.0).mean()
        for model in (before, after)
    )
    assert last < 0.6 * first


def test_a_teacher_with_another_tokenizer_is_refused(tmp_path, tiny_base, files, capsys):
    other = shutil.copytree(tiny_base, tmp_path / "other")
    raw = json.loads((other / "tokenizer.json").read_text())
    raw["added_tokens"].pop()
    raw["model"]["vocab"].popitem()
    (other / "tokenizer.json").write_text(json.dumps(raw))
    assert train(arguments(tiny_base, files, tmp_path / "run", "--teacher", str(other))) == 2
    assert "another tokenizer" in one_sentence(capsys)
