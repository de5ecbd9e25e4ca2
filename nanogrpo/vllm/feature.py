"""How vLLM attaches to a run: checks before the start, the engine, and a checkpoint if all servers
are lost.

In: --engine vllm and its options (options.py). Out: a VLLMEngine. Without --server, it starts a
server. Read before: nanogrpo/feature.py. Read next: client.py, gpus.py, sleeping.py.
"""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanogrpo.errors import UserError, read_json
from nanogrpo.extras import memory
from nanogrpo.feature import Feature
from nanogrpo.vllm import gpus
from nanogrpo.vllm.client import VLLMEngine
from nanogrpo.vllm.server import ServerLost, Sidecar
from nanogrpo.vllm.sleeping import SleepingEngine

if TYPE_CHECKING:
    from nanogrpo.distributed.world import World
    from nanogrpo.engine.base import Engine
    from nanogrpo.model.decoder import Decoder
    from nanogrpo.run.setup import Inputs, Run


class VLLM(Feature):
    def __init__(self) -> None:
        # Trainer and server may share memory by CUDA IPC. Expandable segments are off:
        # with them, torch needs a system call that most containers forbid.
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False")

    def settings(self, cfg: Any, inputs: Inputs) -> Any:
        """Refuse GPUs or a checkpoint that a server cannot use."""
        gpus.shares(cfg, inputs.world)
        if read_json(inputs.source / "config.json").get("quantization_config"):
            raise UserError(
                f"--engine vllm would load {inputs.source} in 4 bits, into which no merged weights "
                "can be sent: use the original model with --load-in-4bit, or --engine local."
            )
        self.inputs = inputs
        return cfg

    def engine(self, run: Run) -> VLLMEngine:
        cfg, world, longest = run.cfg, run.world, self.inputs.longest_prompt
        needed = memory_needed(cfg, world, run.model, longest, run.rewards.models)
        max_len = longest + cfg.max_completion_length
        self.client = make_engine(cfg, world, run.model, self.inputs.source, max_len, needed)
        return self.client

    def wrap(self, engine: Engine, run: Run) -> Engine:
        cfg: Any = run.cfg
        return SleepingEngine(engine, self.client) if cfg.vllm_enable_sleep_mode else engine

    @contextlib.contextmanager
    def running(self, run: Run) -> Iterator[None]:
        """Save the finished steps if the last server is lost."""
        try:
            yield
        except ServerLost:  # raised on every rank
            if run.done > run.start:
                run.saver.save(run.done)
            raise


def memory_needed(cfg: Any, world: World, model: Decoder, longest: int, judges: Any) -> int:
    """Return the bytes of device memory that the trainer needs while a server has its memory."""
    rows = memory.table(model, cfg, world, longest, judges)
    if cfg.vllm_enable_sleep_mode:
        return memory.while_sampling(rows)
    return memory.on_device([row for row in rows if not row.of_server])


def make_engine(
    cfg: Any, world: World, model: Decoder, source: Path, max_len: int, needed: int
) -> VLLMEngine:
    """Return the engine, still without weights. Without --server, this starts a server, which ends
    with the run. source: the checkpoint. needed: see `memory_needed`.
    """
    sidecar = None
    if not cfg.server:
        own, given = cfg.vllm_gpus, shlex.split(cfg.vllm_options)
        options = ["--max-model-len", str(max_len)]
        if world.device.type == "cpu":
            # bfloat16 is slow on a CPU, and the server must match the trainer's float32
            options += ["--dtype", "float32"]
        if gpus.shares(cfg, world):
            options += world.once(lambda: memory.server_share(world, needed, given))
        if cfg.vllm_enable_sleep_mode:
            options.append("--enable-sleep-mode")
        if "," in own:
            options += ["--tensor-parallel-size", str(len(own.split(",")))]
        sidecar = Sidecar(
            source,
            [*options, *given],  # the user's options come last and take precedence
            cfg.vllm_python or os.environ.get("NANOGRPO_VLLM_PYTHON", ""),
            Path(cfg.output_dir) / "serve.log",
            gpus=world.once(lambda: gpus.visible(own)) if own else "",
        )
    return VLLMEngine(
        model,
        max_len=max_len,
        servers=cfg.server,
        sidecar=sidecar,
        transport=cfg.weight_transport,
        timeout=cfg.server_timeout,
        sleeps=cfg.vllm_enable_sleep_mode,
        world=world,
    )
