"""A clock for tests of reward functions that hang: only hangs and imports take time.

    clock = only_hangs_take_time(monkeypatch, hangs=lambda prompts: "3" in prompts)
    runner.score(samples)              # clock.now: the seconds that hangs were given

On a real clock the healthy calls take time too. On a busy machine some of them would be late and
count as lost. Read next: test_process.py.
"""

from collections.abc import Callable

import pytest

from nanogrpo.rewards import runner
from nanogrpo.rewards.process import CallLost, RewardProcess


class Clock:
    def __init__(self):
        self.now = 0.0
        self.limits: list[float] = []  # the timeout of each call

    def monotonic(self) -> float:
        return self.now


def only_hangs_take_time(
    monkeypatch: pytest.MonkeyPatch,
    hangs: Callable[[list[str]], bool] = lambda prompts: False,
    imports: float = 0.0,
) -> Clock:
    """Replace the runner's clock.

    A call whose prompts hang really ends at its timeout. Every other call may take a minute, and
    the clock does not move. imports: seconds that each start of the process seems to take.
    """
    clock, real_call, real_start = Clock(), RewardProcess.call, RewardProcess.start

    def call(process, functions, arguments, labels, timeout):
        clock.limits.append(timeout)
        if not hangs(arguments["prompts"]):
            return real_call(process, functions, arguments, labels, 60.0)
        try:
            return real_call(process, functions, arguments, labels, timeout)
        except CallLost:
            clock.now += timeout
            raise

    def start(process) -> None:
        real_start(process)
        clock.now += imports

    monkeypatch.setattr(runner, "time", clock)
    monkeypatch.setattr(RewardProcess, "call", call)
    monkeypatch.setattr(RewardProcess, "start", start)
    return clock
