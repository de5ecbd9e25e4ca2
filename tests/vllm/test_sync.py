"""The weight sync without vLLM: the layout of the buckets, gathers (also from FSDP2 shards), both
transports between processes, and greetings that are refused. With vLLM: test_vllm_real.py.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanogrpo.model import lora
from nanogrpo.vllm.auth import loopback
from nanogrpo.vllm.buckets import (
    ALIGN,
    DTYPES,
    HEADER,
    BroadcastGroup,
    InitInfo,
    Layout,
    SharedBuckets,
    attach,
    sequence_of,
)
from nanogrpo.vllm.sync import WeightSync
from tests.conftest import tiny_model
from tests.vllm.real import ROOT, train_a_little

ENTRIES = [["a.weight", "float32", [2, 3]], ["b", "bfloat16", [5]], ["c", "float16", [1, 1, 7]]]


# --- the layout -----------------------------------------------------------------------------------


@settings(max_examples=100)
@given(
    st.lists(
        st.tuples(st.sampled_from(sorted(DTYPES)), st.lists(st.integers(1, 9), max_size=4)),
        min_size=1,
        max_size=12,
    ),
    st.integers(1, 700),
)
def test_tensors_lie_in_order_apart_and_aligned(tensors, bucket_bytes):
    layout = Layout([[f"p{i}", d, s] for i, (d, s) in enumerate(tensors)], bucket_bytes)
    end = (0, HEADER)
    for slot, (dtype, shape) in zip(layout.slots, tensors):
        assert slot.offset % ALIGN == 0
        assert slot.nbytes == DTYPES[dtype].itemsize * math.prod(shape)
        assert (slot.bucket, slot.offset) >= end or (slot.bucket == end[0] + 1 and slot.offset == 0)
        end = (slot.bucket, slot.offset + slot.nbytes)
        assert end[1] <= layout.sizes[slot.bucket]
    # No bucket is larger than asked for, but for a tensor that is so by itself.
    for i, size in enumerate(layout.sizes):
        assert size <= bucket_bytes or len([s for s in layout.slots if s.bucket == i]) == 1
    # And what is written through the views of one end is read through those of the other.
    buckets = [torch.zeros(n, dtype=torch.uint8) for n in layout.sizes]
    for i, b in enumerate(buckets):
        for k, (_, view) in enumerate(layout.views(b, i)):
            view.fill_(k + 1)
    again = Layout(json.loads(json.dumps(layout.entries)), bucket_bytes)
    for i, b in enumerate(buckets):
        for k, (_, view) in enumerate(again.views(b, i)):
            assert (view == k + 1).all()
    assert int(sequence_of(buckets[0])) == 0  # the header was left alone


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([], "at least one"),
        ("abc", "at least one"),
        ([["a", "float32"]], "is not \\[name, dtype, shape\\]"),
        ([["a b", "float32", [1]]], "is not a parameter's name"),
        ([["a", "int8", [1]]], "a has dtype 'int8' but must have one of"),
        ([["a", ["float32"], [1]]], "but must have one of"),
        ([["a", "float32", [0]]], "a size of a is 0 but must be"),
        ([["a", "float32", [True]]], "a size of a is True but must be"),
        ([["a", "float32", [1] * 5]], "at most 4 sizes"),
        ([["a", "float32", [2**32, 2**32]]], "more than any model"),
        ([["a", "float32", [1]], ["a", "float32", [1]]], "names a tensor twice"),
    ],
)
def test_layouts_that_no_model_has(entries, message):
    with pytest.raises(ValueError, match=message):
        Layout(entries)


# --- greetings ------------------------------------------------------------------------------------

GOOD = {"transport": "broadcast", "layout": ENTRIES, "bucket_bytes": 4096, "timeout": 5.0}
GOOD |= {"address": "127.0.0.1", "port": 1234, "group": "abc", "size": 2}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"transport": "pickle"}, "must be broadcast or memory"),
        ({"port": 0}, "port is 0 but must be an integer"),
        ({"port": "1234"}, "port is '1234' but must be an integer"),
        ({"size": 1}, "size is 1 but must be"),
        ({"group": "a/b"}, "group is missing or has characters"),
        ({"address": "x\ny"}, "address is missing or has"),
        ({"timeout": math.inf}, "timeout is inf but must be seconds"),
        ({"timeout": "5"}, "timeout is '5' but must be seconds"),
        ({"bucket_bytes": -1}, "bucket_bytes is -1 but must be"),
        ({"transport": "memory", "handles": []}, "needs one handle for each"),
    ],
)
def test_greetings_that_are_refused(change, message):
    InitInfo(**GOOD)
    with pytest.raises(ValueError, match=message):
        InitInfo(**GOOD | change)


@pytest.mark.parametrize(
    "path",
    ["/etc/passwd", "/proc/self/mem", "/proc/1/fd/../../self/environ", "/dev/shm/x", "", None, 3],
)
def test_handles_open_nothing_but_shared_buckets(path):
    with pytest.raises(ValueError, match=r"is not a shared bucket|cannot be opened"):
        attach({"path": path}, 64, torch.device("cpu"))


def test_an_ordinary_file_behind_a_descriptor_is_refused_and_a_bucket_too_small_as_well(tmp_path):
    with (tmp_path / "file").open("w+b") as file:
        file.truncate(64)
        with pytest.raises(ValueError, match="is not a shared bucket"):
            attach({"path": f"/proc/{os.getpid()}/fd/{file.fileno()}"}, 64, torch.device("cpu"))
    shared = SharedBuckets([64], torch.device("cpu"))
    with pytest.raises(ValueError, match="length"):
        attach(shared.handles()[0], 65, torch.device("cpu"))
    shared.close()


@pytest.mark.parametrize(
    ("host", "own"), [("127.0.0.1", True), ("localhost", True), ("::1", True), ("10.0.0.1", False)]
)
def test_loopback(host, own):
    assert loopback(host) is own


# --- gathers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_buckets_hold_the_models_weights(tied, dtype):
    model = tiny_model(tie_word_embeddings=tied)
    sync = WeightSync(model, dtype, torch.device("cpu"), bucket_bytes=4096)
    assert len(sync.buckets) > 1
    for round_ in (1, 2):
        sync.gather(model)
        assert sync.slots.keys() == dict(model.named_parameters()).keys()
        assert all(
            torch.equal(sync.slots[n], p.detach().to(DTYPES[dtype]))
            for n, p in model.named_parameters()
        )
        assert int(sequence_of(sync.buckets[0])) == sync.sequence == round_
        train_a_little(model, seed=round_)


def test_labels_are_this_trainers_only():
    model = tiny_model()
    one, two = (WeightSync(model, "float32", torch.device("cpu")) for _ in range(2))
    assert one.version_of(one.label(17)) == 17
    assert [
        one.version_of(x) for x in (two.label(17), "default", "torn", "", "17", f"{one.run}.x")
    ] == [None] * 6


# --- between processes ----------------------------------------------------------------------------


def run(script: str, *arguments: str, ranks: int = 1) -> dict:
    """Runs a script under torchrun; its standard output's last line is JSON."""
    launch = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
        "--no-python",
        sys.executable,
        "-c",
    ]
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *launch, script, *arguments],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


