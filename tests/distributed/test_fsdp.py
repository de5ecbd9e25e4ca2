"""The number of ranks changes only the speed: gradients and parameters on 1, 2 and 4 ranks.

The processes are real (tests/ranks.py), the models tiny. Read next: test_same_run.py (full runs),
tests/run/test_state.py (saving and resuming), test_failure.py (ending).
"""

import functools
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from nanogrpo import Config
from nanogrpo.distributed import fsdp
from nanogrpo.distributed.world import join
from nanogrpo.extras.lora import nf4
from nanogrpo.extras.loss_scale import LossScale
from nanogrpo.grpo import loss as grpo
from tests.conftest import lines, packed, write_base
from tests.distributed.training import LIMIT, differ, generation, load_sharded, train_steps
from tests.ranks import PATIENCE, argv, run, running, steps, torchrun, until


@pytest.fixture(scope="module")
def bases(tmp_path_factory) -> dict[bool, Path]:
    """Return a checkpoint with a tied head and one without."""
    folder = tmp_path_factory.mktemp("bases")
    return {
        tied: write_base(folder / str(tied), tie_word_embeddings=tied, num_hidden_layers=3)
        for tied in (False, True)
    }


# ratios other than 1, minibatches, a reference
OFF_POLICY = {"num_iterations": 2, "steps_per_generation": 2, "beta": 0.1}
FEW = {"mask_truncated_completions": True}


@functools.cache
def plainest(base: Path, objective: tuple) -> tuple:
    return train_steps(base, {**dict(objective), "share_prompts": False, "token_budget": 10**6})


def alone(base: Path, options: dict) -> tuple:
    """Return the plainest computation of an objective: one process without a process group, one
    strip per update, no shared prompts.
    """
    return plainest(base, tuple((k, v) for k, v in options.items() if k in {**OFF_POLICY, **FEW}))


VARIANTS = [
    {"gradient_checkpointing": kind, "token_budget": budget, "share_prompts": share}
    for kind, budget, share in [
        ("none", 60, True),
        ("full", 10**6, False),
        ("selective", 40, True),
    ]
]
SHARDED = [
    {"reshard_after_forward": "never", "token_budget": 100},
    {"cpu_offload": True, "token_budget": 100},
    {"reduce_gradients": "micro_batch", "token_budget": 40},
    {"reduce_gradients": "micro_batch", "cpu_offload": True, "token_budget": 60},
]
OBJECTIVES = [
    {**OFF_POLICY, "gradient_checkpointing": "full", "token_budget": 60},
    {**OFF_POLICY, "reshard_after_forward": "never"},
    {**FEW, "token_budget": 20},
    {**FEW, "reshard_after_forward": "never"},
]


def cases(size: int) -> list[tuple[bool, dict]]:
    """Return (tied head, options): every option with both kinds of head, on two and four ranks
    together.
    """
    every = [*VARIANTS, *SHARDED, *OBJECTIVES]
    chosen = every[::4] if size == 1 else every
    return [((i + size // 2) % 2 == 0, options) for i, options in enumerate(chosen)]


def every_case(folders: dict[bool, Path]) -> list[tuple]:
    """Return the result of `train_steps` for each case, on rank 0."""
    with join(Config(device="cpu")) as world:
        found = [train_steps(folders[tied], options, world) for tied, options in cases(world.size)]
    return found if world.main else []


@pytest.mark.parametrize("size", [1, 2, 4])
def test_gradient_and_parameters_do_not_depend_on_the_ranks(bases, size):
    """Nor on recomputation, the token budget, shared prompts, resharding or offloading; on policy
    and off, and when most ranks have nothing to do. FSDP is active at size 1 too.
    """
    found = run(size, every_case, bases)[0]
    for (tied, options), (gradient, weights) in zip(cases(size), found, strict=True):
        expected = alone(bases[tied], options)
        assert differ(expected[0], gradient) < LIMIT, (tied, options)
        assert differ(expected[1], weights) < LIMIT, (tied, options)


def in_float16(base: Path, start: float) -> tuple:
    """Return the gradient, the parameters, and the scale at the end."""
    scale = LossScale()
    scale.state[0] = start
    options = {**OFF_POLICY, "dtype": "float16", "token_budget": 60}
    with join(Config(device="cpu")) as world:
        return *train_steps(base, options, world, scale), scale.state.tolist()


@pytest.mark.parametrize("start", [2.0**10, 2.0**24])
def test_float16_and_its_loss_scale_do_not_depend_on_the_ranks(bases, start):
    """A scale that fits, and one that is far too large: the same updates are skipped.

    float16 instead of float32 changes the parameters by 6e-4. The number of ranks also changes what
    is rounded. It changed the parameters by 7e-5 with AVX2, and by 1.04e-4 with AVX-512.
    """
    (gradient, *one), (_, *two) = (run(size, in_float16, bases[True], start)[0] for size in (1, 2))
    assert one[1] == two[1]
    assert differ(one[0], two[0]) < 2e-4
    assert one[1][0] < start or differ(alone(bases[True], OFF_POLICY)[0], gradient) < 1e-2


def gradients_between(base: Path) -> list[list[bool]]:
    """Return, for each setting, which parameters have a sharded gradient after a micro-batch that
    is not the last.
    """
    found = []
    with join(Config(device="cpu")) as world:
        for reduce in ("auto", "step", "micro_batch"):
            cfg = Config(num_generations=4, token_budget=10**6, reduce_gradients=reduce)
            model = load_sharded(base, world, cfg)
            (batch,) = packed(generation(0), cfg)
            loss = model.forward_strip(batch, grpo.objective(batch, cfg)).loss
            fsdp.backward(model, loss, world, last=False)
            found.append([p.grad is not None for p in model.parameters()])
    return found


def test_gradients_are_summed_in_shards_if_the_user_asks_for_it(bases):
    """Otherwise the sum over the micro-batches is as large as the model, on every rank."""
    for found in run(2, gradients_between, bases[False]):
        assert [{*flags} for flags in found] == [{False}, {False}, {True}]


# --- full runs ---


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_to_torchrun_saves_a_run(bases, tmp_path, number):
    """It passes SIGTERM on to the ranks, and they get one if it is killed."""
    with torchrun("train.py", *argv(bases[True], tmp_path)) as process:
        until(running(tmp_path))
        process.send_signal(number)
        _, errors = process.communicate(timeout=PATIENCE)  # until the ranks have closed their end
    assert process.returncode != 0  # torchrun's own status, whatever the ranks return
    head = lines(tmp_path)[0]
    assert head["processes"] == 2
    assert Config(**head["run"]).max_steps == 100000
    done = len(steps(tmp_path))
    assert (tmp_path / f"checkpoint-{done}" / "state.json").exists(), errors


def test_a_shard_of_bytes_can_become_a_parameter():
    """FSDP2 of torch 2.11 makes it as below, and only floats can require a gradient."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        bytes_, floats = (
            DTensor.from_local(torch.zeros(2, dtype=dtype), mesh)
            for dtype in (torch.uint8, torch.float32)
        )
        nf4.shard_bytes()
        assert not nn.Parameter(bytes_).requires_grad
        assert nn.Parameter(floats).requires_grad
    finally:
        dist.destroy_process_group()
