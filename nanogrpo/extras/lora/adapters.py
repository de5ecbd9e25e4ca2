"""Read and write adapters in PEFT's format: a folder with adapter_config.json and
adapter_model.safetensors.

In: a model with adapters (lora.py), and the options. Out: adapters, initialized or loaded, and
folders that peft can load on top of the base model:
`PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder)`. If the base was in
four bits, the folder also has quantization_config.json. With the arguments in this file,
transformers' BitsAndBytesConfig quantizes a base model in the same way. PEFT's names of tensors are
our names with a prefix and a suffix. PEFT features that we do not support are rejected with a
message that names them. Read before: lora.py. Read next: run/state.py (when adapters are saved).
"""

import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from nanogrpo.config import dashed
from nanogrpo.errors import UserError, read_json, reading
from nanogrpo.extras.lora import lora
from nanogrpo.extras.lora.nf4 import FOUR_BITS
from nanogrpo.extras.options import Config
from nanogrpo.extras.sharding import compute_dtype
from nanogrpo.model.checkpoint import copy_tensors, fill, tensors, write_json
from nanogrpo.model.decoder import Decoder
from nanogrpo.model.weights import gathered

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
QUANTIZATION = "quantization_config.json"  # written only if the base has four-bit weights
SUBFOLDER = "adapter"  # the subfolder of a checkpoint that contains only the adapters
# The fields of adapter_config.json that we accept.
# Each of these fields is either supported or does not change the computation.
# All other fields, also new fields of later PEFT versions, must be absent, empty or "none".
KNOWN = """
    r lora_alpha use_rslora target_modules lora_dropout task_type inference_mode
    auto_mapping revision base_model_name_or_path peft_version megatron_core qalora_group_size
    layers_pattern
"""
# The accepted values of two further fields of adapter_config.json.
# Other values of init_lora_weights, such as "pissa", change the base weights, too.
PLAIN = {"peft_type": ("LORA",), "init_lora_weights": (None, True, False, "gaussian")}


def peft_name(name: str) -> str:
    """model.layers.0.….lora_A → base_model.model.model.layers.0.….lora_A.weight"""
    return f"base_model.model.{name}.weight"


@torch.no_grad()
def initialize(model: Decoder, cfg: Config) -> None:
    """Initialize the adapters of a full or sharded model from --lora-adapter. Without
    --lora-adapter, B is 0 and A is random, as in PEFT. A depends on the seed.

    A is uniform within ±1/√in (kaiming_uniform with a = √5). Every rank draws the full matrix A, so
    its values do not depend on the number of ranks.
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


def check_base(source: Path, cfg: Config) -> None:
    """Raise UserError if --model already contains adapters that have the same base model as
    --lora-adapter.

    A run's checkpoint contains its merged weights and, in a subfolder, its adapters. `source` is
    the folder of --model.
    """
    files = Path(cfg.lora_adapter) / CONFIG, source / SUBFOLDER / CONFIG
    if cfg.lora_adapter and all(map(os.path.lexists, files)):
        names = [read_json(file).get("base_model_name_or_path") or file for file in files]
        with reading(files[0]):
            base, merged = map(os.path.realpath, names)
        if base == merged:
            raise UserError(
                f"--lora-adapter {cfg.lora_adapter}: the weights of --model {cfg.model} already "
                f"contain adapters for {names[0]}, so a second set would be added: use --model "
                f"{names[0]}."
            )


def load(model: Decoder, folder: Path, cfg: Config) -> None:
    """Read --lora-adapter, a folder in PEFT's format, into the adapters. Raises UserError if the
    adapters do not match the model or the options.
    """
    where = f"--lora-adapter {folder}"
    found = read_json(folder / CONFIG)
    for name, value in found.items():
        plain: Any = PLAIN.get(name, (None, False, "none", {}, []))
        if name not in KNOWN.split() and value not in plain:
            raise UserError(f"{where}: {name} is {value!r}, which is not supported here.")
    alpha = found.get("lora_alpha")
    if found.get("use_rslora") and isinstance(alpha, int | float):  # then the scale is alpha/√r
        alpha *= cfg.lora_r**0.5
    for name, theirs in (("lora_r", found.get("r")), ("lora_alpha", alpha)):
        ours = getattr(cfg, name)
        if theirs != ours:
            raise UserError(
                f"{where} needs --{dashed(name)} {theirs!r}, but this option is {ours}: use the "
                "same value."
            )
    wanted = {peft_name(name): p for name, p in model.named_parameters() if lora.is_adapter(name)}
    copy_tensors(
        wanted,
        tensors([folder / WEIGHTS]),
        where,
        "use the model and the --lora-target-modules it was trained with",
    )


@torch.no_grad()
def host_adapters(model: Decoder, keep: bool = True) -> dict[str, Tensor]:
    """Return copies of the adapters in host memory, under PEFT's names and in float32. Every rank
    must call this function. If `keep` is False, the result on this rank is an empty dict.
    """
    out = {
        peft_name(name): gathered(p).to("cpu", copy=True).contiguous()
        for name, p in model.named_parameters()
        if lora.is_adapter(name)
    }
    return out if keep else {}


def write(weights: dict[str, Tensor], folder: Path, cfg: Config, device: str = "cpu") -> None:
    """Write a folder in PEFT's format. `weights` is the result of `host_adapters`, and `device` is
    the type of device on which the adapters were trained.
    """
    alpha = cfg.lora_alpha
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": cfg.model,
        "r": cfg.lora_r,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "target_modules": lora.targets(cfg),
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    folder.mkdir()
    write_json(folder / CONFIG, config)
    if cfg.load_in_4bit:
        # without "torch."
        how = FOUR_BITS | {"bnb_4bit_compute_dtype": f"{compute_dtype(cfg, device)}"[6:]}
        if any(".language_model." in name for name in weights):  # the model has a vision encoder
            how["llm_int8_skip_modules"] = ["model.visual", "lm_head"]
        write_json(folder / QUANTIZATION, how)
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
