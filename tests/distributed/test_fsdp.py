"""The number of ranks changes only the speed: gradients, parameters and runs on 1, 2 and 4 ranks.

The processes are real (tests/ranks.py), the models tiny. Read next: tests/run/test_state.py (saving
and resuming), test_signals.py (ending).
"""

from __future__ import annotations

import functools
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import train
from nanogrpo.config import Config
from nanogrpo.distributed import fsdp
from nanogrpo.distributed.world import join
from nanogrpo.grpo import loss as grpo
from nanogrpo.grpo import packing
from nanogrpo.model import checkpoint
from nanogrpo.run import optim, state
from nanogrpo.run import setup as parts
from tests.conftest import lines, random_batch, timeless, tiny_model, write_base
from tests.distributed.training import ALONE, LIMIT, differ, generation, train_steps
from tests.ranks import DATA, PATIENCE, REWARD, run, running, torchrun, until
from tests.run.allocator import most_at_once


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


@pytest.fixture(scope="module")
def alone(bases) -> Callable[[bool, dict], tuple]:
    """Return the plainest computation of an objective: one process without a process group, one
    strip per update, no shared prompts.
    """

    @functools.cache
    def plainest(tied: bool, objective: tuple) -> tuple:
        return train_steps(
            bases[tied], {**dict(objective), "share_prompts": False, "token_budget": 10**6}
        )

    return lambda tied, options={}: plainest(
        tied, tuple((k, v) for k, v in options.items() if k in {**OFF_POLICY, **FEW})
    )


VARIANTS = [
    {"gradient_checkpointing": kind, "token_budget": budget, "share_prompts": share}
    for kind, budget, share in [
        ("none", 60, True),
        ("full", 10**6, False),
        ("selective", 40, True),
    ]
]
VARIANTS[0]["measure_zero_advantages"] = True
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
def test_gradient_and_parameters_do_not_depend_on_the_ranks(bases, alone, size):
    """Nor on recomputation, the token budget, shared prompts, resharding or offloading; on policy
    and off, and when most ranks have nothing to do. FSDP is active at size 1 too.
    """
    found = run(size, every_case, bases)[0]
    for (tied, options), (gradient, weights) in zip(cases(size), found, strict=True):
        expected = alone(tied, options)
        assert differ(expected[0], gradient) < LIMIT, (tied, options)
        assert differ(expected[1], weights) < LIMIT, (tied, options)


def beside_a_gpu(folder: Path) -> tuple:
    torch._C._get_accelerator = lambda *_: torch.device("cuda")
    with join(Config(device="cpu")) as world:
        found = train_steps(folder, {"token_budget": 60}, world)
    return found if world.main else ()


def test_a_machine_with_a_gpu_can_train_on_its_cpu(bases, alone):
    """FSDP2 alone would gather the weights on the GPU."""
    gradient, weights = run(2, beside_a_gpu, bases[True])[0]
    assert differ(alone(True)[0], gradient) < LIMIT
    assert differ(alone(True)[1], weights) < LIMIT


def test_the_objectives_are_different_ones(bases, alone):
    """The comparison above is not of one run in three disguises."""
    for options in (OFF_POLICY, FEW):
        assert differ(alone(True)[0], alone(True, options)[0]) > 1e-2
        assert differ(alone(True)[1], alone(True, options)[1]) > 1e-4


def test_recomputation_and_strips_change_nothing_without_a_process_group(bases, alone):
    for i, options in enumerate(VARIANTS):
        gradient, weights = train_steps(bases[i % 2 == 0], options)
        assert differ(alone(i % 2 == 0)[0], gradient) < LIMIT
        assert differ(alone(i % 2 == 0)[1], weights) < LIMIT


