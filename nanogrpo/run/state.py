"""Save the state of a run while it trains, and restore it bit for bit on any number of ranks.

In: a model and an optimizer, sharded or not. Out: checkpoint folders in output_dir, which
transformers can load:

    checkpoint-N/
        config.json  model*.safetensors  tokenizer.json …  weights in the base model's dtype
        state.json                                         options, and hashes of the prompts, of
                                                           the base model's files and of all files
                                                           of the checkpoint
        state/__0_0.distcp  __1_0.distcp …  .metadata      float32 weights and AdamW's moments:
                                                           one file per rank

A feature may add tensors to state/, and its own files. The prompts, the random numbers and the
learning rate need not be saved, because they are functions of the step.

    every rank   copies its shards to the host ─┬─ continues training
                                                └─ writes its file in state/ ─┐
    rank 0       gathers the weights to the host ── writes them, waits for state/ ─ flushes, renames

Read before: model/checkpoint.py, output.py. Read next: optim.py (whose state is saved), train.py
(which decides when to save).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import warnings
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from nanogrpo.config import Config
from nanogrpo.distributed import fsdp
from nanogrpo.errors import UserError, read_json, reading, unwritten
from nanogrpo.feature import Feature
from nanogrpo.logs.files import checkpoints
from nanogrpo.model import checkpoint, weights
from nanogrpo.run import output
from nanogrpo.run.output import digest

if TYPE_CHECKING:  # setup.py imports this file
    from nanogrpo.run.setup import Inputs

STATE = "state.json"

# Without a process group, dcp warns that it assumes a single process. This is true here.
# The warning also comes from the writing thread, so the filter is global.
warnings.filterwarnings(
    "ignore", message="torch.distributed is disabled, unavailable or uninitialized"
)


def tensors(
    model: nn.Module, optimizer: Optimizer, features: Sequence[Feature] = ()
) -> dict[str, Tensor]:
    """Return the master weights and the optimizer's moments by name, and the number of updates. The
    caller saves these tensors or loads values into them.

    Only trained parameters are included, because all other parameters are read from --model. The
    tensors of a sharded model are DTensors, which know their position in the full tensor. So a run
    can resume on a different number of ranks.
    """
    fsdp.reshard(model)
    out: dict[str, Tensor] = {}
    for name, p in model.named_parameters():
        if p.requires_grad:
            out[f"master.{name}"] = p.detach()
            for kind, moment in optimizer.state[p].items():
                if type(local(moment)) is Tensor:  # a feature saves other types
                    # one step for all parameters, because each update changes every parameter
                    out["updates" if kind == "step" else f"{kind}.{name}"] = moment
    for feature in features:
        out |= feature.tensors() or {}
    return out


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor that may be sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Saver:
    """Write checkpoints, one at a time, while training continues, and read the last checkpoint.

    `with saver: … saver.save(step)`. Leaving the `with` block waits for the last save. A failed
    save is reported at the end of the next step (`failure`), because the ranks communicate there
    anyway.
    """

    def __init__(self, inputs: Inputs, optimizer: Optimizer, origin: dict[str, str]):
        """origin: hashes from output.origin."""
        self.cfg, self.world, self.model = inputs.cfg, inputs.world, inputs.model
        self.tokenizer, self.features = inputs.tokenizer, inputs.features
        self.optimizer, self.origin = optimizer, origin
        # read at the start, because the folder may be deleted before the run saves
        self.config_json = read_json(inputs.source / "config.json")
        # the names of checkpoints that --save-total-limit does not remove
        self.keep: set[str] = set()
        # The writing threads have their own group, because the main threads also communicate.
        self.patient = self.world.patient()
        self.pool = ThreadPoolExecutor(1)
        self.job: Future | None = None
        # the folder of the last checkpoint, which may be in progress
        self.final = Path()

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Wait for the last save. If the save has failed but the run has not, raise the error of
        the save. After an error, wait at most --ddp-timeout seconds, because a rank may hang in its
        save.
        """
        if kind is None:
            self.finish()
        elif self.job:
            wait([self.job], self.cfg.ddp_timeout)

    # --- writing ---

    def save(self, step: int) -> None:
        """Start writing `checkpoint-{step}`, the state after `step` finished steps. Return as soon
        as the weights may change again. Every rank must call this method.
        """
        self.finish()
        self.final = Path(self.cfg.output_dir) / f"checkpoint-{step}"
        with contextlib.ExitStack() as stack:
            # Every rank writes into this folder, after rank 0 has made it: `once` is a barrier.
            folder = self.world.once(
                lambda: stack.enter_context(checkpoint.atomic_folder(self.final))
            )
            copies = weights.host_weights(self.model, self.model.saved_dtype, self.world.main)
            files = [more for f in self.features if (more := f.files(self))]
            shards = {
                name: x.to("cpu", copy=True)
                for name, x in tensors(self.model, self.optimizer, self.features).items()
            }
            written = stack.pop_all()

        def write() -> None:
            with written:  # at the end, the main rank renames or removes the folder
                # `save` returns when the shards of all ranks are written.
                # By default, dcp would wait for the training kernels before it writes each shard.
                dcp.save(
                    shards,
                    storage_writer=dcp.FileSystemWriter(folder / "state", per_thread_copy_ahead=0),
                    process_group=self.patient.group,
                    no_dist=self.world.size == 1,
                )
                if not self.world.main:
                    return
                for name, full in copies.items():
                    if not full.isfinite().all():
                        raise UserError(
                            f"{self.final} is not saved, because {name} is not finite: lower "
                            "--learning-rate in a new run; earlier checkpoints are intact."
                        )
                checkpoint.write_model(copies, self.config_json, folder, self.tokenizer)
                for more in files:
                    more(folder)
                row = {
                    "config": fixed_options(self.cfg),
                    "origin": self.origin,
                    "files": {
                        f"{p.relative_to(folder)}": digest(p)
                        for p in folder.rglob("*")
                        if p.is_file()
                    },
                }
                checkpoint.write_json(folder / STATE, row)
                # Even after a power cut, the log must have every step of the last checkpoint.
                log_file = self.final.with_name("metrics.jsonl")
                if log_file.exists():
                    checkpoint.flush(log_file)
            ours = [p for p in checkpoints(self.cfg.output_dir) if (p / STATE).exists()]
            # with a limit of 0, the slice [:-0] is empty, so nothing is removed
            for old in ours[: -self.cfg.save_total_limit]:
                if old.name not in self.keep:
                    output.remove(old)

        self.job = self.pool.submit(write)

    def failure(self) -> UserError | None:
        """Return the error of a finished save, but only once. Return None if a save is in progress
        or has succeeded.
        """
        if not self.job or not self.job.done():
            return None
        error, self.job = self.job.exception(), None
        if error is None or isinstance(error, UserError):
            return error
        return unwritten(self.final, error)

    def finish(self) -> None:
        """Wait for the save in progress, and raise its error on all ranks. Every rank must call
        this.
        """
        if self.job:
            self.job.exception()  # blocks until the save has ended
        # the other ranks may wait long here, because rank 0 still writes the model
        self.patient.any(error=self.failure())

    # --- resuming ---

    def resume(self) -> int:
        """If --resume is set and there is a checkpoint, restore the last checkpoint. Return the
        number of finished steps of this checkpoint. Every rank must call this method.

        Torch unpickles parts of a checkpoint, so resume only runs that you trust. The hashes are
        needed to find damaged files, because torch does not notice flipped bits that only change a
        number.
        """
        world = self.world
        found = self.cfg.resume and world.once(lambda: latest(self.cfg, self.origin))
        if not found:
            return 0
        folder, hashes = found
        self.final = folder
        reader = dcp.FileSystemReader(folder / "state")
        mine = tensors(self.model, self.optimizer, self.features)
        with _reading(folder):
            for name in sorted(hashes)[world.rank :: world.size]:
                # earlier versions stored the name __0_0.distcp instead of state/__0_0.distcp
                if hashes[name] not in map(digest, folder.rglob(name)):
                    raise ValueError(f"{name} is missing, or its hash is not the one in {STATE}")
            stored = reader.read_metadata().state_dict_metadata
            # a name may belong to another rank
            if more := stored.keys() - {*world.concat([*mine])}:
                raise ValueError(f"it also has the tensor {min(more)}")
            dcp.load(mine, storage_reader=reader, no_dist=world.size == 1)
        for state in self.optimizer.state.values():
            if "step" in state:
                state["step"].copy_(mine["updates"])
        return int(folder.name[11:])


