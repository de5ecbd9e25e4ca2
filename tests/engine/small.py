"""A small local engine, and prompts for it."""

import torch

from nanogrpo.engine.local import LocalEngine
from nanogrpo.types import Prompt
from tests.conftest import random_tokens, tiny_model


def make_prompts(lengths=(1, 3, 17, 8, 1, 30)):
    return [Prompt(100 + i, "", random_tokens(n, seed=i).tolist()) for i, n in enumerate(lengths)]


def make_engine(model=None, **options):
    model = model or tiny_model()
    engine = LocalEngine(model.cfg, **{"slots": 64, "max_len": 200, "device": "cpu"} | options)
    engine.load(model, version=7)
    return engine


def same(samples, expected):
    assert [s.token_ids for s in samples] == [s.token_ids for s in expected]
    assert [s.stopped for s in samples] == [s.stopped for s in expected]
    for a, b in zip(samples, expected):
        assert len(a.logp) == len(a.versions) == len(a.token_ids)
        torch.testing.assert_close(torch.tensor(a.logp), torch.tensor(b.logp), atol=1e-4, rtol=1e-4)
