"""The completions: one file per step with TRL's columns and those of `log_extra`, and a table.

Read before: test_console.py. Read next: test_report.py.
"""

from types import SimpleNamespace

import pytest

from nanogrpo import Config
from nanogrpo.extras import completions
from nanogrpo.extras.completions import Completions, record
from nanogrpo.rewards.scorer import COLUMNS
from tests.conftest import SOLO, refused
from tests.logs.conftest import completions_of, sample

REWARD = """
def even(completion_ids, log_extra, **kwargs):
    log_extra("length", [len(ids) for ids in completion_ids])
    return [sum(i % 2 == 0 for i in ids) / len(ids) for ids in completion_ids]
"""


def started(folder, start: int = 0) -> tuple[Completions, SimpleNamespace]:
    """Return the feature, prepared for a run that continues after `start` steps, and the run."""
    run = SimpleNamespace(world=SOLO, start=start, done=start)
    log = Completions(Config(output_dir=str(folder), log_completions=True))
    log.running(run)
    return log, run


def test_every_completion_of_a_run_is_written_with_its_rewards(rows_of, tmp_path, capsys):
    (tmp_path / "reward.py").write_text(REWARD)
    options = f"--reward-funcs {tmp_path}/reward.py:even soft_overlong:max_completion_len=8"
    options += " --max-steps 2 --log-completions --num-completions-to-print 3"
    found = rows_of(options, folder="run")
    names = sorted(p.name for p in (tmp_path / "run" / "completions").iterdir())
    assert names == ["completions_00001.jsonl", "completions_00002.jsonl"]
    for step, logged in enumerate(found):
        rows = completions_of(tmp_path / "run", step + 1)
        assert len(rows) == 16
        functions = "even", "soft_overlong_punishment_reward"
        own = ["step", "prompt", "completion", "reward", "advantage", "stopped"]
        assert list(rows[0]) == [*own[:3], *functions, *own[3:], "length"]
        assert {*own} <= {*COLUMNS}
        assert {row["step"] for row in rows} == {step}
        assert sum(row["reward"] for row in rows) / 16 == pytest.approx(logged["reward"])
        assert sum(row["length"] for row in rows) / 16 == logged["completions/mean_length"]
        assert sum(not row["stopped"] for row in rows) / 16 == logged["completions/clipped_ratio"]
        for group in (rows[i : i + 4] for i in range(0, 16, 4)):
            assert len({row["prompt"] for row in group}) == 1
            assert sum(row["advantage"] for row in group) == pytest.approx(0, abs=1e-4)
    shown = capsys.readouterr().err
    assert shown.count("completions of step") == 2
    assert shown.count("│ length ") + shown.count(" length ") >= 6  # of log_extra
    assert shown.count("  epoch  ") == 2  # the header returns after a table


def test_a_function_or_data_with_the_name_of_a_column_hides_nothing():
    one = sample(3, step=1.0, reward=2.0, even=0.0)
    one.prompt.columns = {
        "answer": 7,
        "even": "no",
        "long": "x" * 999,
        "tests": ["a"],
        "none": None,
    }
    row = record(5, one)
    expected = {"step": 5, "step_reward": 1.0, "reward": 3.0, "reward_reward": 2.0, "even": 0.0}
    expected |= {"answer": "7", "long": "x" * 200}
    assert expected.items() <= row.items()
    assert not {"tests", "none"} & row.keys()


def test_any_text_and_any_value_can_be_written(tmp_path):
    """JSON data may hold a lone surrogate, and a reward function may log anything."""
    odd = sample(2, a=None)
    odd.text, odd.extra = "\u2028 \U0001f600 é", {"what": {1, 2}, "source": "a\ud800é"}
    odd.prompt.text = [{"role": "user", "content": "hi\n"}]
    log, run = started(tmp_path)
    log.step(run, 0, [odd])
    (row,) = completions_of(tmp_path, 1)
    expected = {"a": None, "reward": None, "what": "{1, 2}", "source": "a\ud800é"}
    expected |= {"completion": odd.text, "prompt": odd.prompt.text}
    assert expected.items() <= row.items()


def test_a_resumed_run_deletes_repeated_steps_and_a_new_run_keeps_the_old_folder(tmp_path):
    log, run = started(tmp_path)
    for step in range(4):
        log.step(run, step, [sample(step + 1, a=1.0)])
        run.done = step
        log.evaluated(run, [sample(2)])
        (tmp_path / f"completions/tokens_{step:05d}.jsonl.gz").touch()
    for name in ("eval_00001.7.tmp", "tokens_00001.jsonl.7.tmp"):  # a killed run was writing them
        (tmp_path / "completions" / name).touch()
    started(tmp_path, start=2)
    names = [p.name.partition(".")[0] for p in (tmp_path / "completions").iterdir()]
    kinds = "completions_00001 completions_00002 eval_00000 eval_00001 eval_00002"
    assert sorted(names) == f"{kinds} tokens_00000 tokens_00001 tokens_00002".split()
    started(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["completions-1"]


def test_what_cannot_be_written_is_a_user_error(tmp_path):
    log, run = started(tmp_path)
    (tmp_path / "completions").write_text("in the way")
    with refused(r"_00001\.jsonl could not be written .*\): choose"):
        log.step(run, 0, [sample(1, a=1.0)])


def test_the_table_shows_text_as_it_is_and_cuts_it_in_front(capsys):
    odd = sample(2, accuracy_reward=1.0, brevity=-0.5)
    odd.prompt.text = [{"role": "user", "content": f"no{'x' * 189}[INST] hi [/INST]"}]
    odd.prompt.columns = {"answer": 12}
    odd.text, odd.extra = "[/bold] :smile: \x1b[2J", {"source": "[red]web[/red]", "judge": 0.12345}
    completions.show([record(6, odd), record(6, sample(1, a=None))])
    shown = capsys.readouterr().err
    assert "completions of step 7" in shown
    assert "xxx" in shown
    assert "nox" not in shown
    for words in ("[/INST]", "[/bold] :smile:", "\N{REPLACEMENT CHARACTER}[2J", "accuracy_reward"):
        assert words in shown
    for words in (
        "brevity -0.500",
        "answer 12",
        "source [red]web[/red]",
        "judge 0.123",
        "a -",
        "reward -",
    ):
        assert words in shown
