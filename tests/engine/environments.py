"""Environments and a reward function for test_tools.py. They are in a file of their own, because
the process of the reward functions imports it.
"""

import asyncio
import threading


class Counter:
    """Counts up to the column `goal`, and starts with a greeting."""

    def reset(self, goal: int, greeting: str | None = None, **row):
        self.total, self.goal, self.row = 0, goal, row
        return greeting

    def step(self, by: int) -> int:
        """Count.

        Args:
            by: How far.
        """
        self.total += by
        return self.total

    def get_reward(self) -> float:
        return float(self.total == self.goal)

    def _hidden(self): ...


class Locked(Counter):
    """An environment that cannot be copied."""

    def __init__(self):
        self.lock = threading.Lock()

    async def get_reward(self) -> float:
        await asyncio.sleep(0)
        return 0.5


def messages_and_state(prompts, completions, environments, **kwargs):
    """A reward function with the arguments that TRL gives it."""
    roles = [[m["role"] for m in c] for c in completions]
    assert roles == [["assistant", "tool", "assistant", "tool", "assistant"]] * len(completions)
    assert [c[0]["tool_calls"][0]["function"]["name"] for c in completions] == ["step"] * len(roles)
    return [e.total / 10 for e in environments]
