"""Turn pictures into patches, and insert one token into the prompt for each square of patches,
as transformers does.

In: image files, and the token ids of a prompt with one image token per picture. Out: the
ids with as many image tokens as the pictures need, and `Images`: where these tokens are, their
positions, and the pixel values. Read next: model.py, which turns patches into embeddings.

A picture is resized to multiples of 32 pixels (patch_size · merge_size) and cut into patches of 16
× 16 pixels. Each square of 2 × 2 patches becomes one token. For example, if the size of pictures
is not limited, a picture of 70 × 100 pixels (height × width) is processed as follows:

* The resized picture has 64 × 96 pixels.
* There are 4 × 6 patches. A patch is a row of 3 colours · 2 equal frames · 16 · 16 = 1536 values.
* The four patches of a square follow each other: (0,0) (0,1) (1,0) (1,1) (0,2) (0,3) …
* The 4 × 6 patches become 2 × 3 tokens.
* The positions for time are t t t t t t, for height h h h h+1 h+1 h+1, and for width w w+1 w+2 w
  w+1 w+2.

Positions have three axes. Text has the same position on all axes. If p is the next position, the
tokens of a picture are at (p, p + row, p + column). The text after the picture continues at
p + max(rows, columns), although the picture has rows · columns tokens (Qwen2-VL, arXiv
2409.12191). Attention depends only on differences of positions, so we may shift all positions of a
prompt: token i after the last picture is at position i. So completions, caches and packing can
ignore pictures.
"""

import functools
import hashlib
import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from nanogrpo.errors import UserError, read_json, reading
from nanogrpo.extras.vision.config import VisionModelConfig
from nanogrpo.logs.files import replace

SMALL = 256  # the longest side of a thumbnail, in pixels


@dataclass(frozen=True)
class Settings:
    """Fields of config.json and preprocessor_config.json that say how pictures become patches.
    Pictures are resized (bicubic), divided by 255 and normalized, as in all published models.
    """

    patch_size: int
    temporal_patch_size: int
    merge_size: int
    min_pixels: int
    max_pixels: int
    image_mean: tuple[float, ...]
    image_std: tuple[float, ...]
    image_token_id: int

    @classmethod
    def read(cls, folder: Path) -> "Settings":
        """Read the files of a checkpoint."""
        config = folder / "config.json"
        with reading(config, "use the model's original file", "does not describe a model"):
            vision = VisionModelConfig.from_dict(read_json(config), str(config)).vision
        # Two files may describe the processor. The second has the settings under "image_processor".
        # If both files exist, the second file is used, as in transformers.
        first, second = folder / "preprocessor_config.json", folder / "processor_config.json"
        raw = second.exists() and read_json(second).get("image_processor")
        where = second if raw else first
        raw = raw or read_json(first)
        with reading(where, "use the model's original file", "does not describe a processor"):
            size = raw.get("size") or {}
            # the older names come first, as in transformers
            least, most = raw.get("min_pixels"), raw.get("max_pixels")
            least, most = least or size["shortest_edge"], most or size["longest_edge"]
            mean, std = (tuple(map(float, raw[name])) for name in ("image_mean", "image_std"))
            if not 0 < least <= most:
                raise ValueError("shortest_edge must be above 0, and at most longest_edge")
        return cls(
            vision.patch_size,
            vision.temporal_patch_size,
            vision.spatial_merge_size,
            least,
            most,
            mean,
            std,
            vision.image_token_id,
        )


