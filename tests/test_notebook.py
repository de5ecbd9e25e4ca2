"""The notebook runs from top to bottom, and its model learns. The chapters of the course run as
notebooks, too, and print the output that they store.
"""

import re
import runpy
from pathlib import Path

import pytest

from tests import docs

nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
NOTEBOOK = Path(__file__).parents[1] / "examples/notebook.ipynb"


def execute(notebook, folder: Path) -> None:
    resources = {"metadata": {"path": str(folder)}}
    nbclient.NotebookClient(notebook, timeout=250, resources=resources).execute()


@pytest.mark.slow
def test_the_notebook_runs_and_learns(tmp_path):
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    execute(notebook, tmp_path)
    first, last = map(float, re.search(r"held-out reward (\S+) → (\S+),", str(notebook)).groups())
    assert last > first + 0.1
    assert (tmp_path / "runs/notebook/checkpoint-20/model.safetensors").is_file()


BOOKS = runpy.run_path(str(NOTEBOOK.parents[1] / "docs/notebooks.py"))["written"]()


@pytest.mark.parametrize("path", BOOKS, ids=lambda path: path.stem)
def test_the_chapters_of_the_course_run_as_notebooks(path):
    assert path.read_text() == BOOKS[path], "run python -m tests.docs"
    notebook = nbformat.reads(BOOKS[path], as_version=4)
    nbformat.validate(notebook)
    execute(notebook, path.parent)
    stored = nbformat.reads(BOOKS[path], as_version=4)
    pairs = [(printed(a), printed(b)) for a, b in zip(notebook.cells, stored.cells)]
    assert all(docs.agree(now, before) for now, before in pairs)
    assert sum(bool(before) for _, before in pairs) >= 7


def printed(cell):
    return "".join(o.get("text", "") for o in cell.get("outputs", []))
