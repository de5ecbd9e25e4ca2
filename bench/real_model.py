"""How fast does a real language model learn word problems with nanogrpo and with TRL? Both trainers
train SmolLM2-135M-Instruct on the problems of `make real`.

In: nothing. If the model or the problems are missing, examples/smollm2.py or
examples/word_problems.py writes them. Out: results/real_model.json with one record per run, and
docs/img/real_model.png. The plot shows reward and held-out accuracy by step and by second.

Both trainers use the options in examples/word_problems.json. So the base model, the prompts and
their order, the rewards, the learning rate and the number of completions are the same for both. All
weights are in float32. trl_run.py contains the settings that exist only in TRL: sdpa attention,
TRL's fused head, fused AdamW, and two micro-batches. In all runs, the same engine answers the
held-out problems with greedy decoding. These evaluations are not timed. nanogrpo and TRL run
alternately, each run in a separate process. A record is written when its run ends, and a run that
has a record is not repeated. So an interrupted benchmark can be continued. TRL takes longer, so by
default, it is run only with the first seed and for 8 steps (--trl-seeds, --trl-steps). The learning
rate is constant, so the 8 steps are also the first 8 steps of a longer run.

With --profile, this command instead runs a few steps of nanogrpo. This mode compares the FLOP per
second of the steps with the speed of the model's matrix products in the same process:

    training FLOP = 6·N·T + 6·V·D·M + 12·L·H·E·pairs        (see step_large.py for the letters)
    sampling FLOP = 2·N·S + 2·V·D·C + 4·L·H·E·pairs

C is the number of sampled tokens. S is C plus the number of prompt tokens. The prompt of a group is
counted once. The peak is the speed of the fastest matrix product of the model, with the maximum
number of rows of a training step. Read next: runs.py, learning.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import statistics
import sys
import tempfile
import timeit
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

import torch

from bench import common, cost, learning, runs, tables
from bench.step_large import forward_flops, needed_flops
from nanogrpo import Config
from nanogrpo.extras import commandline
from nanogrpo.kernels import linear
from nanogrpo.model import checkpoint
from nanogrpo.model.hf_config import ModelConfig
from nanogrpo.types import PackedBatch, Sample

OPTIONS = common.ROOT / "examples/word_problems.json"
# Options that are paths or are recorded under other names.
NOT_SETTINGS = ("model", "output_dir", "max_steps", "seed")
# With one micro-batch, TRL needs more than 24 GB.
# With two micro-batches, each has about as many tokens as a micro-batch of nanogrpo.
TRL_MICRO = 2
# options of --quick, which only checks that the benchmark works
QUICK = {
    "generation_batch_size": 8,
    "num_generations": 4,
    "max_completion_length": 4,
    "eval_samples": 4,
    "eval_steps": 1,
    "max_steps": 2,
}


def options(args: argparse.Namespace) -> Config:
    """Return the options in OPTIONS, with the base model and the steps of this benchmark."""
    cfg = commandline.parse(["--config", str(OPTIONS)])
    cfg = dataclasses.replace(cfg, model=str(args.base), device="cpu")
    if args.quick:
        cfg = dataclasses.replace(cfg, **QUICK)
    if args.steps:
        cfg = dataclasses.replace(cfg, max_steps=args.steps)
    return cfg


def prepare(cfg: Config) -> None:
    """Write the model and the problems if they are missing."""
    from examples import smollm2, word_problems

    if not Path(cfg.model).exists():
        smollm2.write(Path(cfg.model))
    folder = Path(cfg.data[0]).parent
    if not folder.exists():
        word_problems.main([str(folder)])


# --- the share of the peak ---


def matmul_peak(c: ModelConfig, rows: int) -> float:
    """Return the FLOP/s of the fastest of the model's matrix products, for inputs with this number
    of rows. Each product is timed several times with PyTorch's own function and with oneDNN's
    (kernels/linear.py).
    """
    best = 0.0
    for n_in, n_out in set(cost.matrices(c)):
        x, w = torch.randn(rows, n_in), torch.randn(n_out, n_in)
        for multiply in (torch.nn.functional.linear, linear.product):
            times = timeit.repeat(functools.partial(multiply, x, w), number=1, repeat=5)
            best = max(best, 2 * rows * n_in * n_out / min(times))
    return best


def sampling_flops(c: ModelConfig, samples: Sequence[Sample]) -> float:
    """Return the FLOP needed to sample these completions if each prompt is processed once per
    group.
    """
    prompts = {s.prompt.id: len(s.prompt.token_ids) for s in samples}
    # The last token of a completion is never an input of the model.
    inputs = [len(s.token_ids) - 1 for s in samples]
    work = cost.Work([*prompts.values()], inputs)
    tokens = sum(prompts.values()) + sum(inputs)
    return forward_flops(c, tokens, sum(inputs) + len(samples), sum(work.pairs))


def profile(cfg: Config, threads: int) -> dict:
    """Run some steps of nanogrpo in this process. Return FLOP, seconds and fractions of the peak.

    The peak is measured before and after the run, and the higher value is used. The fractions do
    not include the first step.
    """
    import train

    torch.set_num_threads(threads)
    sampled: list[list[Sample]] = []
    trained: list[list[PackedBatch]] = []
    pack = train.pack

    def counted(*args):
        trained.append([])
        for batches in pack(*args):
            pairs = [*batches]
            trained[-1] += [batch for batch, _ in pairs]
            yield pairs

    shape = checkpoint.empty_model(Path(cfg.model)).cfg
    # maximum number of rows in a step
    rows = cfg.generation_batch_size * cfg.max_completion_length
    before = matmul_peak(shape, rows)
    with tempfile.TemporaryDirectory() as where, patch.object(train, "pack", counted):
        cfg = dataclasses.replace(cfg, eval_steps=0, eval_data=(), save_steps=0, output_dir=where)
        found = runs.ours(cfg, sampled)
    peak = max(before, matmul_peak(shape, rows))
    out: dict = {"peak_flops": peak}
    flops = {
        "train": [needed_flops(shape, batches) for batches in trained],
        "sample": [sampling_flops(shape, samples) for samples in sampled],
    }
    for phase, counts in flops.items():
        seconds = found["phases"][phase]
        first = min(1, len(counts) - 1)
        out[phase] = {
            "share_of_peak": statistics.median(
                f / s / peak for f, s in list(zip(counts, seconds))[first:]
            ),
        }
    return out


# --- the runs ---


def main(argv: Sequence[str]) -> list[dict]:
    parser = runs.parser(
        "real_model",
        __doc__,
        common.ROOT / "runs/smollm2",
        seeds=(1, "runs of our side, with seeds 0, 1, …"),
        steps=(0, "GRPO steps of our runs; 0: as many as in OPTIONS"),
        trl_seeds=(1, "runs of TRL's side, with the first of these seeds"),
        trl_steps=(8, "GRPO steps of TRL's runs, at most as many as ours"),
    )
    parser.add_argument(
        "--profile", action="store_true", help="measure nanogrpo's share of the peak FLOP/s instead"
    )
    parser.add_argument(
        "--quick", action="store_true", help="two tiny steps, to test the benchmark; needs --out"
    )
    args = parser.parse_args(argv)
    if args.quick and args.out == common.RESULTS:
        parser.error("--quick measures nothing: name a folder for its results with --out.")
    cfg = options(args)
    if args.profile:
        prepare(cfg)
        found = profile(cfg, args.threads)
        record = common.record("real_model", "profile", "nanogrpo", argv, **found)
        common.merge("real_model", [record], args.out)
    elif not args.redraw:
        prepare(cfg)
        measure(cfg, args, argv)
    records = tables.report("real_model", args.out)
    if compared := [r for r in records if r["case"] != "profile"]:
        learning.draw(compared, common.place_of(args.out, "docs/img/real_model.png"))
    return records


def measure(cfg: Config, args: argparse.Namespace, argv: Sequence[str]) -> None:
    """Perform all runs that have no record yet."""
    steps = {"nanogrpo": cfg.max_steps, "TRL": min(args.trl_steps, cfg.max_steps)}
    same = {
        "threads": args.threads,
        "base": learning.fingerprint(Path(cfg.model) / "model.safetensors"),
        "problems": learning.fingerprint(*map(Path, (*cfg.data, *cfg.eval_data))),
        "settings": {
            f.name: list(value) if isinstance(value, tuple) else value  # as JSON returns it
            for f in dataclasses.fields(cfg)
            if (value := getattr(cfg, f.name)) != f.default and f.name not in NOT_SETTINGS
        },
    }
    wanted = [
        (seed, side)
        for seed, side in itertools.product(range(args.seeds), common.SIDES)
        if side != "TRL" or seed < args.trl_seeds
    ]

    def start(seed: int, side: str) -> dict:
        run = dataclasses.replace(cfg, seed=seed, max_steps=steps[side])
        return {**runs.run(side, run, args.threads, TRL_MICRO), **same, "steps": steps[side]}

    def keep(r: dict) -> bool:
        """Return whether a record is a profile or a run with the same options."""
        return r["case"] == "profile" or (same | {"steps": steps[r["side"]]}).items() <= r.items()

    runs.complete("real_model", wanted, start, args, argv, keep)


if __name__ == "__main__":
    main(sys.argv[1:])
