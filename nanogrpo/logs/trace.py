"""Trace one step: the work of the CPU and the GPU over time (`--trace-step N`).

In: the start of each step. Out: `output_dir/trace-N.json` for https://ui.perfetto.dev, with the
phases of the loop (sync, sample, score, train) as named bars, and the ten most expensive operations
on the console. Read before: train.py.
"""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from torch.profiler import ProfilerAction, profile

from nanogrpo.config import Config
from nanogrpo.distributed.world import World
from nanogrpo.errors import UserError

log = logging.getLogger("nanogrpo")


def make_trace(cfg: Config, world: World, start: int) -> profile:
    """Return a profiler of one step of the main rank, for a run that begins with step `start`.

    Wrap the loop in `with make_trace(…) as trace:` and call `trace.step()` before each step.
    """
    path = Path(cfg.output_dir) / f"trace-{cfg.trace_step}.json"
    wanted = cfg.trace_step - start if world.main else 0  # the option counts steps from 1

    def schedule(calls: int) -> ProfilerAction:
        found = calls == wanted > 0
        return ProfilerAction.RECORD_AND_SAVE if found else ProfilerAction.NONE

    def write(done: profile) -> None:
        try:
            done.export_chrome_trace(str(path))
        except (OSError, RuntimeError) as e:
            raise UserError(
                f"{path} could not be written ({e}): make room, or leave out --trace-step."
            ) from e
        sort = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        log.info("%s\n%s", path, done.key_averages().table(sort_by=sort, row_limit=10))

    return profile(schedule=schedule, on_trace_ready=write)
