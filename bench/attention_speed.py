"""Measure the speed and the errors of the backends of attention, forward and backward.

    python -m bench.attention_speed               # one layer of Qwen3-0.6B, on a GPU
    TRITON_INTERPRET=1 python -m bench.attention_speed --scale 0.01    # tiny, on a CPU

In: nothing. The sequences are those of the three strips of step_large.py, with their shared
prompts. Queries, keys, values and the gradients of the outputs are random. Out:
results/attention_speed.json, with one record per backend of `NANOGRPO_ATTENTION`. If a backend
cannot run here, its record contains the reason instead of times.

The times are for one attention layer and all strips together. The backends are timed alternately.
An error is the largest difference from float64, divided by the largest value. Read next:
nanogrpo/model/gpu_attention.py.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Sequence

import torch
from nanogrpo.kernels.reference.attention import Strip, attention
from torch import Tensor

from bench import common, tables
from bench.step_large import CASE, forward_flops, pairs_of
from bench.step_sides import options_of, strips
from nanogrpo.extras import two_calls  # noqa: F401 (adds backends)
from nanogrpo.model.attention import StripAttention
from nanogrpo.model.gpu_attention import BACKENDS, Backend, sdpa

NAMES = ("y", "dq", "dk", "dv")
# one strip: its sequences, then q, k, v and the gradient of y
Work = list[tuple[StripAttention, list[Tensor]]]


def work_of(shape: common.ModelConfig, scale: float, device: str) -> tuple[Work, float]:
    """Return the strips with random inputs, and the number of visible pairs per head."""
    cfg, samples = options_of(CASE, scale, device)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    heads, keys, size = shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim
    generator = torch.Generator(device).manual_seed(0)
    work, pairs = [], 0.0
    for batch in strips(samples, cfg, shape.pair_cost):
        pairs += pairs_of(batch)
        batch = batch.to(device)
        strip = StripAttention(
            batch.cu_seqlens, batch.max_len, batch.kv_rows, batch.kv_cu_seqlens, batch.kv_max_len
        )
        inputs = [
            torch.randn(len(batch.tokens), n, size, generator=generator, device=device).to(dtype)
            for n in (heads, keys, keys, heads)
        ]
        work.append((strip, [x.requires_grad_() for x in inputs[:3]] + inputs[3:]))
    return work, pairs


def truth_of(work: Work) -> list[list[Tensor]]:
    """Return outputs and gradients of all strips in float64, from the reference."""
    found = []
    for strip, (*inputs, dy) in work:
        wide = [x.detach().double().requires_grad_() for x in inputs]
        # a plain `Strip` gathers keys without kernels, which have no float64
        out = attention(*wide, Strip(*dataclasses.astuple(strip)))
        found.append([out.detach(), *torch.autograd.grad(out, wide, dy.double())])
    return found


class Side:
    """One backend, on all strips."""

    def __init__(self, attend: Backend, work: Work, truth: list[list[Tensor]]):
        self.attend, self.work = attend, work
        self.forward()
        self.errors = dict.fromkeys(NAMES, 0.0)
        for y, grads, exact in zip(self.outs, self.backward(), truth):
            for name, x, want in zip(NAMES, (y.detach(), *grads), exact):
                error = (x.double() - want).abs().max() / want.abs().max()
                self.errors[name] = max(self.errors[name], error.item())

    def forward(self) -> None:
        self.outs = [self.attend(*inputs[:3], strip) for strip, inputs in self.work]

    def backward(self) -> list[tuple[Tensor, ...]]:
        return [
            torch.autograd.grad(out, inputs[:3], inputs[3], retain_graph=True)
            for out, (_, inputs) in zip(self.outs, self.work)
        ]


def side_of(name: str, device: str, work: Work, truth: list[list[Tensor]]) -> Side | str:
    """Return the side of a backend, or the reason why the backend cannot run here."""
    attend = BACKENDS[name]
    interpreted = name == "triton" and os.environ.get("TRITON_INTERPRET") == "1"
    if device == "cpu" and not interpreted:
        if name != "torch":
            return "needs a GPU"
        attend = sdpa
    if name == "flash4" and torch.cuda.get_device_capability()[0] not in (9, 10, 11):
        return "needs Hopper or Blackwell"
    try:
        return Side(attend, work, truth)
    except Exception as problem:
        if name == "torch":
            raise
        return f"{type(problem).__name__}: {problem}"[:200]


def main(argv: Sequence[str]) -> list[dict]:
    parser = common.parser(
        "attention_speed",
        __doc__,
        repeats=(30, "timed passes of each backend"),
        scale=(1.0, "factor of all lengths"),
    )
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and args.scale > 0.1:
        parser.error("attention is measured on a GPU, and torch finds none: use --scale 0.01.")
    shape = common.large_qwen3("0.6B", CASE.prompt + CASE.longest)
    if device == "cpu":  # Triton's interpreter is slow
        shape = dataclasses.replace(shape, num_attention_heads=2, num_key_value_heads=1)
    work, pairs = work_of(shape, args.scale, device)
    dtype = work[0][1][0].dtype
    truth = truth_of(work)
    flop = forward_flops(shape, 0, 0, pairs) / shape.num_hidden_layers
    label = f"0.6B, {len(work)} strips, {f'{dtype}'[6:]}, {'GPU' if device == 'cuda' else 'CPU'}"

    found = {name: side_of(name, device, work, truth) for name in BACKENDS}
    sides = {name: side for name, side in found.items() if isinstance(side, Side)}
    warmup = 2 if device == "cuda" else 0
    timings = {}
    for what in ("forward", "backward"):  # first forward, whose outputs the backward pass needs
        calls = {name: getattr(side, what) for name, side in sides.items()}
        timings[what] = common.interleave(calls, args.repeats, warmup, what)
    records = []
    for name, side in found.items():
        if isinstance(side, str):
            records.append(common.record("attention_speed", label, name, argv, why_not=side))
            continue
        forward, backward = (timings[what][name] for what in ("forward", "backward"))
        figures = {
            "errors": side.errors,
            "backward_median": backward.median,
            "backward_spread": backward.spread,
            "needed_flop": {"forward": flop, "backward": 2.5 * flop},
        }
        records.append(common.record("attention_speed", label, name, argv, forward, **figures))
    common.write("attention_speed", records, args.out)
    return tables.report("attention_speed", args.out)


if __name__ == "__main__":
    main(sys.argv[1:])
