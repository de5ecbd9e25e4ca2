"""The command line of a run, made from the fields of `Config`.

    python train.py --profile debug --print-config > debug.json    # print all options as JSON
    python train.py --config debug.json --max-steps 8              # load them and change one

In: argv. Out: a `Config` that is not yet validated. The options on the command line override the
file of `--config`, the file overrides the profile, and the profile overrides the defaults. Read
next: config.py.
"""

import argparse
import functools
import json
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from nanogrpo.config import Config, dashed
from nanogrpo.errors import UserError, read_json, without_nulls

DESCRIPTION = """Train a language model with GRPO, from prompts to a checkpoint.

  train.py --profile debug                         the complete loop in seconds
  train.py --profile full --model M --data D       a starting point for your own model
  torchrun --nproc-per-node 8 train.py ...         the same on eight GPUs"""

C = TypeVar("C", bound=Config)
Options = dict[str, Any]  # by name

SUMS = Path(__file__).parent / "data" / "sums"  # a tiny model that adds and subtracts
# The preset of --profile debug. This preset tests a code change in seconds on two CPU cores.
# Every part of the loop runs: sampling, training, evaluation, checkpoints, logs.
# The run is too short to learn much; use `make demo` to see a model learn.
DEBUG: Options = {
    "model": f"{SUMS}/base",
    "data": (f"{SUMS}/train.jsonl",),
    "eval_data": (f"{SUMS}/held_out.jsonl",),
    "output_dir": "runs/debug",
    "overwrite_output_dir": True,  # short, because the preset is run after each code change
    "max_steps": 4,
    "num_generations": 8,
    "generation_batch_size": 32,
    "max_concurrent": 32,
    "max_completion_length": 32,
    "learning_rate": 1e-4,  # a tiny model tolerates a high learning rate
    "eval_steps": 2,
    "save_steps": 2,
}
PROFILES = {"debug": DEBUG}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message[0].upper()}{message[1:]}; see --help for the options.")


def parser(
    kind: type[Config],
    options: Container[str] | None = None,
    usage: str = "train.py [--profile NAME] [--config FILE] [options]",
    description: str = DESCRIPTION,
    epilog: str = "",
) -> argparse.ArgumentParser:
    """Return a parser for the options of a Config class.

    `options` names the options that the parser accepts. If `options` is None, the parser accepts
    all options and the presets, as in train.py. The result of parsing contains only the options
    that were given. With an `epilog`, the help has about one line per option.
    """
    out = _Parser(
        usage=usage,
        description=description,
        epilog=epilog,
        formatter_class=functools.partial(
            argparse.RawDescriptionHelpFormatter, max_help_position=30, width=100
        ),
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    group: Any = out
    if options is None:
        group = out.add_argument_group("Presets and files")
        text = "preset: debug (the loop in seconds) or full (a real run); other options override it"
        group.add_argument("--profile", metavar="NAME", help=text)
        text = "file of options, as --print-config writes it; explicit options override it"
        group.add_argument("--config", metavar="FILE", help=text)
        text = "print the resolved options as JSON and exit"
        group.add_argument("--print-config", action="store_true", help=text)
    for field in fields(kind):
        rules = field.metadata
        if "group" in rules:
            group = out.add_argument_group(rules["group"])
        if options is not None and field.name not in options:
            continue
        default, text = field.default, rules["help"]
        if epilog:  # keeps only the text before the first semicolon
            text = text.partition(";")[0]
        if default not in ("", (), None):
            shown = " ".join(map(str, default)) if isinstance(default, tuple) else default
            text = f"{text} (default: {shown})"
        how = {"help": text.replace("%", "%%"), **_reading(str(field.type))}
        if "choices" in rules:
            how["metavar"] = "{" + ",".join(rules["choices"]) + "}"
        group.add_argument(f"--{dashed(field.name)}", **how)
    return out


def _reading(kind: str) -> dict[str, Any]:
    """Return the arguments of argparse's `add_argument` for a field of this type."""
    if kind == "bool":
        return {"action": argparse.BooleanOptionalAction}
    if kind.startswith("dict"):
        return {"type": json_object, "metavar": "JSON"}
    how: dict[str, Any] = {"metavar": "TEXT"}
    if "float" in kind:
        how = {"type": float, "metavar": "X"}
    elif "int" in kind:
        how = {"type": int, "metavar": "N"}
    return how | {"nargs": "*"} if kind.startswith("tuple") else how


def parse(argv: Sequence[str] | None, kind: type[C], program: argparse.ArgumentParser) -> C:
    """Parse the command line into a Config of class `kind`, without validating it.

    Raises UserError for unknown options and for values of the wrong type. The options `--help` and
    `--print-config` end the program. `program` is a parser made by `parser`.
    """
    known, unknown = program.parse_known_args(argv)
    if unknown:
        raise UserError(f"{unknown[0]} is not an option.")
    return resolve(vars(known), kind)


def once(pairs: list[tuple[str, Any]]) -> Options:
    """Return the options of a file as a dict. Raises ValueError if an option occurs twice."""
    out: Options = {}
    for name, value in pairs:
        if name in out:
            raise ValueError(f"{name} is given twice")
        out[name] = value
    return out


read_options = functools.partial(read_json, object_pairs_hook=once)


def resolve(
    given: Options,
    kind: type[C],
    profiles: Mapping[str, Options] = PROFILES,
    read: Callable[[Path], Options] = read_options,
    translate: Callable[[Options], Options] = lambda given: given,
) -> C:
    """Return the Config of the given options, which may include a profile and a file.

    `profiles` maps names to presets. `read` returns the options in a file. `translate` replaces
    options that `kind` does not have.
    """
    profile, file = given.pop("profile", None), given.pop("config", None)
    print_config = given.pop("print_config", False)
    if profile not in (None, *profiles):
        raise UserError(f"--profile is {profile!r}: choose one of {', '.join(profiles)}.")
    try:
        from_file = {} if file is None else read(Path(str(file)))
    except UserError as e:
        raise UserError(f"--config {e}") from e
    chosen = _over(profiles.get(profile, {}), translate(_over(from_file, given)))
    for name in chosen.keys() - {field.name for field in fields(kind)}:
        raise UserError(f"{name} is not an option.")
    # in a file, null stands for the default
    cfg = kind(**without_nulls(chosen))
    if print_config:
        cfg.validate()
        print(json.dumps(asdict(cfg), indent=2))
        raise SystemExit(0)
    return cfg


def _over(lower: Options, upper: Options) -> Options:
    """Merge two layers of options. An option in `upper` overrides the same option in `lower`.

    The epochs and the steps both set the length of a run. So if `upper` sets one of them, both are
    dropped from `lower`.
    """
    length = {"num_train_epochs", "max_steps"}
    dropped = length if any(upper.get(name) for name in length) else set()
    return {name: value for name, value in lower.items() if name not in dropped} | upper


def json_object(text: str) -> Any:  # argparse shows this name in its error message
    return json.loads(text)
