"""Estimate the memory of a run on GPUs before anything is allocated, choose the settings that fit,
and refuse a run that cannot fit.

In: the model's sizes, the options, the number of ranks. Out: a table in bytes for one rank, the
memory that is available, and the options with a value for each setting that the user left open.

The model has n parameters: n_b in each block and n_r in the rest (embedding, head, norms). The run
has W GPUs and micro-batches of T tokens, and computes in a dtype of b = 2 bytes:

* parameters, 4·n/W: float32 master weights. Frozen weights take 2·n/W in 16 bits, and 0.52·n/W in
  4 bits (--load-in-4bit).
* optimizer, 8·n/W: two float32 moments. Moments in 8 bits take about 2·n/W.
* gradients, 4·n/W or 4·n: 4·n if the gradients of several micro-batches are added up and then
  reduced once.
* gathered, b·(n_r + 2·n_b) or b·n: FSDP gathers the root and two blocks, or all weights
  (--reshard-after-forward never). In torch 2.11, a byte of a 4-bit block is gathered as two bytes.
* dequantized, b·D·F: the largest matrix in the compute dtype, with --load-in-4bit.
* activations, T · per_token: for each layer (`activation_bytes`).
* pictures, patches · per_patch: activations of a vision encoder (vision/model.py), as if all
  prompts consisted only of pictures.
* key rows, 2·b·K·E · (Tk - T): in each layer, the keys and values of shared prompts, gathered once
  per completion.
* logits, b·C·V + 4·V·D: one chunk of C rows, and the head's float32 gradient. With float32 logits
  (--head-dtype), C is smaller, and the first term is 6·C·V: the logits and their 16-bit gradient.
* engine, b·n + KV cache: the engine's copy of the weights. With --load-in-4bit, the engine's copy
  has only the adapters and, if W > 1, the 4-bit weights. The cache takes 2·b·K·E per layer and
  token, and holds all positions of all slots, or --cache-tokens tokens.
* engine, b·n with vLLM: rank 0's copy of the weights, which it sends to the server. If the server
  is on rank 0's GPU, the memory of the server counts, too.
* checkpoint, 12·n/W + 4·n: copies in host memory while a checkpoint is written. Only rank 0 has the
  term 4·n. This term is 2·n if the base has 16 bits.
* reference, 4·n/W: with beta > 0. This row also counts the root of the reference, which
  FSDP gathers. If the reference follows the policy, the row also counts the copy of the reference
  in a checkpoint.
* frozen models, 4·n/W + b·(n_r + 2·n_b) each: the model of --ref-model, and teachers of recipes.
* reward models, b·n each: on every rank.

With adapters, only trained parameters count towards the optimizer, the gradients and the first term
of the checkpoint row. With adapters, the head has no gradient, and the reference needs no second
model.

Completion lengths are unknown in advance, so we assume the maximum. The page docs/memory.md shows
the settings that are chosen for some models and GPUs. Read next: grpo/packing.py (which limits the
size of a micro-batch).
"""

import contextlib
import dataclasses
import itertools
import logging
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from nanogrpo.config import dashed
from nanogrpo.distributed.world import World
from nanogrpo.engine.paged_cache import cache_tokens
from nanogrpo.engine.runner import PREFILL_TOKENS
from nanogrpo.errors import UserError, first_sentence
from nanogrpo.extras.options import Config, complete
from nanogrpo.extras.sharding import is_whole
from nanogrpo.feature import Feature
from nanogrpo.grpo import schedule
from nanogrpo.model import head as ops
from nanogrpo.model import weights
from nanogrpo.model.decoder import Decoder
from nanogrpo.model.hf_config import ModelConfig
from nanogrpo.run.setup import Inputs, Run

logger = logging.getLogger("nanogrpo")

# Bytes left free on a GPU for workspaces, communication buffers, CUDA graphs and fragmentation.
# The table counts as many bytes for the workspaces of a vLLM server on the same GPU.
MARGIN = 2 << 30
MOST = 0.92  # the largest fraction of a GPU for vLLM, and vLLM's own default
MOST_SLOTS = 512  # with more slots, a decode step takes almost proportionally longer
# gradient_checkpointing, token_budget, reduce_gradients.
# The first row below is the fastest, and the last row needs the least memory.
# With "selective", Python is called for each operation, so small micro-batches make the GPU wait:
# on an H100, 12 layers of Qwen3-4B took 1.41 s with 4,096 tokens, and 0.60 s with 8,192.
SETTINGS = (
    ("none", 65536, "step"),
    ("none", 32768, "step"),
    ("none", 16384, "step"),
    ("none", 8192, "step"),
    ("selective", 8192, "step"),
    ("selective", 8192, "micro_batch"),
    ("full", 8192, "micro_batch"),
    ("full", 4096, "micro_batch"),
    ("full", 1024, "micro_batch"),
)
CHOSEN = """
    max_concurrent cache_tokens gradient_checkpointing token_budget reduce_gradients
    reshard_after_forward
"""


