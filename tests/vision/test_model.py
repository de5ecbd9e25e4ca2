"""The vision-language model gives the logits and gradients of transformers, its checkpoints are
transformers' checkpoints, and the real models have the right sizes.

Weights are random in float64. transformers computes norms and angles in float32, and so do we the
angles, which limits the agreement. Read next: test_sharded.py (several ranks).
"""

import copy
import dataclasses
import functools
import json
import re
import sys

import pytest
import torch
import transformers

from nanogrpo.config import Config
from nanogrpo.distributed import fsdp
from nanogrpo.errors import UserError
from nanogrpo.model import checkpoint, lora
from nanogrpo.model.decoder import Decoder, logits
from nanogrpo.model.hf_config import ModelConfig
from nanogrpo.vision.config import VisionConfig
from tests.conftest import SOLO, tiny_model
from tests.vision.tiny import TOKEN, prompt, strip, vision_config

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


# --- parity with transformers ---


@pytest.mark.parametrize("name", PROMPTS)
def test_logits_are_those_of_transformers(name):
    model = double()
    ids, images = PROMPTS[name]
    args, pictures = strip([((ids, images), [[7, 8, 9]])])
    with torch.no_grad():
        ours = model(*args, logits, *pictures)
        expected = theirs_alone(peer(model), [*ids, 7, 8, 9], images)[-4:]
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
    args, images = strip(BATCH)
    ours = model(*args, logits, *images)
    factor = torch.randn(ours.shape, generator=torch.Generator().manual_seed(1), dtype=ours.dtype)
    (ours * factor).sum().backward()
    at = 0
    for (ids, found), completions in BATCH:
        for completion in completions:
            rows = len(completion) + 1
            alone = theirs_alone(theirs, [*ids, *completion], found)[-rows:]
            torch.testing.assert_close(ours[at : at + rows], alone, rtol=0, atol=LIMIT)
            (alone * factor[at : at + rows]).sum().backward()
            at += rows
    assert at == len(ours)
    check_gradients(gradients(model), gradients(theirs))


def test_a_shared_prompt_has_the_gradient_of_its_copies():
    """Also with a sampled image token, which is an ordinary token here. transformers would ask for
    its picture.
    """
    batch = [*BATCH, (PROMPTS["odd"], [[1, TOKEN, 2], [TOKEN]])]
    found = []
    for shared in (True, False):
        model = copy.deepcopy(double())
        args, images = strip(batch, shared)
        assert len(images) == (4 if shared else 9)
        out = model(*args, logits, *images)
        factor = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).double()
        (out * factor).sum().backward()
        found.append((out, gradients(model)))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=0, atol=LIMIT)
    check_gradients(found[0][1], found[1][1])


def test_without_pictures_it_computes_what_the_decoder_computes():
    model = double()
    text = Decoder(dataclasses.replace(model.cfg, vision=None)).double()
    names = {n.replace("language_model.", ""): p for n, p in model.state_dict().items()}
    text.load_state_dict({n: names[n] for n in text.state_dict()})
    args, _ = strip([(PROMPTS["none"], COMPLETIONS)])
    assert torch.equal(model(*args), text(*args))
    with torch.no_grad():
        assert torch.equal(model(*args), text(*args))


def test_in_training_every_weight_has_a_gradient_without_pictures():
    """Adam would otherwise count fewer steps for the encoder, and ranks would wait for it."""
    model = copy.deepcopy(double())
    args, _ = strip([(PROMPTS["none"], COMPLETIONS)])
    model(*args).square().sum().backward()
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        assert p.grad.any() == (".visual." not in name), name


@pytest.mark.parametrize("kind", ["full", "selective"])
def test_recomputation_changes_no_gradient(kind):
    found = []
    for checkpointing in ("none", kind):
        model = copy.deepcopy(double())
        fsdp.prepare(model, SOLO, Config(gradient_checkpointing=checkpointing))
        args, images = strip(BATCH)
        model(*args, logits, *images).square().sum().backward()
        found.append(gradients(model))
    check_gradients(*found)


def test_only_the_decoder_gets_adapters():
    model = tiny_model(vision_config())
    lora.attach(model, Config(lora_r=2))
    adapted = {name.rpartition(".")[0] for name, _ in model.named_parameters() if "lora_" in name}
    assert len(adapted) == 3 * 7
    assert all(name.startswith("model.language_model.layers.") for name in adapted)
    args, images = strip(BATCH)
    for name, p in model.named_parameters():
        if "lora_" in name:
            p.data.normal_(generator=torch.Generator().manual_seed(0))
    model(*args, logits, *images).square().sum().backward()
    assert all((p.grad is not None) == ("lora_" in n) for n, p in model.named_parameters())


