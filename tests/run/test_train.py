"""Runs of train.py: what they write, and how each variant of the loop changes the numbers in the
log.

Everything is real: the model (random, or after a short warm-up), the sampling, the files. Read
next: test_state.py.
"""

import re
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from safetensors.torch import load_file, save_file

import train
from nanogrpo import Config
from nanogrpo.extras.arithmetic import task, warmup
from nanogrpo.grpo import schedule
from nanogrpo.logs import metrics
from nanogrpo.model import checkpoint
from nanogrpo.model.attention import StripAttention
from tests.conftest import arguments, lines, steps, write_base

# --- a run on the built-in task ---


@pytest.fixture(scope="session")
def arithmetic_run(tmp_path_factory) -> Path:
    """Two steps from a base after a short warm-up."""
    folder = tmp_path_factory.mktemp("arithmetic")
    warmup.make_base(folder / "base", seed=0, steps=5)
    # length gives every group a signal
    options = (
        f"--model {folder}/base --data arithmetic --output-dir {folder}/run --device cpu"
        " --reward-funcs accuracy format soft_overlong:max_completion_len=24"
        " --generation-batch-size 16 --num-generations 8 --max-completion-length 24 --max-steps 2"
        " --eval-steps 1 --eval-samples 8 --save-steps 1 --beta 0.05 --num-completions-to-print 1"
    )
    # rendering all problems would take seconds
    with mock.patch.dict(task.SIZE, train=64, eval=16):
        assert train.main(options.split()) == 0
    return folder / "run"


def test_the_log_of_a_run(arithmetic_run):
    head, *rest = lines(arithmetic_run)
    assert head["run"]["max_steps"] == 2
    assert head["run"]["reward_funcs"] == [
        "accuracy",
        "format",
        "soft_overlong:max_completion_len=24",
    ]
    assert head["versions"]["torch"] == torch.__version__
    assert re.fullmatch(r"[0-9a-f]{40}|unknown", head["commit"])
    assert [row.get("eval/after") for row in rest] == [0, None, 1, None, 2]
    for row in rest:
        assert all(isinstance(v, int | float) and v == v for v in row.values())  # v == v: no NaN
    step = rest[1]
    names = (
        "loss grad_norm entropy kl reward reward_std frac_reward_zero_std learning_rate num_tokens"
        " rewards/accuracy_reward/mean rewards/format_reward/std completions/mean_length"
        " completions/clipped_ratio clip_ratio/region_mean sampling/sampling_logp_difference/max"
        " tokens_per_second step_time time/sample time/score time/train time/sync"
    )
    assert {*names.split()} <= set(step)
    assert step["sampling/sampling_logp_difference/max"] < 1e-4
    assert {
        "eval/rewards/accuracy_reward",
        "eval/rewards/format_reward",
        "eval/mean_length",
    } <= set(rest[0])


def test_transformers_loads_the_checkpoint_of_a_run(arithmetic_run):
    assert [p.name for p in checkpoint.checkpoints(arithmetic_run)] == [
        "checkpoint-1",
        "checkpoint-2",
    ]
    folder = arithmetic_run / "checkpoint-2"
    ours = checkpoint.load_model(folder)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    text = "<|user|>12+3-4=<|assistant|><think>"
    ids = transformers.AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt").input_ids
    assert ids[0].tolist() == warmup.Tokenizer(folder).encode(text)
    n = ids.shape[1]
    with torch.no_grad():
        mine = ours(
            ids[0], torch.arange(n), StripAttention(torch.tensor([0, n], dtype=torch.int32), n)
        )
        torch.testing.assert_close(mine, theirs(ids).logits[0], rtol=1e-5, atol=1e-5)
    base, trained = (
        load_file(arithmetic_run.parent / "base" / "model.safetensors"),
        load_file(folder / "model.safetensors"),
    )
    assert set(base) == set(trained)
    # every tensor was trained
    assert all(not torch.equal(base[name], trained[name]) for name in base)


# --- variants of the loop ---


def test_several_updates_a_generation_use_the_log_probs_of_the_weights_that_sampled(
    rows_of, tmp_path
):
    rows = rows_of("--steps-per-generation 2 --num-iterations 2 --epsilon 0.001 --token-budget 40")
    # the ratio left 1: on policy it never does
    assert all(row["clip_ratio/region_mean"] > 0 for row in rows)
    # before the first update of a step
    assert all(row["sampling/sampling_logp_difference/max"] < 1e-4 for row in rows)
    updates = {"updates": torch.zeros(())}
    dcp.load(updates, checkpoint_id=tmp_path / "checkpoint-3" / "state", no_dist=True)
    assert updates["updates"].item() == 3 * 4


