"""Read a command line with the options of all extras, also in TRL's spelling and names.

In: argv. Out: the full `Config` of options.py. attach.py uses this file for command lines that the
core alone does not accept. Read before: cli.py. Read next: trl_names.py (what TRL's options
become).
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import sys
from collections.abc import Container, Sequence
from pathlib import Path
from typing import Any

import yaml

from nanogrpo import cli
from nanogrpo.config import dashed
from nanogrpo.errors import UserError, read_json, reading
from nanogrpo.extras import trl_names
from nanogrpo.extras.options import CHOICES, FIELDS, REMOVED, Config
from nanogrpo.extras.profiles import PROFILES
from nanogrpo.extras.summary import summarize
from nanogrpo.logs.files import read_records
from nanogrpo.logs.progress import print_line

logger = logging.getLogger("nanogrpo")


class _Loader(yaml.SafeLoader):
    """PyYAML's loader, which TRL uses, too, with one change: 1e-6 is a number everywhere.

    The loader reads YAML 1.1, in which 010 is 8.
    """


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
    "-+.0123456789",
)


def parse(
    argv: Sequence[str] | None = None,
    program: argparse.ArgumentParser | None = None,
    taken: Container[str] = (),
) -> Config:
    """Return the options of a command line. The Config is not yet validated (see cli.parse).

    program: the parser of a program other than train.py. The first argument of such a program is
    the model.
    taken: the options that are taken from the run of the model, unless the command line has them.
    """
    words = [*(sys.argv[1:] if argv is None else argv)]
    names = set() if program else trl_names.NAMES
    if program and words and not words[0].startswith("-"):
        words = ["--model", *words]
    program = program or cli.parser(Config)
    words = _respelled(words)
    if "--help-all" in words:
        program.print_help()
        raise SystemExit(0)
    theirs = argparse.ArgumentParser(
        add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS
    )
    for name in names:
        theirs.add_argument(f"--{dashed(name)}", nargs="*")
    found, words = theirs.parse_known_args(words)
    given = {name: _scalars(value) for name, value in vars(found).items()}

    def translate(ours: cli.Options) -> cli.Options:
        lower = of_run(str(ours.get("model")), taken)
        ours = lower | {name: _translated(name, value) for name, value in ours.items()}
        given.update(ours | given)
        return trl_names.translate(given)

    cfg = cli.parse(
        words, Config, program, names=names, profiles=PROFILES, read=_read, translate=translate
    )
    if given.get("eval_strategy") == "steps" and not cfg.eval_steps:  # a profile may set eval_steps
        raise UserError("--eval-strategy steps needs --eval-steps: give a number of steps.")
    return cfg


def of_run(model: str, taken: Container[str]) -> cli.Options:
    """Return and print these options of the run that wrote a checkpoint, if its log is there.

    `data` are the held-out prompts of the run. Options with their default values are left out.
    """
    log = Path(model).parent / "metrics.jsonl"
    run = summarize(read_records(log)).options if taken and log.exists() else {}
    if run:
        run |= {"data": run["eval_data"] or run["data"], "output_dir": f"{model}/eval"}
    found = {n: v for n, v in run.items() if n in taken and v not in (None, [], FIELDS[n].default)}
    if found:
        print_line(f"options of the run {log.parent}: {json.dumps(found, ensure_ascii=False)}")
    return found


def _respelled(argv: Sequence[str]) -> list[str]:
    """Return the command line with TRL's spellings replaced by ours. TRL's spellings are
    underscores, renamed options, flags with true or false (--resume true), and options that TRL
    uses as flags.
    """
    out, words = [], [*argv]
    spelled: dict = {}  # for each option, its first spelling
    while words:
        word = words.pop(0)
        option = re.fullmatch(r"--([a-z][\w-]*)(=.*)?", word, re.DOTALL)
        theirs = option[1].replace("-", "_") if option else ""
        if removed := REMOVED.get(theirs.removeprefix("no_")):
            raise UserError(f"--{dashed(theirs)} was removed: {removed}.")
        known = {*FIELDS, *trl_names.NAMES, "profile", "config", "print_config"}
        if not option or not known & {theirs, theirs.removeprefix("no_")}:
            out.append(word)
            continue
        name, value = _renamed(theirs), option[2] or ""
        if (other := spelled.setdefault(name, theirs)) != theirs:
            raise UserError(f"--{dashed(other)} and --{dashed(theirs)} are the same: remove one.")
        following = value[1:] or (words[0] if words else "--")
        if _type(name) == "bool" and following.lower() in ("true", "false"):
            words = words if value else words[1:]
            name, value = name if following.lower() == "true" else f"no_{name}", ""
        elif "true" in _words(name) and following.startswith("--"):
            value = "=true"
        out.append(f"--{dashed(name)}{value}")
    return out


def _type(name: str) -> str:
    """Return the type of an option, or "" if there is no such option."""
    return str(FIELDS[name].type) if name in FIELDS else ""


def _words(name: str) -> dict[str, str]:
    """Return a dict that maps other spellings of an option's values to ours."""
    return FIELDS[name].metadata.get("words", {}) if name in FIELDS else {}


def _renamed(name: str) -> str:
    """Return our name for a renamed option of TRL; any other name is returned unchanged."""
    ours = trl_names.RENAMED.get(name, name)
    if ours != name:
        logger.info("--%s: taken as --%s", dashed(name), dashed(ours))
    return ours


def _translated(name: str, value: Any) -> Any:
    """Return our word for a value, such as none for --scale-rewards false."""
    if isinstance(value, (str, bool)) and (ours := _words(name).get(str(value).lower())):
        logger.info("--%s %s: taken as %s", dashed(name), value, ours)
        return ours
    return value


def _scalars(words: list[str]) -> Any:
    """Return the value of a TRL option, parsed as YAML (such as true, 8 or a string)."""
    values = [yaml.safe_load(w) if re.fullmatch(r"[\w.+-]+", w) else w for w in words]
    return True if not values else values[0] if len(values) == 1 else values


def _read(path: Path) -> cli.Options:
    """Return the options in a JSON or YAML file, with TRL's names replaced by ours if possible."""
    raw = _read_yaml(path) if path.suffix in (".yaml", ".yml") else read_json(path)
    out: cli.Options = {}
    for given, value in raw.items():
        if value is None and (given in trl_names.NAMES or given in REMOVED):
            continue  # files for TRL may list every option
        name = _renamed(given)
        if name in REMOVED:
            raise UserError(f"{path}: {name} was removed: {REMOVED[name]}.")
        if name in out:
            raise UserError(f"{path}: {name} is given twice, also as {given}: remove one.")
        # where TRL's option takes one string, ours may take several
        several = _type(name).startswith("tuple") and (name != given or name in CHOICES)
        if isinstance(value, str) and several:
            value = [value]
        out[name] = value
    return out


def _read_yaml(path: Path) -> cli.Options:
    with reading(path, advice="correct it"):
        raw = yaml.load(path.read_bytes(), _Loader)
    if not isinstance(raw, dict) or not all(isinstance(name, str) for name in raw):
        raise UserError(f"{path} holds no options: write one `name: value` per line.")
    return raw
