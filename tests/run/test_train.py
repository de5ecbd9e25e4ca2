"""Runs of train.py: what they write, and how each variant of the loop changes the numbers in the
log.

Everything is real: the model (random, or after a short warm-up), the sampling, the files. Read
next: test_state.py.
"""

import re
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from safetensors.torch import load_file

import train
from nanogrpo.config import Config
from nanogrpo.grpo import packing
from nanogrpo.logs import metrics
from nanogrpo.model import checkpoint
from nanogrpo.model.attention import Packed
from nanogrpo.run import optim, warmup
from tests.conftest import arguments, lines, steps

# --- a run on the built-in task ---


@pytest.fixture(scope="session")
def arithmetic_run(tmp_path_factory) -> Path:
    """Two steps from a base after a short warm-up, which sometimes answers in the right form."""
    folder = tmp_path_factory.mktemp("arithmetic")
    warmup.make_base(folder / "base", seed=0, steps=20)
    options = [
        "--generation-batch-size",
        "16",
        "--num-generations",
        "8",
        "--max-completion-length",
        "24",
        "--max-steps",
        "2",
    ]
    options += [
        "--eval-steps",
        "1",
        "--eval-samples",
        "8",
        "--save-steps",
        "1",
        "--beta",
        "0.05",
        "--device",
        "cpu",
    ]
    options += ["--num-completions-to-print", "1", "--learning-rate", "1e-4"]
    # length gives every group a signal
    options += ["--reward-funcs", "accuracy", "format", "length:24"]
    argv = [
        "--model",
        str(folder / "base"),
        "--data",
        "arithmetic",
        "--output-dir",
        str(folder / "run"),
        *options,
    ]
    assert train.main(argv) == 0
    return folder / "run"


def test_the_log_of_a_run(arithmetic_run):
    head, *rest = lines(arithmetic_run)
    assert head["run"]["max_steps"] == 2
    assert head["run"]["reward_funcs"] == ["accuracy", "format", "length:24"]
    assert head["versions"]["torch"] == torch.__version__
    assert re.fullmatch(r"[0-9a-f]{40}|unknown", head["commit"])
    assert [row.get("eval/after") for row in rest] == [0, None, 1, None, 2]
    for row in rest:
        assert all(isinstance(v, int | float) and v == v for v in row.values())  # v == v: no NaN
    step = rest[1]
    names = [
        "loss",
        "grad_norm",
        "entropy",
        "kl",
        "reward",
        "reward_std",
        "frac_reward_zero_std",
        "learning_rate",
        "num_tokens",
    ]
    names += [
        "rewards/accuracy_reward/mean",
        "rewards/format_reward/std",
        "completions/mean_length",
        "completions/clipped_ratio",
    ]
    names += [
        "clip_ratio/region_mean",
        "sampling/sampling_logp_difference/max",
        "tokens_per_second",
        "step_time",
    ]
    names += [f"time/{phase}" for phase in ("sample", "score", "train", "sync")]
    assert set(names) <= set(step)
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
        mine = ours(ids[0], torch.arange(n), Packed(torch.tensor([0, n], dtype=torch.int32), n))
        torch.testing.assert_close(mine, theirs(ids).logits[0], rtol=1e-5, atol=1e-5)
    base, trained = (
        load_file(arithmetic_run.parent / "base" / "model.safetensors"),
        load_file(folder / "model.safetensors"),
    )
    assert set(base) == set(trained)
    # every tensor was trained
    assert all(not torch.equal(base[name], trained[name]) for name in base)


def test_resuming_a_finished_run_does_nothing(arithmetic_run):
    before = steps(arithmetic_run)
    argv = ["--resume"]  # and the same options, from the head of the log
    for name, value in lines(arithmetic_run)[0]["run"].items():
        if not isinstance(value, bool) and value not in (None, [], ""):
            argv += [
                f"--{name.replace('_', '-')}",
                *map(str, value if isinstance(value, list) else [value]),
            ]
    assert train.main(argv) == 0
    assert steps(arithmetic_run) == before


# --- variants of the loop ---


def test_several_updates_a_generation_use_the_log_probs_of_the_weights_that_sampled(
    tiny_base, files, tmp_path
):
    options = [
        "--steps-per-generation",
        "2",
        "--num-iterations",
        "2",
        "--epsilon",
        "0.001",
        "--token-budget",
        "40",
    ]
    assert train.main(arguments(tiny_base, files, tmp_path, *options)) == 0
    rows = steps(tmp_path)
    # the ratio left 1: on policy it never does
    assert all(row["clip_ratio/region_mean"] > 0 for row in rows)
    # before the first update of a step
    assert all(row["sampling/sampling_logp_difference/max"] < 1e-4 for row in rows)
    updates = {"updates": torch.zeros(())}
    dcp.load(updates, checkpoint_id=tmp_path / "checkpoint-3" / "state", no_dist=True)
    assert updates["updates"].item() == 3 * 4


def test_on_policy_the_ratio_is_one(tiny_base, files, tmp_path):
    assert train.main(arguments(tiny_base, files, tmp_path, "--epsilon", "0.001")) == 0
    assert all(row["clip_ratio/region_mean"] == 0 for row in steps(tmp_path))


