"""Adapters of the decoder and of the vision encoder, loaded by peft into transformers' model.

Read next: tests/model/test_peft.py (the same for text).
"""

import warnings

import peft
import torch
import transformers
from safetensors.torch import load_file

import train
from nanogrpo.errors import read_json
from tests.conftest import arguments
from tests.vision.base import write_data


def test_peft_merges_the_adapters_as_the_checkpoint_does(base, files, tmp_path):
    data = write_data(tmp_path / "data.jsonl")
    targets = ["q_proj", "down_proj", "attn.qkv", "attn.proj", "linear_fc1", "linear_fc2"]
    options = ["--data", str(data), "--lora-r", "2", "--lora-target-modules", *targets]
    assert train.main(arguments(base, files, tmp_path / "run", *options, "--max-steps", "2")) == 0
    last = tmp_path / "run" / "checkpoint-2"
    model = transformers.Qwen3VLForConditionalGeneration.from_pretrained(base)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # of adapters that are missing or not expected
        found = peft.PeftModel.from_pretrained(model, last / "adapter").merge_and_unload()
    found, expected = found.state_dict(), load_file(last / "model.safetensors")
    start = load_file(base / "model.safetensors")
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, atol=1e-6, rtol=1e-5)
    changed = {name for name in expected if not torch.equal(expected[name], start[name])}
    assert {name.split(".weight")[0].split(".", 2)[1] for name in changed} == {
        "visual",
        "language_model",
    }
    # 2 in each decoder layer; 4 in each block of the encoder, and 2 in each of its mergers
    assert len(changed) == 2 * 2 + 2 * 4 + 2 * 2
    assert read_json(last / "adapter" / "adapter_config.json")["target_modules"] == targets
