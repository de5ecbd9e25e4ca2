"""Hugging Face checkpoints in and out, and the exact state of a run.

In: a folder or hub id with config.json and safetensors (one file, or shards with an index). Out: a `Decoder`; folders
`output_dir/checkpoint-N` that transformers and vLLM load as they are, which also hold the optimizer's state and the step, so that
`--resume` repeats the interrupted run. A folder is written under another name, flushed, and renamed: it is whole or not there.
Read next: optim.py (whose state is saved), train.py (when).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from nanogrpo.config import Config
from nanogrpo.errors import UserError
from nanogrpo.model import Decoder, ModelConfig
from nanogrpo.tokenizer import Tokenizer

log = logging.getLogger("nanogrpo")

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
# What may differ between a run and its continuation without changing what it computes.
FREE = {
    "resume",
    "output_dir",
    "max_steps",
    "save_steps",
    "save_total_limit",
    "num_completions_to_print",
    "max_concurrent",
    "device",
}


# --- reading ------------------------------------------------------------------------------------------------------------------


def locate(name: str) -> Path:
    """The folder of a checkpoint: a local path as it is, else a hub id, downloaded once into Hugging Face's cache."""
    if Path(name).is_dir():
        return Path(name)
    if Path(name).is_absolute() or name.count("/") != 1 or name.startswith((".", "~")):
        raise UserError(f"--model {name}: there is no such folder (and it is not a hub id of the form owner/name).")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.jinja"]))
    except Exception as e:  # the hub's client raises from half a dozen libraries: every one means that the model is not here
        reason = f"{type(e).__name__}: {str(e).strip()}".splitlines()[0].rstrip(".")  # some go on for a paragraph
        raise UserError(f"--model {name}: no such folder, and the hub did not give it ({reason}).") from e


def read_json(path: Path) -> dict:
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(f"{path} is missing: a checkpoint folder holds config.json, *.safetensors and tokenizer.json.") from None
    except (OSError, ValueError) as e:  # not readable, not UTF-8, not JSON
        raise UserError(f"{path} is not valid JSON ({e}): take the file that belongs to the weights.") from e
    if not isinstance(value, dict):
        raise UserError(f"{path} holds no JSON object: take the file that belongs to the weights.")
    return value


def files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint, all present."""
    if (folder / WEIGHTS).exists():
        return [folder / WEIGHTS]
    if not (folder / INDEX).exists():
        raise UserError(f"{folder} holds neither {WEIGHTS} nor {INDEX}: convert the weights to safetensors first.")
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise UserError(f"{folder / INDEX} has no weight_map from tensors to files: download it again.")
    shards = sorted(set(weight_map.values()))
    for shard in shards:
        if not (folder / shard).exists():
            raise UserError(f"{folder / shard} is missing though {INDEX} names it: complete the download.")
    return [folder / shard for shard in shards]


def tensors(folder: Path) -> Iterator[tuple[str, Any]]:
    """(name, slice) of every tensor of a checkpoint: `slice[:]` reads it whole, `slice[0:4]` those rows only."""
    for file in files(folder):
        try:
            with safe_open(file, framework="pt") as f:
                for name in f.keys():  # noqa: SIM118 (not a dict: it has no __iter__)
                    yield name, f.get_slice(name)
        except (SafetensorError, OSError) as e:
            raise UserError(f"{file} is corrupt or cut short ({e}): download or write it again.") from e


@torch.no_grad()
def load_weights(model: Decoder, folder: Path) -> None:
    """Copies a checkpoint into the model; UserError names the first tensor that is missing, unknown, or of the wrong shape."""
    wanted = model.state_dict(keep_vars=True)
    missing = set(wanted)
    tied = model.cfg.tie_word_embeddings
    for name, tensor in tensors(folder):
        if name not in wanted:
            raise UserError(
                f"{folder}: the tensor {name} does not belong to this architecture; config.json and weights disagree."
            )
        shape, expected = tuple(tensor.get_shape()), tuple(wanted[name].shape)
        if shape != expected:
            raise UserError(f"{folder}: the tensor {name} has shape {shape} where config.json asks for {expected}.")
        if not (tied and name == "lm_head.weight"):  # a tied head is the embedding, whatever a file says
            _fill(wanted[name], tensor)
        missing.discard(name)
    if tied:
        missing.discard("lm_head.weight")
    if missing:
        raise UserError(f"{folder}: the tensor {min(missing)} is missing; config.json and weights disagree.")


def _fill(parameter: Tensor, source) -> None:
    """Copies a slice of a file into a parameter; of a sharded one, only this rank's rows are read."""
    if not isinstance(parameter, DTensor):
        parameter.copy_(source[:])
        return
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    if 0 not in shape:
        parameter.to_local().copy_(source[tuple(slice(o, o + n) for o, n in zip(offset, shape))])


