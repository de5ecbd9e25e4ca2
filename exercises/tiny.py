"""A run of nanogrpo on a random model of 0.3 M parameters, for exercises 9 and 17.

In: options of nanogrpo, and a function that changes the weights on their way to the engine. Out:
the records of metrics.jsonl, after two or three seconds. Read next: nanogrpo/extras/api.py.
"""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor, nn

from nanogrpo import Config, train
from nanogrpo.extras.arithmetic import warmup
from nanogrpo.model import checkpoint, weights

DATA = [{"prompt": f"{i}+{i}="} for i in range(8)]


def even(completion_ids: list[list[int]], **kwargs) -> list[float]:
    """Return the share of even token ids: a reward that random completions differ in."""
    return [sum(i % 2 == 0 for i in ids) / len(ids) for ids in completion_ids]


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Hide what a run prints."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            yield
    finally:
        logging.disable(before)


def corrupted(corrupt: Callable[[str, Tensor], Tensor]) -> contextlib.AbstractContextManager:
    """Return a block in which every engine gets changed weights. Checkpoints do not change."""
    original = weights.full_parameters

    def full_parameters(model: nn.Module, computed: bool = False) -> Iterator[tuple[str, Tensor]]:
        for name, weight in original(model, computed):
            yield name, corrupt(name, weight.detach().clone()) if computed else weight

    return mock.patch.object(weights, "full_parameters", full_parameters)


def run(**options) -> list[dict]:
    """Train a random model for two steps, and return the records of the steps."""
    with tempfile.TemporaryDirectory() as name, silence():
        base = Path(name, "base")
        base.mkdir()
        tokenizer = warmup.write_tokenizer(base)
        torch.manual_seed(0)
        checkpoint.export(warmup.new_model(tokenizer), base, tokenizer)
        defaults = {
            "model": str(base),
            "output_dir": str(Path(name, "run")),
            "max_steps": 2,
            "num_generations": 4,
            "generation_batch_size": 16,
            "max_completion_length": 8,
            "learning_rate": 5e-3,
            "device": "cpu",
        }
        return train(Config(**{**defaults, **options}), reward_funcs=even, train_dataset=DATA)


@functools.cache
def usual() -> list[dict]:
    """Return the records of a run without further options."""
    return run()
