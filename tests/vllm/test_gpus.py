"""Trainer and server on a machine with GPUs: which transport the weights take, how much memory the
server gets, and which combinations are refused.

The machine is pretended (pretend.py), and the server is the fake one. Read next: test_sleeping.py.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

import train
from nanogrpo.config import Config
from nanogrpo.distributed.world import World
from nanogrpo.errors import UserError
from nanogrpo.run import memory, setup
from nanogrpo.vllm import gpus, protocol
from nanogrpo.vllm.server import Server
from tests.conftest import arguments
from tests.vllm import pretend
from tests.vllm.fake import MODEL, PARAMS, PROMPTS

GIB = 1 << 30


class Started:
    """A sidecar that is the fake server, on the GPUs that it was given."""

    def __init__(self, model, options, python, output, gpus=""):
        self.options, self.gpus, self.output = options, gpus, output

    def start(self, timeout: float) -> Server:
        return Server(self.fake.url, timeout=timeout)

    def stop(self) -> None:
        pass


@pytest.fixture
def machine(fake, monkeypatch, tmp_path):
    """Return a function: make the engine of a trainer on the first of these GPUs."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(setup, "Sidecar", Started)
    monkeypatch.setattr(Started, "fake", fake, raising=False)
    made = []

    def make(theirs: list[str], **options):
        fake.facts |= {"gpus": theirs, "nccl": "2.29.7"}
        server = (fake.url,) if options.pop("running", False) else ()
        cfg = Config(engine="vllm", output_dir=str(tmp_path), server=server, **options)
        cfg = dataclasses.replace(cfg, model="m", data=("d",))
        cfg.validate()
        engine = setup.make_engine(cfg, pretend.WORLD, MODEL, Path("m"), 32, 30 * GIB)
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
        sidecar = engine.sidecar
        # 70 free, 30 for the trainer, 2 as a margin
        assert sidecar.options == ["--max-model-len", "32", "--gpu-memory-utilization", "0.475"]
        assert sidecar.gpus == ""
        assert len(engine.sample(PROMPTS, 2, PARAMS, step=0)) == 12


@pytest.mark.parametrize(
    ("options", "environment", "visible", "parallel"),
    [
        ({"vllm_gpus": "1"}, None, "1", []),
        ({"vllm_gpus": "1"}, "4,6", "6", []),
        ({"vllm_gpus": "1"}, "GPU-a,MIG-b", "MIG-b", []),
        ({"vllm_gpus": "GPU-B"}, "4", "GPU-B", []),
        ({"vllm_gpus": "1,2"}, None, "1,2", ["--tensor-parallel-size", "2"]),
        ({"vllm_gpus": "1,2", "vllm_options": "--data_parallel_size=2"}, None, "1,2", []),
        ({"vllm_gpus": "1", "weight_transport": "broadcast"}, None, "1", []),
    ],
)
def test_a_server_of_our_own_on_other_gpus_gets_the_weights_by_nccl(
    machine, fake, monkeypatch, options, environment, visible, parallel
):
    if environment:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", environment)
    with pretend.cuda("A", "B", "C"):
        engine = machine(["B"], **options)
        given = ["--data_parallel_size=2"] if "vllm_options" in options else []
        assert engine.sidecar.options == ["--max-model-len", "32", *parallel, *given]
        assert engine.sidecar.gpus == visible
        engine.load(MODEL, 0)
        assert fake.init_info.transport == "broadcast"
        assert all(torch.equal(fake.weights[n], p) for n, p in MODEL.named_parameters())


@pytest.mark.parametrize("options", [{"vllm_gpus": "0"}, {"weight_transport": "memory"}])
def test_the_trainers_gpu_can_be_named(machine, fake, options):
    with pretend.cuda("A", "B"):
        machine(["A"], **options).load(MODEL, 0)
    assert fake.init_info.transport == "memory"


@pytest.mark.parametrize(("theirs", "found"), [("A", "memory"), ("C", "broadcast")])
def test_a_running_server_says_which_gpu_it_uses(machine, fake, theirs, found):
    with pretend.cuda("A", "B"):
        machine([theirs], running=True).load(MODEL, 0)
    assert fake.init_info.transport == found


