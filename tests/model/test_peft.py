"""Adapters and merged weights as files: peft and transformers read ours, and we read peft's. Other
kinds of adapters are rejected.

Read next: test_lora_runs.py.
"""

import dataclasses
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

import train
from nanogrpo import Config
from nanogrpo.extras.lora import adapters
from nanogrpo.model import checkpoint
from tests.conftest import arguments, edit_json, refused, write_base
from tests.model.lora_models import adapted, loaded, logits, nudge
from tests.model.peers import hugging_face, theirs


@pytest.fixture(scope="module")
def bases(tmp_path_factory) -> dict[str, Path]:
    """A checkpoint folder of each shape."""
    shapes = {
        "untied": {},
        "tied": {"tie_word_embeddings": True, "num_hidden_layers": 3},
        "qwen2": {"model_type": "qwen2", "num_hidden_layers": 3},
        "llama": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    }
    folder = tmp_path_factory.mktemp("bases")
    return {name: write_base(folder / name, **shape) for name, shape in shapes.items()}


@pytest.mark.parametrize(
    ("shape", "targets"),
    [("untied", ()), ("tied", ("q_proj", "up_proj")), ("qwen2", ()), ("llama", ())],
)
def test_peft_loads_our_adapters_and_transformers_our_merged_weights(
    bases, tmp_path, shape, targets
):
    base = bases[shape]
    cfg = Config(model=str(base), lora_r=3, lora_alpha=7, lora_target_modules=targets)
    model = nudge(loaded(base, cfg))
    adapters.write(adapters.host_adapters(model), tmp_path / "adapter", cfg)
    expected = logits(model)
    found = theirs(peft.PeftModel.from_pretrained(hugging_face(base), tmp_path / "adapter"))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    # the adapters do something
    assert not torch.allclose(found, theirs(hugging_face(base)), atol=0.1)
    (tmp_path / "merged").mkdir()
    checkpoint.export(model, tmp_path / "merged")
    torch.testing.assert_close(
        theirs(hugging_face(tmp_path / "merged")), expected, rtol=1e-5, atol=1e-5
    )
    again = loaded(base, dataclasses.replace(cfg, lora_adapter=str(tmp_path / "adapter")))
    assert all(
        torch.equal(p, dict(model.named_parameters())[n]) for n, p in again.named_parameters()
    )


@pytest.mark.parametrize(
    ("shape", "targets"), [("tied", "all-linear"), ("qwen2", ["k_proj", "down_proj"])]
)
def test_we_load_adapters_that_peft_writes(bases, tmp_path, shape, targets):
    """Also with PEFT's scale alpha/√r."""
    root = shape == "tied"
    config = peft.LoraConfig(
        r=5, lora_alpha=15, target_modules=targets, lora_dropout=0.1, use_rslora=root,
        task_type="CAUSAL_LM",
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = peft.get_peft_model(hugging_face(bases[shape]), config).eval()
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.data.normal_(0, 0.1)
    model.save_pretrained(tmp_path)
    names = () if targets == "all-linear" else tuple(targets)
    cfg = Config(
        model=str(bases[shape]),
        lora_r=5,
        lora_alpha=15 * 5**0.5 if root else 15,
        lora_target_modules=names,
        lora_adapter=str(tmp_path),
    )
    mine = loaded(bases[shape], cfg)
    torch.testing.assert_close(logits(mine), theirs(model), rtol=1e-5, atol=1e-5)


def test_adapters_are_not_added_to_weights_that_contain_them(bases, files, tmp_path, capsys):
    """A checkpoint of a run with adapters has them merged, and has them in a subfolder, too."""
    base, run = bases["tied"], tmp_path / "run"
    options = ["--lora-r", "2", "--max-steps", "2", "--save-steps", "1"]
    assert train.main(arguments(base, files, run, *options)) == 0
    capsys.readouterr()
    first, second = run / "checkpoint-1", run / "checkpoint-2"
    for adapter in (second, first):
        again = ["--lora-r", "2", "--lora-adapter", str(adapter / "adapter")]
        assert train.main(arguments(second, files, tmp_path / "again", *again)) == 2
        error = capsys.readouterr().err
        assert f"the weights of --model {second} already contain adapters for {base}" in error
        assert error.count("\n") == 1
    # on a base that has adapters of an earlier run merged, those of a later one are fine
    more = ["--lora-r", "2", "--max-steps", "1"]
    assert train.main(arguments(second, files, tmp_path / "second", *more)) == 0
    start = ["--lora-adapter", str(tmp_path / "second" / "checkpoint-1" / "adapter")]
    assert train.main(arguments(second, files, tmp_path / "third", *more, *start)) == 0


WRONG = {
    "no folder": (
        lambda f: None,
        {"lora_adapter": "nowhere"},
        "nowhere/adapter_config.json is missing",
    ),
    "another rank": (
        lambda f: None,
        {"lora_r": 8},
        r"--lora-adapter \S+ needs --lora-r 3, but this option is 8",
    ),
    "a rank in quotes": (lambda f: put(f, r="3"), {}, " needs --lora-r '3', but this option is 3"),
    "fewer layers": (
        lambda f: None,
        {"lora_target_modules": ("q_proj",)},
        r"--lora-adapter \S+: the tensor \S+_proj.lora_A.weight does not belong .*; use the model",
    ),
    "rslora": (
        lambda f: put(f, use_rslora=True),
        {},
        " needs --lora-alpha 12.12435565298214, but this option is 7",
    ),
    "from the future": (
        lambda f: put(f, use_newest_trick={"x": 1}),
        {},
        "use_newest_trick is {'x': 1}",
    ),
    "another kind": (lambda f: put(f, peft_type="IA3"), {}, "peft_type is 'IA3'"),
    "not JSON": (
        lambda f: (f / "adapter_config.json").write_text("{"),
        {},
        "adapter_config.json is not valid JSON",
    ),
    "no weights": (
        lambda f: (f / "adapter_model.safetensors").unlink(),
        {},
        "adapter_model.safetensors cannot be read",
    ),
    "a tensor gone": (lambda f: drop(f), {}, r"lora_A.weight is missing; use the model"),
}


def put(folder: Path, **fields) -> None:
    edit_json(folder / "adapter_config.json", **fields)


def drop(folder: Path) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    tensors.pop(min(tensors))
    save_file(tensors, folder / "adapter_model.safetensors")


@pytest.mark.parametrize("case", WRONG)
def test_adapters_that_do_not_fit_are_rejected_in_one_sentence(bases, tmp_path, case):
    damage, options, sentence = WRONG[case]
    cfg = Config(
        model=str(bases["tied"]), lora_r=3, lora_alpha=7, lora_adapter=str(tmp_path / "adapter")
    )
    model = adapted(dataclasses.replace(cfg, lora_adapter=""), checkpoint.load_model(bases["tied"]))
    adapters.write(adapters.host_adapters(model), tmp_path / "adapter", cfg)
    adapters.load(model, tmp_path / "adapter", cfg)  # it fits
    damage(tmp_path / "adapter")
    with refused(rf"{sentence}.*\.$"):
        loaded(bases["tied"], dataclasses.replace(cfg, **options))
