"""A reference model that follows the policy: its closed form, and its part of a checkpoint. A
reference from another folder: it teaches the policy, and it must fit.

Rows of tests/configurations.py test both in a resumed run and on several ranks. Read next:
tests/model/test_lora.py, where the reference is the model with its adapters off.
"""

import json
import re
import subprocess
import sys

import pytest
import torch
import torch.distributed.checkpoint as dcp

import train
from bench import predict
from examples.recipes import distill
from nanogrpo import Config
from nanogrpo.extras import memory
from nanogrpo.extras.reference import FrozenModels
from nanogrpo.model import checkpoint
from tests.conftest import (
    SOLO,
    arguments,
    one_sentence,
    steps,
    tiny_model,
    write_base,
)

RUN = (
    "--beta 0.05 --ref-model-mixup-alpha 0.3 --ref-model-sync-steps 2"
    " --learning-rate 1e-2 --adam-epsilon 1e-5 --token-budget 60 --save-steps 1"
    " --save-total-limit 0 --max-steps"
)


def test_a_run_updates_its_reference_every_so_many_steps(files, tmp_path):
    """Every weight becomes ref₂ = a·p₂ + (1-a)·(a·p₁ + (1-a)·p₀), even tied and one-dimensional
    ones.
    """
    base = write_base(tmp_path / "base", tie_word_embeddings=True)
    mixed, fixed = tmp_path / "mixed", tmp_path / "fixed"
    assert train.main(arguments(base, files, mixed, f"{RUN} 5")) == 0
    start, two, four = (
        dict(checkpoint.load_model(folder).named_parameters())
        for folder in (base, mixed / "checkpoint-2", mixed / "checkpoint-4")
    )
    saved = {f"reference.{name}": torch.zeros_like(p) for name, p in start.items()}
    dcp.load(saved, checkpoint_id=mixed / "checkpoint-5/state", no_dist=True)
    for name in start:  # updated after steps 2 and 4, not after 5
        expected = 0.3 * four[name] + 0.7 * (0.3 * two[name] + 0.7 * start[name])
        torch.testing.assert_close(saved[f"reference.{name}"], expected, rtol=1e-5, atol=1e-6)
    never = f"{RUN} 3 --ref-model-sync-steps 100"
    assert train.main(arguments(base, files, fixed, never)) == 0
    mixed, fixed = ([row["kl"] for row in steps(folder)] for folder in (mixed, fixed))
    assert fixed[0] == pytest.approx(0, abs=1e-9)
    assert mixed[:2] == pytest.approx(fixed[:2], rel=1e-4, abs=1e-6)
    assert mixed[2] < 0.95 * fixed[2]  # from the third step on, the reference is closer


def test_a_fixed_reference_is_not_saved_and_without_beta_there_is_none(rows_of, tmp_path):
    model = tiny_model()
    inputs = predict.inputs(model, SOLO, 10)
    rows = [
        {r.name: r.bytes for r in memory.table(inputs, Config(beta=0.1, ref_model_sync_steps=s))}
        for s in (0, 9)
    ]
    n, name = sum(p.nbytes for p in model.parameters()), "a checkpoint that is being written"
    assert rows[1][name] - rows[0][name] == n
    for beta, kept in (("0.1", True), ("0", False)):
        (row,) = rows_of(f"--beta {beta} --max-steps 1", folder=beta)
        saved = dcp.FileSystemReader(tmp_path / beta / "checkpoint-1" / "state").read_metadata()
        assert not [key for key in saved.state_dict_metadata if key.startswith("reference.")]
        assert ("kl" in row) == kept


def test_the_kl_to_another_reference_distills_it_without_rewards(rows_of, tmp_path):
    teacher = write_base(tmp_path / "teacher", seed=1, num_hidden_layers=1)
    options = "--beta 1 --reward-weights 0 --learning-rate 1e-2 --max-steps 30 --num-generations 8"
    options += " --generation-batch-size 64 --ref-model"
    kl = [row["kl"] for row in rows_of(options, str(teacher))]
    assert sum(kl[-5:]) < 0.7 * sum(kl[:5])


def test_the_estimate_of_the_memory_counts_frozen_models_and_no_copy_of_the_model():
    model = tiny_model(num_hidden_layers=4)
    inputs, cfg = predict.inputs(model, SOLO, 10), Config(beta=0.1, ref_model="t")
    other = FrozenModels("--ref-model", ["t"])
    other.frozen, inputs.features = [tiny_model(num_hidden_layers=6, seed=1)], [other]
    rows = {row.name: row.bytes for row in memory.table(inputs, cfg)}
    sizes = {n: p.numel() for n, p in other.frozen[0].named_parameters()}
    gathered = sum(n for name, n in sizes.items() if not re.search(r"layers\.[2-5]", name))
    assert rows["frozen model t"] == 4 * sum(sizes.values())
    assert rows["gathered of t"] == 2 * gathered
    assert rows["reference model"] == 0


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"num_hidden_layers": 1}, ""),
        ({"max_position_embeddings": 12}, "t has a context of less than the"),
        ({"vocab_size": 999}, ""),  # padding
        (None, "t has another tokenizer: choose a related model"),
    ],
)
@pytest.mark.parametrize("program", ["--ref-model", "--teacher"])
def test_frozen_models_must_fit(program, change, problem, tiny_base, files, tmp_path, capsys):
    other = write_base(tmp_path / "t", **(change or {}))
    if change is None:
        raw = json.loads((other / "tokenizer.json").read_text())
        a, b = (token["content"] for token in raw["added_tokens"][:2])
        vocabulary = raw["model"]["vocab"]
        vocabulary[a], vocabulary[b] = vocabulary[b], vocabulary[a]
        (other / "tokenizer.json").write_text(json.dumps(raw))
    argv = arguments(tiny_base, files, tmp_path / "run", f"{program} {other} --max-steps 1")
    if program == "--teacher":
        status = distill.main(distill.Options, distill.features, argv)
    else:
        status = train.main([*argv, "--beta", "1"])
    assert status == (2 if problem else 0)
    assert not problem or problem in one_sentence(capsys)


def test_a_frozen_model_may_have_scaled_positions_or_windows_even_if_the_model_has_none():
    """In a process of its own, because other tests import these extras."""
    program = """
from nanogrpo.extras import reference
from nanogrpo.model import hf_config, rope
assert rope.SCALINGS and hf_config.READERS"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_resumed_run_notices_that_its_reference_has_changed(rows_of, tmp_path, capsys):
    other = str(write_base(tmp_path / "other", seed=1))
    rows_of("--beta 1 --max-steps 1 --ref-model", other, folder="run")
    write_base(tmp_path / "other", seed=2)
    with pytest.raises(AssertionError):
        rows_of("--beta 1 --max-steps 2 --resume --ref-model", other, folder="run")
    assert "--resume: the weights of --ref-model have changed" in one_sentence(capsys)
