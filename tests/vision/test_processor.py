"""Patches, grids, token ids and positions are those of transformers' processor without torchvision,
bit for bit; what cannot be processed is one sentence. Read next: test_model.py.
"""

import concurrent.futures
import dataclasses
import io
import json
import pickle

import hypothesis
import hypothesis.strategies as some
import numpy as np
import pytest
import tokenizers
import torch
import transformers
from PIL import Image
from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl as pil
from transformers.models.qwen3_vl import Qwen3VLProcessor

from nanogrpo.errors import UserError
from nanogrpo.model import checkpoint
from nanogrpo.model.tokenizer import Tokenizer
from nanogrpo.vision import processor
from nanogrpo.vision.processor import Settings, prepare, smart_resize
from tests.conftest import tiny_model
from tests.vision.tiny import SETTINGS, TOKEN, picture, png, prompt, to_dict, vision_config

# the settings of the published models
QWEN3_VL = Settings(16, 2, 2, 65_536, 16_777_216, (0.5,) * 3, (0.5,) * 3, 151_655)


def theirs(settings: Settings) -> pil.Qwen2VLImageProcessorPil:
    return pil.Qwen2VLImageProcessorPil(**to_dict(settings))


SIZES = [(16, 16), (9, 40), (21, 30), (90, 70), (3, 5), (1, 1), (1, 200), (64, 64), (39, 41)]


@pytest.mark.parametrize("settings", [SETTINGS, dataclasses.replace(QWEN3_VL, max_pixels=90_000)])
def test_pixels_and_grids_are_those_of_transformers(settings):
    for i, size in enumerate(SIZES):
        file = png(picture(*size, seed=i))
        _, found = prepare([settings.image_token_id, 1], [file], settings)
        expected = theirs(settings)([Image.open(io.BytesIO(file))], return_tensors="pt")
        assert found.grid == [tuple(expected["image_grid_thw"][0].tolist())]
        assert found.pixels.dtype == torch.float32
        assert torch.equal(found.pixels, expected["pixel_values"]), size


def files() -> dict[str, bytes]:
    """Return a file of each kind that a data set may contain."""
    rgba, colours = picture(21, 30, mode="RGBA"), picture(21, 30, seed=1)
    few = colours.quantize(16)
    return {
        "RGBA": png(rgba),
        "LA": png(rgba.convert("LA")),
        "P": png(few),
        "P with a transparent colour": png(few, transparency=3),
        "RGB with a transparent colour": png(colours, transparency=colours.getpixel((4, 4))),
        "L": png(colours.convert("L")),
        "1": png(colours.convert("1")),
        "16 bits": png(Image.fromarray(np.arange(630, dtype=np.uint16).reshape(21, 30))),
        "CMYK": png(colours.convert("CMYK"), "JPEG"),
        "JPEG": png(colours, "JPEG"),
        "GIF": png(few, "GIF"),
        "WebP": png(rgba, "WebP"),
    }


@pytest.mark.parametrize("kind", files())
def test_every_kind_of_picture_is_converted_as_in_transformers(kind):
    file = files()[kind]
    _, found = prepare([TOKEN, 1], [file], SETTINGS)
    expected = theirs(SETTINGS)([Image.open(io.BytesIO(file))], return_tensors="pt")
    assert torch.equal(found.pixels, expected["pixel_values"])


