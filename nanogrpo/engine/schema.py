"""Describe a tool to the model: a function's signature and docstring as a JSON schema.

    def search(query: str, limit: int = 3) -> str:      {"type": "function", "function": {
        \"\"\"Search the library.                             "name": "search",
                                                            "description": "Search the library.",
        Args:                                               "parameters": {"type": "object",
            query: Words to look for.                         "properties": {"query": {…}, …},
            limit: Number of results.                         "required": ["query"]},
        \"\"\"                                                "return": {"type": "string"}}}

In: a function with type hints and a docstring in Google's style. Out: the schema, equal to that of
`transformers.utils.get_json_schema`, or a UserError that says what the function lacks. Read next:
tools.py, which passes the schemas to the chat template.
"""

from __future__ import annotations

import contextlib
import enum
import inspect
import json
import re
import types
import typing
from collections.abc import Callable
from typing import Any

from nanogrpo.errors import UserError

PLAIN = {
    int: {"type": "integer"},
    float: {"type": "number"},
    str: {"type": "string"},
    bool: {"type": "boolean"},
    type(None): {"type": "null"},
    list: {"type": "array"},
    tuple: {"type": "array"},
    dict: {"type": "object"},
    Any: {},
}


class Unsupported(Exception):
    """Raised for a type hint that has no JSON schema."""


def of_function(function: Callable, option: str) -> dict:
    """Return the schema of a function or bound method. option: its option, for error messages."""
    name = getattr(function, "__name__", None)
    if name is None:
        raise UserError(f"{option}: {function!r} has no name: give a function made with def.")
    if isinstance(function, type):
        raise UserError(
            f"{option}: {name} is a class: give a function, or the class with "
            "--environment-factory."
        )

    def require(ok: object, problem: str) -> None:
        if not ok:
            raise UserError(f"{option}: the tool {name} {problem}.")

    documentation = inspect.getdoc(function) or ""
    require(documentation, "has no docstring: add one, because the model reads it")
    description, described, returned = sections(documentation)
    try:
        hints = typing.get_type_hints(function)
    except Exception as e:  # evaluating a hint that is written as text may raise anything
        raise UserError(
            f"{option}: a type hint of the tool {name} cannot be read ({e}): correct it."
        ) from e
    properties: dict[str, dict] = {}
    required = []
    for argument, parameter in inspect.signature(function).parameters.items():
        require(argument in hints, f"has no type hint for {argument}: add one, such as `: str`")
        require(
            argument in described,
            f"does not describe {argument}: add `{argument}: …` under `Args:` in its docstring",
        )
        try:
            schema = of_hint(hints[argument])
        except Unsupported as e:
            require(False, f"has the hint {e} for {argument}, which JSON cannot express: change it")
        text = described[argument]
        if choices := re.search(r"\(choices:\s*(.*?)\)\s*$", text, re.IGNORECASE):
            try:
                schema["enum"] = json.loads(choices[1])
            except ValueError:
                require(False, f'has choices for {argument} that are not JSON: write ["a", "b"]')
            text = text[: choices.start()].strip()
        properties[argument] = {**schema, "description": text}
        if parameter.default is parameter.empty:
            required.append(argument)
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    if required:
        parameters["required"] = required
    out = {"name": name, "description": description, "parameters": parameters}
    if "return" in hints:
        # the model never writes it, so the tool can be used without
        with contextlib.suppress(Unsupported):
            more = {} if returned is None else {"description": returned}
            out["return"] = of_hint(hints["return"]) | more
    return {"type": "function", "function": out}


def of_hint(hint: Any) -> dict:
    """Return the schema of a type hint, or raise Unsupported."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return _values([member.value for member in hint], hint)
    for kind, plain in PLAIN.items():
        if kind is (hint if args else origin or hint):  # typing.List without arguments is list
            return dict(plain)
    if origin is typing.Literal:
        return _values(list(args), hint)
    if origin in (typing.Union, types.UnionType):
        options = [of_hint(each) for each in args if each is not type(None)]
        if len(options) == 1:
            out = options[0]
        elif all(o.keys() == {"type"} and isinstance(o["type"], str) for o in options):
            out = {"type": _one_or_all(sorted({o["type"] for o in options}))}
        else:
            out = {"anyOf": options}
        return {**out, "nullable": True} if type(None) in args else out
    if origin is list:
        return {"type": "array", "items": of_hint(args[0])}
    if origin is tuple and len(args) > 1 and ... not in args:
        return {"type": "array", "prefixItems": [of_hint(each) for each in args]}
    if origin is dict:
        return {"type": "object", "additionalProperties": of_hint(args[1])}
    raise Unsupported(hint)


def takes_text(schema: dict) -> bool:
    """Return whether a value of this schema may be a text."""
    kinds = schema.get("type", [] if "anyOf" in schema else "string")
    return "string" in kinds or any(takes_text(each) for each in schema.get("anyOf", ()))


def _values(values: list, hint: Any) -> dict:
    """Return the schema of a list of allowed values."""
    if not values or not {*map(type, values)} <= {int, float, str, bool, type(None)}:
        raise Unsupported(hint)
    names = list(dict.fromkeys(PLAIN[type(value)]["type"] for value in values))
    return {"type": _one_or_all(names), "enum": values}


def _one_or_all(names: list[str]) -> str | list[str]:
    return names[0] if len(names) == 1 else names


def sections(documentation: str) -> tuple[str, dict[str, str], str | None]:
    """Split a docstring of Google's style into its description, the description of each argument,
    and that of the return value (None if there is none).
    """
    parts: dict[str, list[str]] = {"": []}
    current = ""
    for line in documentation.splitlines():
        if line.strip() in ("Args:", "Returns:", "Raises:"):
            current = line.strip()
            parts[current] = []
        else:
            parts[current].append(line)
    described: dict[str, str] = {}
    name, indent = "", 0
    for line in parts.get("Args:", []):
        start = re.match(r"(\s*)(\w+):(.*)", line)
        if start and (not name or len(start[1]) <= indent):
            name, indent = start[2], len(start[1])
            described[name] = start[3].strip()
        elif name and line.strip():  # a description may continue on the next lines
            described[name] = f"{described[name]} {line.strip()}".strip()
    returned = "\n".join(parts["Returns:"]).strip() if "Returns:" in parts else None
    return "\n".join(parts[""]).strip(), described, returned
