"""A training step of a model of real size on a GPU, ours and TRL's: trained tokens a second, MFU,
peak memory.

In: nothing: a Qwen3 of the real shape with random weights and completions of uneven length (mean a
third of the longest) are made here. Out: results/step_large.json. Ours is a run of one process:
FSDP2 in a world of one, float32 masters, bfloat16 compute, fused AdamW, strips of `token_budget`
tokens. TRL's is its trainer with bf16=True, its fused head and fused AdamW, and micro-batches of as
many padded tokens as our strips have, or a few more. Both train all weights, start from the same
ones and must find the same gradient (its norm to 2 %: bfloat16 rounds the two differently).

Each side alone on the GPU, because its peak memory is measured, and with the first of its SETTINGS
that fits: recomputing less is faster, so it comes first. The row says which it was. What is "over
TRL" and "of TRL's" is against its fastest; what it takes with gradient checkpointing is a row of
its own. No clock waits for the GPU within a step.

    MFU = FLOP that the step needs / seconds / peak FLOP/s of the device        (the FLOP are the same for both sides:)
    FLOP = 6·N·T + 6·V·D·M + 12·L·H·E·pairs

N: weights of the blocks' matrices; T: tokens, the prompt of a group once, without padding; M:
trained tokens, the only ones that the head sees; pairs: of a query with a key that it may see. What
is padded, copied or computed again is not needed. Read next: step_sides.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from bench import common, runs, tables
from bench.step_sides import Case, Ours, Trl, options_of, strips
from nanogrpo.config import Config
from nanogrpo.distributed.world import join
from nanogrpo.model import checkpoint
from nanogrpo.model.decoder import Decoder
from nanogrpo.model.hf_config import ModelConfig
from nanogrpo.run import warmup
from nanogrpo.types import PackedBatch, Sample

# 41,000 trained tokens in three strips of about 15,000
CASE = Case(P=15, G=8, prompt=256, longest=1024, vocab=151936)
PEAK_FLOPS = {"H100": 989e12, "H200": 989e12}  # dense bfloat16, by the word in the device's name
SLOWER = {"PCIe", "NVL", "MIG"}  # cards of the same name with another peak


@contextlib.contextmanager
def ours(
    folder: Path, cfg: Config, samples: list[Sample], checkpointing: str, share: float
) -> Iterator[Ours]:
    cfg = dataclasses.replace(
        cfg, gradient_checkpointing=checkpointing, token_budget=round(cfg.token_budget * share)
    )
    with join(cfg) as world:
        yield Ours(folder, cfg, world)


@contextlib.contextmanager
def theirs(
    folder: Path, cfg: Config, samples: list[Sample], checkpointing: str, share: float
) -> Iterator[Trl]:
    yield Trl(
        folder, cfg, micro_batches(samples, cfg.token_budget * share), checkpointing != "none"
    )


def micro_batches(samples: list[Sample], tokens: float) -> int:
    """How many: the most, of equally many completions each, that have at least so many tokens,
    padding included.
    """
    n, padded = (
        len(samples),
        max(len(s.prompt.token_ids) for s in samples) + max(len(s.token_ids) for s in samples),
    )
    return max(k for k in range(1, n + 1) if n % k == 0 and (k == 1 or n // k * padded >= tokens))


# What is tried, in this order: (gradient checkpointing, part of the token budget in a micro-batch).
SETTINGS = {
    "nanogrpo": (ours, [("none", 1.0), ("selective", 1.0), ("full", 1.0)]),
    "TRL": (theirs, [("none", 1.0), ("none", 0.5), ("full", 1.0)]),
    "TRL, checkpointing": (theirs, [("full", 1.0)]),  # its default: slower, and less memory
}


def needed_flops(c: ModelConfig, batches: Sequence[PackedBatch]) -> float:
    """FLOP of a step's forward and backward, as the formula above has it. batches: with shared
    prompts.
    """
    heads, kv_heads = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    block = c.hidden_size * (2 * heads + 2 * kv_heads + 3 * c.intermediate_size)
    tokens, trained = sum(len(b.tokens) for b in batches), sum(len(b.rows) for b in batches)
    pairs = 0.0
    for b in batches:
        q = b.cu_seqlens.diff().double()  # [N]
        k = q if b.kv_cu_seqlens is None else b.kv_cu_seqlens.diff().double()
        pairs += (q * (k - q) + q * (q + 1) / 2).sum().item()
    per_pair = 12 * c.num_hidden_layers * heads
    return (
        6.0 * (c.num_hidden_layers * block * tokens + c.vocab_size * c.hidden_size * trained)
        + per_pair * pairs
    )


def peak_flops(device: str | None) -> float | None:
    """Of a device by its name, such as "NVIDIA H200"; None where it is not known."""
    words = set((device or "").split())
    return (
        None
        if words & SLOWER
        else next((flops for name, flops in PEAK_FLOPS.items() if name in words), None)
    )


def write_model(shape: ModelConfig, folder: Path, device: str) -> None:
    """Random weights, in bfloat16: half the bytes on the disk. Drawn on the device, where billions
    take no time.
    """
    tokenizer = warmup.write_tokenizer(folder)
    torch.manual_seed(0)
    with torch.device(device):
        model = Decoder(shape).bfloat16()
    checkpoint.export(model, folder, tokenizer)


def release() -> None:
    """Gives back what an earlier side held."""
    gc.collect()
    torch.cuda.empty_cache()  # does nothing where CUDA is not in use


def attempt(
    name: str, folder: Path, cfg: Config, samples: list[Sample], setting: tuple, repeats: int
) -> tuple:
    """One side with one setting: (seconds, figures). Two steps come before those that are timed."""
    held = runs.memory()["now"]
    with SETTINGS[name][0](folder, cfg, samples, *setting) as side:
        side.clock = lambda phase: contextlib.nullcontext()
        norm = side.step(samples)
        runs.forget_peak()
        timing = common.interleave({name: lambda: side.step(samples)}, repeats, title=name)[name]
        return timing, {
            "gradient_norm": norm,
            "computed_tokens": side.computed(samples),
            "peak_bytes": runs.memory()["peak"] - held,
            "gradient_checkpointing": setting[0],
            "micro_batches": side.micro,
        }


def first_that_fits(
    name: str, folder: Path, cfg: Config, samples: list[Sample], repeats: int
) -> tuple | None:
    """`attempt` with the first setting that does not run out of memory; None: all do."""
    for setting in SETTINGS[name][1]:
        release()
        with contextlib.suppress(torch.OutOfMemoryError):
            return attempt(name, folder, cfg, samples, setting, repeats)
        print(
            f"{name}: out of memory with gradient checkpointing {setting[0]}, {setting[1]:g} of the token budget",
            flush=True,
        )
    return None


def measure(
    label: str,
    shape: ModelConfig,
    case: Case,
    repeats: int,
    sides: Sequence[str],
    out: Path,
    argv: Sequence[str],
    **options,
) -> list[dict]:
    """The rows of a model, written after each side. options: more of `Config`, such as the device."""
    cfg, samples = options_of(case, **options)
    trained, device = sum(len(s.token_ids) for s in samples), common.machine()["gpu"]
    flops, peak = needed_flops(shape, strips(samples, cfg, shape.pair_cost)), peak_flops(device)
    tolerance = 1e-3 if cfg.device == "cpu" else 2e-2
    found, rows = {}, []
    with tempfile.TemporaryDirectory() as where:
        write_model(shape, Path(where), cfg.device)
        for name in sides:
            found[name] = first_that_fits(name, Path(where), cfg, samples, repeats)
            norms = [figures["gradient_norm"] for _, figures in filter(None, found.values())]
            if any(abs(norm - norms[0]) > tolerance * norms[0] for norm in norms):
                raise RuntimeError(f"{label}: the gradients' norms differ: {norms}")
            rows = []
            for side, result in found.items():
                if result is None:
                    rows.append(
                        common.facts(
                            "step_time",
                            label,
                            side,
                            argv,
                            why_not="out of memory with every setting",
                        )
                    )
                    continue
                timing, figures = result
                theirs = found.get("TRL")
                figures |= {
                    "completion_tokens": trained,
                    "tokens_per_second": trained / timing.median,
                    "needed_flops": flops,
                    "mfu": flops / timing.median / peak if peak else None,
                    "speedup_over_trl": theirs[0].median / timing.median if theirs else None,
                    "memory_over_trl": figures["peak_bytes"] / theirs[1]["peak_bytes"]
                    if theirs
                    else None,
                    "model": dataclasses.asdict(shape),
                }
                rows.append(common.row("step_time", label, side, timing, argv, **figures))
            common.merge("step_large", rows, out)
    return rows


def main(
    name: str, repeats: int, sides: Sequence[str], out: Path, argv: Sequence[str]
) -> list[dict]:
    """`python -m bench.step_time --shape NAME`."""
    shape = common.large_qwen3(name, CASE.prompt + CASE.longest)
    measure(f"{name}, GPU, bfloat16, uneven", shape, CASE, repeats, sides, out, argv, device="cuda")
    rows = common.read("step_large", out)
    tables.show("step_large", rows)
    print(f"rows: {out / 'step_large.json'}")
    return rows
