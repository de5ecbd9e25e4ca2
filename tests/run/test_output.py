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

import pytest

import train
from nanogrpo import Config
from nanogrpo.distributed.world import join
from nanogrpo.errors import UserError
from nanogrpo.run import output
from nanogrpo.types import Prompt
from tests.conftest import SOLO, arguments, steps
from tests.ranks import PATIENCE, argv, run, running, start, until

# --- one run at a time ---


def test_a_second_run_in_the_same_folder_is_refused_until_the_first_has_died(tiny_base, tmp_path):
    first = start(1, train.main, argv(tiny_base, tmp_path, "--save-steps", "1"))
    until(running(tmp_path))
    for options in ((), ("--resume",)):
        second = start(2, train.main, argv(tiny_base, tmp_path, *options))
        assert second.ends(PATIENCE) == [2, 2]
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
    assert run(1, train.main, argv(tiny_base, tmp_path, "--resume", "--max-steps", more)) == [0]


def test_without_locks_the_run_logs_a_warning(rows_of, tmp_path, monkeypatch, caplog):
    def none(*_) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "lockf", none)
    with caplog.at_level(logging.WARNING):
        rows_of("--max-steps 1")
    assert f"{tmp_path} has no locks: do not start a second run there" in caplog.messages


@pytest.mark.parametrize("name", ["lora_adapter", "reward_funcs"])
def test_overwriting_never_removes_an_input(tmp_path, name):
    (used := tmp_path / "checkpoint-2" / "adapter").mkdir(parents=True)
    value = str(used) if name == "lora_adapter" else (f"model:{used}",)
    with pytest.raises(UserError, match=r"would remove \S+checkpoint-2, which this run reads"):
        output.clear(Config(output_dir=str(tmp_path), overwrite_output_dir=True, **{name: value}))
    assert used.exists()


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / ".lock").mkdir()
    with (
        pytest.raises(UserError, match=r"cannot be written \(Is a directory\): choose another fol"),
        output.claimed(Config(output_dir=str(tmp_path)), SOLO),
    ):
        pass


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
    output.remove_unfinished(Config(output_dir=str(tmp_path)))
    assert not [*tmp_path.iterdir()]


# --- same data, same rewards ---


def test_other_prompts_are_refused(tiny_base, files, tmp_path, capsys):
    data = tmp_path / "data.jsonl"
    data.write_bytes((files / "data.jsonl").read_bytes())
    options = arguments(tiny_base, files, tmp_path / "run", "--data", str(data))
    assert train.main([*options, "--max-steps", "1"]) == 0
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    for changed in (
        [{"prompt": "7+7="}, *rows[1:]],
        [{**rows[0], "answer": "0"}, *rows[1:]],
        rows[::-1],
        [*rows, {"prompt": "7+7="}],
    ):
        data.write_text("".join(json.dumps(row) + "\n" for row in changed))
        assert train.main([*options, "--resume"]) == 2
        error = capsys.readouterr().err.splitlines()[-1]
        assert f"{tmp_path}/run/checkpoint-1 was written with other prompts in " in error
        assert "give the same data, or start from its weights (--model " in error


def other_data() -> str:
    """Read other prompts on rank 2, as if each machine had its own file of that name."""
    with join(Config(device="cpu")) as world:
        try:
            output.origin(world, [Prompt(0, "", [1, 2 + (world.rank == 2)])])
        except UserError as e:
            return str(e)
    return ""


def test_ranks_that_read_other_prompts_are_refused():
    assert (
        run(3, other_data)
        == ["--data holds different prompts for different ranks: give all machines the same files."]
        * 3
    )
