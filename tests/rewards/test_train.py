"""Whole runs with reward functions that hang, crash, wait, log and change: what the log reports.

Read next: test_process.py, which looks at each case by itself.
"""

import math
import re
from pathlib import Path

import pytest
import torch

import train
from nanogrpo.config import Config
from nanogrpo.distributed.world import World
from nanogrpo.errors import UserError
from nanogrpo.rewards.call import TrainerState
from nanogrpo.rewards.runner import Runner
from nanogrpo.run.setup import make_rewards
from tests.conftest import arguments, lines, steps
from tests.ranks import REWARD, run
from tests.rewards.clock import only_hangs_take_time
from tests.rewards.conftest import make_samples

FUNCTIONS = """
import asyncio, os, signal, time

def even(completion_ids):
    return [sum(i % 2 == 0 for i in ids) / len(ids) for ids in completion_ids]

def hangs_on_one(prompts, completion_ids, **kwargs):
    if "5+5=" in prompts:
        time.sleep(1000)
    return even(completion_ids)

def crashes_on_one(prompts, completion_ids, **kwargs):
    if "3+3=" in prompts:
        os._exit(1)
    return even(completion_ids)

def always_crashes(**kwargs):
    os._exit(1)

async def waits(completion_ids, **kwargs):
    await asyncio.sleep(0.01)
    return even(completion_ids)

def curriculum(completion_ids, trainer_state, log_metric, **kwargs):
    log_metric("progress", trainer_state.global_step / trainer_state.max_steps)
    log_metric("epoch_so_far", trainer_state.epoch)
    return [len(ids) * trainer_state.global_step for ids in completion_ids]

def nan_in_the_second_step(completion_ids, trainer_state, **kwargs):
    nan = trainer_state.global_step == 1
    return [float("nan") if nan else value for value in even(completion_ids)]

def asks_to_stop_in_the_second_step(completion_ids, trainer_state, **kwargs):
    if trainer_state.global_step == 1:
        os.kill(os.getppid(), signal.SIGTERM)
    return even(completion_ids)

def changes_the_folder(completion_ids, **kwargs):
    os.chdir("/")
    return even(completion_ids)

def logs_a_taken_name(completion_ids, log_metric, **kwargs):
    log_metric("loss", 1)
    return even(completion_ids)
"""


@pytest.fixture(scope="module")
def functions(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("rewards") / "functions.py"
    path.write_text(FUNCTIONS)
    return str(path)


@pytest.fixture
def start(tiny_base, files, tmp_path, functions):
    """Start a run with these functions of the file above: returns the status and the folder."""

    def start(*names: str, options=(), folder="run") -> tuple[int, Path]:
        specs = [f"{functions}:{name}" for name in names]
        argv = arguments(tiny_base, files, tmp_path / folder, "--reward-funcs", *specs, *options)
        return train.main(argv), tmp_path / folder

    return start


def last_error(capsys) -> str:
    return capsys.readouterr().err.strip().splitlines()[-1]


def test_lost_groups_are_counted_and_left_out_and_the_run_continues(start, caplog, monkeypatch):
    only_hangs_take_time(monkeypatch, lambda prompts: "5+5=" in prompts)
    names = {"hangs_on_one": (5, "gave no answer"), "crashes_on_one": (3, "exited with status 1")}
    status, folder = start(*names, "waits", options=["--reward-timeout", "1"])
    assert status == 0
    rows = steps(folder)  # three steps, so each of the 12 prompts once
    assert sum(row["rewards/failures"] for row in rows) == 2
    for name, (prompt, reason) in names.items():
        warning = (
            rf"the reward function {name} {reason}.* for prompt {prompt}; "
            "its 4 completions are left out of the step"
        )
        assert len(re.findall(warning, caplog.text)) == 1
    for row in rows:
        # The same reward three times, over the same samples.
        assert row["reward"] == pytest.approx(3 * row["rewards/hangs_on_one/mean"])
        assert math.isfinite(row["loss"])
        assert row["grad_norm"] > 0


def test_a_run_without_rewards_ends_and_logs_no_reward(start, capsys):
    status, folder = start("always_crashes", options=["--generation-batch-size", "4"])
    assert status == 2
    expected = "error: the reward function always_crashes returned nothing in 3 calls in a row"
    assert last_error(capsys).startswith(expected)
    rows = [row for row in lines(folder) if "step" in row]
    assert [row["rewards/failures"] for row in rows] == [1, 1]
    # There is no reward at all, not a reward of 0.
    assert not any("reward" in row or row["grad_norm"] for row in rows)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["NOT_SET_ANYWHERE"], "--reward-env NOT_SET_ANYWHERE: the environment has no such"),
        (["HOME", "--reward-timeout", "0"], "--reward-env has no effect with --reward-timeout 0"),
    ],
)
def test_variables_that_cannot_be_passed_to_rewards_are_reported(start, capsys, options, sentence):
    assert start("waits", options=["--reward-env", *options])[0] == 2
    assert last_error(capsys).startswith(f"error: {sentence}")


