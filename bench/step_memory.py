"""How much memory does a training step of nanogrpo need, compared with TRL?

In: nothing. Models and completions are created as in step_time.py. Each side runs in a separate
process. Out: results/step_memory.json with the peak of resident memory while a process creates the
model and the optimizer and trains two steps. A record contains this peak memory, with and without
the memory in use after the imports.

The most important case is a small model with Qwen's vocabulary, where the logits dominate.

TRL's settings are in trl_run.py. TRL runs once with the whole generation as one micro-batch, as
nanogrpo does. TRL then runs again with four micro-batches, which need less memory and take the same
time. Read next: step_time.py.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress

from bench import common, runs, step_time, tables
from bench.step_sides import Case, Ours, Trl, check_norms, options_of

CASES = {"V = 151,936": Case(4, 8, 32, 128, vocab=151936), "V = 104": Case(8, 8, 32, 192)}
SIDES = {"nanogrpo": Ours, "TRL": Trl, "TRL, 4 micro-batches": functools.partial(Trl, micro=4)}


def child(case: str, side: str, folder: Path, args: argparse.Namespace) -> dict:
    """Train two steps in this process with one side, starting from the model in `folder`."""
    torch.set_num_threads(args.threads)
    if "TRL" in side:
        import bench.trl_run  # noqa: F401 (an early import)
    cfg, samples = options_of(CASES[case], args.scale)
    runs.reset_peak()
    before = runs.memory()["now"]
    built = SIDES[side](folder, cfg)
    norms = [built.step(samples) for _ in range(2)]
    peak = runs.memory()["peak"]
    return {
        "peak_bytes": peak,
        "peak_bytes_above_libraries": peak - before,
        "gradient_norms": norms,
    }


def main(argv: Sequence[str]) -> list[dict]:
    parser = common.parser(
        "step_memory",
        __doc__,
        hidden=(128, "hidden size of the model"),
        layers=(2, "layers of the model"),
        scale=(1.0, "factor on all lengths; 0.2 is a quick check"),
    )
    common.add_cases(parser, CASES)
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)  # case, side, folder
    args = parser.parse_args(argv)
    if args.child:
        case, side, folder = args.child
        found = child(case, side, Path(folder), args)
        (Path(folder) / "found.json").write_text(json.dumps(found))
        return []

    names = ("threads", "hidden", "layers", "scale")
    settings = [f"--{name}={getattr(args, name)}" for name in names]
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("memory", total=len(args.cases) * len(SIDES))
        for case in args.cases:
            records, norms = [], []
            with tempfile.TemporaryDirectory() as where:
                step_time.write_model(CASES[case], Path(where), args)
                for side in SIDES:
                    progress.update(task, description=f"{case}: {side}")
                    command = ["bench.step_memory", *settings, "--child", case, side, where]
                    found = common.in_process(Path(where), command, args.threads)
                    norms.append(found["gradient_norms"])
                    records.append(common.record("step_memory", case, side, argv, **found))
                    progress.advance(task)
            for step in zip(*norms):
                check_norms(case, dict(zip(SIDES, step)))
            common.merge("step_memory", records, args.out)
    return tables.report("step_memory", args.out)


if __name__ == "__main__":
    main(sys.argv[1:])
