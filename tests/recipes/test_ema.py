"""Evaluations use the average of the weights, and nothing else changes. With a row of
tests/configurations.py, a resumed run and a run on two ranks give the same result as one run.

Read next: examples/recipes/ema.py.
"""

import torch

import train
from examples.recipes import ema
from tests.conftest import arguments, steps
from tests.recipes import run


def test_evaluations_use_the_average_and_training_does_not(tmp_path, tiny_base, files, monkeypatch):
    """The average is computed again from the weights of each step."""
    seen, evaluated = [], []
    real_step, real_swap = ema.EMA.step, ema.EMA.swap

    def step(self, run, *others):
        seen.append({n: run.model.get_parameter(n).detach().clone() for n in self.average})
        real_step(self, run, *others)

    def swap(self, model):
        real_swap(self, model)
        evaluated.append({n: model.get_parameter(n).detach().clone() for n in self.average})

    monkeypatch.setattr(ema.EMA, "step", step)
    monkeypatch.setattr(ema.EMA, "swap", swap)
    options = f"--eval-steps 1 --eval-data {files}/data.jsonl"
    plain, averaged = (arguments(tiny_base, files, tmp_path / n, options) for n in ("a", "b"))
    assert train.main(plain) == 0
    assert run(ema, [*averaged, "--ema-decay", "0.75"]) == 0
    plain, averaged = (steps(tmp_path / name) for name in ("a", "b"))
    assert [row["loss"] for row in plain] == [row["loss"] for row in averaged]

    before, *averages = evaluated[::2]  # every other swap takes the average out again
    assert len(seen) == len(averages) == 3
    for weights, average in zip(seen, averages):
        for name, x in weights.items():
            before[name] = 0.75 * before[name] + 0.25 * x
            torch.testing.assert_close(average[name], before[name])
    assert any((averages[-1][name] != x).any() for name, x in seen[-1].items())
