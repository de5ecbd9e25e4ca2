"""The exact state of a run: written while training goes on, restored bit for bit on any number of
ranks.

In: model and optimizer, whole or sharded. Out: folders of output_dir, each of them a checkpoint
that transformers loads:

    checkpoint-N/
        config.json  model*.safetensors  tokenizer.json …    the weights in the dtype of the base model (checkpoint.py)
        adapter/                                             with --lora-r: the adapters for peft; the weights above hold them too
        state.json                                           finished steps, options, number of ranks, hashes, bonus
        state/__0_0.distcp  __1_0.distcp …  .metadata        float32 masters and AdamW's moments: a file a rank

What is not here needs no saving: data, random streams and the learning rate are functions of the
step.

    every rank   copies its shards to the host ─┬─ trains on
                                                └─ writes its file of state/ ──────────────┐
    rank 0       gathers the weights to the host ── writes them, waits for all files of state/ ── flushes, renames

Read before: checkpoint.py, output.py. Read next: optim.py (whose state is saved), train.py (when).
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import logging
import shutil
import warnings
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from pickle import UnpicklingError

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.optim import Optimizer

from nanogrpo.config import Config
from nanogrpo.distributed import failure as ends
from nanogrpo.distributed import fsdp
from nanogrpo.distributed.world import World
from nanogrpo.errors import UserError, read_json
from nanogrpo.model import adapters, checkpoint
from nanogrpo.model.decoder import Decoder
from nanogrpo.model.tokenizer import Tokenizer
from nanogrpo.run import output

log = logging.getLogger("nanogrpo")

# A process without a group is one by intent; the warning comes from the thread that writes, so it
# is silenced for all.
warnings.filterwarnings(
    "ignore", message="torch.distributed is disabled, unavailable or uninitialized"
)

# What may differ between a run and its continuation: it changes nothing, or (device) no more than
# rounding.
FREE = {
    "resume",
    "output_dir",
    "max_steps",
    "save_steps",
    "save_total_limit",
    "num_completions_to_print",
    "max_concurrent",
}
FREE |= {"overwrite_output_dir", "report_to", "log_completions", "trace_step"}
FREE |= {
    "eval_data",
    "dataset_test_split",
    "eval_steps",
    "eval_samples",
    "device",
    "ddp_timeout",
    "heartbeat_timeout",
}
# a matter of memory
FREE |= {
    "gradient_checkpointing",
    "cpu_offload",
    "reshard_after_forward",
    "token_budget",
    "share_prompts",
}
FREE |= {"reward_timeout"}  # to be raised where a run has ended with that advice
FREE |= {
    "server",
    "vllm_python",
    "vllm_options",
    "weight_transport",
    "server_window",
    "server_timeout",
    "server_patience",
}


def tensors(
    model: nn.Module, optimizer: Optimizer, reference: nn.Module | None = None
) -> dict[str, Tensor]:
    """Masters and moments by name, and the number of updates: the tensors themselves, to write or
    to read into.

    With adapters, of those alone (the base is read from --model); reference: where it follows the
    policy. Of a sharded model they are DTensors, which know their place in the whole: so another
    number of ranks finds its parts.
    """
    fsdp.reshard(model)
    out: dict[str, Tensor] = {}
    if reference is not None:
        fsdp.reshard(reference)
        out |= {f"reference.{name}": p.detach() for name, p in reference.named_parameters()}
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        moments = optimizer.state[p]
        out |= {
            f"master.{name}": p.detach(),
            f"exp_avg.{name}": moments["exp_avg"],
            f"exp_avg_sq.{name}": moments["exp_avg_sq"],
        }
        # one count for all: each update moves every parameter
        out.setdefault("updates", moments["step"])
    return out


# --- writing --------------------------------------------------------------------------------------


class Saver:
    """Writes checkpoints beside training, one at a time: `with Saver(…) as saver: …
    saver.save(step)`.

    A save that fails is told at the end of the next step (`failure`), when the ranks speak to each
    other anyway. Leaving the block waits for the last one.
    """

    def __init__(
        self,
        cfg: Config,
        world: World,
        model: Decoder,
        optimizer: Optimizer,
        tokenizer: Tokenizer,
        # of the base model, as it was read at the start: its folder may be gone when we save
        config_json: dict,
        origin: dict[str, str],  # of output.origin
        reference: Decoder | None = None,  # is saved if it follows the policy
    ):
        self.cfg, self.world, self.model, self.optimizer, self.tokenizer = (
            cfg,
            world,
            model,
            optimizer,
            tokenizer,
        )
        self.config_json, self.origin = config_json, origin
        self.reference = reference if cfg.sync_ref_model else None
        named = str(config_json.get("dtype", config_json.get("torch_dtype")))
        # float16 could not hold every master
        self.dtype = torch.bfloat16 if named == "bfloat16" else torch.float32
        # The threads that write talk to each other while the main ones do: so they need a group of
        # their own.
        timeout = datetime.timedelta(seconds=cfg.ddp_timeout)
        self.group = (
            dist.new_group(backend="gloo", timeout=timeout) if dist.is_initialized() else None
        )
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="saver")
        self.job: Future | None = None
        self.final = Path()

    def __enter__(self) -> Saver:
        ends.unfinished.append(self.wait)
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """After a failure it does not wait: world.join does, when the others have been told and
        complete their parts too.
        """
        try:
            if kind is None:
                self.finish()
        finally:
            self.pool.shutdown(wait=False)
        if kind is None:
            ends.unfinished.remove(self.wait)

    def save(self, step: int, carried: dict | None = None) -> None:
        """Begins `checkpoint-{step}`, the state after `step` finished steps. Returns when the
        weights may change again.

        carried: the few numbers that go from step to step beside the tensors; `carried` gives them
        back.
        """
        self.finish()
        self.carried = carried or {}
        self.final = Path(self.cfg.output_dir).absolute() / f"checkpoint-{step}"
        with contextlib.ExitStack() as stack:
            # All ranks write into the folder that rank 0 makes, so none may begin before it is
            # there: `once` is a barrier too.
            folder = self.world.once(
                lambda: stack.enter_context(checkpoint.atomic_folder(self.final))
            )
            weights = checkpoint.host_weights(self.model, self.dtype, keep=self.world.main)
            alone = adapters.host_adapters(self.model, keep=self.world.main)
            what, where = tensors(self.model, self.optimizer, self.reference), folder / "state"
            shards = dcp.async_save(
                what, checkpoint_id=where, process_group=self.group, no_dist=self.group is None
            )
            assert isinstance(shards, Future)  # the copies are complete, and the rest is under way
            written = stack.pop_all()
            args = written, folder, weights, alone, step, shards
            self.job = self.pool.submit(self._write, *args) if self.world.main else shards

    def _write(
        self,
        written: contextlib.ExitStack,
        folder: Path,
        weights: dict,
        alone: dict,
        step: int,
        shards: Future,
    ) -> None:
        """Rank 0's thread. Leaving `written` renames the folder, or removes it where anything
        failed.
        """
        with written:
            try:
                checkpoint.write_model(weights, self.config_json, folder, self.tokenizer)
                if alone:
                    adapters.write(alone, folder / "adapter", self.cfg)
                row = {
                    "step": step,
                    "processes": self.world.size,
                    "carried": self.carried,
                    "origin": self.origin,
                    "config": dataclasses.asdict(self.cfg),
                }
                (folder / "state.json").write_text(json.dumps(row, indent=2) + "\n")
            finally:
                # all ranks' files, or none: the others must not write into a folder that is being
                # removed
                wait([shards])
            shards.result()
        for old in checkpoint.checkpoints(self.cfg.output_dir)[
            : -self.cfg.save_total_limit or None
        ]:
            if self.cfg.save_total_limit:
                # half removed, it must not look finished
                shutil.rmtree(old.rename(old.with_name(f".{old.name}.tmp")))

    def wait(self) -> None:
        if self.job is not None:
            wait([self.job])

    def failure(self) -> UserError | None:
        """What went wrong with a save that has ended, told once; None while it is under way, or
        when it is whole.
        """
        if self.job is None or not self.job.done():
            return None
        job, self.job = self.job, None
        error = job.exception()
        if error is None or isinstance(error, UserError):
            return error
        return UserError(
            f"{self.final} could not be written ({reason(error)}): make room or choose another folder; earlier checkpoints "
            "are whole."
        )

    def finish(self) -> None:
        """Waits for the save under way; a failure of any rank is raised on all. Every rank must
        call.
        """
        self.wait()
        self.world.any(error=self.failure())


def reason(error: BaseException) -> str:
    """One line of an exception; of those that torch.distributed.checkpoint gathers from the ranks,
    the first.
    """
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    lines = str(getattr(error, "strerror", None) or error).strip().splitlines()
    named = f": {error.filename}" if isinstance(error, OSError) and error.filename else ""
    return f"{(lines or [type(error).__name__])[0].rstrip('.')}{named}"


# --- resuming -------------------------------------------------------------------------------------


def resume(
    cfg: Config,
    world: World,
    model: Decoder,
    optimizer: Optimizer,
    origin: dict[str, str] | None = None,
    reference: Decoder | None = None,
) -> int:
    """Restores the last checkpoint, if there is one; returns the number of finished steps. Every
    rank must call.

    origin: what this run is fed (output.origin). Other prompts are refused, for the draws would be
    others; another file of rewards or rollouts is only told, since a comment changes it too.

    A finished folder that cannot be read is an error and not skipped in silence: the steps since
    the one before it would be lost, which is for the user to decide.
    """
    if not cfg.resume:
        return 0
    found = world.once(lambda: _newest(cfg, origin or {}))
    if found is None:
        return 0
    folder, step, size = found
    if size != world.size:
        log.info("%s was written by %d processes and is continued by %d", folder, size, world.size)
    mine = tensors(model, optimizer, reference if cfg.sync_ref_model else None)
    _load(folder, mine)
    updates = mine["updates"]
    for state in optimizer.state.values():
        state["step"].copy_(updates)
    return step


def carried(cfg: Config, world: World) -> dict:
    """What `save` was given beside the tensors in the checkpoint that `resume` restores; {} if
    there is none.
    """
    found = world.once(lambda: _newest(cfg, {})) if cfg.resume else None
    return read_json(found[0] / "state.json").get("carried", {}) if found else {}


def _newest(cfg: Config, origin: dict[str, str]) -> tuple[Path, int, int] | None:
    """(folder, finished steps, ranks that wrote it) of the last checkpoint, written with options
    that fit.
    """
    output.clean(cfg)
    found = checkpoint.checkpoints(cfg.output_dir)
    if not found:
        return None
    folder = found[-1]
    with _readable(folder):
        saved = read_json(folder / "state.json")
        step, theirs = saved.get("step"), saved.get("origin", {})
        if not (
            isinstance(step, int)
            and isinstance(saved.get("config"), dict)
            and isinstance(theirs, dict)
        ):
            raise UserError("state.json lacks the step or the options")
        if folder.name != f"checkpoint-{step}":
            raise UserError(f"state.json says that it is of step {step}")
    if step > cfg.max_steps:
        raise UserError(
            f"--max-steps is {cfg.max_steps} but {folder} has {step} finished steps: give as many or more."
        )
    # tuples become lists, as in the file
    now, known = json.loads(json.dumps([dataclasses.asdict(c) for c in (cfg, Config())]))
    # an option that is newer than the checkpoint did nothing then, as its default does
    known |= saved["config"]
    free = FREE if cfg.lr_scheduler_type == "constant" else FREE - {"max_steps"}
    for name, value in known.items():
        if name not in free and now.get(name) != value:
            raise UserError(
                f"--resume: {folder} was written with {name} = {value}, now it is {now.get(name)}: give the same options."
            )
    for name in [name for name, known in theirs.items() if origin.get(name, known) != known]:
        if name == "prompts":
            raise UserError(
                f"--resume: {folder} was written with other prompts in {now['data']}: give the same data, or start from its "
                f"weights (--model {folder}) in another folder."
            )
        log.warning(
            "%s has changed since %s was written: from here on the new file counts", name, folder
        )
    return folder, step, saved.get("processes", 1)


def _load(folder: Path, mine: dict[str, Tensor]) -> None:
    """Reads this rank's parts of every tensor, whatever the number of ranks that wrote them."""
    with _readable(folder):
        reader = dcp.FileSystemReader(folder / "state")
        theirs = {
            name: getattr(m, "size", None)
            for name, m in reader.read_metadata().state_dict_metadata.items()
        }
    for name in sorted(theirs.keys() | mine.keys()):
        shapes = [
            str(tuple(t)) if t is not None else "none"
            for t in (theirs.get(name), getattr(mine.get(name), "shape", None))
        ]
        if shapes[0] != shapes[1]:
            raise UserError(
                f"--resume: {folder} is of another model ({name} has shape {shapes[0]} there and {shapes[1]} here): "
                "give the --model that the run began with."
            )
    with _readable(folder):
        dcp.load(mine, storage_reader=reader, no_dist=not dist.is_initialized())


@contextlib.contextmanager
def _readable(folder: Path):
    try:
        yield
    except (
        UserError,
        CheckpointException,
        OSError,
        RuntimeError,
        ValueError,
        KeyError,
        EOFError,
        UnpicklingError,
    ) as e:
        told = reason(e)
        raise UserError(
            f"--resume: {folder} is damaged ({told}): remove it to continue from the one before it."
        ) from e
