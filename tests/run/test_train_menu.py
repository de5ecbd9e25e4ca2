"""Runs of train.py with every objective and every way to compute advantages: what each trains and
logs.

Read next: bench/objectives.py, which measures what each learns.
"""

import dataclasses
import json
import math
from pathlib import Path

import pytest

import train
from nanogrpo.config import Config, dashed
from tests.conftest import arguments, steps

# the second update has ratios other than 1, over several micro-batches
OFF_POLICY = ["--steps-per-generation", "2", "--token-budget", "60"]
CLIP = {
    f"clip_ratio/{name}" for name in ("low_mean", "low_min", "high_mean", "high_max", "region_mean")
}
RUNS = {  # options, and the metrics they add
    "grpo": ([], CLIP),
    "bnpo": ([], CLIP),
    "dr_grpo": ([], CLIP),
    "dapo": (["--delta", "4"], CLIP),
    "luspo": (["--importance-sampling-level", "sequence"], CLIP),
    "cispo": (["--epsilon-high", "5"], {"cispo_clip_ratio"}),
    "sapo": (["--sapo-temperature-neg", "2", "--sapo-temperature-pos", "1.5"], set()),
    "vespo": (
        [
            "--vespo-k-pos",
            "1",
            "--vespo-lambda-pos",
            "1",
            "--vespo-k-neg",
            "1",
            "--vespo-lambda-neg",
            "1",
        ],
        {"vespo/phi_seq_mean"},
    ),
    "dppo_tv": (["--dppo-penalty", "1e-3"], CLIP),
    "dppo_kl": (["--epsilon", "0.05"], CLIP),
    "gspo": (
        ["--loss-type", "grpo", "--importance-sampling-level", "sequence", "--epsilon", "3e-4"],
        CLIP,
    ),
    "off-policy mask": (["--loss-type", "dapo", "--off-policy-mask-threshold", "0.001"], CLIP),
    "top entropy": (
        ["--loss-type", "dapo", "--top-entropy-quantile", "0.2", "--beta", "0.1"],
        CLIP | {"kl"},
    ),
    "entropy bonus": (
        ["--loss-type", "dapo", "--entropy-coef", "0.01"],
        CLIP | {"entropy_coef", "policy_loss"},
    ),
    "engine corrected": (
        ["--loss-type", "vespo", "--vllm-importance-sampling-mode", "token_mask"],
        {"vespo/phi_seq_mean"},
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_every_objective_trains(tiny_base, files, tmp_path, name):
    options, expected = RUNS[name]
    options = options if "--loss-type" in options else ["--loss-type", name, *options]
    argv = arguments(tiny_base, files, tmp_path, *OFF_POLICY, "--max-steps", "1", *options)
    assert train.main(argv) == 0
    (row,) = steps(tmp_path)
    assert all(math.isfinite(v) for v in row.values())
    assert row["grad_norm"] > 0
    own = ("clip_ratio", "cispo_clip_ratio", "vespo/phi_seq_mean")
    assert {k for k in row if k.startswith(own)} == {k for k in expected if k.startswith(own)}
    assert expected <= set(row)


ADVANTAGES = [
    ["--advantage-estimator", "rloo"],
    ["--advantage-estimator", "maxrl"],
    ["--scale-rewards", "batch"],
]
ADVANTAGES += [
    ["--scale-rewards", "none"],
    ["--multi-objective-aggregation", "normalize_then_sum", "--reward-weights", "1", "0.5"],
]


@pytest.mark.parametrize("options", ADVANTAGES, ids=lambda o: "-".join(o[:2]))
def test_every_advantage_trains(tiny_base, files, tmp_path, options):
    # positive rewards, because maxrl needs them
    functions = ["--reward-funcs", f"{files / 'reward.py'}:even", f"{files / 'reward.py'}:even"]
    options = [*functions, "--max-steps", "1", *options]
    assert train.main(arguments(tiny_base, files, tmp_path, *options)) == 0
    assert all(row["grad_norm"] > 0 for row in steps(tmp_path))


def test_options_that_no_other_run_uses(tiny_base, files, tmp_path):
    options = (
        "--top-k 20 --min-p 0.01 --no-enable-thinking --no-share-prompts "
        "--reshard-after-forward never --cpu-offload --adam-beta1 0.8 --adam-beta2 0.9 --beta 0.1 "
        "--no-use-bias-correction-kl --use-adaptive-entropy --entropy-target 9 "
        "--entropy-coef-max 0.005 --entropy-coef-delta 0.004 "
        '--lr-scheduler-type cosine_with_min_lr --lr-scheduler-kwargs {"min_lr_rate":0.1}'
    )
    assert train.main(arguments(tiny_base, files, tmp_path, *options.split())) == 0
    rows = steps(tmp_path)
    assert all(row["grad_norm"] > 0 for row in rows)
    assert rows[-1]["entropy_coef"] == 0.005  # two increments would exceed the maximum


def test_some_run_uses_every_option():
    """Search the text of the tests, except for the two files that only parse options."""
    folder = Path(__file__).parent
    text = "".join(
        p.read_text()
        for p in folder.parent.rglob("*.py")
        if p.name not in ("test_config.py", "test_cli.py")
    )
    options = [dashed(f.name) for f in dataclasses.fields(Config)]
    assert [
        name for name in options if f"--{name}" not in text and f"--no-{name}" not in text
    ] == []


def test_sequence_ratios_a_mask_that_keeps_all_and_measuring_change_no_gradient_on_policy(
    tiny_base, files, tmp_path
):
    """On policy, the ratio of a sequence is 1 too, so only the last bits may differ."""
    rows = {}
    for name, options in {
        "plain": [],
        "sequence": ["--importance-sampling-level", "sequence"],
        "kept": ["--off-policy-mask-threshold", "100"],
        "measured": ["--measure-zero-advantages"],
    }.items():
        assert train.main(arguments(tiny_base, files, tmp_path / name, *options)) == 0
        rows[name] = steps(tmp_path / name)
    assert any(0 < row["frac_tokens_skipped"] < 1 for row in rows["plain"])
    for name in ("sequence", "kept", "measured"):
        for a, b in zip(rows["plain"], rows[name]):
            assert a["loss"] == pytest.approx(b["loss"], rel=1e-4, abs=1e-6)
            assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-4)


ADAPTIVE = [
    "--use-adaptive-entropy",
    "--entropy-target",
    "50",
    "--entropy-coef",
    "0.1",
    "--entropy-coef-delta",
    "0.01",
    *OFF_POLICY,
]


def test_the_adaptive_coefficient_survives_a_restart(tiny_base, files, tmp_path):
    """Four steps at once log the same as two and two, with a coefficient that a new run would not
    have.
    """
    argv = [*ADAPTIVE, "--max-steps", "4", "--save-steps", "1"]
    assert train.main(arguments(tiny_base, files, tmp_path / "a", *argv)) == 0
    assert train.main(arguments(tiny_base, files, tmp_path / "b", *argv, "--max-steps", "2")) == 0
    kept = json.loads((tmp_path / "b/checkpoint-2/state.json").read_text())["carried"]
    assert kept["entropy_coef"] == pytest.approx(0.14)  # two steps of two updates
    assert train.main(arguments(tiny_base, files, tmp_path / "b", *argv, "--resume")) == 0
    assert steps(tmp_path / "a") == steps(tmp_path / "b")
    assert [row["entropy_coef"] for row in steps(tmp_path / "b")] == pytest.approx(
        [0.12, 0.14, 0.16, 0.18]
    )


# options: how the message begins
MISTAKES = {
    "--delta 2 --loss-type sapo": "--delta 2.0 cannot be used with --loss-type sapo",
    "--loss-type dppo_kl --importance-sampling-level sequence": (
        "--importance-sampling-level sequence cannot be used with"
    ),
    "--top-entropy-quantile 1.5": "--top-entropy-quantile is 1.5",
    "--use-adaptive-entropy --entropy-coef 2": (
        "--entropy-coef 2.0 is not between --entropy-coef-min 0.0 and"
    ),
    "--use-adaptive-entropy --entropy-coef-min 0.1": (
        "--entropy-coef 0.0 is not between --entropy-coef-min 0.1 and"
    ),
    "--advantage-estimator rloo --scale-rewards batch": (
        "--advantage-estimator rloo defines its own scale"
    ),
    "--advantage-estimator maxrl --multi-objective-aggregation normalize_then_sum": (
        "--advantage-estimator maxrl defines its"
    ),
    "--loss-type vespo --importance-sampling-level sequence": (
        "--importance-sampling-level sequence cannot be used with"
    ),
    "--scale-rewards none --multi-objective-aggregation normalize_then_sum": (
        "--scale-rewards none cannot be used with"
    ),
    "--weight-transport memory": (
        "--weight-transport is memory, which has no effect with --engine local"
    ),
    "--loss-type grpo --sapo-temperature-pos 2": (
        "--sapo-temperature-pos is 2.0, which has no effect with --loss-type grpo"
    ),
    "--loss-type vespo --vllm-importance-sampling-mode sequence_mask": (
        "--vllm-importance-sampling-mode sequence_mask cannot"
    ),
}


@pytest.mark.parametrize("options", MISTAKES)
def test_options_that_exclude_each_other_are_reported(tiny_base, files, tmp_path, capsys, options):
    assert train.main(arguments(tiny_base, files, tmp_path, *options.split())) == 2
    (error,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert error.startswith(f"error: {MISTAKES[options]}")
    assert error.endswith(".")