class Memory(Feature):
    """Choose the settings that fit. If the GPU runs out of memory anyway, explain what to do."""

    estimate = 0  # bytes on the device

    def settings(self, cfg: Any, inputs: Inputs) -> Config:
        # the full Config has options that the core lacks
        full, self.estimate = fit(inputs, complete(cfg))
        return full

    def running(self, run: Run) -> AbstractContextManager:
        return explained(run.cfg)

    def step(self, *_: Any) -> dict[str, float]:
        return {"memory/estimate_gib": self.estimate / 2**30}


# --- the table ------------------------------------------------------------------------------------


class Row(NamedTuple):
    """One line of the table. Example: Row("optimizer", 4_768_000_000)"""

    name: str
    bytes: int
    on_host: bool = False  # in host memory
    of_server: bool = False  # allocated by a vLLM server on the same GPU


def activation_bytes(
    c: ModelConfig,
    item: int,
    kind: str,
    fused: bool = False,
    adapted: bool = False,
    joint: bool = False,
) -> tuple[int, int]:
    """Return (kept, recomputed), both in bytes per token: what each layer keeps for the backward
    pass, and what one layer recomputes in the backward pass. The count follows Block.forward, and
    includes all tensors that autograd keeps. Two norms keep their inputs and outputs, 4·D in all.
    Attention keeps v, its result, and a copy of the result for o_proj. It also keeps q and k, both
    before and after norm and rotation. The MLP keeps gate, up, silu(gate), and silu(gate) · up.
    `fused` kernels keep neither the copy for o_proj nor silu(gate). If q, k and v are `joint`, v is
    a slice of their product, so the whole product is kept.
    """
    D, F = c.hidden_size, c.intermediate_size
    q, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    norms = 2 if c.qk_norm or joint else 1  # copies of q and k, counting the rotated ones
    # float32 statistics: one number for each norm, and for each head's softmax
    statistics = 4 * (2 + 2 * c.num_attention_heads + c.num_key_value_heads)
    copies, products = (norms + 1, 3) if fused else (norms + 2, 4)
    everything = item * (4 * D + copies * q + (norms + 1) * kv + products * F) + statistics
    if kind != "selective":
        return (everything, 0) if kind == "none" else (item * D, everything)
    # the block's input, the results named in sharding.KEPT, and the results of adapters
    products = 2 * D + q + 2 * kv + 2 * F
    results = item * (D + q + products * (2 if adapted else 1)) + 4 * c.num_attention_heads
    return results, everything


