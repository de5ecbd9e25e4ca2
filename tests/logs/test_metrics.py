"""Metrics computed by hand, with TRL's names and definitions; and each of them is documented.

tests/grpo/test_trl_parity.py compares them with TRL's own numbers. Read next: test_console.py.
"""

import dataclasses
import math
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from nanogrpo import Config
from nanogrpo.logs import metrics
from nanogrpo.model.head import PolicyOut
from tests.conftest import SOLO, lines
from tests.logs.conftest import sample

# --- samples ---


def test_the_lengths_and_the_only_reward_of_the_samples_of_a_step():
    """The tests of parity with TRL have several rewards."""
    samples = [sample(4, a=0.5), sample(10, stopped=False, a=None), sample(7, a=None)]
    row = metrics.of_samples(metrics.facts(samples, SOLO), torch.zeros(1, 1))
    assert row == pytest.approx(
        {
            "completions/min_length": 4,
            "completions/max_length": 10,
            "completions/mean_length": 7,
            "completions/min_terminated_length": 4,
            "completions/max_terminated_length": 7,
            "completions/mean_terminated_length": 5.5,
            "completions/clipped_ratio": 1 / 3,
            "rewards/a/mean": 0.5,
            "rewards/a/std": 0.0,
            "reward": 0.5,
            "reward_std": 0.0,
            "frac_reward_zero_std": 1.0,
        }
    )


# --- updates ---


def add(meter: metrics.Meter, sample: list, clip: list, loss: float, **values: list) -> None:
    """Add one micro-batch, as the loss would return it."""
    vectors = {k: torch.tensor(v) for k, v in {"logp": [-1.0] * len(sample), **values}.items()}
    taken = {
        "importance": None,
        "entropy_weight": None,
        "sampling_logp": vectors.pop("sampling", vectors["logp"]),
        "old_logp": vectors.pop("old", None),
    }
    batch = SimpleNamespace(sample=torch.tensor(sample, dtype=torch.int64), **taken)
    clip = torch.tensor(clip, dtype=torch.int8)
    results = (vectors["logp"], vectors["entropy"], vectors.get("kl"), {"clip": clip})
    meter.add(batch, PolicyOut(torch.tensor(loss), *results))


def test_means_are_over_tokens_and_extremes_over_completions():
    meter = metrics.Meter()
    add(
        meter,
        [0, 0, 1],
        [-1, 0, -1],
        0.5,
        entropy=[1.0, 2.0, 3.0],
        kl=[0.0, 1.0, 2.0],
        sampling=[-1.5, -1.0, -0.75],
    )
    add(meter, [2, 2, 2, 2], [-1, -1, 1, 1], 0.25, entropy=[4.0, 4.0, 4.0, 4.0], kl=[3.0] * 4)
    meter.end_update(1.0)
    add(
        meter,
        [0, 0, 0],
        [-1, 1, 1],
        0.125,
        entropy=[0.0, 0.0, 0.0],
        kl=[0.0] * 3,
        sampling=[-9.0] * 3,
    )
    meter.end_update(3.0)
    assert meter.summary(SOLO) == pytest.approx(
        {
            "loss": 0.4375,  # (0.75 + 0.125) / 2: micro-batches add up, updates are averaged
            "grad_norm": 2.0,
            "entropy": 22 / 10,  # a mean of the three batches' means would be 2
            "kl": 15 / 10,
            "clip_ratio/low_mean": 5 / 10,
            # completion 0 in the second update; with the first update's it would be 2 / 5
            "clip_ratio/low_min": 1 / 3,
            "clip_ratio/high_mean": 4 / 10,
            "clip_ratio/high_max": 2 / 3,
            "clip_ratio/region_mean": 9 / 10,
            # over the first update only: later the weights are not those that sampled
            "sampling/sampling_logp_difference/mean": 0.75 / 7,
            "sampling/sampling_logp_difference/max": 0.5,
            "sampling/k3": (math.exp(0.5) - 1.5 + math.exp(-0.25) - 0.75) / 7,
            "sampling/ratio": (math.exp(0.5) + math.exp(0.25) + 5) / 7,
        }
    )


