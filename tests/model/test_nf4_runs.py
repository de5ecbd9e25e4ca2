"""Training on a base in four bits: on several ranks, in full runs, resumed, and wrong options.

The ranks run the code in lora_ranks.py. Read next: test_nf4.py.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

import train
from nanogrpo import step as experience
from nanogrpo.cli import parse
from nanogrpo.config import Config
from nanogrpo.model import checkpoint, lora
from nanogrpo.run import setup as parts
from tests.conftest import SOLO, arguments, random_batch, steps
from tests.distributed.training import differ
from tests.model.lora_ranks import (
    LIMIT,
    every_run,
    every_variant,
    nudge,
    program,
    three_steps,
    write_bases,
)
from tests.ranks import run as on_ranks

FOUR = {"load_in_4bit": True, "share_prompts": False}


@pytest.fixture(scope="module")
def bases(tmp_path_factory) -> dict[str, Path]:
    return write_bases(tmp_path_factory.mktemp("bases"))


@pytest.fixture(scope="module")
def alone(bases) -> dict[str, tuple]:
    return {name: three_steps(bases[name], FOUR) for name in ("untied", "qwen2")}


VARIANTS = [
    ("untied", FOUR | {"gradient_checkpointing": "full", "token_budget": 60}),
    ("qwen2", FOUR | {"gradient_checkpointing": "selective", "token_budget": 200}),
    ("untied", FOUR | {"reshard_after_forward": "never", "cpu_offload": True}),
]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_gradients_and_adapters_do_not_depend_on_ranks_or_memory_options(bases, alone, size):
    """The blocks of a matrix are divided among the ranks, also where that cuts its rows."""
    found = on_ranks(size, every_variant, bases, VARIANTS)
    for results in [*found, every_run(bases, VARIANTS[:2])] if size == 1 else found:
        for (name, options), (grads, merged, sent, off) in zip(VARIANTS, results):
            assert differ(alone[name][0], grads) < LIMIT, (name, options)
            assert differ(alone[name][1], merged) < LIMIT
            assert differ(alone[name][2], sent) < LIMIT
            assert (off - alone[name][3]).abs().max() < 1e-5


def test_the_rest_of_a_base_in_four_bits_may_be_in_bfloat16(bases, alone):
    half = {"lora_base_dtype": "bfloat16"}
    (results,) = on_ranks(1, every_variant, bases, [("untied", FOUR | half)])
    ((grads, merged, sent, off),) = results
    assert differ(alone["untied"][0], grads) < 0.05
    assert {g.dtype for g in grads.values()} == {torch.float32}
    assert differ(alone["untied"][1], merged) < 2**-8
    assert {w.dtype for w in sent.values()} == {torch.bfloat16}
    assert off.dtype == torch.bfloat16


# --- full runs ---

RUN = [
    "--load-in-4bit",
    "--lora-r",
    "4",
    "--beta",
    "0.05",
    "--num-iterations",
    "2",
    "--learning-rate",
    "1e-2",
]


def go(argv: list[str], size: int = 1) -> None:
    codes = on_ranks(size, program, argv) if size > 1 else [train.main(argv)]
    assert codes == [0] * size


@pytest.mark.parametrize("size", [1, 2])
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(bases, files, tmp_path, size):
    base = bases["untied"]

    def run(output: str, *options: str) -> None:
        go(arguments(base, files, tmp_path / output, *RUN, *options), size)

    run("whole", "--max-steps", "4")
    rows = steps(tmp_path / "whole")
    assert max(row["sampling/sampling_logp_difference/max"] for row in rows) < 1e-4
    assert 0 <= rows[0]["kl"] < rows[-1]["kl"]
    run("parts", "--max-steps", "2")
    run("parts", "--max-steps", "4", "--resume")
    assert steps(tmp_path / "parts")[-2:] == rows[-2:]
    for file in ("model.safetensors", "adapter/adapter_model.safetensors"):
        a, b = (load_file(tmp_path / name / "checkpoint-4" / file) for name in ("whole", "parts"))
        assert a.keys() == b.keys()
        assert all(torch.equal(a[n], b[n]) for n in a)
    last = tmp_path / "whole" / "checkpoint-4"
    saved = dcp.FileSystemReader(last / "state").read_metadata().state_dict_metadata
    assert all(lora.is_adapter(name) or name == "updates" for name in saved)
    how = json.loads((last / "adapter" / "quantization_config.json").read_text())
    assert how["bnb_4bit_quant_type"] == "nf4"
    # an ordinary checkpoint, in the dtype of the base
    full = {n: (p.shape, p.dtype) for n, p in load_file(base / "model.safetensors").items()}
    merged = load_file(last / "model.safetensors")
    assert {n: (p.shape, p.dtype) for n, p in merged.items()} == full


def test_the_reference_is_the_base_in_four_bits(bases, files, tmp_path):
    cfg = parse(arguments(bases["untied"], files, tmp_path, *RUN))
    run = parts.setup(cfg, SOLO)
    assert run.reference is run.model
    batch = random_batch([(3, 9), (5, 4)], vocab_size=104)
    expected = experience.logp(run.model, batch, cfg)  # B is zero
    nudge(run.model)
    experience.add_logps(run, [batch])
    torch.testing.assert_close(batch.ref_logp, expected, rtol=0, atol=1e-6)
    assert (batch.ref_logp - batch.old_logp).abs().max() > 0.1


def test_a_run_with_a_vllm_server_sends_merged_weights(bases):
    """`full_parameters` of a trained model is an ordinary model that computes the same."""
    cfg = Config(model=str(bases["untied"]), lora_r=4, load_in_4bit=True)
    model = checkpoint.empty_model(bases["untied"])
    lora.attach(model, cfg)
    model = nudge(parts.load_sharded(model, bases["untied"], SOLO, cfg))
    merged = checkpoint.load_model(bases["untied"])
    merged.load_state_dict(dict(lora.full_parameters(model, computed=True)))
    batch = random_batch([(3, 9), (5, 4)], vocab_size=104)
    ours, exact = (experience.logp(m, batch, cfg) for m in (model, merged))
    torch.testing.assert_close(ours, exact, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--load-in-4bit"], "--load-in-4bit is True, which has no effect without --lora-r: set"),
        (
            ["--load-in-4bit", "--lora-r", "4", "--torch-compile"],
            "--load-in-4bit cannot be used with --torch-compile, because the compiler could",
        ),
    ],
)
def test_a_wrong_option_is_reported_in_one_sentence(
    bases, files, tmp_path, capsys, options, sentence
):
    assert train.main(arguments(bases["untied"], files, tmp_path, *options)) == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert len(error) == 1
    assert error[0].startswith(f"error: {sentence}")


def test_vllm_cannot_start_from_weights_in_four_bits(bases, files, tmp_path, capsys):
    folder = tmp_path / "base"
    folder.mkdir()
    for file in bases["untied"].iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
    }
    (folder / "config.json").write_text(json.dumps(config))
    argv = arguments(folder, files, tmp_path / "run", *RUN, "--engine", "vllm")
    assert train.main(argv) == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert len(error) == 1
    assert error[0].startswith(f"error: --engine vllm would load {folder} in 4 bits, into which")