@pytest.mark.parametrize("orientation", range(1, 9))
def test_pictures_stand_upright_as_the_camera_says(orientation):
    """As in `datasets` and in transformers' load_image."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    file = png(picture(12, 30), exif=exif)
    upright = transformers.image_utils.load_image(Image.open(io.BytesIO(file)))
    assert upright.size == ((30, 12) if orientation < 5 else (12, 30))
    _, found = prepare([TOKEN, 1], [file], SETTINGS)
    assert torch.equal(found.pixels, theirs(SETTINGS)([upright], return_tensors="pt").pixel_values)


def test_a_resized_picture_is_not_resized_again():
    """So another engine that gets it sees the same pixels."""
    for size in SIZES:
        once = processor.resized(png(picture(*size)), SETTINGS)
        assert processor.resized(png(once), SETTINGS).tobytes() == once.tobytes()


sides = some.integers(1, 5000)


@hypothesis.given(sides, sides, some.sampled_from([SETTINGS, QWEN3_VL]))
@hypothesis.example(16, 16, SETTINGS)
@hypothesis.example(1, 200, QWEN3_VL)
@hypothesis.example(5000, 5000, QWEN3_VL)
@hypothesis.example(48, 16, QWEN3_VL)  # halves are rounded to even
def test_sizes_are_those_of_transformers(height, width, settings):
    side = settings.patch_size * settings.merge_size
    args = height, width, side, settings.min_pixels, settings.max_pixels
    if max(height, width) > 200 * min(height, width):
        with pytest.raises(ValueError, match="absolute aspect ratio"):
            pil.smart_resize(*args)
        with pytest.raises(ValueError, match=f"{width} × {height} pixels, but one side may be"):
            smart_resize(height, width, settings)
    else:
        assert smart_resize(height, width, settings) == pil.smart_resize(*args)


# --- prompts ---

TEMPLATE = """{% for m in messages %}<|im_start|> {{ m.role }} {% for part in m.content %}
{%- if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>
{%- else %}{{ part.text }}{% endif %}{% endfor %} <|im_end|>{% endfor %}
{%- if add_generation_prompt %}<|im_start|> assistant {% endif %}"""
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"]


class Processor(Qwen3VLProcessor):
    """Without its video processor, which needs torchvision."""

    def check_argument_for_proper_class(self, name, argument):
        return None if argument is None else super().check_argument_for_proper_class(name, argument)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a checkpoint folder with a tokenizer and the settings of a processor."""
    folder = tmp_path_factory.mktemp("base")
    words = ["user", "assistant", "compare", "these", "please", "with", "and"]
    vocabulary = {word: i for i, word in enumerate(["?", *words])}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="?"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    model.add_special_tokens(SPECIAL)
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=model, eos_token="<|im_end|>", chat_template=TEMPLATE
    )
    fast.save_pretrained(folder)
    token = model.token_to_id("<|image_pad|>")
    cfg = vision_config()
    cfg = dataclasses.replace(cfg, vision=dataclasses.replace(cfg.vision, image_token_id=token))
    checkpoint.export(tiny_model(cfg), folder)
    settings = dataclasses.replace(SETTINGS, image_token_id=token)
    (folder / "preprocessor_config.json").write_text(json.dumps(to_dict(settings)))
    return folder


def test_token_ids_of_a_conversation_are_those_of_transformers(folder):
    pictures = [picture(21, 30), picture(9, 40, seed=1), picture(16, 8, seed=2)]
    image = {"type": "image"}
    messages = [
        {"role": "user", "content": [image, {"type": "text", "text": "compare with"}, image]},
        {"role": "assistant", "content": [{"type": "text", "text": "please"}]},
        {"role": "user", "content": [{"type": "text", "text": "and these"}, image]},
    ]
    settings = Settings.read(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    full = Processor(theirs(settings), tokenizer, None, chat_template=TEMPLATE)
    text = full.apply_chat_template(messages, add_generation_prompt=True)
    expected = full(text=[text], images=pictures, return_tensors="pt")

    ours = Tokenizer(folder)
    ids = ours.encode(ours.render(messages))
    ids, found = prepare(ids, [png(p) for p in pictures], settings)
    assert ids == expected["input_ids"][0].tolist()
    assert found.grid == [*map(tuple, expected["image_grid_thw"].tolist())]
    assert torch.equal(found.pixels, expected["pixel_values"])
    types = expected["mm_token_type_ids"][0]
    assert found.rows.tolist() == types.nonzero().flatten().tolist()

    theirs_model = transformers.AutoModelForImageTextToText.from_pretrained(folder)
    positions, next_minus_length = theirs_model.model.get_rope_index(
        expected["input_ids"], types[None], expected["image_grid_thw"]
    )
    shifted = positions[:, 0] - next_minus_length
    Q = found.positions.shape[1]
    assert torch.equal(found.positions, shifted[:, :Q])
    rest = torch.arange(Q, len(ids)).expand(3, -1)  # ordinary positions
    assert torch.equal(rest, shifted[:, Q:])
    assert 0 <= found.positions.min() <= found.positions.max() < len(ids)


def test_pictures_of_a_prompt_are_small_when_they_are_sent():
    _, found = prompt(3, (90, 70), 1, (20, 20), 2)
    pixels = found.pixels  # now cached
    sent = pickle.dumps(found)
    assert len(sent) < sum(map(len, found.sources)) + 1000
    assert torch.equal(pickle.loads(sent).pixels, pixels)


def test_pixels_made_while_sampling_can_be_trained_on():
    _, found = prompt(1, (33, 18), 1, seed=99)
    with torch.inference_mode():
        assert found.pixels.is_inference()
    assert not found.pixels.is_inference()


def test_kept_pictures_have_a_limit_in_bytes():
    recent, made = processor.Recent(limit=250), []

    def get(key: int, size: int) -> np.ndarray:
        return recent.get(key, lambda: made.append(key) or np.full(size, key, np.uint8))

    for key in (1, 2, 1, 3, 1, 2, 4):  # 3 replaces 2, which was used before 1; 2 replaces 3
        assert (get(key, 100) == key).all()
    assert made == [1, 2, 3, 2, 4]
    assert recent.bytes == sum(x.nbytes for x in recent.kept.values()) == 200
    assert len(get(5, 300)) == 300  # too large to be kept
    assert recent.bytes == 0


def test_kept_pictures_are_right_in_threads():
    recent = processor.Recent(limit=5_000)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        keys = [i * 7 % 20 for i in range(4_000)]
        found = pool.map(lambda k: recent.get(k, lambda: np.full(100 * k, k, np.uint8)), keys)
        assert all(len(x) == 100 * k and (x == k).all() for k, x in zip(keys, found))
    assert recent.bytes == sum(x.nbytes for x in recent.kept.values()) <= 5_000


def test_a_checkpoint_keeps_the_settings(folder, tmp_path):
    Tokenizer(folder).save(tmp_path)
    name = "preprocessor_config.json"
    assert (tmp_path / name).read_bytes() == (folder / name).read_bytes()


# --- settings ---


def test_settings_are_read_in_each_form(folder, tmp_path):
    settings = Settings.read(folder)
    assert settings == dataclasses.replace(SETTINGS, image_token_id=settings.image_token_id)
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    theirs(settings).save_pretrained(tmp_path)
    assert Settings.read(tmp_path) == settings

    old = json.loads((tmp_path / "preprocessor_config.json").read_text())
    old |= {"size": None, "min_pixels": 64, "max_pixels": 1600}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(old))
    assert Settings.read(tmp_path) == settings

    # transformers 5 nests the settings, and reads them before the other file
    nested = {"image_processor": {**to_dict(settings), "image_mean": [0.1, 0.2, 0.3]}}
    (tmp_path / "processor_config.json").write_text(json.dumps(nested))
    assert Settings.read(tmp_path) == dataclasses.replace(settings, image_mean=(0.1, 0.2, 0.3))


