"""Where does the time of a training step go? On a GPU: milliseconds by class of kernel and by
strip, and the time in which the GPU is idle, with its cause. Without a GPU: what the host does.

    python -m bench.step_trace                    # the host's work, on any machine
    python -m bench.step_trace --shape 0.6B       # a profile of the step of bench.step_time

In: nothing. Without --shape, a tiny model with 28 layers trains on three strips on the CPU. The
model is so small that almost all of the time is spent in Python, autograd and FSDP2, which run on
the host. The table shows the milliseconds of each phase, the operations that a GPU would run as
kernels, and the operations for which the host would wait for a GPU (`WAITS`). With --shape, torch's
profiler records the kernels of one GPU and the work of the host, and `account` divides the time of
each strip among classes of kernels and causes of idle time. Profiling slows the host down, so the
record also has the time of the same step without the profiler. Out: results/step_trace.json, and
with --shape the picture docs/img/step_trace.png.

Causes of idle time, for each gap between two kernels:

* wait: the host called a function that waits for the GPU, such as a blocking copy.
* host: the host had not launched the next kernel yet.
* launch: the next kernel had been launched before the gap. Kernels take some µs to start.

Read next: step_time.py (the time of a step, compared with TRL), step_sides.py (the step).
"""

from __future__ import annotations

import bisect
import contextlib
import json
import re
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bench import common, step_large
from bench.step_sides import SOLO, Case, Ours, options_of
from bench.tables_step import whole
from nanogrpo import Config
from nanogrpo.distributed import fsdp
from nanogrpo.distributed.world import join
from nanogrpo.extras import one_gpu
from nanogrpo.grpo import loss as grpo
from nanogrpo.logs.metrics import Clock
from nanogrpo.model import gpu_attention
from nanogrpo.model.decoder import Decoder
from nanogrpo.run import optim
from nanogrpo.types import PackedBatch

# Operations for which the host must read a result: a number, or the shape of an output.
WAITS = {
    *("_local_scalar_dense", "equal", "is_nonzero", "masked_select", "nonzero", "unique_dim"),
    *("_unique2", "bincount", "repeat_interleave", "unique_consecutive"),
}
PHASES = ("pack", "forward", "backward", "optimizer")
CASE = Case(P=6, G=4, prompt=8, longest=12)
STRIPS, BUDGET = 3, 64  # strips of the case, and the tokens of a strip


