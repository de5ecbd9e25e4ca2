"""Write the chapters of the course as notebooks: docs/grpo.md, docs/choices.md and
docs/walkthrough.md.

    python docs/notebooks.py        # writes examples/grpo.ipynb and the others

In: the pages, which hold the text and the output once. Out: the same text, in which programs are
cells to run, with their output. In the walkthrough, each section runs the functions of
examples/walkthrough.py with the same number. tests/test_notebook.py runs all of them, and checks
that they are up to date. Read next: ../tests/docs.py (how the pages are checked).
"""

from __future__ import annotations

import ast
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CHAPTERS = "grpo", "choices", "walkthrough"
HERE = "import sys\n\nsys.path.insert(0, '..')  # the repository\n"
BLOCK = re.compile(r'^```(\w+)(?: title="([^"\n]*)")?\n(.*?)^```\n', re.DOTALL | re.MULTILINE)


def cell(kind: str, text: str, printed: str = "") -> dict:
    out: dict = {"cell_type": kind, "metadata": {}, "source": lines(text.strip("\n"))}
    if kind == "markdown":
        return out
    stream = {"output_type": "stream", "name": "stdout", "text": lines(printed)}
    return out | {"execution_count": None, "outputs": [stream] if printed else []}


def lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def linked(text: str) -> str:
    """Let links and pictures of a page in docs/ lead to the same file from examples/."""
    text = re.sub(r"^Open this page as a notebook.*\n\n", "", text, flags=re.MULTILINE)
    return re.sub(r"\]\((?!\.\./|https?:|#)", "](../docs/", text)


def notebook(cells: list[dict]) -> dict:
    for i, one in enumerate(cells):
        one["id"] = f"cell-{i}"
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {
        "cells": cells,
        "metadata": {"kernelspec": kernel, "language_info": {"name": "python"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }


def course(page: str) -> dict:
    """Return docs/grpo.md as a notebook: its experiments are code cells."""
    cells, last, output = [], 0, False
    for block in BLOCK.finditer(page):
        language, title, body = block.groups()
        runs = language == "python" and not title
        if output:  # the block is what the last cell prints
            cells[-1] = cell("code", "".join(cells[-1]["source"]), body)
            last = block.end()
        if runs:
            before = page[last : block.start()]
            cells += [cell("markdown", linked(before))] if before.strip() else []
            cells += [cell("code", body)]
            last = block.end()
        output = runs
    return notebook([*cells, cell("markdown", linked(page[last:]))])


def steps(program: str) -> dict[str, str]:
    """Return the statements of `main` by the number of the section that defines their function."""
    parts = re.split(r"^# --- (\d+)\..*$", program, flags=re.MULTILINE)
    section = {
        name: number
        for number, part in zip(parts[1::2], parts[2::2])
        for name in re.findall(r"^def (\w+)", part, re.MULTILINE)
    }
    (main,) = (n for n in ast.parse(program).body if getattr(n, "name", "") == "main")
    found: dict[str, str] = {}
    for statement in main.body:
        value = getattr(statement, "value", None)
        if isinstance(value, ast.Call) and (number := section.get(ast.unparse(value.func))):
            found[number] = found.get(number, "") + ast.unparse(statement) + "\n"
    return found


def walkthrough(page: str, program: str) -> dict:
    """Return docs/walkthrough.md as a notebook: a section ends with a cell that prints its
    numbers.
    """
    first, *sections = re.split(r"^(?=## )", page, flags=re.MULTILINE)
    calls = steps(program)
    names = re.findall(r"(\w+)\(", "".join(calls.values()))
    begin = HERE + (
        f"from examples.walkthrough import {', '.join(['BASE', *names])}\n"
        "from nanogrpo.model import checkpoint\n"
        "from nanogrpo.model.tokenizer import Tokenizer\n\n"
        "tokenizer, model = Tokenizer(BASE), checkpoint.load_model(BASE)\n"
    )
    cells = [cell("markdown", linked(first)), cell("code", begin)]
    for section in sections:
        printed = [m[3] for m in BLOCK.finditer(section) if m[2] and m[1] == "text"]
        shown = BLOCK.sub(lambda m: "" if m[2] and m[1] == "text" else m[0], section)
        cells.append(cell("markdown", linked(re.sub(r"\n{3,}", "\n\n", shown))))
        number = re.match(r"## (\d+)", section)
        if number and number[1] in calls:
            cells.append(cell("code", calls.pop(number[1]), "\n".join(printed)))
    if calls:
        sys.exit(f"docs/walkthrough.md has no section {min(calls)}.")
    return notebook(cells)


def written() -> dict[Path, str]:
    """Return each notebook's path and text."""
    pages = {name: (ROOT / f"docs/{name}.md").read_text() for name in CHAPTERS}
    program = (ROOT / "examples/walkthrough.py").read_text()
    books = {name: course(page) for name, page in pages.items()}
    books["walkthrough"] = walkthrough(pages["walkthrough"], program)
    return {
        ROOT / f"examples/{name}.ipynb": json.dumps(book, indent=1, ensure_ascii=False) + "\n"
        for name, book in books.items()
    }


if __name__ == "__main__":
    for path, text in written().items():
        path.write_text(text)