FSDP = """
import json, torch, torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from tests.conftest import tiny_model
from nanogrpo.distributed.world import World
from nanogrpo.model import lora
from nanogrpo.vllm.sync import WeightSync

dist.init_process_group("gloo")
rank, out = dist.get_rank(), {}
for tied in (True, False):
    for param_dtype, dtype in ((None, "float32"), (torch.bfloat16, "bfloat16"), (None, "bfloat16")):
        whole, model = tiny_model(tie_word_embeddings=tied), tiny_model(tie_word_embeddings=tied)
        policy = MixedPrecisionPolicy(param_dtype=param_dtype)
        for block in model.model.layers:
            fully_shard(block, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        sync = WeightSync(model, dtype, torch.device("cpu"), bucket_bytes=4096, main=rank == 0)
        sync.gather(model)
        expected = {n: p.detach().to(getattr(torch, dtype)) for n, p in whole.named_parameters()}
        if rank == 0:
            same = sync.slots.keys() == expected.keys() and all(torch.equal(sync.slots[n], v) for n, v in expected.items())
            out[f"{tied} {param_dtype} {dtype}"] = same
        sharded = all(hasattr(p, "full_tensor") for p in model.parameters())  # the shards are back after the gather
        out["sharded"] = out.get("sharded", True) and sharded
world = World(rank, 2, torch.device("cpu")).patient()
out["shared"] = world.once(lambda: {"x": [1, 0.1, "y"], "from": rank}) == {"x": [1, 0.1, "y"], "from": 0}
everyone = [None] * dist.get_world_size()
dist.all_gather_object(everyone, out)
dist.barrier()
if rank == 0:
    print(json.dumps(everyone))
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_gathers_from_fsdp_shards_are_the_whole_models_bits():
    first, second = run(FSDP, ranks=2)
    assert len(first) == 8
    assert all(first.values())
    assert second == {"sharded": True, "shared": True}


def test_full_parameters_of_a_plain_model_are_its_parameters():
    model = tiny_model()
    assert [(n, p.data_ptr()) for n, p in lora.full_parameters(model)] == [
        (n, p.data_ptr()) for n, p in model.named_parameters()
    ]


def test_an_update_is_announced_once_the_store_has_it():
    """The `set` of torch's store only sends: a worker that asks at once, over its own connection,
    could be answered before it.
    """
    sent, arrived = {}, {}
    group = BroadcastGroup.__new__(BroadcastGroup)
    group.store = SimpleNamespace(
        set=sent.__setitem__, get=lambda key: arrived.update(sent) or arrived[key]
    )
    group.announce(7)
    assert arrived == {"update": "7"}


RECEIVER = """
import json, sys, torch
from nanogrpo.vllm.buckets import BroadcastGroup, InitInfo, attach, sequence_of

