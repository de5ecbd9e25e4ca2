"""A clock for tests of reward functions that hang: it goes on in hangs and imports alone.

    clock = only_hangs_take_time(monkeypatch, hangs=lambda prompts: "3" in prompts)
    runner.score(samples)                                   # clock.now: the seconds that hangs were given

By a real clock the healthy calls take time too, and on a busy machine some would be late and count
as lost. Read next: test_reward_process.py.
"""

from collections.abc import Callable

import pytest

from nanogrpo.rewards import runner as reward_runner
from nanogrpo.rewards.process import Lost, RewardProcess


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now


def only_hangs_take_time(
    monkeypatch: pytest.MonkeyPatch,
    hangs: Callable[[list[str]], bool] = lambda prompts: False,
    imports: float = 0.0,
) -> Clock:
    """The runner's clock. A call whose prompts hang ends at its limit, for real; every other one
    may take a minute, for nothing.

    imports: seconds that each start of the process seems to take.
    """
    clock, call, start = Clock(), RewardProcess.call, RewardProcess.start

    def called(process, which, arguments, places, limit):
        if not hangs(arguments["prompts"]):
            return call(process, which, arguments, places, 60.0)
        try:
            return call(process, which, arguments, places, limit)
        except Lost:
            clock.now += limit
            raise

    def started(process) -> None:
        start(process)
        clock.now += imports

    monkeypatch.setattr(reward_runner, "time", clock)
    monkeypatch.setattr(RewardProcess, "call", called)
    monkeypatch.setattr(RewardProcess, "start", started)
    return clock
