"""The command line of a run, made from the fields of `Config`, and the presets.

    python train.py --profile debug --print-config > debug.json    # print all options as JSON
    python train.py --config debug.json --max-steps 8              # load them and change one

In: argv. Out: a `Config`, not yet validated. The command line overrides the file of --config (JSON
or YAML), the file overrides the profile, and the profile overrides the defaults. TRL's spellings
and names are understood, too (trl_names.py). Read next: config.py.
"""

from __future__ import annotations

import argparse
import difflib
import json
import logging
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import yaml

from nanogrpo import trl_names
from nanogrpo.config import CHOICES, Config, converted, dashed, type_name
from nanogrpo.errors import UserError, read_json

log = logging.getLogger("nanogrpo")
FIELDS = {field.name: field for field in fields(Config)}

DESCRIPTION = """Train a language model with GRPO, from prompts to a checkpoint.

  train.py --profile debug                         the complete loop in seconds
  train.py --profile full --model M --data D       a starting point for your own model
  torchrun --nproc-per-node 8 train.py ...         the same on eight GPUs"""
USAGE = "train.py [--profile NAME] [--config FILE] [options]"

PROFILES: dict[str, dict] = {
    # Try a change in seconds, on two CPU cores. Every part of the loop runs: making a base model,
    # sampling, training, evaluation, checkpoints, logs. The run is too short to learn anything;
    # `make demo` is long enough.
    "debug": {
        # it uses the right format often enough for rewards to differ
        "model": "warmup:60",
        "data": ("arithmetic",),
        "output_dir": "runs/debug",
        "overwrite_output_dir": True,  # because the command is repeated after each change
        "max_steps": 4,
        "num_generations": 8,
        "generation_batch_size": 32,
        "max_concurrent": 32,
        "max_completion_length": 32,
        "learning_rate": 1e-4,  # a tiny model tolerates a high rate
        "eval_steps": 2,
        "eval_samples": 32,
        "save_steps": 2,
        "log_completions": True,
        "num_completions_to_print": 2,
    },
    # Start a real run: a model of 0.5 to 8 billion parameters, on GPUs, with answers that can be
    # verified. The values are common in published runs (DAPO, arXiv:2503.14476; TRL's defaults).
    # They were not tuned here.
    "full": {
        "num_generations": 16,  # so that on hard problems fewer groups have no correct answer
        "generation_batch_size": 512,  # 32 prompts per step
        # four updates of 128 completions per round of sampling; the clip limits the drift
        "steps_per_generation": 4,
        "max_completion_length": 4096,  # room to reason; watch completions/clipped_ratio
        # DAPO's clip-higher: unlikely tokens can become likelier, so entropy falls more slowly
        "epsilon_high": 0.28,
        "learning_rate": 1e-6,  # suitable for training all weights
        "warmup_steps": 20.0,  # AdamW's moments are unreliable during the first updates
        "max_grad_norm": 1.0,
        "max_steps": 500,
        "eval_steps": 25,
        "save_steps": 25,
        "save_total_limit": 3,
        "log_completions": True,  # the first place to look when a reward rises too fast
        "num_completions_to_print": 1,
    },
}


class Command(NamedTuple):
    """Another program than train.py, with some of its options."""

    usage: str  # "nanogrpo chat"
    description: str
    options: Sequence[str]  # names of fields of Config


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message[0].upper()}{message[1:]}; see --help for the options.")


