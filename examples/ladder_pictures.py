"""Draw the pictures of kernels/README.md: lanes, chunks, and three products instead of four.

    python -m examples.ladder_pictures              # writes docs/img/lanes.png and so on

In: the name of a folder. Out: three pictures. matplotlib is required (`pip install
'nanogrpo[plot]'`). The roofline is drawn by `python -m examples.ladder --out`. Read next:
kernels/README.md.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "img"
LANES = ["#4C78A8", "#F58518", "#54A24B", "#B279A2"]
BLUE, ORANGE, GREEN, PINK = "#A6CEE3", "#FDBF6F", "#B2DF8A", "#F5C6C0"
GREY, DARK, RED = "#E5E5E5", "#444444", "#C0392B"


def canvas(width: float, height: float) -> tuple[Any, Any]:
    """Return a figure and an axis that covers it, with 10 units per inch."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), facecolor="white")
    axis = figure.add_axes((0, 0, 1, 1))
    axis.set(xlim=(0, width * 10), ylim=(0, height * 10))
    axis.axis("off")
    return figure, axis


def box(axis: Any, x: float, y: float, w: float, h: float, text: str = "", **style: Any) -> None:
    """Draw a rectangle with centered text."""
    from matplotlib.patches import Rectangle

    size = style.pop("size", 9)
    axis.add_patch(Rectangle((x, y), w, h, **{"fc": GREY, "ec": DARK, "lw": 0.8, **style}))
    axis.text(x + w / 2, y + h / 2, text, ha="center", va="center", fontsize=size)


def say(axis: Any, x: float, y: float, text: str, **style: Any) -> None:
    axis.text(x, y, text, **{"fontsize": 9, "va": "center", **style})


def arrow(axis: Any, start: tuple[float, float], end: tuple[float, float], **style: Any) -> None:
    line = {"arrowstyle": "->", "color": DARK, "lw": 1.1, **style}
    axis.annotate("", xy=end, xytext=start, arrowprops=line)