def longest_strip(cfg: Config, world_size: int, longest_prompt: int) -> tuple[int, int, bool]:
    """Return the largest number of tokens T and of key rows Tk that a rank's micro-batch can have,
    and whether an update may need several micro-batches. Tk exceeds T if completions share a
    prompt.
    """
    prompts = -(-cfg.prompts_per_step // (cfg.steps_per_generation * world_size))
    longest = cfg.max_completion_length - 1
    sample = longest_prompt + longest
    tokens = keys = prompts * cfg.num_generations * sample
    max_keys = budget = cfg.strip_tokens
    if cfg.share_prompts:
        tokens = prompts * (longest_prompt + cfg.num_generations * longest)
        keys += prompts * longest_prompt
        max_keys = schedule.KEY_ROWS * budget
    T = max(min(tokens, budget), sample)  # a sample that is longer is alone in its micro-batch
    return T, max(min(keys, max_keys), T), tokens > budget or keys > max_keys


def numbers(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def stored(module: nn.Module) -> int:
    return sum(p.nbytes for p in module.parameters())


def gathered(model: Decoder, blocks: int) -> int:
    """Return the bytes of the root and of some blocks of the decoder when FSDP gathers them, which
    takes 2 bytes per number. Torch 2.11 does so even for the bytes of a 4-bit matrix.
    """
    root = numbers(model) - sum(map(numbers, model.blocks))
    return 2 * (root + blocks * numbers(model.model.layers[0]))


def table(inputs: Inputs, cfg: Config, main: bool = True) -> list[Row]:
    """Return the estimate for one rank. Only shapes are needed, so the models may be on the meta
    device. `main` says whether the rank is rank 0, which stores the most.
    """
    model, world, longest_prompt = inputs.model, inputs.world, inputs.longest_prompt
    c, W, host = model.cfg, world.size, cfg.cpu_offload
    trained, n = weights.sizes(model)
    kept_gathered = cfg.reshard_after_forward == "never"
    unsharded = 2 * numbers(model) if kept_gathered else gathered(model, 2)
    moments = round((2.05 if cfg.optim == "adamw_torch_8bit" else 8) * trained / W)
    T, Tk, several = longest_strip(cfg, W, longest_prompt)
    # While gradients of several micro-batches are summed, a rank has the whole sum, not a shard.
    summed = several and cfg.reduce_gradients != "micro_batch" and (W > 1 or host)
    kind, layers = cfg.checkpointing, c.num_hidden_layers
    whole, fused = is_whole(cfg, world), cfg.kernels != "torch"
    kept, again = activation_bytes(c, 2, kind, fused, cfg.lora_r > 0, whole)
    cached = token_bytes(c)
    key_rows = cached if kind == "none" else cached // layers  # or per layer
    logits = torch.float32 if cfg.head_dtype == "float32" else torch.bfloat16
    rows = min(T, ops.default_chunk(c.vocab_size, logits, world.device))
    each = 6 if logits == torch.float32 else 2
    head = c.vocab_size * c.hidden_size if model.lm_head.weight.requires_grad else 0
    second = cfg.beta and not (cfg.lora_r or cfg.ref_model)  # a copy of the model
    reference = 4 * n // W + (unsharded if whole else gathered(model, 0)) if second else 0
    dequantized = 2 * c.hidden_size * c.intermediate_size if cfg.load_in_4bit else 0
    out = [
        Row("parameters", stored(model) // W, host),
        Row("optimizer", moments, host),
        Row("gradients, summed before they are reduced", 4 * trained if summed else 0),
        Row("gradients", 4 * trained // W if host or not summed else 0, host),
        Row("16-bit copies of the weights" if whole else "gathered by FSDP", unsharded),
        Row("a dequantized matrix", dequantized),
        Row("reference model", reference, host),
        Row(f"activations of {T:,} tokens", T * (layers * kept + again + 6 * c.hidden_size)),
        Row(f"keys and values gathered for {Tk:,} rows", key_rows * (Tk - T)),
        Row(f"logits of {rows:,} tokens", each * rows * c.vocab_size + 4 * head),
    ]
    out += [
        Row(f"reward model {judge.__name__}", stored(judge))
        for judge in inputs.rewards.local
        if isinstance(judge, nn.Module)
    ]
    for feature in inputs.features:
        for name, other in zip(*(getattr(feature, key, ()) for key in ("names", "frozen"))):
            frozen = Row(f"frozen model {name}", stored(other) // W, host)
            out += [frozen, Row(f"gathered of {name}", gathered(other, 2))]
    if visual := getattr(model.model, "visual", None):  # all prompts could consist of pictures
        out.append(Row("pictures", T * visual.activation_bytes(2, kind)))

    # In the engine's copy, adapters are merged into the weights.
    copy = 2 * (n - trained if cfg.lora_r else n)
    positions = longest_prompt + cfg.max_completion_length
    tokens = cache_tokens(cfg.slots, positions, cfg.cache_tokens)
    cache = Row(f"cache of {tokens:,} tokens", cached * tokens)
    if cfg.engine == "local":
        if cfg.load_in_4bit:  # the engine shares the frozen weights if they are not sharded
            copy = 2 * trained if W == 1 and not host else stored(model)
        out += [Row("engine: weights", copy), cache]
    elif main:  # the server is a separate process; rank 0 has a copy to send
        out.append(Row("weights to be sent", copy))
        if not cfg.server and cfg.vllm_gpus in ("", "0"):
            out.append(Row("vLLM: workspaces", MARGIN, of_server=True))
            if not cfg.vllm_enable_sleep_mode:  # a sleeping server keeps only its workspaces
                out.append(Row("vLLM: weights", copy, of_server=True))
                out.append(Row(f"vLLM: {cache.name}", cache.bytes, of_server=True))
    saved = (4 * trained + (4 * n if cfg.ref_model_sync_steps else 0)) // W + moments
    if main:  # rank 0 also gathers the weights, in the dtype of the files
        saved += model.saved_dtype.itemsize * n
    return [*out, Row("a checkpoint that is being written", saved, on_host=True)]


def on_device(rows: Sequence[Row]) -> int:
    """Return the sum of all rows of the table that take GPU memory, in bytes."""
    return sum(row.bytes for row in rows if not row.on_host)


def while_sampling(rows: Sequence[Row]) -> int:
    """Return how many bytes the trainer keeps on the device while it does not train."""
    models = "reference model", "frozen model", "reward model"
    kept = "parameters", "optimizer", *models, "weights to be sent"
    return on_device([row for row in rows if row.name.startswith(kept)])


def capacity(world: World) -> tuple[int, int]:
    """Return (bytes on the GPU, bytes of host memory) for one rank. GPU memory is available if it
    is free, or if this process has already reserved it. The ranks of a machine share its host
    memory.
    """
    host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError, ValueError):  # the limit of a container, if there is one
        host = min(host, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    host //= int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    free, _ = torch.cuda.mem_get_info(world.device)
    return free + torch.cuda.memory_reserved(world.device), host


def shown(n: float) -> str:
    """Format a number of bytes in nvidia-smi's unit: 1.5e9 → "1,430.5 MiB"."""
    return f"{n / 2**20:,.1f} MiB"


# --- the settings ---------------------------------------------------------------------------------


def fit(inputs: Inputs, cfg: Config) -> tuple[Config, int]:
    """Return the options with every setting chosen, and an estimate of the bytes on the device. The
    estimate excludes a vLLM server. Raises UserError if a rank needs more than is available. Every
    rank must call this function.
    """
    world = inputs.world
    device, host = capacity(world)
    cfg = choose(inputs, cfg, min(world.gather(device)))
    logger.info("settings for the free GPU memory: %s", spelled(cfg))
    rows = table(inputs, cfg, world.main)
    for on_host, place, there in (False, "the GPU", device), (True, "this machine", host):
        part = [row for row in rows if row.on_host == on_host and row.bytes]
        needed = sum(row.bytes for row in part)
        part.sort(key=lambda row: -row.bytes)
        sizes = [f"{row.name} {shown(row.bytes)}" for row in part]
        logger.info("estimated memory on %s: %s (%s)", place, shown(needed), ", ".join(sizes))
        if needed > there:
            raise UserError(
                f"a process needs {shown(needed)} of memory but {place} has {shown(there)} "
                f"available, so {shown(needed - there)} are missing ({', '.join(sizes[:4])}, …): "
                "lower --token-budget or --max-concurrent, use --gradient-checkpointing full, "
                "--lora-r 16 (with --load-in-4bit), --optim adamw_torch_8bit or --cpu-offload, or "
                "use more or larger GPUs."
            )
    return cfg, on_device([row for row in rows if not row.of_server])


def choose(inputs: Inputs, cfg: Config, available: int) -> Config:
    """Return the options with a value for each of CHOSEN that the user did not set. On a GPU, these
    values are the first combination in SETTINGS that leaves MARGIN bytes free. If there is none,
    the last combination is used.

    Sampling takes most of a step, and is faster if the cache holds more completions at a time. The
    cache starts at half of what all slots could need, because few completions reach the maximum
    length. The cache is halved again only if none of SETTINGS fits. Finally, the cache grows until
    only 2 · MARGIN bytes are free, or until it holds all that the slots could need. There are more
    than MOST_SLOTS / 2 slots only if the cache holds at least half of what these slots could need.
    All ranks must choose the same settings, so the choice is made for rank 0, which stores the
    most.
    """
    size = inputs.world.size
    most = cfg.max_concurrent or min(-(-cfg.generation_batch_size // size), MOST_SLOTS)
    slots = cfg.max_concurrent or min(most, MOST_SLOTS // 2)
    longest = inputs.longest_prompt + cfg.max_completion_length
    # With one GPU, there is nothing to reduce, and gathering only copies the weights.
    alone = size == 1 and not cfg.cpu_offload
    halvings = range(1, slots.bit_length() + 1)
    reshards = ("never", "always") if alone else ("always",)
    for halving, (kind, budget, reduces), reshard in itertools.product(
        halvings, SETTINGS, reshards
    ):
        cache = max(slots * longest >> halving, longest)
        reduces = "step" if alone else reduces
        best = given(
            cfg,
            max_concurrent=slots,
            cache_tokens=cache,
            gradient_checkpointing=kind,
            token_budget=budget,
            reduce_gradients=reduces,
            reshard_after_forward=reshard,
        )
        rest = available - MARGIN - on_device(table(inputs, best))
        if rest >= 0:
            cache += max(rest - MARGIN, 0) // token_bytes(inputs.model.cfg)
            slots = most if 2 * (cfg.cache_tokens or cache) >= most * longest else slots
            cache = cfg.cache_tokens or min(slots * longest, cache)
            return dataclasses.replace(best, max_concurrent=slots, cache_tokens=cache)
    return best


def token_bytes(c: ModelConfig) -> int:
    """Return the bytes per token in a GPU's KV cache: bfloat16, all layers."""
    return 4 * c.num_key_value_heads * c.head_dim * c.num_hidden_layers


def given(cfg: Config, **settings: Any) -> Config:
    """Return the options with these settings, but keep the options that the user has set."""
    left_open = {n: x for n, x in settings.items() if getattr(cfg, n) == getattr(Config, n)}
    return dataclasses.replace(cfg, **left_open)


def spelled(cfg: Config) -> str:
    """Return the settings as they are written on a command line."""
    # a vLLM server chooses its own slots and cache
    names = CHOSEN.split()[0 if cfg.engine == "local" else 2 :]
    return " ".join(f"--{dashed(n)} {getattr(cfg, n)}" for n in names if getattr(cfg, n))


def for_sampling(cfg: Config, model: Decoder, world: World, completions: int) -> Config:
    """Return the options of an evaluation, with values for the local engine's slots and cache
    unless the user has given them. On a GPU, slots and cache use all memory that the engine's
    weights leave. Every rank must call this function.

    The model is already on the device. `completions` is the number of completions that this rank
    samples.
    """
    if world.device.type == "cpu" or cfg.engine != "local":
        return cfg
    used = torch.cuda.memory_allocated(world.device) + 2 * weights.sizes(model)[1] + MARGIN
    used += gathered(model, 1) * (world.size > 1)
    free = (capacity(world)[0] - used) // token_bytes(model.cfg)
    fitting = min(world.gather(free)) - 2 * PREFILL_TOKENS  # prefill copies its keys
    slots = max(1, min(completions, MOST_SLOTS))
    return given(cfg, max_concurrent=slots, cache_tokens=max(1, fitting))


@contextlib.contextmanager
def explained(cfg: Any, lower: str = "") -> Iterator[None]:
    """Turn a GPU's OutOfMemoryError into a UserError that says what to lower. The same is done for
    the errors that cuBLAS, and CUDA outside of torch's allocator, raise when memory is short.
    """
    try:
        yield
    except RuntimeError as e:
        known = "CUDA out of memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED"
        if not any(text in str(e) for text in known):
            raise
        found = re.search(r"allocate ([\d.]+ \w+).* of which ([\d.]+ \w+)", str(e), re.DOTALL)
        sizes = f"{found[1]} needed, {found[2]} free" if found else first_sentence(e)
        if not lower:  # name every setting, because the next run might choose other settings
            lower = spelled(
                dataclasses.replace(
                    cfg,
                    token_budget=max(1, cfg.strip_tokens // 2),
                    max_concurrent=max(1, cfg.slots // 2),
                )
            )
        saved = any(Path(cfg.output_dir).glob("*checkpoint-*"))
        start = "continue with --resume and" if saved else "start again with"
        raise UserError(f"the GPU ran out of memory ({sizes}): {start} {lower}.") from e


def server_share(world: World, needed: int, given: Sequence[str]) -> list[str]:
    """Return vLLM's option for the fraction of the trainer's GPU that our server may use, or
    nothing if the user has `given` this option.

    The server gets the memory that is free now, minus a margin, and minus the part of the `needed`
    bytes that the trainer has not allocated yet. So the fraction is also right if the server
    restarts later.
    """
    chosen = ("--gpu-mem", "--device-mem", "--kv-cache-mem")
    if any(word.replace("_", "-").startswith(chosen) for word in given):
        return []
    free, total = torch.cuda.mem_get_info(world.device)
    growth = max(needed - torch.cuda.memory_allocated(world.device), 0)
    share = min((free - growth - MARGIN) / total, MOST)
    if share <= 0:
        raise UserError(
            f"--engine vllm: the GPU has {shown(free)} free, but the trainer will need "
            f"{shown(growth)}, which leaves too little for vLLM: lower --token-budget, let trainer "
            "and server take turns with --vllm-enable-sleep-mode, name another GPU with "
            "--vllm-gpus, or set --gpu-memory-utilization in --vllm-options."
        )
    logger.info("the vLLM sidecar may use %.0f %% of the GPU", 100 * share)
    return ["--gpu-memory-utilization", f"{share:.3f}"]
