"""How fast are the kernels, against PyTorch, TRL 1.16 and Liger 0.8.5, on the same numbers in the
same run?

    python -m bench.kernel_speed            on an NVIDIA GPU: Qwen3's vocabulary, bfloat16; about five minutes
    python -m bench.kernel_speed --check    anywhere: every side that runs here on small shapes, its error only, nothing timed

In: nothing: random logits, hidden states and weights. Out: results/kernel_speed.json, a row for
each operation and side, with its time, floor (kernels/README.md says how floors are found), peak
memory, launches and error against float64.

Fair: sides take turns within a round; before each call the logits are restored and the L2 cache is
overwritten, both untimed; times are from CUDA events; medians with the fastest and slowest. A peer
that is not installed, or fails, is named as such. Read next: kernel_cases.py, the operations and
the sides of each.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from bench import common, kernel_peers
from bench.kernel_cases import Case, cases


def errors(case: Case, results: dict[str, Tensor], truth: dict[str, Tensor]) -> dict[str, float]:
    """Largest error of each result over the rows that the truth has: absolute for log-probs, else
    relative to the largest.
    """
    found = {}
    for name in truth.keys() & results.keys():
        exact = truth[name]
        error = (results[name][: len(exact)].detach().double() - exact).abs().max()
        scale = 1.0 if name in ("logp", "entropy") else exact.abs().max().clamp(min=1e-30)
        found[name] = float(error / scale)
    return found


def measure(case: Case, budget: float) -> dict[str, tuple[common.Timing, dict]]:
    """Times every side of the case for about `budget` seconds together; figures: error, peak
    memory, launches.
    """
    truth = {name: value.detach() for name, value in case.truth(**case.inputs).items()}
    pristine = {name: case.inputs[name].clone() for name in case.restore}
    flush = torch.empty(256 * 2**20, dtype=torch.int8, device="cuda")  # several times the L2 cache
    runnable = {name: side for name, side in case.sides.items() if callable(side)}
    figures = {}

    def prepare() -> None:
        for name, value in pristine.items():
            case.inputs[name].copy_(value)
        flush.zero_()

    for name, side in list(runnable.items()):  # warm up: compile, and look at what is not timed
        prepare()
        try:
            side(**case.inputs)
        except Exception as problem:
            if name == "nanogrpo":
                raise
            # a peer's own failure is a result, told in the table
            case.sides[name] = f"{type(problem).__name__}: {problem}"
            del runnable[name]
            continue
        prepare()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        results = side(**case.inputs)
        torch.cuda.synchronize()
        peak = (torch.cuda.max_memory_allocated() - before) / 2**30
        figures[name] = {
            "errors": errors(case, results, truth),
            "peak_gib_above_inputs": round(peak, 3),
        }
        del results
        prepare()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            side(**case.inputs)
            torch.cuda.synchronize()
        kernels = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
        figures[name]["launches"] = len(kernels)

    names, began, turn = list(runnable), time.monotonic(), 0
    seconds = {name: [] for name in names}
    while turn < 5 or (turn < 200 and time.monotonic() - began < budget):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            prepare()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            runnable[name](**case.inputs)
            end.record()
            end.synchronize()
            seconds[name].append(start.elapsed_time(end) / 1e3)
        turn += 1
    return {name: (common.Timing(seconds[name]), figures[name]) for name in runnable}


def check(device: str) -> int:
    """Runs every side on small shapes and prints its errors; 1 if one of ours is not what float64
    says.
    """
    wrong, lines = 0, []
    for make in cases(device, small=True):
        case = make()
        truth = {name: value.detach() for name, value in case.truth(**case.inputs).items()}
        pristine = {name: case.inputs[name].clone() for name in case.restore}
        for name, side in case.sides.items():
            if isinstance(side, str):
                lines.append((case.name, name, side, ""))
                continue
            for restored, value in pristine.items():
                case.inputs[restored].copy_(value)
            found = errors(case, side(**case.inputs), truth)
            good = bool(found) and all(error < 1e-4 for error in found.values())
            wrong += not good
            lines.append(
                (
                    case.name,
                    name,
                    "right" if good else "WRONG",
                    ", ".join(f"{k} {v:.1e}" for k, v in sorted(found.items())),
                )
            )
    common.table("errors against float64", ("operation", "side", "", "largest error"), lines)
    return int(wrong > 0)


def main(argv: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="small shapes, errors only; needs no GPU"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=15.0,
        help="time for each operation's rounds, all sides together",
    )
    parser.add_argument("--out", type=Path, default=common.RESULTS, help="folder of the rows")
    args = parser.parse_args(argv)
    if args.check:
        return check("cuda" if torch.cuda.is_available() else "cpu")
    if not torch.cuda.is_available():
        print(
            "bench.kernel_speed measures GPU kernels and torch sees no NVIDIA GPU here; --check runs without one.",
            file=sys.stderr,
        )
        return 2
    rows, lines = [], []
    for make in cases("cuda", small=False):
        case = make()
        label = case.name + " " + " ".join(f"{k}={v:,}" for k, v in case.shape.items())
        floor = case.floor if "H200" in torch.cuda.get_device_name() else None
        for name, (timing, figures) in measure(case, args.seconds).items():
            figures |= {
                "shape": case.shape,
                "floor_seconds": floor,
                "peer_versions": kernel_peers.versions(),
            }
            rows.append(common.row("kernel_speed", label, name, timing, argv, **figures))
            spread = " – ".join(f"{1e3 * s:.3g}" for s in timing.spread)
            worst = ", ".join(f"{k} {v:.1e}" for k, v in sorted(figures["errors"].items()))
            shown = (
                1e3 * timing.median,
                spread,
                1e3 * floor if floor else "–",
                figures["peak_gib_above_inputs"],
                figures["launches"],
            )
            lines.append((label, name, *shown, worst))
        lines += [
            (label, name, f"not run: {why[:120]}", *[""] * 5)
            for name, why in case.sides.items()
            if isinstance(why, str)
        ]
        # after each operation: a run cut short keeps what it has
        common.write("kernel_speed", rows, args.out)
        del case
        torch.cuda.empty_cache()
    common.table(
        "kernels",
        ("operation", "side", "ms", "fastest – slowest", "floor", "peak GiB", "launches", "error"),
        lines,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