def test_the_gap_is_not_taken_after_an_update_without_tokens():
    """Such an update moves the weights, too: by AdamW's momentum and weight decay."""
    meter = metrics.Meter()
    add(meter, [], [], 0.0, entropy=[])
    meter.end_update(0.0)
    assert meter.summary(SOLO) == {"loss": 0.0, "grad_norm": 0.0}
    add(meter, [0, 1], [0, 0], 0.0, entropy=[1.0, 1.0], sampling=[-9.0, -9.0])
    meter.end_update(1.0)
    found = meter.summary(SOLO)
    assert found["entropy"] == 1.0
    assert not [name for name in found if name.startswith("sampling/")]


# --- the documentation ---

# Together these runs log nearly every metric.
RUNS = {
    "plain": "--loss-type=grpo",
    "beta eval_steps loss_type=cispo vllm_importance_sampling_mode max_resample_times": "--beta=0.1"
    " --eval-steps=1 --eval-data FILES/data.jsonl --eval-samples=2 --loss-type=cispo"
    " --vllm-importance-sampling-mode=token_truncate --max-resample-times=1",
    "loss_type=vespo entropy_coef": "--loss-type=vespo --entropy-coef=0.01",
    "dtype=float16": "--dtype=float16",
}
# tests/vllm/test_train.py, a GPU, tests/engine/test_tools.py, tests/test_eval.py
ELSEWHERE = {"engine=vllm", "max_staleness", "device=cuda", "tools", "num_generations_eval"}


def documented() -> list[tuple[str, str]]:
    """Return (metric as a pattern, the option it needs or "") from the table in docs/metrics.md."""
    text = (
        (Path(__file__).parents[2] / "docs" / "metrics.md")
        .read_text()
        .partition("## All metrics")[2]
    )
    out = []
    for line in text.splitlines():
        if line.startswith("| `"):
            names, _, option, _ = re.split(r"(?<!\\)\|", line.strip("|"))
            out += [
                (re.escape(name).replace("NAME", r"\w+"), option.strip(" `"))
                for name in re.findall("`(.*?)`", names)
            ]
    return out


@pytest.mark.parametrize("run", RUNS)
def test_exactly_the_documented_metrics_are_logged(rows_of, tmp_path, run):
    rows_of(f"--max-steps 1 {RUNS[run]}")
    _, *records = lines(tmp_path)
    assert all(math.isfinite(value) for row in records for value in row.values())
    logged = {name for record in records for name in record}
    names = documented()
    assert not [
        name for name in logged if not any(re.fullmatch(pattern, name) for pattern, _ in names)
    ]
    wanted = [
        p for p, option in names if option in run.split() or (option == "" and run == "plain")
    ]
    assert wanted
    assert not [
        pattern for pattern in wanted if not any(re.fullmatch(pattern, name) for name in logged)
    ]
    surprises = [
        p
        for p, option in names
        if option and option not in run.split() and any(re.fullmatch(p, n) for n in logged)
    ]
    assert not surprises  # the docs say "only with"


def test_every_option_that_a_metric_needs_has_a_run():
    names = documented()
    assert len({pattern for pattern, _ in names}) == len(names) > 40
    options = {option for _, option in names} - {""}
    assert options <= {option for run in RUNS for option in run.split()} | ELSEWHERE
    assert {option.partition("=")[0] for option in options} <= {
        field.name for field in dataclasses.fields(Config)
    }


def test_the_times_of_the_phases_add_up():
    clock = metrics.Clock(SOLO.device)
    clock.seconds |= {"sync": 1.0, "sample": 4.0, "score": 1.0, "train": 2.0}
    row = metrics.of_time(metrics.facts([sample(6), sample(10)], SOLO), clock)
    assert row == {
        "tokens_per_second": 2.0,
        "throughput/sample": 4.0,
        "throughput/train": 8.0,
        "step_time": 8.0,
        "time/sync": 1.0,
        "time/sample": 4.0,
        "time/score": 1.0,
        "time/train": 2.0,
    }
