"""Hugging Face checkpoints in and out.

In: a folder or hub id with config.json and safetensors (one file, or several with an index). Out: a
`Decoder`, whole or sharded; folders that transformers and vLLM load as they are. A folder is
written under another name, flushed, and renamed: it is whole or not there. Read next: state.py
(what a run needs beside the weights to be continued).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from nanogrpo.errors import UserError, read_json
from nanogrpo.model import lora
from nanogrpo.model.decoder import Decoder
from nanogrpo.model.hf_config import ModelConfig
from nanogrpo.model.tokenizer import Tokenizer

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_FILE_BYTES = 5 * 10**9  # of weights in one safetensors file, as transformers splits them


# --- reading --------------------------------------------------------------------------------------


def locate(name: str, option: str = "--model") -> Path:
    """The folder of a checkpoint: a local path as it is, else a hub id, downloaded once into
    Hugging Face's cache.
    """
    if Path(name).is_dir():
        return Path(name)
    if Path(name).is_absolute() or name.count("/") != 1 or name.startswith((".", "~")):
        raise UserError(
            f"{option} {name}: there is no such folder (and it is not a hub id of the form owner/name)."
        )
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.jinja"]))
    # the hub's client raises from half a dozen libraries: every one means that the model is not
    # here
    except Exception as e:
        # some go on for a paragraph
        reason = f"{type(e).__name__}: {str(e).strip()}".splitlines()[0].rstrip(".")
        raise UserError(
            f"{option} {name}: no such folder, and the hub did not give it ({reason})."
        ) from e


def files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint, all present."""
    if (folder / WEIGHTS).exists():
        return [folder / WEIGHTS]
    if not (folder / INDEX).exists():
        raise UserError(
            f"{folder} holds neither {WEIGHTS} nor {INDEX}: convert the weights to safetensors first."
        )
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not all(
        isinstance(shard, str) for shard in weight_map.values()
    ):
        raise UserError(
            f"{folder / INDEX} has no weight_map from tensors to files: download it again."
        )
    shards = sorted(set(weight_map.values()))
    for shard in shards:
        if not (folder / shard).exists():
            raise UserError(
                f"{folder / shard} is missing though {INDEX} names it: complete the download."
            )
    return [folder / shard for shard in shards]


def tensors(folder: Path) -> Iterator[tuple[str, Any]]:
    """(name, slice) of every tensor of a checkpoint: `slice[:]` reads it whole, `slice[0:4]` those
    rows only.
    """
    for file in files(folder):
        try:
            with safe_open(file, framework="pt") as f:
                for name in f.keys():  # noqa: SIM118 (not a dict: it has no __iter__)
                    yield name, f.get_slice(name)
        except (SafetensorError, OSError) as e:
            raise UserError(
                f"{file} is corrupt or cut short ({e}): download or write it again."
            ) from e


@torch.no_grad()
def load_weights(model: Decoder, folder: Path) -> None:
    """Copies a checkpoint into the model; UserError names the first tensor that is missing,
    unknown, or of the wrong shape.
    """
    wanted = {
        name: p for name, p in model.state_dict(keep_vars=True).items() if not lora.is_adapter(name)
    }
    missing = set(wanted)
    tied = model.cfg.tie_word_embeddings
    for name, tensor in tensors(folder):
        if name not in wanted:
            raise UserError(
                f"{folder}: the tensor {name} does not belong to this architecture; config.json and weights disagree."
            )
        shape, expected = tuple(tensor.get_shape()), tuple(wanted[name].shape)
        if shape != expected:
            raise UserError(
                f"{folder}: the tensor {name} has shape {shape} where config.json asks for {expected}."
            )
        # a tied head is the embedding, whatever a file says
        if not (tied and name == "lm_head.weight"):
            fill(wanted[name], tensor)
        missing.discard(name)
    if tied:
        missing.discard("lm_head.weight")
    if missing:
        raise UserError(
            f"{folder}: the tensor {min(missing)} is missing; config.json and weights disagree."
        )


def fill(parameter: Tensor, source) -> None:
    """Copies a tensor, or a slice of a file, into a parameter; of a sharded one, only this rank's
    rows are read.
    """
    if not isinstance(parameter, DTensor):
        parameter.copy_(source[:])
        return
    shape, offset = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    if 0 not in shape:
        parameter.to_local().copy_(source[tuple(slice(o, o + n) for o, n in zip(offset, shape))])


def empty_model(folder: Path) -> Decoder:
    """The model of a checkpoint folder without its weights: no time or memory spent on values that
    are read from files anyway.
    """
    cfg = ModelConfig.from_dict(read_json(folder / "config.json"), str(folder / "config.json"))
    try:
        with torch.device("meta"):
            return Decoder(cfg)
    except RuntimeError as e:  # a product of sizes beyond 64 bits
        reason = str(e).splitlines()[0].rstrip(".")
        raise UserError(
            f"{folder / 'config.json'}: no machine holds such sizes ({reason}); take the one of the weights."
        ) from e


