"""The objects of a script for TRL's GRPOTrainer, as options: GRPOConfig, LoraConfig, models.

    GRPOTrainer(                              nanogrpo.train(
        model="Qwen/Qwen3-0.6B",                  model="Qwen/Qwen3-0.6B",
        reward_funcs=[correct],                   reward_funcs=[correct],
        train_dataset=data,                       train_dataset=data,
        args=GRPOConfig(beta=0.01),               args=GRPOConfig(beta=0.01),
        peft_config=LoraConfig(r=16),             peft_config=LoraConfig(r=16),
    ).train()                                 )

In: the objects, which are recognized by their attributes, so that TRL, PEFT and transformers need
not be installed. Out: options by name, mostly TRL's names (trl_names.py). An object whose meaning
is not clear raises a UserError that says what to give instead. Read next: options.py
(`Config.from_trl`).
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nanogrpo.errors import UserError
from nanogrpo.model import checkpoint
from nanogrpo.model.tokenizer import Tokenizer

BATCH = ("per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation")
SAVE = "save it and the tokenizer in a folder with save_pretrained, and give the folder"


def options_of(
    args: Any = None,
    *,
    model: Any = None,
    peft_config: Any = None,
    processing_class: Any = None,
    **options: Any,
) -> dict[str, Any]:
    """Return the options that correspond to the arguments of a GRPOTrainer. `args` may also be a
    dict, and `options` override it.
    """
    out = dict(args or {}) if isinstance(args, Mapping | None) else _of_args(args)
    out |= options
    if peft_config is not None:
        out |= _of_peft(peft_config)
    if model is not None:
        out["model"] = _name_of(model)
    if processing_class is not None:
        _compare(processing_class, out.get("model", ""))
    return out


def _of_args(args: Any) -> dict[str, Any]:
    """Return the options of a GRPOConfig that differ from its defaults."""
    if not all(hasattr(args, name) for name in BATCH):
        raise UserError(f"args is a {type(args).__name__}: give a GRPOConfig of TRL, or a dict.")
    out = _changed(args, use_cpu=args.use_cpu, bf16=args.bf16)  # as this machine requires
    if args.use_cpu:
        out["use_cpu"] = True
    # a GRPOConfig fills in batch sizes that are not given
    if out.keys() & {"generation_batch_size", *BATCH}:
        out |= {name: getattr(args, name) for name in BATCH}
        out.pop("generation_batch_size", None)
    # under torchrun, a GRPOConfig joins the other processes, which a run does itself
    if dist.is_initialized():
        dist.destroy_process_group()
    return out


def _of_peft(config: Any) -> dict[str, Any]:
    """Return the options of a LoraConfig of PEFT, under the names of TRL's command line."""
    if not hasattr(config, "lora_alpha"):
        raise UserError(f"peft_config is a {type(config).__name__}: give a LoraConfig of PEFT.")
    found = {"r": config.r, "lora_alpha": config.lora_alpha, **_changed(config)}
    return {n if n.startswith(("lora_", "use_")) else f"lora_{n}": x for n, x in found.items()}


def _changed(config: Any, **same: Any) -> dict[str, Any]:
    """Return the fields of a dataclass whose values differ from those of a new object, which is
    made with the values `same`.
    """
    new, out = type(config)(**same), {}
    for field in dataclasses.fields(config):
        if (value := getattr(config, field.name)) != getattr(new, field.name):
            value = value.value if isinstance(value, enum.Enum) else value
            out[field.name] = sorted(value) if isinstance(value, set) else value
    return out


def _name_of(model: Any) -> str:
    """Return the folder or hub id of a model. A model object must have exactly the weights in this
    folder, because the run reads the folder again.
    """
    if isinstance(model, str | Path):
        return str(model)
    kind = f"model is a {type(model).__name__}"
    name = getattr(getattr(model, "config", None), "_name_or_path", "")
    if not name:
        raise UserError(f"{kind} that was not loaded from a folder or the hub: {SAVE}.")
    mine = model.state_dict()
    for key, stored in checkpoint.tensors(checkpoint.files(checkpoint.locate(name))):
        own = mine.get(key, torch.empty(0)).cpu()
        if not torch.equal(own, stored[:].to(own.dtype)):
            raise UserError(f"{kind} whose {key} differs from that of {name}: {SAVE}.")
    return name


def _compare(processing_class: Any, name: str) -> None:
    """Raise UserError if a tokenizer or processor differs from the one in the model's folder."""
    messages = [{"role": "user", "content": "1+1="}]
    if getattr(processing_class, "chat_template", None):
        theirs = processing_class.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        if theirs != Tokenizer(checkpoint.locate(name)).render(messages):
            raise UserError(
                f"processing_class has another chat template than {name}, which the run reads:"
                " save it there with save_pretrained, or leave it out."
            )