def latest(cfg: Config, origin: dict[str, str]) -> tuple[Path, dict[str, str]] | None:
    """Remove an unfinished checkpoint, then return the last one and the hashes of its files. The
    options, the prompts and the model's files must be the same as when the run was started."""
    output.remove_unfinished(cfg)
    found = checkpoints(cfg.output_dir)
    if not found:
        return None
    folder = found[-1]
    with _reading(folder / STATE):
        saved = json.loads((folder / STATE).read_bytes())
        before, known, hashes = {**saved["config"]}, saved["origin"], saved["files"]
        # earlier versions stored only the hash of the prompts
        known = origin | {"the list of prompts": known} if isinstance(known, str) else dict(known)
    now = fixed_options(cfg)
    for name in sorted(before.keys() | now.keys()):
        default = getattr(type(cfg), name, "the default")
        then, today = (options.get(name, default) for options in (before, now))
        if then != today:
            raise UserError(
                f"--resume: {folder / STATE} was written with {name} = {then}, but {name} is now "
                f"{today}: give the same options, or start from its weights (--model {folder}) in "
                "another folder."
            )
    for name in known | origin:
        if known.get(name) != origin.get(name):
            raise UserError(
                f"--resume: {name} has changed since {folder / STATE} was written: restore it, or "
                f"start from its weights (--model {folder}) in another folder."
            )
    return folder, hashes


def fixed_options(cfg: Config) -> dict[str, Any]:
    """Return the options that a resumed run must repeat. Options with their default values are left
    out, so an option that is missing has its default value. This also holds for an option that a
    different version of nanogrpo does not have.
    """
    by_length = 0 < cfg.warmup_steps < 1 or not cfg.lr_scheduler_type.startswith("constant")
    out = {}
    for field in dataclasses.fields(cfg):
        value = getattr(cfg, field.name)
        # the schedule may depend on the length of the run
        fixed = not field.metadata.get("free") or (field.name == "max_steps" and by_length)
        if fixed and value != field.default:
            out[field.name] = value
    return json.loads(json.dumps(out))  # JSON turns tuples into lists


def _reading(path: Path) -> AbstractContextManager[None]:
    """Turn any error in reading a checkpoint into a UserError that says what to do."""
    return reading(
        f"--resume: {path}",
        "remove the checkpoint to continue from the one before it, or to start again",
        "is damaged, or belongs to another model",
    )
