"""Checkpoints in Hugging Face's layout load in transformers and here, bit for bit, whichever side
wrote them.

Damaged folders are in tests/test_bad_input.py. Read next: tests/run/test_resume.py.
"""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from nanogrpo.errors import UserError, read_json
from nanogrpo.model import checkpoint, weights
from tests.conftest import (
    assert_same,
    edit_json,
    positions_of,
    random_tokens,
    refused,
    said,
    tiny_model,
    write_base,
)
from tests.model.peers import CLASSES, CONFIGS, peer, theirs_alone

TOKENS = random_tokens(20)
POSITIONS, ATTEND = positions_of([20])


def weights_of(model) -> dict[str, torch.Tensor]:
    return {n: t.detach().clone() for n, t in model.state_dict().items()}


# --- ours → transformers ---


@pytest.mark.parametrize("name", CONFIGS)
def test_an_export_loads_in_transformers_with_the_same_logits(tmp_path, name):
    model = tiny_model(CONFIGS[name], seed=4)
    checkpoint.export(model, tmp_path)
    theirs, info = AutoModelForCausalLM.from_pretrained(
        tmp_path, output_loading_info=True, attn_implementation="eager"
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert type(theirs).__name__ == f"{CLASSES[model.cfg.model_type]}ForCausalLM"
    assert theirs.dtype == torch.float32
    expected = theirs_alone(theirs, TOKENS, POSITIONS)
    torch.testing.assert_close(model(TOKENS, POSITIONS, ATTEND), expected, rtol=0, atol=1e-5)
    assert ("lm_head.weight" in load_file(tmp_path / "model.safetensors")) == (
        not model.cfg.tie_word_embeddings
    )
    assert_same(weights_of(checkpoint.load_model(tmp_path)), weights_of(model))


def test_the_tokenizer_is_exported_with_the_weights(tiny_base, tiny_tokenizer, tmp_path):
    checkpoint.export(checkpoint.load_model(tiny_base), tmp_path, tiny_tokenizer)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    chat = said("12+7=")
    assert theirs.apply_chat_template(chat, add_generation_prompt=True)[
        "input_ids"
    ] == tiny_tokenizer.encode_prompt(chat)
    assert (
        AutoModelForCausalLM.from_pretrained(tmp_path).generation_config.eos_token_id
        == tiny_tokenizer.stop_token_ids[0]
    )


def test_all_fields_survive_an_export_also_those_that_we_do_not_read(tmp_path):
    source, target = write_base(tmp_path / "source"), tmp_path / "target"
    target.mkdir()
    foreign = {
        "torch_dtype": "float16",
        "eos_token_id": 99,
        "initializer_range": 0.5,
        "attention_dropout": 0.25,
        "their_own": {"deep": [1, None]},
        "rope_scaling": CONFIGS["llama_scaled"].rope_scaling.to_dict(),
    }
    config = edit_json(source / "config.json", **foreign)
    model = checkpoint.load_model(source)
    shutil.rmtree(source)  # the export must not need it
    copies = weights.host_weights(model.to(torch.bfloat16))
    checkpoint.write_model(copies, config, target)
    expected = {**config, "dtype": "bfloat16", "torch_dtype": "bfloat16"}
    assert read_json(target / "config.json") == expected
    assert AutoConfig.from_pretrained(target).attention_dropout == 0.25


# --- transformers → ours ---


@pytest.mark.parametrize(
    ("name", "shards"),
    [("qwen3", 4), ("qwen3_tied", 1), ("qwen2", 1), ("qwen2_tied", 4), ("llama_biases", 1)]
    + [("llama_scaled", 1), ("mistral", 4), ("qwen3_yarn", 1), ("qwen2_linear", 1)],
)
def test_a_checkpoint_of_transformers_loads_here(tmp_path, name, shards):
    model = tiny_model(CONFIGS[name], seed=5)
    bytes_in_all = 4 * sum(p.numel() for p in model.parameters())
    peer(model).save_pretrained(tmp_path, max_shard_size=bytes_in_all // shards + 1000)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shards > 1)
    loaded = checkpoint.load_model(tmp_path)
    assert loaded.cfg == model.cfg
    assert_same(weights_of(loaded), weights_of(model))
    assert (
        loaded.lm_head.weight is loaded.model.embed_tokens.weight
    ) == model.cfg.tie_word_embeddings


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_weights_of_every_floating_point_type_become_float32_or_stay(tmp_path, dtype):
    model = tiny_model(tie_word_embeddings=True).to(dtype)
    peer(model).save_pretrained(tmp_path)
    for kind in (torch.float32, dtype):
        loaded = checkpoint.load_model(tmp_path, kind)
        assert {p.dtype for p in loaded.parameters()} == {kind}
        assert_same(weights_of(loaded), {n: t.to(kind) for n, t in weights_of(model).items()})


def test_tables_of_angles_in_old_llama_checkpoints_are_ignored(tmp_path):
    model = tiny_model(CONFIGS["llama"])
    checkpoint.export(model, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    table = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(6)}
    save_file({**tensors, **table}, tmp_path / "model.safetensors")
    assert_same(weights_of(checkpoint.load_model(tmp_path)), weights_of(model))


@pytest.mark.parametrize(
    "dtype", [torch.int32, torch.bool, torch.float8_e4m3fn, torch.complex64, torch.uint8]
)
def test_weights_that_are_not_floating_point_are_refused(tmp_path, dtype):
    checkpoint.export(tiny_model(), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(
        {**tensors, "model.norm.weight": torch.ones(48).to(dtype)}, tmp_path / "model.safetensors"
    )
    with refused(r"the tensor model\.norm\.weight is stored as [A-Z]"):
        checkpoint.load_model(tmp_path)


def test_a_model_is_found_in_a_folder_or_rejected_in_one_sentence(tiny_base, monkeypatch, tmp_path):
    monkeypatch.chdir(tiny_base.parent)
    assert checkpoint.locate(tiny_base.name) == Path(tiny_base.name)
    (tmp_path / "file").touch()
    for name in (
        "no/such",
        "/no/such",
        "./no/such",
        "a/b/c",
        "nothing",
        str(tmp_path / "file"),
        "~/model",
    ):
        with refused(r"--model \S+: .*no such folder"):
            checkpoint.locate(name)


# --- a folder is complete or absent ---


def test_a_folder_appears_only_when_it_is_complete_and_is_never_replaced(tmp_path):
    final = tmp_path / "deep" / "checkpoint-1"
    with checkpoint.atomic_folder(final) as folder:
        (folder / "thesis.tex").write_text("years of work")
        assert not final.exists()
    with refused("holds other files"), checkpoint.atomic_folder(final):
        pytest.fail("the folder may not be used")
    assert {path.name for path in tmp_path.rglob("*")} == {"deep", final.name, "thesis.tex"}
    assert (final / "thesis.tex").read_text() == "years of work"


@pytest.mark.parametrize("error", [RuntimeError("ours"), KeyboardInterrupt(), UserError("theirs")])
def test_any_exception_leaves_the_folder_and_no_other_files(tmp_path, error):
    (final := tmp_path / "checkpoint-1").mkdir()
    with pytest.raises(type(error)), checkpoint.atomic_folder(final) as folder:  # noqa: PT012
        (folder / "config.json").write_text("two")
        raise error
    assert [*tmp_path.rglob("*")] == [final]
