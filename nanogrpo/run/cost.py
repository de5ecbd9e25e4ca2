"""Predict the seconds of each phase of a step from counted FLOP, bytes and link speeds.

In: the model's shape, the speed of a device (`GPUS`, or `measured` on this machine's CPU), the
lengths of a step's prompts and completions, and the number of GPUs that train and that sample. Out:
seconds. docs/scale.md explains each formula and its sources. Nothing here has been compared with a
GPU yet; bench/plan.py compares it with real steps on a CPU. Read next: plan.py.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import itertools
import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nanogrpo.kernels import linear
from nanogrpo.model.decoder import Block
from nanogrpo.model.hf_config import ModelConfig

COUNTED = 64  # tokens on which the operations of a layer are counted


class Device(NamedTuple):
    """The speed of a GPU, or of a CPU as a single device."""

    flops: float  # FLOP/s of matrix products
    attention: float  # FLOP/s of attention
    bandwidth: float  # bytes/s of its memory
    launch: float  # seconds to start one operation
    memory: int  # bytes
    link: float = math.inf  # bytes/s to and from the other GPUs of the machine, each way
    network: float = math.inf  # bytes/s per GPU to and from other machines, each way
    item: int = 2  # bytes per number in a forward pass
    # FLOP/s of products with as many rows as a decode step has, where memory is not the limit
    decode: float = 0.0
    fused: bool = False  # whether the decoder uses the Triton kernels
    reduce: float = 0.0  # seconds of an all-reduce among the GPUs of a vLLM server


def _gpu(tflops: float, tb: float, gib: int, link: float, network: float) -> Device:
    """Return a GPU from its data sheet: dense bfloat16 TFLOP/s, TB/s and GiB of memory, GB/s of its
    links. Programs reach only a part of these; the shares are estimates.
    """
    flops = 0.65e12 * tflops
    return Device(
        flops=flops,
        attention=0.5e12 * tflops,
        bandwidth=0.8e12 * tb,
        launch=2e-6,
        memory=gib << 30,
        link=0.8e9 * link,
        network=0.8e9 * network,
        decode=flops,
        fused=True,
    )


# The vendor's figures. The "GB" of a card's name are GiB; of the L40S's 48, ECC leaves 45.
# `network`: one 400 Gbit/s adapter per GPU in H100, H200 and B200 servers,
# 200 Gbit/s with A100, 100 Gbit/s with L40S, and 10 Gbit/s for the others.
GPUS = {
    "4090": _gpu(165, 1.008, 24, 32, 1.25),
    "A100-40GB": _gpu(312, 1.555, 40, 300, 25),
    "A100": _gpu(312, 2.039, 80, 300, 25),
    "L40S": _gpu(362, 0.864, 45, 32, 12.5),
    "H100": _gpu(989, 3.35, 80, 450, 50),
    "H200": _gpu(989, 4.8, 141, 450, 50),
    "B200": _gpu(2250, 8.0, 180, 900, 50),
}


class Work(NamedTuple):
    """The tokens of a step: lengths of prompts [P] and completions [P·G]."""

    prompts: Sequence[int]
    completions: Sequence[int]
    skipped: float = 0.0  # share of the completions whose groups have no signal

    @property
    def group(self) -> int:
        return len(self.completions) // len(self.prompts)

    @property
    def pairs(self) -> tuple[float, float]:
        """Query-key pairs: of the prompts among themselves, and of all completion tokens."""
        own = sum(p * (p + 1) / 2 for p in self.prompts)
        lengths = zip(itertools.chain(*([p] * self.group for p in self.prompts)), self.completions)
        return own, sum(c * p + c * (c + 1) / 2 for p, c in lengths)


def lengths(count: int, mean: float, longest: int) -> list[int]:
    """Return lengths in 1 … longest with about this mean: exponentially distributed and cut off, as
    those of reasoning models are.
    """
    low, high = 0.0, 1e3 * longest
    # the quantiles of the distribution, so the result is not random
    quantiles = -np.log1p(-(np.arange(count) + 0.5) / count)
    for _ in range(60):  # find the scale by bisection
        scale = (low + high) / 2
        found = (scale * quantiles).round().clip(1, longest).astype(int)
        low, high = (scale, high) if found.sum() < mean * count else (low, scale)
    # in an order that mixes long and short ones
    return found[np.arange(count) * 7919 % count if count % 7919 else ...].tolist()


class Weights(NamedTuple):
    """Numbers of weights of a model."""

    block: int  # matrices of one layer
    head: int  # the output matrix
    total: int
    layers: int

    @classmethod
    def of(cls, c: ModelConfig) -> Weights:
        q, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        block = c.hidden_size * (2 * q + 2 * kv + 3 * c.intermediate_size)
        head = c.vocab_size * c.hidden_size
        total = c.num_hidden_layers * block + head * (1 if c.tie_word_embeddings else 2)
        return cls(block, head, total, c.num_hidden_layers)


# --- counting -------------------------------------------------------------------------------------


class Traffic(TorchDispatchMode):
    """Count the operations on tensors, and the bytes read and written by all but products."""

    PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.launches = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        # Views, and memory that is only reserved, cost nothing.
        if func.is_view or name in ("detach", "empty", "empty_like", "_unsafe_view"):
            return out
        self.launches += 1
        if name not in self.PRODUCTS:
            outs = out if isinstance(out, (tuple, list)) else [out]
            tensors = [x for x in (*args, *outs) if isinstance(x, Tensor)]
            self.bytes += sum(x.numel() * x.element_size() for x in tensors)
        return out


class Layer(NamedTuple):
    """The operations of one layer."""

    launches: int
    bytes: float  # per token, read and written by all but products and attention


@torch.enable_grad()  # `measured` has turned it off
def layer_traffic(c: ModelConfig, d: Device) -> tuple[Layer, Layer]:
    """Return the operations of a forward and of a backward pass.

    With the Triton kernels, each tensor is read and written once (tests/kernels/traffic.py counts
    the same); a backward pass takes about twice as much. Without them, one layer runs on the meta
    device, where nothing is computed, and its operations are counted.
    """
    D, F, E = c.hidden_size, c.intermediate_size, c.head_dim
    if d.fused:
        heads = c.num_attention_heads + c.num_key_value_heads
        moved = d.item * (9 * D + 2 * heads * E + 3 * F)
        return Layer(12, moved), Layer(28, 2 * moved)
    with torch.device("meta"):
        block = Block(c, 0)
        x = torch.empty(COUNTED, D, requires_grad=True)
        angles = torch.empty(COUNTED, 1, E)
    found = Traffic(), Traffic()
    with found[0]:
        out = block(x, angles, angles, lambda layer, q, k, v: q)
    with found[1]:
        out.sum().backward()
    forward, backward = (Layer(t.launches + 3, t.bytes / COUNTED) for t in found)
    return forward, backward


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
    """Return the seconds to train on a step's completions.

    budget: tokens of a micro-batch. checkpointing: --gradient-checkpointing. adapters: how many
    weights are trained, if not all (LoRA). updates: optimizer steps per iteration. iterations:
    passes over the step. scored: further forward passes, for old or reference log-probs.
    reduces_each: whether gradients are reduced after each micro-batch.
    """
    w, E = Weights.of(c), c.num_attention_heads * c.head_dim
    kept = 1 - work.skipped
    trained = kept * sum(work.completions)
    tokens = kept * sum(work.prompts) + trained
    pairs = kept * sum(work.pairs)
    # All in units of a forward pass. A frozen weight has no gradient of its own.
    again = iterations * (checkpointing != "none")  # of cheap operations
    all_again = iterations * (checkpointing == "full")  # of products and attention
    forwards, gradients = iterations + scored, iterations * (1 if adapters else 2)
    products = (forwards + all_again + gradients) * w.layers * w.block * tokens
    products += (forwards + gradients) * w.head * trained
    attention = (forwards + all_again + 2 * iterations) * w.layers * E * pairs
    forward, backward = layer_traffic(c, d)
    moved = (forwards + again) * forward.bytes + iterations * backward.bytes
    moved *= w.layers * tokens
    # logits in float32, read and written once in each pass
    moved += 8 * (forwards + iterations) * c.vocab_size * trained
    micro = updates * math.ceil(tokens / updates / gpus / budget)
    launches = w.layers * micro * (forwards * forward.launches + iterations * backward.launches)
    compute = 2 * products / d.flops + 4 * attention / d.attention + moved / d.bandwidth
    compute = max(compute / gpus, launches * d.launch)
    # Every pass of a micro-batch gathers the weights. Gradients are reduced in float32.
    n, reduced = adapters or w.total, micro if reduces_each else updates
    traffic = d.item * micro * (forwards + iterations) * w.total + 4 * reduced * iterations * n
    transfer = traffic * (gpus - 1) / gpus / ring(d, gpus, per_node)
    # an update reads 20 bytes per weight and writes 12
    optimizer = 32 * updates * iterations * n / gpus / d.bandwidth
    return max(compute, transfer) + optimizer


def ring(d: Device, gpus: int, per_node: int) -> float:
    """Return the bytes/s of a ring through these GPUs. Between machines, NCCL builds one ring per
    network adapter, and there is one adapter per GPU.
    """
    return d.link if gpus <= per_node else min(d.link, per_node * d.network)


def decode_step(c: ModelConfig, rows: float, keys: float, d: Device) -> float:
    """Return the seconds of one decode step with this many rows and cached keys in total."""
    w = Weights.of(c)
    weights = w.layers * w.block + w.head
    products = max(2 * weights * rows / d.decode, d.item * weights / d.bandwidth)
    cache = 2 * d.item * c.num_key_value_heads * c.head_dim * w.layers * keys
    sampling = (d.item + 12) * c.vocab_size * rows  # logits, and three passes over probabilities
    launches = w.layers * layer_traffic(c, d)[0].launches + 20
    waits = launches * d.launch + 2 * w.layers * d.reduce
    return products + (cache + sampling) / d.bandwidth + waits


def sample(c: ModelConfig, work: Work, d: Device, slots: int) -> float:
    """Return the seconds in which one engine samples: prompts once per group, then decode steps
    with up to `slots` rows. A finished row is replaced at once.
    """
    w, E = Weights.of(c), c.num_attention_heads * c.head_dim
    own, _ = work.pairs
    prefill = 2 * w.layers * w.block * sum(work.prompts) / d.flops
    prefill += 4 * w.layers * E * own / d.attention
    step = _between(lambda rows, keys: decode_step(c, rows, keys, d))
    seconds, now = prefill, 0
    waiting = list(
        zip(itertools.chain(*([p] * work.group for p in work.prompts)), work.completions)
    )
    waiting.reverse()
    active: list[tuple[int, int]] = []  # (step at which it ends, step at which it would have begun)
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


def _between(step: Callable[[float, float], float]) -> Callable[[float, float], float]:
    """Return the same function, but evaluate it only twice per number of rows: it is linear in the
    number of keys.
    """
    cached: dict[float, tuple[float, float]] = {}

    def fast(rows: float, keys: float) -> float:
        if rows not in cached:
            base = step(rows, 0.0)
            cached[rows] = base, step(rows, 1.0) - base
        base, slope = cached[rows]
        return base + slope * keys

    return fast


def sync(
    c: ModelConfig, d: Device, trainers: int, near: int = 0, far: int = 0, per_node: int = 8
) -> float:
    """Return the seconds to bring the weights to the engine: to a copy on each GPU, or from rank 0
    to vLLM servers, which write them to memory once more.

    near: servers on the machine of rank 0. far: servers on others. Rank 0 sends the weights to each
    of them, at the same time.
    """
    size = d.item * Weights.of(c).total
    gather = size * (trainers - 1) / trainers / ring(d, trainers, per_node)
    copy = (4 / d.item + 1) * size / trainers / d.bandwidth  # cast the float32 shards
    sent = size * max(near / d.link, far / d.network)
    return gather + copy + (sent + 2 * size / d.bandwidth if near + far else 0.0)


# --- a CPU as a device ----------------------------------------------------------------------------


def _seconds(work: Callable[[], object], repeats: int = 5) -> float:
    """Return the median seconds of a call."""
    found = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        work()
        found.append(time.perf_counter() - began)
    return sorted(found[1:])[repeats // 2]


@torch.no_grad()
def measured(c: ModelConfig, rows: int, slots: int, keys: int) -> Device:
    """Return the speed of this machine's CPU on the shapes of a model.

    rows: tokens of a micro-batch; slots: rows of a decode step; keys: length of a sequence.
    """
    D, F, E = c.hidden_size, c.intermediate_size, c.head_dim
    H, K = c.num_attention_heads, c.num_key_value_heads
    shapes = [(D, (H + 2 * K) * E), (H * E, D), (D, 2 * F), (F, D)]

    def products(n: int, decoding: bool) -> float:
        flop = seconds = 0.0
        for n_in, n_out in shapes:
            x, weight = torch.randn(n, n_in), torch.randn(n_out, n_in)
            work = linear.packed(weight, None, n) if decoding else linear.linear
            seconds += _seconds(functools.partial(work, x, weight, None))
            flop += 2 * n * n_in * n_out
        return flop / seconds

    q, k = torch.randn(1, H, keys, E), torch.randn(1, H, keys, E)
    attend = torch.nn.functional.scaled_dot_product_attention
    pairs = keys * (keys + 1) / 2
    a, b = torch.randn(2, 1 << 24)
    bandwidth = 12 * a.numel() / _seconds(lambda: torch.mul(a, b))
    # The time per operation is that of a block on one token, which is too small for anything else.
    tiny = dataclasses.replace(
        c,
        hidden_size=64,
        intermediate_size=64,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
    )
    block, x, angles = Block(tiny, 0), torch.randn(1, 64), torch.randn(1, 1, 32)
    found = Device(
        flops=products(rows, decoding=False),
        attention=4 * H * E * pairs / _seconds(lambda: attend(q, k, k, is_causal=True)),
        bandwidth=bandwidth,
        launch=0.0,
        memory=0,
        item=4,
        decode=products(slots, decoding=True),
    )
    seconds = _seconds(lambda: block(x, angles, angles, lambda layer, q, k, v: q))
    return found._replace(launch=seconds / layer_traffic(tiny, found)[0].launches)