info = InitInfo(**json.loads(sys.argv[1]))
cpu = torch.device("cpu")
plan = info.plan
if info.transport == "memory":
    buckets = [attach(h, n, cpu) for h, n in zip(info.handles, plan.sizes)]
else:
    group = BroadcastGroup(info, 1, cpu)
    print("joined", flush=True)
    sys.stdin.readline()
    assert group.announced(1) and not group.announced(2)
    buckets = [torch.empty(n, dtype=torch.uint8) for n in plan.sizes]
    for b in buckets:
        group.broadcast(b)
sums = {n: t.double().sum().item() for i, b in enumerate(buckets) for n, t in plan.views(b, i)}
print(json.dumps({"sequence": int(sequence_of(buckets[0])), "sums": sums}), flush=True)
"""


@dataclasses.dataclass(eq=False)
class Peer:
    """Stands for a server: hands the greeting to a process that does what the worker does, and
    waits until it has joined.
    """

    host: str = "127.0.0.1"
    process: subprocess.Popen | None = None
    group: BroadcastGroup | None = None

    def post(self, path, body=None, timeout=None):
        env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", RECEIVER, json.dumps(body["init_info"])]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
        )
        if body["init_info"]["transport"] == "broadcast":
            assert self.process.stdout.readline() == "joined\n"


@pytest.mark.parametrize("transport", ["broadcast", "memory"])
def test_buckets_reach_another_process(transport):
    model, peer = tiny_model(), Peer()
    sync = WeightSync(
        model, "float32", torch.device("cpu"), transport, bucket_bytes=4096, timeout=120.0
    )
    sync.gather(model)
    sync.connect(peer, workers=1)
    if (group := peer.group) is not None:
        group.announce(sync.sequence)
        peer.process.stdin.write("go\n")
        peer.process.stdin.flush()
        for b in sync.buckets:
            group.broadcast(b)
    got = json.loads(peer.process.stdout.readline())
    peer.process.communicate(timeout=120)
    assert got == {
        "sequence": 1,
        "sums": {n: p.double().sum().item() for n, p in model.named_parameters()},
    }
    sync.disconnect(peer)
