"""How fast are the kernels, against PyTorch, TRL 1.16 and Liger 0.8.5, on the same numbers in the same run?

    python -m bench.kernel_speed            on an NVIDIA GPU: Qwen3's vocabulary, bfloat16; about five minutes
    python -m bench.kernel_speed --check    anywhere: every side that runs here on small shapes, its error only, nothing timed

In: nothing: random logits, hidden states and weights. Out: results/kernel_speed.json, a row for each operation and side, with its
time, floor (kernels/README.md says how floors are found), peak memory, launches and error against float64.

Fair: sides take turns within a round; before each call the logits are restored and the L2 cache is overwritten, both untimed;
times are from CUDA events; medians with the fastest and slowest. A peer that is not installed, or fails, is named as such.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from bench import common, kernel_decoder, kernel_peers
from nanogrpo import custom_ops, ops
from nanogrpo.kernels import reference

EPSILON, TEMPERATURE = 0.2, 0.7
OBJECTIVE = reference.Objective(EPSILON, EPSILON)
ROWS = 15  # compared with float64: the first of the first sequence, all of which every side scores
BANDWIDTH, FLOPS = 4.3e12, 790e12  # of one H200: bytes a second copied, bfloat16 FLOP a second; the floors are for it alone


@dataclass
class Case:
    """One operation at one shape: its inputs, its sides, and the truth to compare with.

    A side is a function of the inputs that returns named results; `truth` gives some of their first rows in float64.
    """

    name: str
    inputs: dict[str, Tensor]
    sides: dict[str, Callable[..., dict[str, Tensor]] | str]  # a string: why this side cannot run here
    truth: Callable[..., dict[str, Tensor]]
    floor: float | None  # seconds, on an H200
    restore: Sequence[str] = ()  # inputs that a side may overwrite
    shape: dict[str, int] = field(default_factory=dict)


def _tokens(count: int, device: str) -> dict[str, Tensor]:
    """Per-token vectors of a batch of `count` completion tokens in eight sequences, some off policy, all with weight."""
    g = torch.Generator(device).manual_seed(0)
    per_sequence = torch.randn(8, 1, generator=g, device=device).expand(8, count // 8)
    off = 0.1 * torch.randn(count, generator=g, device=device)
    weight = torch.full((count,), 1.0 / count, device=device)
    return {"advantage": per_sequence.reshape(-1).contiguous(), "off": off, "weight": weight}


# ------------------------------------------------------------------------------------------------------------- operations


def log_softmax_case(count: int, vocab: int, device: str, dtype: torch.dtype) -> Case:
    g = torch.Generator(device).manual_seed(1)
    logits = torch.empty(count, vocab, device=device, dtype=dtype).normal_(0, 3, generator=g)
    targets = torch.randint(vocab, (count,), generator=g, device=device)

    def ours(logits: Tensor, targets: Tensor) -> dict[str, Tensor]:
        logp, entropy = ops.selective_log_softmax(logits, targets, TEMPERATURE, entropy=True)
        return {"logp": logp, "entropy": entropy}

    def truth(logits: Tensor, targets: Tensor) -> dict[str, Tensor]:
        logp, entropy, _ = reference.log_softmax_forward(logits[:ROWS].double(), targets[:ROWS], TEMPERATURE)
        return {"logp": logp, "entropy": entropy}

    sides = {"nanogrpo": ours, **kernel_peers.log_softmax(device, TEMPERATURE)}
    inputs = {"logits": logits, "targets": targets}
    floor = count * vocab * dtype.itemsize / BANDWIDTH
    return Case("log-prob and entropy, forward", inputs, sides, truth, floor, shape={"N": count, "V": vocab})


def rows_case(count: int, vocab: int, device: str, dtype: torch.dtype) -> Case:
    base = log_softmax_case(count, vocab, device, dtype)
    tokens = _tokens(count, device)
    with torch.no_grad():
        old = ops.selective_log_softmax(base.inputs["logits"], base.inputs["targets"], TEMPERATURE)[0] + tokens["off"]
    inputs = {**base.inputs, "old": old, "advantage": tokens["advantage"], "weight": tokens["weight"]}

    def ours(logits: Tensor, targets: Tensor, old: Tensor, advantage: Tensor, weight: Tensor) -> dict[str, Tensor]:
        module = custom_ops.rows_for(logits.device)
        logp, _, _ = module.policy_rows_(logits, targets, TEMPERATURE, old, advantage, weight, None, None, None, OBJECTIVE)
        return {"logp": logp, "grad": logits}

    def truth(logits: Tensor, targets: Tensor, old: Tensor, advantage: Tensor, weight: Tensor) -> dict[str, Tensor]:
        vectors = old[:ROWS].double(), advantage[:ROWS].double(), weight[:ROWS].double(), None, None, None
        grad = logits[:ROWS].double()
        logp, _, _ = reference.policy_rows_(grad, targets[:ROWS], TEMPERATURE, *vectors, OBJECTIVE)
        return {"logp": logp, "grad": grad}

    sides = {"nanogrpo": ours, **kernel_peers.rows(device, TEMPERATURE, EPSILON)}
    floor = 2 * count * vocab * dtype.itemsize / BANDWIDTH
    return Case("forward, loss and gradient of logits", inputs, sides, truth, floor, ("logits",), base.shape)


def head_case(count: int, vocab: int, width: int, device: str, dtype: torch.dtype) -> Case:
    g = torch.Generator(device).manual_seed(2)
    hidden = torch.randn(count, width, generator=g, device=device).to(dtype).requires_grad_()
    lm_head = torch.randn(vocab, width, generator=g, device=device).mul_(3 * width**-0.5).to(dtype).requires_grad_()
    targets = torch.randint(vocab, (count,), generator=g, device=device)
    tokens = _tokens(count, device)
    with torch.no_grad():
        old = ops.head_logp(hidden, lm_head, targets, TEMPERATURE)[0] + tokens["off"]
    inputs = {"hidden": hidden, "lm_head": lm_head, "targets": targets, "old": old}
    inputs |= {"advantage": tokens["advantage"], "weight": tokens["weight"]}

    def ours(hidden, lm_head, targets, old, advantage, weight) -> dict[str, Tensor]:
        settings = dict(temperature=TEMPERATURE, epsilon=EPSILON, epsilon_high=EPSILON)
        out = ops.head_policy_loss(hidden, lm_head, targets, old, advantage, weight, **settings)
        dhidden, dhead = torch.autograd.grad(out.loss, (hidden, lm_head))
        return {"logp": out.logp, "dhidden": dhidden, "dhead": dhead}

    def truth(hidden, lm_head, targets, old, advantage, weight) -> dict[str, Tensor]:
        h = hidden[:ROWS].detach().double()
        wide = lm_head.detach().double()
        logits = h @ wide.T
        vectors = old[:ROWS].double(), advantage[:ROWS].double(), weight[:ROWS].double(), None, None, None
        logp, _, _ = reference.policy_rows_(logits, targets[:ROWS], TEMPERATURE, *vectors, OBJECTIVE)
        return {"logp": logp, "dhidden": logits @ wide}

    sides = {"nanogrpo": ours, **kernel_peers.head(device, TEMPERATURE, EPSILON)}
    floor = 6 * count * vocab * width / FLOPS
    return Case("head, hidden to gradients", inputs, sides, truth, floor, shape={"N": count, "V": vocab, "D": width})


def loss_case(count: int, device: str) -> Case:
    tokens = _tokens(count, device)
    logp = -torch.rand(count, generator=torch.Generator(device).manual_seed(3), device=device).requires_grad_()
    logp = logp.detach().requires_grad_()
    inputs = {"logp": logp, "old": logp.detach() + tokens["off"], "advantage": tokens["advantage"], "weight": tokens["weight"]}

    def ours(logp, old, advantage, weight) -> dict[str, Tensor]:
        out = ops.policy_loss(logp, old, advantage, weight, epsilon=EPSILON, epsilon_high=EPSILON)
        return {"grad": torch.autograd.grad(out.loss, logp)[0], "stats": out.stats}

    def truth(logp, old, advantage, weight) -> dict[str, Tensor]:
        args = (v.detach().double() for v in (logp, old, advantage, weight))
        _, grad, _, _, stats = reference.policy_forward(*args, None, None, OBJECTIVE)
        return {"grad": grad, "stats": stats}

    sides = {"nanogrpo": ours, **kernel_peers.loss(device, EPSILON)}
    return Case("loss and gradient on [T]", inputs, sides, truth, None, shape={"T": count})


# ------------------------------------------------------------------------------------------------------------- measuring


def errors(case: Case, results: dict[str, Tensor], truth: dict[str, Tensor]) -> dict[str, float]:
    """Largest error of each result over the rows that the truth has: absolute for log-probs, else relative to the largest."""
    found = {}
    for name in truth.keys() & results.keys():
        exact = truth[name]
        error = (results[name][: len(exact)].detach().double() - exact).abs().max()
        scale = 1.0 if name in ("logp", "entropy") else exact.abs().max().clamp(min=1e-30)
        found[name] = float(error / scale)
    return found


def measure(case: Case, budget: float) -> dict[str, tuple[common.Timing, dict]]:
    """Times every side of the case for about `budget` seconds together; figures: error, peak memory, launches."""
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
            case.sides[name] = f"{type(problem).__name__}: {problem}"  # a peer's own failure is a result, told in the table
            del runnable[name]
            continue
        prepare()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        results = side(**case.inputs)
        torch.cuda.synchronize()
        peak = (torch.cuda.max_memory_allocated() - before) / 2**30
        figures[name] = {"errors": errors(case, results, truth), "peak_gib_above_inputs": round(peak, 3)}
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


def cases(device: str, small: bool) -> list[Callable[[], Case]]:
    """The operations, made when their turn comes: their inputs would not all fit together."""
    decoder = [lambda make=make: Case(**make()) for make in kernel_decoder.cases(device, small)]
    if small:
        dtype = torch.float32
        made = [lambda: log_softmax_case(128, 301, device, dtype), lambda: rows_case(128, 301, device, dtype)]
        made += [lambda: head_case(128, 301, 32, device, dtype), lambda: loss_case(128, device)]
        return made + decoder
    dtype, count, vocab = torch.bfloat16, 8192, 151_936
    made = [lambda: log_softmax_case(count, vocab, device, dtype), lambda: rows_case(count, vocab, device, dtype)]
    made += [lambda width=width: head_case(count, vocab, width, device, dtype) for width in (1024, 2048, 4096)]
    return [*made, lambda: loss_case(32_768, device), *decoder]


def check(device: str) -> int:
    """Runs every side on small shapes and prints its errors; 1 if one of ours is not what float64 says."""
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
                (case.name, name, "right" if good else "WRONG", ", ".join(f"{k} {v:.1e}" for k, v in sorted(found.items())))
            )
    common.table("errors against float64", ("operation", "side", "", "largest error"), lines)
    return int(wrong > 0)


def main(argv: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="small shapes, errors only; needs no GPU")
    parser.add_argument("--seconds", type=float, default=15.0, help="time for each operation's rounds, all sides together")
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
            figures |= {"shape": case.shape, "floor_seconds": floor, "peer_versions": kernel_peers.versions()}
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
        lines += [(label, name, f"not run: {why[:120]}", *[""] * 5) for name, why in case.sides.items() if isinstance(why, str)]
        common.write("kernel_speed", rows, args.out)  # after each operation: a run cut short keeps what it has
        del case
        torch.cuda.empty_cache()
    common.table("kernels", ("operation", "side", "ms", "fastest – slowest", "floor", "peak GiB", "launches", "error"), lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