def test_in_sleep_mode_the_server_gets_what_the_trainer_does_not_keep(machine, fake):
    with pretend.cuda("A", free=70, total=80):
        engine = machine(["A"], vllm_enable_sleep_mode=True)
        assert "--enable-sleep-mode" in engine.sidecar.options
        assert fake.asleep


def test_while_the_server_samples_the_trainer_keeps_its_weights_and_moments():
    model, cfg = MODEL, Config(engine="vllm", beta=0.1)
    rows = memory.table(model, cfg, pretend.WORLD, 100)
    table = {row.name: row.bytes for row in rows if not row.on_host}
    names = ("parameters", "optimizer", "reference model", "weights to be sent")
    kept = memory.while_sampling(model, cfg, pretend.WORLD, 100)
    assert kept == sum(table[name] for name in names)
    n = sum(p.numel() for p in model.parameters())
    assert kept >= (4 + 8 + 4 + 2) * n
    assert kept < sum(table.values())


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ["weights", "cache", "workspaces"]),
        ({"vllm_gpus": "0"}, ["weights", "cache", "workspaces"]),
        ({"vllm_gpus": "1"}, []),
        ({"vllm_enable_sleep_mode": True}, ["workspaces"]),
    ],
)
def test_the_table_counts_what_the_server_has_on_the_trainers_gpu(options, expected):
    rows = memory.table(MODEL, Config(engine="vllm", **options), pretend.WORLD, 100)
    theirs = [row.name.removeprefix("vLLM: ").split()[0] for row in rows if row.of_server]
    assert theirs == expected


# --- what cannot work -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"weight_transport": "broadcast"},
            "--weight-transport broadcast cannot be used if the vLLM server shares the trainer's "
            "GPU, because NCCL connects only different GPUs: leave it out, or name another GPU "
            "with --vllm-gpus.",
        ),
        (
            {"weight_transport": "broadcast", "vllm_gpus": "0"},
            "--weight-transport broadcast cannot be used if the vLLM server shares",
        ),
        (
            {"weight_transport": "memory", "vllm_gpus": "1"},
            "--weight-transport memory works only within a GPU, and --vllm-gpus 1 is not the",
        ),
        (
            {"vllm_gpus": "0,1"},
            "--vllm-gpus 0,1 names the trainer's GPU and others, and no --weight-transport reaches",
        ),
        (
            {"vllm_gpus": "2"},
            "--vllm-gpus 2: torch sees 2 GPUs, numbered from 0; to name one that "
            "CUDA_VISIBLE_DEVICES hides, give its UUID (nvidia-smi -L).",
        ),
        (
            {"vllm_gpus": "1", "vllm_enable_sleep_mode": True},
            "--vllm-enable-sleep-mode lets trainer and server take turns on a GPU, but --vllm-gpus",
        ),
    ],
)
def test_gpus_that_cannot_work_are_refused_before_anything_starts(options, sentence):
    with pretend.cuda("A", "B"), pytest.raises(UserError) as error:
        gpus.shares(Config(engine="vllm", **options), pretend.WORLD)
    assert str(error.value).startswith(sentence)
    assert str(error.value).count("\n") == 0


def test_the_gpu_of_another_trainer_process_is_refused(monkeypatch):
    world = World(0, 2, pretend.WORLD.device)
    monkeypatch.setattr(World, "gather", lambda self, mine: [mine, "B"])
    monkeypatch.setattr(World, "once", lambda self, work: work())
    with pretend.cuda("A", "B", "C"):
        cfg = Config(engine="vllm", vllm_gpus="1")
        with pytest.raises(UserError, match="--vllm-gpus 1 names the GPU of trainer process 1:"):
            gpus.shares(cfg, world)
        assert not gpus.shares(dataclasses.replace(cfg, vllm_gpus="2"), world)
        assert gpus.shares(dataclasses.replace(cfg, vllm_gpus=""), world)


OURS = {"gpu": "A", "nccl": "2.29.7"}


