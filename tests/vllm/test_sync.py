"""The weight sync without vLLM: the layout of the buckets, gathers from FSDP2 shards, both
transports between processes, and connection data that is refused.

With vLLM: test_real.py.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import resource
from multiprocessing.connection import Connection
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from nanogrpo.config import Config
from nanogrpo.distributed.world import join
from nanogrpo.errors import UserError
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
    checksum,
    sequence_of,
)
from nanogrpo.vllm.sync import WeightSync
from tests.conftest import tiny_model
from tests.ranks import PATIENCE, SERVER, run
from tests.vllm.real import train_a_little

ENTRIES = [["a.weight", "float32", [2, 3]], ["b", "bfloat16", [5]], ["c", "float16", [1, 1, 7]]]


# --- the layout ---


@settings(max_examples=100)
@given(
    st.lists(
        st.tuples(st.sampled_from(sorted(DTYPES)), st.lists(st.integers(1, 9), max_size=4)),
        min_size=1,
        max_size=12,
    ),
    st.integers(1, 700),
)
def test_tensors_are_in_order_disjoint_and_aligned(tensors, bucket_bytes):
    layout = Layout([[f"p{i}", d, s] for i, (d, s) in enumerate(tensors)], bucket_bytes)
    end = (0, HEADER)
    for slot, (dtype, shape) in zip(layout.slots, tensors):
        assert slot.offset % ALIGN == 0
        assert slot.nbytes == DTYPES[dtype].itemsize * math.prod(shape)
        assert (slot.bucket, slot.offset) >= end or (slot.bucket == end[0] + 1 and slot.offset == 0)
        end = (slot.bucket, slot.offset + slot.nbytes)
        assert end[1] <= layout.sizes[slot.bucket]
    # No bucket is larger than requested, unless it holds a single tensor.
    for i, size in enumerate(layout.sizes):
        assert size <= bucket_bytes or len([s for s in layout.slots if s.bucket == i]) == 1
    # Values written through the views of one end are read through those of the other.
    buckets = [torch.zeros(n, dtype=torch.uint8) for n in layout.sizes]
    for i, b in enumerate(buckets):
        for k, (_, view) in enumerate(layout.views(b, i)):
            view.fill_(k + 1)
    again = Layout(json.loads(json.dumps(layout.entries)), bucket_bytes)
    for i, b in enumerate(buckets):
        for k, (_, view) in enumerate(again.views(b, i)):
            assert (view == k + 1).all()
    assert int(sequence_of(buckets[0])) == 0  # the header is untouched


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([], "at least one"),
        ("abc", "at least one"),
        ([["a", "float32"]], "is not \\[name, dtype, at most"),
        ([["a b", "float32", [1]]], "is not \\[name, dtype, at most"),
        ([["a", "int8", [1]]], "is not \\[name, dtype, at most"),
        ([["a", ["float32"], [1]]], "is not \\[name, dtype, at most"),
        ([["a", "float32", [0]]], "a size of a is 0 but must be"),
        ([["a", "float32", [True]]], "a size of a is True but must be"),
        ([["a", "float32", [1] * 6]], "is not \\[name, dtype, at most"),
        ([["a", "float32", [2**32, 2**32]]], "more than any model"),
        ([["a", "float32", [1]], ["a", "float32", [1]]], "names a tensor twice"),
    ],
)
def test_layouts_that_cannot_be_a_model_are_refused(entries, message):
    with pytest.raises(ValueError, match=message):
        Layout(entries)


# --- greetings ---

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
def test_bad_connection_data_is_refused(change, message):
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


def test_ordinary_files_and_buckets_that_are_too_small_are_refused(tmp_path):
    with (tmp_path / "file").open("w+b") as file:
        file.truncate(64)
        with pytest.raises(ValueError, match="is not a shared bucket"):
            attach({"path": f"/proc/{os.getpid()}/fd/{file.fileno()}"}, 64, torch.device("cpu"))
    shared = SharedBuckets([64], torch.device("cpu"))
    with pytest.raises(ValueError, match="length"):
        attach(shared.handles()[0], 65, torch.device("cpu"))
    shared.close()


def test_a_limit_on_file_sizes_is_reported_in_one_sentence():
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(UserError, match=r"2,000 bytes of shared memory.*ulimit -f"):
            SharedBuckets([2000], torch.device("cpu"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize(
    ("host", "own"), [("127.0.0.1", True), ("localhost", True), ("::1", True), ("10.0.0.1", False)]
)
def test_loopback(host, own):
    assert loopback(host) is own


# --- gathers ---


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


@pytest.mark.parametrize("size", [64, 1003])
def test_a_checksum_is_that_of_whole_words_and_changes_with_every_byte(size):
    bucket = torch.randint(256, (size,), generator=torch.Generator().manual_seed(0)).byte()
    data, whole = bytes(bucket.tolist()), size // 8 * 8
    words = [int.from_bytes(data[i : i + 8], "little") for i in range(0, whole, 8)]
    expected = sum(words) + sum(data[whole:])
    assert (checksum(bucket) - expected) % 2**64 == 0
    for i in range(0, size, 9):
        changed = bucket.clone()
        changed[i] ^= 1
        assert checksum(changed) != checksum(bucket)


def test_trainers_have_different_labels_for_the_same_version():
    model = tiny_model()
    one, two = (WeightSync(model, "float32", torch.device("cpu")) for _ in range(2))
    assert one.label(17) != two.label(17)


# --- between processes ---


def gather_on_two_ranks() -> dict[str, bool]:
    """Return what holds after a gather from shards: the same bits, and the shards are back."""
    out = {}
    with join(Config(device="cpu")) as world:
        for tied in (True, False):
            for policy, dtype in (
                (None, "float32"),
                (torch.bfloat16, "bfloat16"),
                (None, "bfloat16"),
                (torch.bfloat16, "float32"),  # servers get the bits that the trainer computes with
            ):
                full, model = (tiny_model(tie_word_embeddings=tied) for _ in range(2))
                mixed = MixedPrecisionPolicy(param_dtype=policy)
                for block in model.model.layers:
                    fully_shard(block, mp_policy=mixed)
                fully_shard(model, mp_policy=mixed)
                sync = WeightSync(model, dtype, world.device, bucket_bytes=4096, main=world.main)
                sync.gather(model)
                expected = {
                    n: p.detach().to(policy).to(DTYPES[dtype]) for n, p in full.named_parameters()
                }
                if world.main:
                    out[f"{tied} {policy} {dtype}"] = sync.slots.keys() == expected.keys() and all(
                        torch.equal(sync.slots[n], p) for n, p in expected.items()
                    )
                out[f"sharded {tied} {policy} {dtype}"] = all(
                    hasattr(p, "full_tensor") for p in model.parameters()
                )
        out["once"] = world.patient().once(lambda: {"x": [0.1], "rank": world.rank}) == {
            "x": [0.1],
            "rank": 0,
        }
    return out


def test_gathers_from_fsdp_shards_have_the_bits_of_the_full_model():
    first, second = run(2, gather_on_two_ranks)
    assert (len(first), len(second)) == (17, 9)
    assert all(first.values())
    assert all(second.values())


def test_full_parameters_of_a_plain_model_are_its_parameters():
    model = tiny_model()
    assert [(n, p.data_ptr()) for n, p in lora.full_parameters(model)] == [
        (n, p.data_ptr()) for n, p in model.named_parameters()
    ]


def test_announce_returns_once_the_store_has_the_update():
    """The `set` of torch's store only sends. A worker that asks at once, over its own connection,
    could be answered before the store has processed it.
    """
    sent, arrived = {}, {}
    group = BroadcastGroup.__new__(BroadcastGroup)
    group.store = SimpleNamespace(
        set=sent.__setitem__, get=lambda key: arrived.update(sent) or arrived[key]
    )
    group.announce(7)
    assert arrived == {"update": "7"}


def receive(connection) -> None:
    """Do what the worker does with a trainer's connection data and one update."""
    connection.send("imported")
    info, cpu = InitInfo(**connection.recv()), torch.device("cpu")
    if info.transport == "memory":
        buckets = [attach(h, n, cpu) for h, n in zip(info.handles, info.plan.sizes)]
    else:
        group = BroadcastGroup(info, 1, cpu)
        connection.send("joined")
        connection.recv()
        assert group.announced(1)
        assert not group.announced(2)
        buckets = [torch.empty(n, dtype=torch.uint8) for n in info.plan.sizes]
        group.send(buckets)
    sums = {
        n: t.double().sum().item() for i, b in enumerate(buckets) for n, t in info.plan.views(b, i)
    }
    connection.send({"sequence": int(sequence_of(buckets[0])), "sums": sums})


