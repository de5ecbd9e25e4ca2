"""Frozen models next to the policy: a different reference (--ref-model), the teachers of recipes,
and a reference that follows the policy (--ref-model-sync-steps, as in TRL).

With --ref-model, --beta weights the KL to the model of another checkpoint. If this model is better
than the policy, the policy learns from it (distillation). With --use-bias-correction-kl, the
penalty has the same gradient as a loss in which each token has the advantage β·(log π_ref - log π).

Every `ref_model_sync_steps` steps, reference ← α · policy + (1 - α) · reference, with α =
`ref_model_mixup_alpha`. Policy and reference are sharded in the same way, so each rank mixes its
own shards without communication. In: a run with a reference model. Out: a different reference
model, and the tensors that a checkpoint needs to resume the run. Read before: nanogrpo/feature.py.
"""

import contextlib
import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nanogrpo.distributed import fsdp
from nanogrpo.errors import UserError
from nanogrpo.extras import rope_scaling, window  # noqa: F401 (for all kinds of models)
from nanogrpo.feature import Feature
from nanogrpo.model import checkpoint
from nanogrpo.model.decoder import Decoder
from nanogrpo.model.tokenizer import Tokenizer
from nanogrpo.run import output, setup
from nanogrpo.run.setup import Inputs, Run


class FrozenModels(Feature):
    """Load further models, which are not trained. The memory estimate includes them. If the weights
    of these models have changed, a resumed run stops.
    """

    def __init__(self, option: str, names: Sequence[str]):
        """`names` are the folders or hub ids of the models. They are the values of `option`."""
        self.option, self.names = option, names
        self.frozen: list[Decoder] = []

    def model(self, model: Decoder, inputs: Inputs) -> None:
        """Make models without weights. Raises UserError if one does not fit the policy."""
        self.policy, self.inputs = model, inputs
        self.folders = [checkpoint.locate(name, self.option) for name in self.names]
        needed = inputs.longest_prompt + inputs.cfg.max_completion_length
        ids = inputs.tokenizer._tokenizer.get_vocab()
        for name, folder in zip(self.names, self.folders):
            made = setup.empty_model(folder, inputs.features)
            if Tokenizer(folder)._tokenizer.get_vocab() != ids:
                problem = "has another tokenizer"
            elif made.cfg.max_position_embeddings < needed:
                problem = f"has a context of less than the {needed} tokens that are needed"
            elif hasattr(made.model, "visual") != hasattr(model.model, "visual"):
                problem = "reads pictures, or the model does, but not both"
            else:
                self.frozen.append(made)
                continue
            raise UserError(f"{self.option} {name} {problem}: choose a related model.")
        files = [path for folder in self.folders for path in checkpoint.files(folder)]
        found = hashlib.sha256("".join(map(output.digest, files)).encode())
        self.now = torch.tensor([*found.digest()], dtype=torch.uint8)  # [32]
        self.then = self.now.clone()  # a resumed run overwrites it

    def loaded(self, model: Decoder) -> None:
        if model is self.policy:
            offload = fsdp.Sharding(offload=model.sharding.offload, dtype=model.sharding.dtype)
            for made, folder in zip(self.frozen, self.folders):
                made.sharding = offload
                inputs = dataclasses.replace(self.inputs, source=folder, features=())
                setup.load_weights(made, inputs).requires_grad_(False)

    def tensors(self) -> dict[str, Tensor]:
        return {f"hash of {self.option}": self.then}

    def running(self, run: Run) -> None:
        if not torch.equal(self.now, self.then):
            raise UserError(
                f"--resume: the weights of {self.option} have changed since the checkpoint was "
                "written: restore them, or pass the checkpoint as --model to a new run."
            )


class OtherReference(FrozenModels):
    """The reference model is another checkpoint (--ref-model)."""

    def __init__(self, cfg: Any):
        super().__init__("--ref-model", [cfg.ref_model])

    def model(self, model: Decoder, inputs: Inputs) -> None:
        super().model(model, inputs)
        # so that `setup` loads no second copy of --model
        model.own_reference = contextlib.nullcontext

    def running(self, run: Run) -> None:
        super().running(run)
        (run.ref_model,) = self.frozen


class SyncReference(Feature):
    reference: Any = None

    def loaded(self, model: Decoder) -> None:
        self.reference = model  # the reference is loaded last

    def tensors(self) -> dict[str, Tensor]:
        fsdp.reshard(self.reference)
        return {f"reference.{n}": p.detach() for n, p in self.reference.named_parameters()}

    @torch.no_grad()
    def step(self, run: Run, step: int, *_: Any) -> None:
        """Move the reference model towards the policy."""
        cfg: Any = run.cfg
        if (step + 1) % cfg.ref_model_sync_steps == 0:
            alpha = cfg.ref_model_mixup_alpha
            fsdp.reshard(self.reference)
            fsdp.reshard(run.model)
            # the policy may have more parameters at its end, such as a value head
            for mine, policy in zip(self.reference.parameters(), run.model.parameters()):
                mine.mul_(1 - alpha).add_(policy, alpha=alpha)
