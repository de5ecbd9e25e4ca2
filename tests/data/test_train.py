"""Runs of train.py on every kind of data. The reward function records the prompts that were drawn.

Read next: tests/run/test_train_mistakes.py (errors), test_order.py (the order in detail).
"""

import json
import re
from pathlib import Path

import pytest

import train
from tests.conftest import arguments, lines, steps

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


def source(folder: Path, name: str, count: int) -> str:
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{name}{i}="}) + "\n" for i in range(count)))
    return str(path)


def test_sources_are_mixed_by_weight_and_a_resumed_run_draws_the_same_prompts(
    tiny_base, files, tmp_path, seen
):
    option, read = seen
    mix = [
        "--data",
        source(tmp_path, "1", 30),
        source(tmp_path, "2", 3),
        "--data-weights",
        "3",
        "1",
    ]
    argv = arguments(tiny_base, files, tmp_path / "run", *option, *mix, "--max-steps", "3")
    assert train.main(argv) == 0
    assert train.main([*argv, "--max-steps", "6", "--resume"]) == 0
    drawn = read()
    assert [[prompt[0] for prompt in call].count("2") for call in drawn] == [1] * 6
    assert len({prompt for call in drawn for prompt in call if prompt[0] == "1"}) == 18
    assert sorted(p for call in drawn[:3] for p in call if p[0] == "2") == ["20=", "21=", "22="]
    assert (
        train.main(
            arguments(tiny_base, files, tmp_path / "whole", *option, *mix, "--max-steps", "6")
        )
        == 0
    )
    assert read()[6:] == drawn


def test_sources_without_weights_are_one_data_set(tiny_base, files, tmp_path, seen):
    option, read = seen
    data = ["--data", source(tmp_path, "1", 9), source(tmp_path, "2", 3), "--max-steps", "3"]
    assert train.main(arguments(tiny_base, files, tmp_path / "run", *option, *data)) == 0
    assert sorted(p for call in read() for p in call) == sorted(
        [f"1{i}=" for i in range(9)] + [f"2{i}=" for i in range(3)]
    )


def test_a_saved_data_set_and_its_splits(tiny_base, files, tmp_path, seen):
    datasets = pytest.importorskip("datasets")
    option, read = seen
    made = {
        name: datasets.Dataset.from_list([{"prompt": f"{i}{k}="} for i in range(4)])
        for k, name in enumerate("xyz")
    }
    datasets.DatasetDict(made).save_to_disk(tmp_path / "saved")
    splits = [
        "--data",
        str(tmp_path / "saved"),
        "--dataset-train-split",
        "x",
        "--dataset-test-split",
        "z",
    ]
    argv = arguments(
        tiny_base,
        files,
        tmp_path / "run",
        *option,
        *splits,
        "--max-steps",
        "1",
        "--eval-steps",
        "1",
    )
    assert train.main(argv) == 0
    assert [sorted(call) for call in read()] == [
        ["02=", "12=", "22=", "32="],
        ["00=", "10=", "20=", "30="],
        ["02=", "12=", "22=", "32="],
    ]
    assert [row["eval/after"] for row in lines(tmp_path / "run") if "eval/after" in row] == [0, 1]


def test_long_prompts_are_dropped_and_counted(tiny_base, files, tmp_path, caplog):
    options = [
        "--data",
        str(files / "uneven.jsonl"),
        "--max-prompt-length",
        "12",
        "--long-prompts",
        "drop",
        "--max-steps",
        "1",
    ]
    with caplog.at_level("INFO", logger="nanogrpo"):
        assert train.main(arguments(tiny_base, files, tmp_path, *options)) == 0
    assert len(steps(tmp_path)) == 1
    assert re.search(
        r"uneven\.jsonl: 3 of 9 prompts have more than 12 tokens and are dropped\.", caplog.text
    )


SPLIT = ["--data", "{saved}", "--dataset-train-split", "a"]
MISTAKES = {
    "too few for the weights": (
        ["--data-weights", "1"],
        r"--data \S+three\.jsonl holds 3 prompts but a step draws 9",
    ),
    "a weight too many": (
        ["--data-weights", "1", "1"],
        r"--data-weights has 2 values but --data has 1",
    ),
    "no such split": (["--data", "{saved}"], r"no split 'train' but 'a', 'b'"),
    "no held-out split": (
        ["--data", "{saved}", "--dataset-train-split", "a", "--eval-steps", "1"],
        r"no held-out prompts: .*--eval-data",
    ),
    "the same split": (
        [
            "--data",
            "{saved}",
            "--dataset-train-split",
            "a",
            "--dataset-test-split",
            "a",
            "--eval-steps",
            "1",
        ],
        r"no held-out prompts: .*--eval-data",
    ),
    "an unknown way": (
        ["--long-prompts", "cut"],
        r"--long-prompts is 'cut': choose one of refuse, drop",
    ),
    "rewards of another source": (
        ["--reward-funcs", "reasoning_gym", "--generation-batch-size", "4"],
        r"--reward-funcs reasoning_gym scores the problems of --data reasoning_gym:NAME, but ",
    ),
    "answers that are lists": (
        ["--data", "{saved}", "--dataset-train-split", "b"]
        + ["--reward-funcs", "accuracy", "--answer-column", "lists"],
        r"the column solution of prompt 0 holds a list, but --reward-funcs accuracy compares with",
    ),
    "no answers in the held-out data": (
        ["--data", "{saved}", "--dataset-train-split", "a", "--dataset-test-split", "b"]
        + ["--reward-funcs", "accuracy", "--eval-steps", "1"],
        r"--data \S+saved has no value in a column solution or answer, which --reward-funcs accu",
    ),
    "only empty answers": (
        ["--data", "{saved}", "--dataset-train-split", "b", "--answer-column", "none"]
        + ["--reward-funcs", "accuracy"],
        r"--data \S+saved has no value in a column solution or answer, which --reward-funcs accu",
    ),
    "no hub data for the configuration": (
        ["--dataset-config", "main"],
        r"--dataset-config main has no effect, because no source is a data set of the hub",
    ),
    "no such column": (
        ["--prompt-column", "query"],
        r"three\.jsonl:1: it has no column 'query' but 'prompt'; .* --prompt-column\.",
    ),
    "no such variable": (
        ["--chat-template-kwargs", '{{"thinking": true}}'],
        r"sets thinking, but the model's chat template reads only .*messages.*: leave it out",
    ),
    "no such file": (["--system-prompt", "none.txt"], r"--system-prompt none\.txt is not a file"),
    "none short enough": (
        ["--long-prompts", "drop", "--max-prompt-length", "1"],
        r"all 3 prompts have more than 1 tokens",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_reported_in_one_sentence(tiny_base, files, tmp_path, capsys, mistake):
    datasets = pytest.importorskip("datasets")
    a = datasets.Dataset.from_list([{"prompt": f"{i}=", "answer": str(i)} for i in range(9)])
    b = datasets.Dataset.from_list(
        [{"prompt": f"{i}=", "lists": [i], "none": ""} for i in range(9)]
    )
    datasets.DatasetDict(a=a, b=b).save_to_disk(tmp_path / "saved")
    capsys.readouterr()
    options, sentence = MISTAKES[mistake]
    options = [option.format(saved=tmp_path / "saved") for option in options]
    base = arguments(tiny_base, files, tmp_path / "run", "--data", source(tmp_path, "three", 3))
    assert train.main([*base, *options]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert re.search(sentence, error), error
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
