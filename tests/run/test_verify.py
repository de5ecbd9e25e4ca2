"""Every flipped bit of a checkpoint is found, its index runs no code, and the log is never behind.

Read before: test_resume.py, whose `start` makes a run without sampling.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
import pickle
import random
import shutil
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

import train
from nanogrpo.errors import UserError
from nanogrpo.run import state, verify
from tests.conftest import arguments, steps
from tests.run.test_resume import assert_same, change, start


@pytest.fixture(scope="module")
def two_saves(tmp_path_factory, tiny_base) -> Path:
    """A folder with checkpoints of two steps."""
    folder = tmp_path_factory.mktemp("saved")
    run = start(folder, tiny_base).advance(1)
    run.save()
    run.advance(1).save()
    return folder / "run"


def all_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def flip(path: Path, rng: random.Random) -> str:
    """Flip a bit of a file and return which one."""
    data = bytearray(path.read_bytes())
    bit = rng.randrange(8 * len(data))
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)
    return f"{path.name}, bit {bit}"


@contextlib.contextmanager
def damaged(path: Path):
    """Restore a file in the end."""
    data = path.read_bytes()
    yield path
    path.write_bytes(data)


def test_state_json_has_the_hash_of_every_other_file(two_saves):
    folder = two_saves / "checkpoint-2"
    saved = json.loads((folder / "state.json").read_text())
    assert saved["files"] == {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in all_files(folder)
        if path.name != "state.json"
    }
    assert {"config.json", "model.safetensors", "tokenizer.json", "state/.metadata"} <= {
        *saved["files"]
    }
    text = (folder / "state.json").read_text()
    assert text.endswith(f'"sha256": "{saved["sha256"]}"\n}}\n')
    blank = text.replace(saved["sha256"], "0" * 64)
    assert hashlib.sha256(blank.encode()).hexdigest() == saved["sha256"]


def test_a_flipped_bit_in_any_file_is_found(two_saves, tmp_path, tiny_base):
    shutil.copytree(two_saves, tmp_path / "run")
    folder, rng = tmp_path / "run" / "checkpoint-2", random.Random(0)
    assert len(all_files(folder)) >= 7
    for path in all_files(folder):
        for _ in range(30 if path.name == "state.json" else 4):
            with damaged(path):
                what = flip(path, rng)
                with pytest.raises(UserError) as error:
                    start(tmp_path, tiny_base, resume=True)
            name = path.relative_to(folder).as_posix()
            assert f"--resume: {folder} is damaged (" in str(error.value), what
            assert name in str(error.value), what
            assert str(error.value).endswith(
                "): add --resume-from checkpoint-1, the last sound checkpoint."
            )
    assert start(tmp_path, tiny_base, resume=True).step == 2


def test_an_earlier_checkpoint_that_is_damaged_too_is_not_recommended(
    two_saves, tmp_path, tiny_base
):
    shutil.copytree(two_saves, tmp_path / "run")
    shutil.copytree(two_saves / "checkpoint-1", tmp_path / "run" / "checkpoint-0")
    for step in (1, 2):
        flip(
            tmp_path / "run" / f"checkpoint-{step}" / "state" / "__0_0.distcp", random.Random(step)
        )
    resume = functools.partial(start, tmp_path, tiny_base, resume=True)
    with pytest.raises(UserError, match="add --resume-from checkpoint-0, the last sound"):
        resume()
    shutil.rmtree(tmp_path / "run" / "checkpoint-0")
    with pytest.raises(UserError, match="start again in another folder, because no other checkpoi"):
        resume()
    with pytest.raises(UserError, match=r"checkpoint-1 is damaged \(state/__0_0\.distcp has chang"):
        resume(resume_from="checkpoint-1")


def test_resume_from_takes_a_name_or_a_path_and_keeps_newer_checkpoints_aside(
    two_saves, tmp_path, tiny_base, caplog, monkeypatch
):
    for name in ("checkpoint-1", str(tmp_path / "run" / "checkpoint-1"), "run/checkpoint-1/"):
        shutil.copytree(two_saves, tmp_path / "run")
        monkeypatch.chdir(tmp_path)
        caplog.clear()
        run = start(tmp_path, tiny_base, resume=True, resume_from=name)
        assert run.step == 1
        assert [r.message for r in caplog.records if r.name == "nanogrpo"] == [
            f"{tmp_path}/run/checkpoint-2 is now {tmp_path}/run/checkpoint-2-1: remove it when you "
            "do not need it"
        ]
        run.advance(1).save()
        again = start(tmp_path, tiny_base, resume=True)
        assert again.step == 2
        assert_same(again.state(), run.state())
        shutil.rmtree(tmp_path / "run")


def test_resume_from_another_place_is_refused(two_saves, tmp_path, tiny_base):
    shutil.copytree(two_saves, tmp_path / "run")
    for name in ("checkpoint-3", "checkpoint-1/state", str(two_saves / "checkpoint-1"), "/"):
        with pytest.raises(
            UserError,
            match=rf"--resume-from {name} is no checkpoint in {tmp_path}/run: choose checkpoint-1, "
            r"checkpoint-2\.",
        ):
            start(tmp_path, tiny_base, resume=True, resume_from=name)
    with pytest.raises(UserError, match=r"is no checkpoint in .*/none/run: leave this option out"):
        start(tmp_path / "none", tiny_base, resume=True, resume_from="checkpoint-1")


def test_a_checkpoint_of_an_older_version_is_resumed_with_a_warning(
    two_saves, tmp_path, tiny_base, caplog
):
    shutil.copytree(two_saves, tmp_path / "run")
    change(tmp_path / "run" / "checkpoint-2")
    with caplog.at_level(logging.WARNING):
        assert start(tmp_path, tiny_base, resume=True).step == 2
    assert [r.message for r in caplog.records if r.name == "nanogrpo"] == [
        f"{tmp_path}/run/checkpoint-2 has no hashes, since an older version wrote it: damage may "
        "go unnoticed"
    ]


# --- the index is a pickle ---


class Payload:
    """What pickle turns into a call of a function."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_an_index_that_would_run_code_is_refused(two_saves, tmp_path, tiny_base):
    """torch itself would run it: directly, or from the bytes that stand in place of a tensor."""
    shutil.copytree(two_saves, tmp_path / "run")
    change(tmp_path / "run" / "checkpoint-2")  # whoever wrote it could write the hashes, too
    path, proof = tmp_path / "run" / "checkpoint-2" / "state" / ".metadata", tmp_path / "proof"
    good = pickle.loads(path.read_bytes())

    def refused(index: object, name: str) -> None:
        path.write_bytes(pickle.dumps(index))
        with pytest.raises(UserError, match=rf"is damaged \(state/\.metadata names {name}\): add"):
            start(tmp_path, tiny_base, resume=True)

    refused(Payload(proof), r"posix\.mkdir")
    good.planner_data = Payload(proof)
    refused(good, r"posix\.mkdir")
    good.planner_data = None
    good.state_dict_metadata["updates"] = BytesStorageMetadata()
    refused(good, r"torch\.distributed\.checkpoint\.metadata\.BytesStorageMetadata")
    good.state_dict_metadata["updates"] = torch.load
    refused(good, r"torch\.serialization\.load")
    path.write_bytes(b"ctorch\nload\n.")  # an old protocol
    with pytest.raises(UserError, match=r"state/\.metadata names torch\.load"):
        start(tmp_path, tiny_base, resume=True)
    path.write_bytes(pickle.dumps(torch.float32))
    with pytest.raises(UserError, match="is no index of tensors"):
        start(tmp_path, tiny_base, resume=True)
    assert not proof.exists()


