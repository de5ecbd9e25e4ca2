"""Choose the GPUs of our own server, before it is started.

In: --vllm-gpus, and the GPUs of the trainer. Out: the CUDA_VISIBLE_DEVICES of the server, and
whether it shares a GPU with the trainer. Raises UserError for a combination that cannot work.

By default, the server uses the first GPU of the trainer. Weights then pass through the memory of
the shared GPU. If the server has other GPUs, weights pass through NCCL, which accepts only one
process per GPU. Once a server runs, it reports its GPUs itself (`protocol.transport`). Read next:
feature.py (`own_server`).
"""

import os

import torch

from nanogrpo.distributed.world import World
from nanogrpo.errors import UserError
from nanogrpo.extras.options import Config
from nanogrpo.vllm.buckets import device_facts


def visible(names: str) -> str:
    """Return CUDA_VISIBLE_DEVICES for a server on these GPUs. `names` are the GPUs' numbers in this
    process. These numbers depend on the process's own CUDA_VISIBLE_DEVICES.

    >>> visible("1")  # with CUDA_VISIBLE_DEVICES=4,5 in our environment
    '5'
    """
    own = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not own:
        return names
    return ",".join(own.split(",")[int(name)].strip() for name in names.split(","))


def shares(cfg: Config, world: World) -> bool:
    """Return whether our own server will share a GPU with the trainer. Every rank must call.

    Raises UserError if no weights could be sent to the server's GPUs.
    """
    if cfg.server:
        return False
    if world.device.type == "cpu":
        if cfg.vllm_gpus or cfg.vllm_enable_sleep_mode:
            raise UserError(
                "--vllm-gpus and --vllm-enable-sleep-mode need a GPU, but the trainer uses a CPU: "
                "leave them out."
            )
        return False
    trainers = world.gather(device_facts(world.device)["gpu"])
    return world.once(lambda: _shares(cfg, trainers))  # the numbers refer to the machine of rank 0


def _shares(cfg: Config, trainers: list[str]) -> bool:
    """`trainers` are the UUIDs of the ranks' GPUs."""
    numbers, count = [int(n) for n in cfg.vllm_gpus.split(",") if n], torch.cuda.device_count()
    if max(numbers, default=0) >= count:
        raise UserError(
            f"--vllm-gpus {cfg.vllm_gpus}: torch sees {count} GPUs, numbered from 0: "
            "set CUDA_VISIBLE_DEVICES to the GPUs of trainer and server."
        )
    theirs = [device_facts(torch.device("cuda", n))["gpu"] for n in numbers] or trainers[:1]
    shared = [rank for rank, gpu in enumerate(trainers) if gpu in theirs]
    if shared and (any(shared) or len(theirs) > 1):
        raise UserError(
            f"--vllm-gpus {cfg.vllm_gpus} names the GPU of trainer process {max(shared)}: name "
            "GPUs without a trainer process, or leave the option out, to share the GPU of process "
            "0."
        )
    if not shared and cfg.vllm_enable_sleep_mode:
        raise UserError(
            "--vllm-enable-sleep-mode lets trainer and server take turns on a GPU, but --vllm-gpus "
            f"{cfg.vllm_gpus} is not a GPU of the trainer: leave one of the two options out."
        )
    return bool(shared)
