"""Trace one step: the work of the CPU and the GPU over time (`--trace-step N`).

In: the number of each step as it begins. Out: `output_dir/trace-N.json` for
https://ui.perfetto.dev, with the phases of the loop (sync, sample, score, train) as named bars, and
the ten most expensive operations on the console. Read before: train.py.
"""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from torch.profiler import profile

from nanogrpo.config import Config
from nanogrpo.distributed.world import World
from nanogrpo.errors import UserError

log = logging.getLogger("nanogrpo")


class Trace:
    """Record one step of the main rank.

    Wrap the loop in `with Trace(cfg, world) as trace:` and start each step with
    `trace.begin(step)`.
    """

    def __init__(self, cfg: Config, world: World):
        self.step = cfg.trace_step - 1 if world.main else -1  # the option counts steps from 1
        self.path = Path(cfg.output_dir) / f"trace-{cfg.trace_step}.json"
        self.profile: profile | None = None

    def begin(self, step: int) -> None:
        self._end()
        if step == self.step:
            self.profile = profile()  # of the CPU, and of the GPU if there is one
            self.profile.start()

    def _end(self) -> None:
        if self.profile is None:
            return
        done, self.profile = self.profile, None
        done.stop()
        try:
            done.export_chrome_trace(str(self.path))
        except (OSError, RuntimeError) as e:
            raise UserError(
                f"{self.path} could not be written ({e}): make room, or leave out --trace-step."
            ) from e
        sort = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        log.info("%s\n%s", self.path, done.key_averages().table(sort_by=sort, row_limit=10))

    def __enter__(self) -> Trace:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self._end()
        elif self.profile is not None:  # the step failed, so only its error matters
            self.profile.stop()
