"""Weights by NCCL, as it behaves: a peer that hangs does not end the process, and the next sync
succeeds.

A pretended NCCL takes the place of the real one (pretend.py). Read next: test_gpus.py.
"""

import contextlib
import json
import os
import subprocess
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from nanogrpo.vllm import buckets
from nanogrpo.vllm.auth import CONNECT
from nanogrpo.vllm.buckets import BroadcastGroup, InitInfo
from nanogrpo.vllm.process import listen
from nanogrpo.vllm.server import ServerError
from nanogrpo.vllm.sync import WeightSync
from tests.conftest import tiny_model
from tests.ranks import ROOT, run
from tests.vllm import pretend
from tests.vllm.real import PYTHON

GPU = torch.device("cuda", 0)
SHORT = timedelta(seconds=0.4)
LAST = 3  # rounds: the worker hangs, the trainer hangs, nobody hangs


class Mailed:
    """A server in another process, which reads its requests from a store."""

    reached_from, group = "127.0.0.1", None

    def __init__(self, mail: dist.Store):
        self.mail, self.round = mail, 0

    def post(self, path: str, body: dict | None = None) -> None:
        if path == CONNECT:
            self.round += 1
            self.mail.set(f"info {self.round}", json.dumps((body or {})["init_info"]))
            self.mail.wait([f"joined {self.round}"])
        if path == "/update_weights" and self.round == 1:
            time.sleep(3 * SHORT.total_seconds())
            raise ServerError("the server did not answer /update_weights")
        if path == "/update_weights":
            self.mail.wait([f"received {self.round}"])


def trainer(mail: dist.Store) -> dict[str, float]:
    model = tiny_model()
    sync, server = WeightSync(model, "float32", GPU, 1 << 16, timeout=60.0), Mailed(mail)
    sync.gather(model)
    sync.connect(server, "broadcast", 1)
    group = server.group
    group.timeout = SHORT
    nccl = group.group
    with pytest.raises(ServerError, match="did not answer /update_weights"):
        sync.send(server, 0)
    assert (nccl.late, nccl.aborted, server.group) == (1, True, None)
    mail.set("over 1", "")
    sync.connect(server, "broadcast", 1)
    mail.wait(["over 2"])
    sync.connect(server, "broadcast", 1)
    sync.send(server, 1)
    mail.wait(["over 3"])
    return {n: p.double().sum().item() for n, p in model.named_parameters()}


def worker(mail: dist.Store) -> dict[str, float]:
    for n in range(1, LAST + 1):
        mail.wait([f"info {n}"])
        info = InitInfo(**json.loads(mail.get(f"info {n}")))
        group = BroadcastGroup(info, 1, GPU)
        mail.set(f"joined {n}", "")
        received = [torch.empty(size, dtype=torch.uint8) for size in info.plan.sizes]
        if n == 1:
            # the trainer may end it, if this machine is busy
            with contextlib.suppress(RuntimeError):
                group.broadcast(received[0])  # hangs after the first bucket
            mail.wait(["over 1"])
        if n == 2:
            group.timeout = SHORT
            with pytest.raises(RuntimeError, match="timed out"):
                group.send(received)
            mail.set("over 2", "")
    group.send(received)
    mail.set("received 3", "")
    mail.set("over 3", "")
    return {
        n: t.double().sum().item() for i, b in enumerate(received) for n, t in info.plan.views(b, i)
    }


def both_ends(far: float) -> dict[str, float]:
    """Run one end of the sync. far: seconds after which NCCL's watchdog ends the process."""
    buckets.FAR = timedelta(seconds=far)
    main = os.environ["RANK"] == "0"
    port = int(os.environ["MASTER_PORT"])
    wait = timedelta(seconds=60)
    mail = dist.TCPStore("127.0.0.1", port, None, main, wait, wait_for_workers=False)
    with pretend.cuda("A"):
        return trainer(mail) if main else worker(mail)


def test_a_peer_that_hangs_in_a_broadcast_ends_neither_trainer_nor_worker():
    sent, received = run(2, both_ends, buckets.FAR.total_seconds())
    assert sent == received


def test_a_group_has_no_watchdog(monkeypatch):
    """torch creates none with this variable, which it reads in the constructor."""
    name, seen = "TORCH_NCCL_BLOCKING_WAIT", []
    monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(
        dist, "ProcessGroupNCCL", lambda *_: seen.append(os.environ[name]), raising=False
    )
    buckets._nccl(None, 0, 2)
    assert seen == ["1"]
    assert name not in os.environ


def test_ranks_wait_for_each_other_before_nccl_connects_them():
    """A wait in NCCL has no end, but the one in the store has."""
    sock = listen("127.0.0.1")
    layout = [["a", "float32", [1]]]
    address = {"address": "127.0.0.1", "port": sock.getsockname()[1], "group": "x", "size": 2}
    info = InitInfo("broadcast", layout, 4096, 0.5, **address)
    with pretend.cuda("A"), pytest.raises(dist.DistError):
        BroadcastGroup(info, 0, GPU, sock)


PINNED = """
import os, types
from vllm.utils import nccl
nccl._nccl_has_no_cache = lambda: True  # as with NCCL 2.29.7, on a GPU
nccl.pin_nccl_env({"NCCL_PROTO": "Simple"})
from nanogrpo.vllm import worker
seen = []
worker.BroadcastGroup = lambda *_: seen.append(os.environ.get("NCCL_PROTO"))
transfer = worker.Transfer.__new__(worker.Transfer)
transfer.device = "cpu"
transfer.parallel_config = types.SimpleNamespace(data_parallel_index=0, world_size=1, rank=0)
transfer.init_transfer_engine(types.SimpleNamespace(transport="broadcast"))
print(seen, os.environ["NCCL_PROTO"])
"""


@pytest.mark.vllm
def test_a_worker_connects_without_the_settings_that_vllm_pins_for_itself():
    """With VLLM_BATCH_INVARIANT=1. The trainer does not have them."""
    if not Path(PYTHON).exists():
        pytest.skip(f"needs a real vLLM, and {PYTHON} does not exist (docs/vllm.md)")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "NANOGRPO_SERVER": str(os.getpid())}
    environment.pop("NCCL_PROTO", None)
    command = [PYTHON, "-c", PINNED]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout.split("\n")[-2:] == ["[None] Simple", ""], done.stderr[-2000:]
