"""Environments: each completion has its own object, and the model calls the methods of this object.

    class Countdown:                                    # --environment-factory file.py:Countdown
        def reset(self, start, **row): …                # before each completion
        def step(self, by: int) -> int: …               # a tool, as every other public method
        def get_reward(self) -> float: …                # --reward-funcs environment

In: the class. Out: objects of the class, which are made once and reset for each sample. Read next:
calls.py (which calls the methods), feature.py.
"""

import inspect
from collections.abc import Callable
from typing import Any

from nanogrpo.errors import UserError
from nanogrpo.extras.tools.timelimit import limited
from nanogrpo.types import Prompt


class Environments:
    def __init__(self, factory: Callable[[], Any], timeout: float = 0.0):
        """Make the first environment. `timeout` is the maximum number of seconds for a call of the
        user's class, or 0 for no limit.

        Raises UserError if the class cannot be called, or lacks a method that it needs.
        """
        self.factory, self.timeout = factory, timeout
        self.pool: list[Any] = []
        first = self.get(0)
        self.name = type(first).__name__
        if not (hasattr(first, "reset") and methods(first)):
            raise UserError(
                f"--environment-factory: {self.name} needs a method `reset(self, **row)`, which is "
                "called before each completion, and another method, such as step, which the model "
                "calls."
            )

    def get(self, i: int) -> Any:
        """Return the i-th environment."""
        if i == len(self.pool):
            self.pool.append(self._call(self.factory, "the class"))
        return self.pool[i]

    def reset(self, i: int, prompt: Prompt) -> str:
        """Reset an environment with the columns of its prompt. Return what the model observes."""
        row = {"prompt": prompt.text, **prompt.columns}
        what = f"{self.name}.reset (prompt {prompt.id})"
        observation = self._call(lambda: self.get(i).reset(**row), what)
        if not isinstance(observation, str | None):
            raise UserError(
                f"--environment-factory: {what} returned a {type(observation).__name__}: return a "
                "string, which is added to the prompt, or None."
            )
        return observation or ""

    def _call(self, function: Callable[[], Any], what: str) -> Any:
        """Call the user's code, and turn any exception into a UserError."""
        try:
            return limited(function, self.timeout)
        except (Exception, SystemExit) as e:  # the user's code may raise anything
            raise UserError(
                f"--environment-factory: {what} raised {type(e).__name__}: {e}; fix it."
            ) from e

    def reward(self) -> Callable | None:
        """Return the reward function that calls `get_reward` of the environments, or None if their
        class has no such method. The function is named after the class. If `get_reward` returns one
        reward per turn, the last token of each turn gets the reward of its turn.
        """
        method = getattr(self.pool[0], "get_reward", None)
        if method is None:
            return None

        def by_token(rewards: list, /, completion_ids: list, turns: list, **_: Any) -> list:
            for i, reward in enumerate(rewards):
                if isinstance(reward, list):
                    rewards[i] = [None] * len(completion_ids[i])
                    for (_, end), each in zip(turns[i], reward, strict=True):
                        rewards[i][end - 1] = each
            return rewards

        def get_reward(environments: list, **more: Any) -> list:
            return by_token([each.get_reward() for each in environments], **more)

        async def get_reward_async(environments: list, **more: Any) -> list:
            return by_token([await each.get_reward() for each in environments], **more)

        function = get_reward_async if inspect.iscoroutinefunction(method) else get_reward
        function.__name__ = self.name
        return function


def methods(environment: Any) -> list[Callable]:
    """Return the methods of an environment that are tools."""
    # getmembers of the object would evaluate its properties, so use the class
    found = inspect.getmembers(type(environment), inspect.isfunction)
    names = [name for name, _ in found if name not in ("reset", "get_reward") and name[0] != "_"]
    return [getattr(environment, name) for name in names]
