"""Measure the peak memory of a piece of work, as counted by torch's allocator on the CPU.

    most_at_once(lambda: model(tokens))     # bytes

The count includes what operations allocate inside, and is the same each time. The resident memory
of a process is not: the C library keeps freed memory, files are mapped, and the kernel counts late.
"""

import itertools
from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def most_at_once(work: Callable[[], object]) -> int:
    """Return the peak of the bytes allocated and not freed since the work began."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        work()
    events = [
        event for event in watched.profiler.kineto_results.events() if event.name() == "[memory]"
    ]
    return max(
        itertools.accumulate(
            event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())
        )
    )
