"""The options of adapters, and of frozen weights in four bits. Read next: feature.py, lora.py."""

from __future__ import annotations

from dataclasses import dataclass

from nanogrpo.config import Config, option

# the linear layers of a block
LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# the linear layers of a vision encoder (extras/vision/model.py), named as PEFT expects
VISION_LORA_TARGETS = ("attn.qkv", "attn.proj", "linear_fc1", "linear_fc2")


@dataclass(frozen=True)
class LoRAOptions(Config):
    """Low-rank adapters, and frozen weights in four bits."""

    lora_r: int = option(
        0,
        "rank of the adapters, W + alpha/r*B*A; only they are trained; 0: train all weights",
        ">= 0",
        group="LoRA",
    )
    lora_alpha: float = option(32.0, "alpha in alpha/r", "> 0", needs="lora_r")
    lora_target_modules: tuple[str, ...] = option(
        (),
        "layers that get adapters, such as q_proj v_proj; empty: the seven of the decoder, and none"
        " of a vision encoder (attn.qkv attn.proj linear_fc1 linear_fc2)",
        choices=(*LORA_TARGETS, *VISION_LORA_TARGETS),
        needs="lora_r",
    )
    load_in_4bit: bool = option(
        False,
        "store the frozen matrices of the blocks in 4 bits (NF4, as in QLoRA), which takes a"
        " quarter of bfloat16's memory",
        needs="lora_r",
    )
    lora_adapter: str = option(
        "",
        "folder of adapters in PEFT's format to start from; the base is still the reference model",
        needs="lora_r",
    )
