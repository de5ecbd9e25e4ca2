"""How many variants of each kernel does Triton compile for 200 random strips? No GPU is needed.

    TRITON_INTERPRET=0 python -m bench.kernel_variants

In: nothing. Out: the number of variants of each kernel. Triton compiles a new variant of a kernel
if the kind of an argument changes: its dtype, whether it is None, whether an integer is 1 or
divisible by 16, or whether a pointer is divisible by 16. Each compilation interrupts a run for
several seconds. Read next: kernel_speed.py.
"""

from __future__ import annotations

import random
import sys
from collections import defaultdict
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
from triton.runtime.jit import JITFunction

from bench import common
from bench.step_sides import Case, options_of, strips
from bench.step_trace import Rows
from nanogrpo.grpo import loss as grpo
from nanogrpo.model import dispatch, gpu_attention
from nanogrpo.model.decoder import Decoder

variants: dict[str, set[tuple]] = defaultdict(set)


def launch(kernel: Any, *args: Any, grid: Any, warmup: bool = False, **options: Any) -> None:
    def kind(p: Any, x: Any) -> object:
        if isinstance(x, torch.Tensor):
            return x.dtype, x.storage_offset() * x.itemsize % 16
        if isinstance(x, int) and not p.is_constexpr:
            return p.do_not_specialize or (x == 1, x % 16 == 0)
        return type(x) if isinstance(x, float) else x

    name = f"{kernel.fn.__module__}.{kernel.fn.__name__}"
    variants[name].add((*map(kind, kernel.params, args), *options.items()))


def stub(*_: object) -> Any:
    return lambda q, k, v, strip: Rows.apply(q, *strip.gathered(k, v))


def main(argv: Sequence[str]) -> dict[str, int]:
    common.parser("kernel_variants", __doc__, threads=False).parse_args(argv)
    with torch.device("meta"):
        model = Decoder(common.small_qwen3(64, 1, 104, 256)).bfloat16()
    with (
        mock.patch.object(JITFunction, "run", launch),
        mock.patch.object(dispatch, "choice", "triton"),
        mock.patch.object(gpu_attention, "backend", stub),
    ):
        for seed in range(200):
            rng = random.Random(seed)
            case = Case(rng.randint(1, 4), 4, rng.randint(2, 30), rng.randint(2, 60))
            cfg, samples = options_of(case)
            for batch in strips(samples, cfg, 1e-3):
                batch = batch.to("meta")
                model.forward_strip(batch, grpo.objective(batch, cfg)).loss.backward()
    counts = {name: len(found) for name, found in sorted(variants.items())}
    print(*(f"{n} {name}" for name, n in counts.items()), sep="\n")
    return counts


if __name__ == "__main__":
    main(sys.argv[1:])