def empty_model(folder: Path) -> Decoder:
    """The model of a checkpoint folder without its weights: no time or memory spent on values that are read from files anyway."""
    cfg = ModelConfig.from_dict(read_json(folder / "config.json"), str(folder / "config.json"))
    with torch.device("meta"):
        return Decoder(cfg)


def load_model(folder: Path, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu") -> Decoder:
    """The model of a checkpoint folder, its weights cast to `dtype`."""
    model = empty_model(folder).to(dtype).to_empty(device=device)  # in this order, so that no float32 copy exists
    model.tie()
    load_weights(model, folder)
    return model


# --- writing ------------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def written_whole(final: Path) -> Iterator[Path]:
    """A folder to write into, renamed to `final` at the end: a crash, or any exception, leaves what was there before.

    A checkpoint that is there already is replaced; a folder that holds anything else is refused.
    """
    final = final.absolute()  # "." has no name of its own
    aside, old = final.with_name(f".{final.name}.tmp"), final.with_name(f".{final.name}.old")
    try:
        if final.exists() and any(final.iterdir()) and not (final / "config.json").exists():
            raise UserError(f"{final} holds other files, which would be lost: choose another folder.")
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        yield aside
        mode = aside.stat().st_mode & 0o666  # as the umask has it: safetensors makes files that only their owner can read
        for path in (*aside.rglob("*"), aside):
            if path.is_file():
                path.chmod(mode)
            _flush(path)  # a rename may reach the disk before the data does, unless the data is flushed
        if final.exists():  # a folder cannot be renamed over another: for a moment the old one is whole under the name `old`
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


def export(model: Decoder, folder: Path, tokenizer: Tokenizer | None = None, source: Path | None = None) -> None:
    """Writes config.json, model.safetensors and the tokenizer's files into an existing folder.

    With `source`, the checkpoint that training started from, the fields of its config.json that we do not read are kept.
    """
    write_model(gathered_weights(model), model.cfg, folder, tokenizer, source)


def gathered_weights(model: Decoder) -> dict[str, Tensor]:
    """The whole weights on the host, without a tied head; sharded ones are gathered one by one, so every rank must call."""
    names = [n for n in model.state_dict() if not (model.cfg.tie_word_embeddings and n == "lm_head.weight")]
    state = model.state_dict()
    return {n: whole(state[n]).contiguous() for n in names}


def whole(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).cpu()


def write_model(
    weights: dict[str, Tensor], cfg: ModelConfig, folder: Path, tokenizer: Tokenizer | None = None, source: Path | None = None
) -> None:
    config = read_json(source / "config.json") if source else cfg.to_dict()
    config["dtype"] = config["torch_dtype"] = str(next(iter(weights.values())).dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    if tokenizer:
        tokenizer.save(folder)


def save(
    cfg: Config,
    step: int,
    model: Decoder,
    optimizer: torch.optim.Optimizer,
    tokenizer: Tokenizer,
    source: Path,
    main: bool = True,
) -> Path:
    """Writes `output_dir/checkpoint-{step}`, the state after `step` finished steps, and drops the oldest beyond the limit."""
    final = Path(cfg.output_dir) / f"checkpoint-{step}"
    weights, moments = gathered_weights(model), _optimizer_tensors(model, optimizer)
    if not main:
        return final
    with written_whole(final) as folder:
        write_model(weights, model.cfg, folder, tokenizer, source)
        save_file(moments, folder / "optimizer.safetensors")
        (folder / "state.json").write_text(json.dumps({"step": step, "config": dataclasses.asdict(cfg)}, indent=2) + "\n")
    for old in checkpoints(cfg)[: -cfg.save_total_limit] if cfg.save_total_limit else []:
        shutil.rmtree(old)
    return final


def _optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """AdamW's moments under the parameters' names: `exp_avg.model.norm.weight`, …"""
    names = {p: n for n, p in model.named_parameters()}
    return {f"{key}.{names[p]}": whole(value) for p, state in optimizer.state.items() for key, value in state.items()}


# --- resuming -----------------------------------------------------------------------------------------------------------------


def checkpoints(cfg: Config) -> list[Path]:
    """The finished checkpoints of a run, oldest first."""
    found = [p for p in Path(cfg.output_dir).glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", p.name)]
    return sorted(found, key=lambda p: int(p.name.split("-")[1]))


def check_output(cfg: Config) -> None:
    """Refuses an output folder that holds another run, unless it is to be continued."""
    folder = Path(cfg.output_dir)
    if not cfg.resume and ((folder / "metrics.jsonl").exists() or checkpoints(cfg)):
        raise UserError(f"--output-dir {folder} already holds a run: continue it with --resume or choose another folder.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".writable").touch()
        (folder / ".writable").unlink()
    except OSError as e:
        raise UserError(f"--output-dir {folder} cannot be written ({e.strerror}): choose another folder.") from e


def resume(cfg: Config, model: Decoder, optimizer: torch.optim.Optimizer) -> int:
    """Restores the last checkpoint, if there is one; returns the number of finished steps.

    A folder that was not finished is removed. A finished one that cannot be read is an error and not skipped in silence: the
    steps since the one before it would be lost, which is for the user to decide.
    """
    if not cfg.resume:
        return 0
    for leftover in Path(cfg.output_dir).glob(".checkpoint-*.tmp"):
        log.warning("removed %s: the run ended while this checkpoint was being written", leftover)
        shutil.rmtree(leftover)
    found = checkpoints(cfg)
    if not found:
        return 0
    with _readable(found[-1]):
        state = read_json(found[-1] / "state.json")
        if not (isinstance(state.get("step"), int) and isinstance(state.get("config"), dict)):
            raise UserError("state.json lacks the step or the options")
    now = json.loads(json.dumps(dataclasses.asdict(cfg)))  # tuples become lists, as in the file
    free = FREE if cfg.lr_scheduler_type == "constant" else FREE - {"max_steps"}
    for name, value in state["config"].items():
        if name not in free and now.get(name) != value:
            raise UserError(
                f"--resume: {found[-1]} was written with {name} = {value}, now it is {now.get(name)}: give the same options."
            )
    with _readable(found[-1]):
        load_weights(model, found[-1])
        _load_optimizer(model, optimizer, found[-1] / "optimizer.safetensors")
    return state["step"]


@contextlib.contextmanager
def _readable(folder: Path) -> Iterator[None]:
    try:
        yield
    except (UserError, SafetensorError, OSError) as e:
        reason = str(e).rstrip(".")
        raise UserError(f"--resume: {folder} is damaged ({reason}): remove it to continue from the one before it.") from e


def _load_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, file: Path) -> None:
    """The inverse of `_optimizer_tensors`. All parameters have a state or, before the first update, none has."""
    parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
    wanted = {f"{kind}.{n}": (p, kind) for n, p in parameters.items() for kind in ("step", "exp_avg", "exp_avg_sq")}
    with safe_open(file, framework="pt") as f:
        found = set(f.keys())
        if found and found != set(wanted):
            raise UserError(f"{file.name} belongs to other weights: {min(found ^ set(wanted))} is in one of them only")
        for key in found:
            p, kind = wanted[key]
            tensor = f.get_tensor(key)
            if kind != "step" and tensor.shape != p.shape:
                raise UserError(f"{file.name}: {key} has shape {tuple(tensor.shape)}, its parameter {tuple(p.shape)}")
            optimizer.state[p][kind] = tensor.to(p.device)  # the step counter too: the fused AdamW wants it there
