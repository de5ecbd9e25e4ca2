"""Create the tables of the benchmarks, for the console and for bench/README.md.

In: the records of a benchmark (dicts that common.py writes). Out: table rows. Every number comes
from a record. A row in `wanted` without a record says "not yet measured". All functions are pure
and do not need TRL. Read next: readme.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench import common, tables_learning, tables_step
from bench.common import by_record, listed, mib, times

MISSING = "not yet measured"
Lines = list[tuple]


@dataclass(frozen=True)
class Bench:
    """The table of a benchmark."""

    question: str
    columns: Sequence[str]
    lines: Callable[[list[dict]], Lines]
    # first cells of rows that are shown as MISSING until they are measured
    wanted: Sequence[tuple] = ()
    picture: str = ""
    command: str = ""  # the command, if it is not `python -m bench.<name>`
    notes: Callable[[list[dict]], list[str]] = lambda records: []


# The quantities that training uses. All other quantities are metrics.
QUANTITIES = ("advantages", "loss", "gradient", "entropy gradient", "weight")


def parity(records: list[dict]) -> Lines:
    """Return the largest differences for advantages, each loss type, and importance weights."""
    groups: dict[str, list[dict]] = {}
    for r in records:
        name = r["case"].partition(":")[0] if r["what"] == "loss" else r["what"]
        groups.setdefault(name, []).append(r)
    lines = []
    for name, found in groups.items():
        values = []
        for quantity in QUANTITIES:
            differences = [d[quantity] for r in found if quantity in (d := r["differences"])]
            if differences:
                values.append(f"{quantity} {max(differences):.1e}")
        metrics = f"{max(r['largest_metric'] for r in found):.1e}"
        inputs = sum(r["inputs"] for r in found)
        lines.append((name, len(found), inputs, ", ".join(values), metrics))
    return lines


def end_to_end(records: list[dict]) -> Lines:
    lines: Lines = []
    for r in records:
        if "why_not" in r:
            lines.append((r["case"], r["side"], "cannot run here"))
            continue
        low, high = r["seconds_spread"]
        lines.append(
            (
                r["case"],
                r["side"],
                r["steps_per_second"],
                f"{1 / high:.3g} – {1 / low:.3g}",
                r["tokens_per_second"],
                r["mean_length"],
                times(r["speedup_over_trl"]) if r["side"] != "TRL" else "",
                mib(r["peak_bytes_above_libraries"]),
                listed(r["phases"], ".2f"),
            )
        )
    return lines


def cannot(records: list[dict]) -> list[str]:
    """Return notes that explain the memory column, and why a program is missing."""
    missing = {(r["side"], r["why_not"]) for r in records if "why_not" in r}
    return [
        "Peak memory is the peak of the trainer's process minus the memory of its imported"
        " libraries. The memory of a vLLM server is not included.",
        *(f"{side} cannot run on this machine: {why}." for side, why in missing),
    ]


NANO_VLLM = ("nanogrpo", "transformers generate_batch", "vLLM")


@by_record
def rollout_speed(r: dict) -> tuple:
    low, high = (r["tokens"] / s for s in reversed(r["seconds_spread"]))
    over = times(r["speedup_over_best_generate"])
    return r["tokens_per_second"], f"{low:,.0f} – {high:,.0f}", over


@by_record
def sync_speed(r: dict) -> tuple:
    ms = 1e3 * r["seconds_median"], 1e3 * r["seconds_p95"]
    return *ms, r["gigabytes_per_second"], r["bytes"] / 1e6


def milliseconds(spread: Sequence[float]) -> str:
    return " – ".join(f"{1e3 * s:.3g}" for s in spread)


@by_record
def kernel_speed(r: dict) -> tuple:
    return (
        1e3 * r["seconds_median"],
        milliseconds(r["seconds_spread"]),
        1e3 * r["floor_seconds"] if r["floor_seconds"] else "–",
        r["peak_gib_above_inputs"],
        r["launches"],
        listed(dict(sorted(r["errors"].items())), ".1e"),
    )


@by_record
def attention_speed(r: dict) -> tuple:
    forward, backward = r["seconds_median"], r["backward_median"]
    return (
        1e3 * forward,
        r["needed_flop"]["forward"] / forward / 1e12,
        1e3 * backward,
        milliseconds(r["backward_spread"]),
        r["needed_flop"]["backward"] / backward / 1e12,
        listed(r["errors"], ".1e"),
    )


def soak(records: list[dict]) -> Lines:
    lines: Lines = []
    for r in records:
        if r["case"] == "suite":
            lines.append(("tests under load", r["times"], r["times"], len(r["failures"])))
        where = "real vLLM: " if r["case"] == "real vLLM" else ""
        for kind, found in r.get("kinds", {}).items():
            lines.append((where + kind, found["runs"], found["starts"], found["broken"]))
    return lines


def plan(records: list[dict]) -> Lines:
    return [
        (
            r["case"],
            phase,
            r["predicted"][phase],
            r["real"][phase],
            times(r["predicted"][phase] / r["real"][phase]),
        )
        for r in records
        for phase in ("sample", "train", "step")
    ]


def gpu(records: list[dict]) -> Lines:
    lines: Lines = []
    for r in records:
        peak = r.get("memory/peak_gib")
        figures = (r.get(name, "–") for name in ("step_time", "tokens_per_second", "sampling/k3"))
        memory = mib(peak * 2**30) if peak else "–"
        lines.append((r["case"], r["status"], r["seconds"], *figures, memory))
    return lines


GPU_STAGES = (
    *("environment", "tests", "trace", "kernels", "lora", "attention"),
    *("step", "decode", "nano-vllm", "train"),
)
GPU_CASES = [
    (f"{size}, GPU, bfloat16, uneven", side) for size in common.LARGE for side in common.SIDES
]
BEFORE_AND_AFTER = (
    "runs",
    "held-out accuracy, before",
    "after",
    "reward, last 5 steps",
    "training seconds",
    "peak memory",
)
BENCHES = {
    "parity_trl": Bench(
        "How much do nanogrpo's results differ from the results of TRL 1.16.0's own code in"
        " float64? The table shows the largest relative difference of each quantity.",
        ("what", "cases", "inputs", "values", "metrics"),
        parity,
        notes=lambda records: [
            "The tests allow differences of at most 1e-6, and of at most 1e-5 for metrics, which"
            " are logged in float32."
        ],
    ),
    "learning": Bench(
        "Does nanogrpo learn as well as TRL, and how much faster is nanogrpo? Both trainers train"
        " the same base model on the tiny task. The table shows mean ± standard deviation over the"
        " seeds.",
        (
            "side",
            "seeds",
            "held-out accuracy at the end",
            "reward, last 5 steps",
            "training seconds",
            "seconds to accuracy 0.9",
        ),
        tables_learning.learning,
        (("nanogrpo",), ("TRL",), (common.REPLAYED,)),
        "learning.png",
        notes=tables_learning.curves_apart,
    ),
    "four_bits": Bench(
        "Do LoRA adapters (r = 8) learn as well on a 4-bit base model as on a bfloat16 base model?"
        " One model learns the tiny task, and SmolLM2-135M-Instruct learns the word problems of"
        " `make real`. The table shows mean ± standard deviation over the seeds.",
        ("base", *BEFORE_AND_AFTER),
        tables_learning.before_and_after,
        [(f"{case}, {s}",) for case in ("tiny", "135M on a GPU") for s in ("bfloat16", "4 bits")],
        "four_bits.png",
        notes=lambda records: [
            "On a CPU, peak memory is the peak of the process minus the memory of its imported"
            " libraries. On a GPU, peak memory is the largest amount of GPU memory that PyTorch"
            " allocated. On a CPU, the local engine needs a float32 copy of a bfloat16 base model."
            " The engine needs no copy of a 4-bit base model, because it dequantizes the weights in"
            " each decode step. All ten runs on a GPU shared one GPU, so each run took longer"
            " than it would take alone.",
            "The weights of the 135M base model come from a package that stores them in a 4-bit"
            " format other than NF4 (examples/smollm2.py). Rounding these weights again, to NF4,"
            " reduces the accuracy before training.",
            *tables_learning.rises(records),
        ],
    ),
    "vision": Bench(
        "Does GRPO teach a model to look at pictures? A tiny vision-language model adds up the"
        " numbers on dice in pictures (examples/pictures.py). In the control experiment, called"
        " noise, random pixels replace the pictures. The table shows mean ± standard deviation over"
        " the seeds.",
        ("side", *BEFORE_AND_AFTER),
        tables_learning.before_and_after,
        (("pictures",), ("noise",)),
        "vision.png",
        notes=tables_learning.vision,
    ),
    "real_model": Bench(
        "How fast does a real language model learn word problems? Both trainers train"
        " SmolLM2-135M-Instruct with the options in examples/word_problems.json. The table shows"
        " accuracies as mean ± standard deviation over the runs.",
        (
            "side",
            "runs",
            "seconds per step",
            "fastest – slowest",
            "over TRL",
            "peak memory",
            "held-out accuracy, before",
            "after",
            "seconds until it is 0.25 higher",
            "seconds by phase",
        ),
        tables_learning.real_model,
        (("nanogrpo",), ("TRL",)),
        "real_model.png",
        notes=tables_learning.shares,
    ),
    "end_to_end": Bench(
        "How many full GRPO steps run per second? A step includes sampling, rewards, training and"
        " the weight update.",
        (
            "case",
            "side",
            "steps/s",
            "slowest – fastest",
            "tokens/s",
            "mean length",
            "over TRL",
            "peak memory",
            "seconds per step",
        ),
        end_to_end,
        (
            ("even", "nanogrpo"),
            ("uneven", "nanogrpo"),
            ("even, a vLLM server", "nanogrpo"),
            ("uneven, a vLLM server", "nanogrpo"),
            *GPU_CASES,
        ),
        notes=cannot,
    ),
    "step_time": Bench(
        "How long does a training step on given completions take? All programs compute the same"
        " gradients.",
        (
            "case",
            "side",
            "seconds",
            "fastest – slowest",
            "tokens/s",
            "computed tokens",
            "over TRL",
            "phases (seconds)",
        ),
        tables_step.step_time,
        [
            (case, side)
            for case in ("small, uneven, G=8", "even, G=8", "uneven, G=8")
            for side in ("nanogrpo", "TRL, asynchronous")
        ],
        "step_time.png",
        notes=lambda records: [
            'The side "TRL, asynchronous" is the AsyncGRPOTrainer of trl.experimental. It packs'
            " completions without padding, and computes each prompt only once for all completions"
            " of its group. TRL's attention needs FlashAttention 3, which needs a GPU. On a CPU,"
            " torch's attention is used instead, with one call per segment. Each group has"
            " completions with different rewards, so no trainer can leave out a group."
        ],
    ),
    "step_large": Bench(
        "How long does a training step of a real model take on a GPU? All weights are trained, with"
        " float32 master weights, bfloat16 compute and packed micro-batches of 16,384 tokens. The"
        " goal for Qwen3-0.6B on an H100 is 80,000 trained tokens/s, and the formulas of"
        " docs/scale.md predict 92,000 trained tokens/s.",
        (
            "case",
            "side",
            "seconds",
            "trained tokens/s",
            "over TRL",
            "MFU",
            "peak memory",
            "of TRL's",
            "settings",
        ),
        tables_step.step_large,
        [
            (f"{size}, GPU, bfloat16, uneven", f"{side}{setting}")
            for size in common.LARGE
            for setting in ("", ", checkpointing")
            for side in common.SIDES
        ]
        + [(f"{size}, GPU, bfloat16, uneven", "TRL, asynchronous") for size in common.LARGE],
        command="python -m bench.step_time --shape 0.6B",
        notes=lambda records: [
            "MFU (model FLOP utilization) is the FLOP/s of a step divided by the dense peak FLOP/s"
            " of the device. Operations on padding and recomputation are not counted."
        ],
    ),
    "step_trace": Bench(
        "Where does the time of a training step go? On a GPU, the last column shows the"
        " milliseconds of each class of kernels and of each cause of idle time. Without a GPU,"
        " the last column shows the work of the host for a tiny model of 28 layers.",
        ("case", "side", "ms per step", "fastest over unsharded", "account"),
        tables_step.step_trace,
        [
            ("host, 28 layers, 3 strips", "one GPU"),
            *((f"{size}, one GPU, strips of 16,384 tokens", "nanogrpo") for size in common.LARGE),
        ],
        "step_trace.png",
        command="python -m bench.step_trace --shape 0.6B",
    ),
    "step_memory": Bench(
        "How much memory does a training step need? Each program runs in its own process.",
        ("case", "side", "peak above the libraries", "peak of the process", "of TRL's"),
        tables_step.step_memory,
        (("V = 151,936", "nanogrpo"), ("V = 151,936", "TRL")),
    ),
    "rollout_speed": Bench(
        "How fast does the local engine sample? The table shows useful tokens per second, which do"
        " not include padding.",
        ("case", "side", "tokens/s", "slowest – fastest", "over the best generate"),
        rollout_speed,
        [
            *((case, side) for case in ("even", "uneven") for side in ("nanogrpo", "vLLM")),
            *(("nano-vllm, small", side) for side in NANO_VLLM),
        ],
    ),
    "rollout_large": Bench(
        "How fast does the local engine sample on a GPU, compared with vLLM? In the case"
        " `uneven`, the goal for Qwen3-0.6B on an H100 is 25,000 useful tokens/s, and the formulas"
        " of docs/scale.md predict 46,000 useful tokens/s. The case `nano-vllm` is the workload of"
        " nano-vllm's bench.py: 256 sequences at temperature 0.6, with prompts of 100 to 1,024"
        " random tokens and completions of 100 to 1,024 tokens. In this case, tokens/s counts only"
        " the tokens of completions. `--cases nano-vllm` runs this case alone.",
        ("case", "side", "tokens/s", "slowest – fastest"),
        lambda records: [line[:4] for line in rollout_speed(records)],
        [
            (f"0.6B, GPU, bfloat16, {case}, 256 at a time", side)
            for case, sides in (("uneven", ("nanogrpo", "vLLM")), ("nano-vllm", NANO_VLLM))
            for side in sides
        ],
        command="python -m bench.rollout_speed --shape 0.6B",
    ),
    "sync_speed": Bench(
        "How long does a weight sync to a real vLLM server on the same machine take?",
        ("model", "transport", "p50 ms", "p95 ms", "GB/s", "MB"),
        sync_speed,
        (("0.3M", "broadcast"), ("100M", "broadcast")),
    ),
    "kernel_speed": Bench(
        "How fast are the kernels, compared with PyTorch and with the kernels of other libraries?",
        (
            "operation",
            "side",
            "ms",
            "fastest – slowest",
            "floor ms",
            "peak GiB",
            "launches",
            "error",
        ),
        kernel_speed,
        (
            ("log-prob and entropy, forward",),
            ("forward, loss and gradient of logits",),
            ("head, hidden to gradients",),
            *(
                ("head, hidden to gradients N=8,192 V=151,936 D=1,024", f"{side} (no entropy)")
                for side in ("Liger, Hopper", "quack", "cut-cross-entropy")
            ),
            ("LoRA, layer and gradients",),
        ),
        command="make gpu",
    ),
    "attention_speed": Bench(
        "How fast are the backends of attention (`NANOGRPO_ATTENTION`)? The times are for one layer"
        " of Qwen3-0.6B and the three strips of step_large. For each head and"
        " each pair of a query and a visible key, attention needs 4·E FLOP in the forward pass and"
        " 10·E in the backward pass. E is the head dimension. An error is the largest difference"
        " from float64, divided by the largest value.",
        (
            "case",
            "side",
            "forward ms",
            "TFLOP/s",
            "backward ms",
            "fastest – slowest",
            "TFLOP/s",
            "error",
        ),
        attention_speed,
        [
            ("0.6B, 3 strips, bfloat16, GPU", side)
            for side in ("torch", "two-call", "flash4", "triton")
        ],
    ),
    "plan": Bench(
        "How well does `bench.predict` predict the duration of a step? The benchmark first measures"
        " the speeds of the CPU, and then compares predicted times with measured times.",
        ("parameters", "phase", "predicted s", "real s", "predicted / real"),
        plan,
        [(size, "step") for size in ("3M", "38M", "135M")],
    ),
    "gpu": Bench(
        "Do all stages of `make gpu` succeed? The stage `train` runs ten steps on the word"
        " problems. k3 estimates how far the policy of the sampling engine is from the policy of"
        " the trainer. The other stages repeat the benchmarks kernel_speed, attention_speed,"
        " step_trace, step_large and rollout_large. Their tables are above.",
        ("stage", "result", "seconds", "seconds per step", "tokens/s", "k3", "peak memory"),
        gpu,
        [(stage,) for stage in GPU_STAGES],
        command="make gpu",
    ),
    "soak": Bench(
        "Does a run lose anything if a random fault occurs at a random time? Each run of a tiny"
        " task gets one fault and is resumed until it is done. The result of the run must then"
        " equal the result of a run without faults. A violation is a different result,"
        " a traceback, or a process or temporary file that is left behind.",
        ("fault", "runs", "starts", "violations"),
        soak,
        wanted=[
            ("SIGKILL of a rank",),
            ("SIGKILL of torchrun",),
            ("real vLLM: SIGKILL of a worker",),
            ("tests under load",),
        ],
    ),
}


def lines_of(name: str, records: list[dict]) -> Lines:
    """Return the table rows of a benchmark, including wanted rows without a record."""
    bench = BENCHES[name]
    width = len(bench.columns)
    lines = [(*line, *[""] * (width - len(line))) for line in bench.lines(records)]
    for cells in bench.wanted:
        # Compare only the beginning of a cell.
        # A case may end with its shape, as in "forward N=… V=…".
        filled = (
            all(f"{have} ".startswith(f"{want} ") for have, want in zip(line, cells))
            for line in lines
        )
        if not any(filled):
            lines.append((*cells, *[MISSING] * (width - len(cells))))
    return lines


def report(name: str, folder: Path) -> list[dict]:
    """Print the table of the records in a folder, and return these records."""
    bench, records = BENCHES[name], common.read(name, folder)
    common.table(bench.question, bench.columns, bench.lines(records))
    print(*bench.notes(records), f"results: {folder / f'{name}.json'}", sep="\n")
    return records
