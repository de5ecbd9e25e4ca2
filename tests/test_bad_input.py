"""Tests of a user's mistakes in the model's folder: exit status 2, one sentence on stderr that
names the problem, and no traceback.

Mistakes in the options are in test_mistakes.py, in the output folder in run/test_output.py, damage
at random in test_mutations.py. Read next: run/test_train.py, where runs succeed.
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
from nanogrpo.model import checkpoint
from tests.conftest import CUDA, one_sentence, tiny_model

ROOT = Path(__file__).parents[1]


def error_of(capsys, model, out: Path, device: str = "auto") -> str:
    """Run the program, which must fail, and return the sentence on stderr."""
    argv = f"--model {model} --output-dir {out} --device {device} --data arithmetic"
    argv += " --max-steps 1 --max-completion-length 8"
    assert train.main(argv.split()) == 2
    return one_sentence(capsys)


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


def in_its_place(name: str, target: str):
    """Replace a file by a link to `target` in the same folder."""

    def damage(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(target)

    return damage


def index(text: str):
    """Write an index, and rename the file of weights to a.safetensors."""

    def damage(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / "a.safetensors")
        (folder / "model.safetensors.index.json").write_text(text)

    return damage


def fewer_words(folder: Path) -> None:
    """Write a model with a smaller vocabulary than that of its tokenizer."""
    tokenizer = checkpoint.Tokenizer(folder)
    checkpoint.export(tiny_model(vocab_size=50), folder, tokenizer)


MODELS = {
    # the damage to the folder, and a pattern of the message
    "no folder": (shutil.rmtree, r"--model \S+base: there is no such folder"),
    "no config": (remove("config.json"), r"base/config\.json is missing"),
    "config a list": (
        write_file("config.json", "[]"),
        r"base/config\.json must contain a JSON object",
    ),
    "architecture": (
        set_fields(model_type="gemma3"),
        r"config\.json: model_type 'gemma3' is not supported.*\"llama\" or \"mistral\"",
    ),
    "no architecture": (set_fields(model_type=...), "model_type None is not supported"),
    **{
        f"rope {kind}": (
            set_fields(rope_parameters=..., rope_scaling={"type": kind, "factor": 2.0}),
            f"rope_type '{kind}' is not supported; it must be .*llama3. or .yarn",
        )
        for kind in ("dynamic", "longrope", "su", "mrope", "ntk")
    },
    **{
        f"part of the dimensions, {name}": (
            set_fields(**{"rope_scaling": None, name: {**rope, "partial_rotary_factor": 0.5}}),
            r"config\.json: partial_rotary_factor 0\.5 is not supported; it must be 1 or null",
        )
        for name in ("rope_scaling", "rope_parameters")
        for rope in ({"rope_type": "default"}, {"rope_type": "linear", "factor": 2.0})
    },
    "rope without a factor": (
        set_fields(rope_parameters=..., rope_scaling={"type": "linear"}),
        r"config\.json does not describe a model \(KeyError: 'factor'\): use",
    ),
    **{
        f"a text as {name}": (
            set_fields(**{"rope_scaling": None, "rope_parameters": {"rope_theta": 1e4}, **fields}),
            r"config\.json does not describe a model \(.*\): use",
        )
        for name, fields in {
            "theta": {"rope_parameters": {"rope_theta": "a"}},
            "eps": {"rms_norm_eps": "1e-6"},
            "factor": {"rope_parameters": {"rope_type": "linear", "factor": "a"}},
        }.items()
    },
    **{
        f"{name} {x}": (
            set_fields(**{"rope_parameters": None, name: x}),
            rf"config\.json: {name} {x} is not supported; it must be .a number above 0",
        )
        for name, x in [("rms_norm_eps", 0), ("rms_norm_eps", -1e-6), ("rope_theta", 0)]
        + [("rope_theta", -1e4), ("rope_theta", float("inf"))]
    },
    "layers of another kind": (
        set_fields(use_sliding_window=True, sliding_window=8, layer_types=["chunked_attention"]),
        "layer_types 'chunked_attention' is not supported; it must be .* or \"sliding_attention\"",
    ),
    "a kind for too many layers": (
        set_fields(use_sliding_window=True, sliding_window=8, layer_types=["full_attention"] * 9),
        "the length of layer_types 9 is not supported; it must be 2",
    ),
    "windows that are off": (
        set_fields(layer_types=["full_attention", "sliding_attention"]),
        "layer_types 'sliding_attention' is not supported; it must be \"full_attention\"",
    ),
    "windows without a size": (
        set_fields(use_sliding_window=True, sliding_window=None),
        "use_sliding_window True is not supported; it must be false or null",
    ),
    "windows of true": (
        set_fields(model_type="mistral", sliding_window=True),
        "sliding_window True is not supported; it must be null",
    ),
    "windows from no layer on": (
        set_fields(use_sliding_window=True, sliding_window=8, max_window_layers=None),
        "the type of max_window_layers 'NoneType' is not supported; it must be \"int\"",
    ),
    "windows of no token": (
        set_fields(model_type="mistral", sliding_window=0),
        "sliding_window 0 is not supported; it must be null",
    ),
    **{
        name: (set_fields(**{name: value}), f"{name} .* is not supported; it must be")
        for name, value in {
            "partial_rotary_factor": 0.5,
            "is_causal": False,
            "quantization_config": {"quant_method": "fp8"},
        }.items()
    },
    "activation": (set_fields(hidden_act="gelu"), "hidden_act 'gelu' is not supported"),
    "absurd sizes": (
        set_fields(hidden_size=2**19, intermediate_size=2**19),
        "do not fit into memory",
    ),
    "no weights": (
        remove("model.safetensors"),
        r"base holds neither model\.safetensors nor model\.safetensors\.index\.json",
    ),
    "weights as a pointer of git-lfs": (
        write_file("model.safetensors", "version https://git-lfs\noid sha256:0\n"),
        r"model\.safetensors cannot be read",
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
    "missing head": (set_tensors(lm_head__weight=None), r"the tensor lm_head\.weight is missing"),
    "unknown tensor": (
        set_tensors(model__extra=torch.ones(1)),
        r"the tensor model\.extra does not belong to this architecture",
    ),
    "missing shard": (
        index('{"weight_map": {"model.norm": "a.safetensors", "lm_head": "b.safetensors"}}'),
        r"base/b\.safetensors cannot be read",
    ),
    "index without a map": (
        index("{}"),
        r"model\.safetensors\.index\.json has no weight_map",
    ),
    "a tokenizer with more ids": (
        fewer_words,
        r"tokenizer\.json has ids up to 103, but the vocab_size in config\.json is 50: use",
    ),
    "no tokenizer": (remove("tokenizer.json"), r"base/tokenizer\.json cannot be read \(No such"),
    **{
        f"{name} {kind}": (
            in_its_place(name, target),
            rf"base/{name} (cannot be read|is missing|is not valid JSON)",
        )
        for name in ("chat_template.jinja", "generation_config.json", "special_tokens_map.json")
        for kind, target in {"a dangling link": "nowhere", "a loop": name, "a folder": "."}.items()
    },
    "weights a dangling link": (
        in_its_place("model.safetensors", "nowhere"),
        r"base/model\.safetensors cannot be read",
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_bad_model_folder(name, base, tmp_path, capsys):
    damage, message = MODELS[name]
    damage(base)
    assert re.search(message, error_of(capsys, base, tmp_path / "run"))
    # otherwise the corrected command would find an earlier run
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


# --- the options ---


@pytest.mark.skipif(CUDA, reason="this machine has a GPU")
def test_cuda_without_cuda(base, tmp_path, capsys):
    message = error_of(capsys, base, tmp_path / "run", device="cuda")
    assert message.startswith("--device cuda: rank 0 needs its own GPU, but torch sees 0 on")
    assert "use --device cpu" in message


def test_a_separate_process_prints_one_sentence_and_exits_with_2(tmp_path):
    """Print no traceback, warning or log next to the sentence."""
    argv = f"{sys.executable} train.py --model {tmp_path}/none --data arithmetic".split()
    done = subprocess.run(argv, capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"error: --model \S+none: there is no such folder.*\n", done.stderr)
