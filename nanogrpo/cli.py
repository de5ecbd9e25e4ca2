"""The command line, made from the options: a flag a field of `Config`, its comment as the help, its
heading as the group.

    python train.py --profile debug --print-config > debug.json       # all options as one JSON object, validated; nothing is run
    python train.py --config debug.json --max-steps 8                 # read back, with one changed

In: argv. Out: a `Config`, not yet validated. The command line goes before the file of --config,
that before the profile, and that before the defaults. Booleans are `--x` or `--no-x`, tuples take
several values. Read next: config.py, profiles.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import re
import shutil
from pathlib import Path

from nanogrpo.config import Config, dashed
from nanogrpo.errors import UserError
from nanogrpo.profiles import PROFILES

DESCRIPTION = """GRPO, from prompts to a checkpoint.

  train.py --profile debug                         the whole loop in seconds
  train.py --profile full --model M --data D       a start for your own model
  torchrun --nproc-per-node 8 train.py ...         the same on eight GPUs"""


def documentation() -> dict[str, tuple[str, str]]:
    """Field name → (its heading, its comment), read from the source of `Config`."""
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


class _Help(argparse.RawDescriptionHelpFormatter):
    """Options to the left, their comments in a column beside them; never wider than can be read."""

    def __init__(self, prog: str):
        width = min(shutil.get_terminal_size().columns, 130)
        super().__init__(prog, max_help_position=36 if width >= 110 else 24, width=width - 2)


def parser() -> argparse.ArgumentParser:
    # What is not given is left out: so one place has the defaults, and a profile or a file can come
    # in between.
    out = _Parser(
        usage="train.py [--profile NAME] [--config FILE] [options]",
        description=DESCRIPTION,
        formatter_class=_Help,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    command = out.add_argument_group("all options at once")
    text = "a preset: debug (the whole loop in seconds, from nothing) or full (a real run); what else is given goes before it"
    command.add_argument("--profile", metavar="NAME", help=text)
    text = "options from JSON, as --print-config writes it; the command line goes before it"
    command.add_argument("--config", metavar="FILE", help=text)
    command.add_argument(
        "--print-config", action="store_true", help="print the resolved options as JSON, and end"
    )
    docs, groups = documentation(), {}
    for field in dataclasses.fields(Config):
        heading, text = docs[field.name]
        if heading not in groups:
            groups[heading] = out.add_argument_group(heading)
        kind, default = str(field.type), field.default
        shown = " ".join(map(str, default)) if isinstance(default, tuple) else default
        how: dict = {
            "help": (text if shown in ("", None) else f"{text} (default: {shown})").replace(
                "%", "%%"
            )
        }
        if kind == "bool":
            how["action"] = argparse.BooleanOptionalAction
        elif kind.startswith("tuple"):
            how |= {"nargs": "*", "type": float if "float" in kind else str, "metavar": "X"}
        else:
            how |= {
                "type": {"int": int, "str": str}.get(kind.removesuffix(" | None"), float),
                "metavar": field.name.split("_")[-1].upper(),
            }
        groups[heading].add_argument(f"--{dashed(field.name)}", **how)
    return out


def parse(argv: list[str] | None = None) -> Config:
    """The command line as a Config, not yet validated (its values may also come from elsewhere:
    `Config.validate`).

    Unknown options, and values of the wrong type, raise UserError. --help and --print-config end
    the program here.
    """
    given = vars(parser().parse_args(argv))
    profile, file, print_config = (
        given.pop("profile", None),
        given.pop("config", None),
        given.pop("print_config", False),
    )
    if profile is not None and profile not in PROFILES:
        raise UserError(f"--profile is {profile!r}: choose one of {', '.join(PROFILES)}.")
    values = {
        **PROFILES.get(profile, {}),
        **(read(Path(file)) if file is not None else {}),
        **given,
    }
    cfg = Config(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})
    if print_config:
        cfg.validate()
        print(json.dumps(dataclasses.asdict(cfg), indent=2))
        raise SystemExit(0)
    return cfg


def read(path: Path) -> dict:
    """The options in a file of --config, as they are in `Config`."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise UserError(
            f"--config {path} cannot be read ({e.strerror}): name a file of --print-config."
        ) from e
    except (ValueError, RecursionError) as e:  # not JSON, or not UTF-8, or brackets without end
        raise UserError(f"--config {path} is not JSON ({e}): name a file of --print-config.") from e
    if not isinstance(raw, dict):
        raise UserError(f"--config {path} holds no JSON object: name a file of --print-config.")
    kinds = {field.name: str(field.type) for field in dataclasses.fields(Config)}
    for name, value in raw.items():
        if name not in kinds:
            raise UserError(
                f"--config {path}: there is no option {name!r}; see --help for the options."
            )
        raw[name] = _typed(kinds[name], value)
        if raw[name] is ...:
            raise UserError(
                f"--config {path}: {name} is {json.dumps(value)} but must be {wanted(kinds[name])}."
            )
    return raw


TYPES = {
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "str": "a text",
    "tuple[str, ...]": "a list of texts",
    "tuple[float, ...]": "a list of numbers",
}


def wanted(kind: str) -> str:
    """A field's type in words: "float | None" → "a number or null"."""
    return TYPES[kind.removesuffix(" | None")] + (" or null" if kind.endswith(" | None") else "")


def _typed(kind: str, value):
    """A value of JSON as a field's type wants it, or ... where it does not fit."""
    if kind.endswith(" | None"):
        return None if value is None else _typed(kind.removesuffix(" | None"), value)
    if kind.startswith("tuple"):
        items = (
            [_typed(kind[len("tuple[") : -len(", ...]")], v) for v in value]
            if isinstance(value, list)
            else [...]
        )
        return ... if ... in items else tuple(items)
    if kind == "float" and type(value).__name__ == "int":
        return float(value) if abs(value) < 2**1000 else ...
    # the type itself: to isinstance, True would be an int
    return value if type(value).__name__ == kind else ...
