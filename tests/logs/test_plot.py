"""Plots of real logs, and user errors for files that are not a log.

Read next: test_console.py.
"""

import json
import math
import re
import statistics

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
    """A small log, and the log of a real run with evaluations and a reference."""
    folder = tmp_path_factory.mktemp("plot")
    small, real = folder / "small", folder / "real"
    small.mkdir()
    (small / "metrics.jsonl").write_text(HEAD + row(0) + row(1, reward=0.7))
    options = "--max-steps 2 --save-steps 0 --data arithmetic --reward-funcs accuracy"
    options += " --eval-steps 1 --eval-samples 2 --beta 0.1"
    assert train.main(arguments(tiny_base, files, real, *options.split())) == 0
    return small, real


def error(capsys) -> str:
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


def test_a_series_is_read_from_a_real_log(runs):
    rows = plot.read(runs[1])
    steps, rewards = plot.series(rows, "reward")
    assert steps == [1, 2]
    assert all(0 <= r <= 1 for r in rewards)
    assert plot.series(rows, "eval/rewards/accuracy_reward")[0] == [0, 1, 2]
    assert plot.series(plot.read(runs[0]), "kl") == ([], [])


def panels(*runs) -> dict[str, list[str]]:
    return plot.default_panels([plot.read(run) for run in runs])


def test_panels_appear_if_they_say_something(runs, tmp_path):
    real = panels(runs[1])
    assert real["reward"] == ["reward", "eval/reward"]
    # one function: its curve is the reward's
    assert "accuracy_reward" not in real
    assert real["KL to the reference (nats per token)"] == ["kl"]
    assert {"entropy", "grad_norm", "frac_reward_zero_std"} <= {
        n for names in real.values() for n in names
    }
    # a gap of 1e-7 is rounding, and on policy nothing is clipped
    assert plot.GAP in {name for row in plot.read(runs[1]) for name in row}
    assert not {plot.GAP, "clip_ratio/region_mean"} & {n for names in real.values() for n in names}
    two = {"rewards/a_reward/mean": 0.5, "rewards/b/mean": 0.5, "rewards/failures": 0.0}
    held_out = {"eval/after": 1, "eval/rewards/a_reward": 0.5, "eval/rewards/failures": 0.0}
    odd = {plot.GAP: 0.02, "clip_ratio/region_mean": 0.1, "completions/clipped_ratio": 0.25}
    (tmp_path / "metrics.jsonl").write_text(row(0, **two, **odd) + row(0, **held_out))
    shown = panels(tmp_path)
    assert shown["a_reward"] == ["rewards/a_reward/mean", "eval/rewards/a_reward"]
    assert shown["b"] == ["rewards/b/mean"]
    assert [name for names in shown.values() for name in names if name in odd] == [
        *("completions/clipped_ratio", "clip_ratio/region_mean", plot.GAP)
    ]
    assert len(panels(tmp_path, runs[0], runs[1])) > len(shown)


def test_the_sum_is_left_out_if_only_one_function_changes(tmp_path):
    def shown(format_reward: float) -> list[str]:
        text = ""
        for step, accuracy in enumerate((0.1, 0.4, 0.8)):
            second = format_reward if step == 1 else 1.0
            both = {"rewards/a/mean": accuracy, "rewards/b/mean": second}
            text += row(step, **both | {"reward": accuracy + second})
            held_out = {"eval/rewards/a": accuracy, "eval/reward": accuracy + 1.0}
            text += row(step, **{"eval/after": step, **held_out})
        (tmp_path / "metrics.jsonl").write_text(text)
        return [*panels(tmp_path)]

    assert shown(1.0)[:2] == shown(0.99)[:2] == ["a", "b"]
    assert shown(0.5)[:3] == ["reward", "a", "b"]


def test_metrics_are_chosen_by_name_or_pattern(runs, tmp_path, capsys):
    def titles(*options: str) -> list[str]:
        out = tmp_path / "curve.svg"
        assert plot.main([str(runs[1]), "--out", str(out), "--metrics", *options]) == 0
        return [x for x in re.findall("<!-- (.*?) -->", out.read_text()) if "/" in x or "_" in x]

    assert titles("grad_norm", "eval/rewards/*") == ["grad_norm", "eval/rewards/accuracy_reward"]
    assert titles("rewards/*") == ["rewards/accuracy_reward/mean", "rewards/accuracy_reward/std"]
    capsys.readouterr()
    for name, near in (("grad_nrm", "grad_norm"), ("my_metric", "clip_ratio/high_max, ")):
        assert plot.main([str(runs[1]), "--metrics", name]) == 2
        assert f"--metrics {name}: no such metric in these runs; choose from {near}" in error(
            capsys
        )
    assert plot.main([str(runs[1]), "--smooth", "-1"]) == 2
    assert error(capsys) == "error: --smooth is -1: give a number of steps."


METRIC = """
def mine(completions, log_metric, **kwargs):
    log_metric("words", sum(map(len, completions)))
    return [float(len(c)) for c in completions]
"""


