"""The completions table: one file per step with TRL's columns and those of `log_extra`.

Read before: test_console.py. Read next: test_report.py.
"""

import json

import pytest

import train
from nanogrpo.config import Config
from nanogrpo.distributed.world import join
from nanogrpo.errors import UserError
from nanogrpo.logs.completions import Completions, record
from nanogrpo.rewards.runner import COLUMNS
from tests.conftest import SOLO, arguments, steps
from tests.logs.conftest import sample
from tests.ranks import run

REWARD = """
def even(completion_ids, log_extra, **kwargs):
    log_extra("length", [len(ids) for ids in completion_ids])
    return [sum(i % 2 == 0 for i in ids) / len(ids) for ids in completion_ids]
"""


def table(folder, step: int) -> list[dict]:
    return [
        json.loads(line)
        for line in (folder / "completions" / f"completions_{step:05d}.jsonl").open(
            encoding="utf-8"
        )
    ]


def test_a_function_with_the_name_of_a_column_hides_nothing():
    row = record(5, sample(3, step=1.0, reward=2.0, even=0.0))
    expected = {"step": 5, "step_reward": 1.0, "reward": 3.0, "reward_reward": 2.0, "even": 0.0}
    assert expected.items() <= row.items()


def test_every_completion_of_a_run_is_written_with_its_rewards(tiny_base, files, tmp_path):
    (tmp_path / "reward.py").write_text(REWARD)
    options = [
        "--reward-funcs",
        f"{tmp_path / 'reward.py'}:even",
        "length:8",
        "--log-completions",
        "--max-steps",
        "2",
    ]
    assert train.main(arguments(tiny_base, files, tmp_path / "run", *options)) == 0
    assert sorted(p.name for p in (tmp_path / "run" / "completions").iterdir()) == [
        f"completions_0000{i}.jsonl" for i in (1, 2)
    ]
    for step, logged in enumerate(steps(tmp_path / "run")):
        rows = table(tmp_path / "run", step + 1)
        assert len(rows) == 16
        columns = [
            "step",
            "prompt",
            "completion",
            "even",
            "soft_overlong_punishment_reward",
            "reward",
            "advantage",
            "stopped",
            "length",
        ]
        assert list(rows[0]) == columns
        own = {*columns} - {"even", "soft_overlong_punishment_reward", "length"}
        assert set(COLUMNS) == own | {"images"}
        assert {row["step"] for row in rows} == {step}
        assert sum(row["reward"] for row in rows) / 16 == pytest.approx(logged["reward"])
        assert sum(row["length"] for row in rows) / 16 == logged["completions/mean_length"]
        assert sum(not row["stopped"] for row in rows) / 16 == logged["completions/clipped_ratio"]
        for group in (rows[i : i + 4] for i in range(0, 16, 4)):
            assert len({row["prompt"] for row in group}) == 1
            assert sum(row["advantage"] for row in group) == pytest.approx(0, abs=1e-4)


def test_a_lone_surrogate_is_written_as_an_escape(tmp_path):
    """JSON data may hold a lone surrogate, and a reward function may log it."""
    (given := sample(3, a=1.0)).extra = {"source": "a\ud800é"}
    Completions(config(tmp_path), SOLO, start=0).log(0, [given])
    assert table(tmp_path, 1)[0]["source"] == "a\ud800é"


def log_on_two_ranks(folder: str) -> None:
    with join(Config(device="cpu")) as world:
        samples = [sample(1 + world.rank, a=float(world.rank)), sample(3, a=2.0 + world.rank)]
        Completions(config(folder), world, start=0).log(0, samples)


def test_the_file_holds_the_completions_of_all_ranks_in_their_order(tmp_path):
    run(2, log_on_two_ranks, str(tmp_path))
    assert [row["reward"] for row in table(tmp_path, 1)] == [0.0, 2.0, 1.0, 3.0]


def config(folder, **options) -> Config:
    return Config(model="-", data=("-",), output_dir=str(folder), log_completions=True, **options)


def test_a_resumed_run_deletes_repeated_steps_and_a_new_run_keeps_the_old_folder(
    tmp_path,
):
    first = Completions(config(tmp_path), SOLO, start=0)
    for step in range(4):
        first.log(step, [sample(step + 1, a=1.0)])
    Completions(config(tmp_path), SOLO, start=2)
    assert sorted(p.name for p in (tmp_path / "completions").iterdir()) == [
        "completions_00001.jsonl",
        "completions_00002.jsonl",
    ]
    Completions(config(tmp_path), SOLO, start=0)
    assert [p.name for p in tmp_path.iterdir()] == ["completions-1"]


def test_any_text_and_any_value_can_be_written(tmp_path):
    odd = sample(2, a=None)
    odd.text, odd.extra = (
        "\u2028 \ud83d\ude00".encode("utf-16", "surrogatepass").decode("utf-16"),
        {"what": {1, 2}},
    )
    odd.prompt.text = [{"role": "user", "content": "hi\n"}]
    Completions(config(tmp_path), SOLO, start=0).log(0, [odd])
    (row,) = table(tmp_path, 1)
    assert (row["completion"], row["a"], row["reward"], row["what"]) == (
        odd.text,
        None,
        None,
        "{1, 2}",
    )
    assert row["prompt"] == odd.prompt.text


def test_a_full_disk_is_a_user_error(tmp_path):
    out = Completions(config(tmp_path), SOLO, start=0)
    (tmp_path / "completions").write_text("in the way")
    with pytest.raises(
        UserError, match=r"completions_00001\.jsonl could not be written .*: make room"
    ):
        out.log(0, [sample(1, a=1.0)])
