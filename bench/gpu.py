"""Run everything that needs an NVIDIA GPU, in stages of at most ten minutes: `make gpu`.

    python -m bench.gpu                    # all stages
    python -m bench.gpu --stages step      # only the stage `step`
    python -m bench.gpu --here             # with the packages of this Python only: `make gpu-here`

In: nothing. A stage whose files are missing (`NEEDS`) is not run, and its record says why. The
command `make gpu` tries to write these files. With --here, nothing is installed and no network is
used, and the results are written to runs/gpu_here. Out: the records of the benchmarks in
bench/results, gpu.json with one record per stage, and a log per stage. gpu.md contains all tables,
for a pull request. If a stage fails or takes too long, the other stages still run. Libraries that
are not installed are left out of the comparison. Read next: kernel_speed.py, step_large.py.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from bench import common, readme
from nanogrpo.logs.files import read_records

LIMIT = 600  # seconds per stage
# Files with tests marked `gpu`, and files with tests that compile kernels if there is a GPU. These
# tests need torch, Triton, transformers, peft and hypothesis, but neither TRL nor vLLM.
TESTS = (
    *("tests/gpu", "tests/kernels/test_gpu.py", "tests/kernels/test_log_softmax.py"),
    *("tests/kernels/test_policy.py", "tests/kernels/test_paged.py", "tests/engine/test_local.py"),
    *("tests/model/test_attention.py", "tests/model/test_nf4_kernels.py"),
    "tests/vision/test_model.py",
)
# The commands of each stage, without `python`. OUT stands for the folder for results.
STAGES: dict[str, list[str]] = {  # tables.py names these stages, too
    "environment": ["-m torch.utils.collect_env"],
    "tests": [f"-m pytest -q {' '.join(TESTS)}"],
    "trace": [f"-m bench.step_trace --shape {size} --out OUT" for size in common.LARGE],
    "kernels": [
        "-m bench.kernel_speed --check",
        "-m bench.kernel_speed --seconds 8 --out OUT --operations logits head nf4 decoder",
    ],
    "lora": ["-m bench.kernel_speed --operations lora --out OUT"],
    "attention": ["-m bench.attention_speed --out OUT"],
    "step": ["-m bench.step_time --shape 0.6B --out OUT"],
    "decode": ["-m bench.rollout_speed --shape 0.6B --cases uneven --out OUT"],
    "nano-vllm": ["-m bench.rollout_speed --shape 0.6B --cases nano-vllm --repeats 3 --out OUT"],
    "train": [
        "examples/word_problems.py runs/problems",
        "train.py --config examples/word_problems.json --max-steps 10 --overwrite-output-dir"
        " --output-dir OUT/gpu_train",
    ],
}
# The files that a stage needs. `make gpu` creates them if the model can be downloaded.
NEEDS = {"train": "runs/smollm2/config.json"}
# The records that the stages write. tables.py defines a table for each.
TABLES = ["gpu", "kernel_speed", "attention_speed", "step_trace", "step_large", "rollout_large"]


def run(stage: str, out: Path, limit: float = LIMIT) -> dict:
    """Run the commands of a stage until one fails. Return the values for the stage's record.

    The output is written to OUT/gpu_<stage>.log.
    """
    env = {**os.environ, "PYTHONUNBUFFERED": "1"}
    env.pop("TRITON_INTERPRET", None)  # would turn on Triton's interpreter
    # On several GPUs, TRL's trainer would split its batches.
    env["CUDA_VISIBLE_DEVICES"] = env.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    began, status = time.perf_counter(), "passed"
    with (out / f"gpu_{stage}.log").open("w") as log:
        for command in STAGES[stage]:
            argv = [sys.executable, *(a.replace("OUT", str(out)) for a in command.split())]
            process = subprocess.Popen(
                argv,
                env=env,
                cwd=common.ROOT,
                stdout=log,
                stderr=subprocess.STDOUT,
                # so that a timeout also kills any server that the command has started
                start_new_session=True,
            )
            try:
                code = process.wait(max(limit - (time.perf_counter() - began), 0))
            except subprocess.TimeoutExpired:
                status = f"ended after {limit:.0f} s"
                break
            finally:  # Ctrl-C does not reach processes in other sessions
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
            if code:
                status = f"failed with exit status {code}"
                break
    return {"status": status, "seconds": round(time.perf_counter() - began, 1)}


def trained(log: Path) -> dict[str, float]:
    """Return the medians of some metrics over all steps except the first, which is a warm-up."""
    steps = [row for row in read_records(log) if "step_time" in row][1:]
    names = ("step_time", "tokens_per_second", "sampling/k3", "memory/peak_gib")
    return {n: statistics.median(r[n] for r in steps) for n in names if steps and n in steps[0]}


def main(argv: Sequence[str]) -> int:
    parser = common.parser("gpu", __doc__, threads=False)
    parser.add_argument(
        "--stages",
        nargs="*",
        default=list(STAGES),
        choices=STAGES,
        metavar="STAGE",
        help=f"stages to run (default: {', '.join(STAGES)})",
    )
    parser.add_argument(
        "--here", action="store_true", help="use no network, and write the results to runs/gpu_here"
    )
    args = parser.parse_args(argv)
    if args.here:
        os.environ["HF_HUB_OFFLINE"] = "1"
        args.out = common.ROOT / "runs/gpu_here" if args.out == common.RESULTS else args.out
    if not torch.cuda.is_available():
        print("bench.gpu needs an NVIDIA GPU, and torch finds none.", file=sys.stderr)
        return 2
    args.out.mkdir(parents=True, exist_ok=True)
    failed = []
    for stage in args.stages:
        print(f"{stage}: the output is in {args.out / f'gpu_{stage}.log'}", flush=True)
        needed = NEEDS.get(stage, "")
        if (common.ROOT / needed).exists():
            figures = run(stage, args.out)
        else:
            figures = {"status": f"not run: {needed} is missing", "seconds": 0.0}
        print(f"{stage}: {figures['status']} after {figures['seconds']} s", flush=True)
        if figures["status"] != "passed":
            failed += [stage] if figures["seconds"] else []
        elif stage == "train":
            figures |= trained(args.out / "gpu_train" / "metrics.jsonl")
        record = common.record("gpu", stage, "nanogrpo", argv, **figures)
        common.merge("gpu", [record], args.out)
    page = args.out / "gpu.md"
    page.write_text("\n".join(readme.section(name, common.read(name, args.out)) for name in TABLES))
    print(f"the tables for a pull request: {page}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
