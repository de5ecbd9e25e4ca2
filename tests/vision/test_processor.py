"""Pixels, grids, sizes and settings are those of transformers' processor without torchvision, bit
for bit; what cannot be processed is one sentence.

Token ids are compared in test_trl_vision.py, and positions by the logits in test_model.py. Read
next: test_model.py.
"""

import dataclasses
import io
import json

import hypothesis.strategies as some
import pytest
import torch
import transformers
from PIL import Image
from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl as pil

from nanogrpo.extras.vision.data import decoded
from nanogrpo.extras.vision.processor import Settings, prepare
from tests.conftest import edit_json, refused
from tests.vision.tiny import SETTINGS, TOKEN, picture, png, prompt, to_dict

# the settings of the published models
QWEN3_VL = Settings(16, 2, 2, 65_536, 16_777_216, (0.5,) * 3, (0.5,) * 3, 151_655)


def theirs(settings: Settings) -> pil.Qwen2VLImageProcessorPil:
    return pil.Qwen2VLImageProcessorPil(**to_dict(settings))


SIZES = [(16, 16), (9, 40), (21, 30), (90, 70), (3, 5), (1, 1), (1, 200), (64, 64), (39, 41)]
# halves of 8 pixels are rounded to even; less than a token is one; too large only if rounded
SIZES += [(20, 28), (8, 1600), (29, 53)]


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
        "CMYK": png(colours.convert("CMYK"), "JPEG"),
        "JPEG": png(colours, "JPEG"),
        "GIF": png(few, "GIF"),
        "WebP": png(rgba, "WebP"),
    }


@pytest.mark.parametrize("kind", files())
def test_every_kind_of_picture_is_converted_as_in_transformers(kind):
    file = files()[kind]
    _, found = prepare([TOKEN, 1], [decoded(file, "it").data], SETTINGS)
    expected = theirs(SETTINGS)([Image.open(io.BytesIO(file))], return_tensors="pt")
    assert torch.equal(found.pixels, expected["pixel_values"])


def test_a_palette_of_transparent_colours_is_read_like_its_file():
    image = picture(21, 30, mode="RGBA").quantize(16)
    assert decoded(image, "it").data == decoded(png(image), "it").data


@pytest.mark.parametrize("orientation", range(1, 9))
def test_pictures_stand_upright_as_the_camera_says(orientation):
    """As in `datasets` and in transformers' load_image."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    file = png(picture(12, 30), exif=exif)
    upright = transformers.image_utils.load_image(Image.open(io.BytesIO(file)))
    assert upright.size == ((30, 12) if orientation < 5 else (12, 30))
    _, found = prepare([TOKEN, 1], [decoded(file, "it").data], SETTINGS)
    assert torch.equal(found.pixels, theirs(SETTINGS)([upright], return_tensors="pt").pixel_values)


sides = some.integers(1, 5000)


# --- prompts ---


def test_pixels_made_while_sampling_can_be_trained_on():
    _, found = prompt(1, (33, 18), 1, seed=99)
    with torch.inference_mode():
        assert found.pixels.is_inference()
    assert not found.pixels.is_inference()


# --- settings ---


def test_settings_are_read_in_each_form(base, tmp_path):
    settings = Settings.read(base)
    half = (0.5, 0.5, 0.5)
    assert settings == Settings(8, 2, 2, 256, 16_384, half, half, settings.image_token_id)
    (tmp_path / "config.json").write_bytes((base / "config.json").read_bytes())
    theirs(settings).save_pretrained(tmp_path)
    assert Settings.read(tmp_path) == settings

    old = tmp_path / "preprocessor_config.json"
    edit_json(old, size=None, min_pixels=256, max_pixels=16_384)
    assert Settings.read(tmp_path) == settings

    # transformers 5 nests the settings, and reads them before the other file
    nested = {"image_processor": {**to_dict(settings), "image_mean": [0.1, 0.2, 0.3]}}
    (tmp_path / "processor_config.json").write_text(json.dumps(nested))
    assert Settings.read(tmp_path) == dataclasses.replace(settings, image_mean=(0.1, 0.2, 0.3))


@pytest.mark.parametrize(
    ("size", "problem"),
    [({"shortest_edge": 9, "longest_edge": 5}, "at most longest_edge"), ({}, "'shortest_edge'")],
)
def test_wrong_settings_are_one_sentence(size, problem, base, tmp_path):
    (tmp_path / "config.json").write_bytes((base / "config.json").read_bytes())
    name = tmp_path / "preprocessor_config.json"
    name.write_text(json.dumps({**to_dict(SETTINGS), "size": size}))
    with refused(rf"^{name} does not describe a processor .*{problem}"):
        Settings.read(tmp_path)


# --- wrong pictures ---


def test_a_prompt_that_ends_with_a_picture_is_one_sentence():
    """Other mistakes: test_data.py."""
    with refused(r"^the prompt ends with a picture[^.]*\.$"):
        prepare([1, TOKEN], [png(picture(16, 16))], SETTINGS)
