"""The output folder: one run at a time writes to it, and a resumed run must have the same inputs.

Read before: test_resume.py (what is in the folder).
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import shutil
import signal
from pathlib import Path

import pytest

import train
from nanogrpo.config import Config
from nanogrpo.distributed.world import join
from nanogrpo.errors import UserError
from nanogrpo.run import output
from nanogrpo.types import Prompt
from tests.conftest import SOLO, arguments, steps, write_base
from tests.distributed.test_signals import patient
from tests.ranks import PATIENCE, argv, run, running, start, until


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return write_base(tmp_path_factory.mktemp("base"))


# --- one run at a time ---


def test_a_second_run_in_the_same_folder_is_refused_until_the_first_has_died(base, tmp_path):
    first = start(1, train.main, argv(base, tmp_path, "--save-steps", "1"))
    until(running(tmp_path))
    for options in ((), ("--resume",)):
        second = start(2, patient, argv(base, tmp_path, *options))
        assert set(second.ends(PATIENCE)) <= {1, 2}
        (error,) = [
            line
            for text in second.errors()
            for line in text.splitlines()
            if line.startswith("error: ")
        ]
        assert error.startswith(f"error: --output-dir {tmp_path} ")
        if options:
            assert error.endswith(
                "is in use by another run: wait for it to end or choose another folder."
            )
    os.kill(first.processes[0].pid, signal.SIGKILL)
    assert first.ends(PATIENCE) == [-signal.SIGKILL]
    more = str(len(steps(tmp_path)) + 1)
    assert run(1, train.main, argv(base, tmp_path, "--resume", "--max-steps", more)) == [0]


def test_without_locks_the_run_logs_a_warning(base, files, tmp_path, monkeypatch, caplog):
    def none(*_) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "lockf", none)
    with caplog.at_level(logging.WARNING):
        assert train.main(arguments(base, files, tmp_path, "--max-steps", "1")) == 0
    assert (
        f"{tmp_path} has no locks (No locks available): do not start a second run there"
        in caplog.messages
    )


@pytest.mark.parametrize("name", ["lora_adapter", "reward_funcs"])
def test_overwriting_never_removes_an_input(tmp_path, name):
    (used := tmp_path / "checkpoint-2" / "adapter").mkdir(parents=True)
    value = str(used) if name == "lora_adapter" else (f"model:{used}",)
    with pytest.raises(UserError, match=r"would remove \S+checkpoint-2, which this run reads"):
        output.clear(Config(output_dir=str(tmp_path), overwrite_output_dir=True, **{name: value}))
    assert used.exists()


@pytest.mark.parametrize("name", [".lock", ".writable"])
def test_a_folder_in_place_of_our_marks_is_refused(tmp_path, name):
    (tmp_path / name).mkdir()
    with (
        pytest.raises(UserError, match=r"cannot be written \(Is a directory\): choose another fol"),
        output.claimed(Config(output_dir=str(tmp_path)), SOLO),
    ):
        pass
    assert (tmp_path / name).is_dir()


@pytest.mark.parametrize("kind", ["folder", "pipe"])
def test_a_log_that_is_no_file_is_refused(tmp_path, kind):
    """A pipe would never end."""
    log = tmp_path / "metrics.jsonl"
    log.mkdir() if kind == "folder" else os.mkfifo(log)
    for options in ({}, {"resume": True}, {"overwrite_output_dir": True}):
        with (
            pytest.raises(UserError, match=rf"^{log} is not a file: choose another --output-dir"),
            output.claimed(Config(output_dir=str(tmp_path), **options), SOLO),
        ):
            pass


def test_the_lock_of_a_folder_does_not_clear_a_file(tmp_path):
    (tmp_path / "mine").write_text("text")
    (tmp_path / ".lock").symlink_to(tmp_path / "mine")
    with output.claimed(Config(output_dir=str(tmp_path)), SOLO):
        pass
    assert (tmp_path / "mine").read_text() == "text"


def test_what_cannot_be_removed_is_named(tmp_path, monkeypatch):
    """For example, because it belongs to another user."""

    def fails(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(shutil, "rmtree", fails)
    for name, options in ((".checkpoint-3.tmp", {}), ("checkpoint-3", {"overwrite": True})):
        (tmp_path / name).mkdir()
        cfg = Config(output_dir=str(tmp_path), overwrite_output_dir=bool(options))
        with pytest.raises(
            UserError, match=rf"{name} cannot be removed \(Permission denied\): rem"
        ):
            output.clear(cfg) if options else output.remove_unfinished(cfg)
        (tmp_path / name).rmdir()
    (tmp_path / ".checkpoint-4.tmp").write_text("a file")
    (tmp_path / ".checkpoint-5.tmp").symlink_to(tmp_path)
    output.remove_unfinished(Config(output_dir=str(tmp_path)))
    assert not [*tmp_path.iterdir()]


# --- same data, same rewards ---


@pytest.fixture
def begun(base, files, tmp_path) -> list[str]:
    """Train for two steps on a copy of the data and rewards; return the options to resume with."""
    for name in ("data.jsonl", "reward.py"):
        (tmp_path / name).write_bytes((files / name).read_bytes())
    options = arguments(base, tmp_path, tmp_path / "run")
    assert train.main([*options, "--max-steps", "2"]) == 0
    return [*options, "--resume", "--max-steps", "3"]


@pytest.mark.parametrize(
    "change", ["another prompt", "another column", "another order", "one more"]
)
def test_other_prompts_are_refused(begun, tmp_path, capsys, change):
    rows = [json.loads(line) for line in (tmp_path / "data.jsonl").read_text().splitlines()]
    if change == "another prompt":
        rows[3]["prompt"] = "7+7="
    elif change == "another column":
        rows[3]["answer"] = "14"
    elif change == "another order":
        rows = rows[::-1]
    else:
        rows.append({"prompt": "7+7="})
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    capsys.readouterr()
    assert train.main(begun) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert f"{tmp_path}/run/checkpoint-2 was written with other prompts in " in error
    assert "give the same data, or start from its weights (--model " in error


def test_a_changed_reward_file_logs_a_warning(begun, tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        assert train.main([*begun[:-1], "2"]) == 0
        assert "reward.py" not in caplog.text
        (tmp_path / "reward.py").write_text(
            (tmp_path / "reward.py").read_text() + "\n# a comment\n"
        )
        assert train.main(begun) == 0
    message = (
        f"{tmp_path}/reward.py has changed since {tmp_path}/run/checkpoint-2 was written; "
        "using the new file"
    )
    assert message in caplog.text


def other_data() -> str:
    """Read other prompts on rank 2, as if each machine had its own file of that name."""
    with join(Config(device="cpu")) as world:
        try:
            output.origin(Config(), world, [Prompt(0, "", [1, 2 + (world.rank == 2)])])
        except UserError as e:
            return str(e)
    return ""


def test_ranks_that_read_other_prompts_are_refused():
    assert (
        run(3, other_data)
        == ["--data holds different prompts for different ranks: give all machines the same files."]
        * 3
    )


def test_the_files_of_reward_functions_with_arguments_are_hashed(tmp_path):
    (tmp_path / "own.py").write_text("def f(completions, a=1, **kwargs): ...\n")
    specs = (f"{tmp_path}/own.py:f:a=2,b='x:y.py'", "cosine:max_len=3", "length:24")
    with join(Config(device="cpu")) as world:
        assert list(output.origin(Config(reward_funcs=specs), world, [])) == [
            "prompts",
            f"{tmp_path}/own.py",
        ]
