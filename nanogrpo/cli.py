"""The command line of a run, made from the fields of `Config`, and the presets.

    python train.py --profile debug --print-config > debug.json    # print all options as JSON
    python train.py --config debug.json --max-steps 8              # load them and change one

In: argv. Out: a `Config`, not yet validated. The command line overrides the file of --config, the
file overrides the profile, and the profile overrides the defaults. Read next: config.py.
"""

from __future__ import annotations

import argparse
import difflib
import json
from collections.abc import Iterable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, NoReturn

from nanogrpo.config import CHOICES, Config, dashed
from nanogrpo.errors import UserError, read_json

DESCRIPTION = """Train a language model with GRPO, from prompts to a checkpoint.

  train.py --profile debug                         the complete loop in seconds
  train.py --profile full --model M --data D       a starting point for your own model
  torchrun --nproc-per-node 8 train.py ...         the same on eight GPUs"""

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
        "warmup_steps": 20,  # AdamW's moments are unreliable during the first updates
        "max_grad_norm": 1.0,
        "max_steps": 500,
        "token_budget": 32768,  # a strip contains as many completions as fit
        "gradient_checkpointing": "selective",  # keep matrix products, recompute the rest
        "max_concurrent": 256,  # only for the local engine; a vLLM server decides for itself
        "eval_steps": 25,
        "save_steps": 25,
        "save_total_limit": 3,
        "log_completions": True,  # the first place to look when a reward rises too fast
        "num_completions_to_print": 1,
    },
}

# How to name the types of `Config` in an error message.
TYPES = {
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "str": "a string",
    "tuple[str, ...]": "a list of strings",
    "tuple[float, ...]": "a list of numbers",
    "dict[str, Any]": "an object",
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message[0].upper()}{message[1:]}; see --help for the options.")


def parser() -> argparse.ArgumentParser:
    """Return a parser of all options. Its result contains only the options that were given."""
    out = _Parser(
        usage="train.py [--profile NAME] [--config FILE] [options]",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    group = out.add_argument_group("Presets and files")
    text = "preset: debug (the loop in seconds) or full (a real run); other options override it"
    group.add_argument("--profile", metavar="NAME", help=text)
    text = "JSON file of options, as written by --print-config; explicit options override it"
    group.add_argument("--config", metavar="FILE", help=text)
    text = "print the resolved options as JSON and exit"
    group.add_argument("--print-config", action="store_true", help=text)
    for field in fields(Config):
        if "group" in field.metadata:
            group = out.add_argument_group(field.metadata["group"])
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
                (float, "X") if "float" in kind else (int, "N") if kind == "int" else (str, "TEXT")
            )
            how |= {"type": convert, "metavar": choices if field.name in CHOICES else letter}
            if kind.startswith("tuple"):
                how["nargs"] = "*"
            if kind.startswith("dict"):
                how |= {"type": _json_object, "metavar": "JSON"}
        group.add_argument(f"--{dashed(field.name)}", **how)
    return out


def parse(argv: list[str] | None = None) -> Config:
    """Return the command line as a Config that is not yet validated.

    Raises UserError for unknown options and for values of the wrong type. Exits after --help and
    --print-config.
    """
    known, unknown = parser().parse_known_args(argv)
    given = vars(known)
    if unknown:
        names = ["profile", "config", "print-config", *(dashed(f.name) for f in fields(Config))]
        raise UserError(_unknown(unknown[0].split("=")[0], [f"--{name}" for name in names]))
    profile, file = given.pop("profile", None), given.pop("config", None)
    print_config = given.pop("print_config", False)
    if profile not in (None, *PROFILES):
        raise UserError(f"--profile is {profile!r}: choose one of {', '.join(PROFILES)}.")
    options: dict[str, Any] = dict(PROFILES.get(profile, {}))
    if file is not None:
        options |= _read(Path(file))
    for name, value in given.items():
        options[name] = tuple(value) if isinstance(value, list) else value
    cfg = Config(**options)
    if print_config:
        cfg.validate()
        print(json.dumps(asdict(cfg), indent=2))
        raise SystemExit(0)
    return cfg


def _unknown(name: str, known: Iterable[str]) -> str:
    """Return the message for an unknown option, with the most similar known one."""
    near = difflib.get_close_matches(name, known, n=1)
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
    """Return the options in a JSON file, with the types of `Config`."""
    try:
        raw = read_json(path)
    except UserError as e:
        raise UserError(f"--config {e}") from e
    kinds = {field.name: str(field.type) for field in fields(Config)}
    for name, value in raw.items():
        if name not in kinds:
            raise UserError(f"--config {path}: {_unknown(name, kinds)}")
        try:
            raw[name] = _typed(kinds[name], value)
        except (TypeError, OverflowError):
            kind, _, null = kinds[name].partition(" | ")
            wanted = TYPES[kind] + (" or null" if null else "")
            raise UserError(
                f"--config {path}: {name} is {json.dumps(value)} but must be {wanted}."
            ) from None
    return raw


def _typed(kind: str, value: Any) -> Any:
    """Return a JSON value in the form that a field of this type takes, or raise TypeError."""
    if value is None and kind.endswith(" | None"):
        return None
    if kind.startswith("tuple") and isinstance(value, list):
        return tuple(_typed(kind[len("tuple[") : -len(", ...]")], item) for item in value)
    if kind.startswith("dict") and isinstance(value, dict):
        return value
    # compare names because isinstance(True, int) is true
    if kind.startswith("float") and type(value).__name__ in ("int", "float"):
        return float(value)
    if type(value).__name__ != kind:
        raise TypeError
    return value
