"""Save the exact state of a run while it trains, and restore it bit for bit on any number of ranks.

In: a model and an optimizer, sharded or not. Out: folders in output_dir, each of which is a
checkpoint that transformers can load:

    checkpoint-N/
        config.json  model*.safetensors  tokenizer.json …  weights in the base model's dtype
                                                           (not with --no-save-merged)
        adapter/                                           with --lora-r: the adapters for peft
                                                           (also merged into the weights above)
        state.json                                         finished steps, options, ranks, hashes
                                                           of the inputs and of these files
        state/__0_0.distcp  __1_0.distcp …  .metadata      float32 weights and AdamW's moments:
                                                           one file per rank (not with
                                                           --save-only-model)

Nothing else needs saving: data, random streams and the learning rate are functions of the step.

    every rank   copies its shards to the host ─┬─ continues training
                                                └─ writes and hashes its file in state/ ─┐
    rank 0       gathers the weights to the host ── writes them, waits for state/ ─ flushes, renames

Read before: model/checkpoint.py, output.py. Read next: verify.py (the hashes), optim.py (whose
state is saved), train.py (which decides when to save).
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import io
import json
import logging
import os
import pickle
import shutil
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata, StorageMeta
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from nanogrpo.config import Config
from nanogrpo.distributed import failure, fsdp
from nanogrpo.distributed.world import World
from nanogrpo.errors import PASSED, UserError, first_sentence, read_json
from nanogrpo.logs.files import set_aside
from nanogrpo.model import adapters, checkpoint
from nanogrpo.model.decoder import Decoder
from nanogrpo.model.tokenizer import Tokenizer
from nanogrpo.run import output, verify

log = logging.getLogger("nanogrpo")

# Without a process group, dcp warns that it assumes a single process, which is intended here. The
# writing thread warns too, so the filter is global.
warnings.filterwarnings(
    "ignore", message="torch.distributed is disabled, unavailable or uninitialized"
)

# Options that may differ when a run is resumed: they have no effect on the result, or only on its
# rounding.
FREE = """
    resume resume_from output_dir overwrite_output_dir max_steps save_steps save_total_limit
    report_to run_name trace_step log_completions log_unique_prompts log_tokens log_tokens_mib
    num_completions_to_print
    eval_data dataset_test_split eval_steps eval_samples
    num_generations_eval eval_temperature eval_top_p measure_zero_advantages
    save_only_model save_merged load_best_model_at_end metric_for_best_model greater_is_better
    push_to_hub hub_model_id hub_private_repo
    device ddp_timeout heartbeat_timeout reward_timeout reward_env tool_timeout server vllm_python
    vllm_options vllm_gpus vllm_enable_sleep_mode weight_transport server_window server_timeout
    server_patience max_concurrent cache_tokens token_budget share_prompts gradient_checkpointing
    cpu_offload reshard_after_forward reduce_gradients lora_base_dtype
