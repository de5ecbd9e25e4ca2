"""Train with the settings of a record of the speedrun, and add the measurements to its file.

    python -m examples.speedrun.run examples/speedrun/records/start.json --seeds 0 1 2

In: a JSON file with "idea" and "options". These options override the options in
examples/word_problems.json. Two keys are optional: "environment" (variables of the run) and
"float32_matmul_precision" (torch's setting of this name). Out: the same file with date, machine,
and an entry in "runs" for each seed. The "curve" of an entry has a row [step, seconds, seconds of
processor time, accuracy] for each evaluation. Read next: verify.py (the rules).

The clock runs during the steps. The clock is stopped during evaluations, which always compute in
float32, and while the model is loaded and saved. Processor time is the user and system time of the
process, summed over its threads.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

import train
from bench.common import ROOT, machine
from nanogrpo.errors import UserError, read_json
from nanogrpo.extras import attach
from nanogrpo.feature import Feature

BASE = ROOT / "examples/word_problems.json"


class Stopwatch(Feature):
    """Measure a run without its evaluations."""

    def __init__(self, precision: str):
        self.precision = precision
        self.curve: list[list[float]] = []  # see the docstring of this file
        self.spent = self.began = (0.0, 0.0)  # seconds, processor seconds

    def step(self, run, step, samples) -> None:
        if (step + 1) % run.cfg.eval_steps == 0 or step + 1 == run.cfg.max_steps:
            now = time.perf_counter(), time.process_time()
            self.spent = tuple(s + n - b for s, n, b in zip(self.spent, now, self.began))
            torch.set_float32_matmul_precision("highest")

    def record(self, done: int, record: dict) -> None:
        if "eval/after" in record:
            self.curve.append([done, *self.spent, record["eval/reward"]])
            torch.set_float32_matmul_precision(self.precision)
            self.began = time.perf_counter(), time.process_time()


def options(record: dict) -> dict:
    """Return the options in BASE, overridden by the options of a record."""
    return read_json(BASE) | record["options"]


def one(record: dict, seed: int, folder: Path) -> dict:
    """Train with one seed in a new process. Return the entry in "runs"."""
    folder.mkdir(parents=True)
    (folder / "record.json").write_text(json.dumps(record))
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", **record.get("environment", {})}
    command = [sys.executable, "-m", "examples.speedrun.run", str(folder), "--seeds", str(seed)]
    done = subprocess.run(command, cwd=ROOT, env=environment, check=False)
    if done.returncode:
        raise UserError(
            f"the run with seed {seed} ended with status {done.returncode}: see its output above."
        )
    return read_json(folder / "found.json")


def worker(folder: Path, seed: int) -> None:
    """Train in this process, and write the measurements to folder/found.json."""
    record = read_json(folder / "record.json")
    (folder / "options.json").write_text(json.dumps(options(record)))
    watch = Stopwatch(record.get("float32_matmul_precision", "highest"))
    train.attach = lambda cfg, given: [*attach.attach(cfg, given), watch]
    argv = ["--config", folder / "options.json", "--output-dir", folder / "run", "--seed", seed]
    code = train.main([*map(str, argv), "--device", "cpu"])
    if code or watch.curve[-1][0] < options(record)["max_steps"]:  # 0 if a signal has ended the run
        sys.exit(code or 1)
    shutil.rmtree(folder / "run" / f"checkpoint-{watch.curve[-1][0]}")
    curve = [[step, round(s, 1), round(p, 1), round(a, 4)] for step, s, p, a in watch.curve]
    found = {"seed": seed, "threads": torch.get_num_threads(), "curve": curve}
    (folder / "found.json").write_text(json.dumps(found))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("record", type=Path, help="file of the record")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--parallel", type=int, default=1, help="runs at the same time")
    parser.add_argument("--folder", type=Path, help="where to keep the logs; default: nowhere")
    args = parser.parse_args(argv)
    if args.record.is_dir():  # `one` started this process
        worker(args.record, *args.seeds)
        return 0
    try:
        record = read_json(args.record)
        with tempfile.TemporaryDirectory() as where:
            folder = args.folder or Path(where)
            with ThreadPoolExecutor(args.parallel) as pool:
                runs = pool.map(lambda seed: one(record, seed, folder / f"{seed}"), args.seeds)
                record["runs"] = list(runs)
    except UserError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    record["date"] = datetime.date.today().isoformat()
    record["machine"] = machine()
    args.record.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