METADATA = b"ctorch.distributed.checkpoint.metadata\n"


@pytest.mark.parametrize(
    "changed",
    [
        METADATA + b"Metadata\n",
        b"cpathlib\nPosixPath\n",
        b"ctorch.serialization\n_get_layout\n",
        b"cbuiltins\ngetattr\n",
        METADATA + b"_MEM_FORMAT_ENCODING\n(K\x00tR",  # a member, which all indices share
    ],
)
def test_an_index_cannot_change_a_class_or_a_function(two_saves, tmp_path, tiny_base, changed):
    """The last instruction of a pickle sets attributes of what is on the stack."""
    shutil.copytree(two_saves, tmp_path / "run")
    change(tmp_path / "run" / "checkpoint-2")
    path = tmp_path / "run" / "checkpoint-2" / "state" / ".metadata"
    path.write_bytes(b"\x80\x02" + changed + b"N}X\x03\x00\x00\x00oddK\x01s\x86b.")
    with pytest.raises(UserError, match=r"is damaged \(state/\.metadata changes an object that is"):
        start(tmp_path, tiny_base, resume=True)
    owners = [state.Metadata, type(tmp_path), torch.serialization._get_layout]
    assert not any(hasattr(o, "odd") for o in (*owners, state._MEM_FORMAT_ENCODING(0)))


