"""Pictures become patches, and prompts get a token per square of patches, as in transformers.

In: the files of pictures, and the token ids of a prompt with one image token per picture. Out: the
ids with the tokens that each picture needs, and its `Images`: where they are, their positions and,
computed when needed, the pixel values. Read next: model.py, which turns these into embeddings.

A picture is resized to multiples of 32 pixels (patch_size · merge_size), cut into patches of 16 ×
16, and every 2 × 2 patches become one token. A picture of 70 × 100 pixels (height × width), with
no limits on its size:

    resized    64 × 96 pixels
    patches    4 × 6, each a row of 1536 = 3 colours · 2 equal frames · 16 · 16 values
    order      the four patches of a square are neighbours: (0,0) (0,1) (1,0) (1,1) (0,2) (0,3) …
    tokens     2 × 3
    positions  time, height, width:  t t t t t t   h h h h+1 h+1 h+1   w w+1 w+2 w w+1 w+2

Positions have three axes. Text has the same position on all axes. A picture starts at the next
position p, as (p, p + row, p + column), and the text after it goes on at p + max(rows, columns),
although the picture has rows · columns tokens (Qwen2-VL, arXiv 2409.12191). Attention depends only
on differences of positions, so we shift a prompt's positions such that its last picture is followed
by ordinary positions: token i of the text after it is at position i. So completions, caches and
packing need to know nothing about pictures.
"""

from __future__ import annotations

import functools
import hashlib
import io
import math
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from nanogrpo.errors import UserError, read_json, reading
from nanogrpo.model.hf_config import ModelConfig

# The files that may describe the processor. The second contains the dict under "image_processor"
# and comes first, as in transformers.
FILES = ("preprocessor_config.json", "processor_config.json")
SMALL = 256  # the longest side of a thumbnail, in pixels
# Steps that are always done here; a file must not switch them off.
FIXED: dict[str, Any] = {
    "do_convert_rgb": True,
    "do_resize": True,
    "resample": 3,  # bicubic
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
}


@dataclass(frozen=True)
class Settings:
    """How pictures become patches: the fields of preprocessor_config.json, and the image token."""

    patch_size: int
    temporal_patch_size: int
    merge_size: int
    min_pixels: int
    max_pixels: int
    image_mean: tuple[float, ...]
    image_std: tuple[float, ...]
    image_token_id: int

    @classmethod
    def read(cls, folder: Path) -> Settings | None:
        """Read the files of a checkpoint. None if its model sees no pictures."""
        config = folder / "config.json"
        vision = ModelConfig.from_dict(read_json(config), str(config)).vision
        if vision is None:
            return None
        patch = {
            "patch_size": vision.patch_size,
            "temporal_patch_size": vision.temporal_patch_size,
            "merge_size": vision.spatial_merge_size,
        }
        first, second = (folder / name for name in FILES)
        raw = second.exists() and read_json(second).get("image_processor")
        where = second if raw else first
        raw = raw or read_json(first)
        with reading(where, "use the model's original file", "does not describe a processor"):
            for name, value in {**FIXED, **patch}.items():
                if raw.get(name) not in (None, value):
                    raise ValueError(f"{name} is {raw[name]!r:.60}, but must be {value}")
            size = raw.get("size") or {}
            # the older names come first, as in transformers
            least, most = raw.get("min_pixels"), raw.get("max_pixels")
            least, most = least or size["shortest_edge"], most or size["longest_edge"]
            mean, std = (tuple(map(float, raw[name])) for name in ("image_mean", "image_std"))
            if not (0 < least <= min(most, 2**31) and len(mean) == len(std) == 3 and min(std) > 0):
                raise ValueError(
                    "it needs three colours, and 0 < shortest_edge <= longest_edge, below 2^31"
                )
        return cls(
            **patch,
            min_pixels=least,
            max_pixels=most,
            image_mean=mean,
            image_std=std,
            image_token_id=vision.image_token_id,
        )


