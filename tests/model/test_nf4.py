"""Frozen weights in four bits: the layers, files of bitsandbytes, PEFT on top of it, the engine and
the memory.

bitsandbytes itself quantizes and dequantizes the expected values. Read next: test_lora_runs.py
(ranks and full runs), test_nf4_kernels.py (the kernels), test_trl_nf4.py.
"""

import dataclasses
import functools
import json
import shutil
from pathlib import Path

import bitsandbytes as bnb
import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from nanogrpo import Config
from nanogrpo.errors import read_json
from nanogrpo.extras.lora import adapters, lora, nf4
from nanogrpo.extras.lora.engine import SharingEngine
from nanogrpo.extras.lora.feature import LoRA
from nanogrpo.extras.lora.options import LORA_TARGETS
from nanogrpo.grpo import loss as grpo
from nanogrpo.model import checkpoint, weights
from nanogrpo.model.decoder import Decoder
from tests.conftest import random_batch, refused, write_base
from tests.model import lora_models
from tests.model.lora_models import gradient, logits, nudge
from tests.model.peers import theirs
from tests.run.allocator import most_at_once
from tests.run.test_memory import Live

FOUR = Config(lora_r=4, lora_alpha=10, load_in_4bit=True)
PLAIN = dataclasses.replace(FOUR, load_in_4bit=False)
# 320 blocks in gate, up and down: more than the 256 that share a factor
SHAPE = {"hidden_size": 64, "intermediate_size": 320}


def loaded(base: Path, cfg: Config = FOUR) -> Decoder:
    """Load a checkpoint as a run does, with adapters whose B is not zero."""
    return nudge(lora_models.loaded(base, cfg))


def as_in_bitsandbytes(weight: torch.Tensor) -> torch.Tensor:
    """Return the weight as bitsandbytes rounds it. In rows of one block, because on a CPU,
    bitsandbytes 0.50 dequantizes rows that are not whole blocks with the wrong scales.
    """
    blocks = weight.detach().reshape(-1, nf4.BLOCK)
    packed, state = bnb.functional.quantize_4bit(blocks, quant_type="nf4", compress_statistics=True)
    return bnb.functional.dequantize_4bit(packed, state).view(weight.shape)


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return write_base(tmp_path_factory.mktemp("nf4") / "base", **SHAPE)


def bitsandbytes_model(folder: Path, config: dict | None = None):
    """Load a checkpoint with transformers and bitsandbytes, in float32."""
    nested = dict(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    how = transformers.BitsAndBytesConfig(**(config or nested))
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, quantization_config=how, attn_implementation="eager"
    )
    # otherwise bitsandbytes may change its weights to another layout, for a kernel from the hub
    return model.train()


# --- the layers ---


@pytest.mark.parametrize("adapted", [(), ("q_proj", "down_proj")])
def test_the_weights_are_those_of_bitsandbytes(base, adapted):
    """In layers without adapters, too."""
    cfg = dataclasses.replace(FOUR, lora_target_modules=adapted)
    model, float_base = loaded(base, cfg), checkpoint.load_model(base)
    expected = dict(float_base.named_parameters())
    for name, p in model.named_parameters():
        if lora.is_adapter(name):
            p.data.zero_()
    found = dict(weights.full_parameters(model))
    assert list(found) == list(expected)
    rounded = [n for n in found if n.endswith(tuple(f"{t}.weight" for t in LORA_TARGETS))]
    assert len(rounded) == 2 * len(LORA_TARGETS)
    for name, weight in found.items():
        exact = as_in_bitsandbytes(expected[name]) if name in rounded else expected[name]
        assert torch.equal(weight, exact), name


def test_bytes_that_fsdp_has_cast_to_bfloat16_give_the_same_weights(base):
    """As FSDP of torch 2.11 does."""
    model = loaded(base)
    layer = model.model.layers[1].mlp.up_proj
    parts = [getattr(layer, name) for name in nf4.PARTS]
    expected = nf4.dequantized(nf4.shape_of(layer), parts, torch.float32)
    cast = [p.bfloat16() for p in parts]
    assert torch.equal(nf4.dequantized(nf4.shape_of(layer), cast, torch.float32), expected)


def test_a_full_matrix_never_outlives_its_product(tmp_path):
    """Between forward and backward, no more is kept than with frozen float weights; and while they
    run, at most one of 28 matrices and its temporary values.
    """
    base = write_base(tmp_path, hidden_size=128, intermediate_size=512, num_hidden_layers=4)
    batch = random_batch([(3, 9), (5, 4)], vocab_size=104)
    kept, peak = [], []
    for model in (loaded(base), loaded(base, PLAIN)):
        gradient(model, batch, FOUR)
        peak.append(most_at_once(functools.partial(gradient, model, batch, FOUR)))
        with Live(model) as live:
            loss = model.forward_strip(batch, grpo.objective(batch, FOUR)).loss
            kept.append(live.bytes)
        assert loss.requires_grad
    assert kept[0] - kept[1] < 2048  # the code books
    assert peak[0] - peak[1] < 24 * 512 * 128


# --- files ---


def store(base: Path, folder: Path) -> Path:
    """Write a checkpoint as bitsandbytes stores it in four bits."""
    bitsandbytes_model(base).save_pretrained(folder)
    for file in base.glob("token*"):
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


@pytest.fixture(scope="module")
def stored(base, tmp_path_factory) -> Path:
    return store(base, tmp_path_factory.mktemp("nf4") / "stored")


KINDS = {
    "plain": {},
    "biases": {"model_type": "qwen2", "tie_word_embeddings": True},
    "all biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
}


