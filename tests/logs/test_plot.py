"""Curves of runs: a real picture of real logs, and one sentence for what is no log.

Read next: test_metrics.py, whose log this reads.
"""

import json

import pytest

import train
from nanogrpo.logs import plot
from tests.conftest import arguments

image = pytest.importorskip("matplotlib.image")  # in an extra: the package itself runs without it

PNG = b"\x89PNG\r\n\x1a\n"
HEAD = '{"run": {"model": "-"}}\n'


def row(step: int, **values) -> str:
    return json.dumps({"step": step, "reward": 0.5, "entropy": 1.0, **values}) + "\n"


@pytest.fixture(scope="module")
def runs(tiny_base, files, tmp_path_factory):
    """Two runs of two steps, one of them with evaluations and a reference."""
    folder = tmp_path_factory.mktemp("plot")
    one, other = folder / "one", folder / "other"
    options = ["--max-steps", "2", "--save-steps", "0"]
    assert train.main(arguments(tiny_base, files, one, *options)) == 0
    evaluated = [
        "--data",
        "arithmetic",
        "--reward-funcs",
        "accuracy",
        "--eval-steps",
        "1",
        "--eval-samples",
        "2",
        "--beta",
        "0.1",
    ]
    assert train.main(arguments(tiny_base, files, other, *options, *evaluated)) == 0
    return one, other


def told(capsys) -> str:
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("error: ")
    return lines[0]


def test_two_runs_become_one_picture(runs, tmp_path, capsys):
    one, other = runs
    assert plot.main([str(one)]) == 0
    assert plot.main([str(one), str(other), "--out", str(tmp_path / "both.png")]) == 0
    assert capsys.readouterr().out.splitlines() == [
        str(one / "curve.png"),
        str(tmp_path / "both.png"),
    ]
    alone, both = image.imread(one / "curve.png"), image.imread(tmp_path / "both.png")
    for picture in (alone, both):
        assert (picture[..., :3].min(axis=2) < 0.9).mean() > 0.005  # something is drawn
    # three rows of panels: held-out accuracy and KL came with the second run
    assert both.shape[0] > alone.shape[0]
    assert plot.main([str(one / "metrics.jsonl"), "--out", str(tmp_path / "one.svg")]) == 0
    assert "<svg" in (tmp_path / "one.svg").read_text()


def test_series_of_real_rows(runs):
    rows = plot.read(runs[1])
    steps, rewards = plot.series(rows, "reward")
    assert steps == [1, 2]
    assert all(0 <= r <= 1 for r in rewards)
    assert plot.series(rows, "eval/rewards/accuracy_reward")[0] == [0, 1, 2]
    assert plot.series(plot.read(runs[0]), "kl") == ([], [])


def test_where_a_step_stands_twice_the_later_line_counts(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        HEAD
        + row(0, reward=0.1)
        + row(1, reward=0.2)
        + HEAD
        + row(1, reward=0.3)
        + row(0, reward=0)
    )
    assert plot.series(plot.read(tmp_path), "reward") == ([1, 2], [0, 0.3])


def test_runs_are_told_apart_by_as_much_as_they_need(tmp_path):
    for name in ("a/run", "b/run", "c"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "metrics.jsonl").write_text(HEAD + row(0))
    one, other, third = (
        tmp_path / "a" / "run",
        tmp_path / "b" / "run" / "metrics.jsonl",
        tmp_path / "c",
    )
    assert plot.labels([one, third]) == ["run", "c"]
    assert plot.labels([one, other]) == ["a/run", "b/run"]
    assert plot.labels([one, one]) == ["run", "run"]
    assert plot.main([str(one), str(other), str(third), "--out", str(tmp_path / "c.svg")]) == 0
    drawn = (tmp_path / "c.svg").read_text()
    assert all(f"<!-- {label} -->" in drawn for label in ("a/run", "b/run", "c"))  # the legend


def test_the_log_of_a_run_under_way_is_drawn_without_its_half_written_line(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(HEAD + row(0) + row(1) + row(2)[:-20])
    assert [r["step"] for r in plot.read(tmp_path)] == [0, 1]
    assert plot.main([str(tmp_path)]) == 0
    assert (tmp_path / "curve.png").read_bytes().startswith(PNG)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "holds no step to draw yet"),
        (HEAD.encode(), "holds no step to draw yet"),
        (HEAD.encode() + b'{"step": 0, "rew', "holds no step to draw yet"),
        (b'{"step": 0, "reward": "high", "entropy": null}\n', "holds no step to draw yet"),
        (b'{"step": "0", "reward": 1}\n', "holds no step to draw yet"),
        (b"[1]\n", ":1 holds a list and no metrics"),
        (row(0).encode() + b"7\n", ":2 holds a int and no metrics"),
        (b'{"step": \n' + row(1).encode(), ":1 is not JSON"),
        (b"\xff\xfe\n" + row(1).encode(), ":1 is not JSON"),
        (b"[" * 100_000 + b"\n" + row(1).encode(), ":1 is not JSON"),
    ],
)
def test_what_is_no_log_is_one_sentence_and_no_picture(tmp_path, capsys, content, sentence):
    (tmp_path / "metrics.jsonl").write_bytes(content)
    assert plot.main([str(tmp_path)]) == 2
    assert f"{tmp_path}/metrics.jsonl" + " " * (sentence[0] != ":") + sentence in told(capsys)
    assert not (tmp_path / "curve.png").exists()


def test_places_that_do_not_serve(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text(HEAD + row(0))
    for out, sentence in [
        (
            "nowhere/a.png",
            "cannot be written (No such file or directory): name a file in a folder that exists",
        ),
        ("a.docx", "the suffix '.docx' names no format of pictures; use one of "),
        ("a", "the suffix '' names no format of pictures; use one of "),
    ]:
        assert plot.main([str(tmp_path), "--out", str(tmp_path / out)]) == 2
        assert f"--out {tmp_path / out}" in (line := told(capsys))
        assert sentence in line
    assert plot.main([str(tmp_path / "gone")]) == 2
    assert "gone cannot be read (No such file or directory): name the output folder" in told(capsys)
    assert plot.main([str(tmp_path), str(tmp_path / "gone")]) == 2
    assert "gone cannot be read" in told(capsys)
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]
