"""Tests of a user's mistakes in the model, the options and the output folder: exit status 2, one
sentence on stderr that names the problem, no traceback, and nothing lost.

Mistakes in data, rewards and the tokenizer are tested with their folders. Read next:
run/test_train.py, where runs succeed.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import train
from nanogrpo.errors import UserError
from nanogrpo.model import checkpoint
from nanogrpo.model.hf_config import ModelConfig
from tests.conftest import CUDA, tiny_model

ROOT = Path(__file__).parents[1]
RUN = ["--data", "arithmetic", "--max-steps", "1", "--max-completion-length", "8"]


def error_of(capsys, model, *options: str, out: Path) -> str:
    """Run the program, which must fail, and return the sentence on stderr."""
    argv = [*RUN, "--model", str(model), "--output-dir", str(out), *options]
    assert train.main(argv) == 2
    return one_sentence(capsys.readouterr().err)


def one_sentence(err: str) -> str:
    lines = err.splitlines()
    assert len(lines) == 1, err
    assert lines[0].startswith("error: ")
    assert "Traceback" not in err
    assert not re.search(r"[.!?] [A-Z]", lines[0]), f"more than one sentence: {err}"
    return lines[0].removeprefix("error: ")


@pytest.fixture
def base(tiny_base, tmp_path):
    """A checkpoint folder that the test may damage."""
    return shutil.copytree(tiny_base, tmp_path / "base")


# --- the model folder ---


def set_fields(**changes):
    def damage(folder: Path) -> None:
        raw = json.loads((folder / "config.json").read_text())
        raw = {k: v for k, v in (raw | changes).items() if v is not ...}  # ... removes the field
        (folder / "config.json").write_text(json.dumps(raw))

    return damage


def set_tensors(**changes):
    def damage(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors") | {
            n.replace("__", "."): t for n, t in changes.items()
        }
        save_file({n: t for n, t in tensors.items() if t is not None}, folder / "model.safetensors")

    return damage


def write_file(name: str, text: str):
    return lambda folder: (folder / name).write_text(text)


def remove(name: str):
    return lambda folder: (folder / name).unlink()


def pipe(name: str):
    def damage(folder: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return damage


def shard(missing: bool = False, index: str | None = None):
    """Write the weights as two files and an index. A file may be missing, or the index wrong."""

    def damage(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        names = sorted(tensors)
        parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
        for file, part in parts.items():
            if not (missing and file == "b.safetensors"):
                save_file({n: tensors[n] for n in part}, folder / file)
        text = index or json.dumps(
            {"weight_map": {n: file for file, part in parts.items() for n in part}}
        )
        (folder / "model.safetensors.index.json").write_text(text)

    return damage


def truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def fewer_words(folder: Path) -> None:
    """Write a model with a smaller vocabulary than that of its tokenizer."""
    tokenizer = checkpoint.Tokenizer(folder)
    checkpoint.export(tiny_model(vocab_size=50), folder, tokenizer)


MODELS = {
    # the damage to the folder, and a pattern of the message
    "no folder": (shutil.rmtree, r"--model \S+base: there is no such folder"),
    "no config": (remove("config.json"), r"base/config\.json is missing"),
    "config not JSON": (
        write_file("config.json", '{"model_type": '),
        r"base/config\.json is not valid JSON .*line 1",
    ),
    "config nested without end": (
        write_file("config.json", "[" * 100_000),
        r"base/config\.json is not valid JSON",
    ),
    "config not UTF-8": (
        lambda f: (f / "config.json").write_bytes(b'{"\xff": 1}'),
        r"base/config\.json is not valid JSON",
    ),
    "config a pipe": (pipe("config.json"), r"base/config\.json is not a file: restore it"),
    "config a list": (write_file("config.json", "[]"), r"base/config\.json holds no JSON object"),
    "architecture": (
        set_fields(model_type="gemma3"),
        r"config\.json: model_type 'gemma3' is not supported.*llama, mistral or qwen3_vl",
    ),
    "mixture of experts": (
        set_fields(model_type="qwen3_moe"),
        "model_type 'qwen3_moe' is not supported",
    ),
    "no architecture": (set_fields(model_type=...), "model_type None is not supported"),
    **{
        f"rope {kind}": (
            set_fields(rope_parameters=..., rope_scaling={"type": kind, "factor": 2.0}),
            f"rope_type '{kind}' is not supported; it must be default, linear, llama3 or yarn",
        )
        for kind in ("dynamic", "longrope", "su", "mrope", "ntk")
    },
    "rope without a factor": (
        set_fields(rope_parameters=..., rope_scaling={"type": "linear"}),
        "factor is None but rope_type linear needs a number from 1e-9 to 2e9",
    ),
    "rope with a text": (
        set_fields(rope_parameters={"rope_type": "yarn", "factor": 4.0, "beta_fast": "32"}),
        "beta_fast is '32' but rope_type yarn needs a number from 1e-9 to 2e9",
    ),
    "rope with crossed bounds": (
        set_fields(
            rope_parameters={
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 4,
                "high_freq_factor": 1,
            }
        ),
        "low_freq_factor 4 is not below high_freq_factor 1",
    ),
    "rope with a base of one": (
        set_fields(rope_parameters={"rope_type": "yarn", "factor": 4.0, "rope_theta": 1}),
        "rope_theta 1 cannot be scaled, because it is not above 1",
    ),
    "rope by layer": (
        set_fields(rope_parameters={"full_attention": {"rope_type": "default"}}),
        r"rope_parameters that differ by layer \(full_attention\) are not supported",
    ),
    "layers of another kind": (
        set_fields(layer_types=["full_attention", "sliding_attention"]),
        r"layer_types \['full_attention', 'sliding_attention'\] is not supported; every layer",
    ),
    "sliding window": (
        set_fields(use_sliding_window=True),
        "use_sliding_window True is not supported; it must be False",
    ),
    "sliding window of Mistral": (
        set_fields(model_type="mistral", sliding_window=4096),
        "sliding_window 4096 is not supported; it must be null",
    ),
    "default sliding window of Mistral": (
        set_fields(model_type="mistral"),
        "sliding_window 4096 is not supported; it must be null",
    ),
    **{
        name: (set_fields(**{name: value}), f"{name} .* is not supported; it must be")
        for name, value in {
            "partial_rotary_factor": 0.5,
            "is_causal": False,
            "qk_norm": True,
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.0078125,
            "logit_scale": 0.0625,
            "logits_scaling": 8.0,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "quantization_config": {"quant_method": "fp8"},
        }.items()
    },
    "activation": (set_fields(hidden_act="gelu"), "hidden_act 'gelu' is not supported"),
    **{
        f"no {field}": (set_fields(**{field: ...}), rf"config\.json: the field {field} is missing")
        for field in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
        )
        + ("num_key_value_heads", "max_position_embeddings")
    },
    "a string for a number": (
        set_fields(hidden_size="48"),
        "hidden_size is '48' but must be a whole number above 0",
    ),
    "a fraction": (
        set_fields(num_hidden_layers=2.5),
        "num_hidden_layers is 2.5 but must be a whole number",
    ),
    "a zero": (set_fields(vocab_size=0), "vocab_size is 0 but must be a whole number above 0"),
    "a boolean for a number": (
        set_fields(num_hidden_layers=True),
        "num_hidden_layers is True but must be a whole number",
    ),
    "a number for a boolean": (
        set_fields(tie_word_embeddings=1),
        "tie_word_embeddings is 1 but must be true or false",
    ),
    "a negative epsilon": (
        set_fields(rms_norm_eps=-1e-6),
        "rms_norm_eps is -1e-06 but must be a number above 0",
    ),
    "rope a list": (
        set_fields(rope_parameters=[1, 2]),
        r"rope_parameters is \[1, 2\] but must be an object",
    ),
    "rope a string": (
        set_fields(rope_parameters=..., rope_scaling="linear"),
        "rope_scaling is 'linear' but must be an object",
    ),
    "an architecture that is a list": (
        set_fields(model_type=["qwen3"]),
        r"model_type \['qwen3'\] is not supported",
    ),
    "an absurd vocabulary": (
        set_fields(vocab_size=10**13),
        "vocab_size is 10000000000000 but must be .* and below 16777216",
    ),
    "absurd layers": (
        set_fields(num_hidden_layers=10**9),
        "num_hidden_layers is 1000000000 but must be .* and below 4096",
    ),
    "an absurd angle": (
        set_fields(rope_parameters=..., rope_theta=10**400),
        "rope_theta is 1000.* but must be a number above 0 and",
    ),
    "absurd sizes": (
        set_fields(hidden_size=2**19, intermediate_size=2**19),
        "needs .* of memory but this machine has",
    ),
    "sizes beyond 64 bits": (
        set_fields(
            hidden_size=2**30, num_attention_heads=2**30, num_key_value_heads=2**30, head_dim=2**30
        ),
        "hidden_size is 1073741824 but must be a whole number above 0 and below 16777216",
    ),
    "heads": (
        set_fields(num_key_value_heads=3),
        "num_attention_heads must be a multiple of num_key_value_heads",
    ),
    "an odd head": (set_fields(head_dim=15), "head_dim 15 is odd"),
    "no weights": (
        remove("model.safetensors"),
        r"base holds neither model\.safetensors nor model\.safetensors\.index\.json",
    ),
    "weights a pipe": (
        pipe("model.safetensors"),
        r"model\.safetensors is not a file: copy it again",
    ),
    "truncated weights": (truncate, r"base/model\.safetensors is missing or damaged"),
    "empty weights": (
        write_file("model.safetensors", ""),
        r"base/model\.safetensors is missing or damaged",
    ),
    "weights not in the format": (
        write_file("model.safetensors", "not a tensor" * 99),
        r"base/model\.safetensors is missing or damaged",
    ),
    "weights as a pointer of git-lfs": (
        write_file("model.safetensors", "version https://git-lfs\noid sha256:0\n"),
        r"model\.safetensors is missing or damaged",
    ),
    "wrong shape": (
        set_tensors(model__norm__weight=torch.ones(47)),
        r"the tensor model\.norm\.weight has shape \(47,\) but config\.json asks for \(48,\)",
    ),
    "shape by config": (
        set_fields(intermediate_size=96),
        r"the tensor model\.layers\.\d\.mlp\.\S+ has shape",
    ),
    "missing tensor": (
        set_tensors(model__norm__weight=None),
        r"the tensor model\.norm\.weight is missing",
    ),
    "missing layer": (
        set_fields(num_hidden_layers=3),
        r"the tensor model\.layers\.2\.\S+ is missing",
    ),
    "missing head": (set_tensors(lm_head__weight=None), r"the tensor lm_head\.weight is missing"),
    "unknown tensor": (
        set_tensors(model__extra=torch.ones(1)),
        r"the tensor model\.extra does not belong to this architecture",
    ),
    "surplus layer": (
        set_fields(num_hidden_layers=1),
        r"the tensor model\.layers\.1\.\S+ does not belong",
    ),
    "missing shard": (
        shard(missing=True),
        r"base/b\.safetensors is missing or damaged",
    ),
    "index not JSON": (shard(index="{"), r"model\.safetensors\.index\.json is not valid JSON"),
    "index without a map": (
        shard(index="{}"),
        r"model\.safetensors\.index\.json has no weight_map",
    ),
    "index that leaves the folder": (
        shard(index='{"weight_map": {"a": "../b.safetensors"}}'),
        r"index\.json names \.\./b\.safetensors, which is not in that folder: download it again",
    ),
    "index with a full path": (
        shard(index='{"weight_map": {"a": "/b.safetensors"}}'),
        r"index\.json names /b\.safetensors, which is not in that folder",
    ),
    "index with an odd map": (
        shard(index='{"weight_map": {"a": 1}}'),
        r"model\.safetensors\.index\.json has no weight_map",
    ),
    "a tokenizer with more ids": (
        fewer_words,
        r"tokenizer\.json has ids up to 103 but config\.json a vocab_size of 50: take",
    ),
    "no tokenizer": (remove("tokenizer.json"), r"base has no tokenizer\.json"),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_bad_model_folder(name, base, tmp_path, capsys):
    damage, message = MODELS[name]
    damage(base)
    assert re.search(message, error_of(capsys, base, out=tmp_path / "run"))
    # otherwise the corrected command would find an earlier run
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_the_folders_are_good_before_the_damage(base, tmp_path):
    """Train from the folder with one file of weights, and with two shards."""
    argv = [*RUN, "--model", str(base), "--generation-batch-size", "8", "--output-dir"]
    assert train.main([*argv, str(tmp_path / "whole")]) == 0
    shard()(base)
    assert train.main([*argv, str(tmp_path / "sharded")]) == 0


def test_a_file_in_place_of_a_model_folder(base, tmp_path, capsys):
    assert "no such folder" in error_of(capsys, base / "config.json", out=tmp_path / "run")


def test_the_message_names_the_source_of_the_model_config():
    with pytest.raises(UserError, match=r"^elsewhere: model_type"):
        ModelConfig.from_dict({}, "elsewhere")


# --- the options ---

OPTIONS = {
    "--learning_rat 1": "--learning_rat is not an option: use --learning-rate, or see --help.",
    "--num-generations 1": "--num-generations is 1: it must be >= 2",
    "--num-generations 6": "--generation-batch-size 64 is not a multiple of --num-generations 6",
    "--temperature inf": "--temperature is inf: give a finite number",
    "--max-steps 1.5": "--max-steps: invalid int value",
    "--loss-type ppo": "--loss-type is 'ppo': choose one of grpo, bnpo, dr_grpo, dapo",
    "--max-completion-length 256": "--max-completion-length 256 leaves no room for a prompt in a",
    "--generation-batch-size 800000000": "--data arithmetic holds",
    "--torch-compile --torch-compile-backend gcc": "--torch-compile-backend gcc is not known to",
    "--max-concurrent 100000000": "lower --token-budget or --max-concurrent",
}


@pytest.mark.parametrize("options", OPTIONS)
def test_a_bad_option(options, base, tmp_path, capsys):
    assert OPTIONS[options] in error_of(capsys, base, *options.split(), out=tmp_path / "run")


@pytest.mark.skipif(CUDA, reason="this machine has a GPU")
def test_cuda_without_cuda(base, tmp_path, capsys):
    message = error_of(capsys, base, "--device", "cuda", out=tmp_path / "run")
    assert message.startswith("--device cuda: rank 0 needs a GPU of its own, but torch sees 0 on")
    assert "use --device cpu" in message


def test_a_separate_process_prints_one_sentence_and_exits_with_2(tmp_path):
    """Print no traceback, warning or log next to the sentence."""
    argv = [sys.executable, "train.py", "--model", str(tmp_path / "none"), "--data", "arithmetic"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 2
    assert "no such folder" in one_sentence(done.stderr)
    assert done.stdout == ""


# --- the output folder ---


@pytest.mark.parametrize("name", ["metrics.jsonl", "checkpoint-5"])
def test_an_output_folder_with_another_run(name, base, tmp_path, capsys):
    run = tmp_path / "run"
    run.mkdir()
    if name == "metrics.jsonl":
        (run / name).write_text("theirs")
    else:
        (run / name).mkdir()
    before = sorted(tmp_path.rglob("*"))
    assert error_of(capsys, base, out=run) == (
        f"--output-dir {run} already holds a run: continue it with --resume, choose another folder,"
        " or remove it with --overwrite-output-dir."
    )
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("place", ["/proc/run", "{}/file", "{}/file/run"])
def test_an_output_folder_that_is_not_writable(place, base, tmp_path, capsys):
    (tmp_path / "file").write_text("theirs")
    message = error_of(capsys, base, out=Path(place.format(tmp_path)))
    assert re.search(r"--output-dir \S+ cannot be written \(.+\): choose another folder", message)
    assert (tmp_path / "file").read_text() == "theirs"


def test_a_damaged_run_is_not_resumed(base, tmp_path, capsys):
    run = tmp_path / "run"
    argv = [*RUN, "--model", str(base), "--output-dir", str(run), "--generation-batch-size", "8"]
    assert train.main(argv) == 0
    capsys.readouterr()
    (run / "checkpoint-1" / "state" / "__0_0.distcp").unlink()
    message = error_of(capsys, base, "--generation-batch-size", "8", "--resume", out=run)
    assert message.startswith(f"--resume: {run}/checkpoint-1 is damaged (")
    assert message.endswith("start again in another folder, because no other checkpoint is sound.")
