"""Draw the diagrams of the documentation: python docs/img/draw.py (needs the extra `plot`).

In: nothing; the clip is drawn with the code of kernels/reference/policy.py. Out: loop.svg,
timeline.svg, strip.svg, head.svg, clip.svg and reading_map.svg in this folder. The background is
white, so they can be read in a dark theme too. Their text stays text, so the files are small.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import torch
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle
from nanogrpo.kernels.reference.policy import Clip, LossInputs, policy_terms

HERE = Path(__file__).parent
BLUE, ORANGE, GREEN, RED, GREY = "#cfe2f3", "#fce0bd", "#d5ead0", "#f6d0d0", "#ececec"
LINE, FAINT = "#333333", "#777777"


def canvas(width: float, height: float) -> tuple[Figure, Axes]:
    """Return a white figure whose coordinates are tenths of an inch, from the lower left corner."""
    figure = Figure(figsize=(width / 10, height / 10), facecolor="white")
    axis = figure.add_axes((0, 0, 1, 1))
    axis.set(xlim=(0, width), ylim=(0, height))
    axis.axis("off")
    return figure, axis


def box(
    axis: Axes, x: float, y: float, w: float, h: float, color: str, *lines: str, size: float = 9
) -> None:
    """Draw a box with centered lines of text, the first of them bold."""
    style = "round,pad=0,rounding_size=0.6"
    patch = FancyBboxPatch((x, y), w, h, boxstyle=style, facecolor=color, edgecolor=LINE, lw=0.8)
    axis.add_patch(patch)
    step = size * 0.19
    top = y + h / 2 + step * (len(lines) - 1) / 2
    for i, line in enumerate(lines):
        weight, shade = ("bold", "black") if i == 0 else ("normal", LINE)
        style: dict[str, Any] = {"ha": "center", "va": "center", "color": shade, "weight": weight}
        axis.text(x + w / 2, top - i * step, line, fontsize=size if i == 0 else size - 1, **style)


def cell(
    axis: Axes, x: float, y: float, w: float, h: float, color: str, text: str = "", size: float = 9
) -> None:
    axis.add_patch(Rectangle((x, y), w, h, facecolor=color, edgecolor=LINE, lw=0.8))
    axis.text(x + w / 2, y + h / 2, text, fontsize=size, ha="center", va="center")


def arrow(axis: Axes, *points: tuple[float, float], color: str = LINE) -> None:
    """Draw an arrow through points."""
    for a, b in itertools.pairwise(points[:-1]):
        axis.plot(*zip(a, b), color=color, lw=1.2, solid_capstyle="round")
    style = {"arrowstyle": "-|>", "mutation_scale": 10, "shrinkA": 0, "shrinkB": 0, "lw": 1.2}
    axis.add_patch(FancyArrowPatch(points[-2], points[-1], color=color, **style))


def note(axis: Axes, x: float, y: float, text: str, **style: Any) -> None:
    axis.text(x, y, text, **{"fontsize": 8, "color": FAINT, "va": "center", **style})


# --- the pictures ---


def loop() -> Figure:
    figure, axis = canvas(82, 31)
    w, h, top, bottom = 17, 8.5, 19, 3
    x = [2, 22.5, 43, 63.5]
    box(axis, x[0], top, w, h, GREY, "draw", "a prompt:", "76-2+5=")
    box(axis, x[1], top, w, h, ORANGE, "sample", "a group of completions:", "79   77   84   70")
    box(axis, x[2], top, w, h, GREEN, "score", "a reward for each:", "2   1   1   1")
    box(axis, x[3], top, w, h, GREEN, "compare", "better than the group?", "+1.5  -0.5  -0.5  -0.5")
    box(axis, x[3], bottom, w, h, BLUE, "pack", "all tokens in a strip,", "without padding")
    box(axis, x[2], bottom, w, h, BLUE, "loss", "good tokens: more likely", "bad ones: less likely")
    box(axis, x[1], bottom, w, h, BLUE, "optimizer step", "new weights")
    for a, b in itertools.pairwise(x):
        arrow(axis, (a + w, top + h / 2), (b, top + h / 2))
    arrow(axis, (x[3] + w / 2, top), (x[3] + w / 2, bottom + h))
    for a, b in ((x[3], x[2]), (x[2], x[1])):
        arrow(axis, (a, bottom + h / 2), (b + w, bottom + h / 2))
    arrow(axis, (x[1] + w / 2, bottom + h), (x[1] + w / 2, top))
    note(axis, x[1] + w / 2 + 1, (top + bottom + h) / 2, "sync: copy the weights to the engine")
    note(axis, x[0], bottom + h / 2, "engine: orange\nrewards: green\ntrainer: blue")
    return figure


def timeline() -> Figure:
    """Draw steps with --max-staleness 0 and 1. The widths are examples, not measurements."""
    figure, axis = canvas(92, 40)

    def bar(lane: float, start: float, end: float, color: str, text: str) -> None:
        cell(axis, 12 + 6.9 * start, lane, 6.9 * (end - start), 4, color, text, size=8)

    def lanes(y: float, title: str) -> None:
        axis.text(1.5, y + 13.2, title, fontsize=9, weight="bold", va="center")
        for lane, name in ((y + 6.5, "trainer"), (y, "vLLM server")):
            note(axis, 1.5, lane + 2, name, color="black")
            axis.plot((12, 90), (lane + 2, lane + 2), color="#bbbbbb", lw=0.8, zorder=0)

    lanes(24, "--max-staleness 0 (the default): always the newest weights")
    for step, start in enumerate((0.0, 5.6)):
        for lane in (30.5, 24):
            bar(lane, start, start + 0.6, GREY, "sync")
        bar(24, start + 0.6, start + 3, ORANGE, f"sample {step}")
        bar(30.5, start + 3, start + 3.6, GREEN, "score")
        bar(30.5, start + 3.6, start + 5.6, BLUE, f"train {step}")
        note(axis, 12 + 6.9 * (start + 1.8), 33.8, "waits", ha="center")
        note(axis, 12 + 6.9 * (start + 4.3), 27.3, "waits", ha="center")

    lanes(4, "--max-staleness 1: the server samples step t + 1 while step t is trained")
    for lane in (10.5, 4):
        bar(lane, 0, 0.6, GREY, "sync")
        bar(lane, 5.6, 6.2, GREY, "sync")
        bar(lane, 9.4, 10, GREY, "sync")
    bar(4, 0.6, 3, ORANGE, "sample 0")
    bar(10.5, 3, 3.6, GREEN, "score")
    bar(10.5, 3.6, 5.6, BLUE, "train 0")
    bar(4, 3, 5.6, ORANGE, "sample 1")
    bar(4, 6.2, 6.8, ORANGE, "…")
    bar(10.5, 6.8, 7.4, GREEN, "score")
    bar(10.5, 7.4, 9.4, BLUE, "train 1")
    bar(4, 6.8, 9.4, ORANGE, "sample 2")
    bar(4, 10, 10.8, ORANGE, "…")
    note(
        axis,
        12,
        1.5,
        "At a sync, completions in progress go on with the new weights. The widths are examples.",
    )
    return figure


def strip() -> Figure:
    figure, axis = canvas(88, 36)
    prompt, first, second = GREY, BLUE, ORANGE
    size = 5

    def row(x: float, y: float, tokens: list[tuple[str, str]], predicted: list[str]) -> None:
        for i, ((token, color), target) in enumerate(zip(tokens, predicted)):
            cell(axis, x + size * i, y, size, size * 0.8, color, token)
            note(axis, x + size * (i + 0.5), y - 1.6, target, ha="center", color="black")
        note(axis, x - 1, y + size * 0.4, "tokens", ha="right")
        note(axis, x - 1, y - 1.6, "predict", ha="right")

    p = [("p0", prompt), ("p1", prompt)]
    axis.text(1.5, 33.5, "A copy of the prompt for each completion: T = 7", fontsize=9)
    copies = [*p, ("a", first), ("b", first), *p, ("d", second)]
    row(9, 27, copies, ["", "a", "b", "c", "", "d", "e"])
    axis.text(1.5, 20.5, "A shared prompt: T = 5", fontsize=9)
    shared = [*p, ("a", first), ("b", first), ("d", second)]
    row(9, 14, shared, ["", "a, d", "b", "c", "e"])
    text = (
        "The completions are a b c and d e. Their last tokens\n"
        "are predicted, but are not inputs. The targets are the\n"
        "same in both strips: M = 5."
    )
    note(axis, 1.5, 5, text, color="black")

    x, y, side = 57, 8, 4.2
    axis.text(x - 3, 33.5, "Who attends to whom, with a shared prompt", fontsize=9)
    seen = [{0}, {0, 1}, {0, 1, 2}, {0, 1, 2, 3}, {0, 1, 4}]
    for r, (token, color) in enumerate(shared):
        top = y + side * (4 - r)
        note(axis, x - 1, top + side / 2, token, ha="right", color="black")
        note(axis, x + side * (r + 0.5), y + 5 * side + 1.3, token, ha="center", color="black")
        for c in range(5):
            cell(axis, x + side * c, top, side, side, color if c in seen[r] else "white")
    note(
        axis,
        x + 2.5 * side,
        y - 2.5,
        "d attends to the prompt and to itself,\nbut not to a and b",
        ha="center",
    )
    return figure


def head() -> Figure:
    figure, axis = canvas(92, 39)
    # the hidden states, in chunks
    for i in range(4):
        cell(axis, 4, 9 + 6 * i, 9, 6, BLUE if i == 2 else "white", "chunk" if i == 2 else "")
    note(axis, 8.5, 34.3, "hidden states [M, D]", ha="center", color="black")
    # the logits of one chunk
    cell(axis, 27, 21, 30, 6, ORANGE, "logits of the chunk [C, V]")
    arrow(axis, (13, 24), (27, 24))
    note(axis, 20, 26, "product 1: times Wᵀ", ha="center", color="black")
    note(axis, 42, 28.4, "the only place where logits exist", ha="center")
    arrow(axis, (42, 21), (42, 15))
    note(axis, 43.2, 18, "loss and its derivative, row by row, in place", color="black")
    cell(axis, 27, 9, 30, 6, RED, "gradient at the logits [C, V]")
    # the two gradients
    for i in range(4):
        cell(axis, 80, 9 + 6 * i, 9, 6, BLUE if i == 2 else "white", "chunk" if i == 2 else "")
    note(axis, 84.5, 34.3, "their gradient [M, D]", ha="center", color="black")
    arrow(axis, (57, 13), (70, 13), (70, 24), (80, 24))
    note(axis, 71, 21, "product 2: times W", ha="left", color="black")
    cell(axis, 27, 1, 30, 4, GREEN, "gradient of W [V, D]")
    arrow(axis, (42, 9), (42, 5))
    note(
        axis,
        43.2,
        7,
        "product 3: its transpose times the chunk of hidden states, added up",
        color="black",
    )
    note(
        axis,
        4,
        37.2,
        "Three matrix products for each chunk. Then the next chunk uses the same memory.",
        color="black",
        fontsize=9,
    )
    return figure


def clip() -> Figure:
    figure = Figure(figsize=(8.2, 3.4), facecolor="white", layout="constrained")
    ratio = torch.linspace(0.4, 1.6, 241)
    for i, sign in enumerate((1.0, -1.0)):
        axis = figure.add_subplot(1, 2, i + 1)
        inputs = LossInputs(
            torch.full_like(ratio, sign), torch.ones_like(ratio), torch.zeros_like(ratio)
        )
        loss, gradient, _, _ = policy_terms(ratio.log(), inputs, Clip(0.2, 0.2))
        flat = gradient == 0
        axis.plot(ratio, -sign * ratio, color="#999999", lw=1, ls="--", label="without the clip")
        axis.plot(ratio, loss, color="#1f5fa8", lw=2.2, label="the loss")
        axis.axvspan(*ratio[flat].aminmax(), color=RED, alpha=0.6, lw=0)
        axis.axvline(1, color="#bbbbbb", lw=0.8)
        middle, height = (1.4, -0.62) if sign > 0 else (0.6, 1.38)
        axis.text(middle, height, "no gradient", ha="center", color="#a03030", fontsize=9)
        text, x, y, direction = (
            ("training raises the ratio", 0.72, -0.5, 0.12)
            if sign > 0
            else ("training lowers the ratio", 1.3, 0.95, -0.12)
        )
        style = {"arrowstyle": "-|>", "color": LINE}
        axis.annotate("", (x + direction, y), (x - direction, y), arrowprops=style)
        axis.text(x, y + 0.75 * direction, text, ha="center", va="center", fontsize=9)
        name = "good token: A = 1" if sign > 0 else "bad token: A = -1"
        axis.set_title(name, fontsize=10)
        axis.set_xticks([0.4, 0.8, 1.0, 1.2, 1.6], ["0.4", "1-ε", "1", "1+ε", "1.6"])
        axis.set(xlabel="ratio w", ylabel="loss l", xlim=(0.4, 1.6))
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(loc="lower left" if sign > 0 else "lower right", fontsize=8, frameon=False)
    return figure


def reading_map() -> Figure:
    figure, axis = canvas(94, 49)
    columns = {
        "1  the idea": (
            GREY,
            [
                ("docs/grpo.md", "GRPO from zero"),
                ("docs/walkthrough.md", "one prompt, all numbers"),
                ("docs/exercises.md", "try it yourself"),
            ],
        ),
        "2  the loop": (
            ORANGE,
            [("train.py", "the loop"), ("types.py", "what flows through it")],
        ),
        "3  the algorithm": (
            GREEN,
            [
                ("step.py", "a step's samples"),
                ("grpo/advantages.py", "the baseline"),
                ("grpo/loss.py", "the objective"),
                ("kernels/reference/policy.py", "policy_terms: the loss"),
            ],
        ),
        "4  what it runs on": (
            BLUE,
            [
                ("grpo/packing.py", "strips"),
                ("model/decoder.py", "the model"),
                ("engine/local.py", "sampling"),
                ("kernels/README.md", "the fused head"),
            ],
        ),
    }
    core = {"boxstyle": "round,pad=0,rounding_size=1", "facecolor": "none", "edgecolor": FAINT}
    axis.add_patch(FancyBboxPatch((24, 12.3), 69.3, 36.1, linestyle="--", **core))
    note(axis, 92.3, 13.8, "the core: one afternoon", ha="right")
    x, w, h = 2.0, 20.5, 5.6
    for i, (title, (color, files)) in enumerate(columns.items()):
        axis.text(x + w / 2, 46, title, fontsize=10, weight="bold", ha="center")
        for j, (name, text) in enumerate(files):
            y = 38 - 7 * j
            box(axis, x, y, w, h, color, name, text, size=8.5)
            if j:
                arrow(axis, (x + w / 2, y + 7), (x + w / 2, y + h))
        if i < 3:
            arrow(axis, (x + w, 40.8), (x + w + 2.8, 40.8))
        x += w + 2.8
    x, middle = 25.3, 25.3 + w / 2
    axis.text(middle, 28.2, "5  what attaches to it", fontsize=10, weight="bold", ha="center")
    box(axis, x, 21, w, h, ORANGE, "run/setup.py", "how a run is built", size=8.5)
    box(axis, x, 14, w, h, ORANGE, "feature.py", "the seam", size=8.5)
    arrow(axis, (middle, 21), (middle, 14 + h))
    arrow(axis, (middle, 14), (middle, 3 + h))
    arrow(axis, (middle, 10.5), (75, 10.5), (75, 3 + h))
    box(axis, x, 3, 31, h, RED, "extras/attach.py", "all that is off by default", size=8.5)
    box(axis, 61, 3, 31, h, RED, "vllm/feature.py, serve.py", "sampling in vLLM", size=8.5)
    note(
        axis,
        2,
        20.5,
        "to change it: docs/fork.md\nall formulas: docs/equations.md\n"
        "several GPUs: docs/scale.md\nvLLM: docs/vllm.md",
        va="top",
        color="black",
    )
    return figure


PICTURES = (loop, timeline, strip, head, clip, reading_map)


def main(folder: Path = HERE, suffix: str = "svg") -> None:
    # Text as text, in any font without serifs, and the same ids in every run.
    fonts = ["DejaVu Sans", "Verdana", "Arial", "Helvetica"]
    settings = {"svg.fonttype": "none", "svg.hashsalt": "nanogrpo", "font.sans-serif": fonts}
    metadata = {"Date": None} if suffix == "svg" else {}
    with rc_context(settings):
        for draw in PICTURES:
            draw().savefig(folder / f"{draw.__name__}.{suffix}", metadata=metadata, dpi=110)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:2]), *sys.argv[2:3])
