"""The tables of the benches, each made from rows: on the console when a bench ends, in
bench/README.md for readers.

In: the rows of a bench (dicts, as common.py writes them). Out: lines of cells. Nothing is typed
here: a figure comes from a row, and a cell of `wanted` that no row fills says "not yet measured".
Pure functions of rows, which need no TRL. Read next: readme.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench import common, tables_learning, tables_step
from bench.common import mib, times

MISSING = "not yet measured"
Lines = list[tuple]


@dataclass(frozen=True)
class Bench:
    """A bench's table: what it asks, how its rows become lines, and which cells there should be."""

    question: str
    columns: Sequence[str]
    lines: Callable[[list[dict]], Lines]
    wanted: Sequence[tuple] = ()  # the first cells of lines that should stand here one day
    picture: str = ""
    command: str = ""  # when it is not plainly `python -m bench.<name>`
    notes: Callable[[list[dict]], list[str]] = lambda rows: []


# what is trained with; the rest are metrics
QUANTITIES = ("advantages", "loss", "gradient", "entropy gradient", "weight")


def parity(rows: list[dict]) -> Lines:
    """A line for advantages, for each loss type and for the importance weights: the largest of its
    cases.
    """
    groups: dict[str, list[dict]] = {}
    for row in rows:
        name = row["case"].partition(":")[0] if row["what"] == "loss" else row["what"]
        groups.setdefault(name, []).append(row)
    lines = []
    for name, found in groups.items():
        worst = {q: max(r["differences"].get(q, 0.0) for r in found) for q in QUANTITIES}
        values = ", ".join(
            f"{q} {d:.1e}" for q, d in worst.items() if any(q in r["differences"] for r in found)
        )
        metrics = f"{max(r['largest_metric'] for r in found):.1e}"
        lines.append((name, len(found), sum(r["inputs"] for r in found), values, metrics))
    return lines


def end_to_end(rows: list[dict]) -> Lines:
    lines = []
    for r in rows:
        if "why_not" in r:
            lines.append((r["case"], r["side"], "cannot run here", *[""] * 6))
            continue
        low, high = r["seconds_spread"]
        phases = ", ".join(f"{name} {s:.2f}" for name, s in r["phases"].items())
        faster = times(r["speedup_over_trl"]) if r["side"] != "TRL" else ""
        shown = (
            r["steps_per_second"],
            f"{1 / high:.3g} – {1 / low:.3g}",
            r["tokens_per_second"],
            r["mean_length"],
        )
        lines.append(
            (r["case"], r["side"], *shown, faster, mib(r["peak_bytes_above_libraries"]), phases)
        )
    return lines


def cannot(rows: list[dict]) -> list[str]:
    """Why a side is not in the comparison, and what its absence means."""
    notes = [
        "Peak memory is that of the process, above its libraries; a vLLM server's own is not in it."
    ]
    return notes + [
        f"{side} cannot run here: {why}."
        for side, why in {(r["side"], r["why_not"]) for r in rows if "why_not" in r}
    ]


def rollout_speed(rows: list[dict]) -> Lines:
    lines = []
    for r in rows:
        low, high = (r["tokens"] / s for s in reversed(r["seconds_spread"]))
        shown = (
            r["tokens_per_second"],
            f"{low:,.0f} – {high:,.0f}",
            times(r["speedup_over_best_generate"]),
        )
        lines.append((r["case"], r["side"], *shown))
    return lines


def sync_speed(rows: list[dict]) -> Lines:
    ms = lambda s: 1e3 * s  # noqa: E731
    return [
        (
            r["case"],
            r["side"],
            ms(r["seconds_median"]),
            ms(r["seconds_p95"]),
            r["gigabytes_per_second"],
            r["bytes"] / 1e6,
        )
        for r in rows
    ]


