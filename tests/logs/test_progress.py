"""The console fits into 120 columns, names every reward function, and shows only what says
something; a run begins with its sizes and ends with its checkpoint.

Read before: test_metrics.py. Read next: test_console.py.
"""

import re

import pytest

from nanogrpo import Config
from nanogrpo.logs.progress import FLAT, Progress

ROW = {
    "epoch": 0.25,
    "reward": 1.297,
    "rewards/accuracy_reward/mean": 0.3125,
    "rewards/format_reward/mean": 0.984,
    "frac_reward_zero_std": 0.5,
    "completions/mean_length": 1234.5,
    "completions/clipped_ratio": 0.0,
    "entropy": 0.00004,
    "clip_ratio/region_mean": 0.0,
    "sampling/sampling_logp_difference/mean": 1.6e-7,
    "tokens_per_second": 7471.3,
}
FUNCTIONS = ["accuracy_reward", "format_reward"]


def table(capsys, functions=FUNCTIONS, row=ROW, device="cpu", steps=1, **options) -> list[str]:
    """Return the lines that are printed for some steps."""
    rows = Progress(Config(max_steps=60, **options), device, start=0)
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
    alone = named(table(capsys, FUNCTIONS[:1]))  # a single function is the reward
    assert list(alone) == [
        *("step", "epoch", "reward", "zero_std", "length", "entropy", "tok/s", "left")
    ]


def test_what_is_not_0_is_named_at_the_end_of_a_row(capsys):
    more = {"completions/clipped_ratio": 0.25, "clip_ratio/region_mean": 0.02, "kl": 0.01}
    more["sampling/sampling_logp_difference/mean"] = 2e-5
    ends = "  truncated 0.250  clip 0.020  kl 0.010"
    assert table(capsys, row={**ROW, **more})[1].endswith(f"{ends}  gap 2e-05")
    # a GPU computes in bfloat16, which explains a small gap
    assert table(capsys, row={**ROW, **more}, device="cuda")[1].endswith(ends)


def test_a_missing_value_is_a_dash_and_the_header_returns(capsys):
    names = [f"a_function_with_a_long_name_{i}" for i in range(3)]
    shown = table(capsys, names, row={"tokens_per_second": 1.0}, steps=41)
    assert named(shown)["reward"] == named(shown)["entropy"] == "-"
    assert shown[0].count("a_function") == 3
    assert len(shown[0]) == len(shown[1]) <= 120
    assert [i for i, line in enumerate(shown) if "reward" in line] == [0, 21, 42]


def test_there_is_one_warning_per_streak_of_steps_without_a_gradient(capsys):
    rows, warned = Progress(Config(max_steps=60), "cpu", start=0), []
    for step, share in enumerate([1.0] * (FLAT - 1) + [0.9] + [1.0] * 2 * FLAT + [0.0]):
        rows.step(step, {**ROW, "frac_tokens_skipped": share}, FUNCTIONS)
        warned += [step] * capsys.readouterr().err.count("warning: in 5 steps in a row, all")
    assert warned == [2 * FLAT - 1]


def test_a_run_begins_with_its_sizes_and_ends_with_its_checkpoint(
    rows_of, tmp_path, capsys, caplog, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "run"
    with caplog.at_level("INFO", logger="nanogrpo"):
        rows = rows_of("--eval-data FILES/uneven.jsonl --eval-steps 9 --lora-r 2", folder="run")
    messages = [record.getMessage() for record in caplog.records]
    assert messages[0].startswith("computing on cpu in float32: PyTorch functions")
    first, second = messages[1].splitlines()
    assert first == (
        "12 prompts and 9 held-out prompts; with 4 per step, an epoch is 3 steps, and this run"
        " (3 steps) is 1.000 epochs"
    )
    assert re.fullmatch(r"training \d,\d{3} of 5\d,\d{3} parameters", second)
    summary, *closing = capsys.readouterr().err.splitlines()[-5:]
    assert re.fullmatch(
        r"held-out reward \S+ → \S+, best \S+ after step [03]; 3 steps in 0:\d\d, \S+ tokens",
        summary,
    )
    assert closing == [
        f"the model is in {folder}/checkpoint-3; next:",
        *(f"  nanogrpo {command} {folder}/checkpoint-3" for command in ("chat", "eval")),
        f"  nanogrpo view {folder}",
    ]
    assert [row["epoch"] for row in rows] == [pytest.approx((i + 1) / 3) for i in range(3)]