def load_model(
    folder: Path, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> Decoder:
    """The model of a checkpoint folder, its weights cast to `dtype`."""
    # in this order, so that no float32 copy exists
    model = empty_model(folder).to(dtype).to_empty(device=device)
    model.tie()
    load_weights(model, folder)
    return model


# --- writing --------------------------------------------------------------------------------------


@contextlib.contextmanager
def written_whole(final: Path) -> Iterator[Path]:
    """A folder to write into, renamed to `final` at the end: a crash, or any exception, leaves what
    was there before.

    A checkpoint that is there already is replaced; a folder that holds anything else is refused.
    """
    final = final.absolute()  # "." has no name of its own
    aside, old = final.with_name(f".{final.name}.tmp"), final.with_name(f".{final.name}.old")
    try:
        if final.exists() and any(final.iterdir()) and not (final / "config.json").exists():
            raise UserError(
                f"{final} holds other files, which would be lost: choose another folder."
            )
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        yield aside
        # as the umask has it: safetensors makes files that only their owner can read
        mode = aside.stat().st_mode & 0o666
        for path in (*aside.rglob("*"), aside):
            if path.is_file():
                path.chmod(mode)
            # a rename may reach the disk before the data does, unless the data is flushed
            _flush(path)
        # a folder cannot be renamed over another: for a moment the old one is whole under the name
        # `old`
        if final.exists():
            shutil.rmtree(old, ignore_errors=True)
            final.rename(old)
        aside.rename(final)
        _flush(final.parent)
        shutil.rmtree(old, ignore_errors=True)
    except BaseException as e:
        shutil.rmtree(aside, ignore_errors=True)
        if old.exists() and not final.exists():
            old.rename(final)
        if isinstance(e, (OSError, SafetensorError)):
            reason = getattr(e, "strerror", None) or e
            raise UserError(
                f"{final} could not be written ({reason}): make room or choose another folder; earlier checkpoints are whole."
            ) from e
        raise


def _flush(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def export(
    model: Decoder, folder: Path, tokenizer: Tokenizer | None = None, config: dict | None = None
) -> None:
    """Writes a model into an existing folder, in its own dtype; sharded ones are gathered, so every
    rank must call.
    """
    write_model(host_weights(model), config or model.cfg.to_dict(), folder, tokenizer)


@torch.no_grad()
def host_weights(
    model: Decoder, dtype: torch.dtype | None = None, keep: bool = True
) -> dict[str, Tensor]:
    """Copies of the whole weights in host memory, without a tied head, and with adapters merged.

    Sharded ones are gathered one by one, so every rank must call; where `keep` is off they are
    dropped again at once.
    """
    out: dict[str, Tensor] = {}
    # a tied head is the embedding, under whose name it comes first
    for name, full in lora.full_parameters(model):
        if keep:
            out[name] = full.to("cpu", dtype, copy=True).contiguous()
    return out


def write_model(
    weights: dict[str, Tensor], config: dict, folder: Path, tokenizer: Tokenizer | None = None
) -> None:
    """Writes config.json, the weights, and the tokenizer's files into an existing folder.

    config: the fields of config.json; of a model that was loaded, all of the source's, also those
    that we do not read.
    """
    dtype = str(next(iter(weights.values())).dtype).removeprefix("torch.")
    (folder / "config.json").write_text(
        json.dumps({**config, "dtype": dtype, "torch_dtype": dtype}, indent=2) + "\n"
    )
    parts: list[dict[str, Tensor]] = [{}]
    for name, tensor in weights.items():
        if parts[-1] and sum(t.nbytes for t in parts[-1].values()) + tensor.nbytes > MAX_FILE_BYTES:
            parts.append({})
        parts[-1][name] = tensor
    names = [f"model-{i:05}-of-{len(parts):05}.safetensors" for i in range(1, len(parts) + 1)]
    for file, part in zip(names if len(parts) > 1 else [WEIGHTS], parts):
        save_file(part, folder / file, metadata={"format": "pt"})
    if len(parts) > 1:
        index = {
            "metadata": {"total_size": sum(t.nbytes for t in weights.values())},
            "weight_map": {name: file for file, part in zip(names, parts) for name in part},
        }
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    if tokenizer:
        tokenizer.save(folder)


def checkpoints(output_dir: str) -> list[Path]:
    """The finished checkpoints of a run, oldest first."""
    found = [
        p for p in Path(output_dir).glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", p.name)
    ]
    return sorted(found, key=lambda p: int(p.name.split("-")[1]))
