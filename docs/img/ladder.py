"""Draw the pictures of kernels/README.md: lanes, chunks, and three products instead of four.

    python docs/img/ladder.py        # writes lanes.png, chunks.png and products.png

In: nothing. Out: three pictures in this folder. The roofline is drawn by `python -m examples.ladder
--out`. Read next: ../../kernels/README.md.
"""

from __future__ import annotations

from pathlib import Path

from draw import (
    BLUE,
    FAINT,
    FONT,
    GREEN,
    GREY,
    LINE,
    ORANGE,
    PAPER,
    RED,
    SICK,
    arrow,
    canvas,
    cell,
    note,
    save,
)
from matplotlib import rc_context
from matplotlib.figure import Figure

HERE = Path(__file__).parent
LANES = ["#4C78A8", "#F58518", "#54A24B", "#B279A2"]


def lanes() -> Figure:
    """Draw one row of logits, and two ways to add up its parts. The textbook kernel merges the sums
    of its threads after each block. Lanes merge their sums once, at the end.
    """
    figure, axis = canvas(42, 90)
    blocks, cells, w = 4, 8, 2.0

    def start(block: int) -> float:
        return 3 + block * (cells * w + 4.5)

    note(axis, 3, 39.5, "Rung 1, textbook: one (m, l) for the row. Every block ends in a merge.")
    for block in range(blocks):
        middle, end = start(block) + cells * w / 2, start(block) + cells * w
        cell(axis, middle - 5, 25.6, 10, 3.6, RED, "merge, wait", edgecolor=SICK)
        for i in range(cells):
            cell(axis, start(block) + i * w, 32.5, w, 3.2, GREY)
            axis.plot((start(block) + (i + 0.5) * w, middle), (32.3, 29.4), color=LINE, lw=0.5)
        if block < blocks - 1:
            after = start(block + 1) + cells * w / 2 - 5
            arrow(axis, (middle + 5, 27.4), (after, 27.4), color=SICK)
            note(axis, end + 2.2, 28.9, "m, l", ha="center", color=SICK)
    note(axis, 3, 20.5, "Rung 2, lanes: each lane keeps its own (q, l, s). One merge ends the row.")
    for block in range(blocks):
        for i in range(cells):
            cell(axis, start(block) + i * w, 13.5, w, 3.2, LANES[i // 2], edgecolor=PAPER)
    last = start(blocks - 1) + cells * w
    for lane, color in enumerate(LANES):
        x, y = 3 + (2 * lane + 1) * w, 10.6 - 1.9 * lane
        arrow(axis, (x, 13.3), (x, y), (last - 13, y), color=color)
        note(axis, last - 12.4, y, f"q, l, s of lane {lane}", color=color, fontsize=8)
        arrow(axis, (last - 3.6, y), (last - 0.6, y), color=SICK)
    cell(axis, last - 0.4, 3.8, 6, 8, RED, "merge", edgecolor=SICK)
    text = "A lane's numbers are adjacent: one load of 16 bytes (here 2 cells, in the kernel 8)."
    note(axis, 3, 1.6, text)
    return figure


def chunks() -> Figure:
    """Draw the loop over chunks: only one chunk of logits exists at a time."""
    figure, axis = canvas(40, 90)
    note(axis, 3, 37.5, "hidden [M, D]")
    note(axis, 22, 37.5, "head W [V, D]")
    note(axis, 41, 37.5, "logits of the chunk [C, V]")
    note(axis, 71, 37.5, "gradients")
    for i, logits in enumerate(("freed", "", "not yet", "not yet")):
        y, now = 28.5 - 7 * i, i == 1
        cell(axis, 3, y, 9, 6, BLUE if now else GREY, f"chunk {i}")
        cell(axis, 41, y, 25, 6, ORANGE if now else PAPER, logits, ls="-" if now else ":")
        cell(axis, 71, y, 9, 6, GREEN if i <= 1 else PAPER, "dh" if i <= 1 else "")
    cell(axis, 22, 14.5, 9, 13, GREY, "W")
    y = 24.5
    note(axis, 53.5, y + 1.2, "loss, then gradient", ha="center", fontsize=8)
    note(axis, 53.5, y - 1.3, "in the same memory", ha="center", fontsize=8)
    arrow(axis, (12.3, y), (21.6, y))
    arrow(axis, (31.4, y), (40.6, y))
    note(axis, 36, y + 1.8, "1: h Wᵀ", ha="center", fontsize=8)
    arrow(axis, (66.2, y + 1), (70.6, y + 1))
    note(axis, 68.5, y + 4.4, "2: dz W", ha="center", fontsize=8)
    cell(axis, 82.5, 11, 6, 20, GREEN, "dW\n+=")
    arrow(axis, (66.2, 22.5), (68.5, 22.5), (68.5, 3.2), (85.5, 3.2), (85.5, 10.7))
    note(axis, 77, 1.6, "3: dzᵀ h, added to the sum", ha="center", fontsize=8)
    return figure


def products() -> Figure:
    """Draw the three products of the fused head next to the four products that two phases need."""
    figure, axis = canvas(36, 90)

    def product(x: float, y: float, text: str, color: str = BLUE) -> None:
        cell(axis, x, y, 11, 6, color, text, size=10)

    def part(x: float, y: float, w: float, text: str) -> None:
        cell(axis, x, y, w, 6, PAPER, text, size=8)

    note(axis, 3, 33.5, "One phase: the loss of a token needs its own log-prob alone (rung 4)")
    product(3, 24, "1: h Wᵀ")
    part(19, 24, 25, "loss and gradient of each row,\nwhile its logits exist")
    product(49, 24, "2: dz W")
    product(64, 24, "3: dzᵀ h")
    for a, b in ((14, 19), (44, 49)):
        arrow(axis, (a + 0.3, 27), (b - 0.3, 27))
    text = "Two phases: the loss needs the log-probs of other tokens first (such as GSPO)"
    note(axis, 3, 17, text)
    product(3, 8, "1: h Wᵀ")
    part(17, 8, 13, "log-probs;\nlogits are freed")
    part(33, 8, 13, "loss of all tokens,\nand its gradient")
    product(49, 8, "2: h Wᵀ", ORANGE)
    product(64, 8, "3: dz W")
    product(78, 8, "4: dzᵀ h")
    for a, b in ((14, 17), (30, 33), (46, 49), (60, 64)):
        arrow(axis, (a + 0.3, 11), (b - 0.3, 11))
    note(axis, 54.5, 4.6, "the same logits, again", ha="center", fontsize=8, color=FAINT)
    return figure


if __name__ == "__main__":
    with rc_context(FONT):
        for draw in (lanes, chunks, products):
            save(draw(), HERE / f"{draw.__name__}.png")