"""


def tensors(
    model: nn.Module, optimizer: Optimizer, reference: nn.Module | None = None
) -> dict[str, Tensor]:
    """Return the master weights and moments by name, and the number of updates. The caller saves
    these tensors or loads values into them.

    With adapters, only trained parameters are included, because the base is read from --model.
    Pass `reference` if it follows the policy. The tensors of a sharded model are DTensors, which
    know their place in the full tensor, so on any number of ranks, each can read its own parts.
    """
    fsdp.reshard(model)
    out: dict[str, Tensor] = {}
    if reference is not None:
        fsdp.reshard(reference)
        out |= {f"reference.{name}": p.detach() for name, p in reference.named_parameters()}
    for name, p in model.named_parameters():
        if p.requires_grad:
            moments = optimizer.state[p]
            out[f"master.{name}"] = p.detach()
            for kind in ("exp_avg", "exp_avg_sq"):
                out |= _parts(f"{kind}.{name}", moments[kind])
            # one count for all, because each update changes every parameter
            out.setdefault("updates", moments["step"])
    return out


def _parts(name: str, moment: Tensor) -> dict[str, Tensor]:
    """Return what must be saved of a moment: the moment itself, or, if torchao stores it in 8 bits,
    its codes and scales. Each rank divides its own shard into blocks, so their names contain the
    rank.
    """
    with torch.no_grad():
        local = moment.to_local() if isinstance(moment, DTensor) else moment
    if not hasattr(local, "codes"):
        return {name: moment}
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    return {f"{name}.{part}@{rank}/{size}": getattr(local, part) for part in ("codes", "scale")}


# --- writing ---


class Saver:
    """Write checkpoints while training continues, one at a time.

    `with Saver(…) as saver: … saver.save(step)`. Leaving the block waits for the last save. A
    failed save is reported at the end of the next step (`failure`), when the ranks communicate
    anyway.
    """

    def __init__(
        self,
        cfg: Config,
        world: World,
        model: Decoder,
        optimizer: Optimizer,
        tokenizer: Tokenizer,
        config_json: dict,  # the base model's; its folder may be deleted before we save
        origin: dict[str, str],  # hashes of the inputs, from output.origin
        reference: Decoder | None = None,  # saved if it follows the policy
    ):
        self.cfg, self.world, self.model, self.optimizer = cfg, world, model, optimizer
        self.tokenizer, self.config_json, self.origin = tokenizer, config_json, origin
        self.reference = reference if cfg.sync_ref_model else None
        self.best = _best(cfg)
        self.scored: tuple[int, float] | None = None  # steps and metric of the last evaluation
        # The writing threads communicate at the same time as the main threads, so they need their
        # own group.
        timeout = datetime.timedelta(seconds=cfg.ddp_timeout)
        self.group = (
            dist.new_group(backend="gloo", timeout=timeout) if dist.is_initialized() else None
        )
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="saver")
        self.job: Future | None = None
        self.final = Path()  # of the checkpoint that was started last

    def __enter__(self) -> Saver:
        failure.unfinished.append(self.wait)
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Wait for the last save. After a failure, world.join waits instead, because the other
        ranks must first learn of the failure and then complete their parts.
        """
        if kind is None:
            self.finish()
            failure.unfinished.remove(self.wait)

    def evaluated(self, step: int, row: Mapping[str, float]) -> None:
        """Note the metrics of the evaluation after `step` steps, for --load-best-model-at-end."""
        if not self.cfg.load_best_model_at_end:
            return
        value = deciding(self.cfg, row)
        if value is not None:
            self.scored = step, value
        elif step == 0:
            raise unknown_metric(self.cfg, row)
        else:  # for example, a reward function applied to none of the prompts
            log.warning(
                "--metric-for-best-model %s is missing in the evaluation after %d steps, so that "
                "checkpoint cannot be the best",
                self.cfg.metric_for_best_model,
                step,
            )

    def _choose(self, step: int) -> None:
        """Make `step` the best checkpoint if it was evaluated and none before it was as good."""
        if self.scored is None or self.scored[0] != step:
            return
        sign, value = 1 if self.cfg.greater_is_better else -1, self.scored[1]
        if self.best is None or sign * value > sign * self.best["value"]:
            self.best = {"step": step, "value": value, "metric": self.cfg.metric_for_best_model}

    @property
    def best_checkpoint(self) -> Path | None:
        """The best checkpoint so far, which `save_total_limit` never removes."""
        return Path(self.cfg.output_dir) / f"checkpoint-{self.best['step']}" if self.best else None

    def save(self, step: int, carried: dict | None = None) -> None:
        """Start writing `checkpoint-{step}`, the state after `step` finished steps. Return as soon
        as the weights may change again. Every rank must call.

        carried: the few values, other than tensors, that one step passes to the next.
        """
        self.finish()
        self._choose(step)
        best = self.best
        self.final = Path(self.cfg.output_dir).absolute() / f"checkpoint-{step}"
        with contextlib.ExitStack() as stack:
            # Every rank writes into this folder. `once` is also a barrier, so no rank starts before
            # rank 0 has made it.
            folder = self.world.once(
                lambda: stack.enter_context(checkpoint.atomic_folder(self.final))
            )
            weights: dict[str, Tensor] = {}
            if self.cfg.save_merged:
                dtype = self.model.saved_dtype
                weights = checkpoint.host_weights(self.model, dtype, keep=self.world.main)
            adapter = adapters.host_adapters(self.model, keep=self.world.main)
            writer = None if self.cfg.save_only_model else _Writer(folder / "state")
            shards = self._save_state(writer) if writer else None
            written = stack.pop_all()

        def write() -> None:
            with written:  # leaving it renames the folder, or removes it after an error
                try:
                    if weights:
                        checkpoint.write_model(weights, self.config_json, folder, self.tokenizer)
                    if adapter:
                        device = self.world.device.type
                        adapters.write(adapter, folder / adapters.SUBFOLDER, self.cfg, device)
                finally:
                    # no rank may still write into a folder that is being removed
                    wait([shards] if shards else [])
                if shards:
                    shards.result()
                row = {
                    "step": step,
                    "processes": self.world.size,
                    "carried": carried or {},
                    "best": best,
                    "origin": self.origin,
                    "config": dataclasses.asdict(self.cfg),
                    "files": verify.digests(folder, writer.hashes if writer else {}),
                }
                (folder / verify.STATE).write_text(verify.seal(row))
                # Even after a power cut, the log must have every step of the last checkpoint.
                log_file = self.final.with_name("metrics.jsonl")
                if log_file.exists():
                    checkpoint.flush(log_file)
                    checkpoint.flush(log_file.parent)
            self._remove_old(best)

        self.job = self.pool.submit(write) if self.world.main else shards

    def _save_state(self, writer: _Writer) -> Future:
        """Start writing what a resumed run needs. Returns when the copies are complete; the files
        are written in the background.
        """
        # without this stager, torch would use the writer's own
        plain = StagingOptions(
            use_pinned_memory=False,
            use_shared_memory=False,
            use_async_staging=False,
            use_non_blocking_copy=False,
        )
        stager = DefaultStager(plain)
        shards = dcp.async_save(
            tensors(self.model, self.optimizer, self.reference),
            storage_writer=writer,
            async_stager=stager,
            process_group=self.group,
            no_dist=self.group is None,
        )
        assert isinstance(shards, Future)
        shards.add_done_callback(lambda _: stager.close())
        return shards

    def _remove_old(self, best: dict | None) -> None:
        kept = f"checkpoint-{best['step']}" if best else ""
        if limit := self.cfg.save_total_limit:
            for old in checkpoint.checkpoints(self.cfg.output_dir)[:-limit]:
                if old.name == kept:
                    continue
                # a half-removed checkpoint must not look finished
                shutil.rmtree(old.rename(old.with_name(f".{old.name}.tmp")))

    def wait(self) -> None:
        if self.job is not None:
            wait([self.job])

    def failure(self) -> UserError | None:
        """Return the error of a finished save, but only once. Return None while a save is in
        progress or if it succeeded.
        """
        if self.job is None or not self.job.done():
            return None
        error, self.job = self.job.exception(), None
        if error is None or isinstance(error, UserError):
            return error
        return UserError(
            f"{self.final} could not be written ({reason(error)}): make room or choose another "
            "folder; earlier checkpoints are intact."
        )

    def finish(self) -> None:
        """Wait for the save in progress; raise its error on all ranks. Every rank must call."""
        self.wait()
        self.world.any(error=self.failure())


