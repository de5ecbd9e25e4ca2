"""Read and write Hugging Face checkpoints.

In: a folder or hub id with config.json and safetensors (one file, or several with an index). Out: a
`Decoder`, full or sharded, and folders that transformers and vLLM load unchanged. A folder is
written under a temporary name, flushed to disk, and then renamed, so it is either complete or
absent. Read next: run/state.py (what else a run needs to resume).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from nanogrpo.errors import UserError, read_json, reading
from nanogrpo.model import lora, nf4
from nanogrpo.model.decoder import Decoder
from nanogrpo.model.hf_config import ModelConfig
from nanogrpo.model.tokenizer import Tokenizer

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_FILE_BYTES = 5 * 10**9  # maximum size of a safetensors file, as in transformers
HEAD, EMBEDDING = "lm_head.weight", ".embed_tokens.weight"
# the types of weights that are read; quantized weights would need more than a cast
FLOATS = ("F64", "F32", "F16", "BF16")


# --- reading ---


def locate(name: str, option: str = "--model") -> Path:
    """Return the folder of a checkpoint: a local path, or a hub id, which is downloaded into
    Hugging Face's cache.
    """
    if Path(name).is_dir():
        folder = Path(name)
        places = folder / "adapter_config.json", folder / "adapter" / "adapter_config.json"
        if not (folder / "config.json").exists() and any(p.exists() for p in places):
            raise UserError(
                f"{option} {name} holds only adapters: merge them into their base first, with "
                f"nanogrpo merge {shlex.quote(name)} FOLDER."
            )
        return folder
    if not re.fullmatch(r"[^./~][^/]*/[^/]+", name):
        raise UserError(
            f"{option} {name}: there is no such folder, and a hub id has the form owner/name."
        )
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.jinja"]))
    # the hub client raises errors from many libraries; each one means that the download failed
    except Exception as e:
        # only the first line, because some messages are long
        reason = f"{type(e).__name__}: {str(e).strip()}".splitlines()[0].rstrip(".")
        raise UserError(
            f"{option} {name}: no such folder, and the download from the hub failed ({reason})."
        ) from e


def files(folder: Path) -> list[Path]:
    """Return the safetensors files of a checkpoint."""
    if (folder / WEIGHTS).exists():
        return [folder / WEIGHTS]
    if not (folder / INDEX).exists():
        raise UserError(
            f"{folder} holds neither {WEIGHTS} nor {INDEX}: convert the weights to safetensors."
        )
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or {*map(type, weight_map.values())} != {str}:
        raise UserError(
            f"{folder / INDEX} has no weight_map from tensors to files: download it again."
        )
    names = sorted(set(weight_map.values()))
    for name in names:
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise UserError(
                f"{folder / INDEX} names {name[:200]}, which is not in that folder: download it "
                "again."
            )
    return [folder / name for name in names]


def tensors(files: list[Path]) -> Iterator[tuple[str, Any]]:
    """Yield (name, slice) for each tensor in the files: `slice[:]` reads the full tensor, and
    `slice[0:4]` only its first four rows.
    """
    for file in files:
        with (
            reading(file, "copy it again", "is missing or damaged"),
            safe_open(file, framework="pt") as f,
        ):
            for name in f.keys():  # noqa: SIM118 (not a dict: it has no __iter__)
                yield name, f.get_slice(name)


def load_weights(model: Decoder, folder: Path) -> None:
    """Copy the weights of a checkpoint into a model."""
    wanted = dict(lora.base_parameters(model))  # without a tied head
    # tables of angles, which the first Llama checkpoints contain
    skipped: tuple[str, ...] = (".rotary_emb.inv_freq",)
    if model.cfg.tie_word_embeddings:
        check_tied_head(folder)
        skipped += (HEAD,)
    every = tensors(files(folder))
    found: Iterable[tuple[str, Any]] = (pair for pair in every if not pair[0].endswith(skipped))
    if in_four_bits(folder):
        matrices = {name for name, p in wanted.items() if isinstance(p, nf4.Matrix)}
        found = nf4.assembled(found, matrices, str(folder))
    copy_tensors(wanted, found, str(folder), "use a config.json and weights of the same model")


def check_tied_head(folder: Path) -> None:
    """Raise UserError if the files contain a head that differs from the embedding.

    transformers would use such a head although the config says that the two are one matrix.
    """
    pair = {name: x for name, x in tensors(files(folder)) if name.endswith((HEAD, EMBEDDING))}
    if len(pair) < 2:
        return
    (first, head), (second, embedding) = sorted(pair.items())
    for name in pair:
        check_float(name, pair[name], str(folder))
    same = head.get_shape() == embedding.get_shape()
    step = 4096  # rows compared at a time
    for i in range(0, head.get_shape()[0] if same else 0, step):
        rows = slice(i, i + step)
        same = same and torch.equal(head[rows].float(), embedding[rows].float())
    if not same:
        raise UserError(
            f"{folder}: {first} differs from {second}, although config.json ties them: set "
            "tie_word_embeddings to false there."
        )


def check_float(name: str, tensor: Any, where: str) -> None:
    """Raise UserError if the values of a tensor need more than a cast to be weights: integers,
    truth values, 8-bit and complex numbers.
    """
    if tensor.get_dtype() not in FLOATS:
        raise UserError(
            f"{where}: the tensor {name} is stored as {tensor.get_dtype()}, which is not "
            "supported; convert it to bfloat16 or float32."
        )


@torch.no_grad()
def copy_tensors(
    wanted: Mapping[str, Tensor | nf4.Matrix],
    found: Iterable[tuple[str, Any]],
    where: str,
    advice: str,
) -> None:
    """Copy the tensors of files into parameters of the same names.

    Raises a UserError that names a tensor if it is missing, unknown, of the wrong shape or not
    floating point.
    """
    missing = set(wanted)
    for name, tensor in found:
        if name not in wanted:
            raise UserError(
                f"{where}: the tensor {name} does not belong to this architecture; {advice}."
            )
        shape, expected = tuple(tensor.get_shape()), tuple(wanted[name].shape)
        if shape != expected:
            raise UserError(
                f"{where}: the tensor {name} has shape {shape} but config.json asks for "
                f"{expected}; {advice}."
            )
        if not (isinstance(wanted[name], nf4.Matrix) and tensor.get_dtype() == "NF4"):
            check_float(name, tensor, where)
        fill(wanted[name], tensor)
        missing.discard(name)
    if missing:
        raise UserError(f"{where}: the tensor {min(missing)} is missing; {advice}.")


def fill(parameter: Tensor | nf4.Matrix, source) -> None:
    """Copy a tensor, or a slice of a file, into a parameter. For a sharded parameter, only this
    rank's rows are read. A matrix in four bits is read in full and quantized first.
    """
    if isinstance(parameter, nf4.Matrix):
        for part, full in parameter.parts(source[:]):
            fill(part, full)
        return
    if not isinstance(parameter, DTensor):
        parameter.copy_(source[:])
        return
    shape, offset = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    if 0 not in shape:
        parameter.to_local().copy_(source[tuple(slice(o, o + n) for o, n in zip(offset, shape))])


def in_four_bits(folder: Path) -> bool:
    """Return whether the matrices of a checkpoint are stored in four bits, by bitsandbytes."""
    return bool(read_json(folder / "config.json").get("quantization_config"))


def empty_model(folder: Path, four_bits: bool = False) -> Decoder:
    """Return a checkpoint's model on the meta device, where weights need no time or memory.

    four_bits: whether `lora.attach` will replace its matrices by others in four bits.
    """
    where = folder / "config.json"
    raw = read_json(where)
    with reading(where, "use the model's original file", "does not describe a model"):
        cfg = ModelConfig.from_dict(raw, str(where))
    if raw.get("quantization_config") and not four_bits:
        raise UserError(
            f"{folder}: the weights are stored in 4 bits, on which only adapters can be trained: "
            "train with --load-in-4bit and --lora-r, or use the original model."
        )
    with torch.device("meta"):
        model = decoder_for(cfg)
    # float16 could not represent every master weight
    if raw.get("dtype", raw.get("torch_dtype")) == "bfloat16":
        model.saved_dtype = torch.bfloat16
    return model


def decoder_for(cfg: ModelConfig) -> Decoder:
    """Return a new model: a VisionDecoder if the configuration has a vision encoder."""
    if not cfg.vision:
        return Decoder(cfg)
    from nanogrpo.vision.model import VisionDecoder  # only such a model needs this folder

    return VisionDecoder(cfg)


def load_model(
    folder: Path, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> Decoder:
    """Return the model of a checkpoint folder, with its weights cast to `dtype`."""
    # in this order, no float32 copy is ever created
    model = empty_model(folder).to(dtype).to_empty(device=device)
    model.tie()
    load_weights(model, folder)
    return model


# --- writing ---


@contextlib.contextmanager
def atomic_folder(final: Path) -> Iterator[Path]:
    """Yield a folder to write into, and rename it to `final` at the end. A crash or an exception
    leaves `final` as it was.

    An existing checkpoint is replaced. A folder with any other content raises UserError.
    """
    final = final.absolute()  # "." has no name
    temporary, old = final.with_name(f".{final.name}.tmp"), final.with_name(f".{final.name}.old")
    try:
        ours = any((final / name).exists() for name in ("config.json", "state.json"))
        if final.exists() and any(final.iterdir()) and not ours:
            raise UserError(
                f"{final} holds other files, which would be lost: choose another folder."
            )
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        yield temporary
        # follow the umask: safetensors makes files that only their owner can read
        mode = temporary.stat().st_mode & 0o666
        for path in (*temporary.rglob("*"), temporary):
            if path.is_file():
                path.chmod(mode)
            # without this flush, the rename might reach the disk before the data
            flush(path)
        # A folder cannot be renamed to the name of an existing one, so `final` is moved away first.
        if final.exists():
            shutil.rmtree(old, ignore_errors=True)
            final.rename(old)
        temporary.rename(final)
        flush(final.parent)
        shutil.rmtree(old, ignore_errors=True)
    except BaseException as e:
        shutil.rmtree(temporary, ignore_errors=True)
        if old.exists() and not final.exists():
            old.rename(final)
        if isinstance(e, (OSError, SafetensorError)):
            reason = getattr(e, "strerror", None) or e
            raise UserError(
                f"{final} could not be written ({reason}): make room or choose another folder; "
                "earlier checkpoints are intact."
            ) from e
        raise


def flush(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def export(model: Decoder, folder: Path, tokenizer: Tokenizer | None = None) -> None:
    """Write a model into an existing folder, in its own dtype. Shards are gathered, so every rank
    must call this.
    """
    write_model(host_weights(model), model.cfg.to_dict(), folder, tokenizer)


@torch.no_grad()
def host_weights(
    model: Decoder, dtype: torch.dtype | None = None, keep: bool = True
) -> dict[str, Tensor]:
    """Return copies of the full weights in host memory, with adapters merged and without a tied
    head.

    Shards are gathered one by one, so every rank must call this. A rank with `keep` off discards
    each tensor immediately.
    """
    out: dict[str, Tensor] = {}
    # if head and embedding are tied, only the embedding is yielded
    for name, full in lora.full_parameters(model):
        if keep:
            out[name] = full.to("cpu", dtype, copy=True).contiguous()
    return out


def write_model(
    weights: dict[str, Tensor], config: dict, folder: Path, tokenizer: Tokenizer | None = None
) -> None:
    """Write config.json, the weights and the tokenizer's files into an existing folder.

    config: the fields of config.json. For a loaded model, pass all fields of its original
    config.json, including those that we do not read.
    """
    dtype = str(next(iter(weights.values())).dtype).removeprefix("torch.")
    config = {**config, "dtype": dtype, "torch_dtype": dtype}
    config.pop("quantization_config", None)  # of a base in four bits; these weights are floats
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    parts: list[dict[str, Tensor]] = [{}]
    for name, tensor in weights.items():
        if parts[-1] and sum(t.nbytes for t in parts[-1].values()) + tensor.nbytes > MAX_FILE_BYTES:
            parts.append({})
        parts[-1][name] = tensor
    names = [f"model-{i:05}-of-{len(parts):05}.safetensors" for i in range(1, len(parts) + 1)]
    if len(parts) == 1:
        names = [WEIGHTS]
    else:
        index = {
            "metadata": {"total_size": sum(t.nbytes for t in weights.values())},
            "weight_map": {name: file for file, part in zip(names, parts) for name in part},
        }
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    for file, part in zip(names, parts):
        save_file(part, folder / file, metadata={"format": "pt"})
    if tokenizer:
        tokenizer.save(folder)


def checkpoints(output_dir: str) -> list[Path]:
    """Return the finished checkpoints of a run, oldest first."""
    found = Path(output_dir).glob("checkpoint-*")
    numbered = [p for p in found if p.name.removeprefix("checkpoint-").isdecimal()]
    return sorted(numbered, key=lambda p: int(p.name.removeprefix("checkpoint-")))
