"""The output folder: one run at a time writes to it, and a resumed run must have the same inputs.

Read before: test_resume.py (what is in the folder).
"""

import errno
import fcntl
import logging
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

import train
from nanogrpo import Config
from nanogrpo.run import output
from tests.conftest import SOLO, arguments, edit_json, read_rows, refused, steps, write_rows
from tests.ranks import PATIENCE, argv, run, running, start, until

# --- one run at a time ---


def test_a_second_run_in_the_same_folder_is_refused_until_the_first_has_died(tiny_base, tmp_path):
    first = start(1, train.main, argv(tiny_base, tmp_path, "--save-steps", "1"))
    until(running(tmp_path))
    for options in ((), ("--resume",)):
        second = start(2, train.main, argv(tiny_base, tmp_path, *options))
        assert second.ends(PATIENCE) == [2, 2]
        (error,) = second.reports()
        assert error.startswith(f"error: --output-dir {tmp_path} ")
        if options:
            assert error.endswith(
                "is in use by another run: wait for it to end or choose another folder."
            )
    os.kill(first.processes[0].pid, signal.SIGKILL)
    assert first.ends(PATIENCE) == [-signal.SIGKILL]
    more = str(len(steps(tmp_path)) + 1)
    assert run(1, train.main, argv(tiny_base, tmp_path, "--resume", "--max-steps", more)) == [0]


def test_without_locks_the_run_logs_a_warning(rows_of, tmp_path, monkeypatch, caplog):
    def none(*_) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", none)
    with caplog.at_level(logging.WARNING):
        rows_of("--max-steps 1")
    assert f"{tmp_path} cannot be locked: do not start a second run there" in caplog.messages


def test_overwriting_removes_only_what_runs_have_written(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    names = (
        "metrics.jsonl completions/eval_00000.jsonl checkpoint-3/state.json elsewhere/state.json"
        " metrics.7.tmp completions/eval_00000.7.tmp"  # of a killed run
    )
    theirs = """
        metrics-2024.jsonl completions/my.py completions/notes_00001.jsonl dashboards/a.csv
        tensorboard/a checkpoint-3-good/state.json sub/metrics.jsonl
    """
    for name in (names + theirs).split():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    (tmp_path / "checkpoint-2").symlink_to(tmp_path / "elsewhere")  # moved and linked
    (other := tmp_path / "checkpoint-0").mkdir()  # a run would write or remove such a folder
    cfg = Config(output_dir=str(tmp_path), overwrite_output_dir=True)
    with refused(rf"{other} was not written by nanogrpo: choose another"):
        output.clear(cfg)
    other.rmdir()
    output.clear(cfg)
    left = {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if not p.is_dir()}
    assert left == {*theirs.split(), "elsewhere/state.json"}


@pytest.mark.parametrize("name", ["lora_adapter", "reward_funcs"])
@pytest.mark.parametrize("folder", ["run", "12:30"])
def test_overwriting_never_removes_an_input(tmp_path, name, folder):
    tmp_path /= folder
    (used := tmp_path / "checkpoint-2" / "adapter").mkdir(parents=True)
    (tmp_path / "checkpoint-2" / "state.json").touch()
    value = str(used) if name == "lora_adapter" else (f"model:{used}",)
    with refused(r"would remove \S+checkpoint-2, which this run reads"):
        output.clear(Config(output_dir=str(tmp_path), overwrite_output_dir=True, **{name: value}))
    assert used.exists()


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        *((name, "already holds a run: continue it with --resume, choose") for name in "ab"),
        ("locked", r"cannot be written \(Is a directory\): choose another folder"),
        ("file", r"cannot be written \(File exists\): choose"),
        ("file/run", r"cannot be written \(Not a directory\): choose"),
        ("/proc/run", r"cannot be written \(No such file or directory\): choose"),
        ("x" * 256, r"cannot be written \(File name too long\): choose"),
    ],
)
def test_a_folder_that_cannot_be_used_is_named_and_stays_as_it_is(tmp_path, name, problem):
    for theirs in ("a", "b/checkpoint-5", "locked/.lock"):
        (tmp_path / theirs).mkdir(parents=True)
    for theirs in ("a/metrics.jsonl", "file"):
        (tmp_path / theirs).write_text("theirs")
    before, folder = sorted(tmp_path.rglob("*")), tmp_path / name
    with (
        refused(f"^--output-dir {folder} {problem}"),
        output.claimed(Config(output_dir=str(folder)), SOLO),
    ):
        pass
    assert sorted(tmp_path.rglob("*")) == before
    assert (tmp_path / "file").read_text() == "theirs"


def test_a_thread_of_the_same_process_is_refused_too(tmp_path):
    cfg = Config(output_dir=str(tmp_path))
    with (
        output.claimed(cfg, SOLO),
        refused("is in use by another run"),
        output.claimed(cfg, SOLO),
    ):
        pass


