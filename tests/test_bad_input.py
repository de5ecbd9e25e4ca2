"""Mistakes, through the program: exit status 2, one sentence on stderr that names the culprit, no
traceback, nothing lost.

Data, rewards and the tokenizer have their own files of mistakes; these are the model's, the
options' and the output folder's. Read next: test_train.py, where runs succeed.
"""

import json
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
from tests.conftest import CUDA, tiny_model, write_base

ROOT = Path(__file__).parents[1]


def refused(capsys, model, *options: str, out: Path) -> str:
    """Runs the program, which must refuse: the sentence it says on stderr."""
    argv = [
        "--model",
        str(model),
        "--data",
        "arithmetic",
        "--max-steps",
        "1",
        "--max-completion-length",
        "8",
    ]
    assert train.main([*argv, "--output-dir", str(out), *options]) == 2
    return one_sentence(capsys.readouterr().err)


def one_sentence(err: str) -> str:
    lines = err.splitlines()
    assert len(lines) == 1, err
    assert lines[0].startswith("error: ")
    assert "Traceback" not in err
    assert not re.search(r"[.!?] [A-Z]", lines[0]), f"more than one sentence: {err}"
    return lines[0].removeprefix("error: ")


@pytest.fixture
def base(tmp_path):
    return write_base(tmp_path / "base")


# ---- the model folder ----------------------------------------------------------------------------


def set_fields(**changes):
    def damage(folder: Path) -> None:
        raw = json.loads((folder / "config.json").read_text())
        raw = {k: v for k, v in (raw | changes).items() if v is not ...}  # ...: take the field away
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


def shard(missing: bool = False, index: str | None = None):
    """The weights as two files and an index, of which one may be missing or the index wrong."""

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


def cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def fewer_words(folder: Path) -> None:
    """A whole model, whose vocabulary is smaller than its tokenizer's."""
    tokenizer = checkpoint.Tokenizer(folder)
    checkpoint.export(tiny_model(vocab_size=50), folder, tokenizer)


