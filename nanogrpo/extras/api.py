"""Train, evaluate and generate from Python or a notebook, with functions and data as objects.

    import nanogrpo

    def brevity(completion_ids, **kwargs):
        return [-len(ids) / 1000 for ids in completion_ids]

    rows = nanogrpo.train(
        nanogrpo.Config(model="Qwen/Qwen3-0.6B", max_steps=20, output_dir="runs/a"),
        reward_funcs=["accuracy", brevity],
        train_dataset=[{"question": "What is 3+4?", "answer": "7"}, …],  # or a datasets.Dataset
    )
    rows                          # Result('runs/a'): reward 0.250 → 0.875, best 0.906 after …
    rows.plot()                   # the learning curves
    nanogrpo.generate(rows, ["What is 5+6?"])                 # → ["5+6=11"]
    metrics, completions = nanogrpo.evaluate(rows, held_out, reward_funcs="accuracy")

`train` also takes the arguments of TRL's GRPOTrainer (docs/trl.md). In: options, and Python objects
that replace names in them. Out: a `Result`; the run also writes its usual files. Read next:
train.py (the loop), results.py.
"""

import contextlib
import dataclasses
import functools
import logging
import os
import runpy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from nanogrpo.data.sources import Source
from nanogrpo.distributed.world import join
from nanogrpo.errors import UserError
from nanogrpo.extras import eval as evaluation
from nanogrpo.extras import memory
from nanogrpo.extras.attach import Features, Given
from nanogrpo.extras.commandline import of_run
from nanogrpo.extras.commands import script
from nanogrpo.extras.options import Config
from nanogrpo.extras.results import Result
from nanogrpo.extras.trl_names import in_python

Functions = str | Callable | Sequence[str | Callable]


def train(
    cfg: Any = None,
    *,
    reward_funcs: Functions = (),
    train_dataset: Source | None = None,
    eval_dataset: Source | None = None,
    tools: Callable | Sequence[Callable] = (),
    environment_factory: Callable | None = None,
    rollout: Callable | None = None,
    on_step: Callable | None = None,
    features: Features = Given.features,
    **options: Any,
) -> Result:
    """Train, and return the records of the steps.

    `cfg` is a Config, or the model as in TRL's GRPOTrainer. `options` are further options, or TRL's
    arguments, such as args=GRPOConfig(…) and peft_config=LoraConfig(…) (see Config.from_trl).
    `train_dataset` and `eval_dataset` replace the options data and eval_data. Every other argument
    replaces the option of the same name. A data set is a list of dicts, a `datasets.Dataset` or a
    `DatasetDict`. An environment_factory is a class (docs/tools.md). The functions run in this
    process, so reward_timeout has no effect. With torchrun, every rank must call this function.

    The function `on_step` is called with the record of each step, on the main rank. The record also
    has the metrics of the last evaluation (`eval/…`). If the function returns `True`, the run saves
    a checkpoint and ends. The run does the same after an interrupt, such as the notebook's stop
    button.

    The function `features` gets the options, and returns further parts of the run (docs/fork.md).

    Raises UserError for a mistake in the options, the data or the functions.
    """
    with _from_python():
        functions, tools = _listed(reward_funcs), _listed(tools)
        more = environment_factory, rollout, on_step, features
        given = Given(functions, train_dataset, eval_dataset, tools, *more)
        if not isinstance(cfg, Config):
            cfg, options = Config.from_trl(**{"model": cfg, **options}), {}
        cfg, names = dataclasses.replace(cfg, **options), _names(given)
        for option in names:
            if getattr(cfg, option) != getattr(Config, option):
                raise UserError(
                    f"{option} is set in Config and also passed to train: set it in one place only."
                )
        return Result(loop()["start"](dataclasses.replace(cfg, **names), given))


def evaluate(
    model: Any, data: Source | None = None, *, reward_funcs: Functions = (), **options: Any
) -> tuple[dict[str, float], list[dict]]:
    """Return the metrics of a model on held-out data (`eval/…`), and its completions with their
    rewards.

    `model` is a folder, a hub id, or the result of `train`, whose last checkpoint is then used.
    `data` is as in `train`. `options` are the options of `nanogrpo eval`. For a checkpoint of a
    run, all options that you do not set have the values of the run. With torchrun, every rank must
    call this function. Raises UserError.
    """
    model = model.checkpoint if isinstance(model, Result) else model
    with _from_python():
        given = Given(_listed(reward_funcs), data)
        run = of_run(str(model), evaluation.TAKEN)
        cfg = Config.from_trl(**{**run, "model": model, **_names(given), **options})
        cfg.validate()
        with join(cfg) as world, memory.explained(cfg, evaluation.LOWER):
            return evaluation.evaluate(cfg, world, given)


def generate(
    model: Any,
    prompts: str | Sequence[str | list[dict]],
    *,
    temperature: float = 0.0,
    **options: Any,
) -> Any:
    """Return the model's completion of each prompt.

    `model` and `options` are as in `evaluate`. `prompts` are texts, or lists of messages. As in
    `nanogrpo chat`, a text becomes a user message if the model has a chat template. The result is a
    list of texts, or one text if `prompts` is a text. With a temperature of 0, the model always
    takes the most likely token.
    """
    single = isinstance(prompts, str)
    _, completions = evaluate(
        model,
        [
            {"question" if isinstance(p, str) else "prompt": p}
            for p in ([prompts] if single else prompts)
        ],
        reward_funcs=lambda completions, **_: [None] * len(completions),
        eval_temperature=temperature,
        # not those of the run
        eval_samples=0,
        long_prompts="refuse",
        num_generations_eval=1,
        reward_weights=(),
        prompt_column="",
        answer_column="",
        **options,
    )
    texts = [completion["completion"] for completion in completions]
    return texts[0] if single else texts


@contextlib.contextmanager
def _from_python() -> Iterator[None]:
    """Show the log of a run. In error messages, write the names of options as in Python."""
    if os.environ.get("RANK", "0") == "0":
        logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        yield
    except UserError as e:
        e.args = (in_python(str(e)),)
        raise


def _listed(given: Any) -> list:
    if given is None:
        return []
    return list(given) if isinstance(given, list | tuple) else [given]


def _names(given: Given) -> dict[str, Any]:
    """Return {option: name} for the options that are given as Python objects. The checks and the
    log use these names.
    """
    names = {
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
    return {option: name for option, name in names.items() if name}


def _name(function: Any) -> str:
    if not callable(function):
        raise UserError(f"{function!r:.60} is not a function: pass one, or set its name in Config.")
    return getattr(function, "__name__", type(function).__name__)


@functools.cache
def loop() -> dict[str, Callable]:
    """Return the functions of train.py. In a wheel, `import train` would not find this file."""
    return runpy.run_path(str(script("train.py")))
