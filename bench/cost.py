"""Predict how many seconds each phase of a step takes, from FLOP, bytes and link speeds.

In: the model's shape, the speed of a device, the lengths of a step's prompts and completions, and
the numbers of GPUs for training and for sampling. Out: seconds. `GPUS` contains the speeds of GPUs,
and bench/plan.py measures the speed of a CPU. docs/scale.md explains each formula and its sources.
Read next: plan.py.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from nanogrpo.model.hf_config import ModelConfig

ALL_REDUCE = 1e-5  # seconds of an all-reduce between the GPUs of a vLLM server


class Layer(NamedTuple):
    """The number of operations in one decoder layer, and the bytes per token that these operations
    read and write. The bytes that matrix products and attention move are not included.
    """

    decode: int  # operations of a decode step
    forward: int  # operations of a forward pass in training
    backward: int
    forward_bytes: float
    backward_bytes: float


class Device(NamedTuple):
    """The speed of a GPU, or of a CPU as a single device."""

    flops: float  # FLOP/s of matrix products
    attention: float  # FLOP/s of attention in training, including the time to gather its keys
    bandwidth: float  # bytes/s of its memory
    loss: float  # seconds per logit to compute loss and gradient
    draw: float  # seconds per logit to sample a token
    launch: float  # minimum number of seconds that an operation of a decode step takes
    host: float  # seconds that the host needs to launch an operation in training
    token: float  # seconds that the host spends on a sampled token
    decode: float  # FLOP/s of the matrix products of a decode step
    weights: float  # bytes/s at which a decode step reads weights
    cache: float  # bytes/s at which a decode step reads keys and values
    memory: int  # bytes
    link: float = math.inf  # bytes/s between GPUs of a machine, in each direction
    network: float = math.inf  # bytes/s per GPU between machines, in each direction
    item: int = 2  # bytes per element in a forward pass
    layer: Layer | None = None  # None means a layer with the Triton kernels


def _gpu(tflops: float, tb: float, gib: int, link: float, network: float) -> Device:
    """Return the `Device` of a GPU from the numbers in its data sheet: dense bfloat16 TFLOP/s,
    memory bandwidth in TB/s, memory size in GiB, and GB/s of its links.

    Programs reach only a fraction of the speeds in a data sheet. The fractions and the host times
    in this function were measured on an H100 on 2026-11-22, with torch 2.11 (docs/scale.md). The
    fraction for links is an estimate.
    """
    flops, bandwidth = 0.75e12 * tflops, 0.8e12 * tb
    return Device(
        flops=flops,
        attention=0.13e12 * tflops,
        bandwidth=bandwidth,
        loss=4 / bandwidth,  # one read and one write of a logit in bfloat16
        draw=4 / bandwidth,  # two reads of a logit in bfloat16
        launch=3.2e-6,
        host=5e-5,
        token=4.3e-6,
        decode=flops,
        weights=bandwidth,
        cache=bandwidth,
        memory=gib << 30,
        link=0.8e9 * link,
        network=0.8e9 * network,
    )


# Most of these numbers come from NVIDIA's data sheets.
# The numbers of L4, A10G, 3090, 5090, A6000 and RTX-PRO-6000 have not been checked against data
# sheets.
# Memory sizes are in GiB. An L40S has 48 GiB, but its ECC takes 3 GiB.
# Each GPU has one network adapter.
# Its speed in Gbit/s is 400 for H100, H200 and B200, 200 for A100, 100 for L40S, and 10 for others.
# A T4 or a V100 has no bfloat16, so a run needs a newer GPU.
GPUS = {
    "L4": _gpu(121, 0.3, 23, 32, 1.25),
    "A10G": _gpu(70, 0.6, 23, 32, 1.25),
    "3090": _gpu(71, 0.936, 24, 32, 1.25),
    "4090": _gpu(165, 1.008, 24, 32, 1.25),
    "5090": _gpu(210, 1.792, 32, 64, 1.25),
    "A6000": _gpu(155, 0.768, 48, 32, 1.25),
    "RTX-PRO-6000": _gpu(504, 1.792, 96, 64, 1.25),
    "A100-40GB": _gpu(312, 1.555, 40, 300, 25),
    "A100": _gpu(312, 2.039, 80, 300, 25),
    "L40S": _gpu(362, 0.864, 45, 32, 12.5),
    "H100": _gpu(989, 3.35, 80, 450, 50),
    "H200": _gpu(989, 4.8, 141, 450, 50),
    "B200": _gpu(2250, 8.0, 180, 900, 50),
}


def gpu(name: str) -> tuple[str, Device] | None:
    """Return the name and the `Device` of a GPU, or None if `name` is unknown. `name` may also be a
    memory size such as `24GB`. The result is then the GPU in `GPUS` whose memory size is nearest,
    but its `memory` is set to the given size. If several GPUs are equally near, the slowest is
    used.
    """
    named = {key.lower(): key for key in GPUS}.get(name.lower())
    if named:
        return named, GPUS[named]
    size = name.upper().removesuffix("B").removesuffix("G")
    if size == name.upper() or not size.isdecimal():
        return None
    near = min(GPUS, key=lambda key: (abs(GPUS[key].memory - (int(size) << 30)), GPUS[key].flops))
    return near, GPUS[near]._replace(memory=int(size) << 30)


class Work(NamedTuple):
    """The lengths of a step's prompts [P] and completions [P·G], in tokens."""

    prompts: Sequence[int]
    completions: Sequence[int]
    skipped: float = 0.0  # fraction of completions that have advantage 0 and so are not trained on

    @property
    def sequences(self) -> list[tuple[int, int]]:
        """The lengths of the prompt and of the completion, for each completion."""
        group = len(self.completions) // len(self.prompts)
        prompts = itertools.chain.from_iterable([p] * group for p in self.prompts)
        return [*zip(prompts, self.completions)]

    @property
    def pairs(self) -> tuple[float, float]:
        """The number of query-key pairs whose query is in a prompt, and the number of query-key
        pairs whose query is in a completion.
        """
        own = sum(p * (p + 1) / 2 for p in self.prompts)
        return own, sum(c * p + c * (c + 1) / 2 for p, c in self.sequences)


