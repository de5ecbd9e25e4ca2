"""Read the pictures of a record, and give them their places in its prompt, by TRL's conventions.

In: a record with a column `images` or `image`, or with pictures in its messages. Out: messages in
which each picture has its place, and token ids with room for each.

    {"prompt": [{"role": "user", "content": "How many?"}], "image": "0.png"}
    →           [{"role": "user", "content": [{"type": "image", "image": Picture},
                                              {"type": "text", "text": "How many?"}]}]

A picture is a path, relative to the data file; the bytes of a file, or {"bytes", "path"}, as
Parquet files and saved data sets have it; or a PIL image. Each one is decoded once, so that a
broken one is found before training, and then stays in memory as a file: its own, or PNG if that is
not an RGB picture that stands upright. Read before: data/prompts.py. Read next: processor.py (from
these files to the encoder's input).
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image, UnidentifiedImageError

from nanogrpo.errors import UserError, reading
from nanogrpo.vision.processor import Images, Settings, prepare, rgb

COLUMNS = ("image", "images")
ORIENTATION = 0x0112  # the EXIF tag; 1: upright


class Picture:
    """An encoded RGB picture. Pickle makes a PIL image of it, so reward functions receive one."""

    def __init__(self, data: bytes, size: tuple[int, int]):
        self.data, self.size = data, size

    def __reduce__(self) -> tuple:
        return Image.open, (io.BytesIO(self.data),)

    def __repr__(self) -> str:
        return "<picture {}×{}>".format(*self.size)


class Reader:
    """Reads the pictures of all records for the model in a folder."""

    def __init__(self, folder: Path):
        self.settings: Any = Settings.read(folder)  # not None: the model reads pictures
        self.files: dict[Path, Picture] = {}  # often several records have the same one

    def shows(self, columns: dict) -> bool:
        """Return whether a column has a picture. Arrow fills a missing one with null."""
        return any(_is_set(columns.get(column)) for column in COLUMNS)

    def insert(
        self, text: str | list[dict], columns: dict, base: Path
    ) -> tuple[str | list[dict], list[Picture]]:
        """Return the prompt with its pictures, and these in order. base: the data file's folder.

        The pictures of the column `images`, or else `image`, fill the parts {"type": "image"} of
        the messages. If there are none, they stand before the text of the first user message.
        `columns` gets the pictures, too.
        """
        given: list[Picture] = []
        for column in COLUMNS:  # the last one counts
            if _is_set(value := columns.get(column)):
                values = value if isinstance(value, list) else [value]
                given = [self.read(one, base) for one in values]
                columns[column] = given if isinstance(value, list) else given[0]
        if isinstance(text, str) or not (
            given or any(isinstance(m["content"], list) for m in text)
        ):
            if given:
                raise UserError("its picture needs a chat template, which the model does not have.")
            return text, []
        messages = [{**m, "content": _parts(m["content"])} for m in text]
        places = [part for part in _pictures(messages) if "image" not in part]
        spoken = [m for m, old in zip(messages, text) if isinstance(old["content"], str)]
        user = next((m for m in spoken if m["role"] == "user"), None)
        if user and not places:
            places = [{"type": "image"} for _ in given]
            user["content"] = places + user["content"]
        if len(places) != len(given):
            raise UserError(
                f"{len(given)} of its pictures are in columns, but its messages have {len(places)} "
                'parts {"type": "image"} for them: make the numbers equal.'
            )
        for part, picture in zip(places, given):
            part["image"] = picture
        for part in _pictures(messages):
            part["image"] = self.read(part["image"], base)
        return messages, [part["image"] for part in _pictures(messages)]

    def expand(
        self, token_ids: list[int], pictures: Sequence[Picture]
    ) -> tuple[list[int], Images | None]:
        """Return the token ids with as many image tokens as each picture needs, and the pictures
        as the model needs them.
        """
        files, sizes = [p.data for p in pictures], [p.size for p in pictures]
        ids, images = prepare(token_ids, files, self.settings, sizes=sizes)
        return ids, images if pictures else None

    def read(self, value: Any, base: Path) -> Picture:
        """Return a picture from any of the forms above."""
        if isinstance(value, dict):
            value = value.get("bytes") or value.get("path")
        if isinstance(value, Picture):
            return value
        if not isinstance(value, str | Path):
            return _decoded(value, "the picture")
        path, what = base / value, f"the picture {value!s:.100}"
        if path not in self.files:
            with reading(what, "give its path, absolute or relative to the data file"):
                if path.exists() and not path.is_file():
                    raise ValueError("it is not a file")  # reading a pipe may never end
                data = path.read_bytes()
            self.files[path] = _decoded(data, what)
        return self.files[path]


def _is_set(value: Any) -> bool:
    return bool(value) if isinstance(value, str | list | None) else True


def _pictures(messages: list[dict]) -> list[dict]:
    return [part for m in messages for part in m["content"] if part["type"] == "image"]


def _parts(content: str | list) -> list[dict]:
    """Return the content of a message as a list of texts and pictures."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    found = []
    for part in content:
        # Arrow fills the fields that one part lacks and another has with nulls, which are dropped.
        kept = {k: v for k, v in part.items() if v is not None} if isinstance(part, dict) else {}
        is_text = kept.get("type") == "text" and isinstance(kept.get("text"), str)
        if not (is_text or kept.get("type") == "image"):
            raise UserError(
                f'a part of a message is {part!r:.80}, but must be {{"type": "text", "text": …}} or'
                ' {"type": "image"}: correct it.'
            )
        names = ("type", "text") if is_text else ("type", "image")
        found.append({name: kept[name] for name in names if name in kept})
    return found


def _decoded(value: Any, what: str) -> Picture:
    """Return a picture from the bytes of a file, or from a PIL image."""
    if not isinstance(value, bytes | Image.Image):
        raise UserError(
            f"{what} is of type {type(value).__name__}: give a path, the bytes of a file, or a PIL "
            "image."
        )
    advice = "save it again, with fewer pixels if these are too many"
    with reading(what, advice, "cannot be decoded"), warnings.catch_warnings():
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        try:
            image = Image.open(io.BytesIO(value)) if isinstance(value, bytes) else value
        except UnidentifiedImageError:  # its message has an address
            raise UserError(f"{what} has no format that Pillow reads: save it as PNG.") from None
        image.load()
        # numbers, not bands; convert("RGB") cuts them off at 255
        highest: Any = image.getextrema()[1] if image.mode.startswith("I") else 0
        if image.mode == "F" or highest > 255:
            raise ValueError("its values have more than 8 bits")
        upright = image.getexif().get(ORIENTATION, 1) == 1
        if not (isinstance(value, bytes) and upright and image.mode == "RGB"):
            file = io.BytesIO()
            image = rgb(image)
            image.save(file, "PNG", compress_level=1)
            value = file.getvalue()
        return Picture(value, image.size)
