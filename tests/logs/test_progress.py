"""The console fits into 120 columns, names every reward function, and shows only what says
something; a run begins with its sizes and ends with its checkpoint.

Read before: test_metrics.py. Read next: test_console.py.
"""

import os
import re
import signal

import pytest
import torch

import train
from nanogrpo.config import Config
from nanogrpo.distributed.world import World
from nanogrpo.logs import progress
from nanogrpo.logs.progress import Progress, duration, number
from tests.conftest import SOLO, arguments, lines

ROW = {
    "epoch": 0.25,
    "reward": 1.297,
    "rewards/accuracy_reward/mean": 0.3125,
    "rewards/format_reward/mean": 0.984,
    "frac_reward_zero_std": 0.5,
    "completions/mean_length": 1234.5,
    "completions/clipped_ratio": 0.0,
    "entropy": 0.00004,
    "kl": 0.01,
    "clip_ratio/region_mean": 0.02,
    "sampling/sampling_logp_difference/mean": 1.6e-7,
    "tokens_per_second": 7471.3,
}
FUNCTIONS = ["accuracy_reward", "format_reward"]


def table(capsys, functions=FUNCTIONS, row=ROW, world=SOLO, steps=1, **options) -> list[str]:
    """Return the lines that are printed for some steps."""
    cfg = Config(model="-", data=("-",), max_steps=60, **options)
    cfg.validate()
    rows = Progress(cfg, world, start=0)
    for step in range(steps):
        rows.step(step, row, functions)
    return capsys.readouterr().err.splitlines()


def named(shown: list[str]) -> dict[str, str]:
    """Return title → cell of the first row."""
    return dict(zip(shown[0].split(), shown[1].split()))


def test_a_row_has_a_column_for_every_reward_function(capsys):
    shown = table(capsys)
    assert named(shown) == {
        "step": "1/60",
        "epoch": "0.250",
        "reward": "1.297",
        "accuracy": "0.312",
        "format": "0.984",
        "zero_std": "0.500",
        "length": "1,234",
        "entropy": "4e-05",
        "tok/s": "7,471",
        "left": "0:00",
    }
    assert len(shown[0]) == len(shown[1]) <= 120  # the columns are aligned


def test_a_single_reward_function_is_the_reward(capsys):
    assert list(named(table(capsys, FUNCTIONS[:1]))) == [
        *("step", "epoch", "reward", "zero_std", "length", "entropy", "tok/s", "left")
    ]


@pytest.mark.parametrize(
    ("options", "title", "cell"),
    [
        ({"beta": 0.1}, "kl", "0.010"),
        ({"num_iterations": 2}, "clip", "0.020"),
        ({"steps_per_generation": 2}, "clip", "0.020"),
        ({"engine": "vllm"}, "gap", "2e-07"),
    ],
)
def test_a_column_appears_if_the_options_can_change_its_value(capsys, options, title, cell):
    assert title not in table(capsys)[0].split()
    assert named(table(capsys, **options))[title] == cell


def test_truncation_and_a_large_gap_are_named_at_the_end_of_a_row(capsys):
    bad = {**ROW, "completions/clipped_ratio": 0.25, "sampling/sampling_logp_difference/mean": 2e-5}
    assert table(capsys, row=bad)[1].endswith("  truncated 0.250  gap 2e-05")
    gpu = World(0, 1, torch.device("cuda"))  # computes in bfloat16, which explains a small gap
    assert table(capsys, row=bad, world=gpu)[1].endswith("  truncated 0.250")


def test_many_functions_with_long_names_fit_into_120_columns(capsys):
    names = [f"a_function_with_a_long_name_{i}" for i in range(6)]
    row = {**ROW, **{f"rewards/{name}/mean": -1234.5 for name in names}}
    header, first = table(capsys, names, row)
    assert len(header) <= 120
    assert header.count("a_fu") == first.count("-1,234") == 6
    names = ["length_reward", "reward", "b", "b_reward"]  # other columns have these short names
    titles = table(capsys, names, ROW)[0].split()
    assert titles[:8] == ["step", "epoch", "reward", "length_reward", "reward", "b", "b_reward"] + [
        "zero_std"
    ]


