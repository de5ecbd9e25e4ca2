"""Estimate the memory of a run before anything is allocated, choose the settings that fit, and
refuse a run that cannot fit.

In: the model's sizes, the options, the number of ranks. Out: a table in bytes for one rank, the
memory that is available, and the options with a value for each setting that the user left open.

With n parameters (n_b in a block, n_r in the rest: embedding, head, norms) on W ranks, computing in
b bytes per number (2 on a GPU, 4 on a CPU) on micro-batches of T tokens:

    parameters     4·n/W                      float32 master weights; 2·n/W for frozen ones that
                                              are stored in bfloat16 (--lora-base-dtype), and
                                              0.52·n/W in 4 bits (--load-in-4bit)
    optimizer      8·n/W                      two float32 moments; about 2·n/W in 8 bits
    gradients      4·n/W, or 4·n              the second while several micro-batches accumulate and
                                              are reduced only after the last
    gathered       b·(n_r + 2·n_b), or b·n    by FSDP: the root and two blocks, or all
                                              (--reshard-after-forward never); blocks in 4 bits
                                              stay so, but on a GPU, torch 2.11 gathers each byte
                                              as two
    dequantized    b·D·F                      the largest matrix, with --load-in-4bit
    activations    T · per_token              per layer: `activation_bytes`
    pictures       patches · per_patch        of a vision encoder (vision/model.py), as if prompts
                                              consisted of pictures only
    key rows       2·b·K·E · (Tk - T)         per layer: keys and values of shared prompts, gathered
                                              once per completion
    logits         b·C·V + 4·V·D              one chunk of C rows, and the head's float32 gradient
    engine         b·n + KV cache             its copy of the weights (with --load-in-4bit only
                                              of the adapters and, if W > 1, of the 4 bits; it
                                              shares the rest), and 2·b·K·E per layer and
                                              token: all positions of all slots, or --cache-tokens
                   or b·n                     with vLLM: rank 0's copy of the weights to send, and
                                              the server, if it is on rank 0's GPU
    checkpoint     12·n/W + 4·n               copies on the host while they are written; the last
                                              term on rank 0 only, 2·n if the base is in bfloat16,
                                              and with --no-save-merged only of the adapters
    reference      4·n/W                      with beta > 0; plus its gathered root, and its own
                                              copy in a checkpoint if it follows the policy
    reward models  b·n each                   on every rank

With adapters, only trained parameters count towards the optimizer, the gradients and the first term
of the checkpoint row. The head then has no gradient, and the reference needs no second model.

Completion lengths are unknown in advance, so we assume the maximum. docs/memory.md shows what is
chosen for which model and GPU. Read next: grpo/packing.py (which determines the length of a strip).
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import re
import resource
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from nanogrpo.config import Config, dashed
from nanogrpo.distributed.world import World
from nanogrpo.engine.cache import cache_tokens
from nanogrpo.errors import UserError, first_sentence
from nanogrpo.grpo import packing
from nanogrpo.model import checkpoint, lora
from nanogrpo.model import head as ops
from nanogrpo.model.decoder import Decoder
from nanogrpo.model.hf_config import ModelConfig

log = logging.getLogger("nanogrpo")


# Left free on a GPU: workspaces, communication buffers, CUDA graphs, fragmentation. A vLLM server
# on the same GPU needs as much for itself.
MARGIN = 2 << 30
MOST = 0.92  # the largest share for vLLM, its own default
# The settings of training that a GPU tries, from the fastest to the leanest:
# gradient_checkpointing, token_budget, reduce_gradients. "selective" calls Python for each
# operation, so short strips wait for the host: on an H100, 12 layers of Qwen3-4B took 1.41 s with
# strips of 4,096 tokens and 0.60 s with 8,192.
SETTINGS = (
    ("none", 16384, "step"),
    ("none", 8192, "step"),
    ("selective", 8192, "step"),
    ("selective", 8192, "micro_batch"),
    ("full", 8192, "micro_batch"),
    ("full", 4096, "micro_batch"),
    ("full", 1024, "micro_batch"),
)
CHOSEN = (
    "max_concurrent",
    "cache_tokens",
    "gradient_checkpointing",
    "token_budget",
    "reduce_gradients",
    "reshard_after_forward",
)
# bytes for each byte of a block in 4 bits, because FSDP of torch 2.11 casts them to bfloat16
GATHERED = 2 if torch.__version__ < "2.12" else 1
MOST_SLOTS = 256  # with more, a decode step takes longer almost in proportion


class Row(NamedTuple):
    """One line of the table. Example: Row("optimizer", 4_768_000_000)"""

    name: str
    bytes: int
    on_host: bool = False  # in host memory, although the run computes on a GPU
    of_server: bool = False  # allocated by a vLLM server on the same GPU


def activation_bytes(c: ModelConfig, item: int, kind: str, fused: bool = False) -> tuple[int, int]:
    """Return (kept, recomputed): the bytes per token that each layer keeps for the backward pass,
    and that one layer recomputes in it. The count follows Block.forward and includes each tensor
    that autograd keeps: 4·D (input and output of two norms), q and k before and after norm and
    rotation, v, attention's result and its copy for o_proj, gate, up, silu(gate), and their
    product. With `fused` kernels, there is neither that copy nor silu(gate).
    """
    D, F = c.hidden_size, c.intermediate_size
    q, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    norms = 2 if c.qk_norm else 1  # copies of q and k: before the norm, and rotated
    # float32 statistics: one number for each norm, and for each head's softmax
    statistics = 4 * (2 + 2 * c.num_attention_heads + c.num_key_value_heads)
    copies, products = (norms + 1, 3) if fused else (norms + 2, 4)
    everything = item * (4 * D + copies * q + (norms + 1) * kv + products * F) + statistics
    if kind == "none":
        return everything, 0
    if kind == "full":
        return item * D, everything
    # the block's input, and the results named in fsdp.KEPT
    results = item * (3 * D + 2 * q + 2 * kv + 2 * F) + 4 * c.num_attention_heads
    return results, everything


def adapter_bytes(model: Decoder, item: int, kind: str) -> tuple[int, int]:
    """Return the same two numbers for the adapters of a layer. Each keeps A x [r], and also B A x
    [out] if the results of matrix products are kept. Dropout keeps its mask and its result [in].
    """
    adapted = [m for m in model.model.layers[0].modules() if isinstance(m, lora.LoRALinear)]
    low = item * sum(len(m.lora_A) for m in adapted)
    high = low + item * sum(len(m.lora_B) for m in adapted)
    mask = 1 if item == 2 else item  # a GPU's mask is boolean
    dropped = (item + mask) * sum(m.lora_A.shape[1] for m in adapted if m.dropout)
    return {
        "none": (low + dropped, 0),
        "full": (0, low + dropped),
        "selective": (high, low + dropped),
    }[kind]


def longest_strip(cfg: Config, world_size: int, longest_prompt: int) -> tuple[int, int, bool]:
    """Return the size of a rank's largest micro-batch: its tokens T, its key rows Tk (more than T
    if completions share a prompt), and whether an update may need several micro-batches.
    """
    prompts = -(-cfg.prompts_per_step // (cfg.steps_per_generation * world_size))
    longest = cfg.max_completion_length - 1
    sample = longest_prompt + longest
    tokens = keys = prompts * cfg.num_generations * sample
    max_keys = budget = cfg.strip_tokens
    if cfg.share_prompts:
        tokens = prompts * (longest_prompt + cfg.num_generations * longest)
        keys += prompts * longest_prompt
        max_keys = packing.KEY_ROWS * budget
    T = max(min(tokens, budget), sample)  # a sample above the budget gets its own strip
    return T, max(min(keys, max_keys), T), tokens > budget or keys > max_keys


def computed(module: nn.Module, item: int, byte: int = 1) -> int:
    """Return the bytes of a module's parameters while it computes, at `item` bytes per number, and
    `byte` bytes per byte of a matrix in four bits.
    """
    return sum((byte if p.dtype == torch.uint8 else item) * p.numel() for p in module.parameters())


def moment_bytes(model: Decoder, cfg: Config, world_size: int) -> int:
    """Return the bytes of the optimizer's two moments on one rank."""
    trained = [p for p in model.parameters() if p.requires_grad]
    if cfg.optim != "adamw_torch_8bit":
        return 8 * sum(p.numel() for p in trained) // world_size
    total = 0.0
    for p in trained:
        local = -(-len(p) // world_size) * p[0].numel()  # FSDP2 shards the first dimension
        quantized = local >= 4096 and local % 256 == 0
        # a byte per number, a float32 scale per 256 numbers, and a table of 256 float32 values
        total += 2 * (local * (1 + 4 / 256) + 4 * 256) if quantized else 8 * local
    return round(total)


def table(
    model: Decoder, cfg: Config, world: World, longest_prompt: int, judges: Sequence[nn.Module] = ()
) -> list[Row]:
    """Return the estimate for one rank. It only needs shapes, so the models may be on the meta
    device.

    judges: the reward models.
    """
    c, W = model.cfg, world.size
    cuda = world.device.type == "cuda"
    sharded = cuda or dist.is_initialized()  # a single GPU uses FSDP2, too
    item, dtype = (2, torch.bfloat16) if cuda else (4, torch.float32)
    offloaded = cfg.cpu_offload and cuda
    parameters = list(model.parameters())
    trained, n = lora.sizes(model)
    byte = GATHERED if cuda else 1
    block = computed(model.model.layers[0], item, byte)
    root = computed(model, item, byte) - sum(computed(each, item, byte) for each in model.blocks)
    moments = moment_bytes(model, cfg, W)
    out = [
        Row("parameters", sum(p.nbytes for p in parameters) // W, offloaded),
        Row("optimizer", moments, offloaded),
    ]
    T, Tk, several = longest_strip(cfg, W, longest_prompt)
    # The sum of several micro-batches takes the place of the shards, which are made of it.
    unsharded = sharded and several and cfg.reduce_gradients != "micro_batch"
    if unsharded and (W > 1 or offloaded):
        out.append(Row("gradients, summed before they are reduced", 4 * trained))
    if offloaded or not (unsharded and W > 1):
        out.append(Row("gradients", 4 * trained // W, offloaded))
    if sharded:
        never = cfg.reshard_after_forward == "never"
        gathered = computed(model, item, byte) if never else root + 2 * block
        out.append(Row("gathered by FSDP", gathered))
    if cfg.load_in_4bit:
        out.append(Row("a dequantized matrix", item * c.hidden_size * c.intermediate_size))
    if cfg.beta and not cfg.lora_r:
        gathered = root if sharded else 0
        out.append(Row("reference model", 4 * n // W + gathered, offloaded))
    for judge in judges:
        size = sum(p.nbytes for p in judge.parameters())
        out.append(Row(f"reward model {judge.__name__}", size))

    kind = cfg.checkpointing
    fused = cuda and cfg.kernels != "torch" and not cfg.torch_compile
    of_block = activation_bytes(c, item, kind, fused)
    kept, again = map(sum, zip(of_block, adapter_bytes(model, item, kind)))
    per_token = c.num_hidden_layers * kept + again + 3 * item * c.hidden_size
    out.append(Row(f"activations of {T:,} tokens", T * per_token))
    if c.vision:
        # all tokens of prompts could be pictures
        shown = -(-cfg.prompts_per_step // (cfg.steps_per_generation * W)) * longest_prompt
        shown = min(T, shown * (1 if cfg.share_prompts else cfg.num_generations))
        visual: Any = model.model.visual
        bytes_of_token = visual.activation_bytes(item, kind)
        out.append(Row(f"pictures of {shown:,} tokens", shown * bytes_of_token))
    key_row = 2 * item * c.num_key_value_heads * c.head_dim  # keys and values of a token in a layer
    layers = c.num_hidden_layers if kind == "none" else 1  # that keep them for the backward pass
    out.append(Row(f"keys and values gathered for {Tk:,} rows", layers * key_row * (Tk - T)))
    rows = min(T, ops.default_chunk(c.vocab_size, dtype, world.device))
    head = c.vocab_size * c.hidden_size if model.lm_head.weight.requires_grad else 0
    gradient = (4 if cuda else 8) * head
    out.append(Row(f"logits of {rows:,} tokens", item * rows * c.vocab_size + gradient))

    # merged with the adapters, if there are any, which are all that is trained then
    weights = item * (n - trained if cfg.lora_r else n)
    if cfg.load_in_4bit and cfg.engine == "local":
        shares = W == 1 and not offloaded and model.lm_head.weight.dtype == dtype
        weights = item * trained if shares else computed(model, item)
    positions = longest_prompt + cfg.max_completion_length
    out += engine_rows(cfg, world, weights, key_row * c.num_hidden_layers, positions)
    saved = 4 * trained + (4 * n if cfg.sync_ref_model else 0)
    size = 0 if cfg.save_only_model else saved // W + moments
    local = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if world.rank < local:  # rank 0 copies the weights, into memory that its machine's ranks share
        size += exported(model, cfg) // local
    return [*out, Row("a checkpoint that is being written", size, on_host=True)]


def exported(model: Decoder, cfg: Config) -> int:
    """Return the bytes of the weights and the adapters in a checkpoint."""
    trained, n = lora.sizes(model)
    adapters = trained if cfg.lora_r else 0
    merged = model.saved_dtype.itemsize * (n - adapters) if cfg.save_merged else 0
    return merged + 4 * adapters


def on_disk(model: Decoder, cfg: Config) -> int:
    """Return the bytes of a checkpoint on the disk."""
    trained, n = lora.sizes(model)
    state = 4 * trained + (4 * n if cfg.sync_ref_model else 0) + moment_bytes(model, cfg, 1)
    return exported(model, cfg) + (0 if cfg.save_only_model else state)


def engine_rows(
    cfg: Config, world: World, weights: int, token: int, positions: int
) -> Iterator[Row]:
    """Yield the rows of the engine. weights: the bytes of its copy of the model; token: those of a
    token's keys and values in all layers; positions: the length of the longest sequence.
    """
    paged = world.device.type == "cuda"
    tokens = cache_tokens(cfg.slots, positions, paged, cfg.cache_tokens)
    name = f"cache of {f'{tokens:,}' if paged else f'{cfg.slots} × {positions:,}'} tokens"
    cache = token * tokens
    if cfg.engine == "local":
        yield Row("engine: weights", weights)
        yield Row(f"engine: {name}", cache)
    elif world.main:  # the server is a separate process; rank 0 has a copy of the weights to send
        yield Row("weights to be sent", weights)
        if world.device.type == "cuda" and not cfg.server and cfg.vllm_gpus in ("", "0"):
            if not cfg.vllm_enable_sleep_mode:  # otherwise it frees both while the trainer trains
                yield Row("vLLM: weights", weights, of_server=True)
                yield Row(f"vLLM: {name}", cache, of_server=True)
            yield Row("vLLM: workspaces", MARGIN, of_server=True)


def on_device(rows: Sequence[Row]) -> int:
    """Return the bytes of the rows that are on the GPU."""
    return sum(row.bytes for row in rows if not row.on_host)


def capacity(world: World) -> tuple[int, int]:
    """Return (bytes on the device, bytes of host memory) for one rank. Of a GPU, what is free or
    already reserved by this process counts. The ranks of a machine share its memory.
    """
    host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = Path("/sys/fs/cgroup/memory.max")  # the limit of a container, if there is one
    if limit.exists() and limit.read_text().strip().isdecimal():
        host = min(host, int(limit.read_text()))
    host //= int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if world.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(world.device)
        return free + torch.cuda.memory_reserved(world.device), host
    return host, host


def shown(n: float) -> str:
    """Format a number of bytes in nvidia-smi's unit: 1.5e9 → "1,430.5 MiB"."""
    return f"{n / 2**20:,.1f} MiB"


# --- the settings ---------------------------------------------------------------------------------


def fit(
    model: Decoder, cfg: Config, world: World, longest_prompt: int, judges: Sequence[nn.Module] = ()
) -> tuple[Config, int]:
    """Return the options with every setting chosen, and the estimate of `check`. Every rank must
    call.
    """
    cuda = world.device.type == "cuda"
    available = min(world.gather(capacity(world)[0])) if cuda else 0
    chosen = choose(model, cfg, world, longest_prompt, available, judges)
    if cuda:
        log.info("settings for the free GPU memory: %s", spelled(chosen))
    return chosen, check(model, chosen, world, longest_prompt, judges)


def choose(
    model: Decoder,
    cfg: Config,
    world: World,
    longest_prompt: int,
    available: int,
    judges: Sequence[nn.Module] = (),
) -> Config:
    """Return the options with a value for each of CHOSEN that the user left open: on a GPU, the
    first of SETTINGS that leaves MARGIN of the available bytes free. If none does, it is the last.

    Sampling takes most of a step and gets faster with the number of completions that the cache
    holds. The cache starts at half of what all slots could need, because few completions reach the
    maximum length. It is halved again only while no setting of training fits. Finally, it grows
    into the memory that is left, up to what all slots could need, but twice the margin stays free.
    All ranks must choose the same, so they choose for rank 0, which stores most. On a CPU, the
    choice does not depend on the memory.
    """
    if world.device.type == "cpu":
        return _with(cfg, cfg.slots, None, cfg.checkpointing, cfg.strip_tokens, "step", "always")
    first = dataclasses.replace(world, rank=0)
    slots = cfg.max_concurrent or min(-(-cfg.generation_batch_size // world.size), MOST_SLOTS)
    longest = longest_prompt + cfg.max_completion_length
    # one GPU: there is nothing to reduce, and gathering only copies the weights, for each strip
    alone = world.size == 1 and not cfg.cpu_offload
    tried = [
        _with(
            cfg,
            slots,
            max(slots * longest >> halvings, longest),
            kind,
            budget,
            "step" if alone else reduce,
            reshard,
        )
        for halvings in range(1, slots.bit_length() + 1)
        for kind, budget, reduce in SETTINGS
        if not (cfg.torch_compile and kind == "selective")
        for reshard in (("never", "always") if alone else ("always",))
    ]

    def left(c: Config) -> int:
        """Return the bytes that remain, if it fits."""
        return available - MARGIN - on_device(table(model, c, first, longest_prompt, judges))

    best = tried[-1]
    if left(best) >= 0:
        best = next(c for c in tried if left(c) >= 0)
        token = 4 * model.cfg.num_key_value_heads * model.cfg.head_dim * model.cfg.num_hidden_layers
        if cfg.cache_tokens is None:
            most, more = slots * longest, max(left(best) - MARGIN, 0) // token
            tokens = min(most, (best.cache_tokens or 0) + more)
            best = dataclasses.replace(best, cache_tokens=tokens)
    return best


def _with(cfg: Config, *settings: Any) -> Config:
    """Return the options with these settings, in the order of CHOSEN, where the user has not given
    others.
    """
    pairs = zip(CHOSEN, settings, strict=True)
    return dataclasses.replace(
        cfg, **{name: x for name, x in pairs if getattr(cfg, name) == getattr(Config, name)}
    )


def spelled(cfg: Config, but: Config | None = None) -> str:
    """Return the settings as a command line has them, without those that are the same in `but`."""
    names = [n for n in CHOSEN if but is None or getattr(cfg, n) != getattr(but, n)]
    if cfg.engine != "local":  # a vLLM server decides for itself
        names = [n for n in names if n not in ("max_concurrent", "cache_tokens")]
    values = {n: getattr(cfg, n) for n in names}
    return " ".join(f"--{dashed(n)} {v}" for n, v in values.items() if v not in (None, 0, "auto"))


def check(
    model: Decoder, cfg: Config, world: World, longest_prompt: int, judges: Sequence[nn.Module] = ()
) -> int:
    """Log the rows, largest first, and return the estimated bytes on the device, without those of a
    vLLM server. Raises UserError if the rows exceed the available memory.
    """
    rows = table(model, cfg, world, longest_prompt, judges)
    device, host = capacity(world)
    on_host = [row for row in rows if row.on_host or world.device.type == "cpu"]
    on_gpu = [row for row in rows if row not in on_host]
    for place, there, here in (("the GPU", device, on_gpu), ("this machine", host, on_host)):
        needed = sum(row.bytes for row in here)
        if not here:
            continue
        largest_first = sorted(here, key=lambda row: -row.bytes)
        parts = [f"{row.name} {shown(row.bytes)}" for row in largest_first if row.bytes]
        lines = textwrap.wrap(
            f"estimated memory per process on {place}: {shown(needed)} of {shown(there)}: "
            + ", ".join(parts),
            width=118,
            subsequent_indent="  ",
        )
        log.info("%s", "\n".join(lines))
        if needed > there:
            sizes = ", ".join(parts[:4])
            merged = "--no-save-merged, " if cfg.lora_r and cfg.save_merged else ""
            advice = (
                f"lower --token-budget or --max-concurrent, use {merged}--gradient-checkpointing "
                "full or --cpu-offload, or use more processes"
            )
            if here is on_gpu:
                advice = what_fits(model, cfg, world, longest_prompt, (device, host), judges)
            raise UserError(
                f"a process needs {shown(needed)} of memory but {place} has {shown(there)} "
                f"available, so {shown(needed - there)} are missing ({sizes}, …): {advice}."
            )
    return sum(row.bytes for row in on_gpu or on_host if not row.of_server)


def what_fits(
    model: Decoder,
    cfg: Config,
    world: World,
    longest_prompt: int,
    available: tuple[int, int],
    judges: Sequence[nn.Module] = (),
) -> str:
    """Return what to change in a run that does not fit on a GPU: every change that is enough,
    according to the table. available: the bytes on the GPU and on the host.
    """
    opened = dataclasses.replace(cfg, **{name: getattr(Config, name) for name in CHOSEN})

    def fitting(changed: Config, model: Decoder = model, size: int = world.size) -> Config | None:
        there = dataclasses.replace(world, rank=0, size=size)
        best = choose(model, changed, there, longest_prompt, available[0], judges)
        rows = table(model, best, there, longest_prompt, judges)
        on_host = sum(row.bytes for row in rows) - on_device(rows)
        return best if on_device(rows) <= available[0] and on_host <= available[1] else None

    found = []
    if best := fitting(opened):
        found.append(spelled(best, but=cfg))
    rank: dict[str, int] = {} if cfg.lora_r else {"lora_r": 16}
    four_bits = {} if cfg.load_in_4bit or cfg.torch_compile else {"load_in_4bit": True}
    for options in filter(None, (rank, rank | four_bits)):
        changed = dataclasses.replace(opened, **options)  # type: ignore[arg-type]  # mixed types
        with torch.device("meta"):
            adapted = checkpoint.decoder_for(model.cfg)
        adapted.saved_dtype = model.saved_dtype
        try:
            lora.attach(adapted, changed, world.device.type)
        except UserError:  # its matrices are not made of blocks for 4 bits
            continue
        if fitting(changed, adapted):
            words = (f"--{dashed(n)}{'' if v is True else f' {v}'}" for n, v in options.items())
            found.append(" ".join(words))
            break
    others = {
        "--optim adamw_torch_8bit": dataclasses.replace(opened, optim="adamw_torch_8bit"),
        "--cpu-offload": dataclasses.replace(opened, cpu_offload=True),
        "--engine vllm with another GPU in --vllm-gpus": dataclasses.replace(
            opened, engine="vllm", vllm_gpus="1", vllm_enable_sleep_mode=False
        ),
    }
    if cfg.engine == "vllm" and not (cfg.server or cfg.vllm_gpus or cfg.max_staleness):
        turns = dataclasses.replace(opened, vllm_enable_sleep_mode=True)
        others["--vllm-enable-sleep-mode"] = turns
    found += [text for text, changed in others.items() if fitting(changed)]
    sizes = [2**i for i in range(1, 7) if 2**i > world.size and cfg.prompts_per_step % 2**i == 0]
    found += [f"{size} GPUs of this size" for size in sizes if fitting(opened, size=size)][:1]
    return f"use {' or '.join(found)}" if found else "use a smaller model or larger GPUs"


def for_sampling(cfg: Config, model: Decoder, world: World, completions: int) -> Config:
    """Return the options of an evaluation with the slots and the cache of the embedded engine,
    unless the user has given them: on a GPU, as many as fit next to the engine's weights. Every
    rank must call.

    model: is on the device already; completions: of this rank.
    """
    if world.device.type == "cpu" or cfg.engine != "local":
        return cfg
    c = model.cfg
    weights = 2 * sum(p.numel() for p in model.parameters())
    token = 4 * c.num_key_value_heads * c.head_dim * c.num_hidden_layers
    free = capacity(world)[0] - torch.cuda.memory_allocated(world.device) - MARGIN - weights
    return dataclasses.replace(
        cfg,
        max_concurrent=cfg.max_concurrent or max(1, min(completions, MOST_SLOTS)),
        cache_tokens=cfg.cache_tokens or max(1, min(world.gather(free // token))),
    )


@contextlib.contextmanager
def explained(
    cfg: Config,
    lower: str = "a lower --token-budget or --max-concurrent, or --gradient-checkpointing full",
) -> Iterator[None]:
    """Turn a GPU's OutOfMemoryError into a UserError that says what to lower. cuBLAS, and CUDA
    outside of torch's allocator, raise other errors for the same reason.
    """
    try:
        yield
    except RuntimeError as e:
        known = "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED"
        full = isinstance(e, torch.cuda.OutOfMemoryError) or any(text in str(e) for text in known)
        if not full:
            raise
        found = re.search(r"allocate ([\d.]+ \w+).* of which ([\d.]+ \w+)", str(e), re.DOTALL)
        sizes = f"{found[1]} needed, {found[2]} free" if found else first_sentence(e)
        if cfg.token_budget and cfg.max_concurrent:  # every setting, or others would be chosen
            cache = "cache_tokens" if cfg.cache_tokens else "max_concurrent"
            halves = {n: max(1, getattr(cfg, n) // 2) for n in ("token_budget", cache)}
            lower = spelled(dataclasses.replace(cfg, **halves))
        saved = any(Path(cfg.output_dir).glob("*checkpoint-*"))
        start = "continue with --resume and" if saved else "start again with"
        raise UserError(f"the GPU ran out of memory ({sizes}): {start} {lower}.") from e


def while_sampling(
    model: Decoder, cfg: Config, world: World, longest_prompt: int, judges: Sequence[nn.Module] = ()
) -> int:
    """Return the bytes that the trainer keeps on the device while it does not train."""
    kept = ("parameters", "optimizer", "reference model", "reward model", "weights to be sent")
    rows = table(model, cfg, world, longest_prompt, judges)
    return sum(row.bytes for row in rows if row.name.startswith(kept) and not row.on_host)


def server_share(world: World, needed: int, given: Sequence[str]) -> list[str]:
    """Return the option with the share of the trainer's GPU that a vLLM server of our own may use,
    unless the user has `given` one. On a CPU, serve.py chooses.

    The server gets what is free now, except for a margin and what the trainer is still expected to
    allocate, of the `needed` bytes. So the share also holds when the server is restarted later.
    """
    chosen = ("--gpu-mem", "--device-mem", "--kv-cache-mem")
    if world.device.type == "cpu" or any(w.replace("_", "-").startswith(chosen) for w in given):
        return []
    free, total = torch.cuda.mem_get_info(world.device)
    growth = max(needed - torch.cuda.memory_allocated(world.device), 0)
    left = free - growth - MARGIN
    if left <= 0:
        raise UserError(
            f"--engine vllm: of the {shown(free)} that are free on the GPU, the trainer will need "
            f"{shown(growth)}, which leaves nothing for vLLM: lower --token-budget, let them take "
            "turns with --vllm-enable-sleep-mode, name another GPU with --vllm-gpus, or set "
            "--gpu-memory-utilization in --vllm-options."
        )
    share = min(left / total, MOST)
    log.info(
        'the vLLM sidecar may use %.0f %% of the GPU (--vllm-options="--gpu-memory-utilization …"'
        " changes it): %s are free, the trainer will need %s more",
        100 * share,
        shown(free),
        shown(growth),
    )
    return ["--gpu-memory-utilization", f"{share:.3f}"]


def measured(world: World, estimate: int) -> dict[str, float]:
    """Return the peak memory in GiB for the log. Every rank must call.

    On the host, it is the highest peak of any process so far. On a GPU, it is the highest peak of
    any rank's tensors since the last call, logged together with the estimate.
    """
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # its unit is KiB
    out = {"memory/host_peak_gib": max(world.gather(peak)) / 2**20}
    if world.device.type == "cuda":
        peak = max(world.gather(torch.cuda.max_memory_allocated(world.device)))
        torch.cuda.reset_peak_memory_stats(world.device)
        out |= {"memory/peak_gib": peak / 2**30, "memory/estimate_gib": estimate / 2**30}
    return out
