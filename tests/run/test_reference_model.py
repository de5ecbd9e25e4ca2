"""A reference model that follows the policy: its closed form, the same on any number of ranks,
saved and resumed.

Read next: tests/model/test_lora.py, where the reference is the model with its adapters off.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import train
from nanogrpo import step as experience
from nanogrpo.config import Config
from nanogrpo.distributed import fsdp
from nanogrpo.distributed.world import join
from nanogrpo.model import checkpoint
from nanogrpo.model.lora import gathered
from nanogrpo.run import memory
from nanogrpo.run import setup as parts
from tests.conftest import SOLO, arguments, random_batch, steps, tiny_model, write_base
from tests.ranks import run as on_ranks

UPDATES = "--beta 0.05 --sync-ref-model --ref-model-mixup-alpha 0.3 --ref-model-sync-steps 2"
RUN = [*UPDATES.split(), "--learning-rate", "1e-2", "--adam-epsilon", "1e-5"]
RUN += ["--token-budget", "60", "--max-steps", "5", "--save-steps", "1", "--save-total-limit", "0"]


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return write_base(tmp_path_factory.mktemp("base") / "tied", tie_word_embeddings=True)


def test_two_updates_in_closed_form():
    """Every weight is ref₂ = a·p₂ + (1-a)·(a·p₁ + (1-a)·p₀), even tied and one-dimensional ones."""
    cfg = Config(beta=0.1, sync_ref_model=True, ref_model_mixup_alpha=0.3, ref_model_sync_steps=4)
    models = [tiny_model(seed=s, tie_word_embeddings=True).requires_grad_(False) for s in range(3)]
    reference, first, second = (dict(m.named_parameters()) for m in models)
    start = {n: p.clone() for n, p in reference.items()}
    policy = {n: p.clone() for n, p in first.items()}
    for finished, model in ((3, models[2]), (4, models[1]), (5, models[1]), (8, models[2])):
        fsdp.update_reference(models[0], model, cfg, finished)  # after steps 4 and 8 only
    fsdp.update_reference(models[0], model, Config(beta=0.1), 12)  # not without --sync-ref-model
    for name, p in reference.items():
        expected = 0.3 * second[name] + 0.7 * (0.3 * first[name] + 0.7 * start[name])
        torch.testing.assert_close(p, expected, rtol=1e-6, atol=1e-7)
        assert torch.equal(first[name], policy[name])  # the policy is unchanged


def go(size: int, base: Path, files: Path, output: Path, *options: str) -> list[dict]:
    assert on_ranks(size, train.main, arguments(base, files, output, *RUN, *options)) == [0] * size
    return steps(output)


def reference_of(output: Path, base: Path) -> dict[str, torch.Tensor]:
    """Return the full reference in the last checkpoint."""
    model = checkpoint.load_model(base)
    out = {f"reference.{n}": torch.zeros_like(p) for n, p in model.named_parameters()}
    dcp.load(out, checkpoint_id=checkpoint.checkpoints(str(output))[-1] / "state", no_dist=True)
    return {n.removeprefix("reference."): t for n, t in out.items()}


@pytest.fixture(scope="module")
def two_ranks(base, files, tmp_path_factory) -> Path:
    """A run of five steps on two ranks."""
    folder = tmp_path_factory.mktemp("two")
    go(2, base, files, folder)
    return folder


def test_a_run_updates_its_reference_every_so_many_steps(base, files, tmp_path, two_ranks):
    start, two, four = (
        dict(checkpoint.load_model(folder).named_parameters())
        for folder in (base, two_ranks / "checkpoint-2", two_ranks / "checkpoint-4")
    )
    for name, p in reference_of(two_ranks, base).items():  # after steps 2 and 4, not after 5
        expected = 0.3 * four[name] + 0.7 * (0.3 * two[name] + 0.7 * start[name])
        torch.testing.assert_close(p, expected, rtol=1e-5, atol=1e-6)
    never = [*RUN, "--max-steps", "3", "--ref-model-sync-steps", "100"]
    assert train.main(arguments(base, files, tmp_path, *never)) == 0
    mixed, fixed = ([row["kl"] for row in steps(folder)] for folder in (two_ranks, tmp_path))
    assert mixed[:2] == pytest.approx(fixed[:2], rel=1e-4, abs=1e-6)
    assert mixed[2] < 0.95 * fixed[2]  # from the third step on, the reference is closer


def test_two_ranks_are_one(base, files, tmp_path, two_ranks):
    one = go(1, base, files, tmp_path)
    for a, b in zip(one, steps(two_ranks), strict=True):
        assert a.keys() == b.keys()
        assert all(abs(a[k] - b[k]) <= 2e-6 * max(1, abs(a[k])) for k in a)
    a, b = (reference_of(folder, base) for folder in (tmp_path, two_ranks))
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-5, atol=1e-6)


def test_a_resumed_run_has_the_same_reference_bit_for_bit(base, files, tmp_path, two_ranks):
    """Interrupted between two updates, when the reference is neither the base nor the policy."""
    go(2, base, files, tmp_path, "--max-steps", "3")
    assert go(2, base, files, tmp_path, "--resume") == steps(two_ranks)
    a, b = (reference_of(folder, base) for folder in (tmp_path, two_ranks))
    assert all(torch.equal(a[n], b[n]) for n in a)
    norm = dict(checkpoint.load_model(base).named_parameters())["model.norm.weight"]
    assert not torch.equal(a["model.norm.weight"], norm)


def mixed_shards(base: Path) -> tuple[float, int]:
    """Return the error of an update after forwards without a backward, which leave both roots
    gathered, and the size of this rank's shards.
    """
    cfg = Config(model=str(base), device="cpu", beta=0.1, sync_ref_model=True)
    cfg = dataclasses.replace(cfg, ref_model_mixup_alpha=0.25, ref_model_sync_steps=1)
    with join(cfg) as world:
        model, reference = (
            parts.load_sharded(checkpoint.empty_model(base), base, world, cfg) for _ in range(2)
        )
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(2)
        for m in (model, reference):
            experience.logp(m, random_batch([(3, 5)], vocab_size=104), cfg)
        fsdp.update_reference(reference, model, cfg, 1)
        local = sum(p.to_local().numel() for p in reference.parameters())
        # gathers the new values, not the old ones
        experience.logp(reference, random_batch([(3, 5)], vocab_size=104), cfg)
        fsdp.reshard(reference)
        start = dict(checkpoint.load_model(base).named_parameters())
        return max(
            (gathered(p) - 1.25 * start[n]).abs().max().item()
            for n, p in reference.named_parameters()
        ), local


def test_each_rank_updates_only_its_shards(base):
    found = on_ranks(2, mixed_shards, base)
    assert all(error < 1e-6 for error, _ in found)
    assert sum(local for _, local in found) == sum(
        p.numel() for p in checkpoint.load_model(base).parameters()
    )


def test_a_fixed_reference_is_not_saved_and_without_beta_there_is_none(base, files, tmp_path):
    model = tiny_model()
    rows = [
        {r.name: r.bytes for r in memory.table(model, Config(beta=0.1, sync_ref_model=s), SOLO, 10)}
        for s in (False, True)
    ]
    n, name = sum(p.nbytes for p in model.parameters()), "a checkpoint that is being written"
    assert rows[1][name] - rows[0][name] == n
    for beta, kept in (("0.1", True), ("0", False)):
        argv = arguments(base, files, tmp_path / beta, "--beta", beta, "--max-steps", "1")
        assert train.main(argv) == 0
        saved = (
            dcp.FileSystemReader(tmp_path / beta / "checkpoint-1" / "state")
            .read_metadata()
            .state_dict_metadata
        )
        assert not [key for key in saved if key.startswith("reference.")]
        assert ("kl" in steps(tmp_path / beta)[0]) == kept


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            ["--beta", "0"],
            "--sync-ref-model is True, which has no effect without --beta: set that too.",
        ),
        (
            ["--lora-r", "4"],
            "--sync-ref-model cannot be used with --lora-r, because the reference is then the base",
        ),
        (
            ["--ref-model-mixup-alpha", "1.5"],
            "--ref-model-mixup-alpha is 1.5: it must be <= 1.",
        ),
        (["--ref-model-mixup-alpha", "0"], "--ref-model-mixup-alpha is 0.0: it must be > 0."),
        (["--ref-model-sync-steps", "0"], "--ref-model-sync-steps is 0: it must be > 0."),
    ],
)
def test_mistakes_are_reported_in_one_sentence(base, files, tmp_path, capsys, options, sentence):
    assert train.main(arguments(base, files, tmp_path, *RUN, *options)) == 2
    assert capsys.readouterr().err.startswith(f"error: {sentence}")
