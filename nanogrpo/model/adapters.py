"""Adapters in PEFT's format: a folder with adapter_config.json and adapter_model.safetensors, in
and out.

In: a model with adapters (lora.py), the options. Out: adapters filled, fresh or from a folder;
folders that peft loads over the base model:
`PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder)`. PEFT's names are
ours with a prefix and a suffix. What PEFT can do and we cannot is refused by name. Read before:
lora.py. Read next: state.py (when they are saved).
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from nanogrpo.config import Config
from nanogrpo.errors import UserError, read_json
from nanogrpo.model import lora
from nanogrpo.model.checkpoint import fill
from nanogrpo.model.decoder import Decoder

log = logging.getLogger("nanogrpo")

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# The fields of adapter_config.json that describe what we compute too, or nothing that is computed.
# All others, also those that PEFT does not have yet, must be absent, empty or "none".
KNOWN = {
    "peft_type",
    "r",
    "lora_alpha",
    "target_modules",
    "lora_dropout",
    "task_type",
    "inference_mode",
    "auto_mapping",
    "revision",
}
KNOWN |= {
    "base_model_name_or_path",
    "peft_version",
    "megatron_core",
    "qalora_group_size",
    "layers_pattern",
    "init_lora_weights",
}
# of init_lora_weights; others, such as pissa, change the base weights too
PLAIN_STARTS = (None, True, False, "gaussian")


def peft_name(name: str) -> str:
    """model.layers.0.mlp.up_proj.lora_A → base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"""
    return f"base_model.model.{name}.weight"


@torch.no_grad()
def begin(model: Decoder, cfg: Config) -> None:
    """Fills the adapters, of a whole or a sharded model: from --lora-adapter, or B = 0 and A as
    PEFT draws it, by the seed.

    A is uniform within ±1/√in (kaiming_uniform with a = √5), the same on any number of ranks: each
    draws all of it.
    """
    if cfg.lora_adapter:
        load(model, Path(cfg.lora_adapter), cfg)
        return
    generator = torch.Generator().manual_seed(cfg.seed)
    for name, p in model.named_parameters():
        if name.endswith(".lora_A"):
            bound = p.shape[1] ** -0.5
            fill(p, torch.empty(p.shape).uniform_(-bound, bound, generator=generator))
        elif name.endswith(".lora_B"):
            p.zero_()


@torch.no_grad()
def load(model: Decoder, folder: Path, cfg: Config) -> None:
    """Reads a folder in PEFT's format into the adapters; UserError names what does not fit."""
    if not (folder / CONFIG).exists():
        raise UserError(
            f"--lora-adapter {folder} holds no {CONFIG}: give a folder that peft or a run of ours has written."
        )
    check(read_json(folder / CONFIG), folder, cfg)
    wanted = {peft_name(name): p for name, p in model.named_parameters() if lora.is_adapter(name)}
    try:
        with safe_open(folder / WEIGHTS, framework="pt") as f:
            found = set(f.keys())
            for name in sorted(found | wanted.keys()):
                shapes = [tuple(f.get_slice(name).get_shape()) if name in found else None]
                shapes.append(tuple(wanted[name].shape) if name in wanted else None)
                if shapes[0] != shapes[1]:
                    there, here = (shape or "none" for shape in shapes)
                    raise UserError(
                        f"--lora-adapter {folder}: {name} has shape {there} there and {here} here; give the model and the "
                        "--lora-target-modules that it was made with."
                    )
                fill(wanted[name], f.get_slice(name))
    except (SafetensorError, OSError) as e:
        raise UserError(
            f"--lora-adapter {folder}: {WEIGHTS} cannot be read ({e}): write it again."
        ) from e


def check(found: dict, folder: Path, cfg: Config) -> None:
    """Whether the adapters of an adapter_config.json are those that the options describe."""

    def require(ok: bool, sentence: str) -> None:
        if not ok:
            raise UserError(f"--lora-adapter {folder}: {sentence}.")

    require(
        found.get("peft_type") == "LORA",
        f"peft_type is {found.get('peft_type')!r}, only LORA can be loaded",
    )
    for name, value in found.items():
        fits = (
            value in PLAIN_STARTS
            if name == "init_lora_weights"
            else name in KNOWN or value in (None, False, "none", {}, [])
        )
        require(fits, f"{name} is {value!r}, which is not supported here")
    for name, flag, ours in (
        ("r", "--lora-r", cfg.lora_r),
        ("lora_alpha", "--lora-alpha", cfg.lora_alpha),
    ):
        require(
            found.get(name) == ours,
            f"it has {name} = {found.get(name)}, but {flag} is {ours}: give the same",
        )
    if found.get("lora_dropout"):
        log.info(
            "%s was trained with lora_dropout %s; here nothing is dropped (lora.py says why)",
            folder,
            found["lora_dropout"],
        )


@torch.no_grad()
def host_adapters(model: Decoder, keep: bool = True) -> dict[str, Tensor]:
    """Copies of the adapters in host memory, under PEFT's names, float32 as they are trained. Every
    rank must call.
    """
    out = {}
    for name, p in model.named_parameters():
        if lora.is_adapter(name):
            full = lora.gathered(p)
            if keep:
                out[peft_name(name)] = full.to("cpu", copy=True).contiguous()
    return out


def write(tensors: dict[str, Tensor], folder: Path, cfg: Config) -> None:
    """Writes a folder in PEFT's format. tensors: of `host_adapters`."""
    folder.mkdir()
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": cfg.base,
        "r": cfg.lora_r,
        "lora_alpha": int(cfg.lora_alpha)
        if cfg.lora_alpha == int(cfg.lora_alpha)
        else cfg.lora_alpha,
        "target_modules": lora.targets(cfg),
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