def test_a_missing_value_is_a_dash_and_the_header_returns(capsys):
    shown = table(capsys, row={"tokens_per_second": 1.0}, steps=41)
    assert named(shown)["reward"] == named(shown)["entropy"] == "-"
    assert [i for i, line in enumerate(shown) if "reward" in line] == [0, 21, 42]


def test_numbers_have_about_five_characters():
    values = [0.0, 9.9994, 9.9996, 99.996, 999.96, -0.5, 1e30, -0.0001, None]
    assert [*map(number, values)] == [
        *("0.000", "9.999", "10.00", "100.0", "1,000", "-0.500", "1e+30", "-1e-04", "-")
    ]
    assert [*map(duration, (0, 59.9, 60, 3599, 3600, 45296))] == [
        *("0:00", "0:59", "1:00", "59:59", "1:00:00", "12:34:56")
    ]


def test_the_summary_names_the_sizes():
    cfg = Config(model="-", data=("-",), max_steps=100)  # 8 prompts per step
    assert progress.summary(cfg, 7473, 256, 1000, 1000) == (
        "7,473 prompts and 256 held-out prompts; with 8 per step, an epoch is 934.1 steps, and this"
        " run (100 steps) is 0.107 epochs\ntraining all 1,000 parameters"
    )
    short = progress.summary(cfg, 400, 0, 1000, 2_000_000)
    assert "400 prompts; with 8 per step, an epoch is 50 steps, and" in short
    assert short.endswith("is 2.000 epochs\ntraining 1,000 of 2,000,000 parameters")


@pytest.fixture(scope="module")
def whole(tiny_base, files, tmp_path_factory):
    """The options of a run with adapters and evaluations, and its folder."""
    folder = tmp_path_factory.mktemp("progress") / "run"
    options = ["--eval-data", str(files / "uneven.jsonl"), "--eval-steps", "9", "--lora-r", "2"]
    return arguments(tiny_base, files, folder, *options), folder


def test_a_run_begins_with_its_sizes_and_ends_with_its_checkpoint(
    whole, capsys, caplog, monkeypatch
):
    argv, folder = whole
    monkeypatch.chdir(folder.parent)
    with caplog.at_level("INFO", logger="nanogrpo"):
        assert train.main(argv) == 0
    messages = [record.getMessage() for record in caplog.records]
    assert messages[0].startswith("computing on cpu in float32")
    first, second = messages[1].splitlines()
    assert first == (
        "12 prompts and 9 held-out prompts; with 4 per step, an epoch is 3 steps, and this run"
        " (3 steps) is 1.000 epochs"
    )
    assert re.fullmatch(r"training \d,\d{3} of 5\d,\d{3} parameters", second)
    assert messages[2].startswith("estimated memory")
    assert capsys.readouterr().err.splitlines()[-1] == (
        "the model is in run/checkpoint-3: try it with `nanogrpo chat run/checkpoint-3`, or"
        " measure it with `nanogrpo eval`"
    )
    rows = [row for row in lines(folder) if "reward" in row]
    assert [row["epoch"] for row in rows] == [pytest.approx((i + 1) / 3) for i in range(3)]


def test_a_run_that_a_signal_stops_ends_with_its_checkpoint_too(whole, capsys, monkeypatch):
    argv, folder = whole
    log_step = train.log_step

    def stop_in_the_second_step(run, step, *rest):
        log_step(run, step, *rest)
        if step == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(train, "log_step", stop_in_the_second_step)
    assert train.main([*argv, "--overwrite-output-dir"]) == 0
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("stopped after 2 of 3 steps (continue with --resume); the model is in ")
    assert f"`nanogrpo chat {folder}/checkpoint-2`" in last
    assert (folder / "checkpoint-2" / "config.json").exists()
