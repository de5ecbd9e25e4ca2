"""Measure speed, MFU and peak memory of a training step on a GPU, for nanogrpo and TRL.

In: nothing. This file creates a random Qwen3 of real size, and completions of uneven length (on
average a third of the longest). Out: results/step_large.json. nanogrpo runs in one process with
FSDP2, float32 master weights, bfloat16 compute, fused AdamW, and strips of `token_budget` tokens. A
strip is a packed micro-batch. TRL runs its trainer with bf16=True, its fused head and fused AdamW.
A micro-batch of TRL has as many tokens as our strips or slightly more, including padding. "TRL,
asynchronous" is TRL's AsyncGRPOTrainer, which packs without padding (step_sides.py). All trainers
train all weights and start from the same weights, and their gradient norms must agree to 2 %. The
trainers round to bfloat16 in different places, so the norms are not exactly equal.

The trainers run one after the other, not alternately, so that the peak memory of each can be
measured. Each trainer uses the first of its SETTINGS that fits into memory, and the record names
this setting. Settings with less recomputation are faster, so they are tried first. In the tables,
the columns "over TRL" and "of TRL's" are relative to TRL's fastest setting. A second record of each
trainer shows the step with gradient checkpointing. Within a step, the program never waits for the
GPU just to measure times.

    MFU = FLOP that the step requires / seconds / peak FLOP/s of the device
    FLOP = 6·N·T + 6·V·D·M + 12·L·H·E·pairs         (the same for both trainers)

N is the number of weights in the matrices of the blocks. T is the number of tokens without padding.
The prompt of each group is counted once. M is the number of trained tokens. The head has to process
only the trained tokens. `pairs` is the number of (query, visible key) pairs. Padding, copies of
prompts and recomputation are not required and are not counted. Read next: step_sides.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from bench import common, runs, tables
from bench.cost import Weights
from bench.step_sides import (
    Case,
    Ours,
    Trl,
    TrlAsync,
    check_norms,
    options_of,
    padded_width,
    strips,
)
from nanogrpo import Config
from nanogrpo.distributed.world import join
from nanogrpo.extras.arithmetic import warmup
from nanogrpo.model import checkpoint
from nanogrpo.model.decoder import Decoder
from nanogrpo.model.hf_config import ModelConfig
from nanogrpo.types import PackedBatch, Sample

# 41,000 trained tokens in three strips of about 15,000 tokens each
CASE = Case(P=15, G=8, prompt=256, longest=1024, vocab=151936)
PEAK_FLOPS = {"H100": 989e12, "H200": 989e12}  # in dense bfloat16; keys are words in device names
SLOWER = {"PCIe", "NVL", "MIG"}  # devices with one of these words in their name are slower
Setting = tuple[str, float]  # (gradient checkpointing, micro-batch size / token budget)


@contextlib.contextmanager
def ours(folder: Path, cfg: Config, samples: list[Sample]) -> Iterator[Ours]:
    with join(cfg) as world:
        yield Ours(folder, cfg, world)


@contextlib.contextmanager
def theirs(folder: Path, cfg: Config, samples: list[Sample]) -> Iterator[Trl]:
    yield Trl(folder, cfg, micro_batches(samples, cfg.strip_tokens))


@contextlib.contextmanager
def packed(folder: Path, cfg: Config, samples: list[Sample]) -> Iterator[TrlAsync]:
    yield TrlAsync(folder, cfg)


def micro_batches(samples: list[Sample], tokens: int) -> int:
    """Return the largest number of equal micro-batches with at least `tokens` tokens each."""
    n, width = len(samples), padded_width(samples)
    return max(k for k in range(1, n + 1) if n % k == 0 and (k == 1 or n // k * width >= tokens))


# The settings of each side, tried in this order.
SETTINGS = {
    "nanogrpo": (ours, [("none", 1.0), ("selective", 1.0), ("full", 1.0)]),
    "TRL": (theirs, [("none", 1.0), ("none", 0.5), ("full", 1.0)]),
    "TRL, asynchronous": (packed, [("none", 1.0), ("none", 0.5), ("full", 1.0)]),
    # Checkpointing is slower but needs less memory. TRL uses checkpointing by default.
    "nanogrpo, checkpointing": (ours, [("full", 1.0)]),
    "TRL, checkpointing": (theirs, [("full", 1.0)]),
}


def forward_flops(c: ModelConfig, tokens: int, rows: int, pairs: float) -> float:
    """Return the FLOP of a forward pass, a third of the FLOP of a training step.

    `rows` is the number of hidden states that the head processes.
    """
    w = Weights.of(c)
    products = w.layers * w.block * tokens + w.head * rows
    return 2.0 * products + 4.0 * w.layers * c.num_attention_heads * c.head_dim * pairs


def needed_flops(c: ModelConfig, batches: Sequence[PackedBatch]) -> float:
    """Return the number of floating-point operations of a training step. `batches` contain each
    prompt once.
    """
    tokens, trained = sum(len(b.tokens) for b in batches), sum(len(b.rows) for b in batches)
    return 3 * forward_flops(c, tokens, trained, sum(map(pairs_of, batches)))


def pairs_of(batch: PackedBatch) -> float:
    """Return the number of (query, visible key) pairs of a strip."""
    q = batch.cu_seqlens.diff().double()  # [N]
    k = q if batch.kv_cu_seqlens is None else batch.kv_cu_seqlens.diff().double()  # [N]
    return (q * (k - q) + q * (q + 1) / 2).sum().item()


def peak_flops(device: str | None) -> float | None:
    """Return the peak FLOP/s of a device with a name such as "NVIDIA H200", or None if it is
    unknown.
    """
    words = set((device or "").split())
    known = [flops for name, flops in PEAK_FLOPS.items() if name in words]
    return known[0] if known and not words & SLOWER else None


def write_model(
    shape: ModelConfig, folder: Path, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> None:
    """Write random weights and a tokenizer. A GPU creates the weights faster than a CPU. Its
    allocator reads its settings when it is first used, so they are set here, as in a run.
    """
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    tokenizer = warmup.write_tokenizer(folder)
    torch.manual_seed(0)
    with torch.device(device):
        model = Decoder(shape).to(dtype)
    checkpoint.export(model, folder, tokenizer)


def attempt(
    name: str, folder: Path, cfg: Config, samples: list[Sample], setting: Setting, repeats: int
) -> tuple[common.Timing, dict]:
    """Measure one side with one setting. Two untimed steps come first."""
    checkpointing, share = setting
    cfg = dataclasses.replace(
        cfg,
        token_budget=round(cfg.strip_tokens * share),
        gradient_checkpointing=checkpointing,
        reshard_after_forward="never",  # as a run chooses on one GPU with enough memory
    )
    held = runs.memory()["now"]
    with SETTINGS[name][0](folder, cfg, samples) as side:
        side.clock = lambda phase: contextlib.nullcontext()
        norm = side.step(samples)
        runs.reset_peak()
        timing = common.interleave({name: lambda: side.step(samples)}, repeats, title=name)[name]
        return timing, {
            "gradient_norm": norm,
            "peak_bytes": runs.memory()["peak"] - held,
            "gradient_checkpointing": checkpointing,
            "micro_batches": side.micro,
        }


def first_that_fits(
    name: str, folder: Path, cfg: Config, samples: list[Sample], repeats: int
) -> tuple[common.Timing, dict] | str:
    """Measure with the first setting that fits into memory. Return the reason if no setting fits,
    or if the side's package is not installed.
    """
    for setting in SETTINGS[name][1]:
        # free the memory of earlier sides and attempts
        gc.collect()
        torch.cuda.empty_cache()  # does nothing without CUDA
        try:
            return attempt(name, folder, cfg, samples, setting, repeats)
        except torch.OutOfMemoryError:
            pass
        except ImportError as e:
            return f"a package is missing: {e}"
        checkpointing, share = setting
        print(
            f"{name}: out of memory with gradient checkpointing {checkpointing}"
            f" and {share:g} of the token budget",
            flush=True,
        )
    return "out of memory with every setting"


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
    """Return the records of a model, and write them after each side. `options` are more fields of
    `Config`.
    """
    cfg, samples = options_of(case, **options)
    trained = sum(len(s.token_ids) for s in samples)
    flops = needed_flops(shape, strips(samples, cfg, shape.pair_cost))
    peak = peak_flops(common.machine()["gpu"])
    tolerance = 1e-3 if cfg.device == "cpu" else 2e-2

    def record(side: str) -> dict:
        result, trl = found[side], found.get("TRL")
        trl = None if isinstance(trl, str) else trl
        if isinstance(result, str):
            return common.record("step_time", label, side, argv, why_not=result)
        timing, figures = result
        figures |= {
            "tokens_per_second": trained / timing.median,
            "mfu": flops / timing.median / peak if peak else None,
            "speedup_over_trl": trl[0].median / timing.median if trl else None,
            "memory_over_trl": figures["peak_bytes"] / trl[1]["peak_bytes"] if trl else None,
        }
        return common.record("step_time", label, side, argv, timing, **figures)

    found, records = {}, []
    with tempfile.TemporaryDirectory() as where:
        write_model(shape, Path(where), torch.bfloat16, cfg.device)
        for name in sides:
            found[name] = first_that_fits(name, Path(where), cfg, samples, repeats)
            norms = {s: r[1]["gradient_norm"] for s, r in found.items() if not isinstance(r, str)}
            if norms:
                check_norms(label, norms, tolerance)
            records = [record(side) for side in found]
            common.merge("step_large", records, out)
    return records


def main(
    name: str, repeats: int, sides: Sequence[str], out: Path, argv: Sequence[str]
) -> list[dict]:
    """Run `python -m bench.step_time --shape NAME`."""
    shape = common.large_qwen3(name, CASE.prompt + CASE.longest)
    measure(f"{name}, GPU, bfloat16, uneven", shape, CASE, repeats, sides, out, argv, device="cuda")
    return tables.report("step_large", out)
