"""The command line, made from the options: a flag a field of `Config`, its comment as the help, its heading as the group.

In: argv. Out: a `Config`, not yet validated. Booleans are `--x` or `--no-x`, tuples take several values. Read next: config.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re

from nanogrpo.config import Config, dashed
from nanogrpo.errors import UserError


def documentation() -> dict[str, tuple[str, str]]:
    """Field name → (its heading, its comment), read from the source above."""
    heading, out = "", {}
    for line in inspect.getsource(Config).splitlines():
        if found := re.match(r"    # --- (.*)", line):
            heading = found[1]
        elif found := re.match(r"    (\w+): .*?(?:  # (.*))?$", line):
            out[found[1]] = (heading, found[2] or "")
    return out


class _Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise UserError(f"{message[0].upper()}{message[1:]}; see --help for the options.")


def parse(argv: list[str] | None = None) -> Config:
    """The command line as a Config, not yet validated (its values may also come from elsewhere: `Config.validate`).

    Unknown options, and values of the wrong type, raise UserError. Tuples take several values, booleans `--x` or `--no-x`.
    """
    # What is not given is left to the dataclass: one place for the defaults.
    parser = _Parser(description="GRPO, from prompts to a checkpoint.", allow_abbrev=False, argument_default=argparse.SUPPRESS)
    docs, groups = documentation(), {}
    for field in dataclasses.fields(Config):
        heading, text = docs[field.name]
        if heading not in groups:
            groups[heading] = parser.add_argument_group(heading)
        kind, default = str(field.type), field.default
        shown = " ".join(map(str, default)) if isinstance(default, tuple) else default
        how: dict = {"help": (text if shown in ("", None) else f"{text} (default: {shown})").replace("%", "%%")}
        if kind == "bool":
            how["action"] = argparse.BooleanOptionalAction
        elif kind.startswith("tuple"):
            how |= {"nargs": "*", "type": float if "float" in kind else str, "metavar": "X"}
        else:
            how |= {"type": {"int": int, "str": str}.get(kind, float), "metavar": field.name.split("_")[-1].upper()}
        groups[heading].add_argument(f"--{dashed(field.name)}", **how)
    values = vars(parser.parse_args(argv))
    return Config(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})
