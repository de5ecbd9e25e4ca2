"""A trained model magnifies rounding: engine and trainer then differ by 1e-5 and more in float32,
without a fault. Both are as close to float64 as rounding allows, token by token, and a fault that
moves log-probs no further is still found.

tests/vllm/test_real.py does the same with a real vLLM. Read next: rounding.py.
"""

import pytest
import torch

from nanogrpo.engine.base import SamplingParams
from nanogrpo.engine.local import LocalEngine
from nanogrpo.model.decoder import Decoder
from nanogrpo.run import warmup
from tests.conftest import tiny_config
from tests.engine.rounding import agree, trained


@pytest.fixture(scope="module")
def model_and_samples(tmp_path_factory):
    """A trained model, and temperature → its samples."""
    tokenizer = warmup.write_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    torch.manual_seed(0)
    shape = {"vocab_size": tokenizer.vocab_size, "hidden_size": 64, "tie_word_embeddings": True}
    model = Decoder(tiny_config(**shape))
    prompts, stops = trained(model, tokenizer), tokenizer.encode("<|end|>")
    engine = LocalEngine(model.cfg, max_len=96, slots=64, device="cpu")
    engine.load(model, version=0)

    def sampled(temperature):
        params = SamplingParams(temperature, max_tokens=48, stop_token_ids=stops, seed=1)
        return engine.sample(prompts, 4, params, step=0)

    return model, {temperature: sampled(temperature) for temperature in (1.0, 0.7)}


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_engine_and_trainer_are_as_close_to_float64_as_float32_allows(
    model_and_samples, temperature
):
    model, samples = model_and_samples
    agree(model, samples[temperature], temperature)


def test_a_fault_no_larger_than_rounding_is_found(model_and_samples):
    """Three rows of one matrix, wrong by one part in ten thousand, move log-probs by a few 1e-5."""
    model, samples = model_and_samples
    weight = model.model.layers[1].mlp.up_proj.weight
    before = weight.clone()
    weight[3:6] *= 1 + 1e-4
    try:
        with pytest.raises(AssertionError):
            agree(model, samples[1.0], 1.0)
    finally:
        weight.copy_(before)