@pytest.mark.gpu
def test_on_a_gpu_bfloat16_is_as_exact_as_in_transformers():
    """With the kernels, and attention over all pictures in one call."""
    exact = copy.deepcopy(double())
    model = copy.deepcopy(exact).bfloat16().cuda()
    theirs = peer(exact).bfloat16().cuda()
    groups = [(PROMPTS[name], [[5, 6, 7]]) for name in ("three", "tall", "large")]
    (*args, rows), images = strip(groups)
    factor = torch.randn(12, 151, generator=torch.Generator().manual_seed(1)).double()

    out = exact(*args, rows, logits, *images)
    (out * factor).sum().backward()
    (*args, rows), images = strip(groups, device="cuda")
    ours = model(*args, rows, logits, *images)
    (ours * factor.cuda()).sum().backward()
    with torch.device("cuda"):
        alone = [theirs_alone(theirs, [*p[0], 5, 6, 7], p[1])[-4:] for p, _ in groups]
    eager = torch.cat(alone)
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
    model = tiny_model(vision_config(tie_word_embeddings=tied))
    peer(model).save_pretrained(tmp_path / "theirs")
    loaded = checkpoint.load_model(tmp_path / "theirs")
    assert loaded.cfg == model.cfg
    for name, p in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], p), name

    (tmp_path / "ours").mkdir()
    checkpoint.export(model, tmp_path / "ours")
    theirs, report = transformers.AutoModelForImageTextToText.from_pretrained(
        tmp_path / "ours", dtype=torch.float32, output_loading_info=True
    )
    assert not any(report.values()), report
    ids, images = PROMPTS["three"]
    args, pictures = strip([((ids, images), [[7, 8]])])
    with torch.no_grad():
        expected = theirs_alone(theirs, [*ids, 7, 8], images)[-3:]
        torch.testing.assert_close(model(*args, logits, *pictures), expected, rtol=0, atol=3e-5)


def test_a_head_that_is_not_the_embedding_is_refused(tmp_path):
    model = tiny_model(vision_config())
    checkpoint.export(model, tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, "tie_word_embeddings": True}))
    with pytest.raises(UserError, match=r"lm_head.weight differs from model.language_model.embed"):
        checkpoint.load_model(tmp_path)