def parser(command: Command | None = None) -> argparse.ArgumentParser:
    """Return a parser of all options, or of those of a command.

    Its result contains only the options that were given.
    """
    usage = f"{command.usage} MODEL [options]" if command else USAGE
    out = _Parser(
        usage=usage,
        description=command.description if command else DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    if command is None:
        _add_presets(out)
    wanted = FIELDS if command is None else command.options
    group: Any = out
    for field in fields(Config):
        if "group" in field.metadata:
            group = out.add_argument_group(field.metadata["group"])
        if field.name not in wanted:
            continue
        kind, default, text = str(field.type), field.default, field.metadata["help"]
        if default not in ("", (), None):
            shown = " ".join(map(str, default)) if isinstance(default, tuple) else default
            text = f"{text} (default: {shown})"
        how: dict[str, Any] = {"help": text.replace("%", "%%")}
        if kind == "bool":
            how["action"] = argparse.BooleanOptionalAction
        else:
            choices = "{" + ",".join(CHOICES.get(field.name, ())) + "}"
            convert, letter = (
                (float, "X") if "float" in kind else (int, "N") if "int" in kind else (str, "TEXT")
            )
            how |= {"type": convert, "metavar": choices if field.name in CHOICES else letter}
            if kind.startswith("tuple"):
                how["nargs"] = "*"
            if kind.startswith("dict"):
                how |= {"type": _json_object, "metavar": "JSON"}
        group.add_argument(f"--{dashed(field.name)}", **how)
    for name in sorted(trl_names.NAMES if command is None else ()):
        out.add_argument(f"--{dashed(name)}", nargs="*", help=argparse.SUPPRESS)
    return out


def _add_presets(out: argparse.ArgumentParser) -> None:
    group = out.add_argument_group("Presets and files")
    text = "preset: debug (the loop in seconds) or full (a real run); other options override it"
    group.add_argument("--profile", metavar="NAME", help=text)
    text = "JSON or YAML file of options, ours or TRL's; explicit options override it"
    group.add_argument("--config", metavar="FILE", help=text)
    text = "print the resolved options as JSON and exit"
    group.add_argument("--print-config", action="store_true", help=text)


def parse(argv: list[str] | None = None, command: Command | None = None) -> Config:
    """Return the command line as a Config that is not yet validated.

    Raises UserError for unknown options and for values of the wrong type. Exits after --help and
    --print-config.
    """
    known, unknown = parser(command).parse_known_args(
        _respelled(sys.argv[1:] if argv is None else argv)
    )
    given = vars(known)
    if unknown:
        names = ["profile", "config", "print_config", *FIELDS, *trl_names.NAMES]
        names = [*command.options] if command else names
        raise UserError(_unknown(unknown[0].split("=")[0], [f"--{dashed(n)}" for n in names]))
    profile, file = given.pop("profile", None), given.pop("config", None)
    print_config = given.pop("print_config", False)
    if profile not in (None, *PROFILES):
        raise UserError(f"--profile is {profile!r}: choose one of {', '.join(PROFILES)}.")
    for name, value in given.items():
        given[name] = _scalars(value) if name in trl_names.NAMES else _translated(name, value)
    if given.get("num_train_epochs") and given.get("max_steps", -1) != -1:
        raise UserError(
            "--num-train-epochs and --max-steps both say how long to train: leave one of them out."
        )
    preset = PROFILES.get(profile, {})
    given = _over(_read(Path(file)) if file is not None else {}, given)
    cfg = Config(**_over(preset, trl_names.translate(given, preset)))
    if print_config:
        cfg.validate()
        print(json.dumps(asdict(cfg), indent=2))
        raise SystemExit(0)
    return cfg


def with_model(argv: list[str] | None) -> list[str]:
    """Return the command line of `nanogrpo chat MODEL` or `eval MODEL` with --model written out."""
    words = sys.argv[1:] if argv is None else argv
    return ["--model", *words] if words and not words[0].startswith("-") else words


def _respelled(argv: Sequence[str]) -> list[str]:
    """Return the command line with TRL's spellings rewritten to ours: underscores, renamed options,
    flags with true or false (--resume true), and options that TRL uses as flags.
    """
    out, words = [], [*argv]
    given: dict[str, str] = {}  # our name → the name that was given
    while words:
        word = words.pop(0)
        option = re.fullmatch(r"--([a-z][\w-]*)(=.*)?", word, re.DOTALL)
        name, value = (option[1].replace("-", "_"), option[2] or "") if option else ("", "")
        known = {*FIELDS, *trl_names.NAMES, "profile", "config", "print_config"}
        if not known & {name, name.removeprefix("no_")}:
            out.append(word)
            continue
        theirs, name = name, _renamed(name)
        if given.setdefault(name, theirs) != theirs:
            raise UserError(
                f"--{dashed(theirs)} is given twice, also as --{dashed(given[name])}: leave one of"
                " them out."
            )
        following = words[0] if words else "--"
        rules = FIELDS[name].metadata if name in FIELDS else {}
        if name in FIELDS and FIELDS[name].type == "bool":
            wanted = (value[1:] or following).lower()
            if wanted in ("true", "false"):
                words = words if value else words[1:]
                name, value = name if wanted == "true" else f"no_{name}", ""
        elif "true" in rules.get("words", ()) and not value and following.startswith("--"):
            value = "=true"
        out.append(f"--{dashed(name)}{value}")
    return out


def _renamed(name: str) -> str:
    """Return our name for a renamed option of TRL; any other name is returned unchanged."""
    ours = trl_names.RENAMED.get(name, name)
    if ours != name:
        log.info("--%s: taken as --%s", dashed(name), dashed(ours))
    return ours


def _translated(name: str, value: Any) -> Any:
    """Return our word for a value, such as none for --scale-rewards false. A list becomes a tuple,
    as in `Config`.
    """
    words = FIELDS[name].metadata.get("words", {})
    if isinstance(value, (str, bool)) and (ours := words.get(str(value).lower())):
        log.info("--%s %s: taken as %s", dashed(name), value, ours)
        return ours
    return tuple(value) if isinstance(value, list) else value


def _scalars(words: list[str]) -> Any:
    """Return the value of an option of TRL, read as YAML would: true, 8, 1e-6, or a text."""
    values = [
        yaml.load(word, _Loader) if re.fullmatch(r"[\w.+-]+", word) else word for word in words
    ]
    return True if not values else values[0] if len(values) == 1 else values


def _over(lower: dict[str, Any], upper: dict[str, Any]) -> dict[str, Any]:
    """Return the options of two layers. The length of the run is one decision: if the upper layer
    gives epochs or steps, it overrides both.
    """
    length = {"num_train_epochs", "max_steps"}
    dropped = length if any(upper.get(name) for name in length) else set()
    return {name: value for name, value in lower.items() if name not in dropped} | upper


def _unknown(name: str, known: Iterable[str]) -> str:
    """Return the message for an unknown option, with the most similar known one."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    advice = f"use {near[0]}, or see --help" if near else "see --help for the options"
    return f"{name} is not an option: {advice}."


def _json_object(text: str) -> dict[str, Any]:
    """Return the object that a JSON text on the command line stands for."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON object such as '{{\"a\": true}}'")
    return value


