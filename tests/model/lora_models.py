"""Helpers of the adapter tests. This must not import transformers.

Read next: test_lora.py.
"""

from pathlib import Path

import torch

from nanogrpo import Config
from nanogrpo.extras.lora import adapters, lora
from nanogrpo.extras.lora.feature import LoRA
from nanogrpo.grpo import loss as grpo
from nanogrpo.model import checkpoint
from nanogrpo.model.decoder import Decoder
from nanogrpo.types import PackedBatch
from tests.conftest import SOLO, positions_of, random_batch, random_tokens, tiny_model
from tests.distributed.training import load_sharded


@torch.no_grad()
def nudge(model: Decoder, std: float = 0.1) -> Decoder:
    """Move B away from zero, where half of the gradients are zero and merging changes nothing."""
    generator = torch.Generator().manual_seed(3)
    for name, p in model.named_parameters():
        if name.endswith("lora_B"):
            checkpoint.fill(p, torch.empty(p.shape).normal_(0, std, generator=generator))
    return model


def adapted(cfg: Config, model: Decoder | None = None, fresh: bool = False) -> Decoder:
    """Return a model with adapters. B is not zero unless `fresh` is set."""
    model = model or tiny_model()
    lora.attach(model, cfg)
    adapters.initialize(model, cfg)
    return model if fresh else nudge(model)


def loaded(base: Path, cfg: Config) -> Decoder:
    """Load a checkpoint as a run does."""
    feature = LoRA(cfg)
    model = feature.decoder(base) or checkpoint.empty_model(base)
    lora.attach(model, cfg)
    return load_sharded(base, SOLO, cfg, model, [feature])


def batch_in_float64(**options) -> PackedBatch:
    batch = random_batch([(3, 9), (5, 4), (2, 14)], **options)
    for name in ("advantage", "weight", "old_logp"):
        setattr(batch, name, getattr(batch, name).double())
    return batch


def gradient(model: Decoder, batch: PackedBatch, cfg: Config) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model.forward_strip(batch, grpo.objective(batch, cfg)).loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def logits(model: Decoder, seed: int = 5) -> torch.Tensor:
    positions, attend = positions_of([11, 6])
    with torch.no_grad():
        return model(random_tokens(17, model.cfg.vocab_size, seed), positions, attend)
