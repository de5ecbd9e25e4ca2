"""A tiny vision-language model, random pictures, and prompts with pictures.

Ranks import it, so it must not import transformers. Read next: test_model.py.
"""

import dataclasses
import io
from typing import Any

import numpy as np
from PIL import Image

from nanogrpo.extras.vision.config import VisionConfig, VisionModelConfig
from nanogrpo.extras.vision.processor import Images, Settings, prepare
from tests.conftest import random_tokens, tiny_config

TOKEN = 150  # the image token


def to_dict(settings: Settings) -> dict:
    """Return the dict of a preprocessor_config.json."""
    fields = dataclasses.asdict(settings)
    del fields["image_token_id"]
    size = {"shortest_edge": fields.pop("min_pixels"), "longest_edge": fields.pop("max_pixels")}
    return {**fields, "image_processor_type": "Qwen2VLImageProcessor", "size": size}


SETTINGS = Settings(
    patch_size=4,
    temporal_patch_size=2,
    merge_size=2,
    min_pixels=8 * 8,
    max_pixels=40 * 40,
    image_mean=(0.5, 0.4, 0.3),
    image_std=(0.5, 0.25, 0.3),
    image_token_id=TOKEN,
)
VISION = VisionConfig(
    depth=3,
    hidden_size=32,
    intermediate_size=40,
    num_heads=2,
    patch_size=4,
    out_hidden_size=48,
    num_position_embeddings=36,
    deepstack_visual_indexes=(0, 2),
    image_token_id=TOKEN,
    mrope_section=(4, 2, 2),
)


def vision_config(**changes) -> VisionModelConfig:
    """Return a Qwen3-VL of about 110,000 parameters: three layers, two of which get features."""
    changes = {"num_hidden_layers": 3, **changes}
    vision = changes.pop("vision", VISION)
    return VisionModelConfig(**vars(tiny_config(**changes)), vision=vision)


def picture(height: int, width: int, seed: int = 0, mode: str = "RGB") -> Image.Image:
    """Return a random picture that is smooth enough for a resize to matter."""
    rng = np.random.default_rng([height, width, seed])
    coarse = rng.integers(0, 256, (2 + height // 5, 2 + width // 5, 4), dtype=np.uint8)
    smooth = Image.fromarray(coarse, "RGBA").resize((width, height), Image.Resampling.BICUBIC)
    return smooth if mode == "RGBA" else smooth.convert("RGB").convert(mode)


def png(found: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """Return the file of a picture."""
    file = io.BytesIO()
    found.save(file, kind, **options)
    return file.getvalue()


def prompt(*parts: int | tuple[int, int], seed: int = 0) -> tuple[list[int], Images | None]:
    """Return the ids and pictures of a prompt.

    >>> prompt(3, (30, 17), 2)      # three random tokens, a picture of 30 × 17 pixels, two tokens
    """
    ids: list[int] = []
    sources = []
    for i, part in enumerate(parts):
        if isinstance(part, tuple):
            ids.append(TOKEN)
            sources.append(png(picture(*part, seed=seed + i)))
        else:
            ids += random_tokens(part, TOKEN, seed=100 * seed + i).tolist()
    return prepare(ids, sources, SETTINGS) if sources else (ids, None)