def _read(path: Path) -> dict[str, Any]:
    """Return the options in a JSON or YAML file, with the types of `Config`. TRL's are included
    unchanged.
    """
    try:
        raw = _read_yaml(path) if path.suffix in (".yaml", ".yml") else read_json(path)
    except UserError as e:
        raise UserError(f"--config {e}") from e
    out: dict[str, Any] = {}
    for given, value in raw.items():
        if value is None and given in trl_names.NAMES:
            continue
        name = _renamed(given)
        if name in out:
            raise UserError(f"--config {path}: {name} is given twice, also as {given}: remove one.")
        if name in trl_names.NAMES:
            out[name] = value
            continue
        if name not in FIELDS:
            raise UserError(f"--config {path}: {_unknown(name, [*FIELDS, *trl_names.NAMES])}")
        try:
            out[name] = _typed(name, _translated(name, value), listed=name != given)
        except (TypeError, OverflowError):
            wanted = type_name(str(FIELDS[name].type), "null")
            shown = json.dumps(value, default=str)
            raise UserError(f"--config {path}: {name} is {shown} but must be {wanted}.") from None
    return out


class _Loader(yaml.SafeLoader):
    """YAML 1.2 for words and numbers: only true and false are truth values (PyYAML also reads no,
    off and so on as such, and off is the name of a mode here), and 1e-6 is a number.
    """


_Loader.yaml_implicit_resolvers = {
    first: [(tag, rule) for tag, rule in rules if not tag.endswith((":bool", ":float"))]
    for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"true|True|TRUE|false|False|FALSE"), list("tTfF")
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(\.\d+|\d+\.\d*|\d+(?=[eE]))([eE][-+]?\d+)?$|[-+]?\.(inf|nan)$"),
    list("-+.0123456789"),
)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        raw = yaml.load(path.read_bytes(), _Loader)
    except FileNotFoundError:
        raise UserError(f"{path} is missing: check the path.") from None
    # unreadable, not YAML, or nested too deeply
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as e:
        problem = " ".join(str(e).split())
        raise UserError(f"{path} is not valid YAML ({problem}): correct it.") from e
    if not isinstance(raw, dict) or not all(isinstance(name, str) for name in raw):
        raise UserError(f"{path} holds no options: write one `name: value` per line.")
    return raw


def _typed(name: str, value: Any, listed: bool = False) -> Any:
    """Return the value of a file in the form that the field takes, or raise TypeError. A single
    text stands for a list if TRL's option takes one text (`listed`), or if the choices are known.
    Null stands for the default: files for TRL may list every option.
    """
    if value is None:
        return FIELDS[name].default
    kind = str(FIELDS[name].type)
    if kind.startswith("tuple") and isinstance(value, str) and (listed or name in CHOICES):
        value = (value,)
    return converted(kind, value)
