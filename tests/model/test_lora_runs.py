"""Full runs with adapters, and their reference model.

Resuming and ranks are rows of tests/configurations.py.
"""

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import train
from nanogrpo import Config
from nanogrpo import step as experience
from nanogrpo.extras.attach import attach
from nanogrpo.extras.commandline import parse
from nanogrpo.extras.lora import lora
from nanogrpo.model import checkpoint, weights
from nanogrpo.run import setup as parts
from tests.conftest import SOLO, arguments, random_batch, steps
from tests.model.lora_models import loaded, nudge

RUN = "--lora-r 4 --lora-alpha 8 --beta 0.05 --num-iterations 2 --learning-rate 1e-2"


def go(base: Path, files: Path, output: Path, *options: str) -> list[dict]:
    assert train.main(arguments(base, files, output, *RUN.split(), *options)) == 0
    return steps(output)


def test_a_run_trains_and_saves_only_adapters_from_which_another_can_start(
    tied_base, files, tmp_path
):
    rows = go(tied_base, files, tmp_path / "run")
    assert [row["step"] for row in rows] == [0, 1, 2]
    # in the first step the reference is the policy itself, before its first update
    assert 0 <= rows[0]["kl"] < rows[-1]["kl"]
    last = tmp_path / "run" / "checkpoint-3"
    saved = dcp.FileSystemReader(last / "state").read_metadata().state_dict_metadata
    names = {n.partition(".")[2] for n in saved}
    assert names == {
        n for n, _ in loaded(tied_base, Config(lora_r=4)).named_parameters() if lora.is_adapter(n)
    } | {""}
    from_there = go(
        tied_base,
        files,
        tmp_path / "more",
        "--lora-adapter",
        str(last / "adapter"),
        "--max-steps",
        "1",
    )
    assert from_there[0]["kl"] > 1e-4  # against the base, not the loaded adapter


@pytest.mark.parametrize("options", [[], ["--load-in-4bit"]], ids=["float32", "four bits"])
def test_the_reference_is_the_base_and_no_second_model_is_kept(tied_base, files, tmp_path, options):
    cfg = parse(arguments(tied_base, files, tmp_path, *RUN.split(), *options))
    inputs = parts.load(cfg, SOLO, attach(cfg))
    parts.settle(inputs)
    run = parts.setup(inputs)
    assert run.ref_model is run.model
    batch = random_batch([(3, 9), (5, 4)], vocab_size=104, off_policy=False)
    expected = experience.logp(run.model, batch, cfg)  # B is zero
    nudge(run.model)
    experience.add_logps(run, [batch])
    torch.testing.assert_close(batch.ref_logp, expected, rtol=0, atol=1e-6)
    assert (batch.ref_logp - batch.old_logp).abs().max() > 0.1
    merged = checkpoint.load_model(tied_base)
    merged.load_state_dict(dict(weights.full_parameters(run.model)), strict=False)
    expected = experience.logp(merged, batch, cfg)  # as engines sample
    torch.testing.assert_close(batch.old_logp, expected, rtol=0, atol=1e-5)
