"""Tests of the learning rate: every schedule is that of transformers, update by update.

Read next: nanogrpo/run/optim.py.
"""

import dataclasses
import math
import re

import pytest
import torch
import transformers

from nanogrpo.config import SCHEDULES, Config
from nanogrpo.errors import UserError
from nanogrpo.run.optim import learning_rate

GOOD = Config(model="base", data=("arithmetic",))
SETTINGS = {
    "cosine": [{}, {"num_cycles": 1.5}],
    "cosine_with_restarts": [{}, {"num_cycles": 3}],
    "cosine_with_min_lr": [{"min_lr": 1e-4}, {"min_lr_rate": 0.2, "num_cycles": 1}],
    "cosine_warmup_with_min_lr": [
        {"min_lr": 1e-4},
        {"min_lr_rate": 0.2},
        {"min_lr_rate": 0.0, "warmup_lr_rate": 0.3},
    ],
    "polynomial": [{}, {"power": 2, "lr_end": 1e-5}],
    "inverse_sqrt": [{}, {"timescale": 7}],
    "warmup_stable_decay": [
        {"num_decay_steps": 4},
        {"num_decay_steps": 40},
        {"num_decay_steps": 5, "num_stable_steps": 2, "min_lr_ratio": 0.1},
        {"num_decay_steps": 5, "warmup_type": "cosine", "decay_type": "1-sqrt"},
        {"num_decay_steps": 5, "warmup_type": "1-sqrt", "decay_type": "linear"},
        {"num_decay_steps": 5, "decay_type": "cosine", "num_cycles": 1},
    ],
}
CASES = [(kind, kwargs) for kind in SCHEDULES for kwargs in SETTINGS.get(kind, [{}])]


@pytest.mark.parametrize("warmup", [0, 1, 5, 0.25, 0.9, 30])
@pytest.mark.parametrize(("kind", "kwargs"), CASES)
def test_every_schedule_is_that_of_transformers(kind, kwargs, warmup):
    cfg = dataclasses.replace(
        GOOD,
        learning_rate=1e-3,
        max_steps=11,
        num_iterations=2,
        lr_scheduler_type=kind,
        lr_scheduler_kwargs=kwargs,
        warmup_steps=float(warmup),
    )
    cfg.validate()
    args = transformers.TrainingArguments(output_dir="-", use_cpu=True, warmup_steps=warmup)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)
    # transformers' `constant` has no warmup; ours has that of constant_with_warmup
    theirs = "constant_with_warmup" if kind == "constant" else kind
    schedule = transformers.get_scheduler(
        theirs, optimizer, args.get_warmup_steps(22), 22, scheduler_specific_kwargs=kwargs
    )
    expected = []
    for _ in range(22):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert [learning_rate(u, cfg) for u in range(22)] == pytest.approx(
        expected, rel=1e-12, abs=1e-18
    )


def test_all_schedules_of_transformers_but_two_are_known():
    """reduce_lr_on_plateau and greedy depend on a metric, so they are no function of the step."""
    theirs = {kind.value for kind in transformers.SchedulerType}
    assert theirs - SCHEDULES.keys() == {"reduce_lr_on_plateau", "greedy"}
    assert SCHEDULES.keys() <= theirs


@pytest.mark.parametrize(
    ("kind", "kwargs", "message"),
    [
        ("linear", {"a": 1}, "--lr-scheduler-type linear has no setting a: give none."),
        ("cosine", {"cycles": 1}, "has no setting cycles: give one of num_cycles."),
        ("cosine", {"num_cycles": "2"}, "num_cycles is '2': give a number, 0 or more."),
        ("cosine", {"num_cycles": True}, "num_cycles is True: give a number, 0 or more."),
        ("cosine", {"num_cycles": None}, "num_cycles is None: give a number, 0 or more."),
        ("cosine", {"num_cycles": math.nan}, "num_cycles is nan: give a number, 0 or more."),
        ("polynomial", {"power": -1}, "power is -1: give a number, 0 or more."),
        ("polynomial", {"lr_end": 0.1}, "ends at lr_end 0.1, which is not below --learning-rate"),
        ("inverse_sqrt", {"timescale": -1}, "timescale is -1: give a number, 0 or more."),
        ("cosine_with_min_lr", None, "needs either min_lr or min_lr_rate: give one of them in"),
        ("cosine_with_min_lr", {"min_lr": 1, "min_lr_rate": 1}, "needs either min_lr or min_lr_"),
        ("cosine_with_min_lr", {"min_lr": 1}, "ends at min_lr 1, which is not below"),
        ("warmup_stable_decay", None, "needs num_decay_steps, the optimizer steps of the decay"),
        (
            "warmup_stable_decay",
            {"num_decay_steps": 1, "decay_type": "exp"},
            "decay_type is 'exp': choose one of linear, cosine, 1-sqrt.",
        ),
    ],
)
def test_bad_settings_of_a_schedule_get_one_sentence(kind, kwargs, message):
    cfg = dataclasses.replace(GOOD, lr_scheduler_type=kind, lr_scheduler_kwargs=kwargs)
    with pytest.raises(UserError, match=re.escape(message)) as error:
        cfg.validate()
    assert re.fullmatch(r"--lr-scheduler[^\n]+\.", str(error.value))


def test_a_warmup_is_a_number_of_steps_or_a_share():
    message = r"--warmup-steps 2\.5 is neither a whole number of steps nor a share below 1: give"
    with pytest.raises(UserError, match=message):
        dataclasses.replace(GOOD, warmup_steps=2.5).validate()
    with pytest.raises(UserError, match="--warmup-steps is nan"):
        dataclasses.replace(GOOD, warmup_steps=math.nan).validate()
