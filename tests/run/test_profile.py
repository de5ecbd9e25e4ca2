"""`--profile debug` from start to end and again over itself, and the trace of one step.

Profiles themselves are tested in tests/test_cli.py. Read next: test_train.py.
"""

import json
import os
import subprocess

import pytest
import torch

import train
from nanogrpo.distributed.world import World
from nanogrpo.logs import console as log
from nanogrpo.logs import trace
from nanogrpo.model.checkpoint import checkpoints
from nanogrpo.run import warmup
from tests.conftest import SOLO, arguments, lines, steps

SHORT = [
    "--profile",
    "debug",
    "--model",
    "warmup:2",
    "--max-steps",
    "2",
    "--eval-steps",
    "1",
    "--eval-samples",
    "4",
]


def test_the_debug_profile_runs_every_part_and_can_be_repeated(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert train.main([*SHORT, "--save-steps", "1"]) == 0
    run = tmp_path / "runs" / "debug"
    assert [row.get("eval/after", "step") for row in lines(run)[1:]] == [0, "step", 1, "step", 2]
    assert [p.name for p in checkpoints(run)] == ["checkpoint-1", "checkpoint-2"]
    written = sorted(p.stem for p in (run / "completions").iterdir())
    assert written == [
        *("completions_00001", "completions_00002"),
        *("eval_00000", "eval_00001", "eval_00002"),
    ]
    assert "advantage" in capsys.readouterr().err
    first, made = steps(run), (run / "base" / "model.safetensors").stat().st_mtime_ns
    (run / "notes.txt").write_text("mine")
    (run / "checkpoint-9").mkdir()
    assert train.main([*SHORT, "--save-steps", "0"]) == 0  # again, over the first
    assert steps(run) == first
    assert [p.name for p in checkpoints(run)] == ["checkpoint-2"]
    # the base is reused
    assert (run / "base" / "model.safetensors").stat().st_mtime_ns == made
    assert (run / "notes.txt").exists()  # other files stay
    # --resume wins although the profile would overwrite
    assert train.main([*SHORT, "--resume", "--max-steps", "3"]) == 0
    assert [row["step"] for row in steps(run)] == [0, 1, 2]


def test_another_seed_or_length_makes_another_base(tmp_path):
    warmup.ensure_base(tmp_path / "base", seed=0, steps=1)
    first = (tmp_path / "base" / "model.safetensors").read_bytes()
    # version 0.1.0 also wrote the names of the files
    mark = {"seed": 0, "steps": 1, "files": ["config.json"]}
    (tmp_path / "base" / warmup.MARK).write_text(json.dumps(mark))
    made = (tmp_path / "base" / "model.safetensors").stat().st_mtime_ns
    warmup.ensure_base(tmp_path / "base", seed=0, steps=1)
    assert (tmp_path / "base" / "model.safetensors").stat().st_mtime_ns == made
    for seed, count in ((0, 1), (1, 1), (1, 2)):
        warmup.ensure_base(tmp_path / "base", seed, count)
        assert ((tmp_path / "base" / "model.safetensors").read_bytes() == first) == (
            (seed, count) == (0, 1)
        )


@pytest.mark.parametrize("model", ["warmup:", "warmup:0", "warmup:-1", "warmup:two", "warmup"])
def test_a_base_without_steps_is_refused(tmp_path, capsys, model):
    assert train.main([*SHORT, "--output-dir", str(tmp_path), "--model", model]) == 2
    assert (
        f"error: --model {model!r} has no number of steps: write, for example, warmup:60."
        in capsys.readouterr().err
    )


def test_overwriting_removes_nothing_before_all_checks_pass(tiny_base, files, tmp_path, capsys):
    assert train.main(arguments(tiny_base, files, tmp_path, "--max-steps", "1")) == 0
    before = sorted(p for p in tmp_path.rglob("*"))
    again = ["--overwrite-output-dir", "--max-steps", "1"]
    assert (
        train.main(
            arguments(tiny_base, files, tmp_path, *again, "--data", str(files / "broken.jsonl"))
        )
        == 2
    )
    assert (
        train.main(
            [
                *arguments(tiny_base, files, tmp_path, *again),
                "--model",
                str(tmp_path / "checkpoint-1"),
            ]
        )
        == 2
    )
    assert (
        "checkpoint-1, which this run reads: choose another --output-dir."
        in capsys.readouterr().err.splitlines()[-1]
    )
    assert sorted(p for p in tmp_path.rglob("*")) == before
    assert train.main(arguments(tiny_base, files, tmp_path, *again, "--seed", "1")) == 0
    assert lines(tmp_path)[0]["run"]["seed"] == 1


CHDIR = """
import os

def even(completion_ids, **kwargs):
    os.chdir("/")
    return [sum(i % 2 == 0 for i in ids) / len(ids) for ids in completion_ids]
"""


def test_a_reward_that_changes_the_working_directory_moves_no_output(
    tiny_base, files, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reward.py").write_text(CHDIR)
    options = [
        "--reward-funcs",
        "reward.py:even",
        "--reward-timeout",
        "0",
        "--save-steps",
        "1",
        "--log-completions",
    ]
    argv = arguments(tiny_base, files, "run", *options, "--max-steps", "2", "--trace-step", "2")
    assert train.main(argv) == 0
    assert os.getcwd() == "/"
    assert {"checkpoint-1", "checkpoint-2", "metrics.jsonl", "completions", "trace-2.json"} <= {
        p.name for p in (tmp_path / "run").iterdir()
    }


def test_one_step_is_traced_with_its_phases(tiny_base, files, tmp_path):
    options = [
        "--trace-step",
        "2",
        "--max-steps",
        "3",
        "--max-completion-length",
        "4",
        "--generation-batch-size",
        "4",
    ]
    assert train.main(arguments(tiny_base, files, tmp_path, *options)) == 0
    events = json.loads((tmp_path / "trace-2.json").read_text())["traceEvents"]
    phases = [event["name"] for event in events if event.get("cat") == "user_annotation"]
    assert all(phases.count(phase) == 1 for phase in ("sync", "sample", "score", "train"))
    assert any(event["name"].startswith("aten::mm") for event in events)
    assert not list(tmp_path.glob("trace-[13].json"))


def test_a_trace_that_cannot_be_written_costs_no_evaluation_and_no_checkpoint(
    tiny_base, files, tmp_path, monkeypatch, capsys
):
    def full(*_) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", full)
    options = ["--trace-step", "1", "--eval-steps", "1", "--max-completion-length", "4"]
    options += ["--generation-batch-size", "4", "--eval-data", str(files / "data.jsonl")]
    # the last step, and an earlier one
    for last, more in (("1", []), ("2", ["--save-steps", "1"])):
        folder = tmp_path / last
        argv = arguments(tiny_base, files, folder, *options, *more, "--max-steps", last)
        assert train.main(argv) == 2
        assert "trace-1.json could not be written" in capsys.readouterr().err
        assert [p.name for p in checkpoints(folder)] == ["checkpoint-1"]
        assert [row["eval/after"] for row in lines(folder) if "eval/after" in row] == [0, 1]


def test_the_named_step_is_traced(tmp_path):
    cfg = train.Config(output_dir=str(tmp_path), trace_step=2)

    def recorded(world: World, start: int) -> list[bool]:
        running = []
        with trace.make_trace(cfg, world, start) as tracing:
            for _ in range(3):
                tracing.step()
                running.append(tracing.current_action == trace.ProfilerAction.RECORD_AND_SAVE)
        return running

    assert recorded(SOLO, 0) == [False, True, False]
    assert recorded(SOLO, 1) == [True, False, False]  # resumed
    assert recorded(SOLO, 2) == [False] * 3
    assert recorded(World(1, 2, SOLO.device), 0) == [False] * 3  # only on the main rank


def test_a_failing_step_that_is_traced_raises_its_own_error(tmp_path):
    cfg = train.Config(output_dir=str(tmp_path), trace_step=1)

    def fails() -> None:
        with trace.make_trace(cfg, SOLO, 0) as tracing:
            tracing.step()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()


def test_the_logged_commit_is_not_that_of_an_enclosing_repository(tmp_path, monkeypatch):
    def git(*words: str) -> str:
        who = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
        return subprocess.run(
            ["git", *who, *words], cwd=tmp_path, capture_output=True, text=True, check=True
        ).stdout.strip()

    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "somebody's project")
    (tmp_path / "site-packages").mkdir()
    monkeypatch.setattr(log, "ROOT", (tmp_path / "site-packages").resolve())
    assert log.commit() == "unknown"
    monkeypatch.setattr(log, "ROOT", tmp_path.resolve())
    assert log.commit() == git("rev-parse", "HEAD")
