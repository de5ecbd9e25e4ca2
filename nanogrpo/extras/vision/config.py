"""The configuration of a vision-language model: its decoder and its vision encoder.

In: the dict of a config.json with model_type qwen3_vl. Out: `VisionModelConfig`. The decoder has
the fields of a Qwen3, which model/hf_config.py reads. Read next: processor.py (a picture becomes
patches), then model.py (patches become embeddings).
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import nanogrpo.extras.rope_scaling  # noqa: F401 (adds kinds of scaling)
from nanogrpo.errors import check
from nanogrpo.model.hf_config import ModelConfig

# Fields that would change the computation, each with its only supported value. A field may also be
# null. The field rope_parameters describes the encoder's rotary embedding.
FIXED = {
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

    depth: int = 27  # how many blocks the encoder has
    hidden_size: int = 1152
    intermediate_size: int = 4304
    num_heads: int = 16
    patch_size: int = 16  # pixels along a side of a patch
    temporal_patch_size: int = 2  # frames in a patch, which all show the same picture
    spatial_merge_size: int = 2  # patches along a side of the square that becomes one token
    out_hidden_size: int = 3584  # the decoder's hidden_size
    num_position_embeddings: int = 2304  # a square grid
    # the outputs of these blocks become features for the decoder's first layers
    deepstack_visual_indexes: tuple[int, ...] = (8, 16, 24)
    # in config.json, the next two fields are outside vision_config
    image_token_id: int = 151655
    mrope_section: tuple[int, ...] = (24, 20, 20)  # frequencies for time, height and width

    @property
    def patch_values(self) -> int:
        """The number of values in a patch, C · Tp · Ph · Pw."""
        return 3 * self.temporal_patch_size * self.patch_size**2

    @property
    def axes(self) -> list[int]:
        """Return the axis of each of the decoder's E/2 frequencies: 0 time, 1 height, 2 width. The
        axes alternate (0 1 2 0 1 2 …) until height and width have as many frequencies as
        `mrope_section` says. The remaining frequencies, which are the slowest, belong to time.
        """
        _, height, width = self.mrope_section
        ends = (0, 3 * height, 3 * width)
        return [i % 3 if i < ends[i % 3] else 0 for i in range(sum(self.mrope_section))]


@dataclass(frozen=True)
class VisionModelConfig(ModelConfig):
    """The fields of the decoder, and the fields of the encoder."""

    vision: VisionConfig = VisionConfig()

    @classmethod
    def from_dict(cls, raw: dict, where: str = "config.json") -> "VisionModelConfig":
        """Read the dict of a config.json. `where` names the file in a message."""
        check(where, "model_type", raw.get("model_type"), ["qwen3_vl"])
        text = raw["text_config"]
        angles = text.get("rope_scaling") or text.get("rope_parameters") or {}
        given = {**angles, **raw["vision_config"], "image_token_id": raw.get("image_token_id")}
        for name, fixed in FIXED.items():
            check(where, name, given.get(name), [fixed, None])
        vision: dict[str, Any] = {
            field.name: tuple(value) if isinstance(value, list) else value
            for field in dataclasses.fields(VisionConfig)
            if (value := given.get(field.name)) is not None
        }
        # transformers' default of rope_theta for this model
        text = {"rope_theta": 500_000.0, **text, "model_type": "qwen3"}
        for name in ("tie_word_embeddings", "quantization_config"):
            text[name] = raw.get(name, text.get(name))
        return cls(**vars(ModelConfig.from_dict(text, where)), vision=VisionConfig(**vision))

    def to_dict(self) -> dict:
        """Return the dict of a config.json that transformers (4 and 5) and vLLM can read."""
        vision = dataclasses.asdict(self.vision)
        token, section = vision.pop("image_token_id"), vision.pop("mrope_section")
        text = super().to_dict()
        del text["architectures"], text["vision"]
        angles = text["rope_scaling"] or {"rope_type": "default"}
        text["rope_scaling"] = {**angles, "mrope_section": section, "mrope_interleaved": True}
        return {
            "architectures": ["Qwen3VLForConditionalGeneration"],
            "model_type": "qwen3_vl",
            "image_token_id": token,
            "tie_word_embeddings": text["tie_word_embeddings"],
            "text_config": {**text, "model_type": "qwen3_vl_text"},
            "vision_config": {**vision, "model_type": "qwen3_vl"},
        }