@pytest.mark.parametrize(
    ("wanted", "facts", "ours", "sentence"),
    [
        (
            "broadcast",
            {"gpus": ["A"]},
            OURS,
            "--weight-transport broadcast cannot be used, because here shares the trainer's GPU, "
            "and NCCL connects only different GPUs; leave it out.",
        ),
        (
            "memory",
            {"gpus": ["B"]},
            OURS,
            "--weight-transport memory cannot be used, because here is on another GPU, which "
            "cannot map the trainer's memory; leave it out.",
        ),
        (
            "auto",
            {"gpus": ["A", "B"]},
            OURS,
            "--server here uses the trainer's GPU and others, and no transport reaches both; give "
            "the server only that GPU, or only others.",
        ),
        (
            "auto",
            {"gpus": []},
            OURS,
            "--server here computes on a CPU but the trainer on a GPU, so it cannot get the "
            "weights; start both on the same kind of device.",
        ),
        (
            "auto",
            {"gpus": ["A"]},
            {"gpu": "", "nccl": ""},
            "--server here computes on a GPU but the trainer on a CPU",
        ),
        (
            "auto",
            {"gpus": ["B"], "nccl": "2.28.9"},
            OURS,
            "--server here has NCCL '2.28.9' but the trainer has '2.29.7', and NCCL connects only "
            "equal versions; install the same torch for both.",
        ),
    ],
)
def test_a_server_that_cannot_get_the_weights_is_refused_in_one_sentence(
    wanted, facts, ours, sentence
):
    info = {"gpus": [], "nccl": "2.29.7"} | facts
    with pytest.raises(UserError) as error:
        protocol.transport(wanted, "here", info, ours)
    assert str(error.value).startswith(sentence)
    assert str(error.value).count("\n") == 0


def test_nccl_is_not_compared_where_it_is_not_used():
    info = {"gpus": ["A"], "nccl": "2.28.9"}
    assert protocol.transport("auto", "here", info, OURS) == "memory"
    cpu = {"gpu": "", "nccl": ""}
    for wanted, found in {"auto": "broadcast", "memory": "memory"}.items():
        assert protocol.transport(wanted, "here", {"gpus": [], "nccl": ""}, cpu) == found


def test_a_server_on_the_wrong_gpu_is_refused_before_the_first_sync(machine, fake):
    with pretend.cuda("A", "B"):
        with pytest.raises(UserError, match="--weight-transport memory cannot be used, because"):
            machine(["B"], running=True, weight_transport="memory")
        with pytest.raises(UserError, match="uses the trainer's GPU and others"):
            machine(["A", "B"])  # with --tensor-parallel-size 2 in --vllm-options
    assert not hasattr(fake, "init_info")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--vllm-gpus", "one"], "--vllm-gpus is 'one': write numbers or UUIDs with commas, such"),
        (["--vllm-gpus", "1,"], "--vllm-gpus is '1,': write numbers or UUIDs with commas"),
        (["--vllm-gpus", "-1"], "--vllm-gpus is '-1': write numbers or UUIDs with commas"),
        (["--vllm-gpus", "1,1"], "--vllm-gpus 1,1 names a GPU twice: name each once."),
        (["--vllm-gpus", "0"], "--vllm-gpus needs a GPU, but the trainer uses a CPU: leave it out"),
        (["--vllm-enable-sleep-mode"], "--vllm-enable-sleep-mode needs a GPU, but the trainer"),
        (
            ["--vllm-enable-sleep-mode", "--max-staleness", "1"],
            "--vllm-enable-sleep-mode cannot be used with --max-staleness, because the server",
        ),
        (
            ["--vllm-gpus", "1", "--server", "http://127.0.0.1:9"],
            "--vllm-gpus is for a server that the trainer starts, but --server names one that runs",
        ),
        (
            ["--vllm-enable-sleep-mode", "--server", "http://127.0.0.1:9"],
            "--vllm-enable-sleep-mode is for a server that the trainer starts, but --server names",
        ),
        (["--engine", "local", "--vllm-gpus", "1"], "--vllm-gpus is 1, which has no effect with"),
    ],
)
def test_options_that_cannot_work_are_reported_in_one_sentence(
    tiny_base, files, tmp_path, capsys, options, sentence
):
    assert train.main(arguments(tiny_base, files, tmp_path, "--engine", "vllm", *options)) == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert said.startswith("error: ")
    assert sentence in said