@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "dapo"])
def test_the_logged_loss_is_minus_the_mean_advantage_of_each_minibatch(
    rows_of, monkeypatch, loss_type
):
    """With a rate too small to move a weight, every ratio is 1, so the loss is -Σ A·m/n with n from
    the minibatch.
    """
    seen, facts = [], metrics.facts
    monkeypatch.setattr(
        metrics, "facts", lambda samples, world: seen.append(samples) or facts(samples, world)
    )
    rows = rows_of(
        f"--loss-type {loss_type} --steps-per-generation 2 --learning-rate 1e-20 --token-budget 30"
        " --data FILES/uneven.jsonl --mask-truncated-completions --temperature 3 --seed 2"
        " --max-completion-length 60"
    )
    for step, (row, samples) in enumerate(zip(rows, seen)):
        losses = []
        cfg = Config(num_generations=4, steps_per_generation=2, seed=2)
        for update in schedule.schedule([s.facts for s in samples], cfg, step):
            part = [samples[i] for i in update.samples]
            trained = [s for s in part if s.stopped]
            total = sum(s.advantage * len(s.token_ids) for s in trained)
            losses.append(
                {
                    "grpo": -sum(s.advantage for s in trained) / len(part),
                    "dr_grpo": -total / (len(part) * 60),
                }.get(loss_type, -total / max(sum(len(s.token_ids) for s in trained), 1))
            )
        assert any(loss != 0 for loss in losses)
        assert row["loss"] == pytest.approx(sum(losses) / 2, rel=1e-4, abs=1e-6)


def test_with_beta_the_kl_starts_at_zero_and_the_reference_stays(rows_of):
    first, second, third = (row["kl"] for row in rows_of("--beta 0.1"))
    assert first == pytest.approx(0, abs=1e-9)
    assert third > second > 1e-6


def test_a_run_follows_its_schedule(rows_of):
    """The log has the rate of each step's last update, and no KL without --beta."""
    rows = rows_of(
        "--lr-scheduler-type linear --warmup-steps 2 --num-iterations 2 --max-grad-norm 0.5"
        " --gradient-checkpointing full"
    )
    assert [row["learning_rate"] / 1e-3 for row in rows] == pytest.approx([0.5, 0.75, 0.25])
    assert "kl" not in rows[0]


def test_epochs_become_steps(tiny_base, files, tmp_path, caplog):
    """12 prompts, 4 per step: 1.25 epochs are 4 steps. The schedule is that of 4 steps, too."""
    options = ["--lr-scheduler-type", "linear", "--num-train-epochs", "1.25"]
    argv = arguments(tiny_base, files, tmp_path, *options)
    del argv[argv.index("--max-steps") : argv.index("--max-steps") + 2]
    with caplog.at_level("INFO", "nanogrpo"):
        assert train.main(argv) == 0
    (message,) = (text for text in caplog.messages if "12 prompts" in text)
    assert "this run (4 steps) is 1.333 epochs" in message
    rows = steps(tmp_path)
    assert [row["learning_rate"] / 1e-3 for row in rows] == pytest.approx([1, 0.75, 0.5, 0.25])
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


def test_a_reward_that_raises_stops_the_run_and_loses_nothing(tiny_base, files, tmp_path, capsys):
    options = f"--reward-funcs {files}/reward.py:fails_in_the_third_step --save-steps 1"
    argv = arguments(tiny_base, files, tmp_path, *options.split(), "--max-steps", "5")
    assert train.main(argv) == 2
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
    options = ["--learning-rate", "1e39", "--save-steps", "1", "--max-steps", "1"]
    assert train.main(arguments(base, files, tmp_path / "saved", *options)) == 2
    saved = capsys.readouterr().err.strip().splitlines()
    assert {p.name for p in (tmp_path / "saved").iterdir()} == {".lock", "metrics.jsonl"}
    weights = load_file(base / "model.safetensors")
    weights["model.norm.weight"][0] = float("nan")
    save_file(weights, base / "model.safetensors")
    assert train.main(arguments(base, files, tmp_path / "logits")) == 2
    logits = capsys.readouterr().err.strip().splitlines()
    assert re.fullmatch(
        r"error: the gradient's norm is (inf|nan), so no update was made: lower --lea.* checkpoint",
        gradient[-1],
    )
    assert re.match(r"error: Logits are not finite \(prompt \d+\)", logits[-1])
    assert re.match(r"error: .*checkpoint-1 is not saved, because \S+ is not finite: ", saved[-1])
    assert not any("Traceback" in line for line in gradient + saved + logits)
