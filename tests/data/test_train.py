"""Runs of train.py on every kind of data. The reward function records the prompts that were drawn.

Read next: tests/test_mistakes.py (errors), test_order.py (the order in detail).
"""

import pytest

from tests.conftest import lines

SEEN = """
import os
def seen(prompts, completion_ids, **kwargs):
    with open(os.environ["SEEN"], "a") as f:
        f.write(" ".join(dict.fromkeys(prompts)) + chr(10))
    return [sum(i % 2 == 0 for i in ids) / len(ids) for ids in completion_ids]
"""


@pytest.fixture
def seen(tmp_path, monkeypatch):
    """The option that names the reward function, and a function that returns the prompts it saw:
    one list of different prompts per call.
    """
    (tmp_path / "seen.py").write_text(SEEN)
    monkeypatch.setenv("SEEN", str(tmp_path / "seen.txt"))
    option = ["--reward-funcs", f"{tmp_path / 'seen.py'}:seen"]
    return option, lambda: [
        line.split() for line in (tmp_path / "seen.txt").read_text().splitlines()
    ]


def test_a_saved_data_set_and_its_splits(rows_of, tmp_path, seen):
    datasets = pytest.importorskip("datasets")
    option, read = seen
    made = {
        name: datasets.Dataset.from_list([{"prompt": f"{i}{k}="} for i in range(4)])
        for k, name in enumerate("xyz")
    }
    datasets.DatasetDict(made).save_to_disk(tmp_path / "saved")
    splits = f"--data {tmp_path / 'saved'} --dataset-train-split x --dataset-test-split z"
    rows_of(f"{splits} --max-steps 1 --eval-steps 1", *option, folder="run")
    assert [sorted(call) for call in read()] == [
        ["02=", "12=", "22=", "32="],
        ["00=", "10=", "20=", "30="],
        ["02=", "12=", "22=", "32="],
    ]
    assert [row["eval/after"] for row in lines(tmp_path / "run") if "eval/after" in row] == [0, 1]
