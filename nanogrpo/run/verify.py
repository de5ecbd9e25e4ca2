"""Prove that a checkpoint is what was written: state.json has a SHA-256 hash of every file.

In: a checkpoint folder. Out: the hashes when it is written; on --resume, the first file that is
missing or has changed. state.json ends with a hash of itself. `sha256sum` computes the same hashes.
A checkpoint of an older version has none. Read before: state.py, which writes and reads the
folders.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from nanogrpo.errors import UserError, first_sentence, read_json, reading

STATE = "state.json"
BLANK = "0" * 64  # in place of its own hash while state.json is hashed


def digest(path: Path) -> str:
    """Return the SHA-256 hash of a file. hashlib releases Python's lock, so training continues."""
    found = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while block := file.read(1 << 20):
            found.update(block)
    return found.hexdigest()


def digests(folder: Path, known: dict[str, str]) -> dict[str, str]:
    """Return the hash of each file in a folder by its name there. `known` has some of them."""
    names = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
    return {name: known.get(name) or digest(folder / name) for name in names}


def seal(row: dict) -> str:
    """Return the text of a state.json. Its last value is the hash of this text with zeros there."""
    text = json.dumps({**row, "sha256": BLANK}, indent=2) + "\n"
    head, _, tail = text.rpartition(BLANK)
    return head + hashlib.sha256(text.encode()).hexdigest() + tail


def read_state(folder: Path) -> dict:
    """Return the content of state.json. Raises UserError if it is not the text that was written."""
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
    """Return what is wrong with one of these files of a checkpoint; "" if nothing is."""
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
