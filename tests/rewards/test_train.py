"""Whole runs with rewards that hang, crash, wait, log and change: what the log says of them, and
that nothing is silently wrong.

Read next: test_reward_process.py, where each case is looked at by itself.
"""

import math
import re
from pathlib import Path

import pytest

import train
from tests.conftest import arguments, lines, steps
from tests.ranks import REWARD, run
from tests.rewards.clock import only_hangs_take_time

FUNCTIONS = """
import asyncio, os, signal, time

def even(completion_ids):
    return [sum(i % 2 == 0 for i in ids) / len(ids) for ids in completion_ids]

def hangs_on_one(prompts, completion_ids, **kwargs):
    if "3+3=" in prompts:
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
    log_metric("epoch", trainer_state.epoch)
    return [len(ids) * trainer_state.global_step for ids in completion_ids]

def nan_in_the_second_step(completion_ids, trainer_state, **kwargs):
    return [float("nan") if trainer_state.global_step == 1 else value for value in even(completion_ids)]

def asks_to_stop_in_the_second_step(completion_ids, trainer_state, **kwargs):
    if trainer_state.global_step == 1:
        os.kill(os.getppid(), signal.SIGTERM)
    return even(completion_ids)

def leaves_the_folder(completion_ids, **kwargs):
    os.chdir("/")
    return even(completion_ids)
"""


@pytest.fixture
def functions(tmp_path) -> str:
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    return str(tmp_path / "functions.py")


@pytest.mark.parametrize(
    ("name", "why"),
    [("hangs_on_one", "gave no answer within"), ("crashes_on_one", "exited with status 1")],
)
def test_a_lost_group_is_counted_and_left_out_and_the_run_goes_on(
    tiny_base, files, tmp_path, functions, caplog, monkeypatch, name, why
):
    only_hangs_take_time(monkeypatch, lambda prompts: name == "hangs_on_one" and "3+3=" in prompts)
    options = [
        "--reward-funcs",
        f"{functions}:{name}",
        f"{functions}:waits",
        "--reward-timeout",
        "2",
        "--max-steps",
        "3",
    ]
    assert train.main(arguments(tiny_base, files, tmp_path / "run", *options)) == 0
    rows = steps(tmp_path / "run")  # an epoch: each prompt once
    assert sorted(row["rewards/failures"] for row in rows) == [0, 0, 1]
    assert (
        len(
            re.findall(
                rf"the reward function {name} {why}.* for prompt 3: its 4 completions are left out\.",
                caplog.text,
            )
        )
        == 1
    )
    for row in rows:
        # the same function twice, over the same samples
        assert row["reward"] == pytest.approx(2 * row[f"rewards/{name}/mean"])
        assert math.isfinite(row["loss"])
        assert row["grad_norm"] > 0


def test_slow_imports_do_not_cost_the_innocent(tiny_base, files, tmp_path, functions, monkeypatch):
    only_hangs_take_time(monkeypatch, imports=0.9)
    crash = 'def f(prompts, **kwargs):\n    if {"1+1=", "2+2=", "3+3="} & {*prompts}:\n        os._exit(1)\n'
    code = f"import os\n{crash}    return [float(i % 2) for i in range(len(prompts))]\n"
    (tmp_path / "slow.py").write_text(code)
    options = [
        "--reward-funcs",
        f"{tmp_path / 'slow.py'}:f",
        "--reward-timeout",
        "1.5",
        "--max-steps",
        "1",
    ]
    assert (
        train.main(
            arguments(tiny_base, files, tmp_path / "run", *options, "--generation-batch-size", "48")
        )
        == 0
    )
    # all 12 prompts are in the step
    assert [row["rewards/failures"] for row in steps(tmp_path / "run")] == [3]


def test_nothing_but_loss_ends_the_run_and_saves_nothing_wrong(
    tiny_base, files, tmp_path, functions, capsys
):
    options = ["--reward-funcs", f"{functions}:always_crashes", "--max-steps", "9"]
    assert train.main(arguments(tiny_base, files, tmp_path / "run", *options)) == 2
    told = capsys.readouterr().err.strip().splitlines()
    assert re.match(
        r"error: the reward function always_crashes gave nothing in 3 calls in a row", told[-1]
    )
    rows = steps(tmp_path / "run") or [row for row in lines(tmp_path / "run") if "step" in row]
    assert [row["rewards/failures"] for row in rows] == [4, 4]
    # no reward at all, and not 0
    assert not any("reward" in row or row["grad_norm"] for row in rows)


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (
            'log_extra("advantage", completions)',
            "log_extra('advantage', …): the table has that column for itself",
        ),
        (
            'log_extra("format_reward", completions)',
            "log_extra('format_reward', …): the table has that column for itself",
        ),
        (
            'log_metric("rewards/failures", 1)',
            "the reward function f raised ValueError: log_metric('rewards/failures', …): the log",
        ),
        ('log_metric("loss", 1)', "log_metric('loss', …): the log has that name for itself"),
        # of an evaluation
        ('log_metric("reward", 1)', "log_metric('reward', …): the log has that name for itself"),
        (
            'log_metric("num_tokens", 1)',
            "log_metric('num_tokens', …): the log has that name for itself",
        ),
    ],
)
def test_a_name_of_the_trainers_is_refused_and_neither_is_lost(
    tiny_base, files, tmp_path, capsys, call, told
):
    (tmp_path / "f.py").write_text(
        f"def f(completions, log_extra, log_metric, **_):\n    {call}\n    return [1.0] * len(completions)\n"
    )
    options = ["--reward-funcs", f"{tmp_path / 'f.py'}:f", "format", "--max-steps", "1"]
    if '("reward' in call:
        options += [
            "--eval-steps",
            "1",
            "--eval-data",
            str(files / "data.jsonl"),
            "--eval-samples",
            "1",
        ]
    assert train.main(arguments(tiny_base, files, tmp_path / "run", *options)) == 2
    assert capsys.readouterr().err.strip().splitlines()[-1].startswith(f"error: {told}")