@dataclass
class Images:
    """The pictures of a prompt. It is small: pixels are computed when they are needed."""

    sources: list[bytes]  # the files
    settings: Settings
    grid: list[tuple[int, int, int]]  # frames (1), rows and columns of patches
    starts: list[int]  # each picture's first token, as an index into the prompt

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """Rows and columns of tokens."""
        m = self.settings.merge_size
        return [(h // m, w // m) for _, h, w in self.grid]

    @property
    def rows(self) -> Tensor:
        """Return the indices of all image tokens in the prompt, int64."""
        parts = zip(self.starts, self.sizes)
        return torch.cat([torch.arange(start, start + h * w) for start, (h, w) in parts])

    @property
    def positions(self) -> Tensor:
        """Return the positions [3, Q] of the prompt's tokens up to the last image token, int64.

        Begin with the indices, and go from the last picture to the first. A picture takes max(h, w)
        positions, but h · w indices. So it and all tokens before it move up by the difference.
        """
        h, w = self.sizes[-1]
        out = torch.arange(self.starts[-1] + h * w).repeat(3, 1)
        for start, (h, w) in zip(reversed(self.starts), reversed(self.sizes)):
            end = start + h * w
            out[:, :end] += h * w - max(h, w)  # what follows keeps its place
            first = out[0, start].clone()
            out[0, start:end] = first
            out[1, start:end] = first + torch.arange(h).repeat_interleave(w)
            out[2, start:end] = first + torch.arange(w).repeat(h)
        return out

    def files(self) -> Iterator[bytes]:
        """Yield each picture as the model sees it, as a PNG file."""
        for source in self.sources:
            file = io.BytesIO()
            resized(source, self.settings).save(file, "PNG", compress_level=1)
            yield file.getvalue()

    @functools.cached_property
    def names(self) -> list[str]:
        """A name for each picture, which other contents do not have."""
        return [hashlib.sha256(source).hexdigest()[:16] for source in self.sources]

    def thumbnail(self, i: int) -> bytes:
        """Return a small copy of picture i for people, as a WebP file."""
        source, file = Image.open(io.BytesIO(self.sources[i])), io.BytesIO()
        source.draft("RGB", (SMALL, SMALL))  # of a JPEG, decode only what is needed
        picture = rgb(source)
        picture.thumbnail((SMALL, SMALL))
        picture.save(file, "WEBP", quality=90)
        return file.getvalue()

    @property
    def pixels(self) -> Tensor:
        """Return the values of all patches, [patches, C · Tp · Ph · Pw] float32."""
        return torch.cat([torch.from_numpy(values(s, self.settings)) for s in self.sources])


def prepare(
    token_ids: Sequence[int],
    sources: Sequence[bytes],
    settings: Settings,
    sizes: Sequence[tuple[int, int]] = (),
) -> tuple[list[int], Images]:
    """Return the ids with all image tokens, and the pictures.

    token_ids: a prompt with one image token per picture, as chat templates write it. sizes: width
    and height of the pictures, if they are known; otherwise each one is decoded.
    """
    token, count = settings.image_token_id, [*token_ids].count(settings.image_token_id)
    if count != len(sources):
        raise UserError(
            f"the number of pictures is {len(sources)}, but that of image tokens is {count}: write "
            "none in texts, and use a chat template that writes one for each picture."
        )
    if token_ids and token_ids[-1] == token:
        raise UserError("the prompt ends with a picture: let some text follow it.")
    ids: list[int] = []
    found = Images([*sources], settings, [], [])
    for i in token_ids:
        repeat = 1
        if i == token:
            n = len(found.grid)
            with reading(f"picture {n + 1}", "replace it, or leave the row out"):
                width, height = sizes[n] if sizes else rgb(Image.open(io.BytesIO(sources[n]))).size
                size = smart_resize(height, width, settings)
            h, w = (side // settings.patch_size for side in size)
            found.grid.append((1, h, w))
            found.starts.append(len(ids))
            repeat = h * w // settings.merge_size**2
        ids += [i] * repeat
    return ids, found


def smart_resize(height: int, width: int, settings: Settings) -> tuple[int, int]:
    """Return the height and width that a picture is resized to: multiples of the side of a token,
    with about the same ratio, and between min_pixels and max_pixels in total.
    """
    if max(height, width) > 200 * min(height, width):
        raise ValueError(
            f"{width} × {height} pixels, but one side may be at most 200 times as long as the other"
        )
    side, pixels = settings.patch_size * settings.merge_size, height * width
    h, w = round(height / side), round(width / side)  # may be 0
    if h * w * side**2 > settings.max_pixels:
        shrink = math.sqrt(pixels / settings.max_pixels)
        h, w = (max(1, math.floor(n / shrink / side)) for n in (height, width))
    elif h * w * side**2 < settings.min_pixels:
        grow = math.sqrt(settings.min_pixels / pixels)
        h, w = (math.ceil(n * grow / side) for n in (height, width))
    return h * side, w * side


def rgb(picture: Image.Image) -> Image.Image:
    """Return a picture in RGB, upright as its EXIF data says, and on white if it is
    transparent.
    """
    picture = ImageOps.exif_transpose(picture)
    if "A" in picture.getbands() or picture.info.get("transparency") is not None:
        picture = picture.convert("RGBA")
        white = Image.new("RGBA", picture.size, (255, 255, 255, 255))
        picture = Image.alpha_composite(white, picture)
    return picture.convert("RGB")


def resized(source: bytes, settings: Settings) -> Image.Image:
    """Return the picture in a file as the model sees it, before its values are normalized."""
    picture = rgb(Image.open(io.BytesIO(source)))
    height, width = smart_resize(picture.height, picture.width, settings)
    return picture.resize((width, height), Image.Resampling.BICUBIC)


class Recent:
    """Keep the latest arrays, up to `limit` bytes. Several threads may use it."""

    def __init__(self, limit: int):
        self.limit, self.bytes, self.lock = limit, 0, threading.Lock()
        self.kept: dict[Hashable, np.ndarray] = {}  # the latest is last

    def get(self, key: Hashable, make: Callable[[], np.ndarray]) -> np.ndarray:
        """Return the array of a key, which `make` returns if it is not kept."""
        with self.lock:
            found = self.kept.pop(key, None)
            self.bytes -= 0 if found is None else found.nbytes
        found = make() if found is None else found
        with self.lock:
            if key not in self.kept:  # another thread may have made it
                self.kept[key] = found
                self.bytes += found.nbytes
            while self.bytes > self.limit:
                self.bytes -= self.kept.pop(next(iter(self.kept))).nbytes
        return found


# A step needs a picture again: to sample, then to train.
RECENT = Recent(512 << 20)


def patches(source: bytes, settings: Settings) -> np.ndarray:
    """Return the patches of a picture, [patches, C, Ph, Pw] uint8, square by square."""
    return RECENT.get((source, settings), lambda: patches_of(source, settings))


def patches_of(source: bytes, settings: Settings) -> np.ndarray:
    P, m = settings.patch_size, settings.merge_size
    x = np.asarray(resized(source, settings))  # [height, width, C]
    x = x.reshape(len(x) // (m * P), m, P, -1, m, P, 3)  # [rows, m, P, columns, m, P, C]
    return x.transpose(0, 3, 1, 4, 6, 2, 5).reshape(-1, 3, P, P)


def values(source: bytes, settings: Settings) -> np.ndarray:
    """Return the rows of `Images.pixels` for one picture: (x / 255 - mean) / std, each patch once
    per frame. There are only 3 · 256 different values. These are computed in the order and
    precision of transformers.
    """
    levels = (np.arange(256) * FIXED["rescale_factor"]).astype(np.float32)
    mean, std = (
        np.array(x, np.float32)[:, None] for x in (settings.image_mean, settings.image_std)
    )
    table = (levels - mean) / std  # [C, 256]
    x = patches(source, settings)
    x = table[np.arange(3)[:, None, None], x]  # [patches, C, Ph, Pw]
    return np.repeat(x[:, :, None], settings.temporal_patch_size, axis=2).reshape(len(x), -1)
