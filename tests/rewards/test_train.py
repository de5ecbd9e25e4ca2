"""Whole runs with reward functions that hang, crash, wait, log and change: what the log reports.

Read next: test_process.py, which looks at each case by itself.
"""

import re
from pathlib import Path

import pytest

import train
from nanogrpo.rewards.call import TrainerState
from tests.conftest import arguments, lines, said, steps
from tests.rewards.conftest import make_samples, runner

FUNCTIONS = """
import asyncio, os, signal, time

def even(completion_ids):
    return [sum(i % 2 == 0 for i in ids) / len(ids) for ids in completion_ids]

def crashes_on_one(prompts, completion_ids, **kwargs):
    if "3+3=" in prompts:
        os._exit(1)
    return even(completion_ids)

async def waits(completion_ids, **kwargs):
    await asyncio.sleep(0.01)
    return even(completion_ids)

def curriculum(completion_ids, trainer_state, log_metric, **kwargs):
    log_metric("progress", trainer_state.global_step / trainer_state.max_steps)
    log_metric("epoch_so_far", trainer_state.epoch)
    return [len(ids) * trainer_state.global_step for ids in completion_ids]

def asks_to_stop_in_the_second_step(completion_ids, trainer_state, **kwargs):
    if trainer_state.global_step == 1:
        os.kill(os.getppid(), signal.SIGTERM)
    return even(completion_ids)

def changes_the_folder(completion_ids, **kwargs):
    os.chdir("/")
    return even(completion_ids)
"""


@pytest.fixture(scope="module")
def functions(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("rewards") / "functions.py"
    path.write_text(FUNCTIONS)
    return str(path)


@pytest.fixture
def start(tiny_base, files, tmp_path, functions, monkeypatch):
    """Start a run with these functions of the file above: returns the status and the folder, which
    is given relative to the working directory.
    """

    def start(*names: str, options="", folder="run") -> tuple[int, Path]:
        monkeypatch.chdir(tmp_path)
        specs = " ".join(f"{functions}:{name}" for name in names)
        argv = arguments(tiny_base, files, Path(folder), f"--reward-funcs {specs} {options}")
        return train.main(argv), tmp_path / folder

    return start


def test_only_the_reward_process_runs_a_package_and_it_gets_plain_log_probs(
    start, tmp_path, monkeypatch
):
    (tmp_path / "package").mkdir()
    (tmp_path / "package/__init__.py").write_text("import sys\nassert 'torch' not in sys.modules")
    code = "def first(logp, **_):\n    import package.__init__\n    return [x[0] for x in logp]"
    (tmp_path / "package/module.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    options = "--reward-funcs package.module:first --top-k 5 --max-steps 1"
    assert start(options=options)[0] == 0


def test_lost_steps_are_counted_and_train_nothing_and_the_run_continues(start, caplog):
    status, folder = start("crashes_on_one", "waits")
    assert status == 0
    rows = [
        row for row in lines(folder) if "step" in row
    ]  # three steps, so each of the 12 prompts once
    assert sorted(row["rewards/failures"] for row in rows) == [0, 0, 4]
    warning = "the reward function crashes_on_one exited with status 1; the 16 completions get"
    assert caplog.text.count(warning) == 1
    for row in rows:
        if row["rewards/failures"]:
            assert "reward" not in row  # no reward at all, not a reward of 0
            assert row["grad_norm"] == 0
        else:
            # The same reward twice, over the same samples.
            assert row["reward"] == pytest.approx(2 * row["rewards/waits/mean"])
            assert row["grad_norm"] > 0


def test_the_function_in_the_docs_works_on_messages_and_on_texts(rows_of, tmp_path):
    text = (Path(train.__file__).parent / "docs" / "rewards.md").read_text()
    (tmp_path / "my_rewards.py").write_text(re.search(r"```python\n(.*?)```", text, re.DOTALL)[1])
    spec = f"{tmp_path / 'my_rewards.py'}:brevity"
    rows = rows_of(f"--reward-funcs {spec} --log-completions --max-steps 2")
    assert rows[0]["reward"] == 0 > rows[1]["reward"]
    assert all(row["words/max"] > 0 for row in rows)
    samples = make_samples(["one two", ""], prompt=said("3+4="))
    runner(spec).score(samples, TrainerState(1, 2, 0.0))
    assert [(s.reward, s.extra) for s in samples] == [(-0.01, {"words": 2}), (None, {"words": 0})]


def test_functions_know_the_step_and_a_run_is_the_same_with_and_without_the_process(start, files):
    names = ("curriculum", "waits", "changes_the_folder")
    # With one rank no other waits, so the function may take longer than --ddp-timeout.
    options = f"--eval-steps 3 --eval-data {files}/data.jsonl --eval-samples 2 --ddp-timeout 90"
    here, folder = (
        start(*names, options=f"{options} --reward-timeout {t}", folder=t) for t in ("0", "60")
    )
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
    for output in (here[1], folder[1]):
        assert (output / "checkpoint-3").is_dir()  # not in "/"


def test_a_run_that_is_asked_to_stop_saves_without_an_evaluation(start, files):
    """An evaluation may take longer than a scheduler waits, and the step would be lost."""
    options = f"--eval-steps 2 --eval-data {files}/data.jsonl --max-steps 9"
    status, folder = start("asks_to_stop_in_the_second_step", options=options)
    assert status == 0
    assert [row["eval/after"] for row in lines(folder) if "eval/after" in row] == [0]
    assert (folder / "checkpoint-2").is_dir()