@dataclass(repr=False)
class Images:
    """The pictures of a prompt. The object is small: pixels are computed when they are needed."""

    sources: list[bytes]  # image files, all RGB and upright
    settings: Settings
    grid: list[tuple[int, int, int]]  # frames (1), rows and columns of patches
    starts: list[int]  # the first token of each picture, as an index into the prompt

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

        Start with position = index, and go from the last picture to the first. A picture takes h ·
        w indices, but only max(h, w) positions. So the positions of the picture and of all earlier
        tokens are moved up by the difference.
        """
        h, w = self.sizes[-1]
        out = torch.arange(self.starts[-1] + h * w).repeat(3, 1)
        for start, (h, w) in zip(reversed(self.starts), reversed(self.sizes)):
            end = start + h * w
            out[:, :end] += h * w - max(h, w)  # later tokens keep their positions
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

    def __repr__(self) -> str:
        """Return a short key for the pictures. Different pictures have different keys."""
        return f"{self.settings} {[hashlib.sha256(file).hexdigest() for file in self.sources]}"

    def write(self, folder: Path) -> dict[str, list[str]]:
        """Write a small copy of each picture into the folder of the completions, unless the copy
        already exists. Return a column with the names of these files, for the table of completions.
        """
        names = [f"pictures/{hashlib.sha256(file).hexdigest()[:16]}.webp" for file in self.sources]
        for name, source in zip(names, self.sources):
            if not (folder / name).exists():
                picture, file = Image.open(io.BytesIO(source)), io.BytesIO()
                picture.thumbnail((SMALL, SMALL))
                picture.save(file, "WEBP", quality=90)
                replace(folder / name, file.getvalue())
        return {"images": names}

    @property
    def pixels(self) -> Tensor:
        """Return the values of all patches, [patches, C · Tp · Ph · Pw] float32."""
        return torch.cat([torch.from_numpy(values(s, self.settings)) for s in self.sources])


def prepare(
    token_ids: Sequence[int], sources: Sequence[bytes], settings: Settings
) -> tuple[list[int], Images]:
    """Return the ids with all image tokens, and the pictures.

    `token_ids` is a prompt with one image token per picture, as chat templates write it. `sources`
    is as in `Images`.
    """
    token = settings.image_token_id
    count = [*token_ids].count(token)
    if count != len(sources):
        raise UserError(
            f"there are {len(sources)} pictures but {count} image tokens: write "
            "no image tokens in texts, and use a chat template that writes one per picture."
        )
    if token_ids and token_ids[-1] == token:
        raise UserError("the prompt ends with a picture: add text after it.")
    ids: list[int] = []
    found = Images([*sources], settings, [], [])
    for i in token_ids:
        repeat = 1
        if i == token:
            n = len(found.grid)
            width, height = Image.open(io.BytesIO(sources[n])).size  # decodes nothing
            with reading(f"picture {n + 1}", "replace it, or leave the row out"):
                size = smart_resize(height, width, settings)
            h, w = (side // settings.patch_size for side in size)
            found.grid.append((1, h, w))
            found.starts.append(len(ids))
            repeat = h * w // settings.merge_size**2
        ids += [i] * repeat
    return ids, found


def smart_resize(height: int, width: int, settings: Settings) -> tuple[int, int]:
    """Return the height and width to which a picture is resized. Height and width are multiples of
    the side of a token. The aspect ratio stays about the same, and the number of pixels is from
    min_pixels to max_pixels.
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


def resized(source: bytes, settings: Settings) -> Image.Image:
    """Return the picture in a file as the model sees it, before its values are normalized."""
    picture = Image.open(io.BytesIO(source))
    height, width = smart_resize(picture.height, picture.width, settings)
    return picture.resize((width, height), Image.Resampling.BICUBIC)


# Patches are cached, because a step uses a picture at least twice: to sample, and to train.
@functools.lru_cache(maxsize=128)
def patches(source: bytes, settings: Settings) -> np.ndarray:
    """Return the patches of a picture, [patches, C, Ph, Pw] uint8, square by square."""
    P, m = settings.patch_size, settings.merge_size
    x = np.asarray(resized(source, settings))  # [height, width, C]
    x = x.reshape(len(x) // (m * P), m, P, -1, m, P, 3)  # [rows, m, P, columns, m, P, C]
    return x.transpose(0, 3, 1, 4, 6, 2, 5).reshape(-1, 3, P, P)


def values(source: bytes, settings: Settings) -> np.ndarray:
    """Return the rows of `Images.pixels` for one picture: (x / 255 - mean) / std, each patch once
    per frame. There are only 3 · 256 possible values. The values are computed in the same order and
    precision as in transformers.
    """
    levels = (np.arange(256) * (1 / 255)).astype(np.float32)
    mean, std = (
        np.array(x, np.float32)[:, None] for x in (settings.image_mean, settings.image_std)
    )
    table = (levels - mean) / std  # [C, 256]
    x = patches(source, settings)
    x = table[np.arange(3)[:, None, None], x]  # [patches, C, Ph, Pw]
    return np.repeat(x[:, :, None], settings.temporal_patch_size, axis=2).reshape(len(x), -1)
