"""The user's own functions, by name: "package.module:name" or "path/to/file.py:name".

In: the text of an option. Out: what it names, which can be called; or one sentence that says why
not. Read next: rewards.py, turns.py (which functions there are to write).
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from nanogrpo.errors import UserError


def load(spec: str, option: str) -> Callable:
    """The function that `spec` names; `option` names itself in the sentence of a UserError, whose
    __cause__ is what importing the user's code raised.
    """
    where, _, name = spec.rpartition(":")
    if not where or not name:
        raise UserError(f"{option}: {spec!r} is neither package.module:name nor path/file.py:name")
    try:
        module = (
            _load_file(Path(where)) if where.endswith(".py") else importlib.import_module(where)
        )
    # the user's module may raise anything; the sentence carries it
    except (Exception, SystemExit) as error:
        raise UserError(
            f"{option}: importing {where!r} raised {type(error).__name__}: {error}; mend it or the path"
        ) from error
    if not callable(function := getattr(module, name, None)):
        raise UserError(
            f"{option}: {where!r} has no function {name!r}; check the name after the colon"
        )
    return function


def _load_file(path: Path) -> ModuleType:
    """Run a file once as a module of its own. Two specs that name one file share the module, and so
    its state.
    """
    path = path.resolve()
    name = "nanogrpo_file:" + str(path)  # a name no import statement can collide with
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        # before it runs: dataclasses and pickle look it up
        sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(sys.modules[name])
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]
