"""--load-best-model-at-end keeps the checkpoint with the best evaluation, and names it.

Read next: nanogrpo/extras/best.py.
"""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from nanogrpo import Config
from nanogrpo.extras.best import Best
from nanogrpo.model import checkpoint
from tests.conftest import SOLO, lines

BEST = {"load_best_model_at_end": True, "eval_steps": 1, "save_steps": 1}


def follow(folder: Path, evaluations: dict[int, dict], **options) -> set[str]:
    """Return the checkpoints to keep after these evaluations, which follow those in the log."""
    cfg = Config(output_dir=str(folder), **{**BEST, **options})
    run = SimpleNamespace(cfg=cfg, world=SOLO, saver=SimpleNamespace(keep=set()))
    run.log = SimpleNamespace(path=folder / "metrics.jsonl")
    best = Best(cfg)
    with best.running(run), run.log.path.open("a") as file:
        for done, row in evaluations.items():
            row = {"eval/after": done, **row}
            file.write(json.dumps(row) + "\n")
            best.record(done, row)
            if done:
                (folder / f"checkpoint-{done}").mkdir()
    return run.saver.keep


def row(reward: float) -> dict[str, float]:
    return {"eval/reward": reward, "eval/mean_length": 7.0 - reward}


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "metrics.jsonl").write_text('{"run": {}}\n')
    return tmp_path


def test_the_first_of_the_best_is_kept_and_a_resumed_run_knows_it(folder):
    rewards = dict(enumerate([9.0, 0.5, 0.9, 0.1, 0.9, 0.3]))  # the base has no checkpoint
    evaluations = {done: row(reward) for done, reward in rewards.items()}
    assert follow(folder, evaluations) == {"checkpoint-2"}
    assert follow(folder, {6: row(0.5)}) == {"checkpoint-2"}
    assert follow(folder, {}, metric_for_best_model="mean_length") == {"checkpoint-3"}
    (folder / "checkpoint-2").rmdir()
    assert follow(folder, {}) == {"checkpoint-4"}


def test_a_checkpoint_without_an_evaluation_is_not_the_best(folder):
    evaluations = {2: row(0.1), 3: row(5.0), 4: {"eval/mean_length": 1.0}}  # step 3 is not saved
    assert follow(folder, evaluations, save_steps=2) == {"checkpoint-2"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("accuracy_reward", 1.0),
        ("eval_mean_length", 3.0),
        ("eval/reward", 2.0),
        ("reward", 2.0),
        ("rewards/accuracy_reward", 1.0),
        ("pass@2/accuracy_reward", 4.0),
        ("eval_reward", 2.0),  # this and the next as TRL logs them
        ("eval_rewards/accuracy_reward/mean", 1.0),
    ],
)
def test_the_metric_is_found_by_its_names(name, value):
    row = {"eval/rewards/accuracy_reward": 1.0, "eval/reward": 2.0, "eval/mean_length": 3.0}
    cfg = Config(**BEST, metric_for_best_model=name)
    best = Best(cfg)
    best.settings(cfg, SimpleNamespace(rewards=SimpleNamespace(calls=["accuracy_reward"])))
    best.keep = set()
    best.record(1, {**row, "eval/pass@2/accuracy_reward": 4.0})
    assert best.best == (value, 1)


def test_the_best_checkpoint_of_a_run_is_named_at_the_end(rows_of, tmp_path, capsys):
    rows_of(
        "--eval-data FILES/data.jsonl --eval-steps 1 --save-steps 1 --eval-samples 4"
        " --load-best-model-at-end --save-total-limit 1"
    )
    found = lines(tmp_path)
    scores = {row["eval/after"]: row["eval/reward"] for row in found if row.get("eval/after")}
    best = max(scores, key=lambda step: scores[step])
    assert f"the model is in {tmp_path}/checkpoint-{best};" in capsys.readouterr().err
    kept = {path.name for path in checkpoint.checkpoints(str(tmp_path))}
    assert kept == {f"checkpoint-{best}", "checkpoint-3"}
