"""How well does bench/predict.py predict the duration of a step? This benchmark first measures the
speeds of this machine's CPU, and then compares predicted with measured times.

In: nothing. This file creates random models of three sizes. The largest model has the shape of
SmolLM2-135M. Out: results/plan.json, with the predicted and the measured seconds for `sample`,
`train` and the whole step, for each model size. The lengths of the completions are uneven, and the
prediction uses the same lengths.

The prediction uses the formulas of bench/cost.py with the speeds of the CPU. Each speed is measured
on operations with the same shapes and numbers of rows as in the model. Decode steps are measured
with separate matrices for each layer. So the weights stay in the CPU's cache only if the weights of
all layers fit into the cache. No constant is fitted. Read next: bench/cost.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import tempfile
import timeit
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from nanogrpo.kernels.reference.policy import Clip, LossInputs
from torch import Tensor

from bench import common, cost, end_to_end, runs, tables
from bench.step_large import pairs_of
from nanogrpo import Config
from nanogrpo.engine import sampler
from nanogrpo.engine.base import SamplingParams
from nanogrpo.engine.cache import KVCache
from nanogrpo.engine.local import Completion, Scheduler
from nanogrpo.grpo import packing, schedule
from nanogrpo.kernels import linear, reference
from nanogrpo.model.attention import StripAttention
from nanogrpo.model.decoder import Block
from nanogrpo.model.head import head_policy_loss
from nanogrpo.model.hf_config import ModelConfig
from nanogrpo.types import Sample
from tests.kernels.traffic import Attention, Traffic

rand = torch.randn
# hidden size, layers, vocabulary
SIZES = {"3M": (256, 4, 2048), "38M": (512, 12, 16384), "135M": (576, 30, 49152)}


def shape(size: str, context: int) -> ModelConfig:
    hidden, layers, vocab = SIZES[size]
    small = common.small_qwen3(hidden, layers, vocab, context)
    return dataclasses.replace(small, tie_word_embeddings=False)  # as in end_to_end.py


def work_of(samples: list[Sample]) -> cost.Work:
    """Return the lengths of a step's prompts and completions, and the fraction of completions with
    advantage 0.
    """
    prompts = {s.prompt.id: len(s.prompt.token_ids) for s in samples}
    skipped = sum(not s.advantage for s in samples) / len(samples)
    return cost.Work(list(prompts.values()), [len(s.token_ids) for s in samples], skipped)


# --- the speeds of a CPU --------------------------------------------------------------------------


def seconds(work: Callable[[], object], repeats: int = 3) -> float:
    """Return the median duration of a call in seconds."""
    return statistics.median(timeit.repeat(work, number=1, repeat=repeats + 1)[1:])


def backward(function: Callable[..., Any], *inputs: Tensor) -> float:
    """Return how many seconds it takes to compute a function of these inputs and its gradients."""
    inputs = tuple(x.detach().requires_grad_() for x in inputs)

    def both() -> None:
        out = function(*inputs)
        outs = out if isinstance(out, tuple) else (out,)
        torch.autograd.grad(outs, inputs, [torch.ones_like(x) for x in outs])

    return seconds(both)


def operations(c: ModelConfig) -> cost.Layer:
    """Count the operations of a layer on the meta device, where nothing is computed."""
    tokens, forward, back = 64, Traffic(), Traffic()
    with torch.device("meta"):
        block = Block(c, 0)
        x, residual = (torch.empty(tokens, c.hidden_size, requires_grad=True) for _ in range(2))
        angles = torch.empty(tokens, 1, c.head_dim)
    with forward:
        out = block(x, residual, angles, angles, lambda layer, *qkv: Attention.apply(*qkv[:3]))
    with back:
        torch.autograd.backward(out, [torch.empty_like(y) for y in out])
    launches = [t.elementwise.launches + t.products.launches for t in (forward, back)]
    moved = [t.elementwise.bytes / tokens for t in (forward, back)]
    return cost.Layer(launches[0], *launches, *moved)


def training(c: ModelConfig, samples: list[Sample], layer: cost.Layer) -> dict[str, float]:
    """Return the speeds of training on these samples."""
    D, E, V = c.hidden_size, c.head_dim, c.vocab_size
    cfg = Config(model="m")
    (batch,) = packing.pack(
        schedule.plan(range(len(samples)), [s.facts for s in samples], cfg), samples, cfg
    )
    T = len(batch.tokens)
    products = [backward(linear.linear, rand(T, i), rand(o, i)) for i, o in cost.matrices(c)]
    flops = 6 * T * c.block_weights / sum(products)

    attend = StripAttention(
        batch.cu_seqlens, batch.max_len, batch.kv_rows, batch.kv_cu_seqlens, batch.kv_max_len
    )
    heads = [rand(T, n, E) for n in (c.num_attention_heads, *2 * [c.num_key_value_heads])]
    seconds_of_attention = backward(lambda *qkv: attend(0, *qkv), *heads)

    angles, (q, k, _) = rand(T, 1, E), heads
    norms = torch.ones(D), torch.ones(E)

    def elementwise(x: Tensor, gate: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
        """Return the results of all functions of a block except matrix products and attention."""
        total = reference.add_rms_norm(x, x, norms[0], 1e-6)
        rotated = reference.norm_rope(q, k, norms[1], norms[1], angles, angles, 1e-6)
        normed = reference.rms_norm(x, norms[0], 1e-6)
        return *total, *rotated, normed, reference.swiglu(gate, gate), x + x

    rest = backward(elementwise, rand(T, D), rand(T, c.intermediate_size), q, k)
    M, one = len(batch.rows), torch.ones(len(batch.rows))
    inputs, clip = LossInputs(one, one), Clip(0.2, 0.2)
    head = backward(
        lambda h, w: head_policy_loss(h, w, one.long(), inputs, clip).loss, rand(M, D), rand(V, D)
    )
    return {
        "flops": flops,
        "attention": 14 * c.num_attention_heads * E * pairs_of(batch) / seconds_of_attention,
        "bandwidth": T * (layer.forward_bytes + layer.backward_bytes) / rest,
        # the three matrix products are left out here, because they are counted separately
        "loss": max(head / (M * V) - 6 * D / flops, 1e-15),
    }


@torch.inference_mode()
def decoding(c: ModelConfig, samples: list[Sample]) -> dict[str, float]:
    """Return the speeds of sampling completions with these lengths."""
    K, E, V, L = c.num_key_value_heads, c.head_dim, c.vocab_size, c.num_hidden_layers
    longest = max(len(s.token_ids) for s in samples)
    rows = max(1, round(sum(len(s.token_ids) for s in samples) / longest))  # on average
    # Each layer gets its own matrices. Matrices shared by all layers could fit into the cache,
    # although the model's weights do not.
    whole = [*cost.matrices(c) * L, (c.hidden_size, V)]
    steps = [(linear.repacked(rand(o, i), None, len(samples)), i) for i, o in whole]

    def products(count: int) -> float:
        inputs = [(step, rand(count, i)) for step, i in steps]
        return seconds(lambda: [step(x) for step, x in inputs])

    alone, together = products(1), products(1 + rows)
    weights = sum(i * o for i, o in whole)

    prompt, cpu = len(samples[0].prompt.token_ids), torch.device("cpu")
    span = prompt + longest // 3
    cache = KVCache(c, len(samples), prompt + longest, torch.float32, cpu)
    cache.begin(torch.full((rows,), span - 1))
    q, k, v = (rand(rows, n, E) for n in (c.num_attention_heads, K, K))
    cached = seconds(lambda: [cache(layer, q, k, v) for layer in range(L)])

    scheduler = Scheduler(cache, len(samples), cpu)
    empty = (Sample(s.prompt, 0, [], [], False, []) for s in samples[:rows])
    scheduler.active = [Completion(s, sys.maxsize, 0, 0, []) for s in empty]
    new = torch.zeros(1, rows, dtype=torch.int64), torch.zeros(1, rows)
    host = seconds(lambda: scheduler.postprocess(0, (), scheduler.active, *new), 50)

    logits, keys = rand(rows, V), torch.arange(rows)
    draw = seconds(lambda: sampler.sample(logits, keys, keys, SamplingParams()))
    return {
        "weights": 4 * weights / alone,
        "decode": 2 * weights * rows / max(together - alone, 1e-9),
        "cache": 8 * K * E * L * rows * span / cached,
        "draw": draw / logits.numel(),
        "token": host / rows,
    }


@torch.inference_mode()
def launch(c: ModelConfig, operations: int) -> float:
    """Return the overhead per operation in seconds, measured on a very small block."""
    sizes = dict.fromkeys(("hidden_size", "intermediate_size", "head_dim"), 32)
    tiny = dataclasses.replace(c, **sizes, num_attention_heads=2, num_key_value_heads=1)
    block, x, angles = Block(tiny, 0), rand(1, 32), rand(1, 1, 32)
    return seconds(lambda: block(x, x, angles, angles, lambda layer, q, *_: q), 50) / operations


def measured(c: ModelConfig, samples: list[Sample]) -> cost.Device:
    """Return this CPU's speeds for the operations of a step with these samples."""
    layer = operations(c)
    each = launch(c, layer.decode)
    return cost.Device(
        **training(c, samples, layer),
        **decoding(c, samples),
        launch=each,
        host=each,
        memory=0,
        item=4,
        layer=layer,
    )


