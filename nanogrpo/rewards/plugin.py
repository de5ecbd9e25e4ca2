"""Load the user's own functions by name: "package.module:name" or "path/to/file.py:name".

In: the value of an option. Out: the function, or a UserError that says why it cannot be loaded.
Read next: rewards/builtin.py and engine/turns.py, which define the functions that a user can write.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from nanogrpo.errors import UserError


def load(spec: str, option: str, hint: str = "") -> Callable:
    """Return the function that `spec` names.

    option: the name of the option in errors; hint: what else the option accepts. If the user's code
    raised while it was imported, that exception is the __cause__ of the UserError.
    """
    where, _, name = spec.rpartition(":")
    if not where or not name:
        raise UserError(
            f"{option}: {spec!r} is neither package.module:name nor path/file.py:name{hint}"
        )
    try:
        module = _load_file(where) if where.endswith(".py") else importlib.import_module(where)
    except (Exception, SystemExit) as error:  # the user's module may raise anything
        raise UserError(
            f"{option}: importing {where!r} raised {type(error).__name__}: {error}; "
            "fix the file or its path"
        ) from error
    if not callable(function := getattr(module, name, None)):
        raise UserError(
            f"{option}: {where!r} has no function {name!r}; check the name after the colon"
        )
    return function


def _load_file(file: str) -> ModuleType:
    """Run a file as a module, once: two specs that name one file share the module and its state."""
    path = Path(file).resolve()
    name = f"nanogrpo_file:{path}"  # no import statement can name it
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        # Registered before it runs, because dataclasses and pickle look the module up.
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]