def test_a_model_that_only_reads_text_has_no_settings(tiny_base):
    assert Settings.read(tiny_base) is None


WRONG = {
    "does not describe a processor .do_resize is False, but must be True.": {"do_resize": False},
    "resample is 2, but must be 3": {"resample": 2},
    "patch_size is 8, but must be 4": {"patch_size": 8},
    "0 < shortest_edge <= longest_edge": {"size": {"shortest_edge": 9, "longest_edge": 5}},
    "does not describe a processor .KeyError: 'shortest_edge'.": {"size": {"height": 3}},
    "does not describe a processor .KeyError": {"image_mean": None},
    "three colours": {"image_mean": [0.5]},
    r"below 2\^31": {"size": {"shortest_edge": 2**40, "longest_edge": 2**41}},
}


@pytest.mark.parametrize("problem", WRONG)
def test_wrong_settings_are_one_sentence(problem, folder, tmp_path):
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    changed = {**to_dict(SETTINGS), **WRONG[problem]}
    changed = {name: value for name, value in changed.items() if value is not None}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(changed))
    with pytest.raises(UserError, match=problem) as e:
        Settings.read(tmp_path)
    assert str(e.value).startswith(str(tmp_path / "preprocessor_config.json"))
    assert str(e.value).endswith(".")


def test_a_model_for_pictures_without_settings_is_one_sentence(folder, tmp_path):
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    with pytest.raises(UserError, match=r"preprocessor_config.json is missing"):
        Settings.read(tmp_path)


# --- wrong pictures ---

GOOD = png(picture(16, 16))
BAD = {
    "the number of pictures is 2, but that of image tokens is 1": ([TOKEN, 1], [GOOD, GOOD]),
    "the number of pictures is 0, but that of image tokens is 1": ([TOKEN, 1], []),
    "the prompt ends with a picture": ([1, TOKEN], [GOOD]),
    "picture 2 cannot be read .*cannot identify": ([TOKEN, TOKEN, 1], [GOOD, b"no picture"]),
    "picture 1 cannot be read .*truncated": ([TOKEN, 1], [png(picture(90, 90))[:300]]),
    "picture 1 cannot be read .201 × 1 pixels, but one side may be at most 200": (
        [TOKEN, 1],
        [png(picture(1, 201))],
    ),
}


@pytest.mark.parametrize("problem", BAD)
def test_a_bad_picture_is_one_sentence(problem):
    with pytest.raises(UserError, match=f"^{problem}") as e:
        prepare(*BAD[problem], SETTINGS)
    assert str(e.value).endswith(".")
    assert ". " not in str(e.value)
