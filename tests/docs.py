"""Check the blocks of code and output in docs/*.md against the code and its real output.

    python -m tests.docs        # write into the pages of the course, and their
                                notebooks, what the code prints now

Three kinds of blocks are checked:

    ```python title="nanogrpo/grpo/loss.py"          lines of this file; "..." stands for a gap
    ```python, followed by ```text                   an experiment, and what it prints
    ```text title="python -m examples.walkthrough"   one section of what this command prints

In: a page. Out: its blocks, or the page with the current output. Read next: test_docs.py.
"""

import contextlib
import io
import itertools
import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
WALKTHROUGH = "python -m examples.walkthrough"
BLOCK = re.compile(r'^```(\w+)(?: title="([^"\n]*)")?\n(.*?)^```$', re.DOTALL | re.MULTILINE)
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?")


class Block(NamedTuple):
    language: str
    title: str  # "" if it has none
    body: str
    start: int  # where the body begins in the page
    end: int

    @property
    def name(self) -> str:
        return self.body.partition("\n")[0]


def blocks(page: str) -> list[Block]:
    return [Block(m[1], m[2] or "", m[3], *m.span(3)) for m in BLOCK.finditer(page)]


def experiments(page: str) -> list[tuple[Block, Block]]:
    """Return each program that is followed by its output, with that output."""
    found = blocks(page)
    return [
        (code, output)
        for code, output in itertools.pairwise(found)
        if (code.language, code.title, output.language, output.title) == ("python", "", "text", "")
        and page[code.end : output.start] == "```\n\n```text\n"
    ]


def run(code: str) -> str:
    """Run a program in a namespace of its own, and return what it prints."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(code, {"__name__": "__main__"})
    return out.getvalue()


def sections(printed: str) -> dict[str, str]:
    """Split the output of the walkthrough at empty lines. Each section is known by its first line,
    without numbers.
    """
    parts = [part + "\n" for part in printed.strip("\n").split("\n\n")]
    return {NUMBER.sub("#", part.partition("\n")[0]): part for part in parts}


def is_quoted(quote: str, source: str) -> bool:
    """Return whether each part of a quote occurs in a file as consecutive lines, in this order.
    Indentation may differ.
    """
    lines = [line.strip() for line in source.splitlines()]
    position = 0
    for part in re.split(r"^ *\.\.\.\n", quote, flags=re.MULTILINE):
        wanted = [line.strip() for line in part.splitlines()]
        places = range(position, len(lines) - len(wanted) + 1)
        found = next((i for i in places if lines[i : i + len(wanted)] == wanted), None)
        if found is None:
            return False
        position = found + len(wanted)
    return True


def agree(printed: str, expected: str) -> bool:
    """Return whether two outputs are the same, up to spaces and two units of a last digit.

    Another matrix library rounds differently. Whole numbers must be equal.
    """
    texts = ["".join(NUMBER.sub("#", text).split()) for text in (printed, expected)]
    pairs = zip(NUMBER.findall(printed), NUMBER.findall(expected))
    return texts[0] == texts[1] and all(
        abs(float(a) - float(b)) <= 2.1 * max(unit(a), unit(b)) for a, b in pairs
    )


def unit(number: str) -> float:
    """Return the place value of the last digit: "0.25" → 0.01; 0 for whole numbers."""
    digits, _, exponent = number.partition("e")
    places = len(digits.partition(".")[2])
    return 10.0 ** (int(exponent or 0) - places) if places or exponent else 0.0


def updated(page: str, walkthrough: Callable[[], str]) -> str:
    """Return a page with the output that its experiments, and the walkthrough, print now."""
    new = [(output, run(code.body)) for code, output in experiments(page)]
    shown = [block for block in blocks(page) if block.title == WALKTHROUGH]
    printed = sections(walkthrough()) if shown else {}
    new += [(block, printed[NUMBER.sub("#", block.name)]) for block in shown]
    for block, text in sorted(new, key=lambda pair: -pair[0].start):
        page = page[: block.start] + text + page[block.end :]
    return page


def walkthrough() -> str:
    from examples import walkthrough

    with contextlib.redirect_stdout(io.StringIO()) as out:
        walkthrough.main([])
    return out.getvalue()


if __name__ == "__main__":
    for path in (ROOT / f"docs/{name}.md" for name in ("grpo", "choices", "walkthrough")):
        path.write_text(updated(path.read_text(), walkthrough))
    runpy.run_path(str(ROOT / "docs/notebooks.py"), run_name="__main__")
