"""The vision-language model gives the logits and gradients of transformers, and its checkpoints are
transformers' checkpoints.

Weights are random in float64. transformers computes norms and angles in float32, and so do we the
angles, which limits the agreement. Read next: test_processor.py.
"""

import copy
import dataclasses
import functools
import json

import pytest
import torch
import transformers

from nanogrpo import Config
from nanogrpo.extras.vision.model import VisionDecoder
from nanogrpo.extras.vision.processor import Images
from nanogrpo.model import checkpoint
from nanogrpo.model.decoder import Decoder, logits
from nanogrpo.types import PackedBatch, Prompt, Sample
from tests.conftest import packed, refused, tiny_model
from tests.vision.tiny import TOKEN, prompt, vision_config

# of logits with a standard deviation above 1, and of gradients relative to the largest
LIMIT = 1e-5

PROMPTS = {
    "square": prompt(2, (16, 16), 3),
    "wide": prompt(1, (9, 40), 3, seed=1),
    "tall": prompt(4, (40, 9), 2, seed=2),
    "odd": prompt(1, (21, 30), 1, seed=3),
    "first": prompt((24, 16), 5, seed=4),
    "large": prompt(2, (90, 70), 2, seed=5),  # resized to less than 40 × 40
    "tiny": prompt(2, (3, 5), 2, seed=6),
    "three": prompt(3, (16, 24), 1, (8, 8), 4, (20, 31), 6, seed=7),
    "none": prompt(9),
}


@functools.cache
def double(**changes) -> Decoder:
    """Return a random model in float64."""
    return tiny_model(vision_config(**changes), std=0.15).double()


def peer(model: Decoder) -> torch.nn.Module:
    """Return transformers' model with the same weights. Its config is built here by hand, because
    `to_dict` is under test.
    """
    text = dataclasses.asdict(model.cfg)
    vision = text.pop("vision")
    angles = {"rope_type": "default", "rope_theta": text.pop("rope_theta")}
    angles |= {"mrope_section": [*vision.pop("mrope_section")], "mrope_interleaved": True}
    for name in ("model_type", "mlp_bias", "rope_scaling"):
        del text[name]
    tied = text.pop("tie_word_embeddings")
    config = transformers.Qwen3VLConfig(
        image_token_id=vision.pop("image_token_id"),
        vision_config=vision,
        text_config={**text, "rope_parameters": angles},
        tie_word_embeddings=tied,
        attn_implementation="eager",
    )
    theirs = transformers.Qwen3VLForConditionalGeneration(config).to(model.lm_head.weight.dtype)
    theirs.load_state_dict(model.state_dict(), strict=True)  # parameters have the same names
    return theirs.eval()


def theirs_alone(theirs, ids, images) -> torch.Tensor:
    """Return transformers' logits [T, V] of one sequence."""
    tokens = torch.tensor(ids)[None]
    inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    if images:
        inputs["pixel_values"] = images.pixels.to(tokens.device)
        inputs["image_grid_thw"] = torch.tensor(images.grid)
        inputs["mm_token_type_ids"] = (tokens == TOKEN).int()
    return theirs(**inputs).logits[0]


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in model.named_parameters()}


