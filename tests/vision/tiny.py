"""A tiny vision-language model, random pictures, and strips of prompts with pictures.

Ranks import it, so it must not import transformers. Read next: test_model.py.
"""

from __future__ import annotations

import dataclasses
import io
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from nanogrpo.model.attention import Packed
from nanogrpo.model.hf_config import ModelConfig
from nanogrpo.vision.config import VisionConfig
from nanogrpo.vision.processor import Images, Settings, prepare
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


def vision_config(**changes) -> ModelConfig:
    """Return a Qwen3-VL of about 110,000 parameters: three layers, two of which get features."""
    return tiny_config(**{"num_hidden_layers": 3, "vision": VISION, **changes})


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


Group = tuple[tuple[list[int], "Images | None"], list[list[int]]]  # a prompt and its completions


def strip(
    groups: Sequence[Group], shared: bool = True, device: str = "cpu"
) -> tuple[tuple, list[tuple[int, Images]]]:
    """Return the arguments of a Decoder, (tokens, positions, attend, rows), and the pictures.

    rows: for each completion, the last row of its prompt and then its own. With `shared`, a prompt
    is there once for all its completions, as in grpo/packing.py.
    """
    tokens: list[int] = []
    positions: list[Tensor] = []
    lengths: list[int] = []
    keys: list[Tensor] = []
    rows: list[Tensor] = []
    images = []
    for (ids, found), completions in groups:
        if shared:
            completions = [[], *completions]  # the prompt itself
        for n, completion in enumerate(completions):
            whole = n == 0 or not shared  # whether the prompt is here
            if whole:
                first = len(tokens)
                if found:
                    images.append((first, found))
            own = [*ids, *completion] if whole else completion
            start = len(tokens) + len(own) - len(completion)  # of the completion
            tokens += own
            mine = torch.arange(len(tokens) - len(own), len(tokens))
            positions.append(torch.arange(len(own)) + (0 if whole else len(ids)))
            lengths.append(len(own))
            keys.append(mine if whole else torch.cat((torch.arange(first, first + len(ids)), mine)))
            if completion:
                last = torch.tensor([first + len(ids) - 1])
                rows.append(torch.cat((last, torch.arange(start, len(tokens)))))
    ends = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    spans = [len(k) for k in keys]
    key_ends = torch.tensor([0, *itertools.accumulate(spans)], dtype=torch.int32)
    parts = torch.tensor(tokens), torch.cat(positions), torch.cat(rows), ends, torch.cat(keys)
    t, p, r, ends, kv_rows = (x.to(device) for x in parts)
    attend = Packed(ends, max(lengths), kv_rows, key_ends.to(device), max(spans))
    return (t, p, attend, r), images