def test_a_number_in_an_index_reserves_no_memory(two_saves, tmp_path, tiny_base):
    """The instruction for a bytearray of 2^60 bytes."""
    shutil.copytree(two_saves, tmp_path / "run")
    change(tmp_path / "run" / "checkpoint-2")
    path = tmp_path / "run" / "checkpoint-2" / "state" / ".metadata"
    size = 1 << 60
    path.write_bytes(b"\x80\x05" + pickle.BYTEARRAY8 + size.to_bytes(8, "little") + b".")
    with pytest.raises(UserError, match=r"is damaged \(150\)"):
        start(tmp_path, tiny_base, resume=True)


def test_our_own_index_contains_only_what_is_allowed(two_saves):
    """The restricted reader returns what torch's own returns."""
    for step in (1, 2):
        folder = two_saves / f"checkpoint-{step}" / "state"
        ours = state._Reader(folder).read_metadata()
        theirs = state.dcp.FileSystemReader(folder).read_metadata()
        theirs.storage_meta = ours.storage_meta
        assert ours == theirs


# --- the log ---


def test_the_log_is_on_the_disk_before_a_checkpoint_gets_its_name(
    tiny_base, files, tmp_path, monkeypatch
):
    """After a power cut, what was flushed is there. The last flush of the log before the rename of
    a checkpoint contains all its steps.
    """
    log, durable, seen = tmp_path / "metrics.jsonl", [b""], {}
    fsync, rename = os.fsync, Path.rename

    def flush(descriptor):
        fsync(descriptor)
        if log.exists() and os.fstat(descriptor).st_ino == log.stat().st_ino:
            durable[0] = log.read_bytes()

    def watch(self, target):
        if Path(target).name.startswith("checkpoint-"):
            seen[Path(target).name] = durable[0]
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", flush)
    monkeypatch.setattr(Path, "rename", watch)
    assert train.main(arguments(tiny_base, files, tmp_path, "--save-steps", "1")) == 0
    assert [*seen] == ["checkpoint-1", "checkpoint-2", "checkpoint-3"]
    for step, text in enumerate(seen.values(), start=1):
        found = [json.loads(line) for line in text.splitlines()]
        assert [row["step"] for row in found if "reward" in row][:step] == list(range(step))


def test_resume_names_the_steps_that_the_log_lacks(tiny_base, files, tmp_path, caplog):
    """As after a power cut with an older version."""
    argv = arguments(tiny_base, files, tmp_path)
    assert train.main([*argv, "--max-steps", "6"]) == 0
    log = tmp_path / "metrics.jsonl"
    lines = log.read_text().splitlines(keepends=True)  # a header and six steps
    log.write_text("".join(lines[:2] + lines[3:5]))
    caplog.clear()
    assert train.main([*argv, "--max-steps", "7", "--resume"]) == 0
    (warning,) = [r.message for r in caplog.records if "no record" in r.message]
    assert warning == (
        f"{log} has no record of step 1, steps 4 to 5, which the checkpoint has finished: the "
        "curves have a gap there, and num_tokens leaves them out"
    )
    assert [row["step"] for row in steps(tmp_path)] == [0, 2, 3, 6]
    log.unlink()
    caplog.clear()
    assert train.main([*argv, "--max-steps", "8", "--resume"]) == 0
    (warning,) = [r.message for r in caplog.records if "no record" in r.message]
    assert "no record of steps 0 to 6, which" in warning


def test_an_undisturbed_log_gives_no_warning(tiny_base, files, tmp_path, caplog):
    argv = arguments(tiny_base, files, tmp_path, "--eval-steps", "1", "--eval-data")
    argv += [str(files / "data.jsonl")]
    assert train.main([*argv, "--max-steps", "2"]) == 0
    assert train.main([*argv, "--max-steps", "3", "--resume"]) == 0
    assert "no record" not in caplog.text


# --- hashes ---


def test_hashes_of_another_form_are_damage(tmp_path):
    for files in (["model.safetensors"], "x", 7, None):
        (tmp_path / "state.json").write_text(verify.seal({"step": 1, "files": files}))
        with pytest.raises(UserError, match=r"state\.json has no list of files"):
            verify.read_state(tmp_path)
        assert not verify.is_sound(tmp_path)


def test_a_hash_is_that_of_sha256sum(tmp_path):
    for size in (0, 1, (1 << 20) - 1, 1 << 20, (1 << 20) + 1):
        data = random.Random(size).randbytes(size)
        (tmp_path / "file").write_bytes(data)
        assert verify.digest(tmp_path / "file") == hashlib.sha256(data).hexdigest()
