"""The number of processes changes nothing but the speed: gradients, parameters and whole runs on 1,
2 and 4 gloo ranks.

Real processes (ranks.py), tiny models. Read next: test_state.py (saved and continued),
test_signals.py (ended).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from nanogrpo import step as experience
from nanogrpo.config import Config
from nanogrpo.distributed import fsdp
from nanogrpo.distributed.world import World, join
from nanogrpo.grpo import loss as grpo
from nanogrpo.grpo import packing
from nanogrpo.model import checkpoint
from nanogrpo.run import optim, state
from nanogrpo.run import setup as parts
from nanogrpo.types import Prompt, Sample
from tests.conftest import timeless, write_base
from tests.ranks import REWARD, ROOT, free_port, run

LIMIT = 1e-6
ALONE = World(0, 1, torch.device("cpu"))


@pytest.fixture(scope="module")
def bases(tmp_path_factory) -> dict[bool, Path]:
    """Tied and untied."""
    folder = tmp_path_factory.mktemp("bases")
    return {
        tied: write_base(folder / str(tied), tie_word_embeddings=tied, num_hidden_layers=3)
        for tied in (False, True)
    }


# with mask_truncated_completions: less than a sample a rank, in the second step none at all
STOPPED = [{5}, set(), {5, 6, 9}]


def generation(step: int) -> list[Sample]:
    """4 prompts of 4 completions of uneven length, random tokens and advantages, a pure function of
    the step.
    """
    rng, samples = random.Random(step), []
    for i in range(4):
        prompt = Prompt(i, "", [rng.randrange(104) for _ in range(rng.randint(1, 12))])
        for j in range(4):
            ids = [rng.randrange(104) for _ in range(rng.choice([1, 3, 5, 9, 17]))]
            sample = Sample(
                prompt,
                j,
                ids,
                [-rng.random() * 4 for _ in ids],
                len(samples) in STOPPED[step],
                [0] * len(ids),
            )
            sample.advantage = rng.gauss(0, 1)
            samples.append(sample)
    return samples


def three_steps(
    base: Path, options: dict, world: World = ALONE
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The gradient of the first update and the parameters after the third step, whole.

    Off policy the sampler is pretended to have been another model, or else the first update, whose
    gradient is not yet carried by rounding through Adam, would see only ratios of 1. The reference
    is the policy scaled.

    Adam divides by the gradient's size: where that is rounding noise, with its epsilon of 1e-8 an
    update is the noise's sign. The larger one makes the update a continuous function of the
    gradient, which is what can be compared.
    """
    cfg = Config(
        **{
            "model": str(base),
            "learning_rate": 1e-3,
            "adam_epsilon": 1e-5,
            "num_generations": 4,
            **options,
        }
    )
    model, *others = (
        parts.load_sharded(checkpoint.empty_model(base), base, world, cfg)
        for _ in range(2 if cfg.beta else 1)
    )
    with torch.no_grad():
        for p in itertools.chain(*(reference.parameters() for reference in others)):
            p.mul_(1.2)
    optimizer = optim.make_optimizer(model, cfg)
    gradient = {}
    for step in range(3):
        samples = generation(step)
        plan = packing.schedule(
            packing.sizes(samples, cfg), cfg, step, world.size, model.cfg.pair_cost
        )
        updates = [packing.pack(update, samples, cfg, world.rank) for update in plan]
        if cfg.mask_truncated_completions and world.size > 1:
            counts = [
                sum(strip != [] for strips in update.strips for strip in strips) for update in plan
            ]
            # some rank has nothing to do
            assert counts[0] < world.size or (step == 2 and world.size == 2)
        for batch in itertools.chain(*updates):
            if not cfg.on_policy:
                batch.old_logp = experience.logp(model, batch, cfg) + 0.3 * torch.sin(
                    7.0 * batch.targets + batch.sample
                )
            for reference in others:
                batch.ref_logp = experience.logp(reference, batch, cfg)
        for batches in updates * cfg.num_iterations:
            for batch in batches:
                loss = model.forward_packed(batch, grpo.objective(batch, cfg)).loss
                fsdp.backward(model, loss, world, last=batch is batches[-1])
            for name, p in model.named_parameters() if not gradient else ():
                gradient[name] = (
                    p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
                ).clone()
            optim.clip_and_step(model, optimizer, cfg.learning_rate, 1.0)
    return gradient, checkpoint.host_weights(model)


