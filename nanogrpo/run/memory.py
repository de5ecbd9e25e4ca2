"""What a run needs of memory, told before anything is allocated, and refused when it cannot fit.

In: the model's sizes, the options, the number of ranks. Out: a table in bytes for one rank, and how
much there is.

With n parameters, of which a block has n_b and the rest (embedding, head, norms) n_r, on W ranks,
computing in b bytes a number (2 on a GPU, 4 on a CPU), strips of T tokens:

    parameters     4·n/W                      float32 masters
    optimizer      8·n/W                      two float32 moments
    gradients      4·n/W, or 4·n + 4·n/W      the latter when they accumulate, unsharded, over several micro-batches
    gathered       b·(n_r + 2·n_b), or b·n    what FSDP holds whole at a time: the root, one block and the next; or all (ZeRO-2)
    activations    T · per_token              by layer: see `activation_bytes`
    key rows       2·b·K·E · (Tk - T)         a layer: keys and values of shared prompts, gathered once a completion
    logits         b·C·V + 4·V·D              one chunk of C rows, and the head's gradient in float32
    engine         b·n + KV cache             its own copy of the weights, and 2·b·K·E a layer for each slot and position
                   or b·n                     of a vLLM server: rank 0's copy of the weights, to be sent
    checkpoint     12·n/W + 4·n               copies on the host while they are written; the last term on rank 0
    reference      4·n/W                      only with beta > 0; its root stays gathered too; one that is synced is saved too
    reward models  b·n of each                whole on every rank; they judge layer by layer, before any activation is kept

With adapters, optimizer, gradients and the checkpoint's first term count what is trained, the head
has no gradient, and there is no reference: it is the same model, its adapters off.

Ahead of a run nobody knows how long completions will be: they are taken at their longest.
`measured` gives the log the peaks beside the estimate. Read next: packing.py (why a strip is as
long as it is), test_memory.py (the estimates against real tensors).
"""

from __future__ import annotations

import logging
import os
import resource
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from nanogrpo.config import Config
from nanogrpo.distributed.world import World
from nanogrpo.errors import UserError
from nanogrpo.grpo import packing
from nanogrpo.model import head as ops
from nanogrpo.model import lora
from nanogrpo.model.decoder import Decoder
from nanogrpo.model.hf_config import ModelConfig

log = logging.getLogger("nanogrpo")


@dataclass(frozen=True)
class Row:
    """One line of the table. Example: Row("optimizer", 4_768_000_000)"""

    name: str
    bytes: int
    on_host: bool = False  # in the machine's memory although the run computes on a GPU


def activation_bytes(c: ModelConfig, item: int, kind: str) -> tuple[int, int]:
    """What the backward needs of one token: (bytes that each layer keeps, bytes of a layer that is
    computed again).

    Counted from Block.forward, each tensor where autograd keeps it: 4·D (input and output of two
    norms), q before and after norm and rotation, k likewise, v, attention's result (and its copy
    that o_proj reads), gate, up, silu(gate), their product.
    """
    D, F = c.hidden_size, c.intermediate_size
    q, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    norms = 2 if c.model_type == "qwen3" else 1  # copies of q and k: before the norm, and rotated
    # float32: one a norm, one a head's softmax
    statistics = 4 * (2 + 2 * c.num_attention_heads + c.num_key_value_heads)
    everything = item * (4 * D + (norms + 2) * q + (norms + 1) * kv + 4 * F) + statistics
    if kind == "none":
        return everything, 0
    if kind == "full":
        return item * D, everything
    # the block's input, and fsdp.KEPT
    results = item * (3 * D + 2 * q + 2 * kv + 2 * F) + 4 * c.num_attention_heads
    return results, everything


def adapter_bytes(model: Decoder, item: int, kind: str) -> tuple[int, int]:
    """The same for the adapters of a layer: A x [r] each, and B A x [out] where results of matrix
    products are kept.
    """
    adapted = [m for m in model.model.layers[0].modules() if isinstance(m, lora.LoRALinear)]
    low = item * sum(len(m.lora_A) for m in adapted)
    high = low + item * sum(len(m.lora_B) for m in adapted)
    return {"none": (low, 0), "full": (0, low), "selective": (high, low)}[kind]


class Longest(NamedTuple):
    """Of a rank's largest micro-batch. Example: Longest(tokens=16384, key_rows=65536, several=True)"""

    tokens: int  # T
    key_rows: int  # Tk: above T where completions share a prompt
    several: bool  # whether an update may need several micro-batches


