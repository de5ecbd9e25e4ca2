"""Metrics by hand: TRL's names and definitions, sums over the whole step; and each of them
documented.

test_trl_parity.py compares the same names with TRL's own numbers. Read next: test_log.py.
"""

import dataclasses
import math
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import train
from nanogrpo.config import Config
from nanogrpo.logs import metrics
from nanogrpo.model.head import PolicyOut
from nanogrpo.types import Prompt, Sample
from tests.conftest import SOLO, arguments, lines


def sample(n: int, stopped: bool = True, prompt: int = 3, **rewards: float | None) -> Sample:
    given = [r for r in rewards.values() if r is not None]
    fields = {"text": "text", "rewards": rewards, "reward": sum(given) if given else None}
    return Sample(Prompt(0, "?", [1] * prompt), 0, [2] * n, [0.0] * n, stopped, [0] * n, **fields)


# ---- of the samples ------------------------------------------------------------------------------


def test_metrics_of_a_generation():
    samples = [
        sample(4, True, a=1.0, b=0.5),
        sample(10, False, a=0.0, b=None),
        sample(7, True, a=None, b=None),
    ]
    row = metrics.of_samples(metrics.facts(samples, SOLO), torch.tensor([[0.0], [0.3]]))
    assert row == pytest.approx(
        {
            "completions/min_length": 4,
            "completions/max_length": 10,
            "completions/mean_length": 7,
            "completions/min_terminated_length": 4,
            "completions/max_terminated_length": 7,
            "completions/mean_terminated_length": 5.5,
            "completions/clipped_ratio": 1 / 3,
            "rewards/a/mean": 0.5,  # of the two that have one
            "rewards/a/std": math.sqrt(0.5),
            "rewards/b/mean": 0.5,
            "rewards/b/std": 0.0,
            "reward": 0.75,  # (1.5 + 0) / 2
            "reward_std": 1.5 / math.sqrt(2),
            "frac_reward_zero_std": 0.5,
        }
    )


def test_metrics_of_a_generation_in_which_nothing_ended_and_nothing_was_judged():
    row = metrics.of_samples(
        metrics.facts([sample(3, False, a=None), sample(3, False, a=None)], SOLO),
        torch.tensor([[torch.nan]]),
    )
    assert (
        row["completions/max_terminated_length"] == row["completions/mean_terminated_length"] == 0
    )
    assert row["completions/clipped_ratio"] == 1
    assert row["frac_reward_zero_std"] == 0  # nobody knows that they are equal
    assert not {"reward", "reward_std", "rewards/a/mean"} & set(row)
    assert all(math.isfinite(x) for x in row.values())


# ---- of the updates ------------------------------------------------------------------------------


def add(meter: metrics.Meter, sample: list, clip: list, loss: float, **values: list) -> None:
    """One micro-batch, as the loss would have given it."""
    vectors = {k: torch.tensor(v) for k, v in {"logp": [-1.0] * len(sample), **values}.items()}
    taken = {
        "importance": None,
        "entropy_weight": None,
        "sampling_logp": vectors.pop("sampling", vectors["logp"]),
    }
    batch = SimpleNamespace(sample=torch.tensor(sample), **taken)
    clip = torch.tensor(clip, dtype=torch.int8)
    results = (vectors["logp"], vectors["entropy"], vectors.get("kl"), {"clip": clip})
    meter.add(batch, PolicyOut(torch.tensor(loss), *results))


def test_means_are_over_the_tokens_of_the_step_and_extremes_over_completions():
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
            # of the first update only: afterwards the weights are no longer those that sampled
            "sampling/sampling_logp_difference/mean": 0.75 / 7,
            "sampling/sampling_logp_difference/max": 0.5,
            "sampling/k3": (math.exp(0.5) - 1.5 + math.exp(-0.25) - 0.75) / 7,
            "sampling/ratio": (math.exp(0.5) + math.exp(0.25) + 5) / 7,
        }
    )


def test_no_kl_without_a_reference_and_nothing_at_all_without_tokens():
    meter = metrics.Meter()
    add(meter, [0], [0], 0.5, entropy=[1.0])
    meter.end_update(1.0)
    assert "kl" not in meter.summary(SOLO)
    empty = metrics.Meter()
    empty.end_update(0.0)  # every completion was masked
    assert empty.summary(SOLO) == {"loss": 0.0, "grad_norm": 0.0}


def test_the_gap_is_taken_at_the_first_update_that_has_tokens():
    meter = metrics.Meter()
    # a minibatch in which every completion was cut and masked: the weights did not move
    meter.end_update(0.0)
    add(meter, [0, 1], [0, 0], 0.0, entropy=[1.0, 1.0], sampling=[-1.5, -1.0])
    meter.end_update(1.0)
    add(meter, [0, 1], [0, 0], 0.0, entropy=[1.0, 1.0], sampling=[-9.0, -9.0])
    meter.end_update(1.0)
    assert meter.summary(SOLO)["sampling/sampling_logp_difference/max"] == 0.5


# ---- the documentation ---------------------------------------------------------------------------

# Runs that between them log nearly all there is.
RUNS = {
    "plain": [],
    "beta eval_steps": [
        "--beta",
        "0.1",
        "--eval-steps",
        "1",
        "--eval-data",
        "{files}/data.jsonl",
        "--eval-samples",
        "2",
    ],
    "loss_type=cispo vllm_importance_sampling_mode": [
        "--loss-type=cispo",
        "--vllm-importance-sampling-mode",
        "token_truncate",
    ],
    "loss_type=vespo entropy_coef": ["--loss-type=vespo", "--entropy-coef", "0.01"],
    "max_resample_times": ["--max-resample-times", "1"],
}
ELSEWHERE = {"engine=vllm", "device=cuda"}  # test_train_vllm.py; a GPU


def documented() -> list[tuple[str, str]]:
    """(metric as a pattern, the option it needs or ""), of the table in docs/metrics.md."""
    text = (
        (Path(__file__).parents[2] / "docs" / "metrics.md")
        .read_text()
        .partition("## All of them")[2]
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
def test_every_metric_of_a_log_is_documented_and_every_documented_one_is_logged(
    tiny_base, files, tmp_path, run
):
    options = [option.format(files=files) for option in RUNS[run]]
    assert train.main(arguments(tiny_base, files, tmp_path, "--max-steps", "1", *options)) == 0
    logged = {name for line in lines(tmp_path)[1:] for name in line}
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
    assert not surprises  # it says "only with"


def test_every_option_that_a_metric_needs_has_a_run():
    names = documented()
    assert len({pattern for pattern, _ in names}) == len(names) > 40
    options = {option for _, option in names} - {""}
    assert options <= {option for run in RUNS for option in run.split()} | ELSEWHERE
    assert {option.partition("=")[0] for option in options} <= {
        field.name for field in dataclasses.fields(Config)
    }


def test_the_loss_is_zero_where_the_documentation_says_so(tiny_base, files, tmp_path):
    assert (
        train.main(arguments(tiny_base, files, tmp_path, "--max-steps", "1", "--loss-type", "grpo"))
        == 0
    )
    row = lines(tmp_path)[-1]
    assert abs(row["loss"]) < 1e-7
    assert row["grad_norm"] > 1e-3
    assert row["clip_ratio/region_mean"] == 0


def test_the_shares_of_time_add_up():
    clock = metrics.Clock()
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
