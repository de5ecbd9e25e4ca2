"""Merge adapters into their base: `nanogrpo merge ADAPTERS OUT`.

    nanogrpo merge runs/lora/checkpoint-30 runs/merged

In: a checkpoint of a run with --lora-r, or another folder of adapters in PEFT's format, whose
adapter_config.json names the base. Out: an ordinary checkpoint in the dtype of the base, the same
that a run writes with --save-merged. A base in four bits is quantized again, because the adapters
belong to the dequantized weights. Read before: adapters.py, lora.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path

from nanogrpo.config import Config
from nanogrpo.errors import UserError, read_json, reading
from nanogrpo.model import adapters, checkpoint, lora
from nanogrpo.model.tokenizer import Tokenizer


def options(folder: Path) -> Config:
    """Return the options that adapters were trained with. Raises UserError if they are not LoRA."""
    path = folder / adapters.CONFIG
    found = read_json(path)
    advice = "name a folder that nanogrpo or peft has written"
    with reading(path, advice, "does not describe adapters"):
        try:
            cfg = Config(
                model=found["base_model_name_or_path"],
                data=("none",),
                lora_r=found["r"],
                lora_alpha=found["lora_alpha"],
                use_rslora=found.get("use_rslora") or False,
                lora_target_modules=tuple(found["target_modules"]),
            )
            cfg.validate()
        except UserError as e:  # it names an option, and the user has given a file
            raise ValueError(str(e)) from e
    return cfg


def merge(folder: Path, out: Path) -> None:
    """Write the base of the adapters in `folder`, with the adapters merged into it, to `out`."""
    if out.exists() and (out.is_file() or any(out.iterdir())):
        raise UserError(f"{out} exists already: name a new folder.")
    inner = folder / adapters.SUBFOLDER
    folder = inner if inner.is_dir() else folder
    cfg = options(folder)
    base = checkpoint.locate(cfg.model, f"base_model_name_or_path in {folder / adapters.CONFIG}:")
    quantized = folder / adapters.QUANTIZATION
    stored = read_json(quantized) if quantized.exists() else {}
    four_bits = bool(stored) or checkpoint.in_four_bits(base)
    model = checkpoint.empty_model(base, four_bits)
    dtype = stored.get("bnb_4bit_compute_dtype") or str(model.saved_dtype).removeprefix("torch.")
    cfg = dataclasses.replace(cfg, load_in_4bit=four_bits, lora_base_dtype=dtype)
    lora.attach(model, cfg)
    with checkpoint.atomic_folder(out) as new:
        model.to_empty(device="cpu")
        model.tie()
        checkpoint.load_weights(model, base)
        adapters.load(model, folder, cfg, "nanogrpo merge")
        weights = checkpoint.host_weights(model, model.saved_dtype)
        checkpoint.write_model(weights, read_json(base / "config.json"), new, Tokenizer(base))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="nanogrpo merge", description="Merge adapters into their base, an ordinary checkpoint."
    )
    parser.add_argument("adapters", type=Path, help="checkpoint of a run, or folder of adapters")
    parser.add_argument("out", type=Path, help="new folder for the merged checkpoint")
    args = parser.parse_args(argv)
    try:
        merge(args.adapters, args.out)
    except UserError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    print(f"the merged model is in {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
