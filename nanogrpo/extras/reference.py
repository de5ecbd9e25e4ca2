"""A reference model that follows the policy (--sync-ref-model, as in TRL).

Every `ref_model_sync_steps` steps, reference ← α · policy + (1 - α) · reference, with α =
`ref_model_mixup_alpha`. Policy and reference are sharded in the same way, so each rank mixes its
own shards without communication. In: a run with a reference model. Out: the changed reference, and
the tensors that a checkpoint needs to resume the run. Read before: nanogrpo/feature.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nanogrpo.distributed import fsdp
from nanogrpo.feature import Feature

if TYPE_CHECKING:
    from nanogrpo.model.decoder import Decoder
    from nanogrpo.run.setup import Run
    from nanogrpo.types import Sample


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
