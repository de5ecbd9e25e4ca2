"""Read and write Hugging Face checkpoints.

In: a folder or hub id with config.json and safetensors (one file, or several with an index). Out: a
`Decoder`, full or sharded, and folders that transformers loads unchanged. A folder is written under
a temporary name, flushed to disk, and then renamed, so a folder is either complete or absent. Read
next: run/state.py (what else a run needs to resume).
"""

import contextlib
import json
import os
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

from nanogrpo.errors import UserError, first_sentence, read_json, reading, unwritten
from nanogrpo.model import weights
from nanogrpo.model.decoder import Decoder
from nanogrpo.model.tokenizer import Tokenizer
from nanogrpo.model.weights import Stored

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
HEAD = "lm_head.weight"
# the dtypes that can be read; a cast is not enough for quantized weights
FLOATS = ("F64", "F32", "F16", "BF16")


# --- reading ---


def locate(name: str, option: str = "--model") -> Path:
    """Return the folder of a checkpoint. `name` is a local path, or a hub id whose files are
    downloaded into Hugging Face's cache.
    """
    if os.path.isdir(name):  # Path.is_dir would raise an error for a long name
        return Path(name)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.jinja"]))
    # the hub client raises many types of errors, and all of them mean that the download failed
    except Exception as e:
        raise UserError(
            f"{option} {name}: there is no such folder, and the download from the hub failed "
            f"({type(e).__name__}: {first_sentence(e)})."
        ) from e


def files(folder: Path) -> list[Path]:
    """Return the safetensors files of a checkpoint."""
    if os.path.lexists(folder / WEIGHTS):  # a dangling link is an error
        return [folder / WEIGHTS]
    if not os.path.lexists(folder / INDEX):
        raise UserError(
            f"{folder} holds neither {WEIGHTS} nor {INDEX}: convert the weights to safetensors."
        )
    with reading(folder / INDEX, "download it again", "has no weight_map from tensors to files"):
        names = set(read_json(folder / INDEX)["weight_map"].values())
        return [folder / name for name in sorted(names)]


def tensors(files: list[Path]) -> Iterator[tuple[str, Any]]:
    """Yield (name, slice) for each tensor in the files: `slice[:]` reads the full tensor, and
    `slice[0:4]` only its first four rows.
    """
    for file in files:
        with (
            reading(file, "copy it again, or free memory if it ran out"),
            safe_open(file, framework="pt") as f,
        ):
            for name in f.keys():  # noqa: SIM118 (not a dict)
                yield name, f.get_slice(name)


def load_weights(model: Decoder, folder: Path) -> None:
    """Copy the weights of a checkpoint into a model."""
    # the first Llama checkpoints contain tables of rotary angles
    skipped = (".rotary_emb.inv_freq",) + (HEAD,) * model.cfg.tie_word_embeddings
    found = model.arranged(tensors(files(folder)), str(folder))
    copy_tensors(
        dict(weights.parameters(model)),  # without a tied head
        (pair for pair in found if not pair[0].endswith(skipped)),
        str(folder),
        "use a config.json and weights of the same model",
    )


@torch.no_grad()
def copy_tensors(
    wanted: Mapping[str, Tensor | Stored],
    found: Iterable[tuple[str, Any]],
    where: str,
    advice: str,
) -> None:
    """Copy the tensors of files into parameters of the same names.

    Raises UserError, with the name of the tensor, if a tensor is missing, unknown, of the wrong
    shape or not floating point.
    """
    missing = set(wanted)
    for name, tensor in found:
        if name not in wanted:
            raise UserError(
                f"{where}: the tensor {name} does not belong to this architecture; {advice}."
            )
        place = wanted[name]
        shape, expected = tuple(tensor.get_shape()), tuple(place.shape)
        if shape != expected:
            raise UserError(
                f"{where}: the tensor {name} has shape {shape} but config.json asks for "
                f"{expected}; {advice}."
            )
        kind = tensor.get_dtype()
        if kind not in FLOATS and kind not in getattr(place, "dtypes", ()):
            raise UserError(
                f"{where}: the tensor {name} is stored as {kind}, which is not supported; convert "
                "it to bfloat16 or float32."
            )
        fill(place, tensor)
        missing.discard(name)
    if missing:
        raise UserError(f"{where}: the tensor {min(missing)} is missing; {advice}.")


