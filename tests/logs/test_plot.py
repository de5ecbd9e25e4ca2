"""Plots of real logs, and user errors for files that are not a log.

Read next: test_console.py.
"""

import json
from pathlib import Path

import pytest

from nanogrpo.extras import commands

image = pytest.importorskip("matplotlib.image")  # in an extra: the package itself runs without it


def row(step: int, **values) -> str:
    return json.dumps({"step": step, "reward": 0.5, "entropy": 1.0, **values}) + "\n"


def titles(picture: str) -> set[str]:
    text = Path(picture).read_text()
    return {part.partition(" -->")[0] for part in text.split("<!-- ")[1:]}


def test_runs_become_one_picture_with_their_curves_and_held_out_values(rows_of, tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text(f'{{"run": {{}}}}\n{row(0)}{row(1, kl=0.0)}{{"ste')
    small, real, out = str(tmp_path), str(tmp_path / "real"), str(tmp_path / "both.svg")
    options = "--max-steps 2 --save-steps 0 --data arithmetic --reward-funcs accuracy format"
    options += " --eval-steps 1 --eval-samples 2"
    rows_of(options, folder="real")
    capsys.readouterr()
    assert commands.main(["plot", small]) == 0
    assert commands.main(["plot", small, real, "--out", out]) == 0
    assert capsys.readouterr().out.splitlines() == [f"{small}/curve.png", out]
    drawn = image.imread(tmp_path / "curve.png")
    assert (drawn[..., :3].min(axis=2) < 0.9).mean() > 0.005
    shown = titles(out)
    assert {"reward", "entropy", "completions/mean_length", small, real} <= shown
    assert "clip_ratio/region_mean" not in shown
    few = "gr*d_norm", "eval/*"
    assert commands.main(["plot", real, "--metrics", *few, "--out", out]) == 0
    assert {"grad_norm", "eval/mean_length"} <= titles(out)
    assert "entropy" not in titles(out)


@pytest.mark.parametrize(
    ("content", "more", "message"),
    [
        (b"", [], "no metric matches reward rewards/*/mean"),
        (row(0).encode(), ["--metrics", "rewad"], "no metric matches rewad: the log has ['ent"),
        (b"[1]\n" + row(0).encode(), [], "metrics.jsonl:1 is not a record of a run"),
        (b'{"step": "a"}', [], "metrics.jsonl:1 is not a record of a run"),
        (b'{"run": []}', [], "metrics.jsonl:1 is not a record of a run"),
        (row(0).encode(), ["--out", "nowhere/a.png"], "--out nowhere/a.png cannot be written"),
        (None, [], "metrics.jsonl cannot be read (No such file or directory): give the output"),
    ],
)
def test_what_cannot_be_plotted_is_one_sentence(tmp_path, capsys, content, more, message):
    if content is not None:
        (tmp_path / "metrics.jsonl").write_bytes(content)
    assert commands.main(["plot", str(tmp_path), *more]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert message in line
    assert not (tmp_path / "curve.png").exists()