def lengths(count: int, mean: float, longest: int) -> list[int]:
    """Return `count` lengths from 1 to `longest`, whose mean is about `mean`. The distribution is a
    truncated exponential. The lengths of a reasoning model's completions have a similar
    distribution.
    """
    low, high = 0.0, 1e3 * longest
    # The lengths are quantiles of the distribution, so they are not random.
    quantiles = -np.log1p(-(np.arange(count) + 0.5) / count)
    for _ in range(60):  # find the scale by bisection
        scale = (low + high) / 2
        found = (scale * quantiles).round().clip(1, longest).astype(int)
        low, high = (scale, high) if found.sum() < mean * count else (low, scale)
    # Shuffling mixes long and short completions.
    return found[np.arange(count) * 7919 % count if count % 7919 else ...].tolist()


class Weights(NamedTuple):
    """The number of weights in each part of a model."""

    block: int  # matrices of one layer
    head: int  # the output matrix
    total: int
    layers: int

    @classmethod
    def of(cls, c: ModelConfig) -> Weights:
        head, layers = c.vocab_size * c.hidden_size, c.num_hidden_layers
        total = layers * c.block_weights + head * (1 if c.tie_word_embeddings else 2)
        return cls(c.block_weights, head, total, layers)


def matrices(c: ModelConfig) -> list[tuple[int, int]]:
    """Return (input size, output size) of each matrix of a layer."""
    D, F, q = c.hidden_size, c.intermediate_size, c.num_attention_heads * c.head_dim
    kv = c.num_key_value_heads * c.head_dim
    return [(D, q), (D, kv), (D, kv), (q, D), (D, F), (D, F), (F, D)]


def layer(c: ModelConfig, d: Device) -> Layer:
    """Return the operations of a layer. A Triton kernel reads and writes each of its tensors once.
    The backward pass moves about twice as many bytes as the forward pass.
    """
    heads = c.num_attention_heads + c.num_key_value_heads
    moved = d.item * (9 * c.hidden_size + 2 * heads * c.head_dim + 3 * c.intermediate_size)
    return d.layer or Layer(8, 14, 50, moved, 2 * moved)


# --- the phases -----------------------------------------------------------------------------------


def train(
    c: ModelConfig,
    work: Work,
    d: Device,
    gpus: int = 1,
    *,
    budget: int = 16384,
    checkpointing: str = "none",
    per_node: int = 8,
    adapters: int = 0,
    updates: int = 1,
    iterations: int = 1,
    scored: int = 0,
    reduces_each: bool = False,
) -> float:
    """Return how many seconds it takes to train on a step's completions.

    `budget` is the number of tokens of a micro-batch. `checkpointing` is --gradient-checkpointing.
    `adapters` is the number of LoRA weights, or 0 if all weights are trained. `updates` is the
    number of optimizer steps per iteration. `iterations` is the number of passes over the step's
    completions. `scored` is the number of extra forward passes, for old or reference log-probs.
    `reduces_each` says whether gradients are reduced after each micro-batch.
    """
    w, ops, E = Weights.of(c), layer(c, d), c.num_attention_heads * c.head_dim
    n = adapters or w.total
    kept = 1 - work.skipped
    trained = kept * sum(work.completions)
    tokens = kept * sum(work.prompts) + trained
    pairs = kept * sum(work.pairs)
    micro = updates * math.ceil(tokens / updates / gpus / budget)
    # The counts below are in units of one forward pass. Frozen weights need no weight gradients.
    again = iterations * (checkpointing != "none")  # recomputations of cheap operations
    all_again = iterations * (checkpointing == "full")  # recomputations of products and attention
    forwards, gradients = iterations + scored, iterations * (1 if adapters else 2)
    products = (forwards + all_again + gradients) * w.layers * w.block * tokens
    products += (forwards + gradients) * w.head * trained
    # The forward pass of attention has two products, and the backward pass has five.
    attention = (forwards + all_again + 2.5 * iterations) * w.layers * E * pairs
    moved = (forwards + again) * ops.forward_bytes + iterations * ops.backward_bytes
    compute = 2 * products / d.flops + 4 * attention / d.attention
    compute += w.layers * tokens * moved / d.bandwidth + forwards * d.loss * c.vocab_size * trained
    # FSDP gathers the weights for each pass over a micro-batch.
    # On one GPU, the weights are only cast.
    gathers = micro * (forwards + iterations) if gpus > 1 else updates * iterations * (d.item < 4)
    # Weights are cast to the dtype of the forward pass, and gradients are added up in float32.
    copied = (4 + d.item) * w.total * gathers + 10 * n * iterations * (micro - updates)
    # With FSDP, the host launches about twice as many operations.
    launches = w.layers * micro * (forwards * ops.forward + iterations * ops.backward)
    launches *= 2 if gpus > 1 else 1
    compute = max(compute / gpus + copied / d.bandwidth, launches * d.host)
    reduced = micro if reduces_each else updates  # number of reductions, in float32
    traffic = d.item * gathers * w.total + 4 * reduced * iterations * n
    transfer = traffic * (gpus - 1) / gpus / ring(d, gpus, per_node)
    # Clipping reads the gradient twice and writes it once: 12 bytes per weight.
    # An update reads 16 bytes per weight and writes 12.
    optimizer = 40 * updates * iterations * n / gpus / d.bandwidth
    return max(compute, transfer) + optimizer