@pytest.mark.parametrize("data", ["arithmetic", "texts"])
def test_the_function_of_the_docs_runs_on_messages_and_on_texts(tiny_base, files, tmp_path, data):
    text = (Path(train.__file__).parent / "docs" / "rewards.md").read_text()
    (tmp_path / "my_rewards.py").write_text(re.search(r"```python\n(.*?)```", text, re.DOTALL)[1])
    options = [
        "--reward-funcs",
        f"{tmp_path / 'my_rewards.py'}:brevity",
        "--log-completions",
        "--max-steps",
        "2",
    ]
    options += ["--data", "arithmetic"] if data == "arithmetic" else []
    assert train.main(arguments(tiny_base, files, tmp_path / "run", *options)) == 0
    rows = steps(tmp_path / "run")
    assert rows[0]["reward"] == 0 > rows[1]["reward"]
    assert all(row["words/max"] > 0 for row in rows)


def test_functions_know_the_step_and_log_what_they_like(tiny_base, files, tmp_path, functions):
    options = [
        "--reward-funcs",
        f"{functions}:curriculum",
        f"{functions}:leaves_the_folder",
        "--eval-steps",
        "3",
    ]
    options += ["--eval-data", str(files / "data.jsonl"), "--max-steps", "3"]
    assert train.main(arguments(tiny_base, files, tmp_path / "run", *options)) == 0
    rows = steps(tmp_path / "run")
    assert [row["progress"] for row in rows] == pytest.approx([0, 1 / 3, 2 / 3])
    # 4 of 12 prompts a step
    assert [row["epoch"] for row in rows] == pytest.approx([0, 1 / 3, 2 / 3])
    for step, row in enumerate(rows):
        assert row["rewards/curriculum/mean"] == pytest.approx(
            step * row["completions/mean_length"]
        )
    held_out = [row for row in lines(tmp_path / "run") if "eval/after" in row]
    assert [row["eval/progress"] for row in held_out] == [0, 1]
    assert (tmp_path / "run" / "checkpoint-3").is_dir()  # and not in "/"


def test_who_is_asked_to_stop_saves_and_evaluates_no_more(tiny_base, files, tmp_path, functions):
    """An evaluation may take longer than a scheduler waits, and the step would be lost."""
    options = [
        "--reward-funcs",
        f"{functions}:asks_to_stop_in_the_second_step",
        "--eval-steps",
        "2",
    ]
    options += ["--eval-data", str(files / "data.jsonl"), "--max-steps", "9"]
    assert train.main(arguments(tiny_base, files, tmp_path / "run", *options)) == 0
    assert [row["eval/after"] for row in lines(tmp_path / "run") if "eval/after" in row] == [0]
    assert (tmp_path / "run" / "checkpoint-2").is_dir()


def test_with_and_without_a_process_the_run_is_the_same(tiny_base, files, tmp_path, functions):
    option = ["--reward-funcs", f"{functions}:curriculum", f"{functions}:waits", "--max-steps", "2"]
    for timeout in ("0", "60"):
        output = tmp_path / timeout
        assert (
            train.main(arguments(tiny_base, files, output, *option, "--reward-timeout", timeout))
            == 0
        )
    here, there = steps(tmp_path / "0"), steps(tmp_path / "60")
    assert [row.pop("rewards/failures") for row in there] == [0, 0]
    assert here == there


def test_a_mistake_of_a_function_ends_the_run(tiny_base, files, tmp_path, functions, capsys):
    options = ["--reward-funcs", f"{functions}:nan_in_the_second_step"]
    assert train.main(arguments(tiny_base, files, tmp_path / "run", *options)) == 2
    told = capsys.readouterr().err.strip().splitlines()
    assert re.match(
        r"error: the reward function nan_in_the_second_step returned nan for sample 0 of prompt \d+;",
        told[-1],
    )
    assert [row["step"] for row in steps(tmp_path / "run")] == [0]


def two_ranks(options: list[str]) -> int:
    return train.main(options)


def test_each_rank_scores_its_own_and_the_log_is_of_all(tiny_base, files, tmp_path, functions):
    options = [
        "--reward-funcs",
        f"{functions}:crashes_on_one",
        f"{functions}:curriculum",
        "--max-steps",
        "3",
    ]
    assert run(2, two_ranks, arguments(tiny_base, files, tmp_path / "two", *options)) == [0, 0]
    assert train.main(arguments(tiny_base, files, tmp_path / "one", *options)) == 0
    one, two = steps(tmp_path / "one"), steps(tmp_path / "two")
    for a, b in zip(one, two, strict=True):
        for name in (
            "rewards/failures",
            "progress",
            "reward",
            "rewards/curriculum/mean",
            "rewards/crashes_on_one/mean",
            "loss",
        ):
            assert a[name] == pytest.approx(b[name], abs=1e-6)


def test_ranks_must_wait_longer_for_each_other_than_for_a_function(tiny_base, files, tmp_path):
    options = ["--reward-funcs", f"{REWARD}:even", "--ddp-timeout", "90", "--reward-timeout", "50"]
    with pytest.raises(
        AssertionError,
        match=r"(?s)^\[[12], [12]\].*--reward-timeout 50: scoring may take up to 100 s, but .* --ddp-timeout 90",
    ):
        run(2, two_ranks, arguments(tiny_base, files, tmp_path / "run", *options))
    # alone, nobody waits
    assert (
        train.main(arguments(tiny_base, files, tmp_path / "run", *options, "--max-steps", "1")) == 0
    )
