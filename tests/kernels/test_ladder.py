"""examples/ladder.py counts what the rungs do, and kernels/README.md shows their code.

Read next: examples/ladder.py.
"""

import re
import textwrap
from pathlib import Path

import pytest

from examples import ladder
from tests.conftest import CUDA

ROOT = Path(__file__).resolve().parents[2]
# The kernels choose the interpreter when they are defined, so on a GPU they cannot be counted here.
interpreted = pytest.mark.skipif(CUDA, reason="counts what Triton's interpreter does")


@interpreted
def test_each_rung_has_its_bytes_and_merges():
    logits = ladder.ROWS * ladder.VOCAB
    textbook, lanes, rows = (ladder.RUNGS[i].run().work for i in (1, 2, 3))
    blocks = -(-ladder.VOCAB // 1024)
    each = {
        work.name: (round(work.moved / logits), work.merges / ladder.ROWS)
        for work in [*textbook, *rows]
    }
    assert each == {"forward": (2, 3 * blocks), "forward and gradient": (4, 3)}
    assert [(round(w.moved / logits), w.merges / ladder.ROWS) for w in lanes] == [(2, 3), (4, 0)]
    # the second pass, and the target's logit, which is also read before the first
    assert rows[0].cached == 2 * logits + 2 * ladder.ROWS


@interpreted
@pytest.mark.parametrize("number", range(5))
def test_each_rung_is_right(number):
    out = "\n".join(ladder.lines(number))
    assert f"rung {number}, {ladder.RUNGS[number].file}" in out
    assert "largest error against float64: log-prob" in out
    if number == 4:
        assert "  3 products of 2·N·V·D FLOP" in out
        assert "second there are 4" in out
        assert f"{ladder.CHUNK * ladder.WORDS:,} numbers, a chunk of logits" in out


def test_the_readme_shows_the_code_of_each_rung():
    text = (ROOT / "kernels/README.md").read_text()
    section = text.split("## The loop of each rung\n")[1].split("\n## ")[0]
    file, shown = ROOT, []
    for name, block in re.findall(
        r"\*\*Rung \d, `([\w./]+\.py)`|```python\n(.*?)```", section, re.DOTALL
    ):
        file = (ROOT / "kernels" / name).resolve() if name else file
        if block:
            lines = file.read_text().splitlines()
            count = len(block.splitlines())
            places = (lines[i : i + count] for i in range(len(lines)))
            assert any(textwrap.dedent("\n".join(p)) == block.rstrip("\n") for p in places), block
            shown.append(file)
    assert {*shown} == {ROOT / rung.file for rung in ladder.RUNGS}