def differ(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """The relative error of all tensors together: |a - b| / |a|."""
    assert set(a) == set(b)
    return (
        sum((a[n] - b[n]).norm() ** 2 for n in a) ** 0.5 / sum(a[n].norm() ** 2 for n in a) ** 0.5
    ).item()


# ratios beside 1, a minibatch a time, a reference
OFF_POLICY = {"num_iterations": 2, "steps_per_generation": 2, "beta": 0.1}
FEW = {"mask_truncated_completions": True}


@pytest.fixture(scope="module")
def alone(bases) -> Callable[[bool, dict], tuple]:
    """One process without a process group, one strip an update, no shared prompts: the plainest
    there is, of an objective.
    """

    @functools.cache
    def plainest(tied: bool, objective: tuple) -> tuple:
        return three_steps(
            bases[tied], {**dict(objective), "share_prompts": False, "token_budget": 10**6}
        )

    return lambda tied, options={}: plainest(
        tied, tuple((k, v) for k, v in options.items() if k in {**OFF_POLICY, **FEW})
    )


VARIANTS = [
    {"gradient_checkpointing": kind, "token_budget": budget, "share_prompts": share}
    for kind, budget, share in [
        ("none", 10**6, False),
        ("full", 60, True),
        ("selective", 200, False),
        ("none", 60, True),
        ("full", 10**6, False),
        ("selective", 40, True),
    ]
]
SHARDED = [
    {"reshard_after_forward": False, "token_budget": 100},
    {"cpu_offload": True, "token_budget": 100},
]
OBJECTIVES = [
    {**OFF_POLICY, "token_budget": 60},
    {**OFF_POLICY, "gradient_checkpointing": "full", "reshard_after_forward": False},
    {**FEW, "token_budget": 20},
    {**FEW, "reshard_after_forward": False},
]


def every_variant(folders: dict[bool, Path]) -> list[tuple]:
    """On rank 0: what `three_steps` gives for each."""
    with join(Config(device="cpu")) as world:
        found = [three_steps(folders[tied], options, world) for tied, options in cases(folders)]
    return found if world.main else []


def cases(folders: dict[bool, Path]) -> list[tuple[bool, dict]]:
    return list(itertools.product(folders, [*VARIANTS, *SHARDED, *OBJECTIVES]))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_gradient_and_parameters_do_not_depend_on_the_ranks(bases, alone, size):
    """Nor on recomputation, the token budget, shared prompts, resharding or offloading; on policy
    and off it, and when most ranks have nothing to do. At size 1 too FSDP is at work.
    """
    found = run(size, every_variant, bases)[0]
    for (tied, options), (gradient, weights) in zip(cases(bases), found, strict=True):
        expected = alone(tied, options)
        assert differ(expected[0], gradient) < LIMIT, (tied, options)
        assert differ(expected[1], weights) < LIMIT, (tied, options)


def test_the_objectives_are_different_ones(bases, alone):
    """What is compared above is not one run in three disguises."""
    for options in (OFF_POLICY, FEW):
        assert differ(alone(True)[0], alone(True, options)[0]) > 1e-2
        assert differ(alone(True)[1], alone(True, options)[1]) > 1e-4


def test_without_a_process_group_too(bases, alone):
    for tied, options in itertools.product(bases, VARIANTS[1:4]):
        gradient, weights = three_steps(bases[tied], options)
        assert differ(alone(tied)[0], gradient) < LIMIT
        assert differ(alone(tied)[1], weights) < LIMIT


def test_compiled_blocks_give_the_same(bases, alone):
    """With aot_eager: dynamo and AOTAutograd trace as for inductor, and the graphs run in eager
    kernels.
    """
    for kind in ("none", "full"):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        options = {
            "torch_compile": True,
            "torch_compile_backend": "aot_eager",
            "gradient_checkpointing": kind,
        }
        gradient, weights = three_steps(bases[True], {**options, "token_budget": 200})
        assert differ(alone(True)[0], gradient) < LIMIT
        assert differ(alone(True)[1], weights) < LIMIT
        # shared by three blocks and all lengths
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 4


def saved_bytes(base: Path, kind: str) -> int:
    """Bytes that autograd keeps of the blocks for the backward."""
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
            "whole": sum(t.nbytes for n, t in everything.items() if n != "updates"),
            "dtypes": {str(t.dtype) for t in everything.values()},
        }


def test_every_rank_holds_its_part_only_and_names_are_those_of_the_model(bases):
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


# ---- the whole program ---------------------------------------------------------------------------


def options_of(base: Path, output: Path) -> list[str]:
    argv = [
        "--model",
        str(base),
        "--data",
        "arithmetic",
        "--output-dir",
        str(output),
        "--device",
        "cpu",
        "--max-steps",
        "6",
    ]
    argv += [
        "--reward-funcs",
        f"{REWARD}:even",
        "--num-generations",
        "4",
        "--generation-batch-size",
        "16",
    ]
    return [
        *argv,
        "--max-completion-length",
        "12",
        "--learning-rate",
        "3e-3",
        "--save-steps",
        "2",
        "--eval-steps",
        "3",
    ]


def curve(output: Path) -> list[dict]:
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [timeless(row) for row in rows if "step" in row]


def test_torchrun_learns_as_one_process_does(bases, tmp_path):
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    one = [sys.executable, "train.py", *options_of(bases[True], tmp_path / "one")]
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--master-port",
        str(free_port()),
    ]
    two = [*launcher, "train.py", *options_of(bases[True], tmp_path / "two")]
    for argv in (one, two):
        done = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    a, b = curve(tmp_path / "one"), curve(tmp_path / "two")
    assert len(a) == len(b) == 6 + 3
    assert len({row.get("loss") for row in a}) > 4  # not a run in which nothing happens
    for mine, theirs in zip(a, b):
        assert mine.keys() == theirs.keys()
        for name in mine:
            scale = max(abs(mine[name]), 1.0)
            assert abs(mine[name] - theirs[name]) < 2e-6 * scale, (mine["step"], name)
    head = json.loads((tmp_path / "two" / "metrics.jsonl").read_text().splitlines()[0])
    assert head["processes"] == 2
    weights = [checkpoint.load_model(tmp_path / name / "checkpoint-6") for name in ("one", "two")]
    assert differ(*(dict(w.state_dict()) for w in weights)) < 1e-5
    assert dataclasses.asdict(Config(**head["run"]))["max_steps"] == 6
