"""examples/ladder.py counts what the rungs do, kernels/README.md shows their code, and the pictures
can be drawn.

Read next: examples/ladder.py.
"""

import re
import textwrap
from pathlib import Path

import pytest
import torch

from examples import ladder, ladder_pictures
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
    assert f"rung {number}, kernels/{ladder.RUNGS[number].file}" in out
    assert "largest error against float64: log-prob" in out
    if number == 4:
        assert "  3 products of 2·N·V·D FLOP" in out
        assert "second there are 4" in out
        assert f"{ladder.CHUNK * ladder.WORDS:,} numbers, a chunk of logits" in out


@interpreted
def test_a_wrong_rung_and_a_wrong_number_end_with_a_sentence(monkeypatch, capsys):
    assert ladder.main(["7"]) == 2
    assert capsys.readouterr().err == "error: there is no rung 7: choose from 0 to 4.\n"
    wrong = ladder.Result({"entropy": torch.zeros(ladder.ROWS)}, [], [])
    rung = ladder.RUNGS[1]._replace(run=lambda: wrong)
    monkeypatch.setattr(ladder, "RUNGS", [ladder.RUNGS[0], rung])
    assert ladder.main(["1"]) == 2
    assert capsys.readouterr().err.startswith("error: rung 1 is wrong: its entropy is off by ")


def test_fewer_bytes_are_further_right_on_the_roofline(tmp_path):
    found = {
        0: (0.06, 2.5e11),
        1: (2.5, 1.1e13),
        2: (1.8, 7.9e12),
        3: (2.75, 1.2e13),
        4: (500, 8e14),
    }
    text = ladder.drawn(found)
    digits = {mark: line.index(mark) for line in text[1:-2] for mark in "01234" if mark in line}
    assert sorted(digits, key=digits.get) == ["0", "2", "1", "3", "4"]
    ladder.draw_roofline(found, tmp_path / "roof.png")
    assert (tmp_path / "roof.png").stat().st_size > 5000
    with pytest.raises(ladder.UserError, match=r"--out .*roof\.nothing cannot be written"):
        ladder.draw_roofline(found, tmp_path / "roof.nothing")


def test_the_pictures_of_the_readme_can_be_drawn(tmp_path, capsys):
    assert ladder_pictures.main([str(tmp_path)]) == 0
    names = {p.name for p in tmp_path.iterdir()}
    text = (ROOT / "kernels/README.md").read_text()
    shown = set(re.findall(r"\(\.\./docs/img/([\w.]+)\)", text))
    assert names | {"roofline.png"} == shown
    assert all((ROOT / "docs/img" / name).is_file() for name in shown)
    assert ladder_pictures.main([str(tmp_path / "nowhere")]) == 2
    assert "nowhere cannot be written" in capsys.readouterr().err


def test_the_readme_shows_the_code_of_each_rung():
    text = (ROOT / "kernels/README.md").read_text()
    section = text.split("## The loop of each rung\n")[1].split("\n## ")[0]
    file, shown = "", []
    for name, block in re.findall(
        r"\*\*Rung \d, `(\w+\.py)`|```python\n(.*?)```", section, re.DOTALL
    ):
        file = name or file
        if block:
            lines = (ROOT / "kernels" / file).read_text().splitlines()
            count = len(block.splitlines())
            places = (lines[i : i + count] for i in range(len(lines)))
            assert any(textwrap.dedent("\n".join(p)) == block.rstrip("\n") for p in places), block
            shown.append(file)
    assert sorted({*shown}) == sorted(rung.file for rung in ladder.RUNGS)