class _Writer(dcp.FileSystemWriter):
    """Write this rank's file in state/, and hash it. On rank 0, `hashes` then has all files."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.hashes: dict[str, str] = {}

    def write_data(self, plan: Any, planner: Any) -> Any:
        """Return a future of what the base class returns, and the hashes of the files."""
        results = super().write_data(plan, planner).wait()
        names = {result.storage_data.relative_path for result in results}
        done: torch.futures.Future = torch.futures.Future()
        done.set_result((results, {n: verify.digest(Path(self.path) / n) for n in names}))
        return done

    def finish(self, metadata: Metadata, results: list) -> None:
        """Take what `write_data` returned on each rank, and write the index."""
        super().finish(metadata, [written for written, _ in results])
        for _, hashes in results:
            self.hashes |= {f"state/{name}": found for name, found in hashes.items()}


def reason(error: BaseException) -> str:
    """Return a one-line description of an exception. If torch.distributed.checkpoint has gathered
    several from the ranks, describe the first.
    """
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    return first_sentence(error)


def deciding(cfg: Config, row: Mapping[str, float]) -> float | None:
    """Return the value of --metric-for-best-model in the metrics of an evaluation, if it is there.

    The option may leave out eval/ and rewards/, or start with eval_, as in TRL.
    """
    name = cfg.metric_for_best_model
    short = name.removeprefix("eval_").removesuffix("/mean")  # TRL: eval_rewards/NAME/mean
    names = name, f"eval/{short}", f"eval/rewards/{short}"
    return next((row[name] for name in names if name in row), None)


def unknown_metric(cfg: Config, row: Mapping[str, float]) -> UserError:
    known = (name.removeprefix("eval/").removeprefix("rewards/") for name in row)
    return UserError(
        f"--metric-for-best-model {cfg.metric_for_best_model} is not a metric of the evaluation: "
        f"choose one of {', '.join(sorted(known))}."
    )


def _best(cfg: Config) -> dict | None:
    """Return the best checkpoint so far, as the last one records it. None if there is none, if it
    was removed, or if --metric-for-best-model has changed.
    """
    found = checkpoint.checkpoints(cfg.output_dir) if cfg.resume else []
    if not found or not cfg.load_best_model_at_end:
        return None
    with _readable(found[-1]):
        best = read_json(found[-1] / verify.STATE).get("best")
        if not best or best["metric"] != cfg.metric_for_best_model:
            return None
        return best if any(f.name == f"checkpoint-{best['step']}" for f in found) else None


# --- resuming ---


def resume(
    cfg: Config,
    world: World,
    model: Decoder,
    optimizer: Optimizer,
    origin: dict[str, str],
    reference: Decoder | None = None,
) -> tuple[int, dict]:
    """Restore the last checkpoint, if any, or cfg.resume_from. Every rank must call.

    Returns the number of finished steps and the value that `Saver.save` was given as `carried`.

    origin: hashes of the run's inputs (output.origin). Resuming with different prompts is an error,
    because sampling would diverge. A changed reward or rollout file only logs a warning, since even
    a comment changes its hash.

    A finished folder that has changed since it was written is an error. Falling back to the
    previous checkpoint would lose steps, so the user must decide (--resume-from). Newer checkpoints
    than that one are then renamed, because the next --resume must not continue from them.
    """
    found = world.once(lambda: _latest(cfg, origin, world.size)) if cfg.resume else None
    if found is None:
        return 0, {}
    folder, saved = found
    _check_files(folder, saved, world)
    mine = tensors(model, optimizer, reference if cfg.sync_ref_model else None)
    _load(folder, mine)
    for state in optimizer.state.values():
        state["step"].copy_(mine["updates"])
    world.once(lambda: _set_aside_after(folder))
    return saved["step"], saved["carried"]


def _latest(
    cfg: Config, origin: dict[str, str], processes: int
) -> tuple[Path, dict[str, Any]] | None:
    """Return the last checkpoint, or the one of --resume-from, and its state.json, which must fit
    the options and inputs.
    """
    output.remove_unfinished(cfg)
    found = checkpoint.checkpoints(cfg.output_dir)
    if cfg.resume_from:
        found = [_named(cfg, found)]
    if not found:
        return None
    folder = found[-1]
    with _readable(folder):
        saved = verify.read_state(folder)
        step, config, inputs = saved["step"], {**saved["config"]}, {**saved.get("origin", {})}
        saved["carried"] = {**saved.get("carried", {})}
        if not isinstance(step, int) or folder.name != f"checkpoint-{step}":
            raise UserError(f"state.json belongs to step {step}")
    if step > cfg.max_steps:
        raise UserError(
            f"--max-steps is {cfg.max_steps} but {folder} has {step} finished steps: "
            f"set it to {step} or more."
        )
    # Convert through JSON, because the file contains lists where the options are tuples.
    now, defaults = json.loads(json.dumps([dataclasses.asdict(c) for c in (cfg, Config())]))
    if config.get("save_only_model"):
        raise UserError(
            f"--resume: {folder} was written with --save-only-model and cannot be continued: start "
            f"from its weights (--model {folder}) in another folder."
        )
    if cfg.optim == "adamw_torch_8bit" and saved.get("processes") != processes:
        raise UserError(
            f"--resume: {folder} was written by {saved.get('processes')} processes, and its 8-bit "
            f"moments cannot be divided among {processes}: use as many processes as before."
        )
    free = set(FREE.split())
    by_share = 0 < cfg.warmup_steps < 1
    if by_share or cfg.lr_scheduler_type not in (
        "constant",
        "constant_with_warmup",
        "inverse_sqrt",
    ):
        free.remove("max_steps")  # the schedule depends on the length of the run
    # an option that did not exist when the checkpoint was written had the effect of its default
    for name, value in (defaults | config).items():
        if name not in free and now.get(name) != value:
            raise UserError(
                f"--resume: {folder} was written with {name} = {value}, now it is "
                f"{now.get(name)}: give the same options."
            )
    changed = [name for name in inputs if origin.get(name, inputs[name]) != inputs[name]]
    if "prompts" in changed:
        raise UserError(
            f"--resume: {folder} was written with other prompts in {now['data']}: give the same "
            f"data, or start from its weights (--model {folder}) in another folder."
        )
    for name in changed:
        log.warning("%s has changed since %s was written; using the new file", name, folder)
    return folder, saved


def _named(cfg: Config, found: list[Path]) -> Path:
    """Return the checkpoint of the output folder that --resume-from names."""
    wanted = cfg.resume_from
    for folder in found:
        if wanted == folder.name or os.path.realpath(wanted) == os.path.realpath(folder):
            return folder
    names = ", ".join(folder.name for folder in found)
    advice = f"choose {names}" if found else "leave this option out"
    raise UserError(f"--resume-from {wanted} is no checkpoint in {cfg.output_dir}: {advice}.")


def _set_aside_after(folder: Path) -> None:
    """Rename the checkpoints that are newer than the one that the run continues from."""
    for newer in checkpoint.checkpoints(str(folder.parent)):
        if int(newer.name.split("-")[1]) > int(folder.name.split("-")[1]):
            log.warning("%s is now %s: remove it when you do not need it", newer, set_aside(newer))


def _check_files(folder: Path, saved: dict[str, Any], world: World) -> None:
    """Compare every file of a checkpoint with its hash. Each rank reads some of the files."""
    if "files" not in saved and world.main:
        message = "%s has no hashes, since an older version wrote it: damage may go unnoticed"
        log.warning(message, folder)
    with _readable(folder):
        hashes = {**saved.get("files", {})}
        mine = sorted(hashes)[world.rank :: world.size]
    problems = list(filter(None, world.gather(verify.damage(folder, mine, hashes))))

    def check() -> None:
        with _readable(folder):
            if problems:
                raise UserError(problems[0])

    world.once(check)


# The names in the index of state/, by module. An index with other names was not written by a run.
INDEX = {
    "torch.distributed.checkpoint.metadata": (
        "Metadata TensorStorageMetadata TensorProperties ChunkStorageMetadata MetadataIndex "
        "StorageMeta _MEM_FORMAT_ENCODING"
    ),
    "torch.distributed.checkpoint.filesystem": "_StorageInfo",
    "torch.serialization": "_get_layout",
    "torch": "Size",
    "pathlib": "PosixPath",
}


# The unpickler in C would reserve as much memory as a damaged number asks for.
class _Unpickler(pickle._Unpickler):
    """Read a pickle that names only what INDEX lists and torch's dtypes, so that it runs no code.

    In particular, it cannot contain BytesStorageMetadata, which torch would unpickle in turn.
    """

    def load_build(self) -> None:
        # `BUILD` sets attributes, also those of a class or a function, for the whole process
        target = self.stack[-2]  # type: ignore[attr-defined]  # which its stub does not list
        if isinstance(target, type) or not dataclasses.is_dataclass(target):
            raise pickle.UnpicklingError("state/.metadata changes an object that is not its own")
        super().load_build()  # type: ignore[misc]  # the same

    dispatch: ClassVar[dict[int, Any]] = {
        **pickle._Unpickler.dispatch,
        pickle.BUILD[0]: load_build,
    }
    del dispatch[pickle.BYTEARRAY8[0]]  # it reserves memory before it reads

    def find_class(self, module: str, name: str) -> Any:
        if name in INDEX.get(module, "").split():
            return super().find_class(module, name)
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        # some versions of Python write the only enum in the index in this way
        if (module, name) == ("builtins", "getattr"):
            return lambda _, member: _MEM_FORMAT_ENCODING[member]
        raise pickle.UnpicklingError(f"state/.metadata names {module}.{name}")


class _Reader(dcp.FileSystemReader):
    """Read the files in state/ without running code from them. Torch reads tensors in this way."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        data = (Path(self.path) / ".metadata").read_bytes()
        metadata = _Unpickler(io.BytesIO(data)).load()
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError("state/.metadata is no index of tensors")
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata


