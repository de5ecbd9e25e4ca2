"""Gradients do not depend on the number of ranks, also where one rank has no picture.

The ranks import this module, so it must not import transformers. Read next:
tests/distributed/test_fsdp.py.
"""

from pathlib import Path

import pytest
from torch import Tensor

from nanogrpo.config import Config
from nanogrpo.distributed import fsdp
from nanogrpo.distributed.world import join
from nanogrpo.model import checkpoint, lora
from nanogrpo.model.decoder import logits
from nanogrpo.run import setup as parts
from tests.conftest import SOLO, tiny_model
from tests.distributed.training import differ
from tests.ranks import run
from tests.vision.tiny import prompt, strip, vision_config

# two micro-batches for each of two ranks; the second rank begins with one without pictures
STRIPS = [
    [(prompt(3, (16, 24), 1, (8, 8), 4), [[5, 6], [7]]), (prompt(4), [[8]])],
    [(prompt(6, seed=1), [[5, 6, 7], [8, 9]])],
    [(prompt(2, (9, 40), 3, seed=2), [[1, 2, 3]])],
    [(prompt(1, (30, 21), 2, seed=3), [[4, 5]]), (prompt(5, (16, 16), 2, seed=4), [[6], [7]])],
]
CASES = [
    {},
    {"gradient_checkpointing": "full", "reshard_after_forward": "never"},
    {"reduce_gradients": "micro_batch", "gradient_checkpointing": "selective"},
    {"lora_r": 2},
    {"freeze_vision_tower": True, "reshard_after_forward": "never"},
]


def gradients(base: Path, options: dict, world=SOLO) -> dict[str, Tensor]:
    """Return the full gradients of the sum over all strips."""
    cfg = Config(model=str(base), seed=3, **options)
    model = checkpoint.empty_model(base)
    parts.freeze_vision_tower(model, cfg)
    lora.attach(model, cfg)
    model = parts.load_sharded(model, base, world, cfg)
    mine = STRIPS[world.rank :: world.size]
    for i, groups in enumerate(mine):
        args, images = strip(groups)
        out = model(*args, logits, *images)
        fsdp.backward(model, out.sin().sum(), world, last=i == len(mine) - 1)
    return {n: lora.gathered(p.grad) for n, p in model.named_parameters() if p.requires_grad}


def on_ranks(bases: dict[bool, Path]) -> list[dict[str, Tensor]]:
    with join(Config(device="cpu")) as world:
        return [gradients(bases[i % 2 == 0], case, world) for i, case in enumerate(CASES)]


@pytest.fixture(scope="module")
def bases(tmp_path_factory) -> dict[bool, Path]:
    """Return a checkpoint with a tied head and one without."""
    folders = {}
    for tied in (False, True):
        folders[tied] = tmp_path_factory.mktemp("base")
        model = tiny_model(vision_config(tie_word_embeddings=tied), std=0.1)
        checkpoint.export(model, folders[tied])
    return folders


def test_two_ranks_have_the_gradients_of_one(bases):
    found = run(2, on_ranks, bases)
    for i, options in enumerate(CASES):
        expected = gradients(bases[i % 2 == 0], options)
        names = {n for n in expected if ".visual." not in n}
        assert len(names) == (3 * 7 * 2 if "lora_r" in options else 36 - (i % 2 == 0))
        frozen = options.keys() & {"lora_r", "freeze_vision_tower"}
        assert len(expected) - len(names) == (0 if frozen else 57)
        for rank in found:
            assert rank[i].keys() == expected.keys()
            assert differ(expected, rank[i]) < 1e-6, options
