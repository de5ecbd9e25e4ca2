"""Helpers of the adapter tests. This must not import transformers.

Read next: test_lora.py.
"""

from pathlib import Path

import torch

import train
from nanogrpo import Config
from nanogrpo.extras.lora import adapters, lora
from nanogrpo.extras.lora.feature import LoRA
from nanogrpo.grpo import loss as grpo
from nanogrpo.model import checkpoint
from nanogrpo.model.decoder import Decoder
from nanogrpo.types import PackedBatch
from tests.conftest import SOLO, positions_of, random_tokens, tiny_model, write_base
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


def write_bases(folder: Path) -> dict[str, Path]:
    """Write a checkpoint folder of each shape."""
    shapes = {
        "untied": {},
        "tied": {"tie_word_embeddings": True, "num_hidden_layers": 3},
        "qwen2": {"model_type": "qwen2", "num_hidden_layers": 3},
        "llama": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    }
    return {name: write_base(folder / name, **shape) for name, shape in shapes.items()}


def loaded(base: Path, cfg: Config) -> Decoder:
    """Load a checkpoint as a run does."""
    feature = LoRA(cfg)
    model = feature.decoder(base) or checkpoint.empty_model(base)
    lora.attach(model, cfg)
    return load_sharded(base, SOLO, cfg, model, [feature])


def gradient(model: Decoder, batch: PackedBatch, cfg: Config) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model.forward_strip(batch, grpo.objective(batch, cfg)).loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def logits(model: Decoder, seed: int = 5) -> torch.Tensor:
    positions, attend = positions_of([11, 6])
    with torch.no_grad():
        return model(random_tokens(17, model.cfg.vocab_size, seed), positions, attend)


def program(argv: list[str]) -> int:
    return train.main(argv)
