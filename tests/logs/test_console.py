"""The log survives a kill and a resume, and says on which machine a run was.

Read before: test_metrics.py. Read next: test_completions.py, test_report.py.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch

from nanogrpo import Config
from nanogrpo.distributed.world import World
from nanogrpo.feature import Feature
from nanogrpo.logs import console, metrics
from nanogrpo.logs.console import Log, provenance
from tests.conftest import SOLO, lines, refused
from tests.logs.conftest import sample


def config(folder, **options) -> Config:
    return Config(output_dir=str(folder), max_steps=9, **options)


def opened(folder, start: int = 0, **options) -> Log:
    return Log(config(folder, **options), SOLO, start)


def write(log: Log, steps: range, record: dict | None = None, **logged: float) -> None:
    samples = [sample(4), sample(2, prompt=5)]
    for step in steps:
        clock = metrics.Clock(SOLO.device)
        with clock("sample"):
            pass
        given = record or {"reward": float(step)}
        log.step(step, metrics.facts(samples, SOLO), given, clock, logged)


def evaluate(log: Log, done: int, *samples, **logged: float) -> None:
    samples = samples or (sample(3, a=1.0),)
    log.evaluation(done, metrics.facts(samples, SOLO), logged)


def test_the_head_holds_options_versions_and_commit(tmp_path):
    write(opened(tmp_path, beta=0.25), range(1))
    head, step = lines(tmp_path)
    assert head["run"]["beta"] == 0.25
    assert head["run"]["max_steps"] == 9
    assert head["versions"]["torch"] == torch.__version__
    assert len(head["commit"]) == 40 or head["commit"] == "unknown"
    assert step["step"] == 0
    assert step["num_tokens"] == 4 + 3 + 2 + 5
    assert step["step_time"] == step["time/sample"]


def test_the_device_is_that_of_the_run(tmp_path, monkeypatch):
    """A machine may have a GPU that the run does not use."""
    calls = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {device.index}")
    monkeypatch.setattr(torch.cuda, "synchronize", calls.append)
    gpu = World(1, 2, torch.device("cuda", 1))
    found = []
    for world in (SOLO, gpu):
        with metrics.Clock(world.device)("train"):
            pass
        found.append(provenance(config(tmp_path), world)["device"])
    assert "GPU" not in found[0]
    assert (found[1], calls) == ("GPU 1", [gpu.device])


def test_the_commit_is_unknown_without_git_and_not_that_of_an_enclosing_repository(
    tmp_path, monkeypatch
):
    def git(*words: str) -> str:
        who = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
        return subprocess.run(
            ["git", *who, *words], cwd=tmp_path, capture_output=True, text=True, check=True
        ).stdout.strip()

    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "somebody's project")
    (tmp_path / "site-packages").mkdir()
    monkeypatch.setattr(console, "ROOT", (tmp_path / "site-packages").resolve())
    assert console.commit() == "unknown"
    monkeypatch.setattr(console, "ROOT", tmp_path.resolve())
    assert console.commit() == git("rev-parse", "HEAD")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert console.commit() == "unknown"


class Reader(Feature):
    def __init__(self):
        self.found = []

    def record(self, done, record):
        self.found.append((done, json.loads(json.dumps(record))))


def test_a_resumed_run_logs_no_step_twice_and_drops_a_half_written_line(tmp_path, monkeypatch):
    log = opened(tmp_path)
    evaluate(log, 0)
    write(log, range(2))
    evaluate(log, 2)
    write(log, range(2, 5))
    with (tmp_path / "metrics.jsonl").open("a") as f:
        f.write('{"step": 5, "rew')  # killed here
    reader, flushed = Reader(), []
    monkeypatch.setattr(os, "fsync", lambda file: flushed.append(Path(file.name).read_bytes()))
    log = Log(config(tmp_path), SOLO, start=3, features=[reader])  # the checkpoint had three steps
    write(log, range(3, 9))
    found = lines(tmp_path)
    steps = [row for row in found if "reward" in row]
    assert [row["step"] for row in steps] == list(range(9))
    # The count of tokens continues.
    assert [row["num_tokens"] for row in steps] == [14 * (i + 1) for i in range(9)]
    assert [row["eval/after"] for row in found if "eval/after" in row] == [0, 2]
    assert sum("run" in row for row in found) == 2
    assert not list(tmp_path.glob("*.tmp"))
    # the rewritten log was on the disk before it got its name
    assert b'"step": 2' in flushed[0]
    assert [done for done, _ in reader.found] == [3, *range(4, 10)]
    assert [record for _, record in reader.found] == found[-7:]


def test_a_resumed_run_reports_the_steps_that_its_log_lacks(tmp_path, caplog):
    """As after a power cut, or if somebody has deleted the log."""
    log = opened(tmp_path)
    write(log, [0, 2, 3])
    evaluate(log, 2)  # after step 1, but not the record of step 1
    opened(tmp_path, start=6)
    log.path.unlink()
    opened(tmp_path, start=2)
    assert caplog.messages == [
        f"{log.path} has no record of 3 finished steps, beginning with step 1",
        f"{log.path} has no record of 2 finished steps, beginning with step 0",
    ]


def test_a_run_that_starts_over_keeps_the_old_log_under_another_name(tmp_path, caplog):
    old = []
    for number in (1, 2, 3):
        log = opened(tmp_path)
        evaluate(log, 0)
        write(log, range(number))
        assert [row.get("num_tokens") for row in lines(tmp_path)[2:]] == [14, 28, 42][:number]
        with log.path.open("ab") as f:  # even a damaged log is only renamed
            f.write(b'\xff\n{"step": 7}\n{"st')
        old.append(log.path.read_bytes())
    names = ["metrics-1.jsonl", "metrics-2.jsonl", "metrics.jsonl"]
    assert sorted(p.name for p in tmp_path.iterdir()) == names
    assert [(tmp_path / name).read_bytes() for name in names] == old
    message = f"nothing to resume in {tmp_path}: starting over, the old log is {tmp_path}"
    assert caplog.messages == [f"{message}/{name}" for name in names[:2]]


def test_a_log_without_a_step_is_continued(tmp_path, caplog):
    opened(tmp_path)  # and then the run ended with an error
    with (tmp_path / "metrics.jsonl").open("a") as f:
        f.write('{"run": {"model')
    write(opened(tmp_path), range(1))
    assert ["run" in row for row in lines(tmp_path)] == [True, True, False]
    assert not caplog.records


@pytest.mark.parametrize("line", [b'{"step": 1, "rew', b'{"step": 1, "a": "\xff"}'])
def test_a_damaged_line_is_reported_and_the_lines_after_it_are_kept(tmp_path, line):
    write(opened(tmp_path), range(4))
    path = tmp_path / "metrics.jsonl"
    good = path.read_bytes().splitlines()
    good[2] = line  # in the middle, so it is not a half-written end
    path.write_bytes(b"\n".join(good) + b"\n")
    with refused(r"metrics\.jsonl:3 is not a record of a run: fix or remove this line"):
        opened(tmp_path, start=4)
    assert path.read_bytes().splitlines() == good


def test_an_evaluation_leaves_out_missing_rewards(tmp_path, capsys):
    log = opened(tmp_path)
    samples = [sample(3, a=1.0, b=None), sample(5, a=None, b=None), sample(4, a=0.0, b=None)]
    evaluate(log, 4, *samples)
    assert lines(tmp_path)[-1] == {
        "step": 3,
        "eval/after": 4,
        "eval/rewards/a": 0.5,
        "eval/reward": 0.5,
        "eval/mean_length": 4,
    }
    evaluate(log, 5, sample(3, **{"a/b": 1.0, "[/x]": 0.5}))
    assert "a/b 1.000  [/x] 0.500  mean_length 3.000" in capsys.readouterr().err


def test_the_names_of_the_log_cannot_be_logged(tmp_path):
    log = opened(tmp_path)
    message = r"^log_metric\('{}', …\): the log already uses this name; choose another$"
    for name in ("loss", "num_tokens", "time/sample", "step", "run"):
        with refused(message.format(name)):
            write(log, range(1), {"loss": 0.5}, **{"mine": 2.0, name: 1.0})
    with refused(message.format("reward")):
        evaluate(log, 0, reward=1.0)
    assert ["run" in row for row in lines(tmp_path)] == [True]
    write(log, range(1), mine=2.0)
    evaluate(log, 0, mine=3.0)
    assert [row.get("mine", row.get("eval/mine")) for row in lines(tmp_path)[1:]] == [2.0, 3.0]


def test_a_log_that_cannot_be_written_is_a_user_error(tmp_path, monkeypatch):
    log = opened(tmp_path)
    write(log, range(2))

    def fails(*_):
        raise OSError(30, "Read-only file system")

    # a resumed run replaces the log
    for method, act in {
        "replace": lambda: opened(tmp_path, start=1),
        "open": lambda: write(log, range(2, 3)),
    }.items():
        with monkeypatch.context() as patch:
            patch.setattr(Path, method, fails)
            with refused(r"\.jsonl could not be written \(Read-only file"):
                act()
    assert [row["step"] for row in lines(tmp_path) if "step" in row] == [0, 1]
