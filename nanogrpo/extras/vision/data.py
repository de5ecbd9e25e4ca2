"""Read the pictures of a record, and insert them into its prompt, following TRL's conventions.

In: a record with a column `images` or `image`, or with pictures in its messages. Out: messages with
a part for each picture, and a list of the pictures in the same order.

    {"prompt": [{"role": "user", "content": "How many?"}], "image": "0.png"}
    →           [{"role": "user", "content": [{"type": "image", "image": picture},
                                              {"type": "text", "text": "How many?"}]}]

A picture can be a path relative to the data file, the bytes of a file, a PIL image, or {"bytes",
"path"}, as in Parquet files and saved data sets. Each picture is decoded once, so that a broken
picture is found before training. The picture then stays in memory as the bytes of its file, or of a
PNG file if the picture was not RGB or not upright. Read before: data/prompts.py. Read next:
processor.py (from these files to the encoder's input).
"""

import io
import warnings
from pathlib import Path
from typing import Any

from PIL import Image, ImageOps, UnidentifiedImageError

from nanogrpo.errors import UserError, reading, without_nulls

COLUMNS = ("image", "images")
ORIENTATION = 0x0112  # the EXIF tag for the orientation; 1: upright
FORMATS = "PNG, JPEG, WEBP, GIF, BMP, TIFF"  # for other formats, Pillow starts other programs


class Picture:
    """An encoded RGB picture. Pickling turns a picture into a PIL image for reward functions."""

    def __init__(self, data: bytes, size: tuple[int, int]):
        self.data, self.size = data, size

    def __reduce__(self) -> tuple:
        return Image.open, (io.BytesIO(self.data),)

    def __repr__(self) -> str:
        return "<picture {}×{}>".format(*self.size)


class Reader:
    """Reads the pictures of all records."""

    def __init__(self) -> None:
        self.files: dict[Path, Picture] = {}  # several records may have the same picture

    def insert(
        self, text: str | list[dict], columns: dict, base: Path
    ) -> tuple[str | list[dict], list[Picture]]:
        """Return the prompt with its pictures, and a list of the pictures. `base` is the data
        file's folder.

        The pictures of the column `images`, or else of `image`, are inserted into the parts
        {"type": "image"} of the messages. If no message has such a part, the pictures come before
        the text of the first user message. A prompt that is a string becomes a user message if it
        has pictures. `columns` gets the pictures, too.
        """
        given: list[Picture] = []
        for column in COLUMNS:  # the last one counts
            value = columns.get(column)
            if not isinstance(value, str | list | None) or value:
                values = value if isinstance(value, list) else [value]
                given = [self.read(one, base) for one in values]
                columns[column] = given if isinstance(value, list) else given[0]
        if isinstance(text, str):
            if not given:
                return text, []
            text = [{"role": "user", "content": text}]
        if not given and all(isinstance(m["content"], str) for m in text):
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
                'parts {"type": "image"} for them: make the two numbers equal.'
            )
        for part, picture in zip(places, given):
            part["image"] = picture
        for part in _pictures(messages):
            part["image"] = self.read(part["image"], base)
        return messages, [part["image"] for part in _pictures(messages)]

    def read(self, value: Any, base: Path) -> Picture:
        """Read a picture in any of the forms that the module docstring lists."""
        if isinstance(value, dict):
            value = value.get("bytes") or value.get("path")
        if isinstance(value, Picture):
            return value
        if not isinstance(value, str | Path):
            return decoded(value, "the picture")
        path, what = base / value, f"the picture {value!s:.100}"
        if path not in self.files:
            with reading(what, "give its path, absolute or relative to the data file"):
                data = path.read_bytes()
            self.files[path] = decoded(data, what)
        return self.files[path]


def _pictures(messages: list[dict]) -> list[dict]:
    return [part for m in messages for part in m["content"] if part["type"] == "image"]


def _parts(content: str | list) -> list[dict]:
    """Return the content of a message as a list of texts and pictures."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    found = []
    for part in content:
        # If parts have different fields, Arrow fills in nulls for missing fields.
        # These nulls are dropped.
        kept = without_nulls(part) if isinstance(part, dict) else {}
        is_text = kept.get("type") == "text" and isinstance(kept.get("text"), str)
        if not (is_text or kept.get("type") == "image"):
            raise UserError(
                f'a part of a message is {part!r:.80}, but must be {{"type": "text", "text": …}} or'
                ' {"type": "image"}: correct it.'
            )
        found.append(kept)
    return found


def decoded(value: Any, what: str) -> Picture:
    """Return a picture from the bytes of a file, or from a PIL image. `what` names it in errors."""
    if not isinstance(value, bytes | Image.Image):
        raise UserError(
            f"{what} is of type {type(value).__name__}: give a path, the bytes of a file, or a PIL "
            "image."
        )
    advice = "save it again, with fewer pixels if these are too many"
    with reading(what, advice, "cannot be decoded"), warnings.catch_warnings():
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        image: Any = value
        try:
            if is_file := isinstance(value, bytes):
                image = Image.open(io.BytesIO(value), formats=FORMATS.split(", "))
        except UnidentifiedImageError:  # the message would contain a memory address
            raise UserError(f"{what} has none of the formats {FORMATS}: save it as PNG.") from None
        image.load()
        if image.mode[0] in "IF":  # convert("RGB") would clip the values at 255
            raise ValueError("its values have more than 8 bits")
        upright = image.getexif().get(ORIENTATION, 1) == 1
        opaque = image.mode == "RGB" and not image.has_transparency_data
        if not (is_file and upright and opaque):
            file = io.BytesIO()
            image = rgb(image)
            image.save(file, "PNG", compress_level=1)
            value = file.getvalue()
        return Picture(value, image.size)


def rgb(picture: Image.Image) -> Image.Image:
    """Return a picture in RGB, turned upright according to its EXIF data. A transparent picture
    gets a white background.
    """
    picture = ImageOps.exif_transpose(picture)
    if picture.has_transparency_data:
        picture = picture.convert("RGBA")
        white = Image.new("RGBA", picture.size, (255, 255, 255, 255))
        picture = Image.alpha_composite(white, picture)
    return picture.convert("RGB")
