"""Runs of train.py with a mistake in the data or rewards, which one sentence reports.

Read next: tests/test_bad_input.py (mistakes in options, models and folders).
"""

import re

import pytest
from safetensors.torch import load_file, save_file

import train
from tests.conftest import arguments, steps, write_base

# name: (options, what the message must contain)
MISTAKES = {
    "empty data": (["--data", "{files}/empty.jsonl"], r"empty\.jsonl holds no prompts"),
    "no such data": (["--data", "{files}/nowhere.jsonl"], r"nowhere\.jsonl is not a file"),
    "broken line": (["--data", "{files}/broken.jsonl"], r"broken\.jsonl:3: not JSON"),
    "long prompt": (["--data", "{files}/long.jsonl"], r"long\.jsonl:9: the prompt has 300 tokens"),
    "long prompt, own limit": (
        ["--max-prompt-length", "3"],
        r"data\.jsonl:1: the prompt has 4 tokens",
    ),
    "few prompts": (["--generation-batch-size", "64"], r"holds 12 prompts but a step draws 16"),
    "no eval data": (
        ["--eval-steps", "1"],
        r"there are no held-out prompts: name some with --eval-data",
    ),
    "no such reward": (["--reward-funcs", "{files}/reward.py:odd"], r"odd"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_reported_in_one_sentence_before_anything_is_written(
    tiny_base, files, tmp_path, capsys, mistake
):
    options, sentence = MISTAKES[mistake]
    options = [option.format(files=files) for option in options]
    assert train.main(arguments(tiny_base, files, tmp_path / "run", *options)) == 2
    errors = capsys.readouterr().err.strip().splitlines()
    assert errors[-1].startswith("error: ")
    assert re.search(sentence, errors[-1]), errors[-1]
    assert not any("Traceback" in line for line in errors)
    # so the corrected command needs no further option
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_reward_that_raises_stops_the_run_and_loses_nothing(tiny_base, files, tmp_path, capsys):
    options = [
        "--reward-funcs",
        f"{files / 'reward.py'}:fails_in_the_third_step",
        "--save-steps",
        "1",
        "--max-steps",
        "5",
    ]
    assert train.main(arguments(tiny_base, files, tmp_path, *options)) == 2
    assert re.search(
        r"error: .*fails_in_the_third_step raised ZeroDivisionError: no such luck",
        capsys.readouterr().err,
    )
    assert [row["step"] for row in steps(tmp_path)] == [0, 1]
    assert (tmp_path / "checkpoint-2").is_dir()


HUGE = """
def huge(completions, **kwargs):
    return [1e30 * (i % 2) for i in range(len(completions))]
"""


def test_nan_and_infinity_end_the_run_with_one_sentence(files, tmp_path, capsys):
    base = write_base(tmp_path / "base")
    (tmp_path / "huge.py").write_text(HUGE)
    options = ["--reward-funcs", f"{tmp_path / 'huge.py'}:huge", "--scale-rewards", "none"]
    assert train.main(arguments(base, files, tmp_path / "gradient", *options)) == 2
    gradient = capsys.readouterr().err.strip().splitlines()
    weights = load_file(base / "model.safetensors")
    weights["model.norm.weight"][0] = float("nan")
    save_file(weights, base / "model.safetensors")
    assert train.main(arguments(base, files, tmp_path / "logits")) == 2
    logits = capsys.readouterr().err.strip().splitlines()
    assert re.fullmatch(
        r"error: the gradient's norm is (inf|nan), so no update was made: lower --lea.* checkpoint",
        gradient[-1],
    )
    assert re.match(r"error: Logits are not finite \(prompt \d+, weights 0\)", logits[-1])
    assert not any("Traceback" in line for line in gradient + logits)
