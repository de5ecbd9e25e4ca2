"""Create the tables of the training step: time on a CPU, time on a GPU and its parts, and memory.

In: records. Out: table lines. Read next: tables.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from bench.common import by_record, listed, mib, times


@by_record
def step_time(r: dict) -> tuple:
    low, high = r["seconds_spread"]
    return (
        r["seconds_median"],
        f"{low:.3g} – {high:.3g}",
        r["tokens_per_second"],
        r["computed_tokens"],
        times(r["speedup_over_trl"]) if r["side"] != "TRL" else "",
        listed(r["phases"], ".2f"),
    )


@by_record
def step_large(r: dict) -> tuple:
    low, high = r["seconds_spread"]
    ours = r["side"] != "TRL"
    return (
        f"{r['seconds_median']:.3g} ({low:.3g} – {high:.3g})",
        r["tokens_per_second"],
        times(r["speedup_over_trl"]) if ours else "",
        f"{r['mfu']:.1%}" if r["mfu"] else "–",
        mib(r["peak_bytes"]),
        times(r["memory_over_trl"]) if ours else "",
        f"{r['micro_batches']} micro-batches, checkpointing {r['gradient_checkpointing']}",
    )


def step_memory(records: list[dict]) -> list[tuple]:
    trl = {r["case"]: r["peak_bytes_above_libraries"] for r in records if r["side"] == "TRL"}
    lines = []
    for r in records:
        above, over = r["peak_bytes_above_libraries"], ""
        if r["case"] in trl and r["side"] != "TRL":
            over = f"{above / trl[r['case']]:.2f}"
        lines.append((r["case"], r["side"], mib(above), mib(r["peak_bytes"]), over))
    return lines


def whole(parts: dict[str, Mapping[str, float]]) -> Counter[str]:
    """Return the milliseconds of a step by class, the sum over the parts of the step."""
    return sum(map(Counter, parts.values()), Counter())


@by_record
def step_trace(r: dict) -> tuple:
    if parts := r.get("milliseconds"):
        account = listed(whole(parts), ".1f")
    else:
        account = (
            f"{sum(r['launches'].values())} operations, {r['waits']} waits before the update,"
            f" {r['transfers']} blocking transfers"
        )
    return 1e3 * r["seconds_median"], times(r.get("over_unsharded")), account
