"""The tables of the training step: what it takes on a CPU, on a GPU, and of memory. In: rows. Out:
lines of cells (tables.py).
"""

from __future__ import annotations

from bench.common import mib, times


def step_time(rows: list[dict]) -> list[tuple]:
    lines = []
    for r in rows:
        low, high = r["seconds_spread"]
        phases = ", ".join(f"{name} {s:.2f}" for name, s in r.get("phases", {}).items())
        spread = f"{low:.3g} – {high:.3g}"
        faster = times(r["speedup_over_trl"]) if r["side"] != "TRL" else ""
        lines.append(
            (
                r["case"],
                r["side"],
                r["seconds_median"],
                spread,
                r["tokens_per_second"],
                r["computed_tokens"],
                faster,
                phases,
            )
        )
    return lines


def step_large(rows: list[dict]) -> list[tuple]:
    lines = []
    for r in rows:
        if "why_not" in r:
            lines.append((r["case"], r["side"], r["why_not"], *[""] * 6))
            continue
        low, high = r["seconds_spread"]
        over = (
            (times(r["speedup_over_trl"]), times(r["memory_over_trl"]))
            if r["side"] != "TRL"
            else ("", "")
        )
        settings = (
            f"{r['micro_batches']} micro-batches, checkpointing {r['gradient_checkpointing']}"
        )
        shown = (
            r["tokens_per_second"],
            over[0],
            f"{r['mfu']:.1%}" if r["mfu"] else "–",
            mib(r["peak_bytes"]),
            over[1],
        )
        lines.append(
            (
                r["case"],
                r["side"],
                f"{r['seconds_median']:.3g} ({low:.3g} – {high:.3g})",
                *shown,
                settings,
            )
        )
    return lines


def step_memory(rows: list[dict]) -> list[tuple]:
    peers = {r["case"]: r for r in rows if r["side"] == "TRL"}
    return [
        (
            r["case"],
            r["side"],
            mib(r["peak_bytes_above_libraries"]),
            mib(r["peak_bytes"]),
            f"{r['peak_bytes_above_libraries'] / peers[r['case']]['peak_bytes_above_libraries']:.2f}"
            if r["case"] in peers and r["side"] != "TRL"
            else "",
        )
        for r in rows
    ]
