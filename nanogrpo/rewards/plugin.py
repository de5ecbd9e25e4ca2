"""Load the user's own functions by name: "package.module:name" or "path/to/file.py:name".

In: the value of an option. Out: the function, or a UserError that says why it cannot be loaded.
A reward function or a data source may have arguments after its name (`split_arguments`).
Read next: builtin.py.
"""

import ast
import functools
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from nanogrpo.errors import UserError


def load(spec: str, option: str) -> Callable:
    """Return the function that `spec` names.

    `option` is the name of the option in errors. If importing the user's code raises an exception,
    this exception is the __cause__ of the UserError.
    """
    where, _, name = spec.rpartition(":")
    if not where or not name:
        raise UserError(f"{option}: {spec!r} is neither package.module:name nor path/file.py:name")
    try:
        # A file is run only once. So two specs with the same file share the module and its state.
        # The module's name has no dots, because dots separate packages.
        file = FILE + quote(str(Path(where).resolve())).replace(".", "%2E")
        module = importlib.import_module(file if where.endswith(".py") else where)
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


class _Files:
    """Import a user's file as a module whose name is the path of the file. With this name, pickle
    can find the classes of the module in another process, too.
    """

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if not name.startswith(FILE):
            return None
        return importlib.util.spec_from_file_location(name, unquote(name.removeprefix(FILE)))


FILE = "nanogrpo_file:"
sys.meta_path.append(_Files)


# --- reward functions with arguments ---

OPTION = "--reward-funcs"


def load_reward(spec: str) -> Callable:
    """Return the reward function of a name, such as "name" or "name:key=value,key=value"."""
    name, arguments = split_arguments(spec)
    return bind(load(name, OPTION), arguments, spec)


def split_arguments(spec: str, option: str = OPTION) -> tuple[str, dict[str, Any]]:
    """Return ("my.py:f", {"a": 1, "b": "x"}) for "my.py:f:a=1,b=x".

    Arguments are written as in a Python call. A single word other than true or false is read as a
    string.
    """
    match = re.fullmatch(r"(.+?):([a-zA-Z_]\w*=.*)", spec, re.DOTALL)
    if match is None:
        return spec, {}
    try:
        call = ast.parse(f"f({match[2]})", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            raise ValueError("a value without a name")
        return match[1], {str(each.arg): _value(each.value) for each in call.keywords}
    except (SyntaxError, ValueError) as error:
        raise UserError(
            f"{option}: the arguments in {spec!r} cannot be read: write {match[1]}:key=value,"
            "key=value, with numbers, True, False, None, single words or quoted strings"
        ) from error


def _value(node: ast.expr) -> Any:
    words = {"true": True, "false": False}
    return words.get(node.id, node.id) if isinstance(node, ast.Name) else ast.literal_eval(node)


def bind(function: Callable, arguments: dict[str, Any], spec: str) -> Callable:
    """Return the reward function that a user's function and its arguments define.

    A function that takes completions, completion_ids, prompts or **kwargs is a reward function, and
    gets the arguments in every call. Any other function or class is called once with the arguments,
    and must return a reward function.
    """
    signature = inspect.signature(function)
    parameters = signature.parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    if not isinstance(function, type) and (takes_any or REWARD_ARGUMENTS & parameters.keys()):
        # **kwargs would accept a misspelt name
        if unknown := arguments.keys() - parameters.keys():
            raise UserError(
                f"{OPTION}: {spec!r} gives the argument {min(unknown)!r}, but the function has "
                f"only {signature}"
            )
        return functools.partial(function, **arguments) if arguments else function
    try:
        return function(**arguments)
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # the user's function may raise anything
        raise UserError(
            f"{OPTION}: {spec!r} takes neither completions nor **kwargs, so it must return a "
            f"reward function; calling it with these arguments raised {type(error).__name__}: "
            f"{error}; give arguments that fit {signature} as "
            f"{split_arguments(spec)[0]}:key=value,key=value"
        ) from error


REWARD_ARGUMENTS = {"completions", "completion_ids", "prompts"}