MODELS = {
    # what is done to the folder, and the words that the sentence must hold
    "no folder": (shutil.rmtree, r"--model \S+base: there is no such folder"),
    "no config": (remove("config.json"), r"base/config\.json is missing"),
    "config not JSON": (
        write_file("config.json", '{"model_type": '),
        r"base/config\.json is not valid JSON .*line 1",
    ),
    "config without end": (
        write_file("config.json", "[" * 100_000),
        r"base/config\.json is not valid JSON",
    ),
    "config not UTF-8": (
        lambda f: (f / "config.json").write_bytes(b'{"\xff": 1}'),
        r"base/config\.json is not valid JSON",
    ),
    "config a list": (write_file("config.json", "[]"), r"base/config\.json holds no JSON object"),
    "architecture": (
        set_fields(model_type="llama"),
        r"config\.json: model_type 'llama' is not supported.*qwen3 or qwen2",
    ),
    "mixture of experts": (
        set_fields(model_type="qwen3_moe"),
        "model_type 'qwen3_moe' is not supported",
    ),
    "no architecture": (set_fields(model_type=...), "model_type None is not supported"),
    "rope": (
        set_fields(rope_parameters={"rope_type": "yarn", "factor": 4.0}),
        "rope_type 'yarn' is not supported",
    ),
    "old rope": (
        set_fields(rope_parameters=..., rope_scaling={"type": "linear"}),
        "rope_type 'linear' is not supported",
    ),
    "sliding window": (
        set_fields(use_sliding_window=True),
        "use_sliding_window True is not supported",
    ),
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
    "a text for a number": (
        set_fields(hidden_size="48"),
        "hidden_size is '48' but must be a whole number above 0",
    ),
    "a fraction": (
        set_fields(num_hidden_layers=2.5),
        "num_hidden_layers is 2.5 but must be a whole number",
    ),
    "a zero": (set_fields(vocab_size=0), "vocab_size is 0 but must be a whole number above 0"),
    "a truth value for a number": (
        set_fields(num_hidden_layers=True),
        "num_hidden_layers is True but must be a whole number",
    ),
    "a number for a truth value": (
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
    "rope a text": (
        set_fields(rope_parameters=..., rope_scaling="linear"),
        "rope_parameters is 'linear' but must be an object",
    ),
    "an architecture that is a list": (
        set_fields(model_type=["qwen3"]),
        r"model_type \['qwen3'\] is not supported",
    ),
    "an absurd vocabulary": (
        set_fields(vocab_size=10**13),
        "vocab_size is 10000000000000 but must be .* and below 1048576",
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
        "hidden_size is 1073741824 but must be a whole number above 0 and below 1048576",
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
    "weights cut": (cut, r"base/model\.safetensors is missing or damaged"),
    "weights empty": (
        write_file("model.safetensors", ""),
        r"base/model\.safetensors is missing or damaged",
    ),
    "weights nonsense": (
        write_file("model.safetensors", "not a tensor" * 99),
        r"base/model\.safetensors is missing or damaged",
    ),
    "weights a pointer": (
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
    "index with an odd map": (
        shard(index='{"weight_map": {"a": 1}}'),
        r"model\.safetensors\.index\.json has no weight_map",
    ),
    "a tokenizer with more ids": (
        fewer_words,
        r"tokenizer\.json has ids up to 103 but config\.json a vocab_size of 50: take the tokenizer that belongs",
    ),
    "no tokenizer": (remove("tokenizer.json"), r"base has no tokenizer\.json"),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_bad_model_folder(name, base, tmp_path, capsys):
    damage, words = MODELS[name]
    damage(base)
    assert re.search(words, refused(capsys, base, out=tmp_path / "run"))
    # so that the corrected command is not taken for a second run
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_the_undamaged_folders_are_good(base, tmp_path):
    """What the damages start from trains, whole and in shards: so it was the damage that was
    refused.
    """
    argv = [
        "--data",
        "arithmetic",
        "--max-steps",
        "1",
        "--max-completion-length",
        "8",
        "--generation-batch-size",
        "8",
    ]
    assert train.main([*argv, "--model", str(base), "--output-dir", str(tmp_path / "whole")]) == 0
    shard()(base)
    assert train.main([*argv, "--model", str(base), "--output-dir", str(tmp_path / "sharded")]) == 0


def test_a_file_for_a_model(base, tmp_path, capsys):
    assert "no such folder" in refused(capsys, base / "config.json", out=tmp_path / "run")


def test_config_json_from_elsewhere_is_named():
    with pytest.raises(UserError, match=r"^elsewhere: model_type"):
        ModelConfig.from_dict({}, "elsewhere")


# ---- the options ---------------------------------------------------------------------------------

OPTIONS = {
    "--learning_rat 1": "--learning_rat is not an option: use --learning-rate, or see --help.",
    "--num-generations 1": "--num-generations is 1: it must be >= 2",
    "--num-generations 6": "--generation-batch-size 64 is not a multiple of --num-generations 6",
    "--steps-per-generation 3": "--steps-per-generation 3 does not divide the 8 prompts",
    "--learning-rate nan": "--learning-rate is nan: give a finite number",
    "--temperature inf": "--temperature is inf: give a finite number",
    "--temperature 0": "--temperature is 0.0: it must be > 0",
    "--beta nan": "--beta is nan",
    "--reward-weights nan 1": "--reward-weights is nan",
    "--max-grad-norm -inf": "--max-grad-norm",
    "--max-steps 1.5": "--max-steps: invalid int value",
    "--loss-type ppo": "--loss-type is 'ppo': choose one of grpo, bnpo, dr_grpo, dapo",
    "--max-completion-length 256": "--max-completion-length 256 leaves no room for a prompt in a context of 256",
    "--generation-batch-size 800000000": "--data arithmetic holds",
    "--gradient-checkpointing half": "--gradient-checkpointing is 'half': choose one of none, full, selective",
    "--torch-compile --gradient-checkpointing selective": "--gradient-checkpointing selective cannot be used with --torch-compile",
    "--torch-compile --torch-compile-backend gcc": "--torch-compile-backend gcc is not known to torch: choose one of",
    "--max-concurrent 100000000": "lower --token-budget or --max-concurrent",
}


@pytest.mark.parametrize("options", OPTIONS)
def test_a_bad_option(options, base, tmp_path, capsys):
    assert OPTIONS[options] in refused(capsys, base, *options.split(), out=tmp_path / "run")


@pytest.mark.skipif(CUDA, reason="there is a GPU, which this option asks for")
def test_cuda_without_cuda(base, tmp_path, capsys):
    told = refused(capsys, base, "--device", "cuda", out=tmp_path / "run")
    assert told.startswith(
        "--device cuda: rank 0 needs a GPU of its own but torch sees 0 on this machine: use --device cpu"
    )


def test_in_a_process_of_its_own(tmp_path):
    """Not a line of a traceback, a warning or a log beside the sentence, and status 2."""
    argv = [sys.executable, "train.py", "--model", str(tmp_path / "none"), "--data", "arithmetic"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 2
    assert "no such folder" in one_sentence(done.stderr)
    assert done.stdout == ""


# ---- the output folder ---------------------------------------------------------------------------


@pytest.mark.parametrize("sign", ["metrics.jsonl", "checkpoint-5"])
def test_an_output_folder_that_holds_another_run(sign, base, tmp_path, capsys):
    run = tmp_path / "run"
    (run / sign).mkdir(parents=True) if "." not in sign else (
        run.mkdir(),
        (run / sign).write_text("theirs"),
    )
    before = sorted(tmp_path.rglob("*"))
    told = refused(capsys, base, out=run)
    how = "continue it with --resume, choose another folder, or remove it with --overwrite-output-dir."
    assert told == f"--output-dir {run} already holds a run: {how}"
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("place", ["/proc/run", "{}/file", "{}/file/run"])
def test_an_output_folder_that_cannot_be_written(place, base, tmp_path, capsys):
    (tmp_path / "file").write_text("theirs")
    told = refused(capsys, base, out=Path(place.format(tmp_path)))
    assert re.search(r"--output-dir \S+ cannot be written \(.+\): choose another folder", told)
    assert (tmp_path / "file").read_text() == "theirs"


def test_a_damaged_run_is_not_resumed(base, tmp_path, capsys):
    run = tmp_path / "run"
    argv = [
        "--model",
        str(base),
        "--data",
        "arithmetic",
        "--max-steps",
        "1",
        "--max-completion-length",
        "8",
        "--output-dir",
        str(run),
    ]
    assert train.main([*argv, "--generation-batch-size", "8"]) == 0
    capsys.readouterr()
    (run / "checkpoint-1" / "state" / "__0_0.distcp").unlink()
    told = refused(capsys, base, "--generation-batch-size", "8", "--resume", out=run)
    assert told.startswith(f"--resume: {run}/checkpoint-1 is damaged (")
    assert told.endswith("remove it to continue from the one before it.")
