"""The configuration of a vision-language model: the part of config.json that is not the decoder's.

In: the dict of a config.json with model_type qwen3_vl. Out: the fields of its decoder, which
model/hf_config.py reads like those of Qwen3, and a `VisionConfig`. Read next: processor.py (a
picture becomes patches), then model.py (patches become embeddings).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# Fields of vision_config that would change the computation, and the only value that they may have.
FIXED = {"in_channels": 3, "hidden_act": "gelu_pytorch_tanh"}


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
        return FIXED["in_channels"] * self.temporal_patch_size * self.patch_size**2

    @property
    def axes(self) -> list[int]:
        """Return which axis rotates each of the decoder's E/2 frequencies: 0 time, 1 height, 2
        width. They are interleaved, 0 1 2 0 1 2 …; the time gets the rest, which is slowest.
        """
        _, height, width = self.mrope_section
        ends = (0, 3 * height, 3 * width)
        return [i % 3 if i < ends[i % 3] else 0 for i in range(sum(self.mrope_section))]

    def to_dict(self, text: dict) -> dict:
        """Return the dict of a config.json. text: the dict of its decoder alone."""
        fields = dataclasses.asdict(self).items()
        vision = {name: [*x] if isinstance(x, tuple) else x for name, x in fields}
        image_token_id, section = vision.pop("image_token_id"), vision.pop("mrope_section")
        angles = {**text["rope_parameters"], "mrope_section": section, "mrope_interleaved": True}
        return {
            "architectures": ["Qwen3VLForConditionalGeneration"],
            "model_type": "qwen3_vl",
            "image_token_id": image_token_id,
            "tie_word_embeddings": text["tie_word_embeddings"],
            "text_config": {
                **{name: value for name, value in text.items() if name != "architectures"},
                "model_type": "qwen3_vl_text",
                "rope_parameters": angles,
                "rope_scaling": angles,  # for transformers 4
            },
            "vision_config": {**FIXED, **vision, "model_type": "qwen3_vl"},
        }


def read(raw: dict, require: Callable[..., None]) -> tuple[dict, VisionConfig]:
    """Return the fields of the decoder, as in the config.json of a Qwen3, and the others.

    require: raises a UserError with its second argument if the first is false.
    """
    both = [raw.get(name) for name in ("text_config", "vision_config")]
    require(all(isinstance(part, dict) for part in both), "text_config or vision_config is missing")
    text, vision = (dict(part or {}) for part in both)
    for name, value in FIXED.items():
        given = vision.get(name, value)
        require(given == value, f"{name} {given!r:.60} is not supported", f"it must be {value}")
    turns = vision.get("rope_parameters") or {}  # a version of transformers 5 writes it
    theta = turns.get("rope_theta", 10_000) if isinstance(turns, dict) else turns
    require(theta == 10_000, f"rope_theta {theta!r:.60} of vision_config is not 10000")

    angles = text.get("rope_scaling") or text.get("rope_parameters") or {}
    require(isinstance(angles, dict), f"rope_parameters is {angles!r:.60} but must be an object")
    require(
        angles.get("mrope_interleaved") in (None, True),
        "mrope_interleaved is off, which is not supported",
        "it must be true",
    )
    vision["image_token_id"] = raw.get("image_token_id")
    vision["mrope_section"] = angles.get("mrope_section")
    found: dict[str, Any] = {}
    for field in dataclasses.fields(VisionConfig):
        value = vision.get(field.name)
        if value is None:
            continue
        several = field.type != "int"
        values = value if several else [value]
        least = 0 if several or field.name == "image_token_id" else 1
        fine = isinstance(values, list) and all(type(v) is int and v >= least for v in values)
        wanted = "a list of whole numbers" if several else "a whole number above 0"
        require(
            fine and max(values, default=0) < 2**24, f"{field.name} {value!r:.60} is not {wanted}"
        )
        found[field.name] = tuple(values) if several else value
    cfg = VisionConfig(**found)

    D, H = cfg.hidden_size, cfg.num_heads
    require(D % (4 * H) == 0, f"hidden_size {D} of vision_config is no multiple of 4 · {H} heads")
    side = round(cfg.num_position_embeddings**0.5)
    require(side**2 == cfg.num_position_embeddings, "num_position_embeddings is not a square")
    taken = cfg.deepstack_visual_indexes
    rising = [*taken] == sorted({*taken}) and max(taken, default=0) < cfg.depth
    layers = text.get("num_hidden_layers")
    require(
        rising and (type(layers) is not int or len(taken) <= layers),
        f"deepstack_visual_indexes {[*taken]} must be rising numbers of the encoder's blocks, at "
        "most one per decoder layer",
    )
    width, out, half = text.get("hidden_size"), cfg.out_hidden_size, text.get("head_dim") or 128
    require(out == width, f"out_hidden_size {out} differs from hidden_size {width} of text_config")
    section = cfg.mrope_section
    require(
        len(section) == 3 and 2 * sum(section) == half,
        f"mrope_section {[*section]} must be three numbers that add up to half of head_dim {half}",
    )
    text["model_type"] = "qwen3"
    text.setdefault("rope_theta", 500_000.0)  # transformers' default for this model
    for name in ("tie_word_embeddings", "quantization_config"):
        text[name] = raw.get(name, text.get(name))
    return text, cfg
