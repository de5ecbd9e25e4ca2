"""A reference model that follows the policy (--sync-ref-model, as in TRL).

Every `ref_model_sync_steps` steps, reference ← α · policy + (1 - α) · reference, with α =
`ref_model_mixup_alpha`. Policy and reference are sharded in the same way, so each rank mixes its
own shards without communication. In: a run with a reference model. Out: the changed reference, and
the tensors that a checkpoint needs to resume the run. Read before: nanogrpo/feature.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nanogrpo.config import Config, option
from nanogrpo.distributed import fsdp
from nanogrpo.feature import Feature

if TYPE_CHECKING:
    from nanogrpo.model.decoder import Decoder
    from nanogrpo.run.setup import Run
    from nanogrpo.types import Sample


@dataclass(frozen=True)
class SyncReferenceOptions(Config):
    """A reference model that follows the policy."""

    sync_ref_model: bool = option(
        False,
        "update the reference model periodically: ref = alpha*policy + (1 - alpha)*ref",
        needs="beta",
    )
    ref_model_mixup_alpha: float = option(
        0.6,
        "alpha, the policy's share; 1: the reference becomes a copy of the policy",
        "> 0",
        "<= 1",
        needs="sync_ref_model",
    )
    ref_model_sync_steps: int = option(
        512, "steps between these updates of the reference", "> 0", needs="sync_ref_model"
    )

    def problems(self) -> Iterator[str]:
        if self.sync_ref_model and getattr(self, "lora_r", False):
            yield (
                "--sync-ref-model cannot be used with --lora-r, because the reference is then the"
                " base without adapters: leave one of them out."
            )


class SyncReference(Feature):
    def __init__(self, cfg: Any):
        self.cfg = cfg
        self.reference: Any = None

    def loaded(self, model: Decoder) -> None:
        self.reference = model  # the reference is loaded last

    def tensors(self) -> dict[str, Tensor]:
        fsdp.reshard(self.reference)
        return {f"reference.{n}": p.detach() for n, p in self.reference.named_parameters()}

    def step(self, run: Run, step: int, samples: list[Sample]) -> None:
        if (step + 1) % self.cfg.ref_model_sync_steps == 0:
            update(self.reference, run.model, self.cfg.ref_model_mixup_alpha)


def update(reference: Any, model: Any, alpha: float) -> None:
    """Move a reference model towards the policy."""
    fsdp.reshard(reference)
    fsdp.reshard(model)
    with torch.no_grad():
        for mine, policy in zip(reference.parameters(), model.parameters(), strict=True):
            mine.mul_(1 - alpha).add_(policy, alpha=alpha)