def fill(parameter: Tensor | Stored, source) -> None:
    """Copy a tensor, or a slice of a file, into a parameter. For a sharded parameter, only this
    rank's rows are read.
    """
    if not isinstance(parameter, Tensor):
        parameter.fill(source)
        return
    if not isinstance(parameter, DTensor):
        parameter.copy_(source[:])
        return
    shape, offset = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    if 0 not in shape:
        parameter.to_local().copy_(source[tuple(slice(o, o + n) for o, n in zip(offset, shape))])


def empty_model(folder: Path, kind: type[Decoder] = Decoder) -> Decoder:
    """Return a checkpoint's model on the meta device, where weights take up no memory."""
    where = folder / "config.json"
    raw = read_json(where)
    with (
        reading(where, "use the model's original file", "does not describe a model"),
        torch.device("meta"),
    ):
        model = kind.from_config(raw, str(where))
    # all other models are saved in float32; float16 cannot represent every master weight
    if raw.get("dtype", raw.get("torch_dtype")) == "bfloat16":
        model.saved_dtype = torch.bfloat16
    return model


def load_model(
    folder: Path,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    kind: type[Decoder] = Decoder,
) -> Decoder:
    """Return the model of a checkpoint folder, with its weights cast to `dtype`."""
    # casting on the meta device avoids a float32 copy
    model = empty_model(folder, kind).to(dtype).to_empty(device=device)
    model.tie()
    load_weights(model, folder)
    return model


# --- writing ---


@contextlib.contextmanager
def atomic_folder(final: Path) -> Iterator[Path]:
    """Yield a folder to write into, and rename it to `final` at the end. If the process crashes or
    an exception is raised before the end, `final` does not change.

    Raises UserError if the folder exists and is not empty.
    """
    final = final.absolute()  # "." has no name
    temporary = final.with_name(f".{final.name}.tmp")
    try:
        if final.exists() and any(final.iterdir()):
            raise UserError(
                f"{final} holds other files, which would be lost: choose another folder."
            )
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        yield temporary
        # apply the umask, because safetensors writes files that only the owner can read
        mode = temporary.stat().st_mode & 0o666
        for path in (*temporary.rglob("*"), temporary):
            if path.is_file():
                path.chmod(mode)
            # without this flush, the rename might reach the disk before the data
            flush(path)
        temporary.rename(final)
        flush(final.parent)
    except BaseException as e:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(e, (OSError, SafetensorError)):
            raise unwritten(final, e) from e
        raise


def flush(path: Path) -> None:
    """Wait until a file, or the list of files in a folder, is on the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def export(model: Decoder, folder: Path, tokenizer: Tokenizer | None = None) -> None:
    """Write a model into an existing folder, in the dtype of the model. Shards are gathered, so
    every rank must call this function.
    """
    write_model(weights.host_weights(model), model.cfg.to_dict(), folder, tokenizer)


def write_model(
    tensors: dict[str, Tensor], config: dict, folder: Path, tokenizer: Tokenizer | None = None
) -> None:
    """Write config.json, the weights and the tokenizer's files into an existing folder.

    `config` holds the fields of config.json. For a loaded model, pass all fields of the model's
    original config.json, including fields that we do not read.
    """
    dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    config = {**config, "dtype": dtype, "torch_dtype": dtype}
    config.pop("quantization_config", None)  # these weights are floats
    write_json(folder / "config.json", config)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    if tokenizer:
        tokenizer.save(folder)


def write_json(path: Path, fields: dict) -> None:
    path.write_text(json.dumps(fields, indent=2) + "\n")