def test_what_cannot_be_removed_is_named_and_removed_by_the_next_attempt(tmp_path, monkeypatch):
    """For example, because it belongs to another user. A kill leaves the same files."""

    def fails(path):
        (path / "state.json").unlink()
        raise PermissionError(13, "Permission denied")

    cfg = Config(output_dir=str(tmp_path), overwrite_output_dir=True)
    for name, act in (
        (".checkpoint-3.tmp", output.remove_unfinished),
        ("checkpoint-3", output.clear),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "state.json").touch()
        with monkeypatch.context() as patch:
            patch.setattr(shutil, "rmtree", fails)
            with refused(r"/\.checkpoint-3\.tmp cannot be removed \(Permission denied\): rem"):
                act(cfg)
        act(cfg)
    (tmp_path / ".checkpoint-4.tmp").write_text("a file")
    output.remove_unfinished(cfg)
    assert not [*tmp_path.iterdir()]


# --- same data, same rewards ---


def edit_weights(path: Path) -> None:
    weights = load_file(path)
    weights["model.norm.weight"][0] += 1
    save_file(weights, path)


def edit_data(path: Path, change: Callable[[list], list]) -> None:
    write_rows(path, change(read_rows(path)))


CHANGES = {  # a change of a folder of inputs, and what an error calls it
    "prompt": (
        lambda f: edit_data(f / "data.jsonl", lambda rows: [{"prompt": "7+7="}, *rows[1:]]),
        "the list of prompts",
    ),
    "answer": (
        lambda f: edit_data(f / "data.jsonl", lambda rows: [{**rows[0], "answer": ""}, *rows[1:]]),
        "the list of prompts",
    ),
    "eps": (lambda f: edit_json(f / "base/config.json", rms_norm_eps=1e-3), "config.json in base"),
    "stop": (
        lambda f: edit_json(f / "base/generation_config.json", eos_token_id=[5]),
        "generation_config.json in base",
    ),
    "weights": (
        lambda f: edit_weights(f / "base/model.safetensors"),
        "model.safetensors in base",
    ),
    "reward": (
        lambda f: (f / "reward.py").write_text((f / "reward.py").read_text() + "\n"),
        "reward.py",
    ),
}


@pytest.fixture
def inputs(tiny_base, files, tmp_path, monkeypatch) -> Path:
    """A working directory with the files of a run."""
    shutil.copytree(files, tmp_path / "inputs")
    shutil.copytree(tiny_base, tmp_path / "inputs/base")
    (tmp_path / "inputs/base/generation_config.json").write_text('{"eos_token_id": [3]}')
    monkeypatch.chdir(tmp_path / "inputs")
    return tmp_path / "inputs"


def relative(output: Path, *more: str) -> list[str]:
    return arguments(Path("base"), Path(), output, "--max-steps", "2", *more)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, "") for name in CHANGES if name != "weights"),
        ("weights", "--beta 0.1"),
        ("weights", "--lora-r 2"),
    ],
)
def test_resume_refuses_other_inputs(inputs, tmp_path, capsys, name, options):
    (change, called), argv = CHANGES[name], relative(tmp_path / "run", *options.split())
    assert train.main([*argv, "--save-steps", "1"]) == 0
    shutil.rmtree(tmp_path / "run/checkpoint-2")
    change(inputs)
    # a mistake in a reward function may be fixed
    assert train.main([*argv, "--resume"]) == (0 if name == "reward" else 2)
    error = (
        f"--resume: {called} has changed since {tmp_path}/run/checkpoint-1/state.json was written:"
    )
    assert (error in capsys.readouterr().err) == (name != "reward")


def in_own_folder(folders: list[Path], output: Path, more: str) -> int:
    """Run train.py on a rank that has its own files, and rank 1 also its own options."""
    rank = int(os.environ["RANK"])
    os.chdir(folders[rank])
    return train.main(relative(output, *more.split() * rank))


# one of each kind: the prompts, a file of the model, its weights, a file that an option names
SOME = ["prompt", "eps", "weights", "reward"]


@pytest.mark.parametrize("name", [*SOME, "seed 2", "max_steps 3", "save_steps 1", "resume true"])
def test_ranks_with_other_inputs_are_refused(inputs, tmp_path, name):
    shutil.copytree(inputs, other := tmp_path / "other")
    change, called = CHANGES.get(name, (lambda folder: None, name.split()[0]))
    change(other)
    more = f"--{name}" if name not in CHANGES else ""
    ranks = start(2, in_own_folder, [inputs, other], tmp_path / "run", more)
    assert ranks.ends(PATIENCE) == [2, 2]
    errors = "".join(ranks.errors())
    assert f"error: {called} differs between rank 0 and rank 1: give all ranks the same" in errors
