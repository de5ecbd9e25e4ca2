"""The configuration of a vision-language model: the part of config.json that is not the decoder's.

In: the dict of a config.json with model_type qwen3_vl. Out: the fields of its decoder, which
model/hf_config.py reads like those of Qwen3, and a `VisionConfig`. Read next: processor.py (a
picture becomes patches), then model.py (patches become embeddings).
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# Fields that would change the computation, and the only value that they may have. The rotary
# embedding is the encoder's.
FIXED: dict[str, Any] = {
    "in_channels": 3,
    "hidden_act": "gelu_pytorch_tanh",
    "rope_parameters": {"rope_type": "axial", "rope_theta": 10_000},
    "mrope_interleaved": True,
}


@dataclass(frozen=True)
class VisionConfig:
    """The fields that affect the computation, under their names in config.json and with the default
    values of transformers.
    """

    depth: int = 27  # the number of the encoder's blocks
    hidden_size: int = 1152
    intermediate_size: int = 4304
    num_heads: int = 16
    patch_size: int = 16  # pixels along a side of a patch
    temporal_patch_size: int = 2  # frames in a patch; a picture is repeated
    spatial_merge_size: int = 2  # patches along a side of the square that becomes one token
    out_hidden_size: int = 3584  # the decoder's hidden_size
    num_position_embeddings: int = 2304  # a square grid
    # after these blocks, features for the decoder's first layers are taken
    deepstack_visual_indexes: tuple[int, ...] = (8, 16, 24)
    # the next two are not in vision_config, but above it and in text_config
    image_token_id: int = 151655
    mrope_section: tuple[int, ...] = (24, 20, 20)  # frequencies for time, height and width

    @property
    def patch_values(self) -> int:
        """The number of values in a patch, C · Tp · Ph · Pw."""
        return 3 * self.temporal_patch_size * self.patch_size**2

    @property
    def axes(self) -> list[int]:
        """Return the axis of each of the decoder's E/2 frequencies: 0 time, 1 height, 2 width. They
        take turns, 0 1 2 0 1 2 …, until height and width have theirs; the slowest are for time.
        """
        _, height, width = self.mrope_section
        ends = (0, 3 * height, 3 * width)
        return [i % 3 if i < ends[i % 3] else 0 for i in range(sum(self.mrope_section))]

    def to_dict(self, text: dict) -> dict:
        """Return the dict of a config.json. text: the dict of its decoder alone."""
        vision = dataclasses.asdict(self)
        token, section = vision.pop("image_token_id"), [*vision.pop("mrope_section")]
        vision["deepstack_visual_indexes"] = [*self.deepstack_visual_indexes]
        text = {name: value for name, value in text.items() if name != "architectures"}
        angles = {**text["rope_parameters"], "mrope_section": section, "mrope_interleaved": True}
        text |= {"rope_parameters": angles, "rope_scaling": angles}  # transformers 5 and 4
        return {
            "architectures": ["Qwen3VLForConditionalGeneration"],
            "model_type": "qwen3_vl",
            "image_token_id": token,
            "tie_word_embeddings": text["tie_word_embeddings"],
            "text_config": {**text, "model_type": "qwen3_vl_text"},
            "vision_config": {**vision, "model_type": "qwen3_vl"},
        }


def read(raw: dict, require: Callable[..., None]) -> tuple[dict, VisionConfig]:
    """Return the fields of the decoder, as in the config.json of a Qwen3, and the others.

    require: raises a UserError with its second argument if the first is false.
    """
    has_pillow = importlib.util.find_spec("PIL") is not None
    require(has_pillow, "a model for pictures needs Pillow", "pip install 'nanogrpo[vision]'")
    text: Any = raw.get("text_config")
    vision: Any = raw.get("vision_config")
    both = isinstance(text, dict) and isinstance(vision, dict)
    require(both, "text_config or vision_config is missing")
    angles = text.get("rope_scaling") or text.get("rope_parameters") or {}
    require(isinstance(angles, dict), f"rope_parameters is {angles!r:.60} but must be an object")
    given = {**angles, **vision, "image_token_id": raw.get("image_token_id")}
    for name, fixed in FIXED.items():
        value = given.get(name)
        require(
            value in (None, fixed),
            f"{name} {value!r:.60} is not supported",
            f"it must be {fixed}",
        )
    found: dict[str, Any] = {}
    for field in dataclasses.fields(VisionConfig):
        value = given.get(field.name)
        if value is not None:
            single = field.type == "int"
            fine = isinstance(value, int if single else list)
            numbers = [value] if single else value
            require(
                fine and all(type(n) is int and single <= n < 2**24 for n in numbers),
                f"{field.name} is {value!r:.60}",
                f"it must be {'one number above 0' if single else 'a list of numbers'}, whole and "
                "below 2^24",
            )
            found[field.name] = value if single else tuple(value)
    c = VisionConfig(**found)
    taken, vocabulary = c.deepstack_visual_indexes, text.get("vocab_size")
    require(
        c.hidden_size % (4 * c.num_heads) == 0
        and round(c.num_position_embeddings**0.5) ** 2 == c.num_position_embeddings
        and c.depth <= 2**12
        and [*taken] == sorted({*taken} & {*range(c.depth)}),
        "vision_config describes no encoder",
        "hidden_size must be a multiple of 4 · num_heads, num_position_embeddings a square, depth "
        "at most 4096, and deepstack_visual_indexes rising and below depth",
    )
    require(
        c.out_hidden_size == text.get("hidden_size")
        and len(c.mrope_section) == 3
        and 2 * sum(c.mrope_section) == (text.get("head_dim") or 128)
        and (type(vocabulary) is not int or c.image_token_id < vocabulary),
        "text_config does not fit the rest",
        "out_hidden_size must be its hidden_size, mrope_section three numbers that add up to half "
        "of its head_dim, and image_token_id below its vocab_size",
    )
    # the default of rope_theta is that of transformers for this model
    text = {"rope_theta": 500_000.0, **text, "model_type": "qwen3"}
    for name in ("tie_word_embeddings", "quantization_config"):
        text[name] = raw.get(name, text.get(name))
    return text, c
