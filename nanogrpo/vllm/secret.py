"""The secret that serve.py creates if the user gives none, and the file that stores it.

In: the port of a server. Out: its secret. serve.py writes the file, which only its owner can read.
A trainer of the same user on the same machine reads it, so neither needs an option. When the server
has ended, the next one at the same port replaces the file. Read before: auth.py. Read next:
server.py.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import socket
import stat
import tempfile
from pathlib import Path

from nanogrpo.errors import UserError
from nanogrpo.vllm.auth import SECRET


def path_of(port: int) -> Path:
    """Return the path of the file with the secret of this user's server at a port."""
    folder = os.environ.get("XDG_STATE_HOME", "")
    if not os.path.isabs(folder):  # its specification says that such a value is ignored
        folder = os.path.expanduser("~/.local/state")
    # several machines may share a home folder
    return Path(folder, "nanogrpo", f"{socket.gethostname()}-{port}.secret")


def create(port: int) -> tuple[str, Path]:
    """Create a secret and store it. Return the secret and the path of its file."""
    secret, path = secrets.token_urlsafe(32), path_of(port)
    try:
        if not path.is_absolute():
            raise FileNotFoundError("you have no home folder")
        for parent in reversed(path.parents):
            parent.mkdir(mode=0o700, exist_ok=True)
        folder = path.parent.lstat()
        if not stat.S_ISDIR(folder.st_mode) or not is_ours(folder, denied=0o022):
            raise PermissionError("it is not yours, or others can write to it")
        if in_use(path):  # also while it loads, when the port is still free
            raise UserError(
                f"--port {port} belongs to another server of yours; end it, or choose another port."
            )
        # mode 0600; it stays open, because the lock shows that this process runs
        descriptor, name = tempfile.mkstemp(dir=path.parent)
        try:
            with open(descriptor, "w", closefd=False) as file:
                file.write(secret + "\n")
            with contextlib.suppress(OSError):  # some network file systems have no locks
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.replace(name, path)
        except OSError:
            os.close(descriptor)
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise
    except OSError as e:
        raise UserError(
            f"A secret cannot be stored in {path.parent} ({e}); set {SECRET} or --secret-file."
        ) from e
    return secret, path


def in_use(path: Path) -> bool:
    """Return whether the server that has stored this secret still runs."""
    with contextlib.suppress(OSError), path.open("r+b") as file:  # OSError: no such file, no locks
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            return True
    return False


def find(port: int) -> str:
    """Return the secret of this user's server at a port of this machine, "" if there is none."""
    path = path_of(port)
    try:
        # do not follow a link or wait for a pipe, which somebody else must have made
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return ""
    except OSError as e:
        raise UserError(f"{path} cannot be read ({e}); remove it, or set {SECRET}.") from e
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or not is_ours(found, denied=0o077):
            raise UserError(
                f"{path} belongs to another user, or others can read it; remove it, and start "
                "serve.py again."
            )
        return os.read(descriptor, 1000).decode(errors="replace").partition("\n")[0].strip()
    finally:
        os.close(descriptor)


def is_ours(found: os.stat_result, denied: int) -> bool:
    """Return whether this user owns a file, and its mode has none of the `denied` bits."""
    return found.st_uid == os.geteuid() and not found.st_mode & denied
