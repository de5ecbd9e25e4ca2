"""Self-distillation: the gradient is that of TRL's loss on separate forward passes.

Read next: examples/recipes/self_distill.py.
"""

from types import SimpleNamespace

import pytest
import torch

from examples.recipes import self_distill
from nanogrpo.model.decoder import logits
from nanogrpo.types import Prompt
from tests.conftest import (
    SOLO,
    arguments,
    one_sentence,
    packed,
    positions_of,
    refused,
    tiny_model,
    write_rows,
)
from tests.recipes import run, two_groups


def dense(model, prompt, ids):
    """Return the logits [1, n, V] for the tokens of a completion, without packing."""
    tokens = torch.tensor(prompt + ids)
    rows = torch.arange(len(prompt), len(tokens)) - 1
    return model(tokens, *positions_of([len(tokens)]))[rows][None]


def test_the_gradient_is_that_of_trls_loss():
    """TRL's sampled-token loss, which SDPO and SDFT share, on the logits of two passes: with the
    hint for the teacher, and without for the student. The average is over all tokens.
    """
    pytest.importorskip("trl")
    from trl.experimental.sdpo.loss_utils import compute_sampled_token_self_distillation_loss

    cfg = self_distill.Options(hint_column="h")
    prompts = [Prompt(0, "", [1, 2, 3]), Prompt(1, "", [4, 5])]
    prompts[0].hinted, prompts[1].hinted = [1, 2, 9, 9, 3], [4, 5]
    samples = two_groups(prompts)
    ours, theirs = tiny_model().double(), tiny_model().double()
    feature, run = self_distill.SelfDistill(cfg), SimpleNamespace(world=SOLO, model=ours)
    feature.scored(run, samples, 0)
    batches = packed(samples, cfg, all_gradients=True)
    feature.batches(run, batches)
    for batch in batches:
        scores = ours.forward_strip(batch, logits)  # [M, V]
        logp = scores.log_softmax(-1).gather(1, batch.targets[:, None]).squeeze(1)
        (-batch.advantage * batch.weight * logp).sum().backward()
    for sample in samples:
        ids, prompt = torch.tensor(sample.token_ids)[None], sample.prompt
        teacher = dense(theirs, prompt.hinted, sample.token_ids).detach()
        student = dense(theirs, prompt.token_ids, sample.token_ids)
        loss = compute_sampled_token_self_distillation_loss(
            student, teacher, ids, distillation_alpha=1.0
        )
        (loss.sum() / 14).backward()
    for a, b in zip(ours.parameters(), theirs.parameters()):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-7)
    assert any(batch.advantage.any() for batch in batches)


def test_the_model_does_without_the_hint(tmp_path, learned):
    """The divergence of the prompt from the hinted prompt falls."""
    rows = [{"prompt": f"{i}+{i}=", "h": f"{i}"} for i in range(12)]
    data = write_rows(tmp_path / "data.jsonl", rows)
    given = f"--data {data} --hint-column h --max-steps 30"
    first, last = learned(self_distill, "loss", given)
    assert last < 0.5 * first


def test_a_model_that_reads_pictures_is_refused():
    with refused("the teacher reads no pictures"):
        self_distill.SelfDistill(None).model(SimpleNamespace(model=SimpleNamespace(visual=0)), None)


@pytest.mark.parametrize(
    ("column", "problem"),
    [("nothing", "has no such column"), ("h", "some hints exceed the context")],
)
def test_hints_that_are_missing_or_too_long_are_one_sentence(
    column, problem, tmp_path, tiny_base, files, capsys
):
    (tmp_path / "data.jsonl").write_text(f'{{"prompt": "1+1=", "h": "{"9" * 900}"}}\n' * 4)
    given = f"--data {tmp_path}/data.jsonl --hint-column {column}"
    assert run(self_distill, arguments(tiny_base, files, tmp_path / "run", given)) == 2
    assert f"--hint-column {column}" in (error := one_sentence(capsys))
    assert problem in error