def test_a_metric_of_the_trainer_cannot_be_logged(start, capsys):
    assert start("logs_a_taken_name", options=["--max-steps", "1"])[0] == 2
    assert last_error(capsys).startswith("error: log_metric('loss', …): the log already uses")


def test_the_function_in_the_docs_works_on_messages_and_on_texts(tiny_base, files, tmp_path):
    text = (Path(train.__file__).parent / "docs" / "rewards.md").read_text()
    (tmp_path / "my_rewards.py").write_text(re.search(r"```python\n(.*?)```", text, re.DOTALL)[1])
    spec = f"{tmp_path / 'my_rewards.py'}:brevity"
    options = ["--reward-funcs", spec, "--log-completions", "--max-steps", "2"]
    assert train.main(arguments(tiny_base, files, tmp_path / "run", *options)) == 0
    rows = steps(tmp_path / "run")
    assert rows[0]["reward"] == 0 > rows[1]["reward"]
    assert all(row["words/max"] > 0 for row in rows)
    samples = make_samples(["one two", ""], prompt=[{"role": "user", "content": "3+4="}])
    Runner([spec]).score(samples, TrainerState(1, 2, 0.0))
    assert [(s.reward, s.extra) for s in samples] == [(-0.01, {"words": 2}), (None, {"words": 0})]


def test_functions_know_the_step_and_a_run_is_the_same_with_and_without_the_process(
    start, files, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)  # restores the folder that a function changes
    names = ("curriculum", "waits", "changes_the_folder")
    options = ["--eval-steps", "3", "--eval-data", str(files / "data.jsonl")]
    # With one rank no other waits, so the function may take longer than --ddp-timeout.
    options += ["--ddp-timeout", "90", "--eval-samples", "2", "--reward-timeout"]
    here, folder = (start(*names, options=[*options, t], folder=t) for t in ("0", "60"))
    assert here[0] == folder[0] == 0
    rows, log = steps(folder[1]), lines(folder[1])
    assert [row.pop("rewards/failures") for row in rows] == [0, 0, 0]
    assert steps(here[1]) == rows
    assert [row["progress"] for row in rows] == pytest.approx([0, 1 / 3, 2 / 3])
    # Each step takes 4 of 12 prompts.
    assert [row["epoch_so_far"] for row in rows] == pytest.approx([0, 1 / 3, 2 / 3])
    for step, row in enumerate(rows):
        expected = step * row["completions/mean_length"]
        assert row["rewards/curriculum/mean"] == pytest.approx(expected)
    assert [row["eval/progress"] for row in log if "eval/after" in row] == [0, 1]
    assert (folder[1] / "checkpoint-3").is_dir()  # not in "/"


def test_a_run_that_is_asked_to_stop_saves_without_an_evaluation(start, files):
    """An evaluation may take longer than a scheduler waits, and the step would be lost."""
    options = ["--eval-steps", "2", "--eval-data", str(files / "data.jsonl"), "--max-steps", "9"]
    status, folder = start("asks_to_stop_in_the_second_step", options=options)
    assert status == 0
    assert [row["eval/after"] for row in lines(folder) if "eval/after" in row] == [0]
    assert (folder / "checkpoint-2").is_dir()


def test_a_mistake_of_a_function_ends_the_run(start, capsys):
    status, folder = start("nan_in_the_second_step")
    assert status == 2
    expected = (
        "error: the reward function nan_in_the_second_step returned nan "
        r"for sample 0 of prompt \d+;"
    )
    assert re.match(expected, last_error(capsys))
    assert [row["step"] for row in steps(folder)] == [0]


def test_each_rank_scores_its_own_samples_and_the_log_covers_all(
    start, tiny_base, files, tmp_path, functions
):
    names = ("crashes_on_one", "curriculum")
    specs = [f"{functions}:{name}" for name in names]
    options = ["--log-completions", "--reward-funcs", *specs]
    two = arguments(tiny_base, files, tmp_path / "two", *options)
    assert run(2, train.main, two) == [0, 0]
    assert start(*names, folder="one")[0] == 0
    same = ["rewards/failures", "progress", "reward", "loss"]
    same += [f"rewards/{name}/mean" for name in names]
    for a, b in zip(steps(tmp_path / "one"), steps(tmp_path / "two"), strict=True):
        for name in same:
            assert a[name] == pytest.approx(b[name], abs=1e-6)
    for file in (tmp_path / "two" / "completions").iterdir():
        assert len(file.read_text().splitlines()) == 16  # of both ranks


def test_ranks_must_wait_longer_for_each_other_than_for_a_function():
    cfg = Config(
        model="-",
        data=("-",),
        reward_funcs=(f"{REWARD}:even",),
        ddp_timeout=90,
        reward_timeout=50,
    )
    message = "--reward-timeout 50: scoring may take up to 100 s, but .* --ddp-timeout 90"
    with pytest.raises(UserError, match=message):
        make_rewards(cfg, World(0, 2, torch.device("cpu")))
