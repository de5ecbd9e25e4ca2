"""`nanogrpo eval`, and evaluations with several completions per prompt during training.

Read next: nanogrpo/extras/eval.py.
"""

import itertools
import math
import os

import pytest

import train
from nanogrpo.errors import read_json
from nanogrpo.extras import commandline, commands
from nanogrpo.logs import metrics
from nanogrpo.logs.metrics import Facts
from tests.conftest import arguments, lines, read_rows, refused, write_rows

DATA = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(2) for b in range(3)]


@pytest.fixture
def data(tmp_path):
    return write_rows(tmp_path / "test.jsonl", DATA)


def options(base, data, output, *more: str) -> list[str]:
    argv = f"--model {base} --data {data} --output-dir {output} --max-completion-length 8"
    return [*argv.split(), "--device", "cpu", *more]


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_pass_at_k_is_the_share_of_all_choices_with_a_right_one(n):
    for c, k in itertools.product(range(n + 1), range(1, n + 1)):
        choices = list(itertools.combinations([True] * c + [False] * (n - c), k))
        expected = sum(map(any, choices)) / len(choices)
        assert metrics.pass_at_k(n, c, k) == pytest.approx(expected)


def facts(*rewards: float | None) -> list[Facts]:
    return [Facts(0, 2, 3, 3, True, {"f": r, "free": 0.5}, r) for r in rewards]


def test_pass_at_k_is_reported_for_rewards_of_0_and_1_only():
    row = metrics.of_evaluation(facts(1.0, 0.0, 0.0, 0.0, 0.0, 0.0), 3)
    assert row["eval/rewards/f"] == pytest.approx(1 / 6)
    found = {name: value for name, value in row.items() if "pass" in name}
    assert found == pytest.approx({f"eval/pass@{k}/f": k / 3 / 2 for k in (1, 2, 3)})
    assert not any("pass" in name for name in metrics.of_evaluation(facts(1.0, None), 2))
    assert not any("pass" in name for name in metrics.of_evaluation(facts(1.0), 1))


def test_it_writes_every_completion_and_the_same_numbers_as_training(
    tiny_base, files, data, tmp_path, capsys, monkeypatch
):
    own = "--num-generations-eval 4 --eval-temperature 1.5 --top-k 20"
    own += f" --reward-funcs {files}/reward.py:even format"
    argv = options(tiny_base, data, tmp_path / "eval", *own.split())
    assert commands.main(["eval", *argv]) == 0
    assert "rewards/even" in capsys.readouterr().out
    result = read_json(tmp_path / "eval/eval.json")
    records = read_rows(tmp_path / "eval/eval.jsonl")
    assert len(records) == 4 * len(DATA)
    assert records[0].keys() >= {"prompt", "completion", "even", "reward", "stopped"}
    assert [record["answer"] for record in records[::4]] == [row["answer"] for row in DATA]
    mean = sum(record["even"] for record in records) / len(records)
    assert result["metrics"]["eval/rewards/even"] == pytest.approx(mean)
    assert result["metrics"]["eval/pass@4/format_reward"] == 0

    own += f" --eval-data {data} --eval-steps 3 --max-steps 1 --log-completions"
    run = arguments(tiny_base, files, tmp_path / "run", own)
    assert train.main(run) == 0
    first = next(row for row in lines(tmp_path / "run") if row.get("eval/after") == 0)
    for name, value in result["metrics"].items():
        assert math.isclose(first[name], value), name
    written = read_rows(tmp_path / "run/completions/eval_00000.jsonl")
    assert [row["completion"] for row in written] == [row["completion"] for row in records]

    # without options, a checkpoint is evaluated as its run did
    assert commands.main(["eval", f"{tmp_path}/run/checkpoint-1"]) == 0
    again = read_json(tmp_path / "run/checkpoint-1/eval/eval.json")
    last = next(row for row in lines(tmp_path / "run") if row.get("eval/after") == 1)
    assert again["metrics"] == {name: last[name] for name in again["metrics"]}
    assert f'"data": ["{data}"]' in capsys.readouterr().err
    monkeypatch.setenv("RANK", "1")  # only one rank prints the options
    assert commandline.of_run(f"{tmp_path}/run/checkpoint-1", "data") == {"data": [f"{data}"]}
    assert capsys.readouterr().err == ""
    with refused("checkpoint-9 does not exist: `nanogrpo runs "):
        commandline.of_run(f"{tmp_path}/run/checkpoint-9", "data")


def test_an_option_of_training_is_not_one_of_evaluations(tiny_base, data, tmp_path, capsys):
    argv = options(tiny_base, data, tmp_path / "eval", "--learning-rate", "1")
    assert commands.main(["eval", *argv]) == 2
    assert "--learning-rate is not an option" in capsys.readouterr().err


def test_an_earlier_evaluation_is_kept(tiny_base, data, tmp_path, capsys, monkeypatch):
    """The first one is complete, although the reader of its output has ended. A reward with a
    curriculum is at its end.
    """
    (tmp_path / "reward.py").write_text(
        "def share(completions, trainer_state, **kwargs):\n"
        "    return [trainer_state.global_step / trainer_state.max_steps] * len(completions)\n"
    )
    rewards = ["--reward-funcs", f"{tmp_path}/reward.py:share"]
    argv = options(tiny_base, data, tmp_path / "eval", *rewards)
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stdout, monkeypatch.context() as patch:
        patch.setattr("sys.stdout", stdout)
        assert commands.main(["eval", *argv]) == 0
    result = read_json(tmp_path / "eval/eval.json")
    assert result["metrics"]["eval/rewards/share"] == 1.0
    assert commands.main(["eval", *argv]) == 2
    assert "already holds an evaluation" in capsys.readouterr().err
    before = (tmp_path / "eval/eval.jsonl").read_bytes()
    other = ["--overwrite-output-dir", "--model", str(tmp_path / "none")]
    assert commands.main(["eval", *argv, *other]) == 2
    assert (tmp_path / "eval/eval.jsonl").read_bytes() == before != b""
    assert commands.main(["eval", *argv, "--overwrite-output-dir"]) == 0
    (tmp_path / "eval/eval.json").unlink()
    before = (tmp_path / "eval/eval.jsonl").read_bytes()
    assert commands.main(["eval", *argv]) == 2
    assert "already holds an evaluation" in capsys.readouterr().err
    assert (tmp_path / "eval/eval.jsonl").read_bytes() == before
