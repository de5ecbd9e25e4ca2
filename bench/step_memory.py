"""How much memory does a training step need, ours and TRL's, each in a process of its own?

In: nothing: models and completions are made as step_time.py makes them. Out:
results/step_memory.json: the peak of resident memory while the model and its optimizer are built
and two steps are made, above what the process held once its libraries were imported; and the peak
of the whole process.

The case that this is for is Qwen's vocabulary over a small body, where logits decide.

TRL with the settings of trl_run.py, where the generation is one micro-batch, as it is on our side;
and with four micro-batches, which take less memory and the same time. Read next: step_time.py.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress

from bench import common, runs, step_time, tables
from bench.step_sides import Case, Ours, Trl, options_of

CASES = {"V = 151,936": Case(4, 8, 32, 128, vocab=151936), "V = 104": Case(8, 8, 32, 192)}
SIDES = {"nanogrpo": Ours, "TRL": Trl, "TRL, 4 micro-batches": functools.partial(Trl, micro=4)}


def child(case: str, side: str, folder: Path, args: argparse.Namespace) -> dict:
    """Two steps of a side, in this process; the model and the samples are made before, by the
    parent.
    """
    torch.set_num_threads(args.threads)
    if "TRL" in side:
        import bench.trl_run  # noqa: F401
    cfg, samples = options_of(CASES[case], args.scale)
    runs.forget_peak()
    before = runs.memory()["now"]
    built = SIDES[side](folder, cfg)
    norms = [built.step(samples) for _ in range(2)]
    peak = runs.memory()["peak"]
    return {
        "peak_bytes": peak,
        "peak_bytes_above_libraries": peak - before,
        "gradient_norms": norms,
    }


def main(argv: Sequence[str] | None = None) -> list[dict]:
    parser = argparse.ArgumentParser(
        prog="python -m bench.step_memory", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default 2)")
    parser.add_argument(
        "--cases",
        nargs="*",
        default=list(CASES),
        choices=list(CASES),
        metavar="CASE",
        help="some of the cases",
    )
    parser.add_argument(
        "--hidden", type=int, default=128, help="hidden size of the model (default 128)"
    )
    parser.add_argument("--layers", type=int, default=2, help="layers of the model (default 2)")
    parser.add_argument(
        "--scale", type=float, default=1.0, help="scales all lengths (a quick check: 0.2)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=common.RESULTS,
        help="folder for the JSON rows (default bench/results)",
    )
    parser.add_argument("--child", nargs=2, metavar=("SIDE", "FOLDER"), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.child:
        found = child(args.cases[0], args.child[0], Path(args.child[1]), args)
        (Path(args.child[1]) / "found.json").write_text(json.dumps(found))
        return []

    settings = [
        "--threads",
        args.threads,
        "--hidden",
        args.hidden,
        "--layers",
        args.layers,
        "--scale",
        args.scale,
    ]
    env = {**os.environ, "OMP_NUM_THREADS": str(args.threads), "HF_HUB_OFFLINE": "1"}
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("memory", total=len(args.cases) * len(SIDES))
        for case in args.cases:
            rows = []
            with tempfile.TemporaryDirectory() as where:
                shape = step_time.write_model(CASES[case], Path(where), args)
                for side in SIDES:
                    progress.update(task, description=f"{case}: {side}")
                    command = [
                        sys.executable,
                        "-m",
                        "bench.step_memory",
                        "--cases",
                        case,
                        "--child",
                        side,
                        where,
                    ]
                    done = subprocess.run(
                        [*command, *map(str, settings)],
                        env=env,
                        cwd=common.ROOT,
                        capture_output=True,
                        text=True,
                        check=False,
                    )
                    if done.returncode:
                        raise RuntimeError(
                            f"{case}, {side}: the process failed:\n{done.stderr[-4000:]}"
                        )
                    found = json.loads((Path(where) / "found.json").read_text())
                    found["model"] = shape
                    rows.append(
                        common.facts(
                            "step_memory", case, side, [] if argv is None else argv, **found
                        )
                    )
                    progress.advance(task)
            norms = [row["gradient_norms"] for row in rows]
            if any(abs(a - b) > 1e-3 * b for pair in norms for a, b in zip(pair, norms[0])):
                raise RuntimeError(f"{case}: the gradients' norms differ: {norms}")
            path = common.merge("step_memory", rows, args.out)
    rows = common.read("step_memory", args.out)
    tables.show("step_memory", rows)
    print(f"rows: {path}")
    return rows


if __name__ == "__main__":
    main(sys.argv[1:])
