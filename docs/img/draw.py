"""Draw the diagrams of the documentation: python docs/img/draw.py (needs the extra `plot`).

In: nothing; the clip is drawn with the code of kernels/reference/policy.py. Out: loop.svg,
timeline.svg, strip.svg, head.svg, clip.svg and reading_map.svg in this folder. They are narrow
enough for a phone, and have a second set of colors for a dark theme. Their text stays text, so the
files are small. Read next: troubles.py, which draws the curves of docs/troubleshooting.md.
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
PAPER, LINE, FAINT, GRID = "#ffffff", "#333333", "#6b6b6b", "#c9c9c9"
HEALTHY, SICK = "#1f5fa8", "#b03030"
DARK = {
    **{BLUE: "#1d3c5a", ORANGE: "#5c4019", GREEN: "#24482b", RED: "#5c2c2c", GREY: "#34383e"},
    **{PAPER: "#131416", LINE: "#dfe2e6", FAINT: "#a3abb5", GRID: "#4a4f56"},
    **{HEALTHY: "#7db4f0", SICK: "#f08c8c"},
}
FONT = {
    "svg.fonttype": "none",  # text as text, in any font without serifs
    "svg.hashsalt": "nanogrpo",  # the same ids in every run
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial", "Helvetica"],
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color"), LINE),
    "ytick.color": LINE,
}
WIDTH = 46  # of every diagram, in tenths of an inch


def save(figure: Figure, path: Path) -> None:
    """Write a figure. Where an SVG is shown in a dark theme, each color is replaced by its dark
    one.
    """
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else {}, dpi=110)
    if path.suffix == ".svg":
        text = path.read_text()
        rules = "".join(
            f'[style*="{what}: {light}"] {{ {what}: {dark} !important }}\n'
            for light, dark in DARK.items()
            for what in ("fill", "stroke")
            if f"{what}: {light}" in text
        )
        style = f"<style>@media (prefers-color-scheme: dark) {{\n{rules}}}</style>\n"
        path.write_text(text.replace("<defs>", style + "<defs>", 1))


def canvas(height: float, width: float = WIDTH) -> tuple[Figure, Axes]:
    """Return a figure whose coordinates are tenths of an inch, from the lower left corner."""
    figure = Figure(figsize=(width / 10, height / 10), facecolor=PAPER)
    axis = figure.add_axes((0, 0, 1, 1))
    axis.set(xlim=(0, width), ylim=(0, height))
    axis.axis("off")
    return figure, axis


def box(axis: Axes, x: float, y: float, w: float, h: float, color: str, *lines: str) -> None:
    """Draw a box with centered lines of text, the first of them bold."""
    style = "round,pad=0,rounding_size=0.6"
    patch = FancyBboxPatch((x, y), w, h, boxstyle=style, facecolor=color, edgecolor=LINE, lw=0.8)
    axis.add_patch(patch)
    for i, line in enumerate(lines):
        top = y + h / 2 + 1.8 * ((len(lines) - 1) / 2 - i)
        note(axis, x + w / 2, top, line, ha="center", weight="normal" if i else "bold")


def cell(
    axis: Axes,
    x: float,
    y: float,
    w: float,
    h: float,
    color: str,
    text: str = "",
    size: float = 9,
    **style: Any,
) -> None:
    style = {"edgecolor": LINE, "lw": 0.8, **style}
    axis.add_patch(Rectangle((x, y), w, h, facecolor=color, **style))
    note(axis, x + w / 2, y + h / 2, text, fontsize=size, ha="center")


def arrow(axis: Axes, *points: tuple[float, float], color: str = LINE) -> None:
    """Draw an arrow through points."""
    for a, b in itertools.pairwise(points[:-1]):
        axis.plot(*zip(a, b), color=color, lw=1.2, solid_capstyle="round")
    style = {"arrowstyle": "-|>", "mutation_scale": 10, "shrinkA": 0, "shrinkB": 0, "lw": 1.2}
    axis.add_patch(FancyArrowPatch(points[-2], points[-1], color=color, **style))


def note(axis: Axes, x: float, y: float, text: str, **style: Any) -> None:
    axis.text(x, y, text, **{"fontsize": 9, "color": LINE, "va": "center", **style})


# --- the pictures ---


def loop() -> Figure:
    figure, axis = canvas(48)
    w, h, left, right = 19.5, 7.5, 1, 25.5
    rows = [39.5, 27.5, 15.5, 3.5]
    box(axis, left, rows[0], w, h, GREY, "draw", "a prompt:", "76-2+5=")
    box(axis, left, rows[1], w, h, ORANGE, "sample", "a group of completions:", "79  77  84  70")
    box(axis, left, rows[2], w, h, GREEN, "score", "a reward for each:", "2  1  1  1")
    box(axis, left, rows[3], w, h, GREEN, "compare", "advantages:", "1.5  -0.5  -0.5  -0.5")
    box(axis, right, rows[3], w, h, BLUE, "pack", "all tokens in a strip,", "without padding")
    box(axis, right, rows[2], w, h, BLUE, "loss", "good tokens: more likely", "bad: less likely")
    box(axis, right, rows[1], w, h, BLUE, "optimizer step", "new weights")
    for a, b in itertools.pairwise(rows):
        arrow(axis, (left + w / 2, a), (left + w / 2, b + h))
        if a < rows[0]:
            arrow(axis, (right + w / 2, b + h), (right + w / 2, a))
    arrow(axis, (left + w, rows[3] + h / 2), (right, rows[3] + h / 2))
    arrow(axis, (right, rows[1] + h / 2), (left + w, rows[1] + h / 2))
    note(axis, right, 37.5, "sync: copy the weights\nto the engine", color=FAINT)
    note(axis, right, 43.5, "orange: engine\ngreen: rewards   blue: trainer", color=FAINT)
    return figure


def timeline() -> Figure:
    """Draw steps with --max-staleness 0 and 1. The widths are examples, not measurements."""
    figure, axis = canvas(60)

    def lanes(x: float, title: str, *bars: tuple[int, float, float, str, str]) -> None:
        note(axis, x, 57.5, title, weight="bold")
        for lane, name in enumerate(("trainer", "server")):
            note(axis, x + 10.8 * lane + 5, 53, name, ha="center")
            axis.plot([x + 10.8 * lane + 5] * 2, (4, 51), color=GRID, lw=0.8, zorder=0)
        for lane, start, end, color, text in bars:
            place = x + 10.8 * lane, 51 - 4.1 * end, 10, 4.1 * (end - start)
            cell(axis, *place, color, text, size=8 if end - start < 1 else 9)

    both = ((lane, start, start + 0.6, GREY, "sync") for lane in (0, 1) for start in (0, 5.6))
    lanes(
        *(1, "--max-staleness 0\n(the default)", *both),
        *((1, t + 0.6, t + 3, ORANGE, f"sample {i}") for i, t in enumerate((0, 5.6))),
        *((0, t + 3, t + 3.6, GREEN, "score") for t in (0, 5.6)),
        *((0, t + 3.6, t + 5.6, BLUE, f"train {i}") for i, t in enumerate((0, 5.6))),
    )
    ahead = ((lane, t, t + 0.6, GREY, "sync") for lane in (0, 1) for t in (0, 5.6, 9.4))
    lanes(
        *(24.5, "--max-staleness 1\n(one step ahead)", *ahead),
        *((1, a, b, ORANGE, f"sample {i}") for i, a, b in ((0, 0.6, 3), (1, 3, 5.6))),
        *((1, 6.2, 6.8, ORANGE, "…"), (1, 6.8, 9.4, ORANGE, "sample 2")),
        *((1, 10, 11.2, ORANGE, "…"), (0, 3, 3.6, GREEN, "score"), (0, 3.6, 5.6, BLUE, "train 0")),
        *((0, 6.8, 7.4, GREEN, "score"), (0, 7.4, 9.4, BLUE, "train 1")),
    )
    note(axis, 6, 51 - 4.1 * 1.8, "waits", ha="center", color=FAINT)
    note(axis, 16.8, 51 - 4.1 * 4.3, "waits", ha="center", color=FAINT)
    text = "Time runs down. At a sync, completions in progress\ngo on with the new weights."
    note(axis, 1, 1.8, text, color=FAINT, fontsize=8.5)
    return figure


def strip() -> Figure:
    figure, axis = canvas(66)
    size = 5

    def row(y: float, title: str, tokens: list[tuple[str, str]], predicted: list[str]) -> None:
        note(axis, 1, y + 6.3, title, weight="bold")
        for i, ((token, color), target) in enumerate(zip(tokens, predicted)):
            cell(axis, 9 + size * i, y, size, 4, color, token)
            note(axis, 9 + size * (i + 0.5), y - 1.6, target, ha="center")
        note(axis, 8, y + 2, "tokens", ha="right", color=FAINT)
        note(axis, 8, y - 1.6, "predict", ha="right", color=FAINT)

    p = [("p0", GREY), ("p1", GREY)]
    copies = [*p, ("a", BLUE), ("b", BLUE), *p, ("d", ORANGE)]
    title = "A copy of the prompt for each completion: T = 7"
    row(56, title, copies, ["", "a", "b", "c", "", "d", "e"])
    shared = [*p, ("a", BLUE), ("b", BLUE), ("d", ORANGE)]
    row(43, "A shared prompt: T = 5", shared, ["", "a, d", "b", "c", "e"])
    text = (
        "The completions are a b c and d e. Their last tokens are\n"
        "predicted, but are not inputs. Both strips have the same\n"
        "targets: M = 5."
    )
    note(axis, 1, 36, text, color=FAINT)
    note(axis, 1, 30.5, "Who attends to whom, with a shared prompt", weight="bold")
    x, y, side = 9, 5, 4.2
    seen = [{0}, {0, 1}, {0, 1, 2}, {0, 1, 2, 3}, {0, 1, 4}]
    for r, (token, color) in enumerate(shared):
        top = y + side * (4 - r)
        note(axis, x - 1, top + side / 2, token, ha="right")
        note(axis, x + side * (r + 0.5), y + 5 * side + 1.3, token, ha="center")
        for c in range(5):
            cell(axis, x + side * c, top, side, side, color if c in seen[r] else PAPER)
    text = "d attends to the\nprompt and to d,\nbut not to a and b"
    note(axis, x + 5 * side + 1, y + 2, text, color=FAINT)
    return figure


def head() -> Figure:
    figure, axis = canvas(56)

    def chunks(y: float, title: str) -> None:
        for i in range(4):
            cell(axis, 14 + 7.5 * i, y, 7.5, 4, BLUE if i == 1 else PAPER, "chunk" * (i == 1))
        note(axis, 1, y + 2, title)

    chunks(48, "hidden states\n[M, D]")
    arrow(axis, (25.2, 48), (25.2, 41))
    note(axis, 26.4, 44.5, "product 1: times Wᵀ")
    cell(axis, 9, 36, 33, 5, ORANGE, "logits of the chunk [C, V]")
    arrow(axis, (25.2, 36), (25.2, 29))
    note(axis, 26.4, 32.5, "loss and derivative,\nrow by row, in place")
    cell(axis, 9, 24, 33, 5, RED, "gradient at the logits [C, V]")
    arrow(axis, (25.2, 24), (25.2, 17))
    note(axis, 26.4, 20.5, "product 2: times W")
    chunks(13, "their gradient\n[M, D]")
    arrow(axis, (12, 24), (12, 9))
    cell(axis, 4, 5, 38, 4, GREEN, "gradient of W [V, D], added up")
    note(axis, 13.2, 11, "product 3: transposed, times the chunk")
    note(axis, 1, 2, "Then the next chunk uses the same memory.", color=FAINT)
    note(axis, 1, 54, "Three matrix products for each chunk", weight="bold")
    return figure


def clip() -> Figure:
    figure = Figure(figsize=(WIDTH / 10, 6.4), facecolor=PAPER, layout="constrained")
    ratio = torch.linspace(0.4, 1.6, 241)
    for i, sign in enumerate((1.0, -1.0)):
        axis = figure.add_subplot(2, 1, i + 1, facecolor=PAPER)
        inputs = LossInputs(
            torch.full_like(ratio, sign), torch.ones_like(ratio), torch.zeros_like(ratio)
        )
        loss, gradient, _, _ = policy_terms(ratio.log(), inputs, Clip(0.2, 0.2))
        flat = gradient == 0
        axis.axvspan(*ratio[flat].aminmax(), facecolor=RED, edgecolor="none")
        axis.axvline(1, color=GRID, lw=0.8)
        axis.plot(ratio, -sign * ratio, color=FAINT, lw=1, ls="--", label="without the clip")
        axis.plot(ratio, loss, color=HEALTHY, lw=2.2, label="the loss")
        middle, height = (1.4, -0.62) if sign > 0 else (0.6, 1.38)
        note(axis, middle, height, "no gradient", ha="center", color=SICK)
        text, x, y, direction = (
            ("training raises\nthe ratio", 0.84, -0.46, 0.1)
            if sign > 0
            else ("training lowers\nthe ratio", 1.3, 0.9, -0.12)
        )
        style = {"arrowstyle": "-|>", "color": LINE}
        axis.annotate("", (x + direction, y), (x - direction, y), arrowprops=style)
        note(axis, x, y - 0.14, text, ha="center")
        name = "good token: A = 1" if sign > 0 else "bad token: A = -1"
        axis.set_title(name, fontsize=10)
        axis.set_xticks([0.4, 0.8, 1.0, 1.2, 1.6], ["0.4", "1-ε", "1", "1+ε", "1.6"])
        axis.set(xlabel="ratio w", ylabel="loss l", xlim=(0.4, 1.6))
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(loc="lower left" if sign > 0 else "lower right", fontsize=9, frameon=False)
    return figure


def reading_map() -> Figure:
    parts = {
        "1  the idea": (
            GREY,
            ("docs/grpo.md", "GRPO from zero"),
            ("docs/walkthrough.md", "one prompt, all numbers"),
            ("docs/exercises.md", "try it yourself"),
        ),
        "2  the loop": (
            ORANGE,
            ("train.py", "the loop"),
            ("types.py", "what flows through it"),
        ),
        "3  the algorithm": (
            GREEN,
            ("step.py", "a step's samples"),
            ("grpo/advantages.py", "the baseline"),
            ("grpo/loss.py", "the objective"),
            ("kernels/reference/policy.py", "the loss of a token"),
        ),
        "4  what it runs on": (
            BLUE,
            ("grpo/packing.py", "strips"),
            ("model/decoder.py", "the model"),
            ("engine/local.py", "sampling"),
            ("kernels/README.md", "the fused head"),
        ),
        "5  what attaches to it": (
            RED,
            ("run/setup.py", "how a run is built"),
            ("feature.py", "the hooks"),
            ("extras/attach.py", "all that is off by default"),
            ("vllm/feature.py, serve.py", "sampling in vLLM"),
        ),
    }
    figure, axis = canvas(73)
    top = 72.0
    for title, (color, *files) in parts.items():
        height = 2.2 * len(files) + 1.2
        note(axis, 2, top - 1.6, title, weight="bold", fontsize=10)
        box(axis, 1, top - 3.4 - height, 44, height, color)
        for i, (name, text) in enumerate(files):
            y = top - 5.1 - 2.2 * i
            note(axis, 2.5, y, name, weight="bold")
            note(axis, 26, y, text)
        top -= height + 5.4
        if top > 15:
            arrow(axis, (42, top + 2), (42, top - 3.4))
    note(axis, 2, top - 0.4, "Parts 2 to 4 take an afternoon.", color=FAINT)
    return figure


PICTURES = (loop, timeline, strip, head, clip, reading_map)


def main(folder: Path = HERE, suffix: str = "svg") -> None:
    with rc_context(FONT):
        for draw in PICTURES:
            save(draw(), folder / f"{draw.__name__}.{suffix}")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:2]), *sys.argv[2:3])
