"""Several ranks in one process, as threads: for exercise 16.

In: a function of a rank and its `gather`. Out: what each rank returns. `gather` is that of `World`
in nanogrpo/distributed/world.py: every rank must call it, and each gets the values of all.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from exercises.hints import Hint

SECONDS = 2.0  # until a rank that waits alone gives up


def on_ranks(size: int, function: Callable[[int, Callable[[Any], list]], Any]) -> list:
    """Call function(rank, gather) on each rank, and return the results in rank order."""
    barrier = threading.Barrier(size)
    values: list = [None] * size
    results: list = [None] * size
    errors: list[BaseException] = []

    def work(rank: int) -> None:
        def gather(value: Any) -> list:
            values[rank] = value
            barrier.wait(SECONDS)
            everyone = list(values)
            barrier.wait(SECONDS)  # before the next gather overwrites the values
            return everyone

        try:
            results[rank] = function(rank, gather)
        # the learner's code may raise anything; it is raised again below
        except Exception as e:
            errors.append(e)
            barrier.abort()

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    if errors:
        raise Hint(
            "Some ranks wait in `gather` for others that never call it. Every rank must call it"
            " equally often, also one that has no shards."
        )
    return results
