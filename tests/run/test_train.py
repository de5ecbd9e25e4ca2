"""Runs of train.py: how each variant of the loop changes the numbers in the log, and how they end.

Everything is real: the model (random), the sampling, the files. Read next: test_state.py.
"""

import re

import pytest
import torch
from safetensors.torch import load_file, save_file

import train
from nanogrpo import Config
from nanogrpo.grpo import schedule
from nanogrpo.logs import metrics
from tests.conftest import arguments, lines, one_sentence, steps, write_base


def test_the_logged_loss_is_minus_the_mean_advantage_of_each_minibatch(rows_of, monkeypatch):
    """With a rate too small to move a weight, every ratio is 1."""
    seen, facts = [], metrics.facts
    monkeypatch.setattr(
        metrics, "facts", lambda samples, world: seen.append(samples) or facts(samples, world)
    )
    rows = rows_of(
        "--loss-type grpo --steps-per-generation 2 --learning-rate 1e-20 --token-budget 30"
        " --data FILES/uneven.jsonl --mask-truncated-completions --temperature 3 --seed 2"
        " --max-completion-length 60"
    )
    cfg = Config(num_generations=4, steps_per_generation=2, seed=2)
    for step, (row, samples) in enumerate(zip(rows, seen)):
        losses = []
        for update in schedule.schedule([s.facts for s in samples], cfg, step):
            part = [samples[i] for i in update.samples]
            losses.append(-sum(s.advantage for s in part if s.stopped) / len(part))
        assert any(losses)
        assert row["loss"] == pytest.approx(sum(losses) / 2, rel=1e-4, abs=1e-6)


def test_epochs_become_steps(tiny_base, files, tmp_path, caplog):
    """12 prompts, 4 per step: 1.25 epochs are 4, for the schedule too. The log has the rate of
    each step's last update.
    """
    options = "--lr-scheduler-type linear --num-train-epochs 1.25 --num-iterations 2"
    argv = arguments(tiny_base, files, tmp_path, options)
    del argv[argv.index("--max-steps") : argv.index("--max-steps") + 2]
    with caplog.at_level("INFO", "nanogrpo"):
        assert train.main(argv) == 0
    (message,) = (text for text in caplog.messages if "12 prompts" in text)
    assert "this run (4 steps) is 1.333 epochs" in message
    rows = steps(tmp_path)
    assert [row["learning_rate"] / 1e-3 for row in rows] == pytest.approx(
        [7 / 8, 5 / 8, 3 / 8, 1 / 8]
    )
    assert lines(tmp_path)[0]["run"]["max_steps"] == 4
    assert train.main([*argv, "--resume"]) == 0  # it is finished
    assert steps(tmp_path) == rows


@pytest.mark.parametrize(
    "options",
    [
        # completions of one token are truncated and masked
        "--max-completion-length 1 --mask-truncated-completions --seed 1",
        "--reward-funcs FILES/reward.py:nothing_applies --scale-rewards batch",
    ],
)
def test_nothing_to_learn_from_changes_nothing(rows_of, tiny_base, tmp_path, options):
    """AdamW steps with a gradient of 0, as in TRL. Without any reward the log has none."""
    rows_of(f"{options} --max-steps 1")
    row = lines(tmp_path)[-1]
    assert ("reward" in row) == ("nothing_applies" not in options)
    assert row["loss"] == row["grad_norm"] == 0
    before, after = (
        load_file(folder / "model.safetensors") for folder in (tiny_base, tmp_path / "checkpoint-1")
    )
    assert all(torch.equal(before[name], after[name]) for name in before)


HUGE = """
def huge(completions, **kwargs):
    return [1e30 * (i % 2) for i in range(len(completions))]
"""


def test_nan_and_infinity_end_the_run_with_one_sentence(files, tmp_path, capsys):
    base = write_base(tmp_path / "base")
    (tmp_path / "huge.py").write_text(HUGE)

    def error(name: str, options: str = "--beta 0") -> str:
        assert train.main(arguments(base, files, tmp_path / name, options)) == 2
        return one_sentence(capsys)

    huge = f"--reward-funcs {tmp_path}/huge.py:huge --scale-rewards none"
    assert re.fullmatch(
        r"the gradient's norm is (inf|nan), so no update was made: lower --lea.* checkpoint",
        error("gradient", huge),
    )
    options = "--learning-rate 9e37 --weight-decay 9e37 --save-steps 1 --max-steps 1"
    saved = error("saved", options)
    assert re.match(r".*checkpoint-1 is not saved, because \S+ is not finite: ", saved)
    assert {p.name for p in (tmp_path / "saved").iterdir()} == {".lock", "metrics.jsonl"}
    weights = load_file(base / "model.safetensors")
    weights["model.norm.weight"][0] = float("nan")
    save_file(weights, base / "model.safetensors")
    assert re.match(r"Logits are not finite \(prompt \d+\)", error("logits"))
