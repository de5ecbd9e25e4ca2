"""Does training survive 200 random faults without losing or changing any result? Each run of the
tiny task is hit by one fault at a random moment, and is resumed until it is done. The result must
then equal the result of the same run without a fault.

In: --faults, --seed. Out: results/soak.json with one record, and one printed line per violation.

Each run combines one of MODES with one of FAULTS. Every fault is used once before any fault is used
twice. The fault occurs at a random time, either while the run starts or after a random step. This
benchmark checks:

* Rows: metrics.jsonl contains every step once, with the same values as without the fault. If the
  fault deletes the folder, earlier rows may be missing, but a message must name the missing rows.
  If the fault kills the reward process during a call, the rewards of one step are lost
  (docs/rewards.md). In this case, the rows are compared only up to this step, and the weights are
  not compared.
* Weights: the last checkpoint is byte for byte the same as without the fault.
* Errors: a rank that was not killed prints one sentence and no traceback.
* Processes: half a minute after the run ends, none of its processes is alive. If torchrun is
  killed, the limit is 90 seconds.
* Files: no temporary files are left, in the folder of the run or elsewhere.

With --max-staleness, results depend on timing, so values and weights are not compared.

`--real-vllm N` instead performs N runs with a real vLLM server, which takes a minute to start.
`--suite N` instead runs the tests that depend on timing N times, while six busy processes use the
CPU. Read next: soak_faults.py (modes and faults), tests/run/test_state.py (runs killed at chosen
points).
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench import common, tables
from bench.soak_faults import FAULTS, MODES, REAL, STEPS, Mode, Run, flip_a_bit
from tests import ranks
from tests.conftest import write_base
from tests.vllm.real import PYTHON, SIZES, SMALL

TESTS = (  # tests that depend on timing
    "tests/run/test_state.py",
    "tests/distributed/test_failure.py",
    "tests/distributed/test_world.py",
    "tests/engine/test_ahead.py",
    "tests/engine/test_tools.py",
    "tests/rewards/test_process.py",
    "tests/rewards/test_shutdown.py",
    "tests/run/test_output.py",
    "tests/vllm/test_access.py",
    "tests/vllm/test_client.py",
    "tests/vllm/test_nccl.py",
    "tests/vllm/test_server.py",
    "tests/vllm/test_sleeping.py",
    "tests/vllm/test_sync.py",
)


# modules that are imported once, before processes are forked
OURS = ("bench.soak_faults", "bench.tables", "tests.vllm.fake")


# --- one fault ---


def disturbed(run: Run, fault: str, rng: random.Random) -> None:
    """Start the run, cause the fault, and resume the run until it is done."""
    run.start()
    after = rng.randint(-3, STEPS - 2)  # a negative number means a fault during the start
    if after < 0:
        time.sleep(rng.uniform(0, run.mode.start))
    else:
        while run.alive() and len(run.steps()) <= after:
            time.sleep(0.005)
        time.sleep(rng.uniform(0, 0.05))
    strike = FAULTS[fault].strike
    repair = strike(run, rng)
    try:
        ends = [-1] if strike is flip_a_bit else run.end()
    finally:
        if repair:
            repair()
    while ends != [0] or not (run.output / f"checkpoint-{STEPS}").exists():
        assert run.starts < 6, f"the run does not end: {ends}"
        run.start()
        ends = run.end()


def check(run: Run, rows: list[dict], weights: str, lossy: bool = False) -> None:
    """Raise AssertionError if one of the checks in the module docstring fails.

    `lossy`: a call of the reward functions may be lost.
    """
    found = run.steps()
    first = (found[0]["step"] if found else STEPS) if run.log_deleted else 0
    assert [row["step"] for row in found] == list(range(first, STEPS)), "a step is lost or doubled"
    if first and run.starts > 1:
        assert "has no record of" in "".join(run.errors), "no message about the missing steps"
    if run.mode.exact:
        # num_tokens depends on the log, which a fault may have deleted
        uncertain = (*run.mode.uncertain, *(["num_tokens"] if first else []))
        lost = [i for i, row in enumerate(found) if lossy and row.get("rewards/failures")]
        different = {
            name
            for mine, theirs in zip(found[: lost[0] if lost else None], rows[first:])
            for name in mine.keys() | theirs.keys()
            if mine.get(name) != theirs.get(name) and not name.startswith(uncertain)
        }
        assert not different, f"other values of {', '.join(sorted(different))}"
        assert lost or run.weights() == weights, "the weights differ"
    for text in run.errors:
        assert "Traceback" not in text, "a traceback"
        count = len(re.findall("^error: ", text, re.MULTILINE))
        assert count <= 1, f"{count} errors are printed"
    run.settle()
    left = [p for p in run.output.glob(".*") if p.name != ".lock"]
    left += (run.folder / "tmp").glob("nanogrpo*")  # libraries may leave their own files
    assert not left, f"files are left: {[p.name for p in left]}"


@contextlib.contextmanager
def new_run(mode: Mode, base: Path) -> Iterator[Run]:
    with tempfile.TemporaryDirectory() as where:
        run = Run(mode, base, Path(where))
        try:
            yield run
        finally:
            run.kill()


def undisturbed(mode: Mode, base: Path) -> tuple[list[dict], str]:
    """Return the log records and the weights of a run without a fault."""
    with new_run(mode, base) as run:
        run.start()
        assert run.end() == [0], run.errors
        check(run, run.steps(), run.weights())
        return run.steps(), run.weights()


def experiment(
    mode: Mode, fault: str, rng: random.Random, base: Path, expected: tuple[list[dict], str]
) -> dict:
    """Perform one run with a fault. Return the violation, if any, and how often the run was
    started.
    """
    broken = ""
    with new_run(mode, base) as run:
        try:
            disturbed(run, fault, rng)
            check(run, *expected, lossy=fault == "SIGKILL of the reward process")
        except Exception as e:  # a failed run is a result, and the other runs continue
            why = str(e) if isinstance(e, AssertionError) else traceback.format_exc()
            broken = f"{why}\n{''.join(run.errors)[-3000:]}"
        return {"broken": broken, "starts": run.starts}


# --- many faults ---


def plan(
    count: int, seed: int, modes: Mapping[str, Mode] = MODES
) -> list[tuple[str, str, random.Random]]:
    """Return the mode, the fault and the random number generator for each run."""
    rng, plans = random.Random(seed), []
    fitting = {name: [m for m in modes if fault.fits(modes[m])] for name, fault in FAULTS.items()}
    while len(plans) < count:
        faults = [name for name in FAULTS if fitting[name]]
        rng.shuffle(faults)
        for fault in faults:
            plans.append((rng.choice(fitting[fault]), fault, random.Random(rng.random())))
    return plans[:count]


def soak(count: int, seed: int, workers: int, real: bool) -> dict:
    modes = REAL if real else MODES
    plans = plan(count, seed, modes)
    with tempfile.TemporaryDirectory() as where, ThreadPoolExecutor(workers) as pool:
        base = write_base(Path(where) / "base", **(SIZES if real else {}))
        used = list(dict.fromkeys(mode for mode, *_ in plans))
        expected = dict(zip(used, pool.map(lambda mode: undisturbed(modes[mode], base), used)))
        results = pool.map(
            lambda p: {
                "mode": p[0],
                "fault": p[1],
                **experiment(modes[p[0]], *p[1:], base, expected[p[0]]),
            },
            plans,
        )
        found = []
        for r in results:
            if r["broken"]:
                print(f"{len(found)}: {r['mode']}, {r['fault']}: {r['broken']}", flush=True)
            found.append(r)
    kinds = {}
    for kind in sorted({r["fault"] for r in found}):
        mine = [r for r in found if r["fault"] == kind]
        kinds[kind] = {
            "runs": len(mine),
            "starts": sum(r["starts"] for r in mine),
            "broken": sum(bool(r["broken"]) for r in mine),
        }
    return {"broken": [r for r in found if r["broken"]], "kinds": kinds}


# --- tests under load ---


def suite(times: int) -> dict:
    """Run the tests that depend on timing, while six busy processes use the CPU."""
    loop = f"import os\nwhile os.getppid() == {os.getpid()}: pass"
    busy = [subprocess.Popen([sys.executable, "-c", loop]) for _ in range(6)]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not vllm"]
    command += ["--timeout", "1800"]  # a test reaches this limit only if it hangs
    command += ["-n", "4", "--dist", "worksteal", *TESTS]
    failures, turn = [], 0
    try:
        for turn in range(1, times + 1):
            done = subprocess.run(
                command, cwd=common.ROOT, capture_output=True, text=True, check=False
            )
            print(turn, done.stdout.strip().splitlines()[-1], flush=True)
            if done.returncode:
                failures.append({"turn": turn, "output": done.stdout[-3000:]})
                print(done.stdout[-8000:], flush=True)
    except KeyboardInterrupt:
        turn -= 1  # this repetition was not finished
    finally:
        for process in busy:
            process.kill()
    return {"times": turn, "failures": failures}


def main(argv: Sequence[str]) -> list[dict]:
    parser = common.parser(
        "soak",
        __doc__,
        threads=False,
        faults=(200, "runs with one fault each"),
        seed=(0, "seed of the modes, faults and moments"),
        workers=(3, "runs at a time"),
        real_vllm=(0, "instead, so many runs with a real vLLM"),
        suite=(0, "instead, run the tests that depend on scheduling so many times under load"),
    )
    args = parser.parse_args(argv)
    if args.real_vllm and not Path(PYTHON).exists():
        parser.error(f"--real-vllm needs {PYTHON}: run make test-vllm, or set NANOGRPO_VLLM_PYTHON")
    os.environ["PYTHONPATH"] = str(common.ROOT)
    os.environ.update({**SMALL, **os.environ})
    ranks.SERVER.set_forkserver_preload(
        ["train", "tests.conftest", "torch.distributed.checkpoint", *OURS]
    )
    began = time.monotonic()
    if args.suite:
        case, found = "suite", suite(args.suite)
        failed = found["failures"]
    else:
        real = bool(args.real_vllm)
        case = "real vLLM" if real else "faults"
        found = soak(args.real_vllm or args.faults, args.seed, args.workers, real)
        failed = found["broken"]
    seconds = round(time.monotonic() - began, 1)
    record = common.record("soak", case, "nanogrpo", argv, **found, seconds=seconds)
    common.merge("soak", [record], args.out)
    records = tables.report("soak", args.out)
    if failed:
        raise SystemExit(1)
    return records


if __name__ == "__main__":
    main(sys.argv[1:])
