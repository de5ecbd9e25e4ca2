"""Count the variants that Triton would compile for the kernels of 200 random strips, without a GPU.

Triton compiles a kernel again for each new combination of dtypes, of None, of integers that are 1
or divisible by 16, and of pointers that are divisible by 16. Read next: test_host.py.
"""

import dataclasses
import os
import random
import sys
from collections import defaultdict
from pathlib import Path
from unittest import mock

os.environ["TRITON_INTERPRET"] = "0"
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from triton.runtime.jit import JITFunction

from nanogrpo import Config
from nanogrpo.grpo import loss as grpo
from nanogrpo.model import dispatch, gpu_attention
from nanogrpo.model.decoder import Decoder
from tests.conftest import random_batch, tiny_config
from tests.kernels.traffic import Attention

variants: dict[str, set[tuple]] = defaultdict(set)


def launch(kernel, *args, grid, warmup=False, **options):
    def kind(p, x):
        if isinstance(x, torch.Tensor):
            return x.dtype, x.storage_offset() * x.itemsize % 16
        if isinstance(x, int) and not p.is_constexpr:
            return p.do_not_specialize or (x == 1, x % 16 == 0)
        return type(x) if isinstance(x, float) else x

    name = f"{kernel.fn.__module__}.{kernel.fn.__name__}"
    variants[name].add((*map(kind, kernel.params, args), *options.items()))


def stub(*_):
    return lambda q, k, v, strip: Attention.apply(q, *strip.gathered(k, v))


if __name__ == "__main__":
    with torch.device("meta"):
        model = Decoder(tiny_config(num_hidden_layers=1)).bfloat16()
    patches = (
        mock.patch.object(JITFunction, "run", launch),
        mock.patch.object(dispatch, "choice", "triton"),
        mock.patch.object(gpu_attention, "backend", stub),
    )
    with patches[0], patches[1], patches[2]:
        for seed in range(200):
            rng = random.Random(seed)
            pairs = [(rng.randint(1, 30), rng.randint(1, 60)) for _ in range(rng.randint(1, 4))]
            batch = random_batch(pairs)
            tensors = {n: x for n, x in vars(batch).items() if isinstance(x, torch.Tensor)}
            meta = {n: x.to("meta") for n, x in tensors.items()}
            batch = dataclasses.replace(batch, **meta, kv_rows=meta["rows"])
            model.forward_strip(batch, grpo.objective(batch, Config())).loss.backward()
    assert len(variants) >= 8, variants
    print(max(map(len, variants.values())))
