"""Lock the output folder of a run, remove old files from it, and hash the inputs of the run.

In: --output-dir. Out: a context `claimed` that locks the folder during a run, and `origin`, the
hashes that every checkpoint stores. Read next: state.py (what is written into the folder).
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from nanogrpo.config import Config
from nanogrpo.distributed.world import World
from nanogrpo.errors import UserError
from nanogrpo.logs.files import checkpoints
from nanogrpo.model import checkpoint
from nanogrpo.model.tokenizer import FILES
from nanogrpo.types import Prompt

if TYPE_CHECKING:  # setup.py imports this file
    from nanogrpo.run.setup import Inputs

logger = logging.getLogger("nanogrpo")

# --overwrite-output-dir removes these files and the run's checkpoints, and nothing else.
OURS = """
    metrics.jsonl .checkpoint-*.tmp completions/completions_[0-9]*.jsonl
    completions/eval_[0-9]*.jsonl completions/tokens_[0-9]*.jsonl.gz
    metrics.[0-9]*.tmp completions/*_[0-9]*.[0-9]*.tmp
"""


@contextlib.contextmanager
def claimed(cfg: Config, world: World) -> Iterator[None]:
    """Lock the output folder during a run. Every rank must call this function.

    Raises UserError if the folder contains another run, is in use by another run, is not writable,
    or is not the same folder for every rank.
    """
    folder = Path(cfg.output_dir)
    with contextlib.ExitStack() as held:

        def claim() -> None:
            try:
                if not (cfg.resume or cfg.overwrite_output_dir) and _holds_a_run(folder):
                    raise UserError(
                        f"--output-dir {folder} already holds a run: continue it with --resume, "
                        "choose another folder, or remove it with --overwrite-output-dir."
                    )
                folder.mkdir(parents=True, exist_ok=True)
                file = held.enter_context((folder / ".lock").open("a"))
            except OSError as e:
                raise UserError(
                    f"--output-dir {folder} cannot be written ({e.strerror}): "
                    "choose another folder."
                ) from e
            try:
                # The operating system releases the lock when this process ends for any reason.
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(
                    f"--output-dir {folder} is in use by another run: wait for it to end or choose "
                    "another folder."
                ) from None
            except OSError:
                logger.warning("%s cannot be locked: do not start a second run there", folder)

        world.once(claim)
        # each machine might have its own folder of this name, instead of a shared one
        world.agree({f"the folder {folder}": (folder / ".lock").exists()})
        yield


def _holds_a_run(folder: Path) -> bool:
    """Return whether the folder contains a checkpoint, or a metrics.jsonl with more than header
    lines. If a run failed early, its log has only header lines and can be continued.
    """
    log = folder / "metrics.jsonl"
    return bool(checkpoints(folder)) or (
        log.exists()
        and not all(line.startswith(b'{"run"') for line in log.read_bytes().splitlines())
    )


def clear(cfg: Config) -> None:
    """Remove the files of an earlier run if --overwrite-output-dir is set. Call this function after
    all other checks.
    """
    if not cfg.overwrite_output_dir or cfg.resume:
        return
    folder = Path(cfg.output_dir).resolve()
    found = [path for pattern in OURS.split() for path in folder.glob(pattern)]
    for path in checkpoints(folder):
        if not (path / "state.json").exists():
            raise UserError(f"{path} was not written by nanogrpo: choose another --output-dir.")
        found.append(path)
    inputs = [path.resolve() for path in named(cfg)]
    for path in found:
        if any(path in (name, *name.parents) for name in inputs):
            raise UserError(
                f"--overwrite-output-dir would remove {path}, which this run reads: "
                "choose another --output-dir."
            )
    for path in found:
        remove(path)


def named(cfg: Config) -> set[Path]:
    """Return all parts of the options' values that may be paths, such as FILE in FILE:FUNCTION. A
    model's path in model:PATH may contain colons itself.
    """
    values = [v for name, v in vars(cfg).items() if name != "output_dir"]
    texts = [t for v in values for t in (v if isinstance(v, tuple) else [v]) if isinstance(t, str)]
    return {Path(p) for t in texts for p in (t, t.partition(":")[2], *t.split(":"))}


def remove(path: Path) -> None:
    """Remove a file, a link, or a folder with all its files. A folder is first renamed, because a
    partly deleted checkpoint must not look complete, not even after a kill.
    """
    try:
        if path.is_dir() and not path.is_symlink():
            path = path.rename(path.with_name(f".{path.stem.lstrip('.')}.tmp"))
            shutil.rmtree(path)
        else:
            path.unlink()
    except OSError as e:
        raise UserError(f"{path} cannot be removed ({e.strerror}): remove it yourself.") from e


def remove_unfinished(cfg: Config) -> None:
    """Remove the checkpoints that a killed run was writing or removing, and log a warning."""
    for path in Path(cfg.output_dir).glob(".checkpoint-*.tmp"):
        logger.warning("removed %s: a run ended while it was writing or removing it", path)
        remove(path)


def origin(inputs: Inputs) -> dict[str, str]:
    """Return hashes of the inputs that must be the same when the run is resumed: the prompts, the
    files of the model, and perhaps its weights. The weights are included if some of them are not
    trained, or if --beta uses them as the reference model.

    Every rank must call this function. Raises UserError if ranks read different files.
    """
    cfg, world, hashes = inputs.cfg, inputs.world, {"the list of prompts": hashed(inputs.prompts)}
    kept = cfg.beta or not all(p.requires_grad for p in inputs.model.parameters())
    files = [inputs.source / name for name in ("config.json", *FILES.split())]
    files += checkpoint.files(inputs.source) if kept or world.size > 1 else []
    hashes |= {f"{path.name} in {cfg.model}": digest(path) for path in files if path.is_file()}
    if world.size > 1:
        world.agree(hashes | {f"{p}": digest(p) for p in named(cfg) if os.path.isfile(p)})
    return {n: hashes[n] for n in hashes if kept or ".safetensors in" not in n}


def hashed(prompts: Sequence[Prompt]) -> str:
    """Return a hash of the prompts with all their columns."""
    known = hashlib.sha256()
    for p in prompts:
        # `inputs` are hashed as text
        row = [p.id, p.token_ids, p.columns, p.inputs]
        known.update(json.dumps(row, sort_keys=True, default=str).encode())
    return known.hexdigest()


def digest(path: Path) -> str:
    """Return the SHA-256 hash of a file. Training continues meanwhile, because hashlib releases the
    GIL."""
    found = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            found.update(block)
    return found.hexdigest()
