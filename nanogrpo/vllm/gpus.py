"""Choose the GPUs of our own server, before it is started.

In: --vllm-gpus, and the GPUs of the trainer. Out: the CUDA_VISIBLE_DEVICES of the server, and
whether it shares a GPU with the trainer; or a UserError for a combination that cannot work.

Without the option, the server uses the first GPU of the trainer. Weights then pass through the
memory of that GPU, and otherwise through NCCL, which accepts one process per GPU. Once a server
runs, it reports its GPUs itself (`protocol.transport`). Read next: run/setup.py (`make_engine`).
"""

from __future__ import annotations

import os

import torch

from nanogrpo.config import Config
from nanogrpo.distributed.world import World
from nanogrpo.errors import UserError
from nanogrpo.vllm.buckets import device_facts


def visible(names: str) -> str:
    """Return CUDA_VISIBLE_DEVICES for a server on these GPUs.

    A number counts the GPUs that torch sees, which this process's own CUDA_VISIBLE_DEVICES may
    limit. A UUID may also name one that is hidden from us.

    >>> visible("1")  # with CUDA_VISIBLE_DEVICES=4,5 in our environment
    '5'
    """
    own, count = os.environ.get("CUDA_VISIBLE_DEVICES"), torch.cuda.device_count()
    entries = own.split(",") if own else [str(i) for i in range(count)]
    out = []
    for name in names.split(","):
        if name.isdecimal() and int(name) >= count:
            raise UserError(
                f"--vllm-gpus {names}: torch sees {count} GPU{'s' * (count != 1)}, numbered from 0;"
                " to name one that CUDA_VISIBLE_DEVICES hides, give its UUID (nvidia-smi -L)."
            )
        out.append(entries[int(name)].strip() if name.isdecimal() else name)
    return ",".join(out)


def shares(cfg: Config, world: World) -> bool:
    """Return whether a server of our own is to share a GPU with the trainer. Every rank must call.

    Raises UserError if it cannot get the weights there.
    """
    if cfg.engine != "vllm" or cfg.server:
        return False
    if world.device.type == "cpu":
        for option, given in (
            ("--vllm-gpus", cfg.vllm_gpus),
            ("--vllm-enable-sleep-mode", cfg.vllm_enable_sleep_mode),
        ):
            if given:
                raise UserError(f"{option} needs a GPU, but the trainer uses a CPU: leave it out.")
        return False
    trainers = world.gather(device_facts(world.device)["gpu"])
    return world.once(lambda: _shares(cfg, trainers))  # the numbers are those of rank 0's machine


def _shares(cfg: Config, trainers: list[str]) -> bool:
    """trainers: the UUIDs of the ranks' GPUs."""
    theirs = _uuids(cfg.vllm_gpus) if cfg.vllm_gpus else trainers[:1]
    shared = [rank for rank, gpu in enumerate(trainers) if gpu.startswith(tuple(theirs))]
    option = f"--vllm-gpus {cfg.vllm_gpus}"
    if any(shared):
        raise UserError(
            f"{option} names the GPU of trainer process {max(shared)}: name GPUs without a trainer "
            "process, or leave the option out, to share the GPU of process 0."
        )
    if shared and len(theirs) > 1:
        raise UserError(
            f"{option} names the trainer's GPU and others, and no --weight-transport reaches both: "
            "name only that GPU, or only others."
        )
    if shared and cfg.weight_transport == "broadcast":
        raise UserError(
            "--weight-transport broadcast cannot be used if the vLLM server shares the trainer's "
            "GPU, because NCCL connects only different GPUs: leave it out, or name another GPU "
            "with --vllm-gpus."
        )
    if not shared and cfg.weight_transport == "memory":
        raise UserError(
            f"--weight-transport memory works only within a GPU, and {option} is not the "
            "trainer's: leave one of them out."
        )
    if not shared and cfg.vllm_enable_sleep_mode:
        raise UserError(
            f"--vllm-enable-sleep-mode lets trainer and server take turns on a GPU, but {option} "
            "is not the trainer's: leave one of them out."
        )
    return bool(shared)


def _uuids(names: str) -> list[str]:
    """Return the UUIDs of GPUs, or as much of them as --vllm-gpus has."""
    visible(names)  # raises UserError for numbers that are too large
    return [
        device_facts(torch.device("cuda", int(name)))["gpu"]
        if name.isdecimal()
        else name.partition("-")[2]
        for name in names.split(",")
    ]


def parallel(names: str, given: list[str]) -> list[str]:
    """Return the option that lets vLLM use all of these GPUs, unless the user has `given` one."""
    chosen = ("--tensor-p", "--pipeline-p", "--data-p", "-tp", "-pp", "-dp")
    count = len(names.split(","))
    if count == 1 or any(word.replace("_", "-").startswith(chosen) for word in given):
        return []
    return ["--tensor-parallel-size", str(count)]
