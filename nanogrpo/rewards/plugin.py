"""Load the user's own functions by name: "package.module:name" or "path/to/file.py:name".

In: the value of an option. Out: the function, or a UserError that says why it cannot be loaded.
A reward function may have arguments after its name (`load_reward`).
Read next: rewards/builtin.py and engine/turns.py, which define the functions that a user can write.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from nanogrpo.arguments import parse_arguments
from nanogrpo.errors import UserError, text_of


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
    if where == "__main__":
        raise UserError(
            f"{option}: {spec!r} names the running script, which other processes cannot import: "
            "pass the function itself to nanogrpo.train, or put it into a file"
        )
    try:
        module = _load_file(where) if where.endswith(".py") else importlib.import_module(where)
    except (Exception, SystemExit) as error:  # the user's module may raise anything
        raise UserError(
            f"{option}: importing {where!r} raised {type(error).__name__}: {text_of(error)}; "
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
    # No import statement can name it. It has no dots, because pickle would take it for a package.
    name = "nanogrpo_file:" + str(path).replace("%", "%25").replace(".", "%2E")
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        # Registered before it runs, because dataclasses and pickle look the module up.
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


# --- reward functions with arguments ---

OPTION = "--reward-funcs"


def load_reward(spec: str, hint: str = "") -> Callable:
    """Return the reward function that "name" or "name:key=value,key=value" names."""
    name, arguments = split_arguments(spec)
    return bind(load(name, OPTION, hint), arguments, spec)


def split_arguments(spec: str) -> tuple[str, dict[str, Any]]:
    """Return ("my.py:f", {"a": 1, "b": "x"}) for "my.py:f:a=1,b=x".

    Arguments are written as in a Python call. A single word needs no quotes.
    """
    match = re.fullmatch(r"(.+?):([a-zA-Z_]\w*=.*)", spec, re.DOTALL)
    if match is None:
        return spec, {}
    try:
        return match[1], parse_arguments(match[2])
    except ValueError as error:
        raise UserError(
            f"{OPTION}: the arguments in {spec!r} cannot be read: write {match[1]}:key=value,"
            "key=value, with numbers, True, False, None, single words or quoted texts"
        ) from error


def bind(function: Callable, arguments: dict[str, Any], spec: str) -> Callable:
    """Return the reward function that results from a function and arguments.

    A function that takes completions, completion_ids, prompts or **kwargs is a reward function, and
    gets the arguments at every call. Any other, and any class, is a factory: it is called with the
    arguments once, and returns the reward function.
    """
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # some functions written in C have none
        return functools.partial(function, **arguments) if arguments else function
    kinds = {parameter.kind for parameter in parameters.values()}
    given = ", ".join(name for name, p in parameters.items() if p.kind not in VARIADIC)
    if not isinstance(function, type) and (
        inspect.Parameter.VAR_KEYWORD in kinds or REWARD_ARGUMENTS & parameters.keys()
    ):
        # **kwargs would swallow a misspelt name
        if unknown := arguments.keys() - parameters.keys():
            raise UserError(
                f"{OPTION}: {spec!r} gives the argument {min(unknown)!r}, but the function has "
                f"only {given or 'none'}"
            )
        return functools.partial(function, **arguments) if arguments else function
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as error:
        raise UserError(
            f"{OPTION}: {spec!r} takes neither completions nor **kwargs, so it is not a reward "
            f"function but makes one: give its arguments ({given}) as "
            f"{split_arguments(spec)[0]}:key=value,key=value ({error})"
        ) from error
    try:
        made = function(**arguments)
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # the user's function may raise anything
        raise UserError(
            f"{OPTION}: {spec!r} raised {type(error).__name__}: {text_of(error)}; fix its arguments"
        ) from error
    if not callable(made):
        raise UserError(
            f"{OPTION}: {spec!r} takes neither completions nor **kwargs, so it must return a reward"
            f" function, but it returned a {type(made).__name__}"
        )
    return made


VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
REWARD_ARGUMENTS = {"completions", "completion_ids", "prompts"}