def ring(d: Device, gpus: int, per_node: int) -> float:
    """Return the bytes/s that NCCL's rings transfer between these GPUs. Between machines, NCCL
    builds one ring per network adapter, and each GPU has one adapter.
    """
    return d.link if gpus <= per_node else min(d.link, per_node * d.network)


def decode_step(c: ModelConfig, d: Device, gpus: int = 1) -> Callable[[float, float], float]:
    """Return a function that predicts the seconds of a decode step. The returned function takes the
    number of rows and the total number of cached keys.

    `gpus` is the number of GPUs per server. Every matrix product is split over the GPUs of the
    server.
    """
    w, ops = Weights.of(c), layer(c, d)
    weights = w.layers * w.block + w.head
    cached = 2 * d.item * c.num_key_value_heads * c.head_dim * w.layers  # bytes per token
    # A small matrix product first reads its weights and then computes, with hardly any overlap.
    row = 2 * weights / d.decode + w.layers * ops.forward_bytes / d.bandwidth
    row += d.draw * c.vocab_size
    between = 2 * w.layers * ALL_REDUCE if gpus > 1 else 0.0

    def seconds(rows: float, keys: float) -> float:
        shared = d.item * weights / d.weights + rows * row + keys * cached / d.cache
        step = (w.layers * ops.decode + 11) * d.launch
        return shared / gpus + step + between + rows * d.token

    return seconds


def sample(c: ModelConfig, work: Work, d: Device, slots: int, gpus: int = 1) -> float:
    """Return how many seconds one engine takes to sample. The engine processes each prompt once per
    group, and then runs decode steps with up to `slots` rows. A waiting completion replaces a
    finished row immediately. `gpus` is as in `decode_step`.
    """
    w, ops, E = Weights.of(c), layer(c, d), c.num_attention_heads * c.head_dim
    prompts = 2 * w.layers * w.block / d.flops + w.layers * ops.forward_bytes / d.bandwidth
    seconds = prompts * sum(work.prompts) + 4 * w.layers * E * work.pairs[0] / d.attention
    seconds, now, step = seconds / gpus, 0, decode_step(c, d, gpus)
    waiting = work.sequences[::-1]
    # (end, begin) of each row: its last decode step is `end`, and it has t - begin cached keys at
    # decode step t.
    active: list[tuple[int, int]] = []
    while waiting or active:
        while waiting and len(active) < slots:
            prompt, length = waiting.pop()
            heapq.heappush(active, (now + length, now - prompt))
        end = active[0][0]
        middle = (now + end) / 2
        keys = sum(middle - begin for _, begin in active)
        seconds += (end - now) * step(len(active), keys)
        now = end
        while active and active[0][0] == now:
            heapq.heappop(active)
    return seconds


def sync(
    c: ModelConfig, d: Device, trainers: int, near: int = 0, far: int = 0, per_node: int = 8
) -> float:
    """Return how many seconds it takes to copy the weights to the engine.

    The local engine has a copy of the weights on each GPU. With vLLM, rank 0 sends the weights to
    all servers at the same time, and each server then copies them once within its memory. `near`
    servers are on the machine of rank 0, and `far` servers are on other machines.
    """
    size = d.item * Weights.of(c).total
    gather = size * (trainers - 1) / trainers / ring(d, trainers, per_node)
    copy = (4 / d.item + 1) * size / trainers / d.bandwidth  # cast the float32 shards
    sent = size * max(near / d.link, far / d.network)
    return gather + copy + (sent + 2 * size / d.bandwidth if near + far else 0.0)
