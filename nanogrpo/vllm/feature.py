"""Attach vLLM to a run: check the inputs, create the engine, and save a checkpoint if all servers
are lost.

In: --engine vllm and its options (options.py). Out: a VLLMEngine. Without --server, this feature
starts a server. Read before: nanogrpo/feature.py. Read next: client.py, gpus.py, sleeping.py.
"""

import contextlib
import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nanogrpo.engine.base import Engine
from nanogrpo.errors import UserError, read_json
from nanogrpo.extras import memory
from nanogrpo.feature import Feature
from nanogrpo.model import weights
from nanogrpo.run.setup import Inputs, Run
from nanogrpo.vllm import gpus
from nanogrpo.vllm.client import VLLMEngine
from nanogrpo.vllm.protocol import FLOAT32_LOGITS
from nanogrpo.vllm.server import ServerLost, Sidecar
from nanogrpo.vllm.sleeping import SleepingEngine


class VLLM(Feature):
    def __init__(self) -> None:
        # Trainer and server may share memory by CUDA IPC.
        # Sharing expandable segments would need a system call that most containers forbid.
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False")

    def settings(self, cfg: Any, inputs: Inputs) -> None:
        """Raise UserError if a server cannot use the chosen GPUs or the checkpoint."""
        gpus.shares(cfg, inputs.world)
        if read_json(inputs.source / "config.json").get("quantization_config"):
            raise UserError(
                f"--engine vllm would load {inputs.source} in 4 bits, and could then not load the "
                "trainer's weights: use the original model with --load-in-4bit, or --engine local."
            )

    def engine(self, run: Run) -> VLLMEngine:
        """Return the engine, without weights. Without --server, a new server is started here, and
        ends with the run.
        """
        cfg: Any = run.cfg
        max_len = run.longest_prompt + cfg.max_completion_length
        self.client = VLLMEngine(
            run.model,
            max_len=max_len,
            urls=cfg.server,
            sidecar=None if cfg.server else own_server(run, max_len),
            transport=cfg.weight_transport,
            timeout=cfg.server_timeout,
            sleeps=cfg.vllm_enable_sleep_mode,
            masks=needs_masks(cfg),
            min_p=cfg.min_p,
            head_dtype=cfg.head_dtype,
            dtype=cfg.dtype,
            world=run.world,
        )
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
            if run.saver.final.name == f"checkpoint-{run.done}":
                run.saver.finish()  # raises an error of this save
            elif run.done:
                run.saver.save(run.done)
            raise


def memory_needed(run: Run) -> int:
    """Return the bytes of device memory that the trainer needs while a server is awake. An
    evaluation only sends its weights.
    """
    cfg: Any = run.cfg
    rows = memory.table(run, cfg)
    if cfg.vllm_enable_sleep_mode or not weights.sizes(run.model)[0]:
        return memory.while_sampling(rows)
    return memory.on_device([row for row in rows if not row.of_server])


def needs_masks(cfg: Any) -> bool:
    return cfg.top_k > 0 or cfg.top_p < 1 or cfg.min_p > 0


def own_server(run: Run, max_len: int) -> Sidecar:
    """Return our own server, which is not started yet. Every rank must call it."""
    cfg: Any = run.cfg
    world, own, given = run.world, cfg.vllm_gpus, shlex.split(cfg.vllm_options)
    options = ["--max-model-len", str(max_len)]
    if cfg.dtype != "auto" or world.device.type == "cpu":
        # by default, a trainer on a CPU computes in float32, and vLLM in bfloat16
        options += ["--dtype", cfg.dtype.replace("auto", "float32")]
    if cfg.head_dtype == "float32":
        options += FLOAT32_LOGITS
    if gpus.shares(cfg, world):
        options += world.once(lambda: memory.server_share(world, memory_needed(run), given))
    if cfg.vllm_enable_sleep_mode:
        options.append("--enable-sleep-mode")
    if needs_masks(cfg):
        options.append("--return-sampling-mask")
    if "," in own:
        options += ["--tensor-parallel-size", str(len(own.split(",")))]
    return Sidecar(
        run.source,
        [*options, *given],  # the user's options come last and take precedence
        os.environ.get("NANOGRPO_VLLM_PYTHON", ""),
        Path(cfg.output_dir) / "serve.log",
        gpus=world.once(lambda: gpus.visible(own)) if own else "",
    )
