"""The weight sync without vLLM: the layout of the buckets, gathers from FSDP2 shards.

test_server.py shares memory with another process, and test_nccl.py broadcasts to one.

With vLLM: test_real.py.
"""

import json
import math
import resource

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from nanogrpo import Config
from nanogrpo.distributed.world import join
from nanogrpo.vllm.buckets import (
    ALIGN,
    DTYPES,
    Layout,
    attach,
    checksum,
)
from nanogrpo.vllm.sync import WeightSync
from tests.conftest import refused, tiny_model
from tests.ranks import run

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
    end = (0, 0)
    slots = [(i, *slot[-2:]) for i, each in enumerate(layout.contents) for slot in each]
    for (bucket, start, stop), (dtype, shape) in zip(slots, tensors, strict=True):
        assert start % ALIGN == 0
        assert stop - start == DTYPES[dtype].itemsize * math.prod(shape)
        assert (bucket, start) >= end or (bucket == end[0] + 1 and start == 0)
        end = (bucket, stop)
        assert stop <= layout.sizes[bucket]
    # No bucket is larger than requested, unless it holds a single tensor.
    for size, each in zip(layout.sizes, layout.contents, strict=True):
        assert size <= bucket_bytes or len(each) == 1
    # Values written through the views of one end are read through those of the other.
    again = Layout(json.loads(json.dumps(layout.entries)), bucket_bytes)
    for i, size in enumerate(layout.sizes):
        bucket = torch.zeros(size, dtype=torch.uint8)
        for k, (_, view) in enumerate(layout.views(bucket, i)):
            view.fill_(k + 1)
        assert all((view == k + 1).all() for k, (_, view) in enumerate(again.views(bucket, i)))


@pytest.mark.parametrize("handle", [["self", 0], ["..", "/etc/passwd"], [1, "0/../../mem"], [0, 0]])
def test_handles_open_nothing_by_its_path(handle):
    with pytest.raises((ValueError, OSError)):
        attach(handle, 64, torch.device("cpu"))


# --- gathers ---


@pytest.mark.parametrize("size", [64, 1003])
def test_a_checksum_changes_with_every_byte(size):
    bucket = torch.randint(256, (size,), generator=torch.Generator().manual_seed(0)).byte()
    for i in range(0, size, 9):
        changed = bucket.clone()
        changed[i] ^= 1
        assert checksum(changed) != checksum(bucket)


def gather_on_two_ranks() -> bool:
    """Return whether gathers from shards have the same bits, and the shards are back."""
    with join(Config(device="cpu")) as world:
        for tied, policy, dtype in (
            (True, None, "bfloat16"),
            (False, torch.bfloat16, "float32"),  # the bits that the trainer computes with
        ):
            full, model = (tiny_model(tie_word_embeddings=tied) for _ in range(2))
            mixed = MixedPrecisionPolicy(param_dtype=policy)
            for block in model.model.layers:
                fully_shard(block, mp_policy=mixed)
            fully_shard(model, mp_policy=mixed)
            sync = WeightSync(model, dtype, world.device, bucket_bytes=4096, main=world.main)
            sync.gather(model)
            for name, p in full.named_parameters():
                expected = p.detach().to(policy).to(DTYPES[dtype])
                assert not world.main or torch.equal(sync.slots.pop(name), expected), name
            assert not sync.slots
            assert all(hasattr(p, "full_tensor") for p in model.parameters())
    return True


def test_gathers_from_fsdp_shards_have_the_bits_of_the_full_model():
    assert all(run(2, gather_on_two_ranks))


def test_a_limit_on_file_sizes_is_reported_in_one_sentence():
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with refused(r"shared memory for the weights.*ulimit -f"):
            WeightSync(tiny_model(), "float32", torch.device("cpu"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
