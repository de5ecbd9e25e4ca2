"""The reward function `reasoning_gym`: score an answer with the verifier of the problem's data set.

In: completions, and the column `reasoning_gym` that data.py writes. Out: a score from 0 to 1 for
each completion. The function runs in the same process as the user's reward functions. Read next:
extras/gym/data.py (the verifiers that evaluate the answer as code), rewards/builtin.py.
"""

import math
import re
from typing import Any

from nanogrpo.extras.gym import data as gym
from nanogrpo.rewards.answers import extract_answer
from nanogrpo.rewards.builtin import text_of

# Numbers, + - * / and parentheses. Powers are excluded, because 9**9**9 takes hours.
EXPRESSION = re.compile(r"(?:[\d\s.+/()-]|(?<!\*)\*(?!\*))*", re.ASCII)


def reasoning_gym_reward(
    completions: list, reasoning_gym: list | None = None, **kwargs: Any
) -> list[float | None]:
    """Return the score of the answer that `extract_answer` finds in each completion, or 0 if there
    is no answer.

    For prompts of other sources, the reward is None.
    """
    origins = reasoning_gym or [None] * len(completions)
    return [origin and score(text_of(c), origin) for c, origin in zip(completions, origins)]


def score(text: str, origin: dict) -> float:
    """Return the verifier's score of the answer in a text."""
    answer = extract_answer(text)
    if answer is None:
        return 0.0
    name = origin["source"].split(":")[1]
    if name in gym.ARITHMETIC and not EXPRESSION.fullmatch(answer):
        answer = "?"  # which the verifier cannot read
    try:
        found = float(gym.dataset(origin["source"]).score_answer(answer, origin["problem"]))
    except Exception:  # an answer can make the verifier raise any exception
        return 0.0
    return found if math.isfinite(found) else 0.0