# --- a benchmark ----------------------------------------------------------------------------------


def measure(size: str, args: argparse.Namespace, argv: Sequence[str]) -> dict:
    """Return the record of one model size."""
    c = shape(size, args.prompt_length + args.longest)
    sampled: list[list[Sample]] = []
    with tempfile.TemporaryDirectory() as where:
        cfg = end_to_end.write_case(Path(where), c, args, even=False)
        found = runs.ours(dataclasses.replace(cfg, output_dir=str(Path(where) / "out")), sampled)
    device = measured(c, sampled[-1])
    predicted: dict[str, list[float]] = {"sample": [], "train": [], "sync": []}
    for step in sampled[1:]:
        work = work_of(step)
        predicted["sample"].append(cost.sample(c, work, device, cfg.slots))
        predicted["train"].append(cost.train(c, work, device, budget=cfg.strip_tokens))
        predicted["sync"].append(cost.sync(c, device, 1))
    real = {name: statistics.median(found["phases"][name][1:]) for name in (*predicted, "score")}
    guess = {name: statistics.median(values) for name, values in predicted.items()}
    return common.record(
        "plan",
        size,
        "nanogrpo",
        argv,
        predicted={**guess, "step": sum(guess.values())},
        real={**real, "step": sum(real.values())},
        device=device._asdict(),
    )


def main(argv: Sequence[str]) -> list[dict]:
    parser = common.parser(
        "plan",
        __doc__,
        steps=(6, "steps of each run, the first of which is not counted"),
        prompts=(8, "prompts per step"),
        group=(8, "completions per prompt"),
        prompt_length=(64, "tokens per prompt"),
        longest=(128, "length limit of the completions"),
    )
    common.add_cases(parser, SIZES)
    args = parser.parse_args(argv)
    args.shape = "small"  # on the CPU
    torch.set_num_threads(args.threads)
    for size in args.cases:
        common.merge("plan", [measure(size, args, argv)], args.out)
    return tables.report("plan", args.out)


if __name__ == "__main__":
    main(sys.argv[1:])
