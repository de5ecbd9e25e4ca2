"""Train from Python or a notebook, with functions and data as objects.

    from nanogrpo import Config, train

    def brevity(completion_ids, **kwargs):
        return [-len(ids) / 1000 for ids in completion_ids]

    rows = train(
        Config(model="Qwen/Qwen3-0.6B", max_steps=20),
        reward_funcs=["accuracy", brevity],
        train_dataset=[{"question": "What is 3+4?", "answer": "7"}, …],  # or a datasets.Dataset
    )
    print(rows[-1]["reward"])

In: options, and Python objects that replace names in them. Out: the records of metrics.jsonl, one
dict per step or evaluation; the run also writes its usual files. Read next: train.py (the loop).
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import runpy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from nanogrpo.data.sources import Source
from nanogrpo.errors import UserError
from nanogrpo.extras.commands import script
from nanogrpo.extras.options import Config
from nanogrpo.logs.files import read_records
from nanogrpo.run import setup


@dataclasses.dataclass(frozen=True)
class Given(setup.Given):
    """Python objects that replace names in the options of the core and the extras."""

    tools: Sequence[Callable] = ()
    environment_factory: Callable | None = None
    rollout: Callable | None = None


def train(
    cfg: Config,
    *,
    reward_funcs: str | Callable | Sequence[str | Callable] = (),
    train_dataset: Source | None = None,
    eval_dataset: Source | None = None,
    tools: Callable | Sequence[Callable] = (),
    environment_factory: Callable | None = None,
    rollout: Callable | None = None,
) -> list[dict]:
    """Train, and return the records of the log: one dict per step or evaluation.

    train_dataset and eval_dataset replace the options data and eval_data. Every other argument
    replaces the option of the same name. A data set is a list of dicts, a `datasets.Dataset` or a
    `DatasetDict`. An environment_factory is a class (docs/tools.md). The functions run in this
    process, so --reward-timeout has no effect. With torchrun, every rank must call this function.
    Raises UserError for a mistake in the options, the data or the functions. An interrupt (the
    notebook's stop button) saves a checkpoint after the step and ends the run.
    """
    if not isinstance(cfg, Config):
        raise UserError(f"the options are a {type(cfg).__name__}: give a nanogrpo.Config.")
    functions, tools = _listed(reward_funcs), _listed(tools)
    given = Given(functions, train_dataset, eval_dataset, tools, environment_factory, rollout)
    cfg = _named(cfg, given)
    if os.environ.get("RANK", "0") == "0":
        logging.basicConfig(level=logging.INFO, format="%(message)s")
    records = read_records(_start()(cfg, given) / "metrics.jsonl")
    return [record for record in records if "run" not in record]


def _listed(given: Any) -> list:
    if given is None:
        return []
    return list(given) if isinstance(given, list | tuple) else [given]


def _named(cfg: Config, given: Given) -> Config:
    """Return the options with each object's name filled in, for the checks and the log."""
    names: dict[str, Any] = {
        "reward_funcs": tuple(
            f if isinstance(f, str) else f"{_name(f)} from Python" for f in given.reward_funcs
        ),
        "tools": tuple(map(_name, given.tools)),
        "environment_factory": given.environment_factory and _name(given.environment_factory),
        "rollout": given.rollout and _name(given.rollout),
    }
    for option, data in (("data", given.train_dataset), ("eval_data", given.eval_dataset)):
        if data is not None:
            names[option] = (data if isinstance(data, str) else "data from Python",)
    names = {option: name for option, name in names.items() if name}
    for option in names:
        if getattr(cfg, option) != getattr(Config, option):
            raise UserError(
                f"{option} is set in Config and also passed to train: set it in one place only."
            )
    return dataclasses.replace(cfg, **names)


def _name(function: Any) -> str:
    if not callable(function):
        raise UserError(f"{function!r:.60} is not a function: pass one, or set its name in Config.")
    return getattr(function, "__name__", type(function).__name__)


@functools.cache
def _start() -> Callable[..., Path]:
    """Return `start` of train.py, which an import statement would not find in a wheel."""
    return runpy.run_path(str(script("train.py")))["start"]
