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

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nanogrpo.errors import UserError
from nanogrpo.model import checkpoint
from nanogrpo.model.tokenizer import Tokenizer

BATCH = ("per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation")


def options_of(
    args: Any = None,
    *,
    model: Any = None,
    peft_config: Any = None,
    processing_class: Any = None,
    **options: Any,
) -> dict[str, Any]:
    """Return the options that replace the arguments of a GRPOTrainer, together with `options`,
    which override `args`. `args` may also be a dict.
    """
    if not isinstance(args, Mapping | None):
        args = _of(args, "GRPOConfig", "use_cpu", *BATCH)
        args.pop("generation_batch_size", None)  # its value follows from the other sizes
        # under torchrun, a GRPOConfig joins the other processes, but a run does this itself
        if dist.is_initialized():
            dist.barrier()  # a rank that leaves early would break the connections of the others
            dist.destroy_process_group()
    out = {**(args or {}), **options}
    if peft_config is not None:
        found = _of(peft_config, "LoraConfig", "r", "lora_alpha").items()
        # the names of TRL's command line
        out |= {n if n.startswith(("lora_", "use_")) else f"lora_{n}": x for n, x in found}
    if model is not None:
        out["model"] = _name_of(model)
    if processing_class is not None:
        _compare(processing_class, out.get("model", ""))
    return out


def _of(config: Any, kind: str, *always: str) -> dict[str, Any]:
    """Return the fields of a dataclass object whose values are not the defaults, and all fields
    that are named in `always`.
    """
    if not all(hasattr(config, name) for name in always):
        raise UserError(f"{config!r:.60} is not a {kind}: pass a {kind}, or leave it out.")
    # a new GRPOConfig needs values that this machine supports
    same = {name: getattr(config, name) for name in ("use_cpu", "bf16") if hasattr(config, name)}
    new, out = type(config)(**same), {}
    for name in (field.name for field in dataclasses.fields(config)):
        value = getattr(config, name)
        if name in always or value != getattr(new, name):
            value = getattr(value, "value", value)  # of an Enum
            out[name] = sorted(value) if isinstance(value, set) else value
    return out


def _name_of(model: Any) -> str:
    """Return the folder or hub id of a model. A model object must have exactly the weights that are
    stored there, because the run reads them again.
    """
    if isinstance(model, str | Path):
        return str(model)
    name = getattr(getattr(model, "config", None), "_name_or_path", "")
    mine = model.state_dict() if name else {}
    same = bool(name) and all(
        key in mine and torch.equal(mine[key].cpu(), stored[:].to(mine[key].dtype))
        for key, stored in checkpoint.tensors(checkpoint.files(checkpoint.locate(name)))
    )
    if not same:
        raise UserError(
            f"model is a {type(model).__name__} whose weights are not in {name or 'any folder'}:"
            " save it and the tokenizer in a folder with save_pretrained, and pass the folder."
        )
    return name


def _compare(processing_class: Any, name: str) -> None:
    """Raise UserError if a tokenizer or processor differs from the one in the folder of the
    model."""
    messages = [{"role": "user", "content": "1+1="}]
    if getattr(processing_class, "chat_template", None):
        theirs = processing_class.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        if theirs != Tokenizer(checkpoint.locate(name)).render(messages):
            raise UserError(
                f"the run uses the chat template of {name}, but processing_class has a different"
                " one: save processing_class there with save_pretrained, or leave it out."
            )
