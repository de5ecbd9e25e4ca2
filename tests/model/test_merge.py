"""`nanogrpo merge` writes what a run writes with --save-merged, and what peft computes; a run that
saves only adapters resumes, and its checkpoints are as large as estimated.

Read next: nanogrpo/model/merge.py, test_peft.py.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file

import train
from nanogrpo.config import Config
from nanogrpo.errors import UserError, read_json
from nanogrpo.model import adapters, checkpoint, lora, merge
from nanogrpo.model.tokenizer import Tokenizer
from nanogrpo.run import memory, optim, state
from nanogrpo.run import setup as parts
from tests.conftest import SOLO, arguments, tiny_model, write_base
from tests.model.lora_ranks import nudge, write_bases
from tests.model.peers import hugging_face, theirs


@pytest.fixture(scope="module")
def bases(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("bases")
    out = write_bases(folder)
    out["bfloat16"] = write_base(folder / "bfloat16", tie_word_embeddings=True)
    half = checkpoint.load_model(out["bfloat16"], torch.bfloat16)
    checkpoint.export(half, out["bfloat16"], Tokenizer(out["bfloat16"]))
    return out


def same(a: Path, b: Path) -> bool:
    """Return whether two checkpoints have the same weights and the same config.json."""
    one, two = (load_file(folder / "model.safetensors") for folder in (a, b))
    equal = one.keys() == two.keys() and all(torch.equal(one[n], two[n]) for n in one)
    return equal and read_json(a / "config.json") == read_json(b / "config.json")


@pytest.mark.parametrize("shape", ["qwen2", "bfloat16"])
@pytest.mark.parametrize("bits", [[], ["--load-in-4bit"]])
def test_adapters_saved_alone_resume_and_merge_to_what_a_run_saves_merged(
    bases, files, tmp_path, shape, bits
):
    def run(output: str, *options: str) -> Path:
        more = ["--lora-r", "3", "--learning-rate", "1e-2", *bits, *options]
        argv = arguments(bases[shape], files, tmp_path / output, *more)
        assert train.main(argv) == 0
        return tmp_path / output / "checkpoint-2"

    whole = run("whole", "--max-steps", "2")
    run("alone", "--max-steps", "1", "--no-save-merged")
    alone = run("alone", "--max-steps", "2", "--no-save-merged", "--resume")
    assert {path.name for path in alone.iterdir()} == {"adapter", "state", "state.json"}
    assert merge.main([str(alone), str(tmp_path / "merged")]) == 0
    assert same(tmp_path / "merged", whole)
    assert Tokenizer(tmp_path / "merged").vocab_size == Tokenizer(whole).vocab_size
    # the adapters of a merged checkpoint, too, and the folder of the adapters themselves
    merge.merge(whole / "adapter", tmp_path / "again")
    assert same(tmp_path / "again", whole)
    assert not same(whole, bases[shape])


def test_adapters_of_peft_are_merged_as_peft_does(bases, tmp_path):
    config = peft.LoraConfig(
        r=5, lora_alpha=15, use_rslora=True, target_modules=["q_proj", "up_proj"]
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = peft.get_peft_model(hugging_face(bases["llama"]), config).eval()
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.data.normal_(0, 0.1)
    model.save_pretrained(tmp_path / "adapter")
    merge.merge(tmp_path, tmp_path / "merged")
    expected = theirs(model.merge_and_unload())
    found = theirs(hugging_face(tmp_path / "merged"))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def written(base: Path, folder: Path, **options) -> Path:
    """Write adapters with the files that a run writes next to them."""
    cfg = Config(model=str(base), lora_r=3, lora_alpha=7, **options)
    model = checkpoint.empty_model(base)
    lora.attach(model, cfg)
    model = nudge(parts.load_sharded(model, base, SOLO, cfg))
    adapters.write(adapters.host_adapters(model), folder, cfg)
    return folder


def put(folder: Path, **fields) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


WRONG = {
    "no adapters": (lambda f: shutil.rmtree(f), "adapter_config.json is missing: check the path"),
    "no JSON": (
        lambda f: (f / "adapter_config.json").write_text("{"),
        "adapter_config.json is not valid JSON",
    ),
    "no rank": (lambda f: put(f, r=None), "does not describe adapters (--lora-r is None"),
    "a rank of text": (lambda f: put(f, r="x"), "does not describe adapters (--lora-r is 'x'"),
    "no layers": (lambda f: put(f, target_modules=None), "does not describe adapters"),
    "a pattern": (lambda f: put(f, target_modules=".*proj"), "choose one of q_proj, k_proj"),
    "another kind": (
        lambda f: put(f, peft_type="LOHA"),
        "nanogrpo merge FOLDER: peft_type is 'LOHA', but only LORA can be loaded",
    ),
    "dora": (lambda f: put(f, use_dora=True), "nanogrpo merge FOLDER: use_dora is True"),
    "no base": (lambda f: put(f, base_model_name_or_path=None), "--model is None"),
    "a base that is gone": (
        lambda f: put(f, base_model_name_or_path="/nowhere/base"),
        "base_model_name_or_path in FOLDER/adapter_config.json: /nowhere/base: there is no such",
    ),
    "fewer layers": (
        lambda f: put(f, target_modules=["q_proj"]),
        "does not belong to this architecture; use the model and the --lora-target-modules",
    ),
    "no weights": (
        lambda f: (f / "adapter_model.safetensors").unlink(),
        "adapter_model.safetensors is missing or damaged",
    ),
    "bad quantization": (
        lambda f: (f / "quantization_config.json").write_text("[]"),
        "quantization_config.json holds no JSON object",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_adapters_that_cannot_be_merged_are_reported_in_one_sentence(bases, tmp_path, capsys, case):
    folder = written(bases["tied"], tmp_path / "adapters")
    break_, message = WRONG[case]
    break_(folder)
    assert merge.main([str(folder), str(tmp_path / "merged")]) == 2
    error = capsys.readouterr().err
    assert message.replace("FOLDER", str(folder)) in error
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert not (tmp_path / "merged").exists()


def test_a_merged_model_replaces_nothing(bases, tmp_path):
    folder = written(bases["tied"], tmp_path / "adapters")
    (tmp_path / "file").write_text("a file")
    for out in (folder, tmp_path / "file", bases["tied"]):
        with pytest.raises(UserError, match=f"{out} exists already: name a new folder"):
            merge.merge(folder, out)
    assert (folder / "adapter_model.safetensors").exists()


@pytest.mark.parametrize("inner", ["", "adapter"])
def test_adapters_alone_are_no_model_and_a_sentence_says_so(bases, tmp_path, inner):
    folder = tmp_path / "checkpoint 3"
    folder.mkdir()
    written(bases["tied"], folder / "adapter")
    named = folder / inner
    message = f"--model {named} holds only adapters: .* nanogrpo merge '{named}' FOLDER"
    with pytest.raises(UserError, match=message):
        checkpoint.locate(str(named))


def size(tensors: dict[str, torch.Tensor]) -> int:
    return sum(t.nbytes for t in tensors.values())


@pytest.mark.parametrize(
    "options", [{}, {"lora_r": 4}, {"lora_r": 4, "save_merged": False}, {"save_only_model": True}]
)
def test_a_checkpoint_is_as_large_as_estimated(options):
    cfg = Config(**options)
    model = tiny_model()
    model.saved_dtype = torch.bfloat16
    lora.attach(model, cfg)
    adapters.initialize(model, cfg)
    expected = size(adapters.host_adapters(model))
    if cfg.save_merged:
        expected += size(checkpoint.host_weights(model, torch.bfloat16))
    if not cfg.save_only_model:
        kept = state.tensors(model, optim.make_optimizer(model, cfg))
        expected += size(kept) - kept["updates"].nbytes
    assert memory.on_disk(model, cfg) == expected