def kernel_speed(rows: list[dict]) -> Lines:
    lines = []
    for r in rows:
        floor, errors = (
            r["floor_seconds"],
            ", ".join(f"{k} {v:.1e}" for k, v in sorted(r["errors"].items())),
        )
        shown = (
            1e3 * r["seconds_median"],
            " – ".join(f"{1e3 * s:.3g}" for s in r["seconds_spread"]),
            1e3 * floor if floor else "–",
        )
        lines.append(
            (r["case"], r["side"], *shown, r["peak_gib_above_inputs"], r["launches"], errors)
        )
    return lines


BENCHES = {
    "parity_trl": Bench(
        "How far are our numbers from TRL 1.16.0's own code, in float64? The largest relative difference of each quantity.",
        ("what", "cases", "inputs", "values", "metrics"),
        parity,
        notes=lambda rows: [
            "The tests hold every case at 1e-6, metrics, which are logged in float32, at 1e-5."
        ],
    ),
    "learning": Bench(
        "Does it learn as TRL does, and how much sooner? The tiny task from one base; mean ± standard deviation over seeds.",
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
    "end_to_end": Bench(
        "How many whole GRPO steps a second: sampling, rewards, training, update?",
        (
            "case",
            "side",
            "steps/s",
            "slowest – fastest",
            "tokens/s",
            "mean length",
            "over TRL",
            "peak memory",
            "seconds a step",
        ),
        end_to_end,
        (
            ("even", "nanogrpo"),
            ("uneven", "nanogrpo"),
            *[(f"{c}, a vLLM server", "nanogrpo") for c in ("even", "uneven")],
            *[
                (f"{size}, GPU, bfloat16, uneven", side)
                for size in common.LARGE
                for side in ("nanogrpo", "TRL")
            ],
        ),
        notes=cannot,
    ),
    "step_time": Bench(
        "How long is a training step on given completions, at equal gradients?",
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
        (("even, G=8", "nanogrpo"), ("uneven, G=8", "nanogrpo")),
        "step_time.png",
    ),
    "step_large": Bench(
        "How long is a training step of a real model on a GPU: all weights, float32 masters, bfloat16, strips of 16,384 tokens?",
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
            (f"{size}, GPU, bfloat16, uneven", side)
            for size in common.LARGE
            for side in ("nanogrpo", "TRL")
        ],
        command="python -m bench.step_time --shape 0.6B",
        notes=lambda rows: [
            "MFU: FLOP that the step needs, none for padding or recomputation, over the device's dense peak."
        ],
    ),
    "step_memory": Bench(
        "How much memory does a training step need, each side in a process of its own?",
        ("case", "side", "peak above the libraries", "peak of the process", "of TRL's"),
        tables_step.step_memory,
        (("V = 151,936", "nanogrpo"), ("V = 151,936", "TRL")),
    ),
    "rollout_speed": Bench(
        "How fast does the embedded engine sample? Useful tokens a second.",
        ("case", "side", "tokens/s", "slowest – fastest", "over the best generate"),
        rollout_speed,
        (("even", "nanogrpo"), ("even", "vLLM"), ("uneven", "nanogrpo"), ("uneven", "vLLM")),
    ),
    "sync_speed": Bench(
        "How long does a weight sync to a real vLLM take, on loopback?",
        ("model", "transport", "p50 ms", "p95 ms", "GB/s", "MB"),
        sync_speed,
        (("0.3M", "broadcast"), ("100M", "broadcast")),
    ),
    "kernel_speed": Bench(
        "How fast are the kernels, against PyTorch, TRL and Liger?",
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
        ),
        command="bench/gpu.sh",
    ),
}


def lines_of(name: str, rows: list[dict]) -> Lines:
    """A bench's lines, and one for each wanted cell that no row fills."""
    bench = BENCHES[name]
    lines = bench.lines(rows)
    for cells in bench.wanted:
        if not any(
            all(f"{have} ".startswith(f"{want} ") for have, want in zip(line, cells))
            for line in lines
        ):
            lines.append((*cells, *[MISSING] * (len(bench.columns) - len(cells))))
    return lines


def show(name: str, rows: list[dict]) -> None:
    """The table on the console."""
    bench = BENCHES[name]
    common.table(bench.question, bench.columns, bench.lines(rows))
    print(*bench.notes(rows), sep="\n")
