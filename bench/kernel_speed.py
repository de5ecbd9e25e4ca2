"""How fast are the kernels, compared with PyTorch, TRL, Liger and others on the same inputs?

    python -m bench.kernel_speed            # Qwen3's vocabulary, bfloat16; five minutes on a GPU
    python -m bench.kernel_speed --check    # only the errors of small shapes, on any machine
    python -m bench.kernel_speed --operations lora    # other results are kept

In: nothing. Logits, hidden states and weights are random. Out: results/kernel_speed.json, with one
record per operation and implementation (side). A record contains the time, the peak memory, the
number of launches, the error relative to float64, and a lower bound on the time, called the floor
(kernels/README.md).

Each round runs all sides. Before each call, the logits are restored and the L2 cache is
overwritten. On the GPU, this preparation takes about a millisecond, which is not timed. During the
preparation, the host already launches the first kernels. So the time of a short operation does not
include the time to launch it. Times are measured with CUDA events. The tables show the median, the
fastest and the slowest time. The floors are computed from the measured speeds of a copy and of a
matrix product. If a library fails or is not installed, the table gives the reason. Read next:
kernel_cases.py, which defines the operations and their sides.
"""

from __future__ import annotations

import functools
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from bench import common, kernel_peers, tables
from bench.kernel_cases import OPERATIONS, Case, cases


def errors(results: dict[str, Tensor], truth: dict[str, Tensor]) -> dict[str, float]:
    """Return the largest error of each result over the rows in `truth`.

    Errors of log-probs and entropies are absolute. All other errors are relative to the largest
    value of the result.
    """
    found = {}
    for name in truth.keys() & results.keys():
        exact = truth[name].detach()
        error = (results[name][: len(exact)].detach().double() - exact).abs().max()
        scale = 1.0 if name in ("logp", "entropy") else exact.abs().max().clamp(min=1e-30)
        found[name] = float(error / scale)
    return found


def attempt(case: Case, name: str, truth: dict[str, Tensor]) -> dict[str, float] | str:
    """Return the errors of a side, or the reason why it cannot run here. If a library fails, for
    example in float32, the tables show its error. An error of nanogrpo is raised.
    """
    side = case.sides[name]
    if isinstance(side, str):
        return side
    case.restore()
    try:
        return errors(side(**case.inputs), truth)
    except Exception as problem:
        if name == "nanogrpo":
            raise
        return f"{type(problem).__name__}: {problem}"


def seconds_of(work: Callable[[], object]) -> float:
    """Return how long the GPU works."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def measure(case: Case, budget: float) -> dict[str, tuple[common.Timing, dict]]:
    """Time all sides of the case, for about `budget` seconds in total.

    Returns the times of each side, and its errors, peak memory and number of launches.
    """
    truth = case.truth(**case.inputs)
    flush = torch.empty(4 * 2**30, dtype=torch.int8, device="cuda")  # far larger than the L2 cache
    runnable, figures = {}, {}

    def prepare() -> None:
        case.restore()
        flush.zero_()

    # this loop compiles each side and measures everything except time
    for name, side in case.sides.items():
        found = attempt(case, name, truth)
        if isinstance(found, str):
            case.sides[name] = found
            continue
        runnable[name] = functools.partial(side, **case.inputs)
        prepare()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        runnable[name]()
        torch.cuda.synchronize()
        peak = (torch.cuda.max_memory_allocated() - before) / 2**30
        prepare()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            runnable[name]()
            torch.cuda.synchronize()
        kernels = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
        figures[name] = {
            "errors": found,
            "peak_gib_above_inputs": round(peak, 3),
            "launches": len(kernels),
        }

    names, began, turn = list(runnable), time.monotonic(), 0
    seconds: dict[str, list[float]] = {name: [] for name in names}
    while turn < 5 or (turn < 200 and time.monotonic() - began < budget):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            prepare()
            seconds[name].append(seconds_of(runnable[name]))
        turn += 1
    return {name: (common.Timing(seconds[name]), figures[name]) for name in runnable}


def ceilings() -> dict[str, float]:
    """Return the bytes/s that a copy reads and writes, and the FLOP/s of a bfloat16 product."""
    source = torch.empty(2**30, dtype=torch.int8, device="cuda").random_()
    target = torch.empty_like(source)
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))

    def speed(work: Callable[[], object], amount: int) -> float:
        return amount / statistics.median([seconds_of(work) for _ in range(13)][3:])

    copied = speed(lambda: target.copy_(source), 2 * source.nbytes)
    return {"bytes": copied, "flop": speed(lambda: a @ b, 2 * 8192**3)}


def chosen(device: str, small: bool, operations: Sequence[str]) -> list[Callable[[], Case]]:
    return [
        make for name, found in cases(device, small).items() if name in operations for make in found
    ]


def check(device: str, operations: Sequence[str]) -> int:
    """Run every side on small shapes and print its errors. Return 1 if the errors of nanogrpo are
    too large.
    """
    wrong, lines = 0, []
    for make in chosen(device, True, operations):
        case = make()
        truth = case.truth(**case.inputs)
        for name in case.sides:
            found = attempt(case, name, truth)
            if isinstance(found, str):
                lines.append((case.name, name, found[:120], ""))
                continue
            good = bool(found) and all(error < 1e-4 for error in found.values())
            wrong += name == "nanogrpo" and not good
            worst = common.listed(dict(sorted(found.items())), ".1e")
            lines.append((case.name, name, "right" if good else "WRONG", worst))
    common.table("errors against float64", ("operation", "side", "", "largest error"), lines)
    return int(wrong > 0)


def main(argv: Sequence[str]) -> int:
    parser = common.parser(
        "kernel_speed",
        __doc__,
        threads=False,
        seconds=(15.0, "total seconds for all rounds and sides of an operation"),
    )
    parser.add_argument(
        "--check", action="store_true", help="small shapes, errors only; needs no GPU"
    )
    parser.add_argument(
        "--operations",
        nargs="*",
        default=list(OPERATIONS),
        choices=OPERATIONS,
        help=f"operations to measure (default: {' '.join(OPERATIONS)})",
    )
    args = parser.parse_args(argv)
    if args.check:
        return check("cuda" if torch.cuda.is_available() else "cpu", args.operations)
    if not torch.cuda.is_available():
        print(
            "bench.kernel_speed measures GPU kernels, and torch finds no NVIDIA GPU here;"
            " --check runs without one.",
            file=sys.stderr,
        )
        return 2
    records, left_out, most = [], [], ceilings()
    for make in chosen("cuda", False, args.operations):
        case = make()
        label = case.name + " " + " ".join(f"{k}={v:,}" for k, v in case.shape.items())
        floor = max(case.bytes / most["bytes"], case.flop / most["flop"]) or None
        for name, (timing, figures) in measure(case, args.seconds).items():
            figures |= {
                "shape": case.shape,
                "floor_seconds": floor,
                "ceilings": most,
                "peer_versions": common.versions(kernel_peers.PACKAGES),
            }
            records.append(common.record("kernel_speed", label, name, argv, timing, **figures))
        left_out += [
            (label, name, why[:120]) for name, why in case.sides.items() if isinstance(why, str)
        ]
        # Results are written after each operation, so an interrupted run keeps them.
        common.merge("kernel_speed", records, args.out)
        del case
        torch.cuda.empty_cache()
    tables.report("kernel_speed", args.out)
    common.table("not measured", ("operation", "side", "reason"), left_out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