def lanes() -> Any:
    """Draw one row of logits, and two ways to add up its parts. The textbook kernel merges the sums
    of its threads after each block. Lanes merge their sums once, at the end.
    """
    figure, axis = canvas(9, 4.2)
    blocks, cells, w = 4, 8, 2.0

    def start(block: int) -> float:
        return 3 + block * (cells * w + 4.5)

    say(axis, 3, 39.5, "Rung 1, textbook: one (m, l) for the row. Every block ends in a merge.")
    for block in range(blocks):
        for cell in range(cells):
            box(axis, start(block) + cell * w, 32.5, w, 3.2)
        middle, end = start(block) + cells * w / 2, start(block) + cells * w
        box(axis, middle - 5, 25.6, 10, 3.6, "merge, wait", fc=PINK, ec=RED)
        for cell in range(cells):
            arrow(axis, (start(block) + (cell + 0.5) * w, 32.3), (middle, 29.4), lw=0.5)
        if block < blocks - 1:
            arrow(axis, (middle + 5, 27.4), (start(block + 1) + cells * w / 2 - 5, 27.4), color=RED)
            say(axis, end + 2.2, 28.9, "m, l", ha="center", color=RED)
    say(axis, 3, 20.5, "Rung 2, lanes: each lane keeps its own (q, l, s). One merge ends the row.")
    for block in range(blocks):
        for cell in range(cells):
            color = LANES[cell // 2]
            box(axis, start(block) + cell * w, 13.5, w, 3.2, fc=color, ec="white")
    last = start(blocks - 1) + cells * w
    for lane, color in enumerate(LANES):
        y = 10.6 - 1.9 * lane
        arrow(axis, (3 + (2 * lane + 1) * w, y), (last - 13, y), color=color, lw=1.6)
        axis.plot([3 + (2 * lane + 1) * w] * 2, [13.3, y], color=color, lw=1.0)
        say(axis, last - 12.4, y, f"q, l, s of lane {lane}", color=color, fontsize=8)
        arrow(axis, (last - 3.6, y), (last - 0.6, y), color=RED)
    box(axis, last - 0.4, 3.8, 6, 8, "merge", fc=PINK, ec=RED)
    say(
        axis,
        3,
        1.6,
        "A lane's numbers are adjacent: one load of 16 bytes (here 2 cells, in the kernel 8).",
    )
    return figure


def chunks() -> Any:
    """Draw the loop over chunks: only one chunk of logits exists at a time."""
    figure, axis = canvas(9, 4.0)
    rows = ["chunk 0", "chunk 1", "chunk 2", "chunk 3"]
    say(axis, 3, 37.5, "hidden [M, D]")
    say(axis, 22, 37.5, "head W [V, D]")
    say(axis, 41, 37.5, "logits of the chunk [C, V]")
    say(axis, 71, 37.5, "gradients")
    for i, name in enumerate(rows):
        y, now = 28.5 - 7 * i, i == 1
        box(axis, 3, y, 9, 6, name, fc=BLUE if now else GREY)
        style = {"fc": ORANGE} if now else {"fc": "none", "ls": ":"}
        box(axis, 41, y, 25, 6, "" if now else ("freed" if i < 1 else "not yet"), **style)
        box(axis, 71, y, 9, 6, "dh" if i <= 1 else "", fc=GREEN if i <= 1 else "none")
    box(axis, 22, 14.5, 9, 13, "W")
    y = 24.5
    say(axis, 53.5, y + 1.2, "loss, then gradient", ha="center", fontsize=8)
    say(axis, 53.5, y - 1.3, "in the same memory", ha="center", fontsize=8)
    arrow(axis, (12.3, y), (21.6, y))
    arrow(axis, (31.4, y), (40.6, y))
    say(axis, 36, y + 1.8, "1: h Wᵀ", ha="center", fontsize=8)
    arrow(axis, (66.2, y + 1), (70.6, y + 1))
    say(axis, 68.5, y + 4.4, "2: dz W", ha="center", fontsize=8)
    box(axis, 82.5, 11, 6, 20, "dW\n+=", fc=GREEN)
    axis.plot([66.2, 68.5, 68.5, 85.5], [22.5, 22.5, 3.2, 3.2], color=DARK, lw=1.1)
    arrow(axis, (85.5, 3.2), (85.5, 10.7))
    say(axis, 77, 1.6, "3: dzᵀ h, added to the sum", ha="center", fontsize=8)
    return figure


def products() -> Any:
    """Draw the three products of the fused head next to the four products that two phases need."""
    figure, axis = canvas(9, 3.6)

    def product(x: float, y: float, text: str, number: int) -> None:
        box(axis, x, y, 11, 6, f"{number}: {text}", fc=BLUE, size=10)

    def part(x: float, y: float, w: float, text: str, **style: Any) -> None:
        box(axis, x, y, w, 6, text, **{"fc": "white", "size": 8, **style})

    say(axis, 3, 33.5, "One phase: the loss of a token needs its own log-prob alone (rung 4)")
    product(3, 24, "h Wᵀ", 1)
    part(19, 24, 25, "loss and gradient of each row,\nwhile its logits exist")
    product(49, 24, "dz W", 2)
    product(64, 24, "dzᵀ h", 3)
    for a, b in ((14, 19), (44, 49)):
        arrow(axis, (a + 0.3, 27), (b - 0.3, 27))
    say(
        axis, 3, 17, "Two phases: the loss needs the log-probs of other tokens first (such as GSPO)"
    )
    product(3, 8, "h Wᵀ", 1)
    part(17, 8, 13, "log-probs;\nlogits are freed")
    part(33, 8, 13, "loss of all tokens,\nand its gradient")
    box(axis, 49, 8, 11, 6, "2: h Wᵀ", fc=ORANGE, size=10)
    product(64, 8, "dz W", 3)
    product(78, 8, "dzᵀ h", 4)
    for a, b in ((14, 17), (30, 33), (46, 49), (60, 64)):
        arrow(axis, (a + 0.3, 11), (b - 0.3, 11))
    say(axis, 54.5, 4.6, "the same logits, again", ha="center", fontsize=8, color="#B35900")
    return figure


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Draw the pictures of kernels/README.md.")
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER, help="default: docs/img")
    folder = parser.parse_args(argv).folder
    try:
        for draw in (lanes, chunks, products):
            path = folder / f"{draw.__name__}.png"
            draw().savefig(path, dpi=110)
            print(path)
    except ImportError:
        print("error: the pictures need matplotlib: pip install 'nanogrpo[plot]'", file=sys.stderr)
        return 2
    except OSError as e:
        print(f"error: {folder} cannot be written ({e}): choose another folder.", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
