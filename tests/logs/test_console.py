"""The log survives a kill and a resume, and the console shows text as it is.

Read before: test_metrics.py. Read next: test_completions.py, test_report.py.
"""

import json
from pathlib import Path

import pytest
import torch

from nanogrpo.config import Config
from nanogrpo.errors import UserError
from nanogrpo.logs import completions, metrics
from nanogrpo.logs.console import Log, provenance
from tests.conftest import SOLO
from tests.logs.conftest import sample


def config(folder, **options) -> Config:
    return Config(model="-", data=("-",), output_dir=str(folder), max_steps=9, **options)


def write(log: Log, steps: range) -> None:
    for step in steps:
        clock = metrics.Clock()
        with clock("sample"):
            pass
        log.step(
            step,
            metrics.facts([sample(4), sample(2, prompt=5)], SOLO),
            {"reward": float(step)},
            clock,
            {},
            [0.5],
        )


def rows(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_the_head_holds_options_versions_and_commit(tmp_path):
    write(Log(config(tmp_path, beta=0.25), world=SOLO, start=0), range(1))
    head, step = rows(tmp_path)
    assert head["run"]["beta"] == 0.25
    assert head["run"]["max_steps"] == 9
    assert head["versions"]["torch"] == torch.__version__
    assert len(head["commit"]) == 40 or head["commit"] == "unknown"
    assert head["device"]
    assert step["step"] == 0
    assert step["num_tokens"] == 4 + 3 + 2 + 5
    assert step["step_time"] == pytest.approx(step["time/sample"])
    assert step["tokens_per_second"] == pytest.approx(6 / step["step_time"])


def test_without_git_the_commit_is_unknown(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert provenance(config(tmp_path), SOLO)["commit"] == "unknown"


def test_a_log_that_was_removed_during_the_run_ends_it(tmp_path):
    """Creating it again would hide that its records are lost."""
    log = Log(config(tmp_path), world=SOLO, start=0)
    write(log, range(1))
    log.path.unlink()
    with pytest.raises(UserError, match=r"metrics.jsonl could not be written \(No such file"):
        write(log, range(1, 2))


def test_a_resumed_run_logs_no_step_twice_and_drops_a_half_written_line(tmp_path):
    log = Log(config(tmp_path), world=SOLO, start=0)
    log.evaluation(0, metrics.facts([sample(3, a=1.0)], SOLO), {})
    write(log, range(2))
    log.evaluation(2, metrics.facts([sample(3, a=1.0)], SOLO), {})
    write(log, range(2, 5))
    with (tmp_path / "metrics.jsonl").open("a") as f:
        f.write('{"step": 5, "rew')  # killed here
    log = Log(config(tmp_path), world=SOLO, start=3)  # the last checkpoint was after three steps
    write(log, range(3, 9))
    found = rows(tmp_path)
    steps = [row for row in found if "reward" in row]
    assert [row["step"] for row in steps] == list(range(9))
    # The count of tokens continues.
    assert [row["num_tokens"] for row in steps] == [14 * (i + 1) for i in range(9)]
    assert [row["eval/after"] for row in found if "eval/after" in row] == [0, 2]
    assert sum("run" in row for row in found) == 2
    assert not list(tmp_path.glob("*.tmp"))


def test_a_run_that_starts_over_keeps_the_old_log_under_another_name(tmp_path, caplog):
    old = []
    for number in range(3):
        log = Log(config(tmp_path), world=SOLO, start=0)
        log.evaluation(0, metrics.facts([sample(3, a=1.0)], SOLO), {})
        write(log, range(number + 1))
        found = [row for row in rows(tmp_path) if "run" not in row]
        assert [row.get("eval/after", row["step"]) for row in found] == [0, *range(number + 1)]
        assert found[-1]["num_tokens"] == 14 * (number + 1)
        if number == 1:  # even a damaged log is only renamed
            with (tmp_path / "metrics.jsonl").open("ab") as f:
                f.write(b'\xff\n{"step": 7}\n{"st')
        old.append((tmp_path / "metrics.jsonl").read_bytes())
    assert [(tmp_path / f"metrics-{i}.jsonl").read_bytes() for i in (1, 2)] == old[:2]
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "metrics-1.jsonl",
        "metrics-2.jsonl",
        "metrics.jsonl",
    ]
    assert [r.message for r in caplog.records] == [
        f"nothing to resume in {tmp_path}: starting over, "
        f"the old log is {tmp_path}/metrics-{i}.jsonl"
        for i in (1, 2)
    ]


def test_a_log_without_a_step_is_continued(tmp_path, caplog):
    Log(config(tmp_path), world=SOLO, start=0)  # and then the run ended with an error
    with (tmp_path / "metrics.jsonl").open("a") as f:
        f.write('{"run": {"model')
    write(Log(config(tmp_path), world=SOLO, start=0), range(1))
    assert ["run" in row for row in rows(tmp_path)] == [True, True, False]
    assert not caplog.records


@pytest.mark.parametrize(
    "line",
    [
        b'{"step": 1, "rew',
        b'{"step": 1, "a": "\xff"}',
        b"[1]",
        b"7",
        b'{"reward": 1}',
        b'{"step": 1, "num_tokens": "many"}',
        b'{"step": 1, "num_tokens": null}',
        b"[" * 10**5,
    ],
)
def test_a_damaged_line_is_reported_and_the_lines_after_it_are_kept(tmp_path, line):
    write(Log(config(tmp_path), world=SOLO, start=0), range(4))
    path = tmp_path / "metrics.jsonl"
    good = path.read_bytes().splitlines()
    good[2] = line  # in the middle, so it is not a half-written end
    path.write_bytes(b"\n".join(good) + b"\n")
    with pytest.raises(
        UserError, match=r"metrics\.jsonl:3 is not a record of a log: fix or remove this line"
    ) as caught:
        Log(config(tmp_path), world=SOLO, start=4)
    assert "\n" not in str(caught.value)
    assert path.read_bytes().splitlines() == good


def test_an_evaluation_leaves_out_missing_rewards(tmp_path):
    log = Log(config(tmp_path), world=SOLO, start=0)
    log.evaluation(
        4,
        metrics.facts(
            [sample(3, a=1.0, b=None), sample(5, a=None, b=None), sample(4, a=0.0, b=None)], SOLO
        ),
        {},
    )
    row = rows(tmp_path)[-1]
    assert row == {
        "step": 3,
        "eval/after": 4,
        "eval/rewards/a": 0.5,
        "eval/reward": 0.5,
        "eval/mean_length": 4,
    }


def test_the_names_of_the_log_cannot_be_logged(tmp_path):
    log, samples = Log(config(tmp_path), SOLO, start=0), metrics.facts([sample(3, a=1.0)], SOLO)
    message = r"^log_metric\('{}', …\): the log already uses this name; choose another$"
    clock = metrics.Clock()
    clock.seconds["sample"] = 1.0
    for name in ("loss", "num_tokens", "time/sample"):
        with pytest.raises(UserError, match=message.format(name)):
            log.step(0, samples, {"loss": 0.5}, clock, {"mine": 2.0, name: 1.0}, [0.5])
    with pytest.raises(UserError, match=message.format("reward")):
        log.evaluation(0, samples, {"reward": 1.0})
    assert ["run" in row for row in rows(tmp_path)] == [True]
    log.step(0, samples, {"loss": 0.5}, clock, {"mine": 2.0}, [0.5])
    log.evaluation(0, samples, {"mine": 3.0})
    assert [row.get("mine", row.get("eval/mine")) for row in rows(tmp_path)[1:]] == [2.0, 3.0]


def test_a_log_that_cannot_be_read_or_written_is_a_user_error(tmp_path, monkeypatch):
    log = Log(config(tmp_path), world=SOLO, start=0)
    log.path = log.path.parent / "gone" / "metrics.jsonl"
    with pytest.raises(UserError, match=r"metrics\.jsonl could not be written .*: make room"):
        write(log, range(1))
    write(Log(config(tmp_path), world=SOLO, start=0), range(2))
    (tmp_path / "metrics.tmp").mkdir()  # the name of the temporary file
    with pytest.raises(UserError, match=r"metrics\.jsonl could not be written .*: make room"):
        Log(config(tmp_path), world=SOLO, start=1)
    assert [row["step"] for row in rows(tmp_path) if "step" in row] == [0, 1]

    def fails(*_):
        raise OSError(30, "Read-only file system")

    for method in ("rename", "read_bytes"):  # a run that starts over renames the log
        with monkeypatch.context() as patch:
            patch.setattr(Path, method, fails)
            with pytest.raises(UserError, match=r"\.jsonl could not be written \(Read-only file"):
                Log(config(tmp_path), world=SOLO, start=0)


def test_completions_are_printed(capsys):
    chat = sample(2, a=1.0)
    chat.prompt.text = [{"role": "user", "content": "what is 3+4?"}]
    completions.show([chat, sample(1)])
    shown = capsys.readouterr().err
    assert "3+4" in shown
    assert shown.count("text") == 2


def shown_table(capsys, samples, width: int = 150, fits: bool = True) -> list[list[str]]:
    """Return the cells of each line of the printed table."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(completions.console, "width", width)
        completions.show(samples, step=6)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].strip() == "completions of step 7"
    assert (max(map(len, lines)) <= width) == fits
    return [
        [c.strip() for c in x.strip("┃│").replace("┃", "│").split("│")]
        for x in lines
        if "│" in x or "┃" in x
    ]


def test_the_table_has_a_column_for_each_reward_and_each_extra_and_cuts_in_front(capsys):
    first, second = (
        sample(2, accuracy_reward=1.0, brevity=-0.5),
        sample(2, accuracy_reward=None, brevity=0.25),
    )
    first.prompt.text, first.text = "x" * 250, "y" * 450
    first.extra = {"source": "[red]web[/red]", "words": 12}
    second.extra = {"judge": 0.12345}
    first.advantage = 1.0
    cells = shown_table(capsys, [first, second])
    assert cells[0] == [
        "prompt",
        "completion",
        "accuracy",
        "brevity",
        "reward",
        "advantage",
        "source",
        "words",
        "judge",
    ]
    assert cells[1][2:] == ["1.000", "-0.500", "0.500", "+1.00", "[red]web[/red]", "12", "-"]
    assert cells[-1][2:] == ["-", "0.250", "0.250", "+0.00", "-", "-", "0.123"]
    whole = ["".join(row[i] for row in cells[1:-1]) for i in (0, 1)]
    assert whole == ["…" + "x" * 199, "…" + "y" * 399]
    (single,) = shown_table(capsys, [sample(2, a=1.0)])[1:]
    assert single == ["?", "text", "1.000", "+0.00"]


def test_a_table_with_many_columns_keeps_them_all(capsys):
    many = sample(2, **{f"a_reward_with_a_long_name_{i}": 0.5 for i in range(6)})
    for width, fits in ((120, True), (60, False)):
        cells = shown_table(capsys, [many], width, fits)
        assert [*map(len, cells)] == [10] * len(cells)
        assert cells[-1][2:] == ["0.500"] * 6 + ["3.000", "+0.00"]


def test_completions_of_different_prompts_are_shown_first():
    groups = [sample(1) for _ in range(6)]
    for i, s in enumerate(groups):
        s.prompt.id, s.index = divmod(i, 2)
    chosen = [(s.prompt.id, s.index) for s in completions.spread(groups, 4)]
    assert chosen == [(0, 0), (1, 0), (2, 0), (0, 1)]


def test_text_is_printed_without_markup_and_control_characters(tmp_path, capsys):
    odd = sample(2, a=1.0)
    odd.prompt.text, odd.text = "[INST] hi [/INST]", "[/bold] :smile: \x1b[2J[red]x[/red]"
    completions.show([odd])
    shown = capsys.readouterr().err
    for words in (
        "[INST] hi [/INST]",
        "[/bold] :smile:",
        "\N{REPLACEMENT CHARACTER}[2J[red]x[/red]",
    ):
        assert words in shown
    log = Log(config(tmp_path), world=SOLO, start=0)
    log.evaluation(4, metrics.facts([sample(3, **{"a/b": 1.0, "[/x]": 0.5})], SOLO), {})
    assert "a/b 1.000  [/x] 0.500  mean_length 3.000" in capsys.readouterr().err