def check_gradients(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        size = expected.abs().max()
        assert size > 0, name
        assert (ours[name] - expected).abs().max() <= LIMIT * size, name


Group = tuple[tuple[list[int], Images | None], list[list[int]]]  # a prompt and its completions


def strip(*groups: Group) -> tuple[list[Sample], PackedBatch]:
    """Return a sample for each completion, and all of them in one strip."""
    samples = [
        Sample(Prompt(i, "", ids, inputs=images), j, own, [0.0] * len(own), True, [])
        for i, ((ids, images), completions) in enumerate(groups)
        for j, own in enumerate(completions)
    ]
    (batch,) = packed(samples, Config(num_generations=1), all_gradients=True)
    return samples, batch


def alone(theirs: torch.nn.Module, sample: Sample) -> torch.Tensor:
    """Return transformers' logits that predict the tokens of a completion."""
    ids, own = sample.prompt.token_ids, sample.token_ids
    return theirs_alone(theirs, [*ids, *own], sample.prompt.inputs)[-len(own) - 1 : -1]


# --- parity with transformers ---


@pytest.mark.parametrize("name", PROMPTS)
def test_logits_are_those_of_transformers(name):
    model = double()
    (sample,), batch = strip((PROMPTS[name], [[7, 8, 9]]))
    with torch.no_grad():
        ours = model.forward_strip(batch, logits)
        expected = alone(peer(model), sample)
    assert 1 < ours.std() < 10
    torch.testing.assert_close(ours, expected, rtol=0, atol=LIMIT)


COMPLETIONS = [[5, 6, 7], [8], [9, 10, 11, 12]]
BATCH = [(PROMPTS[name], COMPLETIONS) for name in ("three", "none", "tall")]
BATCH.append((PROMPTS["wide"], [[1, 2]]))


@pytest.mark.parametrize("tied", [False, True])
def test_gradients_of_a_strip_are_those_of_transformers_for_each_completion(tied):
    """Several prompts with different pictures, and completions that share a prompt: the encoder
    runs once for a prompt, and its gradient is the sum over the completions.
    """
    model = copy.deepcopy(double(tie_word_embeddings=tied, attention_bias=True))
    theirs = peer(model)
    samples, batch = strip(*BATCH)
    ours = model.forward_strip(batch, logits)
    factor = torch.randn(ours.shape, generator=torch.Generator().manual_seed(1), dtype=ours.dtype)
    (ours * factor).sum().backward()
    for i, sample in enumerate(samples):
        mine, expected = batch.sample == i, alone(theirs, sample)
        torch.testing.assert_close(ours[mine], expected, rtol=0, atol=LIMIT)
        (expected * factor[mine]).sum().backward()
    check_gradients(gradients(model), gradients(theirs))


def test_in_training_every_weight_has_a_gradient_without_pictures():
    """Adam would otherwise count fewer steps for the encoder, and ranks would wait for it."""
    model = copy.deepcopy(double())
    _, batch = strip((PROMPTS["none"], COMPLETIONS))
    model.forward_strip(batch, logits).square().sum().backward()
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        assert p.grad.any() == (".visual." not in name), name


@pytest.mark.gpu
def test_on_a_gpu_bfloat16_is_as_exact_as_in_transformers():
    """With the kernels, and attention over all pictures in one call."""
    exact = copy.deepcopy(double())
    model = copy.deepcopy(exact).bfloat16().cuda()
    theirs = peer(exact).bfloat16().cuda()
    groups = [(PROMPTS[name], [[5, 6, 7]]) for name in ("three", "tall", "large")]
    samples, batch = strip(*groups)
    factor = torch.randn(9, 151, generator=torch.Generator().manual_seed(1)).double()

    out = exact.forward_strip(batch, logits)
    (out * factor).sum().backward()
    ours = model.forward_strip(batch.to("cuda"), logits)
    (ours * factor.cuda()).sum().backward()
    with torch.device("cuda"):
        eager = torch.cat([alone(theirs, samples[i]) for i in batch.sample.unique_consecutive()])
    (eager * factor.cuda()).sum().backward()

    def error(found: torch.Tensor, expected: torch.Tensor) -> float:
        return (found.double().cpu() - expected).norm().item()

    assert error(ours, out) <= 2 * error(eager, out)
    expected, mine, other = map(gradients, (exact, model, theirs))
    for name in expected:
        bound = 2 * error(other[name], expected[name]) + 0.01 * expected[name].norm()
        assert error(mine[name], expected[name]) <= bound, name


# --- checkpoints and configurations ---


@pytest.mark.parametrize("tied", [False, True])
def test_checkpoints_are_those_of_transformers(tied, tmp_path):
    model = tiny_model(vision_config(tie_word_embeddings=tied, rope_theta=2e6))
    peer(model).save_pretrained(tmp_path / "theirs")
    loaded = checkpoint.load_model(tmp_path / "theirs", kind=VisionDecoder)
    assert loaded.cfg == model.cfg
    for name, p in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], p), name

    (tmp_path / "ours").mkdir()
    checkpoint.export(model, tmp_path / "ours")
    assert checkpoint.empty_model(tmp_path / "ours", VisionDecoder).cfg == model.cfg
    theirs, report = transformers.AutoModelForImageTextToText.from_pretrained(
        tmp_path / "ours", dtype=torch.float32, output_loading_info=True
    )
    assert not any(report.values()), report
    (sample,), batch = strip((PROMPTS["three"], [[7, 8]]))
    with torch.no_grad():
        found, expected = model.forward_strip(batch, logits), alone(theirs, sample)
    torch.testing.assert_close(found, expected, rtol=0, atol=3e-5)


WRONG = {
    "model_type 'qwen2_5_vl' is not supported": {"model_type": "qwen2_5_vl"},
    "hidden_act 'gelu' is not supported": {"vision_config": {"hidden_act": "gelu"}},
    "does not describe a model": {"text_config": {"num_hidden_layers": "x"}},
    "does not describe a model .KeyError: 'vision_config'": {"vision_config": None},
}


@pytest.mark.parametrize("problem", WRONG)
def test_a_wrong_configuration_is_one_sentence(problem, tmp_path):
    raw = vision_config().to_dict()
    for name, value in WRONG[problem].items():
        raw[name] = {**raw[name], **value} if isinstance(value, dict) else value
        if value is None:
            del raw[name]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with refused(rf"/config\.json[: ].*{problem}.*\.$"):
        checkpoint.empty_model(tmp_path, VisionDecoder)
