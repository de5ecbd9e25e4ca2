"""The interface between the core and the extras. Extras are parts of a run that are off by default.

An extra is a subclass of `Feature` with some of the methods below. extras/attach.py creates the
extras that the options turn on, always in the same order. Every rank has the same extras. The core
calls each method in one place and knows nothing else about an extra. Only `metrics` is called in
two places: for steps and for evaluations. If a method returns None, the core does the work itself.
An attribute must not have the name of one of these methods, such as `self.optimizer`.
Read next: run/setup.py and step.py (the callers), extras/attach.py (the list of extras).
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
    """Return the first answer that is not None. Return None if the core should do the work."""
    return next((answer for answer in answers if answer is not None), None)


class Feature:
    # Whether the loss has a term without the advantage. If so, no completion may be left out.
    all_gradients = False

    # --- before the first step, in this order ---
    # Return a model on the meta device for a checkpoint that the core cannot read.
    def decoder(self, folder: Path) -> Decoder | None: ...
    # Return the function that a name in --reward-funcs stands for.
    # If this function runs in the reward process, return its module:name instead.
    def reward(self, name: str, device: torch.device) -> Callable | str | None: ...
    # Return the rows of a data source that is not a JSON-lines file (see data/sources.py).
    def rows(self, source: Any, split: str) -> list[dict] | None: ...
    # Return the prompt's token ids. This method may change `prompt` and `variables`.
    def encode(
        self, prompt: Prompt, variables: dict, folder: Path, tokenize: Callable[[], list[int]]
    ) -> list[int] | None: ...
    # Change the model before its weights are loaded, for example to replace or freeze layers.
    def model(self, model: Decoder, inputs: Inputs) -> None: ...
    # Choose values for the settings that the user has not set, and return the new options.
    def settings(self, cfg: Config, inputs: Inputs) -> Config | None: ...
    # Initialize weights that the checkpoint does not contain, after the other weights are loaded.
    def loaded(self, model: Decoder) -> None: ...
    # Return the optimizer of the model. Create its state at once, as `adamw` in run/optim.py does,
    # because resuming overwrites this state. A checkpoint contains all tensors of the state.
    def optimizer(self, groups: list[dict]) -> torch.optim.Optimizer | None: ...
    # Return further tensors that a checkpoint must contain to resume the run.
    # Resuming overwrites these tensors, so create all of them before the first step, and change
    # them in place.
    def tensors(self) -> dict[str, Tensor] | None: ...
    def engine(self, run: Run) -> Engine | None: ...
    def wrap(self, engine: Engine, run: Run) -> Engine | None: ...
    def running(self, run: Run) -> AbstractContextManager | None: ...

    # --- in each step, in this order ---
    # `drawn` holds the prompts of a step for all ranks. Return the prompts that replace them.
    # Every rank must return the same prompts, and as many prompts as `drawn` has.
    # If a prompt occurs twice, both of its groups get the same completions.
    def draw(self, run: Run, drawn: list[Prompt], seed: int, step: int) -> list[Prompt] | None: ...
    # Read or change the rewards, or replace samples in place.
    # The list contains the samples of this rank.
    def scored(self, run: Run, samples: list[Sample], step: int) -> None: ...
    # Return advantages [P, G] and standard deviations (see grpo/advantages.py), for all ranks.
    def advantages(self, rewards: Tensor, by_function: Tensor) -> tuple[Tensor, Tensor] | None: ...
    # Return a list for each sample of this rank, with an advantage for each token.
    # The samples are complete groups, and already have an `advantage`.
    def token_advantages(self, run: Run, samples: list[Sample]) -> list[list[float]] | None: ...
    # Fill in what the loss of an optimizer step needs, before the first update.
    def batches(self, run: Run, batches: Sequence[PackedBatch]) -> None: ...
    def objective(self, batch: PackedBatch, cfg: Config) -> HeadOp | None: ...
    def measured(self, batch: PackedBatch, out: PolicyOut, update: int) -> None: ...
    def learning_rate(self, update: int, cfg: Config) -> float | None: ...
    # Return metrics of the samples of a step or of an evaluation.
    def metrics(self, run: Run, samples: list[Sample]) -> dict[str, float] | None: ...
    # Do work after the last update of a step, and return metrics for the log.
    def step(self, run: Run, step: int, samples: list[Sample]) -> dict[str, float] | None: ...
    def evaluated(self, run: Run, samples: list[Sample]) -> None: ...
    # Receive a record of the log after `done` steps, on the main rank only.
    def record(self, done: int, record: dict) -> None: ...
    # Copy further data for a checkpoint, and return a function that writes it on the main rank.
    def files(self, saver: Saver) -> Callable[[Path], None] | None: ...
