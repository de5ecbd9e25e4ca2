"""Trainer and server on a machine with GPUs: which transport the weights take, how much memory the
server gets, and which combinations are refused.

The machine is pretended (pretend.py), and the server is the fake one. Read next: test_sleeping.py.
"""

import copy
import dataclasses
import functools
import re
from pathlib import Path

import pytest
import torch

from bench import predict
from nanogrpo import Config
from nanogrpo.distributed.world import World
from nanogrpo.extras import memory
from nanogrpo.vllm import feature, gpus, protocol
from tests.conftest import refused
from tests.vllm import pretend
from tests.vllm.fake import MODEL, PARAMS, PROMPTS, FakeSidecar

GIB = 1 << 30


@pytest.fixture
def machine(fake, monkeypatch, tmp_path):
    """Return a function: make the engine of a trainer on the first of these GPUs."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "")  # which VLLM would set for good
    monkeypatch.setattr(feature, "Sidecar", functools.partial(FakeSidecar, fake))
    monkeypatch.setattr(feature, "memory_needed", lambda run: 30 * GIB)
    made = []

    def make(theirs: list[str], **options):
        fake.facts |= {"gpus": theirs, "nccl": "2.29.7"}
        cfg = Config(engine="vllm", output_dir=str(tmp_path), max_completion_length=24, **options)
        run = predict.inputs(MODEL, pretend.WORLD, 8)
        run.cfg, run.source = cfg, Path("m")
        engine = feature.VLLM().engine(run)
        made.append(engine)
        fake.engines.append(engine)
        return engine

    yield make
    for engine in made:
        engine.close()


def test_a_server_of_our_own_shares_the_only_gpu_without_any_option(machine, fake):
    with pretend.cuda("A", free=70, total=80):
        engine = machine(["A"])
        engine.load(MODEL, 0)
        assert fake.init_info.transport == "memory"
        # 70 free, 30 for the trainer, 2 as a margin
        share = ["--max-model-len", "32", "--gpu-memory-utilization", "0.475"]
        assert (engine.sidecar.options, engine.sidecar.gpus) == (share, "")
        assert len(engine.sample(PROMPTS, 2, PARAMS, step=0)) == 12


@pytest.mark.parametrize(
    ("options", "environment", "visible", "parallel"),
    [
        ({"vllm_gpus": "1"}, "4,6", "6", []),
        ({"vllm_gpus": "1"}, "GPU-a,MIG-b", "MIG-b", []),
        ({"vllm_gpus": "1,2"}, None, "1,2", ["--tensor-parallel-size", "2"]),
        ({"vllm_gpus": "1", "top_k": 9}, None, "1", ["--return-sampling-mask"]),
        ({"vllm_gpus": "1", "min_p": 0.1}, None, "1", ["--return-sampling-mask"]),
    ],
)
def test_a_server_of_our_own_on_other_gpus_gets_the_weights_by_nccl(
    machine, fake, monkeypatch, options, environment, visible, parallel
):
    if environment:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", environment)
    with pretend.cuda("A", "B", "C"):
        engine = machine(["B"], **options)
        assert engine.sidecar.options == ["--max-model-len", "32", *parallel]
        assert engine.sidecar.gpus == visible
        engine.load(MODEL, 0)
        assert fake.init_info.transport == "broadcast"
        assert all(torch.equal(fake.weights[n], p) for n, p in MODEL.named_parameters())


def test_in_sleep_mode_the_server_sleeps_from_the_start(machine, fake):
    with pretend.cuda("A", free=70, total=80):
        engine = machine(["A"], vllm_enable_sleep_mode=True)
    assert "--enable-sleep-mode" in engine.sidecar.options
    assert fake.asleep


def test_while_the_server_samples_the_trainer_keeps_its_weights_and_moments():
    run = predict.inputs(MODEL, pretend.WORLD, 100)
    run.cfg = cfg = Config(engine="vllm", beta=0.1)
    rows = memory.table(run, cfg)
    table = {row.name: row.bytes for row in rows if not row.on_host}
    names = ("parameters", "optimizer", "reference model", "weights to be sent")
    kept = sum(table[name] for name in names)
    awake = feature.memory_needed(run)
    run.cfg = dataclasses.replace(cfg, vllm_enable_sleep_mode=True)
    assert feature.memory_needed(run) == kept
    n = sum(p.numel() for p in MODEL.parameters())
    run.model, run.cfg = copy.deepcopy(MODEL).requires_grad_(False), Config(engine="vllm")
    assert feature.memory_needed(run) == (4 + 2) * n  # in an evaluation
    assert (4 + 8 + 4 + 2) * n <= kept < awake < sum(table.values())


# --- what cannot work -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"vllm_gpus": "0,2"}, "--vllm-gpus 0,2 names the GPU of trainer process 0: name GPUs "),
        ({"vllm_gpus": "1"}, "--vllm-gpus 1 names the GPU of trainer process 1: name GPUs"),
        (
            {"vllm_gpus": "3"},
            "--vllm-gpus 3: torch sees 3 GPUs, numbered from 0: set CUDA_VISIBLE_DEVICES",
        ),
        (
            {"vllm_gpus": "2", "vllm_enable_sleep_mode": True},
            "--vllm-enable-sleep-mode lets trainer and server take turns on a GPU, but --vllm-gpus",
        ),
    ],
)
def test_gpus_that_cannot_work_are_refused_before_anything_starts(monkeypatch, options, sentence):
    world = World(0, 2, pretend.WORLD.device)
    monkeypatch.setattr(World, "gather", lambda self, mine: [mine, "B"])
    monkeypatch.setattr(World, "once", lambda self, work: work())
    with pretend.cuda("A", "B", "C"):
        with refused(f"^{sentence}"):
            gpus.shares(Config(engine="vllm", **options), world)
        assert not gpus.shares(Config(engine="vllm", vllm_gpus="2"), world)
        assert gpus.shares(Config(engine="vllm"), world)


OURS = {"gpu": "A", "nccl": "2.29.7"}


@pytest.mark.parametrize(
    ("wanted", "facts", "sentence"),
    [
        (
            "broadcast",
            {"gpus": ["A"]},
            "--server here shares the trainer's GPU, where --weight-transport broadcast cannot be "
            "used; leave it out.",
        ),
        (
            "memory",
            {"gpus": ["B"]},
            "--server here is on another GPU, where --weight-transport memory cannot be used; "
            "leave it out.",
        ),
        (
            "auto",
            {"gpus": ["A", "B"]},
            "--server here uses the trainer's GPU and other GPUs, but no transport reaches both; "
            "give the server only the trainer's GPU, or only other GPUs.",
        ),
        (
            "auto",
            {},
            "--server here computes on a CPU but the trainer on a GPU, so it cannot get the "
            "weights; start both on the same kind of device.",
        ),
        (
            "auto",
            {"gpus": ["B"], "nccl": "2.28.9"},
            "--server here has NCCL '2.28.9' but the trainer has '2.29.7', and NCCL connects only "
            "identical versions; install the same torch for both.",
        ),
    ],
)
def test_a_server_that_cannot_get_the_weights_is_refused_in_one_sentence(wanted, facts, sentence):
    info = {"gpus": [], "nccl": "2.29.7"} | facts
    with refused(f"^{re.escape(sentence)}$"):
        protocol.transport(wanted, "here", info, OURS)


def test_the_transport_follows_from_the_gpu_of_the_server():
    # NCCL's versions are not compared where it is not used
    for gpu, nccl, found in (("A", "2.28.9", "memory"), ("C", "2.29.7", "broadcast")):
        info = {"gpus": [gpu], "nccl": nccl}
        assert protocol.transport("auto", "here", info, OURS) == found
    cpu = {"gpu": "", "nccl": ""}
    for wanted, found in {"auto": "broadcast", "memory": "memory"}.items():
        assert protocol.transport(wanted, "here", {"gpus": [], "nccl": ""}, cpu) == found
