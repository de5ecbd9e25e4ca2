"""The folder of a run: one run at a time writes it, all ranks see it, and what a killed run left
half written goes.

In: --output-dir. Out: `claimed`, the folder for the time of a run; `origin`, what a checkpoint
remembers of the run's inputs. Read next: state.py (what is written into it).
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

from nanogrpo.config import Config
from nanogrpo.distributed.world import World
from nanogrpo.errors import UserError
from nanogrpo.model import checkpoint
from nanogrpo.types import Prompt

log = logging.getLogger("nanogrpo")

# What a run writes, and what --overwrite-output-dir takes away: never anything else.
OURS = r"\.?checkpoint-\d+(\.tmp|\.old)?|metrics(-\d+)?\.(jsonl|tmp)|completions(-\d+)?|trace-\d+\.json|tensorboard|wandb-id"


@contextlib.contextmanager
def claimed(cfg: Config, world: World) -> Iterator[None]:
    """Holds the folder for this run. Refused: one that holds another run, that a run is writing,
    that cannot be written, or that is not the same one for every rank. Every rank must call.
    """
    folder = Path(cfg.output_dir)
    mark = folder / ".writable"
    with contextlib.ExitStack() as held:

        def claim() -> None:
            again = cfg.resume or cfg.overwrite_output_dir
            if not again and (
                _has_steps(folder / "metrics.jsonl") or checkpoint.checkpoints(cfg.output_dir)
            ):
                raise UserError(
                    f"--output-dir {folder} already holds a run: continue it with --resume, choose another folder, or remove it "
                    "with --overwrite-output-dir."
                )
            try:
                folder.mkdir(parents=True, exist_ok=True)
                held.enter_context(_locked(folder))
                mark.touch()
            except OSError as e:
                raise UserError(
                    f"--output-dir {folder} cannot be written ({e.strerror}): choose another folder."
                ) from e

        world.once(claim)
        error = None
        if not mark.exists():
            error = UserError(
                f"--output-dir {folder} is another folder for rank {world.rank}: choose one that all machines share."
            )
        world.any(error=error)
        world.once(mark.unlink)
        yield


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """A lock that dies with the process, whatever kills it: the file stays, and says nothing.
    Children do not inherit it.
    """
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            raise UserError(
                f"--output-dir {folder} is being written by another run: wait for its end or choose another folder."
            ) from None
        except OSError as e:  # some network file systems have none
            log.warning(
                "%s has no locks (%s): nothing keeps a second run out of it", folder, e.strerror
            )
        yield


def _has_steps(log: Path) -> bool:
    """Whether a log holds more than heads: a run that failed before its first step has nothing to
    lose.
    """
    return log.exists() and any(
        not line.startswith('{"run"') for line in log.read_text(errors="replace").splitlines()
    )


def clear(cfg: Config) -> None:
    """Takes away what an earlier run left, where the user asks for it; called when all that can be
    checked has been.
    """
    if not cfg.overwrite_output_dir or cfg.resume:
        return
    folder = Path(cfg.output_dir).resolve()
    found = [path for path in folder.iterdir() if re.fullmatch(OURS, path.name)]
    judges = [spec.removeprefix("model:") for spec in cfg.reward_funcs if spec.startswith("model:")]
    names = (cfg.model, *cfg.data, *cfg.eval_data, cfg.lora_adapter, *judges)
    used = [Path(name).resolve() for name in names if name]
    for path in found:
        if any(path == one or path in one.parents for one in used):
            raise UserError(
                f"--overwrite-output-dir would remove {path}, which this run reads: choose another --output-dir."
            )
    for path in found:
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def clean(cfg: Config) -> None:
    """Removes what a killed run was still writing, with a sentence."""
    folder = Path(cfg.output_dir)
    for leftover in folder.glob(".checkpoint-*.tmp"):
        log.warning("removed %s: the run ended while this checkpoint was being written", leftover)
        shutil.rmtree(leftover)
    # replaced by another of the same name, unless the kill came in between
    for old in folder.glob(".checkpoint-*.old"):
        final = folder / old.name[1 : -len(".old")]
        shutil.rmtree(old) if final.exists() else old.rename(final)


def origin(cfg: Config, world: World, prompts: Sequence[Prompt]) -> dict[str, str]:
    """What a run was fed, as hashes: its prompts, with all that rewards see of them, and each file
    of the user's own code.

    Example: {"prompts": "5f1c…", "my_rewards.py": "09ab…"}. Every rank must call: ranks that read
    other prompts are refused.
    """
    known = hashlib.sha256()
    for p in prompts:
        known.update(
            json.dumps([p.id, p.token_ids, p.columns], sort_keys=True, default=str).encode()
        )
    out = {"prompts": known.hexdigest()}
    other = [
        rank for rank, hashed in enumerate(world.gather(out["prompts"])) if hashed != out["prompts"]
    ]
    error = (
        UserError(
            f"--data holds other prompts for rank {other[0]}: give all machines the same files."
        )
        if other
        else None
    )
    world.any(error=error)
    for where in [spec.rpartition(":")[0] for spec in (*cfg.reward_funcs, cfg.rollout)]:
        if where.endswith(".py"):
            out[where] = hashlib.sha256(Path(where).read_bytes()).hexdigest()
        elif (
            where
            and (found := importlib.util.find_spec(where))
            and Path(found.origin or "").is_file()
        ):
            out[where] = hashlib.sha256(Path(found.origin).read_bytes()).hexdigest()
    return out
