"""Read a command line with the options of all extras, also in TRL's spelling and names.

In: argv. Out: the full `Config` of options.py. attach.py uses this file for command lines that the
core alone does not accept. Read before: cli.py. Read next: trl_names.py (what TRL's options
become).
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from nanogrpo import cli
from nanogrpo.config import dashed
from nanogrpo.errors import UserError, read_json, reading
from nanogrpo.extras import trl_names
from nanogrpo.extras.options import FIELDS, Config, layer, rules_of
from nanogrpo.extras.profiles import PROFILES
from nanogrpo.extras.summary import summarize
from nanogrpo.logs.files import read_records
from nanogrpo.logs.progress import print_line


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
    taken: str = "",
) -> Config:
    """Return the options of a command line. The Config is not yet validated (see cli.parse).

    program: the parser of a program other than train.py. The first argument of such a program is
    the model.
    taken: the options that are taken from the run of the model, unless the command line has them.
    Raises UserError for all mistakes of the command line, or all mistakes of the file, at once.
    """
    words = [*(sys.argv[1:] if argv is None else argv)]
    names = set() if program else trl_names.NAMES
    if program and words and not words[0].startswith("-"):
        words = ["--model", *words]
    program = program or cli.parser(Config)
    if "--help-all" in words:
        program.print_help()
        raise SystemExit(0)
    known = [*program._option_string_actions, *(f"--{dashed(name)}" for name in names)]
    notes, given = trl_names.Notes(), {}
    presets: list[str] = []  # --profile and other options that are no fields of Config
    for first, *more in _chunks(words):
        with notes:
            option, equals, value = first.partition("=")
            name = option.removeprefix("--").replace("-", "_")
            values = [value, *more] if equals else more
            if option != name and name in names - trl_names.RENAMED.keys():
                given[name] = _scalars(values)
                continue
            chunk = [first, *more]
            if first.startswith("--"):
                ours = trl_names.RENAMED.get(name, name)
                chunk = _flag(ours, values) or [f"--{dashed(ours)}{equals}{value}", *more]
            found, unknown = program.parse_known_args(chunk)
            for word in unknown[:1]:
                word = option if word == chunk[0] else word
                raise UserError(trl_names.unknown(word.partition("=")[0], known))
            for ours, value in vars(found).items():
                if ours in FIELDS:
                    given[name if name in trl_names.RENAMED else ours] = value
                else:
                    presets += chunk
    given = layer(given, notes)
    if notes.mistakes:
        raise UserError(*notes.mistakes)

    def read(path: Path) -> cli.Options:
        raw = _read_yaml(path) if path.suffix in (".yaml", ".yml") else read_json(path)
        out = layer(raw, notes)
        if notes.mistakes:
            raise UserError(f"{path}: {UserError(*notes.mistakes)}")
        return out

    def translate(of_file: cli.Options) -> cli.Options:
        given.update(cli.over(of_file, given))
        lower = of_run(str(given.get("model")), taken)
        out = trl_names.translate(lower | given, notes)
        notes.finish()
        return out

    cfg = cli.parse(presets, Config, program, profiles=PROFILES, read=read, translate=translate)
    if given.get("eval_strategy") == "steps" and not cfg.eval_steps:  # a profile may set eval_steps
        raise UserError("--eval-strategy steps needs --eval-steps: give a number of steps.")
    return cfg


def of_run(model: str, taken: str) -> cli.Options:
    """Return and print these options of the run that wrote a checkpoint, if its log is there.

    `data` are the held-out prompts of the run. Options with their default values are left out.
    """
    log = Path(model).parent / "metrics.jsonl"
    run = summarize(read_records(log)).options if taken and log.exists() else {}
    if run:
        run |= {"data": run["eval_data"] or run["data"], "output_dir": f"{model}/eval"}
    found = {
        n: v
        for n, v in run.items()
        if n in taken.split() and v not in (None, [], FIELDS[n].default)
    }
    if found:
        print_line(f"options of the run {log.parent}: {json.dumps(found, ensure_ascii=False)}")
    return found


def _chunks(words: Sequence[str]) -> list[list[str]]:
    """Return the options of a command line, each with its values."""
    out: list[list[str]] = []
    for word in words:
        # a value such as "--dtype half" has a space
        if not out or re.fullmatch(r"--[a-zA-Z][\w.-]*(=.*)?", word, re.DOTALL):
            out.append([])
        out[-1].append(word)
    return out


def _flag(name: str, values: list[str]) -> list[str]:
    """Return an option as argparse understands it if TRL writes it in another way: a flag with true
    or false (--resume true), or a flag where we have words. Otherwise, return an empty list.
    """
    kind, rules = rules_of(name)
    word = " ".join(values).lower()
    if kind == "bool" and word in ("true", "false"):
        return [f"--{'no-' * (word == 'false')}{dashed(name)}"]
    return [f"--{dashed(name)}=true"] if "true" in rules.get("words", ()) and not word else []


def _scalars(words: list[str]) -> Any:
    """Return the value of a TRL option, parsed as YAML (such as true, 8 or a string)."""
    values = [yaml.safe_load(w) if re.fullmatch(r"[\w.+-]+", w) else w for w in words]
    return True if not values else values[0] if len(values) == 1 else values


def _read_yaml(path: Path) -> cli.Options:
    with reading(path, advice="correct it"):
        raw = yaml.load(path.read_bytes(), _Loader)
    if not isinstance(raw, dict) or not all(isinstance(name, str) for name in raw):
        raise UserError(f"{path} holds no options: write one `name: value` per line.")
    return raw
