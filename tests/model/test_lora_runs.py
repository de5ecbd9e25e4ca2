"""Training with adapters on one rank and two, compiled, in full runs, and resumed.

The ranks run the code in lora_ranks.py.
"""

from __future__ import annotations

from pathlib import Path

import peft
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
from tests.model.lora_ranks import (
    LIMIT,
    every_run,
    every_variant,
    loaded,
    nudge,
    program,
    three_steps,
    write_bases,
)
from tests.model.peers import hugging_face, theirs
from tests.ranks import run as on_ranks


@pytest.fixture(scope="module")
def bases(tmp_path_factory) -> dict[str, Path]:
    return write_bases(tmp_path_factory.mktemp("bases"))


# --- ranks ---


@pytest.fixture(scope="module")
def alone(bases) -> dict[str, tuple]:
    return {name: three_steps(bases[name], {"share_prompts": False}) for name in ("untied", "tied")}


def differ(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return (
        sum((a[n] - b[n]).norm() ** 2 for n in a) ** 0.5 / sum(a[n].norm() ** 2 for n in a) ** 0.5
    ).item()


VARIANTS = [
    ("untied", {"gradient_checkpointing": "full", "token_budget": 60}),
    (
        "tied",
        {"gradient_checkpointing": "selective", "share_prompts": False, "token_budget": 200},
    ),
    ("untied", {"reshard_after_forward": "never", "token_budget": 100}),
    ("tied", {"cpu_offload": True}),
]
DROPOUT = [
    ("tied", {"lora_dropout": 0.3, "token_budget": 200, "gradient_checkpointing": kind})
    for kind in ("none", "full", "selective")
]


@pytest.mark.parametrize("size", [1, 2])
def test_gradients_and_adapters_do_not_depend_on_ranks_or_memory_options(bases, alone, size):
    """Checks recomputation, micro-batches, shared prompts, resharding and offloading. Every rank
    gets the full merged weights. Dropout depends on the micro-batches, but not on recomputation.
    """
    runs = VARIANTS if size == 2 else VARIANTS[:2]
    every = runs + DROPOUT
    found = on_ranks(size, every_variant, bases, every) if size == 2 else [every_run(bases, every)]
    for results in found:
        none, full, selective = results[len(runs) :]
        assert differ(none[0], full[0]) == differ(none[0], selective[0]) == 0
        assert differ(alone["tied"][0], none[0]) > 1e-2
        assert (none[3] - alone["tied"][3]).abs().max() < 1e-5
        for (name, options), (grads, merged, sent, off) in zip(runs, results):
            assert differ(alone[name][0], grads) < LIMIT, (name, options)
            assert differ(alone[name][1], merged) < LIMIT
            assert differ(alone[name][2], sent) < LIMIT
            assert (off - alone[name][3]).abs().max() < 1e-5
    base = dict(checkpoint.load_model(bases["tied"]).named_parameters())
    assert differ(alone["tied"][1], base) > 1e-3


HALVES = [
    ("tied", {"lora_base_dtype": "bfloat16", "token_budget": 10**6}),
    ("untied", {"lora_base_dtype": "bfloat16", "token_budget": 60, "cpu_offload": True}),
]


@pytest.mark.parametrize("size", [1, 2])
def test_a_bfloat16_base_is_trained_on_ranks_up_to_its_rounding(bases, alone, size):
    """Gradients are sums of products that are rounded to 8 bits. The merged weights are rounded
    once, and the adapters are trained in float32.
    """
    for results in on_ranks(size, every_variant, bases, HALVES):
        for (name, _), (grads, merged, sent, off) in zip(HALVES, results):
            assert differ(alone[name][0], grads) < 0.05
            assert {g.dtype for g in grads.values()} == {torch.float32}
            assert differ(alone[name][1], merged) < 2**-8
            assert {w.dtype for w in sent.values()} == {torch.bfloat16}
            assert differ(alone[name][2], sent) < 2**-8
            assert off.dtype == torch.bfloat16


def test_compiled_blocks_give_the_same(bases):
    """Checks recomputation and disabled adapters too. aot_eager traces as inductor does, without a
    C compiler.
    """
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    few = {"lora_target_modules": ("q_proj", "down_proj"), "token_budget": 200}
    compiled = {
        "torch_compile": True,
        "torch_compile_backend": "aot_eager",
        "gradient_checkpointing": "full",
    }
    (grads, merged, _, off), plain = (
        three_steps(bases["tied"], few | compiled),
        three_steps(bases["tied"], few),
    )
    assert differ(plain[0], grads) < LIMIT
    assert differ(plain[1], merged) < LIMIT
    assert (off - plain[3]).abs().max() < 1e-5
    # For any number of blocks and all lengths: four graphs per block, three more for the first
    # block, whose input has no gradient, and four without gradients.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 4 + 3 + 4


# --- full runs ---

RUN = [
    "--lora-r",
    "4",
    "--lora-alpha",
    "8",
    "--beta",
    "0.05",
    "--num-iterations",
    "2",
    "--learning-rate",
    "1e-2",
]


def go(base: Path, files: Path, output: Path, *options: str) -> list[dict]:
    assert train.main(arguments(base, files, output, *RUN, *options)) == 0
    return steps(output)


def test_a_run_trains_adapters_and_leaves_folders_for_peft_and_transformers(bases, files, tmp_path):
    base = bases["tied"]
    rows = go(base, files, tmp_path / "run")
    assert [row["step"] for row in rows] == [0, 1, 2]
    # in the first step the reference is the policy itself, before its first update
    assert 0 <= rows[0]["kl"] < rows[-1]["kl"]
    last = tmp_path / "run" / "checkpoint-3"
    merged, both = (
        hugging_face(last),
        peft.PeftModel.from_pretrained(hugging_face(base), last / "adapter"),
    )
    torch.testing.assert_close(theirs(merged), theirs(both), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(theirs(merged), theirs(hugging_face(base)), atol=1e-2)
    saved = dcp.FileSystemReader(last / "state").read_metadata().state_dict_metadata
    names = {n.partition(".")[2] for n in saved}
    assert names == {
        n for n, _ in loaded(base, Config(lora_r=4)).named_parameters() if lora.is_adapter(n)
    } | {""}
    from_there = go(
        base, files, tmp_path / "more", "--lora-adapter", str(last / "adapter"), "--max-steps", "1"
    )
    assert from_there[0]["kl"] > 1e-4  # against the base, not the loaded adapter


@pytest.mark.parametrize(("size", "dtype"), [(1, "float32"), (2, "float32"), (2, "bfloat16")])
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(bases, files, tmp_path, size, dtype):
    """With dropout, whose random numbers depend on the step."""
    dropout = ["--lora-dropout", "0.2", "--use-rslora", "--lora-base-dtype", dtype]

    def run(output: str, *options: str) -> None:
        argv = arguments(bases["tied"], files, tmp_path / output, *RUN, *dropout, *options)
        codes = on_ranks(size, program, argv) if size > 1 else [train.main(argv)]
        assert codes == [0] * size

    run("whole", "--max-steps", "4")
    gaps = [row["sampling/sampling_logp_difference/max"] for row in steps(tmp_path / "whole")]
    # the dropout is not part of it, and the engine computes in float32
    assert max(gaps) < (1e-4 if dtype == "float32" else 0.5)
    run("parts", "--max-steps", "2")
    run("parts", "--max-steps", "4", "--resume")
    assert steps(tmp_path / "parts")[-2:] == steps(tmp_path / "whole")[-2:]
    for file in ("model.safetensors", "adapter/adapter_model.safetensors"):
        a, b = (load_file(tmp_path / name / "checkpoint-4" / file) for name in ("whole", "parts"))
        assert a.keys() == b.keys()
        assert all(torch.equal(a[n], b[n]) for n in a)


def test_a_run_with_a_bfloat16_base_leaves_the_folders_of_one_with_float32(bases, files, tmp_path):
    """Same names, shapes and dtypes. transformers computes the same with the merged weights as with
    the base, rounded, and the adapters.
    """
    shapes = {}
    for dtype in ("float32", "bfloat16"):
        go(bases["tied"], files, tmp_path / dtype, "--lora-base-dtype", dtype)
        for file in ("model.safetensors", "adapter/adapter_model.safetensors"):
            saved = load_file(tmp_path / dtype / "checkpoint-3" / file)
            found = {n: (w.shape, w.dtype) for n, w in saved.items()}
            assert shapes.setdefault(file, found) == found
    last, base = tmp_path / "bfloat16" / "checkpoint-3", hugging_face(bases["tied"])
    base.load_state_dict({n: w.bfloat16().float() for n, w in base.state_dict().items()})
    both = peft.PeftModel.from_pretrained(base, last / "adapter")
    torch.testing.assert_close(theirs(hugging_face(last)), theirs(both), rtol=1e-5, atol=1e-5)


def test_the_reference_is_the_base_and_no_second_model_is_kept(bases, files, tmp_path):
    cfg = parse(arguments(bases["tied"], files, tmp_path, *RUN, "--lora-dropout", "0.5"))
    run = parts.setup(cfg, SOLO)
    assert run.reference is run.model
    nudge(run.model)
    batch = random_batch([(3, 9), (5, 4)], vocab_size=104)
    experience.add_logps(run, [batch])
    expected = experience.logp(checkpoint.load_model(bases["tied"]), batch, cfg)
    torch.testing.assert_close(batch.ref_logp, expected, rtol=0, atol=1e-6)
    assert (batch.ref_logp - batch.old_logp).abs().max() > 0.1
    merged = checkpoint.load_model(bases["tied"])
    merged.load_state_dict(dict(lora.full_parameters(run.model)), strict=False)
    expected = experience.logp(merged, batch, cfg)  # without dropout, as engines sample
    torch.testing.assert_close(batch.old_logp, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            ["--lora-target-modules", "lm_head"],
            "--lora-target-modules is 'lm_head': choose one of q_proj",
        ),
        (
            ["--lora-r", "0", "--lora-adapter", "x"],
            "--lora-alpha is 8.0, which has no effect without --lora-r",
        ),
        (["--sync-ref-model"], "--sync-ref-model cannot be used with --lora-r"),
        (["--lora-r", "-1"], "--lora-r is -1"),
        (["--lora-alpha", "0"], "--lora-alpha is 0.0"),
        (["--lora-dropout", "1"], "--lora-dropout is 1.0: it must be < 1"),
        (
            ["--lora-base-dtype", "float16"],
            "--lora-base-dtype is 'float16': choose one of auto, float32, bfloat16",
        ),
        (["--lora-dropout", "-0.1"], "--lora-dropout is -0.1: it must be >= 0"),
    ],
)
def test_a_wrong_option_is_reported_in_one_sentence(
    bases, files, tmp_path, capsys, options, sentence
):
    assert train.main(arguments(bases["tied"], files, tmp_path, *RUN, *options)) == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert len(error) == 1
    assert error[0].startswith(f"error: {sentence}")
