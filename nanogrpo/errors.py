"""Errors that report a user's mistake, in the config, the data, a checkpoint or a server address.

The message of a `UserError` is one sentence. The message names the option, or the file and line,
and says what to do. `train.py` and `serve.py` print the message without a traceback and exit with
status 2. Every other exception is a bug in nanogrpo and propagates with its traceback.
"""

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069]")


class UserError(Exception):
    """An error whose message is one sentence: what is wrong, where, and what to do about it. If
    the options contain several mistakes, each mistake is one argument and one line of the message.

    The message may quote a user's exception, which may quote what a model wrote. Control characters
    in the message are replaced, because a terminal would interpret them.
    """

    def __str__(self) -> str:
        return CONTROL.sub("\ufffd", "\n       ".join(map(str, self.args)))

    def _render_traceback_(self) -> list[str]:
        """In a notebook, show only the message, without the traceback."""
        return [f"error: {self}"]


@contextlib.contextmanager
def reading(
    what: object,  # a path, or a function that returns the current location in a file
    advice: str = "restore it from its source",
    problem: str = "cannot be read",
) -> Iterator[None]:
    """Turn any exception that is raised while a file is read into a UserError.

    The libraries that read files are written in Python, C and Rust. A damaged file can make these
    libraries raise errors of any type, even MemoryError, RecursionError, or Rust's PanicException,
    which is not a subclass of Exception. The `with` block should only read the file, because a bug
    in other code would be reported as a damaged file.

    >>> with reading("a.json"):
    ...     json.loads("[")
    UserError: a.json cannot be read (Expecting value: line 1 column 2 (char 1)): restore it from …
    """
    try:
        yield
    # the last three exceptions end the program or a generator, and say nothing about the file
    except (UserError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as e:  # see above
        reason = first_sentence(e)
        if isinstance(e, LookupError | TypeError):  # the message is often only a name
            reason = f"{type(e).__name__}: {reason}"
        where = what() if callable(what) else what
        raise UserError(f"{where} {problem} ({reason}): {advice}.") from e


def read_json(path: Path, **how: Any) -> dict:
    """Return the object in a JSON file. Raises UserError if the file is missing or damaged.

    how: arguments of json.loads.
    """
    with reading(path, problem="is not valid JSON"):
        try:
            value = json.loads(path.read_bytes(), **how)
        except FileNotFoundError:
            raise UserError(f"{path} is missing: check the path, or restore the file.") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} must contain a JSON object: restore it from its source.")
    return value


def without_nulls(fields: dict) -> dict:
    """Return a JSON object without the fields that are null."""
    return {name: value for name, value in fields.items() if value is not None}


def unwritten(path: Path, error: BaseException) -> UserError:
    """Return the error of a file or folder that could not be written. If a disk is full, torch's
    message is only "enforce fail", because torch could not write all bytes.
    """
    return UserError(
        f"{path} could not be written ({first_sentence(error)}): choose another folder, or make "
        "room if the disk is full; earlier files are intact."
    )


def first_sentence(error: BaseException) -> str:
    """Return the first sentence of an error's message, without the source location or error number
    at its start. Errors from C++ have advice and a stack trace after the first sentence. For
    torch's CheckpointException, which contains errors of several ranks, use the first of these
    errors.
    """
    if failures := getattr(error, "failures", None):
        error = next(iter(failures.values()))[0]
    # `strerror` omits the path
    lines = str(getattr(error, "strerror", None) or error).strip().splitlines() or [
        type(error).__name__
    ]
    return re.sub(r"^\[(\S+:|Errno )\d+\] ", "", lines[0]).split(". ")[0].rstrip(".")[:500]


def check(where: str, name: str, value: object, allowed: list) -> None:
    """Raise UserError if the value of a field of config.json is not in `allowed`."""
    if value not in allowed:
        values = " or ".join(map(json.dumps, allowed))
        raise UserError(f"{where}: {name} {value!r:.60} is not supported; it must be {values}.")
