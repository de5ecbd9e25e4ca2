"""The output folder of a run: locked by one run at a time, shared by all ranks, cleaned on resume.

In: --output-dir. Out: `claimed`, which locks the folder during a run; `origin`, hashes of the run's
inputs that every checkpoint stores. Read next: state.py (what is written into the folder).
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import json
import logging
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from nanogrpo.config import Config
from nanogrpo.distributed.world import World
from nanogrpo.errors import UserError, reading
from nanogrpo.model import checkpoint
from nanogrpo.rewards import plugin
from nanogrpo.types import Prompt

log = logging.getLogger("nanogrpo")

# The files of a run: --overwrite-output-dir removes these and nothing else.
OURS = (
    r"\.?checkpoint-\d+(-\d+|\.tmp|\.old)?|metrics(-\d+)?\.(jsonl|tmp)|completions(-\d+)?"
    r"|trace-\d+\.json|tensorboard|wandb-id"
)


@contextlib.contextmanager
def claimed(cfg: Config, world: World) -> Iterator[None]:
    """Lock the output folder during a run. Every rank must call.

    Raises UserError if the folder contains another run, is in use by another run, is not writable,
    or is not the same folder for every rank.
    """
    folder = Path(cfg.output_dir)
    mark = folder / ".writable"
    with contextlib.ExitStack() as held:

        def claim() -> None:
            metrics = folder / "metrics.jsonl"
            if metrics.exists() and not metrics.is_file():  # a pipe would never end
                raise UserError(f"{metrics} is not a file: choose another --output-dir.")
            if not (cfg.resume or cfg.overwrite_output_dir) and _holds_a_run(folder):
                raise UserError(
                    f"--output-dir {folder} already holds a run: continue it with --resume, choose "
                    "another folder, or remove it with --overwrite-output-dir."
                )
            try:
                folder.mkdir(parents=True, exist_ok=True)
                _lock(held.enter_context((folder / ".lock").open("a")), folder)
                mark.open("a").close()  # not `touch`, which takes a folder, too
            except OSError as e:
                raise UserError(
                    f"--output-dir {folder} cannot be written ({e.strerror}): "
                    "choose another folder."
                ) from e

        world.once(claim)
        error = UserError(
            f"--output-dir {folder} is a different folder on rank {world.rank}: "
            "choose one that all machines share."
        )
        world.any(error=None if mark.exists() else error)
        world.once(mark.unlink)
        yield


def _holds_a_run(folder: Path) -> bool:
    """Return whether the folder contains a checkpoint, or a metrics.jsonl with anything but header
    lines. A run that failed before its first step has left nothing worth keeping, but a file that
    is not ours must not be replaced.
    """
    metrics = folder / "metrics.jsonl"
    with reading(metrics, "choose another --output-dir"):
        lines = metrics.read_bytes().splitlines() if metrics.exists() else []
    logged = any(not line.startswith(b'{"run"') for line in lines)
    return logged or bool(checkpoint.checkpoints(str(folder)))


def _lock(file: IO[str], folder: Path) -> None:
    """Lock the file. The kernel releases the lock when this process ends, however it ends; child
    processes do not inherit it, and it does not matter whether the file exists.
    """
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        raise UserError(
            f"--output-dir {folder} is in use by another run: wait for it to end or choose "
            "another folder."
        ) from None
    except OSError as e:  # some network file systems have no locks
        log.warning("%s has no locks (%s): do not start a second run there", folder, e.strerror)


def clear(cfg: Config) -> None:
    """Remove what an earlier run left if --overwrite-output-dir asks for it. Call this after all
    other checks.
    """
    if not cfg.overwrite_output_dir or cfg.resume:
        return
    folder = Path(cfg.output_dir).resolve()
    found = [path for path in folder.iterdir() if re.fullmatch(OURS, path.name)]
    judges = [spec.removeprefix("model:") for spec in cfg.reward_funcs if spec.startswith("model:")]
    names = (cfg.model, *cfg.data, *cfg.eval_data, cfg.lora_adapter, *judges)
    inputs = [Path(name).resolve() for name in names if name]
    for path in found:
        if any(path in (name, *name.parents) for name in inputs):
            raise UserError(
                f"--overwrite-output-dir would remove {path}, which this run reads: "
                "choose another --output-dir."
            )
    for path in found:
        remove(path)


def remove(path: Path) -> None:
    """Remove a file, a link, or a folder with all its files."""
    try:
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    except OSError as e:
        raise UserError(f"{path} cannot be removed ({e.strerror}): remove it yourself.") from e


def remove_unfinished(cfg: Config) -> None:
    """Remove the checkpoint that a killed run was writing, and log a warning."""
    folder = Path(cfg.output_dir)
    for path in folder.glob(".checkpoint-*.tmp"):
        log.warning("removed %s: the run ended while it was writing this checkpoint", path)
        remove(path)
    # The old version of a checkpoint that was being replaced. If the run was killed between the two
    # renames, the old one is the only one left.
    for old in folder.glob(".checkpoint-*.old"):
        final = folder / old.name[1 : -len(".old")]
        remove(old) if final.exists() else old.rename(final)


def origin(cfg: Config, world: World, prompts: Sequence[Prompt]) -> dict[str, str]:
    """Return hashes of the run's inputs: the prompts with all their columns, and each file of the
    user's own code.

    Example: {"prompts": "5f1c…", "my_rewards.py": "09ab…"}. Every rank must call. Raises UserError
    if ranks read different prompts.
    """
    known = hashlib.sha256()
    for p in prompts:
        row = [p.id, p.token_ids, p.columns]
        if p.images is not None:
            row.append(p.images.settings)
            row.append([hashlib.sha256(source).hexdigest() for source in p.images.sources])
        with reading(f"--data: prompt {p.id}", "give plain values as columns", "cannot be hashed"):
            known.update(json.dumps(row, sort_keys=True, default=str).encode())
    out = {"prompts": known.hexdigest()}
    if len(set(world.gather(out["prompts"]))) > 1:
        raise UserError(
            "--data holds different prompts for different ranks: give all machines the same files."
        )
    code = (*cfg.reward_funcs, cfg.rollout, *cfg.tools, cfg.environment_factory)
    names = [plugin.split_arguments(spec)[0] for spec in code]
    for where in {name.rpartition(":")[0] for name in names} - {""}:
        module = None if where.endswith(".py") else importlib.util.find_spec(where)
        path = Path(module.origin or "" if module else where)
        if path.suffix == ".py" and path.is_file():
            out[where] = hashlib.sha256(path.read_bytes()).hexdigest()
    return out
