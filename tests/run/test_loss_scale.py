"""--dtype float16: gradients are those of float64 up to rounding, also where they are far too small
for float16, and the rules of the loss scale.

tests/configurations.py has the row for resuming, and tests/distributed/test_fsdp.py the test with
several ranks. Read next: nanogrpo/extras/loss_scale.py.
"""

import contextlib
from types import SimpleNamespace

import pytest
import torch

from nanogrpo import Config
from nanogrpo.extras import loss_scale, one_gpu
from nanogrpo.extras.objectives import Objectives
from nanogrpo.grpo import loss as grpo
from nanogrpo.run import optim
from tests.conftest import SOLO, random_batch, tiny_model
from tests.distributed.training import differ


@contextlib.contextmanager
def in_float16(start: float):
    """Yield the parts of a run in float16 whose loss scale begins at `start`."""
    model, scale = tiny_model(), loss_scale.LossScale()
    one_gpu.copy_weights(model, torch.float16)
    scale.state[0] = start
    optimizer = optim.make_optimizer(model, Config())
    run = SimpleNamespace(model=model, optimizer=optimizer, scale=scale.state, world=SOLO)
    with scale.running(run):
        yield run


def backward(model, cfg: Config, factor: float = 1.0) -> None:
    batch = random_batch([(3, 9), (5, 4), (2, 14)])
    batch.weight = batch.weight / 1e5  # as in a step of a million tokens
    batch.entropy_weight = batch.weight / 2
    features = [Objectives(cfg)] if cfg.needs_two_phases else []
    loss = model.forward_strip(batch, grpo.objective(batch, cfg, features)).loss
    (loss * factor).backward()


def update(run: SimpleNamespace, factor: float = 1.0) -> float:
    """Return the norm of the gradient of an update."""
    backward(run.model, Config(), factor)
    return optim.clip_and_step(run.model, run.optimizer, 1e-6, 1.0)


@pytest.mark.parametrize("options", [{}, {"loss_type": "cispo"}])
def test_the_gradient_is_that_of_float64_up_to_rounding(options):
    exact, cfg = tiny_model().half().double(), Config(**options)
    backward(exact, cfg)
    expected = {name: p.grad for name, p in exact.named_parameters()}

    def error(start: float) -> float:
        with in_float16(start) as run:
            backward(run.model, cfg)
        found = {name: p.grad.double() / start for name, p in run.model.named_parameters()}
        return differ(expected, found)

    assert error(loss_scale.START) < 3e-3
    assert error(1.0) > 0.1  # most numbers are rounded to 0


def test_the_scale_is_halved_if_a_gradient_overflows_and_doubled_after_good_updates(monkeypatch):
    monkeypatch.setattr(loss_scale, "GROWTH", 2)
    with in_float16(2.0**16) as run:
        run.model.empty = torch.nn.Parameter(torch.empty(0))  # a rank may have no rows of a matrix
        run.model.empty.grad = torch.empty(0)
        before = [*map(torch.clone, run.model.parameters())]
        assert update(run, factor=1e6) == 0
        assert run.scale.tolist() == [2.0**15, 0]
        assert all(map(torch.equal, before, run.model.parameters()))
        norms = update(run), update(run)
        assert run.scale.tolist() == [2.0**16, 0]
        assert norms[0] == pytest.approx(update(run), rel=0.01)  # without the scale


def test_an_error_that_the_scale_cannot_cause_ends_the_run():
    with in_float16(1.0) as run, pytest.raises(FloatingPointError, match="no update was made"):
        update(run, factor=1e38)
    with in_float16(2.0**16) as run:
        with torch.no_grad():
            [*run.model.parameters()][-1].fill_(1e30)  # infinite in float16
        with pytest.raises(FloatingPointError, match="the loss is not finite in float16"):
            update(run)