def longest_strip(cfg: Config, world_size: int, longest_prompt: int) -> Longest:
    prompts = -(-cfg.prompts_per_step // (cfg.steps_per_generation * world_size))
    longest = cfg.max_completion_length - 1
    sample = longest_prompt + longest  # one that exceeds the budget has a strip of its own
    plain = prompts * cfg.num_generations * sample
    if not cfg.share_prompts:
        T = max(min(plain, cfg.token_budget), sample)
        return Longest(T, T, plain > cfg.token_budget)
    tokens, keys = (
        prompts * (longest_prompt + cfg.num_generations * longest),
        prompts * longest_prompt + plain,
    )
    budget = cfg.token_budget, packing.KEY_ROWS * cfg.token_budget
    T = max(min(tokens, budget[0]), sample)
    return Longest(T, max(min(keys, budget[1]), T), tokens > budget[0] or keys > budget[1])


def table(
    model: Decoder, cfg: Config, world: World, longest_prompt: int, judges: Sequence[nn.Module] = ()
) -> list[Row]:
    """The estimate for one rank, from shapes alone: the models may be on the meta device. judges:
    the reward models.
    """
    c, W = model.cfg, world.size
    sharded = dist.is_initialized()
    item = 2 if world.device.type == "cuda" else 4
    n = sum(p.numel() for p in model.parameters())
    t = sum(p.numel() for p in model.parameters() if p.requires_grad)
    block = sum(p.numel() for p in model.model.layers[0].parameters())
    root = n - block * c.num_hidden_layers
    T, Tk, several = longest_strip(cfg, W, longest_prompt)
    kept, again = activation_bytes(c, item, cfg.gradient_checkpointing)
    low, high = adapter_bytes(model, item, cfg.gradient_checkpointing)
    kept, again = kept + low, again + high
    # layers that keep them for the backward
    gathered = c.num_hidden_layers if cfg.gradient_checkpointing == "none" else 1
    rows = min(
        T,
        ops.default_chunk(
            c.vocab_size, torch.bfloat16 if item == 2 else torch.float32, world.device
        ),
    )
    positions = longest_prompt + cfg.max_completion_length
    cache = (
        2
        * item
        * c.num_hidden_layers
        * cfg.max_concurrent
        * c.num_key_value_heads
        * positions
        * c.head_dim
    )
    base = sum(p.numel() for _, p in lora.base_parameters(model))
    engine = [
        Row("engine: weights", item * base),
        Row(f"engine: cache of {cfg.max_concurrent} × {positions:,} tokens", cache),
    ]
    # another process, which counts for itself; of ours, rank 0 holds what it sends
    if cfg.engine == "vllm":
        engine = [Row("weights to be sent", item * base * world.main)]
    head = c.vocab_size * c.hidden_size if model.lm_head.weight.requires_grad else 0
    mixed = n if cfg.sync_ref_model else 0  # a reference that is no longer the base is saved too
    away = cfg.cpu_offload and world.device.type == "cuda"
    out = [
        Row("parameters", 4 * n // W, away),
        Row("optimizer", 8 * t // W, away),
        Row("gradients", 4 * t // W, away),
    ]
    if sharded:
        if several:
            out.append(Row("gradients, summed before they are reduced", 4 * t))
        out.append(
            Row("gathered by FSDP", item * (root + 2 * block if cfg.reshard_after_forward else n))
        )
    if cfg.beta and not cfg.lora_r:
        out.append(Row("reference model", 4 * n // W + (item * root if sharded else 0), away))
    out += [
        Row(f"reward model {judge.__name__}", sum(p.nbytes for p in judge.parameters()))
        for judge in judges
    ]
    out += [
        Row(
            f"activations of {T:,} tokens",
            T * (c.num_hidden_layers * kept + again + 3 * item * c.hidden_size),
        ),
        Row(
            f"keys and values gathered for {Tk:,} rows",
            gathered * 2 * item * c.num_key_value_heads * c.head_dim * (Tk - T),
        ),
        Row(
            f"logits of {rows:,} tokens",
            item * rows * c.vocab_size + (4 if item == 2 else 8) * head,
        ),
        *engine,
        Row(
            "a checkpoint that is being written",
            (12 * t + 4 * mixed) // W + 4 * n * world.main,
            on_host=True,
        ),
    ]
    return out


def capacity(world: World) -> tuple[int, int]:
    """(bytes on the device, bytes of host memory) for one rank. Ranks of one machine share its
    memory.
    """
    host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = Path("/sys/fs/cgroup/memory.max")  # a container's share, where there is one
    if limit.exists() and limit.read_text().strip().isdecimal():
        host = min(host, int(limit.read_text()))
    host //= int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if world.device.type == "cuda":
        return torch.cuda.get_device_properties(world.device).total_memory, host
    return host, host


def shown(n: int) -> str:
    """1536 → "1.5 KiB"."""
    size, units = float(n), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1000 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.1f} {units[0]}" if units[0] != "B" else f"{n} B"


def check(
    model: Decoder, cfg: Config, world: World, longest_prompt: int, judges: Sequence[nn.Module] = ()
) -> int:
    """Prints the table on rank 0; raises UserError where the sum exceeds what there is. Returns the
    bytes for the device.
    """
    rows = table(model, cfg, world, longest_prompt, judges)
    device, host = capacity(world)
    on_host = [row for row in rows if row.on_host or world.device.type == "cpu"]
    on_gpu = [row for row in rows if row not in on_host]
    for place, there, some in [("the GPU", device, on_gpu), ("this machine", host, on_host)]:
        needed = sum(row.bytes for row in some)
        if not some:
            continue
        log.info(
            "memory of a process on %s, estimated: %s of %s", place, shown(needed), shown(there)
        )
        for row in some:
            log.info("  %9s  %s", shown(row.bytes), row.name)
        if needed > there:
            sizes = ", ".join(
                f"{row.name} {shown(row.bytes)}"
                for row in sorted(some, key=lambda row: -row.bytes)[:4]
            )
            raise UserError(
                f"a process needs {shown(needed)} of memory but {place} has {shown(there)} for it ({sizes}, …): lower "
                "--token-budget or --max-concurrent, use --gradient-checkpointing full or --cpu-offload, or more processes."
            )
    return sum(row.bytes for row in on_gpu or on_host)


def measured(world: World, estimate: int) -> dict[str, float]:
    """In GiB: the most memory that any process has had so far; and on a GPU, the most that tensors
    took at one time on any rank since the last call, beside what `check` had estimated. Every rank
    must call.
    """
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # the kernel counts KiB
    out = {"memory/host_peak_gib": max(world.gather(peak)) / 2**20}
    if world.device.type == "cuda":
        peak = max(world.gather(torch.cuda.max_memory_allocated(world.device)))
        torch.cuda.reset_peak_memory_stats(world.device)
        out |= {"memory/peak_gib": peak / 2**30, "memory/estimate_gib": estimate / 2**30}
    return out