class Host(TorchDispatchMode):
    """Count operations by phase. `launches` counts the operations that a GPU would run as kernels.
    `waits` lists operations for which the host waits, and `transfers` lists copies between devices
    that block the host.
    """

    def __init__(self) -> None:
        super().__init__()
        self.phase = "pack"
        self.launches: Counter[str] = Counter()
        self.waits: list[tuple[str, str]] = []
        self.transfers: list[tuple[str, str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if func.is_view or "empty" in name or name in ("detach", "_unsafe_view"):
            return out
        self.launches[self.phase] += 1
        if name == "_fused_adamw_":
            self.phase = "update done"
        masks = name.startswith("index") and len(args) > 1 and isinstance(args[1], (list, tuple))
        if name in WAITS or (masks and any(is_mask(x) for x in args[1])):
            self.waits.append((self.phase, name))
        devices = {x.device.type for x in (*args, out) if isinstance(x, Tensor)}
        if len(devices) > 1 and not blockless(args, kwargs or {}):
            self.transfers.append((self.phase, name))
        return out

    @contextlib.contextmanager
    def clock(self, phase: str) -> Iterator[None]:
        self.phase = phase
        yield


def is_mask(x: object) -> bool:
    return isinstance(x, Tensor) and x.dtype == torch.bool


def blockless(args: Sequence[object], kwargs: dict) -> bool:
    """Return whether a copy does not block: `non_blocking` is the third argument of `copy_`."""
    return bool(kwargs.get("non_blocking") or (len(args) > 2 and args[2] is True))


# --- the host, on any machine ---

KINDS = ("unsharded", "one GPU", "FSDP2")  # the last kind of model opens a process group


@contextlib.contextmanager
def tiny_step(kind: str, clock: Callable) -> Iterator[Callable[[], object]]:
    """Yield a function that takes one step with a tiny model of 28 layers, in float32 on the CPU.

    "FSDP2" shards the model over one rank. "one GPU" uses nanogrpo/extras/one_gpu.py.
    """
    cfg, samples = options_of(CASE, token_budget=BUDGET, reshard_after_forward="never")
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.enter_context(mock.patch.object(gpu_attention, "backend", stub))
        step_large.write_model(common.small_qwen3(32, 28, CASE.vocab, 64), folder)
        if kind == "FSDP2":
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            stack.callback(dist.destroy_process_group)
        side = Ours(folder, cfg)
        if kind == "one GPU":
            one_gpu.copy_weights(side.model, torch.float32)
        side.clock = clock
        yield lambda: side.step(samples)
        assert side.micro == STRIPS, side.micro


class Rows(torch.autograd.Function):
    """A kernel whose inputs and outputs have the shapes of attention."""

    @staticmethod
    def forward(ctx, q, k, v):
        ctx.save_for_backward(k, v)
        return q * 1.0

    @staticmethod
    def backward(ctx, dout):
        return dout, *map(torch.zeros_like, ctx.saved_tensors)


def count(kind: str) -> Host:
    """Return what the host does in the second step."""
    host = Host()
    with tiny_step(kind, host.clock) as step:
        step()
        with host:
            step()
    return host


def stub(*_: object) -> Callable[..., Tensor]:
    """Return a function that takes the place of attention, launches one kernel, and does not
    wait."""
    return lambda q, k, v, strip: Rows.apply(q, k, v)


def train(model: Decoder, batches: Sequence[PackedBatch], steps: int) -> dict[str, Tensor]:
    """Return the master weights after some steps on the same strips."""
    optimizer = optim.make_optimizer(model, cfg := Config())
    for _ in range(steps):
        for batch in batches:
            loss = model.forward_strip(batch, grpo.objective(batch, cfg)).loss
            fsdp.backward(model, loss, SOLO, last=batch is batches[-1])
        optim.clip_and_step(model, optimizer, 1e-3, 1.0)
    return {name: p.detach() for name, p in model.named_parameters()}


def of_host(repeats: int, argv: Sequence[str]) -> list[dict]:
    """Return one record per kind of model."""
    found = {kind: count(kind) for kind in KINDS}
    clocks: dict[str, Clock] = {kind: Clock(SOLO.device) for kind in KINDS}
    with contextlib.ExitStack() as stack:
        # the operations are tiny, so a second thread would mostly wait for the first
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)
        steps = {}
        for kind in KINDS:
            steps[kind] = stack.enter_context(tiny_step(kind, clocks[kind]))
        timings = common.interleave(steps, repeats, title="host")
    plain = timings["unsharded"]
    return [
        common.record(
            "step_trace",
            "host, 28 layers, 3 strips",
            kind,
            argv,
            timing,
            over_unsharded=min(timing.seconds) / min(plain.seconds),
            phases={name: s / (repeats + 1) for name, s in clocks[kind].seconds.items()},
            launches=dict(found[kind].launches),
            waits=sum(phase != "update done" for phase, _ in found[kind].waits),
            transfers=len(found[kind].transfers),
        )
        for kind, timing in timings.items()
    ]


# --- the GPU ---

# The first pattern that matches a kernel's name gives its class.
# A Triton kernel has the name of its function.
# So with NANOGRPO_ATTENTION=triton, the forward pass of attention is in the class "element-wise".
CLASSES = {
    "attention": r"flash|fmha|attention|attend|^queries_kernel|^keys_kernel",
    "head rows": r"^row_kernel|log_softmax",
    "matrix products": r"gemm|gemv|nvjet|cutlass|xmma|cublas|splitk|wgmma",
    "optimizer": r"adam|multi_tensor|lp_?norm|foreach",
    "gathers": r"gather|index|embedding|sum_kernel|sort|scatter|radix|searchsorted|scan",
    "sharding": r"chunk_cat|split_with_sizes|nccl",
    "copies": r"memcpy|memset|copy",
    "element-wise": "",
}
IDLE = ("idle: wait", "idle: host", "idle: launch")
PARTS = re.compile(r"pack|strip \d+|optimizer")  # torch and FSDP2 annotate parts of a step, too
WAITING = re.compile(r"synchronize|^cudaMemcpy(?!.*Async)", re.IGNORECASE)
LATENCY = 10.0  # µs; a kernel that was launched this much earlier starts without a gap


class Account(NamedTuple):
    """Milliseconds of a step, by strip (or phase) and class. The names of idle classes begin with
    "idle: "."""

    table: dict[str, Counter[str]]
    total: float  # from the first kernel to the end of the last


def account(events: Sequence[dict]) -> Account:
    """Divide the time of a step on the GPU among classes of kernels and causes of idle time.

    events: `traceEvents` of a Chrome trace of torch's profiler. A kernel belongs to the part of the
    step (`user_annotation`) in which the host launched it.
    """
    kernels = sorted(
        (e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")),
        key=lambda e: e["ts"],
    )
    calls = [e for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver")]
    launched = {e["args"]["correlation"]: e["ts"] for e in calls if "correlation" in e["args"]}
    marks = (e for e in events if e.get("cat") == "user_annotation")
    parts = sorted((e["ts"], e["name"]) for e in marks if PARTS.fullmatch(e["name"]))
    waits = [(e["ts"], e["ts"] + e["dur"]) for e in calls if WAITING.search(e["name"])]
    starts = [start for start, _ in parts]
    table: dict[str, Counter[str]] = defaultdict(Counter)
    free = kernels[0]["ts"]  # the end of all kernels so far
    for kernel in kernels:
        start, end = kernel["ts"], kernel["ts"] + kernel["dur"]
        call = launched.get(kernel["args"].get("correlation"), start)
        index = bisect.bisect(starts, call) - 1
        part = parts[index][1] if index >= 0 else "before"
        if start > free:
            if call <= free - LATENCY:
                cause = "launch"
            else:
                cause = (
                    "wait" if any(a < start and free - LATENCY < b for a, b in waits) else "host"
                )
            table[part][f"idle: {cause}"] += (start - free) / 1e3
        # if kernels overlap, a kernel counts only from the end of the earlier kernels
        table[part][class_of(kernel["name"])] += max(0.0, end - max(start, free)) / 1e3
        free = max(free, end)
    return Account(dict(table), (free - kernels[0]["ts"]) / 1e3)


def class_of(kernel: str) -> str:
    return next(name for name, pattern in CLASSES.items() if re.search(pattern, kernel.lower()))


def annotate() -> Callable[[str], contextlib.AbstractContextManager]:
    """Return a clock that annotates the parts of a step for the profiler."""
    strip = 0

    def clock(phase: str) -> contextlib.AbstractContextManager:
        nonlocal strip
        strip += phase == "forward"
        name = f"strip {strip}" if phase in ("forward", "backward") else phase
        return torch.profiler.record_function(name)

    return clock


def profiled(step: Callable[[], object]) -> list[dict]:
    """Return the events of a Chrome trace of the step."""
    with torch.profiler.profile() as profile:  # traces the host and the GPU, if any
        step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as where:
        trace = Path(where) / "trace.json"
        profile.export_chrome_trace(str(trace))
        return json.loads(trace.read_text())["traceEvents"]


def of_gpu(shape: str, repeats: int, budget: int, fsdp2: bool, argv: Sequence[str]) -> dict:
    """Profile one step on a GPU, and time `repeats` steps without the profiler."""
    case = step_large.CASE
    cfg, samples = options_of(
        case,
        device="cuda",
        token_budget=budget,
        gradient_checkpointing="none",
        reshard_after_forward="always" if fsdp2 else "never",
    )
    with tempfile.TemporaryDirectory() as where, join(cfg) as world:
        model = common.large_qwen3(shape, case.prompt + case.longest)
        step_large.write_model(model, Path(where), torch.bfloat16)
        side = Ours(Path(where), cfg, world)
        side.clock = lambda phase: contextlib.nullcontext()
        timing = common.interleave({"step": lambda: side.step(samples)}, repeats, 3)["step"]
        side.clock = annotate()
        found = account(profiled(lambda: side.step(samples)))
    how = "FSDP2" if fsdp2 else "one GPU"
    label = f"{shape}, {how}, strips of {budget:,} tokens"
    return common.record(
        "step_trace",
        label,
        "nanogrpo",
        argv,
        timing,
        milliseconds=found.table,
        profiled_milliseconds=found.total,
    )


def draw(records: list[dict], path: Path) -> None:
    """Plot a stacked bar for the step and for each of its parts, one panel per case."""
    width = 2 + 5 * len(records)
    figure, axes = common.subplots(1, len(records), figsize=(width, 4.5), squeeze=False)
    tables = [{"step": whole(r["milliseconds"]), **r["milliseconds"]} for r in records]
    for axis, record, table in zip(axes[0], records, tables):
        bottom = [0.0] * len(table)
        for i, kind in enumerate([*CLASSES, *IDLE]):
            heights = [counts.get(kind, 0.0) for counts in table.values()]
            # C7 is grey, too
            color = str(0.9 - 0.2 * IDLE.index(kind)) if kind in IDLE else f"C{i + (i > 6)}"
            axis.bar(list(table), heights, bottom=bottom, label=kind, color=color)
            bottom = [low + height for low, height in zip(bottom, heights)]
        axis.set_title(record["case"], fontsize=10)
        axis.set_ylabel("ms")
    axes[0][-1].legend(loc="upper left", bbox_to_anchor=(1, 1))
    common.save_picture(figure, path)


def show(records: list[dict]) -> None:
    """Print the tables of some records."""
    hosts = [r for r in records if "launches" in r]
    if hosts:
        lines = [
            (
                r["side"],
                *(1e3 * r["phases"].get(phase, 0.0) for phase in PHASES),
                1e3 * min(r["seconds"]),
                common.times(r["over_unsharded"]),
                sum(r["launches"].values()),
                r["waits"],
                r["transfers"],
            )
            for r in hosts
        ]
        columns = ("model", *(f"{p} [ms]" for p in PHASES), "best step [ms]", "over unsharded")
        columns += ("operations", "waits before the update", "blocking transfers")
        common.table(f"{hosts[0]['case']}, on the CPU", columns, lines)
    for r in records:
        if table := r.get("milliseconds"):
            rows = {**table, "step": whole(table)}
            kinds = [kind for kind in [*CLASSES, *IDLE] if kind in rows["step"]]
            lines = [
                (part, *(counts.get(kind, 0.0) for kind in kinds), sum(counts.values()))
                for part, counts in rows.items()
            ]
            common.table(f"{r['case']}: milliseconds", ("part", *kinds, "all"), lines)
            print(f"without the profiler: {1e3 * r['seconds_median']:.1f} ms per step")


def main(argv: Sequence[str]) -> list[dict]:
    parser = common.parser(
        "step_trace",
        __doc__,
        repeats=(10, "timed steps"),
        budget=(16384, "tokens of a strip, with --shape"),
        threads=(1, "CPU threads"),
    )
    parser.add_argument("--shape", choices=common.LARGE, help="profile a model on a GPU")
    parser.add_argument("--fsdp2", action="store_true", help="shard the model on the GPU anyway")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    if args.shape and not torch.cuda.is_available():
        parser.error(f"--shape {args.shape} needs a GPU, and torch finds none.")
    if args.shape:
        records = [of_gpu(args.shape, args.repeats, args.budget, args.fsdp2, argv)]
    else:
        records = of_host(args.repeats, argv)
    common.merge("step_trace", records, args.out)
    profiled = [r for r in common.read("step_trace", args.out) if "milliseconds" in r]
    if profiled:
        draw(profiled, common.place_of(args.out, "docs/img/step_trace.png"))
    show(records)
    print(f"results: {args.out / 'step_trace.json'}")
    return records


if __name__ == "__main__":
    main(sys.argv[1:])