def real(size: str) -> dict:
    """Return the config.json of a published model, as transformers 4 wrote it."""
    D, F, layers, heads, width, wide, depth, taken = {
        "2B": (2048, 6144, 28, 16, 1024, 4096, 24, [5, 11, 17]),
        "4B": (2560, 9728, 36, 32, 1024, 4096, 24, [5, 11, 17]),
        "8B": (4096, 12288, 36, 32, 1152, 4304, 27, [8, 16, 24]),
    }[size]
    tied = size != "8B"
    return {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "image_token_id": 151655,
        "model_type": "qwen3_vl",
        "text_config": {
            "attention_bias": False,
            "head_dim": 128,
            "hidden_act": "silu",
            "hidden_size": D,
            "intermediate_size": F,
            "max_position_embeddings": 262144,
            "model_type": "qwen3_vl_text",
            "num_attention_heads": heads,
            "num_hidden_layers": layers,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-06,
            "rope_scaling": {
                "mrope_interleaved": True,
                "mrope_section": [24, 20, 20],
                "rope_type": "default",
            },
            "rope_theta": 5000000,
            "tie_word_embeddings": tied,
            "vocab_size": 151936,
        },
        "tie_word_embeddings": tied,
        "vision_config": {
            "deepstack_visual_indexes": taken,
            "depth": depth,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": width,
            "in_channels": 3,
            "intermediate_size": wide,
            "model_type": "qwen3_vl",
            "num_heads": 16,
            "num_position_embeddings": 2304,
            "out_hidden_size": D,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
    }


# the totals on the pages of the models
COUNTS = {"2B": 2_127_532_032, "4B": 4_437_815_808, "8B": 8_767_123_696}


@pytest.mark.parametrize("size", COUNTS)
def test_the_published_models_have_their_size(size):
    cfg = ModelConfig.from_dict(real(size))
    assert (cfg.rope_theta, cfg.vision.mrope_section) == (5e6, (24, 20, 20))
    with torch.device("meta"):
        ours = checkpoint.decoder_for(cfg)
        config = transformers.Qwen3VLConfig.from_dict(real(size))
        theirs = transformers.Qwen3VLForConditionalGeneration(config)
    shapes = {name: p.shape for name, p in ours.named_parameters()}
    assert shapes == {name: p.shape for name, p in theirs.named_parameters()}
    assert sum(shape.numel() for shape in shapes.values()) == COUNTS[size]


@pytest.mark.parametrize("where", ["rope_scaling", "rope_parameters"])
def test_both_forms_of_the_sections_are_read_and_written(where):
    cfg = vision_config(rope_theta=2e6)
    raw = cfg.to_dict()
    assert ModelConfig.from_dict(json.loads(json.dumps(raw))) == cfg
    angles = raw["text_config"].pop("rope_scaling")
    if where == "rope_scaling":  # of transformers 4
        del raw["text_config"]["rope_parameters"]
        raw["text_config"] |= {"rope_theta": angles.pop("rope_theta"), where: angles}
    assert ModelConfig.from_dict(raw) == cfg


def test_each_frequency_has_the_axis_that_transformers_gives_it():
    rope = transformers.models.qwen3_vl.modeling_qwen3_vl.Qwen3VLTextRotaryEmbedding
    for section in ((24, 20, 20), (4, 2, 2), (6, 5, 5), (8, 0, 0)):
        half = sum(section)
        freq = torch.arange(3.0)[:, None, None, None].expand(3, 1, 1, half).clone()
        self = type("Rope", (), {"mrope_section": section})
        theirs = rope.recomposition_frequencies(self, freq)[0, 0, :half]
        assert VisionConfig(mrope_section=section).axes == theirs.tolist()


WRONG = {
    "text_config or vision_config is missing": {"text_config": None},
    "hidden_act 'relu' is not supported": {"vision_config": {"hidden_act": "relu"}},
    "rope_parameters .*5.* is not supported": {"vision_config": {"rope_parameters": {"theta": 5}}},
    "depth is 0; it must be one number above 0": {"vision_config": {"depth": 0}},
    r"depth is 16777216; .* below 2\^24": {"vision_config": {"depth": 2**24}},
    "depth is '3'; it must be one number": {"vision_config": {"depth": "3"}},
    "deepstack_visual_indexes is 3; it must be a list": {
        "vision_config": {"deepstack_visual_indexes": 3}
    },
    "image_token_id is 'x'; it must be one number": {"image_token_id": "x"},
    "hidden_size must be a multiple of 4": {"vision_config": {"hidden_size": 30}},
    "num_position_embeddings a square": {"vision_config": {"num_position_embeddings": 35}},
    "deepstack_visual_indexes rising": {"vision_config": {"deepstack_visual_indexes": [2, 1]}},
    "depth at most 4096": {"vision_config": {"depth": 10**6}},
    "below depth": {"vision_config": {"deepstack_visual_indexes": [1, 3]}},
    "out_hidden_size must be its hidden_size": {"vision_config": {"out_hidden_size": 32}},
    "image_token_id below its vocab_size": {"image_token_id": 151},
    "half of its head_dim, and": {"text_config": {"head_dim": "x"}},
    "three numbers that add up to half": {
        "text_config": {"rope_scaling": {"mrope_section": [4, 4, 4]}}
    },
    "mrope_interleaved False is not supported": {
        "text_config": {"rope_scaling": {"mrope_section": [4, 2, 2], "mrope_interleaved": False}}
    },
    "num_hidden_layers is 'x' but must be": {"text_config": {"num_hidden_layers": "x"}},
    "must be qwen3, qwen2, llama, mistral or qwen3_vl": {"model_type": "qwen2_5_vl"},
}


def test_without_pillow_a_model_for_pictures_is_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(UserError, match=r"needs Pillow; pip install 'nanogrpo\[vision\]'\."):
        ModelConfig.from_dict(vision_config().to_dict())


@pytest.mark.parametrize("problem", WRONG)
def test_a_wrong_configuration_is_one_sentence(problem):
    raw = vision_config().to_dict()
    for name, value in WRONG[problem].items():
        raw[name] = {**raw[name], **value} if isinstance(value, dict) else value
    with pytest.raises(UserError, match=problem) as e:
        ModelConfig.from_dict(raw, "folder/config.json")
    assert re.fullmatch(r"folder/config\.json: [^.]*\.", str(e.value))