def test_a_metric_of_a_reward_function_can_be_plotted(tiny_base, files, tmp_path):
    (tmp_path / "reward.py").write_text(METRIC)
    options = ["--reward-funcs", f"{tmp_path / 'reward.py'}:mine", "--max-steps", "2"]
    assert train.main(arguments(tiny_base, files, tmp_path / "run", *options)) == 0
    out = tmp_path / "words.svg"
    assert plot.main([str(tmp_path / "run"), "--metrics", "words", "--out", str(out)]) == 0
    assert "<!-- words -->" in out.read_text()


def test_a_noisy_curve_is_drawn_as_a_moving_average():
    noise = [math.sin(12.9 * i) for i in range(100)]
    for window in (1, 3, 10, 11, 300):
        half = window // 2
        expected = [statistics.fmean(noise[max(0, i - half) : i + half + 1]) for i in range(100)]
        assert plot.smoothed(noise, window) == pytest.approx(expected)
    assert plot.smoothed([2.0] * 5, 3).tolist() == [2.0] * 5


def test_the_last_record_of_a_step_counts(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        HEAD
        + row(0, reward=0.1)
        + row(1, reward=0.2)
        + HEAD
        + row(1, reward=0.3)
        + row(0, reward=0)
    )
    assert plot.series(plot.read(tmp_path), "reward") == ([1, 2], [0, 0.3])


def test_the_legend_names_each_run_by_its_path(tmp_path):
    runs = [tmp_path / "a" / "run", tmp_path / "b" / "run" / "metrics.jsonl", tmp_path / "c"]
    for run in runs:
        folder = run.parent if run.suffix else run
        folder.mkdir(parents=True)
        (folder / "metrics.jsonl").write_text(HEAD + row(0))
    assert plot.main([*map(str, runs), "--out", str(tmp_path / "c.svg")]) == 0
    drawn = (tmp_path / "c.svg").read_text()
    assert all(f"<!-- {run} -->" in drawn for run in runs)


def test_a_half_written_last_line_is_skipped(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(HEAD + row(0) + row(1) + row(2)[:-20])
    assert [r["step"] for r in plot.read(tmp_path)] == [0, 1]
    assert plot.main([str(tmp_path)]) == 0
    assert (tmp_path / "curve.png").read_bytes().startswith(PNG)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", ": there is no step to plot yet"),
        (HEAD.encode(), ": there is no step to plot yet"),
        (HEAD.encode() + b'{"step": 0, "rew', ": there is no step to plot yet"),
        (b'{"step": 0, "reward": "high", "entropy": null}\n', ": there is no step to plot yet"),
        (b'{"step": "0", "reward": 1}\n', "/metrics.jsonl:1 is not a record of a log"),
        (b"[1]\n", "/metrics.jsonl:1 is not a record of a log"),
        (row(0).encode() + b"7\n", "/metrics.jsonl:2 is not a record of a log"),
        (b'{"step": \n' + row(1).encode(), "/metrics.jsonl:1 is not a record of a log"),
        (b"\xff\xfe\n" + row(1).encode(), "/metrics.jsonl:1 is not a record of a log"),
        (b"[" * 100_000 + b"\n" + row(1).encode(), "/metrics.jsonl:1 is not a record of a log"),
    ],
)
def test_a_file_that_is_not_a_log_gives_an_error_and_no_picture(tmp_path, capsys, content, message):
    (tmp_path / "metrics.jsonl").write_bytes(content)
    assert plot.main([str(tmp_path)]) == 2
    assert f"{tmp_path}{message}" in error(capsys)
    assert not (tmp_path / "curve.png").exists()


def test_files_that_cannot_be_read_or_written_give_an_error(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text(HEAD + row(0))
    for out, message in [
        ("nowhere/a.png", "cannot be written: [Errno 2] No such file or directory"),
        ("a.docx", "cannot be written: Format 'docx' is not supported (supported formats: "),
        ("a", "cannot be written: Format '' is not supported (supported formats: "),
    ]:
        assert plot.main([str(tmp_path), "--out", str(tmp_path / out)]) == 2
        assert f"--out {tmp_path / out} {message}" in error(capsys)
    assert plot.main([str(tmp_path / "gone")]) == 2
    assert "gone cannot be read (No such file or directory): give the output folder" in error(
        capsys
    )
    assert plot.main([str(tmp_path), str(tmp_path / "gone")]) == 2
    assert "gone cannot be read" in error(capsys)
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_values_that_cannot_be_drawn_are_left_out(tmp_path):
    odd = [float("nan"), float("inf"), -float("inf"), 10**400, "x", None, [1.0]]
    lines = [row(i, reward=value) for i, value in enumerate(odd)]
    log = tmp_path / "metrics.jsonl"
    log.write_text(HEAD + row(0) + "".join(lines) + row(10**400) + row(7))
    found = plot.read(tmp_path)
    assert [r["step"] for r in found] == [0, *range(7), 7]
    assert [r["reward"] for r in found if "reward" in r] == [0.5, 0.5]
    plot.draw([tmp_path], tmp_path / "curve.png")
    assert (image.imread(tmp_path / "curve.png")[..., :3].min(axis=2) < 0.9).mean() > 0.005
