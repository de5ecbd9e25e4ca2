"""`--profile debug` from start to end and again over itself.

Profiles themselves are tested in tests/test_cli.py. Read next: test_train.py.
"""

import shutil

import train
from nanogrpo.logs.files import checkpoints
from tests.conftest import arguments, lines, steps

SHORT = "--profile debug --max-steps 2 --eval-steps 1 --eval-samples 4"


def test_the_debug_profile_runs_every_part_and_can_be_repeated(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert train.main([*SHORT.split(), "--save-steps", "1"]) == 0
    run = tmp_path / "runs" / "debug"
    assert [row.get("eval/after", "step") for row in lines(run)[1:]] == [0, "step", 1, "step", 2]
    assert [p.name for p in checkpoints(run)] == ["checkpoint-1", "checkpoint-2"]
    first = steps(run)
    (run / "notes.txt").write_text("mine")
    shutil.copytree(run / "checkpoint-2", run / "checkpoint-9")
    assert train.main([*SHORT.split(), "--save-steps", "0"]) == 0  # again, over the first
    assert steps(run) == first
    assert [p.name for p in checkpoints(run)] == ["checkpoint-2"]
    assert (run / "notes.txt").exists()  # other files stay
    # --resume wins although the profile would overwrite
    assert train.main([*SHORT.split(), "--resume", "--max-steps", "3"]) == 0
    assert [row["step"] for row in steps(run)] == [0, 1, 2]


def test_overwriting_removes_nothing_before_all_checks_pass(
    rows_of, tiny_base, files, tmp_path, capsys
):
    rows_of("--max-steps 1")
    before = sorted(tmp_path.rglob("*"))
    again = arguments(tiny_base, files, tmp_path, "--overwrite-output-dir", "--max-steps", "1")
    assert train.main([*again, "--data", str(files / "broken.jsonl")]) == 2
    assert train.main([*again, "--model", str(tmp_path / "checkpoint-1")]) == 2
    assert (
        "checkpoint-1, which this run reads: choose another --output-dir."
        in capsys.readouterr().err.splitlines()[-1]
    )
    assert sorted(tmp_path.rglob("*")) == before
    assert train.main([*again, "--seed", "1"]) == 0
    assert lines(tmp_path)[0]["run"]["seed"] == 1
