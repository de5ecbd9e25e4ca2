"""Find damage in a checkpoint: state.json has a SHA-256 hash of every other file and of itself.

In: a checkpoint folder. Out: the hashes, when it is written; on --resume, the first file that is
missing or has changed. The hashes find accidents, not forgery (SECURITY.md). `sha256sum` computes
the same hashes, except for that of state.json. Version 0.2 and older wrote none. Read before:
state.py, which writes and reads the folders.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from nanogrpo.errors import UserError, first_sentence, read_json, reading

STATE = "state.json"
BLANK = "0" * 64  # stands for the hash of state.json in state.json while it is hashed


def digest(path: Path) -> str:
    """Return the SHA-256 hash of a file. hashlib releases the GIL, so training continues."""
    found = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while block := file.read(1 << 20):
            found.update(block)
    return found.hexdigest()


def digests(folder: Path, known: dict[str, str]) -> dict[str, str]:
    """Return the hash of each file in a folder, by its path there. `known` has some of the hashes,
    which are not computed again.
    """
    names = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
    return {name: known.get(name) or digest(folder / name) for name in names}


def seal(row: dict) -> str:
    """Return the text of a state.json. It ends with a hash of itself, with zeros for the hash."""
    text = json.dumps({**row, "sha256": BLANK}, indent=2) + "\n"
    head, _, tail = text.rpartition(BLANK)
    return head + hashlib.sha256(text.encode()).hexdigest() + tail


def read_state(folder: Path) -> dict:
    """Return the content of state.json. Raises UserError if it differs from what was written."""
    path = folder / STATE
    saved = read_json(path)
    own = saved.get("sha256")
    if own is not None or "files" in saved:
        with reading(path):
            head, _, tail = path.read_bytes().rpartition(str(own).encode())
        if hashlib.sha256(head + BLANK.encode() + tail).hexdigest() != own:
            raise UserError(f"{STATE} has changed since it was written")
    if not isinstance(saved.get("files", {}), dict):
        raise UserError(f"{STATE} has no list of files")
    return saved


def damage(folder: Path, names: Iterable[str], hashes: dict[str, str]) -> str:
    """Return what is wrong with the first damaged file among `names`; "" if none is damaged."""
    try:
        for name in names:
            with reading(name):
                if not (folder / name).is_file():
                    return f"{name} is missing"
                if digest(folder / name) != hashes[name]:
                    return f"{name} has changed since it was written"
    except UserError as e:  # for example, the disk cannot read it
        return first_sentence(e)
    return ""


def is_sound(folder: Path) -> bool:
    """Return whether a run can continue from a checkpoint, as far as its hashes can tell."""
    try:
        hashes = read_state(folder).get("files", {})
    except UserError:
        return False
    return (folder / "state").is_dir() and not damage(folder, hashes, hashes)
