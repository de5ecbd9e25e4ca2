"""Read a command line with the options of all extras. TRL's names and spelling are accepted, too.

In: argv. Out: the full `Config` of options.py. The file attach.py uses it for command lines that
the core alone does not accept. Read before: cli.py. Read next: trl_names.py (the options that
replace TRL's options).
"""

import argparse
import contextlib
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from nanogrpo import cli
from nanogrpo.config import dashed
from nanogrpo.errors import UserError, reading
from nanogrpo.extras import trl_names
from nanogrpo.extras.options import FIELDS, Config, layer, rules_of
from nanogrpo.extras.profiles import PROFILES
from nanogrpo.extras.summary import summarize
from nanogrpo.logs.files import read_records
from nanogrpo.logs.progress import print_line


class _Loader(yaml.SafeLoader):
    """PyYAML's loader, which TRL uses, too. There are two changes: 1e-6 is always a number, and no
    name may occur twice.

    The loader reads YAML 1.1, in which 010 is 8.
    """

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        cli.once([(key.value, None) for key, _ in node.value])
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), "-+.0123456789"
)


def parse(
    argv: Sequence[str] | None = None,
    program: argparse.ArgumentParser | None = None,
    taken: str = "",
    kind: type[Config] = Config,
) -> Config:
    """Return the options of a command line. The Config is not yet validated (see cli.parse).

    `program` is the parser of a program other than train.py. The first argument of such a program
    is the model. The options in `taken` get the values of the model's run, unless the command line
    has them. `kind` is the class of the options (extras/recipe.py).
    Raises one UserError for all mistakes of the command line, or for all mistakes of the file.
    """
    words = [*(sys.argv[1:] if argv is None else argv)]
    names = set() if program else trl_names.NAMES
    if program and words and not words[0].startswith("-"):
        words = ["--model", *words]
    program = program or cli.parser(kind)
    if {"-h", "--help", "--help-all"} & {*words}:
        program.print_help()
        raise SystemExit(0)
    ours = {action.dest for action in program._actions}
    known = [f"--{dashed(name)}" for name in (*ours, *names)]
    notes, given = trl_names.Notes(), cli.Options()
    presets: cli.Options = {}  # --profile and other options that are not fields of Config
    for first, *more in _chunks(words):
        with notes.mistake():
            option, equals, value = first.partition("=")
            values = [value, *more] if equals else more
            name = option.removeprefix("--").replace("-", "_")
            if name.startswith("no_") and rules_of(name[3:], kind)[0] == "bool":
                name, values = name[3:], [*values, "false"]
            if not first.startswith("--") or name not in ours | names:
                raise UserError(trl_names.unknown(option, known))
            to = given if name in kind.__dataclass_fields__.keys() | names else presets
            to[name] = _typed(name, values, kind)
    given = layer(given, notes, kind)
    notes.check()

    def read(path: Path) -> cli.Options:
        raw = _read_yaml(path) if path.suffix in (".yaml", ".yml") else cli.read_options(path)
        out = layer(raw, notes, kind)
        notes.check(f"{path}: ")
        return out

    def translate(options: cli.Options) -> cli.Options:
        given.update(options)
        out = trl_names.translate(of_run(str(given.get("model")), taken) | options, notes)
        notes.finish()
        return out

    cfg = cli.resolve(presets | given, kind, PROFILES, read, translate)
    if given.get("eval_strategy") == "steps" and not cfg.eval_steps:  # a profile may set eval_steps
        raise UserError("--eval-strategy steps needs --eval-steps: give a number of steps.")
    return cfg


def of_run(model: str, taken: str) -> cli.Options:
    """Return the options of the run that wrote a checkpoint, or none if the log of the run is
    missing. Rank 0 also prints the options.

    `taken` has the names of the wanted options. `data` are the held-out prompts of the run. Options
    that have their default value are left out.
    """
    log = Path(model).parent / "metrics.jsonl"
    if taken and log.exists() and not Path(model).exists():
        runs = f"`nanogrpo runs {log.parent}` shows the checkpoint to use"
        raise UserError(f"{model} does not exist: {runs}.")
    run = summarize(read_records(log)).options if taken and log.exists() else {}
    if run:
        run |= {"data": run["eval_data"] or run["data"], "output_dir": f"{model}/eval"}
    found = {
        n: v
        for n, v in run.items()
        if n in taken.split()
        and v not in (None, [], FIELDS[n].default)
        and "from Python" not in str(v)  # a function or data that cannot be named by an option
    }
    if found and os.environ.get("RANK", "0") == "0":
        print_line(f"options of the run {log.parent}: {json.dumps(found, ensure_ascii=False)}")
    return found


def _chunks(words: list[str]) -> list[list[str]]:
    """Return the options of a command line, each with its values."""
    out: list[list[str]] = []
    for word in words:
        # a value such as "--dtype half" has a space
        if not out or re.fullmatch(r"--[a-zA-Z][\w.-]*(=.*)?", word, re.DOTALL):
            out.append([])
        out[-1].append(word)
    return out


def _typed(name: str, words: list[str], options: type[Config]) -> Any:
    """Return the value of an option. An option without a value is a flag."""
    kind, _ = rules_of(trl_names.RENAMED.get(name, name), options)
    values = [_parsed(kind, word) for word in words]
    if kind.startswith("tuple") or (len(words) > 1 and name in trl_names.NAMES):
        return values
    for word in words[1:]:
        raise UserError(trl_names.unknown(word.partition("=")[0]))
    return (values or [True])[0]


def _parsed(kind: str, word: str) -> Any:
    """Convert `word` to the type `kind`. If this fails, return `word` unchanged: `layer` then
    reports the mistake. An option that exists only in TRL has no type, so its value is read as
    YAML.
    """
    read: dict[str, Callable] = {"s": str, "i": int, "f": float, "d": json.loads}
    with contextlib.suppress(ValueError, yaml.YAMLError):
        return word and read.get(kind.removeprefix("tuple[")[:1], yaml.safe_load)(word)
    return word


def _read_yaml(path: Path) -> cli.Options:
    with reading(path, advice="correct it"):
        raw = yaml.load(path.read_bytes(), _Loader)
    if not isinstance(raw, dict) or not all(isinstance(name, str) for name in raw):
        raise UserError(f"{path} holds no options: write one `name: value` per line.")
    return raw
