"""What only a GPU can show, apart from speed: memory shared with a child that is killed, an NCCL
group of one rank, graphs captured next to another thread, uninitialized memory, fragmentation.

Most tests have the marker gpu. Read next: tests/kernels/test_gpu.py, test_host.py.
"""

import json
import signal
import subprocess
import sys
import threading
from unittest import mock

import pytest
import torch

from nanogrpo import Config
from nanogrpo.engine.base import SamplingParams
from nanogrpo.engine.local import LocalEngine
from nanogrpo.grpo import loss as grpo
from nanogrpo.model import dispatch
from nanogrpo.types import Prompt
from nanogrpo.vllm.buckets import BroadcastGroup, InitInfo, SharedBuckets, attach, checksum
from nanogrpo.vllm.process import listen
from tests.conftest import DEVICE, random_batch, tiny_model

PARAMS = SamplingParams(max_tokens=3, seed=3)
PROMPTS = [Prompt(1, "", [4, 5, 7])]

CHILD = """
import json, sys, time, torch
from nanogrpo.vllm.buckets import attach, checksum
handle, size = json.loads(sys.argv[1])
bucket = attach(handle, size, torch.device("cuda", 0))
print(checksum(bucket), flush=True)
time.sleep(600)
"""


def sampled() -> list[list[int]]:
    """Sample from a paged cache, on a GPU with graphs."""
    model = tiny_model(num_hidden_layers=1).to(DEVICE)
    options = {"device": DEVICE, "dtype": torch.float32, "paged": True}
    engine = LocalEngine(model.cfg, max_len=32, slots=2, **options)
    engine.load(model, version=0)
    return [s.token_ids for s in engine.sample(PROMPTS, 2, PARAMS, step=0)]


@pytest.mark.parametrize("kernels", ["torch", "triton"])
def test_no_result_depends_on_uninitialized_memory(kernels, monkeypatch):
    """In torch's deterministic mode, new tensors are filled with NaN."""
    monkeypatch.setattr(dispatch, "choice", kernels)
    batch = random_batch([(3, 4), (2, 5)]).to(DEVICE)

    def everything() -> tuple:
        model = tiny_model(num_hidden_layers=1).to(DEVICE)
        loss = model.forward_strip(batch, grpo.objective(batch, Config())).loss
        loss.backward()
        return loss, *(p.grad for p in model.parameters()), sampled()

    *plain, tokens = everything()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        *filled, again = everything()
    finally:
        torch.use_deterministic_algorithms(False)
    assert again == tokens
    assert all(torch.equal(a, b) for a, b in zip(plain, filled, strict=True))


@mock.patch.object(torch, "empty")
def test_cuda_starts_before_a_bucket_of_another_process_is_mapped(empty, monkeypatch):
    """`_new_shared_cuda` does not start CUDA, and the list of allocators would be empty."""
    monkeypatch.setattr(
        torch.UntypedStorage, "_new_shared_cuda", lambda *_: empty.assert_called_once()
    )
    attach([], 1, torch.device("cuda"))


@pytest.mark.gpu
def test_a_killed_child_does_not_keep_a_second_one_from_mapping_the_buckets():
    size = 1 << 20
    for round_ in range(2):
        shared = SharedBuckets([size], torch.device("cuda", 0))
        shared.buckets[0].random_(256)
        torch.cuda.synchronize()
        argument = json.dumps([shared.handles()[0], size])
        with subprocess.Popen(
            [sys.executable, "-c", CHILD, argument], stdout=subprocess.PIPE, text=True
        ) as child:
            assert child.stdout is not None
            try:
                assert int(child.stdout.readline()) == checksum(shared.buckets[0]), round_
            finally:
                child.send_signal(signal.SIGKILL)
        shared.close()


@pytest.mark.gpu
def test_an_nccl_group_of_one_rank_broadcasts():
    device, sock = torch.device("cuda", 0), listen("127.0.0.1")
    port = sock.getsockname()[1]
    info = InitInfo("broadcast", [], 1 << 20, 30.0, "127.0.0.1", port, "alone", 1)
    group, bucket = BroadcastGroup(info, 0, device, sock), torch.ones(1 << 20, device=device)
    group.send([bucket.view(torch.uint8)])
    assert bucket.sum() == 1 << 20
    group.close()


@pytest.mark.gpu
def test_graphs_can_be_captured_while_another_thread_uses_the_gpu():
    expected, ended = sampled(), threading.Event()

    def busy() -> None:
        while not ended.is_set():
            torch.empty(1000).pin_memory().to("cuda", non_blocking=True)
            torch.cuda.current_stream().synchronize()

    thread = threading.Thread(target=busy)
    thread.start()
    try:
        assert sampled() == expected
    finally:
        ended.set()
        thread.join()


FRAGMENTS = """
import random, torch
from nanogrpo import Config
from nanogrpo.distributed.world import join
with join(Config(device="cuda")) as world:
    for seed in range(50):
        n = random.Random(seed).randrange(1000, 16000)
        kept = [torch.empty(n, 4096, device=world.device) for _ in range(8)]
    peak = torch.cuda.max_memory_allocated()
    print(torch.cuda.memory_reserved() / peak)
"""


@pytest.mark.gpu
def test_strips_of_50_lengths_do_not_fragment_the_memory_of_a_run():
    out = subprocess.run([sys.executable, "-c", FRAGMENTS], capture_output=True, text=True)
    assert float(out.stdout) <= 1.1, out.stderr