def _load(folder: Path, mine: dict[str, Tensor]) -> None:
    """Read this rank's parts of every tensor, written by any number of ranks."""
    with _readable(folder):
        for path in (folder / "state").iterdir():
            if not path.is_file():  # a pipe would never end
                raise UserError(f"state/{path.name} is not a file")
        reader = _Reader(folder / "state")
        stored = reader.read_metadata().state_dict_metadata
        there = {name: tuple(getattr(entry, "size", ())) for name, entry in stored.items()}
    here = {name: tuple(t.shape) for name, t in mine.items()}
    others = {name for name in there if "@" in name and name not in here}  # 8-bit parts of ranks
    there = {name: shape for name, shape in there.items() if name not in others}
    for name in sorted(there.keys() | here.keys()):
        if there.get(name) != here.get(name):
            raise UserError(
                f"--resume: {folder} belongs to another model ({name} has shape "
                f"{there.get(name, 'none')} there and {here.get(name, 'none')} here): "
                "give the --model that the run began with."
            )
    with _readable(folder):
        dcp.load(mine, storage_reader=reader, no_dist=not dist.is_initialized())


@contextlib.contextmanager
def _readable(folder: Path) -> Iterator[None]:
    """Turn whatever happens while a checkpoint is read into a UserError that names a sound one."""
    try:
        yield
    except PASSED:
        raise
    except BaseException as e:  # as in errors.reading; torch's CheckpointException is no Exception
        raise UserError(f"--resume: {folder} is damaged ({reason(e)}): {_advice(folder)}.") from e


def _advice(damaged: Path) -> str:
    for other in reversed(checkpoint.checkpoints(str(damaged.parent))):
        if other != damaged and verify.is_sound(other):
            return f"add --resume-from {other.name}, the last sound checkpoint"
    return "start again in another folder, because no other checkpoint is sound"
