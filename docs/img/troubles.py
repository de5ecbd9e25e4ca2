"""Train a tiny model with broken settings, and draw the curves of docs/troubleshooting.md.

    python docs/img/troubles.py        # about ten minutes on two CPU cores

In: nothing. Out: a folder in runs/troubles for each run of RUNS, and a picture for each entry of
PICTURES. A run whose folder exists is not repeated. All runs use the same model, which is as small
as the model of `make demo`, and the task of `make demo`. They differ from "healthy" only by the
options in RUNS. Read next: ../troubleshooting.md.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from unittest import mock

from draw import FONT, GRID, HEALTHY, PAPER, SICK, WIDTH, save
from matplotlib import rc_context
from matplotlib.figure import Figure

from nanogrpo import Config, train
from nanogrpo.engine.local import LocalEngine
from nanogrpo.extras.arithmetic import task
from nanogrpo.extras.view.data import curves
from nanogrpo.logs.files import read_records

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FOLDER = ROOT / "runs/troubles"


# --- rewards that ask for the wrong thing ---


def near(completions, answer, **kwargs):
    """1 if the answer is off by at most 10, so a guess is good enough."""
    found = [re.search(r"<answer>(\d+)</answer>", c[-1]["content"]) for c in completions]
    return [float(bool(m) and abs(int(m[1]) - int(a)) <= 10) for m, a in zip(found, answer)]


def short(completion_ids, **kwargs):
    return [-len(ids) / 20 for ids in completion_ids]


def boxed(completions, answer, **kwargs):
    """1 for an answer in a format that the model never writes."""
    return [float(f"\\boxed{{{a}}}" in c[-1]["content"]) for c, a in zip(completions, answer)]


# --- the runs ---

RUNS: dict[str, dict[str, Any]] = {
    # This beta is too small to have an effect, but lets the run log `kl`.
    "healthy": {"beta": 1e-9},
    "slow learner": {"learning_rate": 1e-6},
    "fast learner": {"learning_rate": 1e-3, "beta": 1e-9},
    "diverged": {"learning_rate": 5e-3},
    "cold": {"temperature": 0.05},
    "unreachable": {"reward_funcs": [boxed, "accuracy"], "reward_weights": (1.0, 0.0)},
    "cut": {"max_completion_length": 16},
    "lenient": {"reward_funcs": [near, short, "accuracy"], "reward_weights": (1.0, 1.0, 0.0)},
    "old weights": {},
    "128 at a time": {"max_steps": 10, "eval_steps": 0},
    "one at a time": {"max_steps": 10, "eval_steps": 0, "max_concurrent": 1},
    "eight prompts": {
        "train_dataset": task.records("train")[:8],
        "num_generations": 16,
        "learning_rate": 3e-4,
    },
    "beta 0.01": {"beta": 0.01},
    "beta 0.04": {"beta": 0.04},
    "beta 1": {"beta": 1.0},
}


def run(name: str) -> None:
    options = {
        "model": str(ROOT / "nanogrpo/data/sums/base"),
        "max_steps": 60,
        "generation_batch_size": 128,
        "max_concurrent": 128,
        "max_completion_length": 48,
        "learning_rate": 5e-5,
        "eval_steps": 5,
        "save_steps": 0,
        "device": "cpu",
        "output_dir": str(FOLDER / name),
        **RUNS[name],
    }
    given = {key: options.pop(key) for key in ("reward_funcs", "train_dataset") if key in options}
    given.setdefault("train_dataset", task.records("train"))
    given["eval_dataset"] = task.records("eval") if options["eval_steps"] else None
    load = LocalEngine.load

    def load_once(engine: LocalEngine, model: Any, version: int) -> None:
        """Copy the weights only before the first step, as a faulty sync might."""
        load(engine, model, version) if version == 0 else setattr(engine, "version", version)

    with mock.patch.object(LocalEngine, "load", load_once if name == "old weights" else load):
        train(Config(**options), **given)


# --- the pictures ---

HELD_OUT = "eval/rewards/accuracy_reward"
TITLES = {
    HELD_OUT: "accuracy, held-out",
    "eval/reward": "reward, held-out",
    "rewards/accuracy_reward/mean": "accuracy, training",
    "completions/mean_length": "mean_length",
    "completions/clipped_ratio": "clipped_ratio",
    "sampling/sampling_logp_difference/mean": "sampling_logp_difference",
}
# file: the healthy run and the sick ones, and the metrics of its panels
PICTURES: dict[str, tuple[list[str], list[str]]] = {
    "trouble_flat": (["healthy", "slow learner"], ["reward", HELD_OUT]),
    "trouble_zero_std": (["healthy", "cold", "unreachable"], ["frac_reward_zero_std", HELD_OUT]),
    "trouble_entropy": (["healthy", "fast learner"], ["entropy", HELD_OUT]),
    "trouble_length": (["healthy", "diverged"], ["completions/mean_length", HELD_OUT]),
    "trouble_truncated": (["healthy", "cut"], ["completions/clipped_ratio", HELD_OUT]),
    "trouble_hacked": (["lenient"], ["eval/reward", HELD_OUT]),
    "trouble_kl": (["healthy", "fast learner"], ["kl", HELD_OUT]),
    "trouble_gap": (
        ["healthy", "old weights"],
        ["sampling/sampling_logp_difference/mean", HELD_OUT],
    ),
    "trouble_slow": (["128 at a time", "one at a time"], ["throughput/sample"]),
    "trouble_worse": (["healthy", "fast learner"], ["reward", HELD_OUT]),
    "trouble_overfit": (["healthy", "eight prompts"], ["rewards/accuracy_reward/mean", HELD_OUT]),
    "beta": (["healthy", "beta 0.04", "beta 1"], ["kl", HELD_OUT]),
}


def picture(runs: list[str], metrics: list[str]) -> Figure:
    figure = Figure(figsize=(WIDTH / 10, 2.1), facecolor=PAPER, layout="constrained")
    for i, metric in enumerate(metrics):
        axis = figure.add_subplot(1, len(metrics), i + 1, facecolor=PAPER)
        for name in runs:
            if curve := curves(read_records(FOLDER / name / "metrics.jsonl")).get(metric):
                x, y = curve["x"], curve["y"]
                color = HEALTHY if name in ("healthy", "128 at a time") else SICK
                style = "--" if name == runs[-1] and len(runs) == 3 else "-"
                axis.plot(x, y, color=color, ls=style, lw=1.6, label=name)
                print(f"{metric:40} {name:14}", *(f"{value:.3g}" for value in y[::5]))
        axis.set_title(TITLES.get(metric, metric), fontsize=9)
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=8)
        axis.grid(color=GRID, lw=0.5)
        axis.set_ylim(bottom=0)
        if metric == HELD_OUT:
            axis.set_ylim(top=1.05)
        axis.set_xlabel("steps", fontsize=8, loc="right", labelpad=0)
    if len(runs) > 1:
        handles, labels = figure.axes[-1].get_legend_handles_labels()
        figure.legend(
            handles, labels, loc="outside upper center", ncols=3, fontsize=8.5, frameon=False
        )
    return figure


def main() -> None:
    for name in RUNS:
        if not (FOLDER / name / "metrics.jsonl").exists():
            run(name)
    with rc_context(FONT):
        for name, parts in PICTURES.items():
            save(picture(*parts), HERE / f"{name}.svg")


if __name__ == "__main__":
    main()