def test_compiled_blocks_give_the_same(bases, alone):
    """With aot_eager, dynamo and AOTAutograd trace as for inductor, and eager kernels run."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    options = {"torch_compile": True, "torch_compile_backend": "aot_eager", "token_budget": 200}
    gradient, weights = train_steps(bases[True], {**options, "gradient_checkpointing": "full"})
    assert differ(alone(True)[0], gradient) < LIMIT
    assert differ(alone(True)[1], weights) < LIMIT
    # three blocks and all lengths share the graphs
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 4


def saved_bytes(base: Path, kind: str) -> int:
    """Return the bytes that autograd keeps for the backward."""
    cfg = Config(
        model=str(base), num_generations=4, gradient_checkpointing=kind, token_budget=10**6
    )
    model = parts.load_sharded(checkpoint.empty_model(base), base, ALONE, cfg)
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    (update,) = packing.schedule(packing.sizes(generation(0), cfg), cfg, 0)
    (batch,) = packing.pack(update, generation(0), cfg)
    kept = {}

    def keep(t: Tensor) -> Tensor:
        if t.untyped_storage().data_ptr() not in own:
            kept[t.untyped_storage().data_ptr()] = t
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        model.forward_packed(batch, grpo.objective(batch, cfg))
    return sum(t.untyped_storage().nbytes() for t in kept.values())


def test_recomputation_keeps_less(bases):
    assert saved_bytes(bases[True], "full") < saved_bytes(bases[True], "none") / 4


def sharded_facts(base: Path) -> dict:
    cfg = Config(model=str(base), device="cpu")
    with join(cfg) as world:
        model = parts.load_sharded(checkpoint.empty_model(base), base, world, cfg)
        optimizer = optim.make_optimizer(model, cfg)
        everything = state.tensors(model, optimizer)
        return {
            "names": list(everything),
            "local": sum(t.to_local().nbytes for n, t in everything.items() if n != "updates"),
            "full": sum(t.nbytes for n, t in everything.items() if n != "updates"),
            "dtypes": {str(t.dtype) for t in everything.values()},
        }


def test_every_rank_holds_only_its_part_under_the_models_names(bases):
    facts = run(4, sharded_facts, bases[False])
    model = checkpoint.load_model(bases[False])
    names = {
        f"{kind}.{n}"
        for n, _ in model.named_parameters()
        for kind in ("master", "exp_avg", "exp_avg_sq")
    }
    assert {n for f in facts for n in f["names"]} == {*names, "updates"}
    assert sum(f["local"] for f in facts) == 3 * sum(p.nbytes for p in model.parameters())
    assert all(f["local"] < 0.3 * sum(g["local"] for g in facts) for f in facts)
    assert facts[0]["dtypes"] == {"torch.float32"}


def gradients_between(base: Path) -> list[list[bool]]:
    """Return, for each setting, which parameters have a sharded gradient after a micro-batch that
    is not the last.
    """
    found = []
    with join(Config(device="cpu")) as world:
        for reduce in ("auto", "step", "micro_batch"):
            cfg = Config(num_generations=4, token_budget=10**6, reduce_gradients=reduce)
            model = parts.load_sharded(checkpoint.empty_model(base), base, world, cfg)
            (batch,) = packing.pack(packing.one_update(generation(0), cfg), generation(0), cfg)
            loss = model.forward_packed(batch, grpo.objective(batch, cfg)).loss
            fsdp.backward(model, loss, world, last=False)
            found.append([p.grad is not None for p in model.parameters()])
    return found


def test_gradients_are_summed_in_shards_if_the_user_asks_for_it(bases):
    """Otherwise the sum over the micro-batches is as large as the model, on every rank."""
    for found in run(2, gradients_between, bases[False]):
        assert [{*flags} for flags in found] == [{False}, {False}, {True}]


def bytes_of_gradients() -> list[float]:
    """Return the peak bytes per weight of three micro-batches, for each setting."""
    found = []
    with join(Config(device="cpu")) as world:
        for reduce in ("step", "micro_batch"):
            cfg = Config(reduce_gradients=reduce)
            model = tiny_model(num_hidden_layers=20, hidden_size=96, intermediate_size=300)
            fsdp.prepare(model, world, cfg)

            def step(model=model, cfg=cfg) -> None:
                for i in range(3):
                    batch = random_batch([(2, 3)], seed=i)
                    loss = model.forward_packed(batch, grpo.objective(batch, cfg)).loss
                    fsdp.backward(model, loss, world, last=i == 2)

            found.append(most_at_once(step) / sum(p.numel() for p in model.parameters()))
    return found


def test_on_one_rank_the_sum_takes_the_place_of_the_shards():
    """So there are 4 bytes per weight, and never 8, for whichever setting. The rest is two gathered
    blocks, and what one block computes.
    """
    (found,) = run(1, bytes_of_gradients)
    assert all(4 < peak < 7 for peak in found), found


# --- full runs ---


def records(output: Path) -> list[dict]:
    return [timeless(row) for row in lines(output) if "step" in row]


def test_a_run_under_torchrun_is_that_of_one_process_and_a_signal_saves_it(bases, tmp_path):
    """torchrun passes the signal on to the ranks."""
    options = (
        f"--model {bases[True]} --data {DATA} --eval-data {DATA} --device cpu "
        f"--reward-funcs {REWARD}:even "
        "--num-generations 4 --generation-batch-size 16 --max-completion-length 12 "
        "--learning-rate 3e-3 --save-steps 2 --save-total-limit 0 --eval-steps 2 "
        "--eval-samples 16 --output-dir"
    ).split()
    assert train.main([*options, str(tmp_path / "one"), "--max-steps", "4"]) == 0
    script = ["train.py", *options, str(tmp_path / "two"), "--max-steps", "100000"]
    with torchrun(*script) as process:
        until(running(tmp_path / "two", beyond=8))
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode != 0  # torchrun's own status, whatever the ranks return
    done = len([row for row in records(tmp_path / "two") if "reward" in row])
    assert (tmp_path / "two" / f"checkpoint-{done}" / "state.json").exists(), errors
    a, b = records(tmp_path / "one"), records(tmp_path / "two")
    assert len(a) == 4 + 3  # four steps, three evaluations
    assert len({row.get("loss") for row in a}) > 3  # something happens in the run
    for mine, theirs in zip(a, b):
        assert mine.keys() == theirs.keys()
        for name in mine:
            scale = max(abs(mine[name]), 1.0)
            assert abs(mine[name] - theirs[name]) < 2e-6 * scale, (mine["step"], name)
    one, two = (checkpoint.load_model(tmp_path / n / "checkpoint-4") for n in ("one", "two"))
    assert differ(one.state_dict(), two.state_dict()) < 1e-5
    head = lines(tmp_path / "two")[0]
    assert head["processes"] == 2
    assert Config(**head["run"]).max_steps == 100000


def test_a_shard_of_bytes_can_become_a_parameter():
    """FSDP2 of torch 2.11 makes it as below, and only floats can require a gradient."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        bytes_, floats = (
            DTensor.from_local(torch.zeros(2, dtype=dtype), mesh)
            for dtype in (torch.uint8, torch.float32)
        )
        with fsdp._shards_of_bytes():
            assert not nn.Parameter(bytes_).requires_grad
            assert nn.Parameter(floats).requires_grad
        with pytest.raises(RuntimeError, match="floating point"):
            nn.Parameter(bytes_)
    finally:
        dist.destroy_process_group()
