"""On a trained model the largest gap of a log-prob between engine and trainer passes 1e-5. That is
float32, and no fault: each side is as far from float64 as rounding explains, token by token, and a
fault that moves log-probs no further is still seen.

With a real vLLM: test_vllm_real.py. Read next: rounding.py.
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
def subject(tmp_path_factory):
    """(model, prompts of its task, the token that ends an answer)"""
    tokenizer = warmup.write_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    torch.manual_seed(0)
    model = Decoder(
        tiny_config(vocab_size=tokenizer.vocab_size, hidden_size=64, tie_word_embeddings=True)
    )
    return model, trained(model, tokenizer), tokenizer.encode("<|end|>")


def sampled(subject, temperature):
    model, prompts, stops = subject
    engine = LocalEngine(model.cfg, max_len=96, slots=64, device="cpu")
    engine.load(model, version=0)
    params = SamplingParams(
        temperature=temperature, max_tokens=48, stop_token_ids=tuple(stops), seed=1
    )
    return engine.sample(prompts, 8, params, step=0)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_engine_and_trainer_are_as_near_to_float64_as_float32_allows(subject, temperature):
    agree(subject[0], sampled(subject, temperature), temperature)


def test_a_fault_no_larger_than_rounding_is_seen(subject):
    """Three rows of one matrix, wrong by one part in ten thousand, move log-probs by a few 1e-5:
    other ones than rounding.
    """
    model, samples = subject[0], sampled(subject, 1.0)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3:6] *= 1 + 1e-4
    try:
        with pytest.raises(AssertionError):
            agree(model, samples, 1.0)
    finally:
        with torch.no_grad():
            model.model.layers[1].mlp.up_proj.weight[3:6] /= 1 + 1e-4