@dataclasses.dataclass(eq=False)
class Peer:
    """A server that passes the connection data to another process and waits until it has joined."""

    connection: Connection
    host: str = "127.0.0.1"
    group: BroadcastGroup | None = None

    def post(self, path, body=None, timeout=None):
        self.connection.send(body["init_info"])
        if body["init_info"]["transport"] == "broadcast":
            assert self.connection.recv() == "joined"


@pytest.mark.parametrize("transport", ["broadcast", "memory"])
def test_buckets_reach_another_process(transport):
    model = tiny_model()
    ours, theirs = SERVER.Pipe()
    process = SERVER.Process(target=receive, args=(theirs,))
    process.start()
    # the limits of the sync are not for the imports of the other process
    assert ours.poll(PATIENCE)
    assert ours.recv() == "imported"
    peer, cpu = Peer(ours), torch.device("cpu")
    sync = WeightSync(model, "float32", cpu, bucket_bytes=4096, timeout=120.0)
    sync.gather(model)
    sync.connect(peer, transport, workers=1)
    if peer.group is not None:
        peer.group.announce(sync.sequence)
        ours.send("go")
        peer.group.send(sync.buckets)
    expected = {n: p.double().sum().item() for n, p in model.named_parameters()}
    assert ours.poll(PATIENCE)
    assert ours.recv() == {"sequence": 1, "sums": expected}
    process.join(PATIENCE)
    sync.disconnect(peer)
