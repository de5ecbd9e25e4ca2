"""A reference that follows the policy: mixed in closed form, alike on any number of ranks, saved
and continued; not with LoRA.

Read next: test_lora.py, where the reference is the model with its adapters off.
"""

from __future__ import annotations

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

RUN = [
    "--beta",
    "0.05",
    "--sync-ref-model",
    "--ref-model-mixup-alpha",
    "0.3",
    "--ref-model-sync-steps",
    "2",
]
RUN += ["--learning-rate", "1e-2", "--token-budget", "60"]


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return write_base(tmp_path_factory.mktemp("base") / "tied", tie_word_embeddings=True)


def test_two_mixes_in_closed_form():
    """ref₂ = a·p₂ + (1-a)·(a·p₁ + (1-a)·p₀), for every weight, the tied and the one-dimensional
    ones too.
    """
    models = [tiny_model(seed=s, tie_word_embeddings=True).requires_grad_(False) for s in range(4)]
    reference, first, second, start = (dict(m.named_parameters()) for m in models)
    start = {n: p.clone() for n, p in reference.items()}
    policy = {n: p.clone() for n, p in first.items()}
    fsdp.mix(models[0], models[1], 0.3)
    fsdp.mix(models[0], models[2], 0.3)
    for name, p in reference.items():
        expected = 0.3 * second[name] + 0.7 * (0.3 * first[name] + 0.7 * start[name])
        torch.testing.assert_close(p, expected, rtol=1e-6, atol=1e-7)
        assert torch.equal(first[name], policy[name])  # the policy is not touched
    fsdp.mix(models[0], models[1], 1.0)
    assert all(torch.equal(p, first[n]) for n, p in reference.items())


def trained(argv: list[str]) -> int:
    return train.main(argv)


def go(size: int, base: Path, files: Path, output: Path, *options: str) -> list[dict]:
    assert on_ranks(size, trained, arguments(base, files, output, *RUN, *options)) == [0] * size
    return steps(output)


def reference_of(output: Path, base: Path) -> dict[str, torch.Tensor]:
    """The reference in the last checkpoint, whole."""
    model = checkpoint.load_model(base)
    out = {f"reference.{n}": torch.zeros_like(p) for n, p in model.named_parameters()}
    dcp.load(out, checkpoint_id=checkpoint.checkpoints(str(output))[-1] / "state", no_dist=True)
    return {n.removeprefix("reference."): t for n, t in out.items()}


def weights_after(output: Path, step: int) -> dict[str, torch.Tensor]:
    return dict(checkpoint.load_model(output / f"checkpoint-{step}").named_parameters())


def test_a_run_mixes_every_so_many_steps_and_the_kl_is_to_the_mix(base, files, tmp_path):
    rows = go(
        1, base, files, tmp_path, "--max-steps", "5", "--save-steps", "1", "--save-total-limit", "0"
    )
    start, two, four = (
        dict(checkpoint.load_model(base).named_parameters()),
        *(weights_after(tmp_path, n) for n in (2, 4)),
    )
    found = reference_of(tmp_path, base)
    for name, p in found.items():  # after steps 2 and 4, not after 5
        expected = 0.3 * four[name] + 0.7 * (0.3 * two[name] + 0.7 * start[name])
        torch.testing.assert_close(p, expected, rtol=1e-5, atol=1e-6)
    never = go(
        1, base, files, tmp_path / "never", "--max-steps", "5", "--ref-model-sync-steps", "100"
    )
    assert [row["kl"] for row in rows[:2]] == [row["kl"] for row in never[:2]]
    assert rows[2]["kl"] < never[2]["kl"]  # from the third step on, the reference has come closer


def close(a: list[dict], b: list[dict]) -> bool:
    same = [x.keys() == y.keys() for x, y in zip(a, b, strict=True)]
    return all(same) and all(
        abs(x[k] - y[k]) <= 2e-6 * max(1, abs(x[k])) for x, y in zip(a, b) for k in x
    )


def test_two_ranks_are_one(base, files, tmp_path):
    one, two = (
        go(n, base, files, tmp_path / str(n), "--max-steps", "4", "--adam-epsilon", "1e-5")
        for n in (1, 2)
    )
    assert close(one, two)
    a, b = (reference_of(tmp_path / str(n), base) for n in (1, 2))
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", [1, 2])
def test_a_resumed_run_has_the_same_reference_bit_for_bit(base, files, tmp_path, size):
    """Interrupted between two syncs, when the reference is neither the base nor the policy."""
    whole = go(size, base, files, tmp_path / "whole", "--max-steps", "5")
    go(size, base, files, tmp_path / "parts", "--max-steps", "3")
    again = go(size, base, files, tmp_path / "parts", "--max-steps", "5", "--resume")
    assert again[-2:] == whole[-2:]
    a, b = (reference_of(tmp_path / name, base) for name in ("whole", "parts"))
    assert all(torch.equal(a[n], b[n]) for n in a)
    assert not torch.equal(
        a["model.norm.weight"],
        dict(checkpoint.load_model(base).named_parameters())["model.norm.weight"],
    )


def mixed_shards(base: Path) -> tuple[float, int]:
    """After forwards without a backward, which leave both roots gathered: the error of the mix, and
    this rank's numbers of it.
    """
    cfg = Config(model=str(base), device="cpu")
    with join(cfg) as world:
        model, reference = (
            parts.load_sharded(checkpoint.empty_model(base), base, world, cfg) for _ in range(2)
        )
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(2)
        for m in (model, reference):
            experience.logp(m, random_batch([(3, 5)], vocab_size=104), cfg)
        fsdp.mix(reference, model, 0.25)
        local = sum(p.to_local().numel() for p in reference.parameters())
        # it gathers what was mixed, not what was before
        experience.logp(reference, random_batch([(3, 5)], vocab_size=104), cfg)
        fsdp.reshard(reference)
        start = dict(checkpoint.load_model(base).named_parameters())
        return max(
            (gathered(p) - 1.25 * start[n]).abs().max().item()
            for n, p in reference.named_parameters()
        ), local


def test_each_rank_mixes_its_shards_alone(base):
    found = on_ranks(2, mixed_shards, base)
    assert all(error < 1e-6 for error, _ in found)
    assert sum(local for _, local in found) == sum(
        p.numel() for p in checkpoint.load_model(base).parameters()
    )


def test_a_reference_that_stays_is_not_saved_and_none_is_kept_without_beta(base, files, tmp_path):
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
def test_mistakes_are_told_in_a_sentence(base, files, tmp_path, capsys, options, sentence):
    assert train.main(arguments(base, files, tmp_path, *RUN, *options)) == 2
    assert capsys.readouterr().err.startswith(f"error: {sentence}")
