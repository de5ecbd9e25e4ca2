"""The seam: how something that is off by default attaches to a run.

An extra is a subclass of `Feature` with some of the methods below. extras/attach.py makes those
that the options ask for, in the order in which they attach; every rank has the same ones. The core
calls each method in one place and knows nothing else about an extra. A method that returns None
leaves the work to the core. Read next: run/setup.py and step.py (the callers), extras/attach.py
(what there is).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:  # only for the signatures
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    import torch
    from torch import Tensor

    from nanogrpo.config import Config
    from nanogrpo.engine.base import Engine
    from nanogrpo.model.decoder import Decoder
    from nanogrpo.model.head import HeadOp, PolicyOut
    from nanogrpo.run.setup import Inputs, Run
    from nanogrpo.run.state import Saver
    from nanogrpo.types import PackedBatch, Prompt, Sample

T = TypeVar("T")


def first(answers: Iterable[T | None]) -> T | None:
    """Return the first answer of a run's features; None: they leave the work to the core."""
    return next((answer for answer in answers if answer is not None), None)


class Feature:
    # Whether its loss has a term without an advantage: then no completion may be left out.
    all_gradients = False

    # --- before the first step, in this order ---
    # The rows of a data source that is no JSON-lines file; data/sources.py explains the arguments.
    def rows(self, source: Any, split: str) -> list[dict] | None: ...
    # A prompt's token ids. It may change the prompt and the variables of the chat template.
    def encode(
        self, prompt: Prompt, variables: dict, folder: Path, tokenize: Callable[[], list[int]]
    ) -> list[int] | None: ...
    # The function of a name in --reward-funcs, or module:name, which the rewards' process imports.
    def reward(self, name: str, device: torch.device) -> Callable | str | None: ...
    # A model, on the meta device, for a checkpoint that the core cannot read.
    def decoder(self, folder: Path) -> Decoder | None: ...
    # Change the model before it has weights: replace layers, freeze.
    def model(self, model: Decoder, inputs: Inputs) -> None: ...
    # The options, with a value for each setting that the user left open.
    def settings(self, cfg: Config, inputs: Inputs) -> Config | None: ...
    # Initialize what the checkpoint does not contain. The reference model comes after the policy.
    def loaded(self, model: Decoder) -> None: ...
    def optimizer(self, groups: list[dict]) -> torch.optim.Optimizer | None: ...
    # Tensors that a checkpoint must also contain to resume the run.
    def tensors(self) -> dict[str, Tensor] | None: ...
    def engine(self, run: Run) -> Engine | None: ...
    def wrap(self, engine: Engine, run: Run) -> Engine | None: ...
    def running(self, run: Run) -> AbstractContextManager | None: ...

    # --- in each step, in this order ---
    # Use the rewards, or replace samples in place.
    def scored(self, run: Run, samples: list[Sample], step: int) -> None: ...
    # Advantages [P, G] and standard deviations: see grpo/advantages.py.
    def advantages(self, rewards: Tensor, by_function: Tensor) -> tuple[Tensor, Tensor] | None: ...
    # Fill in what the loss of an optimizer step needs, before the step's first update.
    def batches(self, run: Run, batches: Sequence[PackedBatch]) -> None: ...
    def objective(self, batch: PackedBatch, cfg: Config) -> HeadOp | None: ...
    def measured(self, batch: PackedBatch, out: PolicyOut, update: int) -> None: ...
    def learning_rate(self, update: int, cfg: Config) -> float | None: ...
    # Act after the last update of a step, and return metrics for its record in the log.
    def step(self, run: Run, step: int, samples: list[Sample]) -> dict[str, float] | None: ...
    # Metrics of samples: those of a step, or of an evaluation.
    def metrics(self, run: Run, samples: list[Sample]) -> dict[str, float] | None: ...
    def evaluated(self, run: Run, samples: list[Sample]) -> None: ...
    # Read a record of the log, after `done` steps. Only on the main rank.
    def record(self, done: int, record: dict) -> None: ...
    # Copy further contents of a checkpoint. Return a function that writes them on the main rank.
    def files(self, saver: Saver) -> Callable[[Path], None] | None: ...
