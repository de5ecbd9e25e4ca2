"""`UserError`, raised for mistakes of the user (in the config, the data, a checkpoint or a server
address), and a JSON reader that raises it.

The message is one sentence: it names the option, or the file and line, and says what to do.
`train.py` and `serve.py` print it without a traceback and exit with status 2. Every other exception
is a bug in nanogrpo and propagates with its traceback.
"""

import json
from pathlib import Path


class UserError(Exception):
    """One sentence: what is wrong, where, and what to do about it."""


def read_json(path: Path) -> dict:
    """Return the object in a JSON file. Raises UserError if the file is missing or damaged."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise UserError(f"{path} is missing: check the folder and complete it.") from None
    # unreadable, not UTF-8, not JSON, or nested too deeply
    except (OSError, ValueError, RecursionError) as e:
        raise UserError(f"{path} is not valid JSON ({e}): restore it from its source.") from e
    if not isinstance(value, dict):
        raise UserError(f"{path} holds no JSON object: restore it from its source.")
    return value
