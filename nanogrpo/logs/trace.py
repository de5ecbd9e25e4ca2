"""One step as a trace: what the processor and the GPU did, and when (`--trace-step N`).

In: the number of each step as it begins. Out: `output_dir/trace-N.json` for
https://ui.perfetto.dev, with the phases of the loop (sync, sample, score, train) as named bars;
and, on the console, the ten operations that took most. Read before: train.py.
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
    """Records one step of the main rank. `with Trace(…) as trace:` around the loop,
    `trace.begin(step)` first in it.
    """

    def __init__(self, cfg: Config, world: World):
        self.wanted = cfg.trace_step - 1 if world.main else -1  # steps are counted from 1 for users
        self.path = Path(cfg.output_dir) / f"trace-{cfg.trace_step}.json"
        self.running: profile | None = None

    def begin(self, step: int) -> None:
        self._end()
        if step == self.wanted:
            self.running = profile()  # of the CPU, and of the GPU where there is one
            self.running.start()

    def _end(self) -> None:
        if self.running is None:
            return
        done, self.running = self.running, None
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
        # of a step that failed nobody wants the profile instead of the error
        elif self.running is not None:
            self.running.stop()
