"""--load-best-model-at-end keeps the checkpoint with the best evaluation, and names it.

Read next: nanogrpo/extras/best.py.
"""

import json
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

import train
from nanogrpo import Config
from nanogrpo.extras.best import Best
from nanogrpo.logs.files import checkpoints
from tests.conftest import SOLO, lines, write_rows

BEST = {"load_best_model_at_end": True, "eval_steps": 1, "save_steps": 1}


def kept(folder: Path, done: int, **options) -> set[str]:
    """Return the checkpoints to keep when `done` steps are saved."""
    cfg = Config(**BEST, **options)
    with (folder / "metrics.jsonl").open("a") as log:
        log.write(json.dumps({"run": BEST | options}) + "\n")
    final = folder / f"checkpoint-{done}"
    saver = SimpleNamespace(cfg=cfg, world=SOLO, keep=set(), final=final)
    Best().files(saver)
    final.mkdir()
    return saver.keep


@pytest.fixture
def folder(tmp_path) -> Path:
    rewards = [9.0, 0.5, 0.9, 0.1, 0.9, 0.3]  # the base has no checkpoint
    rows = [
        {"step": i - 1, "eval/after": i, "eval/reward": x, "eval/mean_length": 7.0 - x}
        for i, x in enumerate(rewards)
    ]
    write_rows(tmp_path / "metrics.jsonl", rows)
    return tmp_path


def test_the_first_of_the_best_is_kept_and_a_resumed_run_knows_it(folder):
    expected = [1, 2, 2, 2, 2]
    assert [kept(folder, i + 1) for i in range(5)] == [{f"checkpoint-{i}"} for i in expected]
    assert kept(folder, 6) == {"checkpoint-2"}  # not evaluated
    assert kept(folder, 7, metric_for_best_model="mean_length") == {"checkpoint-3"}
    (folder / "checkpoint-2").rmdir()
    assert kept(folder, 8) == {"checkpoint-4"}


def test_the_metric_may_have_any_of_its_names():
    inputs = SimpleNamespace(rewards=SimpleNamespace(calls=["accuracy_reward"]))
    for name in ("eval_mean_length", "rewards/accuracy_reward", "pass@2/accuracy_reward"):
        cfg = Config(**BEST, metric_for_best_model=name)
        assert Best().settings(cfg, inputs) is None


@pytest.mark.parametrize("rate", ["1e-3", "1e-2"])  # the first or the last checkpoint is the best
def test_a_run_interrupted_in_each_step_has_the_evaluations_and_the_best_of_a_whole_run(
    rows_of, tmp_path, capsys, monkeypatch, rate
):
    options = (
        "--eval-data FILES/data.jsonl --eval-steps 1 --save-steps 1 --eval-samples 4"
        f" --load-best-model-at-end --save-total-limit 1 --learning-rate {rate}"
    )
    rows_of(options)
    whole, log_step = lines(tmp_path), train.log_step
    monkeypatch.setattr(
        train, "log_step", lambda *args: (log_step(*args), signal.raise_signal(signal.SIGTERM))
    )
    for _ in range(5):  # three steps, the last evaluation, and nothing
        rows_of(f"{options} --resume", folder="run")
    found = [row for row in lines(tmp_path / "run") if "eval/after" in row]
    assert found == [row for row in whole if "eval/after" in row]
    best = max(found[1:], key=lambda row: row["eval/reward"])["eval/after"]
    printed = capsys.readouterr().err
    assert f"the model is in {tmp_path}/checkpoint-{best};" in printed
    assert "stopped after 2 of 3 steps (continue with --resume); the model is in /" in printed
    assert printed.count(f"the model is in {tmp_path}/run/checkpoint-{best};") > 1
    assert {path.name for path in checkpoints(tmp_path)} == {f"checkpoint-{best}", "checkpoint-3"}
