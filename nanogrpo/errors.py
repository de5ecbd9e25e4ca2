"""`UserError`, raised for mistakes of the user (in the config, the data, a checkpoint or a server
address), and `reading`, which raises it for every file that cannot be read.

The message is one sentence: it names the option, or the file and line, and says what to do.
`train.py` and `serve.py` print it without a traceback and exit with status 2. Every other exception
is a bug in nanogrpo and propagates with its traceback.
"""

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path


class UserError(Exception):
    """One sentence: what is wrong, where, and what to do about it."""


@contextlib.contextmanager
def reading(
    what: object,  # a path; a function that returns a place, if the place changes while we read
    advice: str = "restore it from its source",
    problem: str = "cannot be read",
) -> Iterator[None]:
    """Turn whatever a reader raises on a file that we did not make into one UserError.

    The readers are libraries in Python, C and Rust, which raise errors of every type on damaged
    files: even MemoryError, RecursionError, and Rust's PanicException, which is not a subclass of
    Exception. Put nothing but the reading into the block, because a bug of ours there would be
    reported as damage to the file.

    >>> with reading("a.json"):
    ...     json.loads("[")
    UserError: a.json cannot be read (Expecting value: line 1 column 2 (char 1)): restore it from …
    """
    try:
        yield
    # the last three end the program or a generator
    except (UserError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as e:  # see above
        reason = first_sentence(e)
        if isinstance(e, OSError) and e.strerror:  # without the path, which `what` names
            reason = e.strerror
        elif isinstance(e, LookupError | TypeError):  # the message is often only a name
            reason = f"{type(e).__name__}: {reason}"
        where = what() if callable(what) else what
        raise UserError(f"{where} {problem} ({reason}): {advice}.") from e


def read_json(path: Path) -> dict:
    """Return the object in a JSON file. Raises UserError if the file is missing or damaged."""
    with reading(path, problem="is not valid JSON"):
        try:
            value = json.loads(path.read_bytes())
        except FileNotFoundError:
            raise UserError(f"{path} is missing: check the path, or restore the file.") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} holds no JSON object: restore it from its source.")
    return value


def text_of(error: BaseException) -> str:
    """Return the text of an exception. In the user's code, its `__str__` may raise another."""
    try:
        return str(error)
    except BaseException as another:  # the user's code may raise anything
        return f"its text raises {type(another).__name__}"


def first_sentence(error: BaseException) -> str:
    """Return the first sentence of a message, without the source location or error number that it
    begins with. In errors from C++, advice and a stack trace follow it. Of the errors that torch's
    CheckpointException gathers from the ranks, take the first.
    """
    if failures := getattr(error, "failures", None):
        error = next(iter(failures.values()))[0]
    lines = text_of(error).strip().splitlines() or [type(error).__name__]
    return re.sub(r"^\[(\S+:|Errno )\d+\] ", "", lines[0]).split(". ")[0].rstrip(".")[:500]


def check(where: str, name: str, value: object, allowed: list) -> None:
    """Raise UserError if a field of a config.json, the file `where`, has none of these values."""
    if value not in allowed:
        values = " or ".join(map(json.dumps, allowed))
        raise UserError(f"{where}: {name} {value!r:.60} is not supported; it must be {values}.")
