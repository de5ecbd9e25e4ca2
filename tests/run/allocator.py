"""How much memory a piece of work takes, by the count of torch's allocator on the CPU.

    most_at_once(lambda: model(tokens))     # bytes

The count sees inside the ops, and is the same each time. The resident memory of a process is not:
the C library keeps what is freed, files are mapped, the kernel counts late.
"""

import itertools
from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def most_at_once(work: Callable[[], object]) -> int:
    """Bytes given out and not yet given back, at most, above what there was when the work began."""
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
