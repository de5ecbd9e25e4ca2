"""Helpers of the adapter tests. They run on several ranks, so this must not import transformers.

Read next: test_lora.py.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

import train
from nanogrpo.config import Config
from nanogrpo.distributed import fsdp
from nanogrpo.distributed.world import World, join
from nanogrpo.grpo import loss as grpo
from nanogrpo.grpo import packing
from nanogrpo.model import adapters, checkpoint, lora
from nanogrpo.model.decoder import Decoder
from nanogrpo.run import optim
from nanogrpo.run import setup as parts
from tests.conftest import SOLO, positions_of, random_tokens, tiny_model, write_base
from tests.distributed.training import generation

LIMIT = 1e-6


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
    model = checkpoint.empty_model(base)
    lora.attach(model, cfg)
    return parts.load_sharded(model, base, SOLO, cfg)


def logits(model: Decoder, seed: int = 5) -> torch.Tensor:
    positions, attend = positions_of([11, 6])
    with torch.no_grad():
        return model(random_tokens(17, model.cfg.vocab_size, seed), positions, attend)


def three_steps(base: Path, options: dict, world: World = SOLO) -> tuple[dict, dict, dict, Tensor]:
    """Return the gradient of the first step, the merged weights after the third as they are saved
    and as they are sent, and the logits with disabled adapters. distributed/training.py explains
    the epsilon.
    """
    cfg = Config(
        **{
            "model": str(base),
            "lora_r": 4,
            "learning_rate": 1e-3,
            "adam_epsilon": 1e-5,
            "num_generations": 4,
            **options,
        }
    )
    model = checkpoint.empty_model(base)
    lora.attach(model, cfg)
    model = nudge(parts.load_sharded(model, base, world, cfg))
    optimizer, gradient = optim.make_optimizer(model, cfg), {}
    for step in range(3):
        torch.manual_seed(step)  # for dropout
        samples = generation(step)
        (update,) = packing.schedule(
            packing.sizes(samples, cfg), cfg, step, world.size, model.cfg.pair_cost
        )
        batches = packing.pack(update, samples, cfg, world.rank)
        for batch in batches:
            loss = model.forward_packed(batch, grpo.objective(batch, cfg)).loss
            fsdp.backward(model, loss, world, last=batch is batches[-1])
        for name, p in model.named_parameters() if step == 0 else ():
            if p.grad is not None:
                gradient[name] = lora.gathered(p.grad).clone()
        optim.clip_and_step(model, optimizer, cfg.learning_rate, 1.0)
    assert all(lora.is_adapter(name) for name in gradient)
    sent = {name: p.clone() for name, p in lora.full_parameters(model, computed=True)}
    positions, attend = positions_of([13])
    with torch.no_grad(), lora.disabled(model):
        off = model(random_tokens(13, 104), positions, attend)
    return gradient, checkpoint.host_weights(model), sent, off


def every_run(bases: dict[str, Path], runs: list[tuple], world: World = SOLO) -> list[tuple]:
    """The results of `three_steps` for each (name of a base, options)."""
    return [three_steps(bases[name], options, world) for name, options in runs]


def every_variant(bases: dict[str, Path], runs: list[tuple]) -> list[tuple]:
    """The same on several ranks."""
    with join(Config(device="cpu")) as world:
        return every_run(bases, runs, world)


def program(argv: list[str]) -> int:
    return train.main(argv)