@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "dapo"])
def test_the_logged_loss_is_minus_the_mean_advantage_of_each_minibatch(
    tiny_base, files, tmp_path, monkeypatch, loss_type
):
    """With a rate too small to move a weight, every ratio is 1, so the loss is -Σ A·m/n with n from
    the minibatch.
    """
    seen, facts = [], metrics.facts
    monkeypatch.setattr(
        metrics, "facts", lambda samples, world: seen.append(samples) or facts(samples, world)
    )
    options = [
        "--loss-type",
        loss_type,
        "--steps-per-generation",
        "2",
        "--learning-rate",
        "1e-20",
        "--token-budget",
        "30",
    ]
    options += [
        "--data",
        str(files / "uneven.jsonl"),
        "--mask-truncated-completions",
        "--temperature",
        "3",
        "--seed",
        "2",
    ]
    assert (
        train.main(arguments(tiny_base, files, tmp_path, *options, "--max-completion-length", "60"))
        == 0
    )
    for step, (row, samples) in enumerate(zip(steps(tmp_path), seen)):
        losses = []
        cfg = Config(num_generations=4, steps_per_generation=2, seed=2)
        for update in packing.schedule(packing.sizes(samples, cfg), cfg, step):
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


def test_with_beta_the_kl_starts_at_zero_and_the_reference_stays(tiny_base, files, tmp_path):
    assert train.main(arguments(tiny_base, files, tmp_path / "a", "--beta", "0.1")) == 0
    first, second, third = (row["kl"] for row in steps(tmp_path / "a"))
    assert first == pytest.approx(0, abs=1e-9)
    assert third > second > 1e-6
    # After resuming, the reference is still the base and not the checkpoint: the KL keeps rising.
    assert (
        train.main(
            arguments(
                tiny_base, files, tmp_path / "a", "--beta", "0.1", "--max-steps", "4", "--resume"
            )
        )
        == 0
    )
    assert steps(tmp_path / "a")[3]["kl"] > second


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ("constant", [0, 0.5, 1, 1, 1, 1]),
        ("linear", [0, 0.5, 1, 0.75, 0.5, 0.25]),
        ("cosine", [0, 0.5, 1, 0.5 + 0.5**1.5, 0.5, 0.5 - 0.5**1.5]),
    ],
)
def test_every_schedule(shape, expected):
    """Two updates of warm-up, then four of the shape."""
    cfg = Config(
        max_steps=3, num_iterations=2, lr_scheduler_type=shape, warmup_steps=2, learning_rate=1e-3
    )
    assert [optim.learning_rate(u, cfg) / 1e-3 for u in range(6)] == pytest.approx(expected)


def test_a_run_follows_its_schedule(tiny_base, files, tmp_path):
    """The log has the rate of each step's last update, and no KL without --beta."""
    options = ["--lr-scheduler-type", "linear", "--warmup-steps", "2", "--num-iterations", "2"]
    options += ["--max-grad-norm", "0.5", "--gradient-checkpointing", "full"]
    assert train.main(arguments(tiny_base, files, tmp_path, *options)) == 0
    rows = steps(tmp_path)
    assert [row["learning_rate"] / 1e-3 for row in rows] == pytest.approx([0.5, 0.75, 0.25])
    assert "kl" not in rows[0]


def test_epochs_become_steps(tiny_base, files, tmp_path, capfd, caplog):
    """12 prompts, 4 per step: 1.25 epochs are 4 steps. The schedule is that of 4 steps, too."""
    options = ["--lr-scheduler-type", "linear", "--num-train-epochs", "1.25", "--trace-step", "4"]
    argv = arguments(tiny_base, files, tmp_path, *options)
    del argv[argv.index("--max-steps") : argv.index("--max-steps") + 2]
    with caplog.at_level("INFO", "nanogrpo"):
        assert train.main(argv) == 0
    (message,) = (text for text in caplog.messages if "12 prompts" in text)
    assert "this run (4 steps) is 1.333 epochs" in message
    rows = steps(tmp_path)
    assert [row["learning_rate"] / 1e-3 for row in rows] == pytest.approx([1, 0.75, 0.5, 0.25])
    assert lines(tmp_path)[0]["run"]["max_steps"] == 4
    assert (tmp_path / "trace-4.json").exists()
    assert train.main([*argv, "--resume"]) == 0  # it is finished
    assert len(steps(tmp_path)) == 4
    assert train.main([*argv, "--trace-step", "5", "--overwrite-output-dir"]) == 2
    assert "error: --trace-step 5 is beyond --max-steps 4: name a step" in capfd.readouterr().err


def test_nothing_to_learn_from_changes_nothing(tiny_base, files, tmp_path):
    """Completions of one token are truncated and masked, so the weights stay, even with weight
    decay.
    """
    options = ["--max-completion-length", "1", "--mask-truncated-completions", "--max-steps", "1"]
    assert (
        train.main(
            arguments(tiny_base, files, tmp_path, *options, "--seed", "1", "--weight-decay", "0.1")
        )
        == 0
    )
    (row,) = steps(tmp_path)
    assert row["completions/clipped_ratio"] == 1
    assert row["loss"] == row["grad_norm"] == 0
    before, after = (
        load_file(folder / "model.safetensors") for folder in (tiny_base, tmp_path / "checkpoint-1")
    )
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_rewards_that_never_apply_change_nothing_and_log_no_reward(tiny_base, files, tmp_path):
    options = [
        "--reward-funcs",
        f"{files / 'reward.py'}:nothing_applies",
        "--max-steps",
        "1",
        "--scale-rewards",
        "batch",
    ]
    assert train.main(arguments(tiny_base, files, tmp_path, *options)) == 0
    row = lines(tmp_path)[-1]
    assert "reward" not in row
    assert row["loss"] == row["grad_norm"] == 0
    before, after = (
        load_file(folder / "model.safetensors") for folder in (tiny_base, tmp_path / "checkpoint-1")
    )
    assert all(torch.equal(before[name], after[name]) for name in before)