@pytest.mark.parametrize("kind", KINDS)
def test_files_of_bitsandbytes_give_the_same_bytes(kind, tmp_path):
    base = write_base(tmp_path / "base", **SHAPE, **KINDS[kind])
    mine, same = loaded(base), loaded(store(base, tmp_path / "stored"))
    expected = dict(mine.named_parameters())
    assert sum(n.endswith(".nested") for n in expected) == 2 * len(LORA_TARGETS)
    assert all(torch.equal(p, expected[n]) for n, p in same.named_parameters())


def test_peft_and_bitsandbytes_compute_the_same_with_our_adapters(base, stored, tmp_path):
    """With the quantization that is written next to them. The merged weights, which are floats,
    are those of the same model.
    """
    cfg = dataclasses.replace(FOUR, model=str(base))
    model = loaded(base, cfg)
    folder = tmp_path / "adapter"
    adapters.write(adapters.host_adapters(model), folder, cfg)
    assert read_json(folder / "adapter_config.json")["base_model_name_or_path"] == str(base)
    how = read_json(folder / "quantization_config.json")
    peers = bitsandbytes_model(base, how), transformers.AutoModelForCausalLM.from_pretrained(stored)
    for peer in peers:
        found = theirs(peft.PeftModel.from_pretrained(peer.train(), folder).train())
        torch.testing.assert_close(found, logits(model), rtol=1e-4, atol=1e-5)
    again = loaded(stored, dataclasses.replace(cfg, lora_adapter=str(folder)))
    adapters.load(again, folder, cfg)
    assert torch.equal(logits(again), logits(model))

    (tmp_path / "merged").mkdir()
    config = read_json(stored / "config.json")
    copies = weights.host_weights(model, torch.bfloat16)
    checkpoint.write_model(copies, config, tmp_path / "merged")
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert {p.dtype for p in merged.parameters()} == {torch.bfloat16}
    assert not hasattr(merged, "is_loaded_in_4bit")
    torch.testing.assert_close(theirs(merged.float()), logits(model), rtol=0.1, atol=0.1)


def edit(folder: Path, name: str, change) -> None:
    """Change the tensor whose name ends so in a copy of the files; None removes it."""
    tensors = load_file(folder / "model.safetensors")
    full = next(n for n in tensors if n.endswith(name))
    changed = change(tensors.pop(full))
    if changed is not None:
        tensors[full] = changed
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def state(**fields):
    def change(tensor: torch.Tensor) -> torch.Tensor:
        old = json.loads(bytes(tensor.tolist()))
        return torch.tensor([*json.dumps({**old, **fields}).encode()], dtype=torch.uint8)

    return change


STATE = "q_proj.weight.quant_state.bitsandbytes__nf4"
DAMAGED = {
    "no scales": ("q_proj.weight.absmax", lambda t: None, "q_proj.weight.absmax is missing"),
    "a float matrix": ("q_proj.weight", lambda t: torch.zeros(64, 64), "have the wrong sizes"),
    "too few scales": ("q_proj.weight.absmax", lambda t: t[1:], "have the wrong sizes"),
    "another shape": (STATE, state(shape=[32, 128]), r"has shape \(32, 128\) but config.json asks"),
    "no JSON": (STATE, lambda t: t[1:], "cannot be read"),
    "one number": ("q_proj.weight.absmax", lambda t: t[0].clone(), "cannot be read"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_files_of_bitsandbytes_are_reported_in_one_sentence(stored, tmp_path, case):
    name, change, sentence = DAMAGED[case]
    shutil.copytree(stored, tmp_path, dirs_exist_ok=True)
    edit(tmp_path, name, change)
    with refused(f"{tmp_path}.*{sentence}"):
        loaded(tmp_path)


OTHERS = {
    "fp4": {"bnb_4bit_quant_type": "fp4"},
    "int8": {"load_in_4bit": False, "load_in_8bit": True},
    "awq": {"quant_method": "awq", "bits": 4},
}


@pytest.mark.parametrize("case", OTHERS)
def test_another_quantization_is_refused_in_one_sentence(stored, tmp_path, case):
    config = read_json(stored / "config.json")
    config["quantization_config"] |= OTHERS[case]
    (tmp_path / "config.json").write_text(json.dumps(config))
    wrong = next(iter(OTHERS[case].items()))
    with refused(rf"quantization_config with {wrong[0]} {wrong[1]!r} is not supported; it must be"):
        LoRA(FOUR).decoder(tmp_path)


def test_a_matrix_that_is_not_made_of_blocks_is_refused(tmp_path):
    base = write_base(tmp_path, hidden_size=50)
    with refused(r"one layer has 80 × 50 weights: leave the option out\.$"):
        loaded(base)


# --- engines ---


def test_the_embedded_engine_shares_the_base_and_copies_the_adapters(base):
    model = loaded(base)
    engine = SharingEngine(model.cfg, options=FOUR, max_len=32, slots=2, device="cpu")
    engine.load(model, version=1)
    theirs = dict(model.named_parameters())
    mine = dict(engine.model.named_parameters())
    assert mine.keys() == theirs.keys()
    for name, p in mine.items():
        shared = p.data_ptr() == theirs[name].data_ptr()
        assert shared != lora.is_adapter(name), name
    assert torch.equal(logits(engine.model), logits(model))
    addresses = {name: p.data_ptr() for name, p in mine.items()}
    nudge(model, std=0.3)
    assert not torch.allclose(logits(engine.model), logits(model), atol=0.1)
    engine.load(model, version=2)
    assert torch.equal(logits(engine.model), logits(model))
    # CUDA graphs use the addresses
    assert {n: p.data_ptr() for n, p in engine.model.named_parameters()} == addresses
