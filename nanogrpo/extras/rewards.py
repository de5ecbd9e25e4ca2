"""More built-in reward functions: for reasoning, lengths and repetition, and reward models.

In: a name in --reward-funcs, with or without arguments. Out: the function, with TRL's name and
values. Read next: rewards/builtin.py (the common reward functions), reward_model.py.
"""

import contextlib
import difflib
import math
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from nanogrpo.config import Config
from nanogrpo.data.prompts import RESERVED
from nanogrpo.errors import UserError
from nanogrpo.feature import Feature
from nanogrpo.rewards import plugin
from nanogrpo.rewards.builtin import NEED_ANSWERS, accuracy_reward, text_of
from nanogrpo.types import Prompt


class Rewards(Feature):
    def __init__(self, cfg: Config):
        self.limit = cfg.max_completion_length

    @contextlib.contextmanager
    def running(self, run: Any) -> Iterator[None]:
        """Add advice to the error of a reward function."""
        try:
            yield
        except UserError as e:
            e.args = (str(e).replace("fix the function", advice_on(str(e), run.prompts[0])),)
            raise

    def reward(self, name: str, device: Any) -> Callable | str | None:
        if name.startswith("model:"):
            from nanogrpo.extras.reward_model import RewardModel

            return RewardModel.load(name.removeprefix("model:"), device)
        base, arguments = plugin.split_arguments(name)
        module = base.rpartition(".")[0]
        file = Path(module.replace(".", "/") + ".py")
        if ":" not in base and file.is_file():  # package.module.function, as in TRL
            return f"{file}:{name[len(module) + 1 :]}"
        if base not in BY_NAME:
            return None
        function = BY_NAME[base]
        # the default length limit is --max-completion-length
        limit = {
            get_soft_overlong_punishment: "max_completion_len",
            get_cosine_scaled_reward: "max_len",
        }.get(function)
        if limit:
            arguments = {limit: self.limit, **arguments}
        return plugin.bind(function, arguments, name)


def advice_on(error: str, prompt: Prompt) -> str:
    """Return advice for a reward function that failed with `error` on the `prompt`."""
    if missing := re.search(r"missing \d+ required .*?: '(\w+)'", error):
        near = difflib.get_close_matches(missing[1], [*RESERVED, *prompt.columns], n=1)
        meant = f"did you mean {near[0]}? The" if near else "the"
        return f"{meant} data have the columns {', '.join(prompt.columns)}"
    if re.search(r"unexpected keyword .*\(at its call\)", error):
        return "add **kwargs to its parameters"
    if not isinstance(prompt.text, str) and re.search(
        r"raised (Type|Attribute)Error: .*list", error
    ):
        return (
            "completions are messages here, because the prompts are messages: the text of a"
            " completion is completion[-1]['content']"
        )
    return "fix the function"


# --- reasoning ---


def reasoning_accuracy_reward(
    completions: list,
    solution: list | None = None,
    answer: list | None = None,
    reasoning_delimiters: Sequence[str] = ("</think>",),
    **kwargs,
) -> list[float | None]:
    """Return `accuracy_reward` of the text after the reasoning, and 0 if the reasoning never ends.

    The reasoning ends at the first item of `reasoning_delimiters` that the completion contains.
    """
    answers = []
    for text in map(text_of, completions):
        end = next((d for d in reasoning_delimiters if d in text), None)
        answers.append(text.rpartition(end)[2] if end else "")
    return accuracy_reward(answers, solution, answer)


def think_format_reward(completions: list, **kwargs) -> list[float]:
    """Return 1 for a completion that starts with <think>, has no second <think>, and has a
    </think>.
    """
    return [
        float(text.startswith("<think>") and text.count("<think>") == 1 and "</think>" in text)
        for text in map(text_of, completions)
    ]


# --- lengths and repetition ---

# Each function below returns a reward function, and gets the arguments from --reward-funcs.
# The reward function itself gets the columns of the data, which may have the same names.


def get_soft_overlong_punishment(
    max_completion_len: int, soft_punish_cache: float | None = None
) -> Callable:
    """Return DAPO's soft overlong punishment (Yu et al. 2025, eq. 13).

    max_completion_len, soft_punish_cache: in tokens. As in the paper, the default of
    soft_punish_cache is a fifth of max_completion_len.
    """
    limit = max_completion_len
    cache = limit / 5 if soft_punish_cache is None else soft_punish_cache
    if not (limit > 0 and 0 <= cache <= limit):
        raise UserError(
            f"--reward-funcs: max_completion_len is {limit} and soft_punish_cache is "
            f"{cache:g}: the first must be positive, and the second between 0 and the first"
        )

    def soft_overlong_punishment_reward(completion_ids: list[list[int]], **kwargs) -> list[float]:
        """Return 0 up to `limit` - `cache` tokens, then a value that falls linearly to -1 at
        `limit`.

        The reward does not depend on the longest completion of the batch, so the same text gets
        the same reward in every step.
        """
        return [
            0.0 if len(ids) <= limit - cache
            else (limit - cache - len(ids)) / cache if len(ids) <= limit
            else -1.0
            for ids in completion_ids
        ]  # fmt: skip

    return soft_overlong_punishment_reward


def get_cosine_scaled_reward(
    max_len: int,
    min_value_wrong: float = -1.0,
    max_value_wrong: float = -0.5,
    min_value_correct: float = 0.5,
    max_value_correct: float = 1.0,
) -> Callable:
    """Return accuracy scaled by the length (Yeo et al. 2025, appendix C.1).

    From 0 to max_len tokens, the reward of a right answer falls from max_value_correct to
    min_value_correct. The reward of a wrong answer rises from min_value_wrong to max_value_wrong.
    Both rewards follow half a cosine wave.
    """
    if not max_len > 0:
        raise UserError(f"--reward-funcs: max_len is {max_len} but must be positive")
    right, wrong = (max_value_correct, min_value_correct), (min_value_wrong, max_value_wrong)

    def cosine_scaled_reward(
        completions: list, completion_ids: list[list[int]], **kwargs
    ) -> list[float | None]:
        rewards = []
        for correct, ids in zip(accuracy_reward(completions, **kwargs), completion_ids):
            short, long = right if correct else wrong
            wave = 1.0 + math.cos(min(len(ids) / max_len, 1.0) * math.pi)  # from 2 to 0
            rewards.append(None if correct is None else long + 0.5 * (short - long) * wave)
        return rewards

    NEED_ANSWERS.add(cosine_scaled_reward)
    return cosine_scaled_reward


def get_repetition_penalty_reward(ngram_size: int = 3, max_penalty: float = -1.0) -> Callable:
    """Return a penalty for repeated n-grams of tokens (Yeo et al. 2025, appendix C.2)."""
    if not (isinstance(ngram_size, int) and ngram_size > 0 and max_penalty <= 0):
        raise UserError(
            f"--reward-funcs: ngram_size is {ngram_size} and max_penalty is {max_penalty}: the "
            "first must be a positive whole number, and the second must not be positive"
        )

    def repetition_penalty_reward(completion_ids: list[list[int]], **kwargs) -> list[float]:
        """Return max_penalty times the fraction of n-grams that repeat an earlier one."""
        rewards = []
        for ids in completion_ids:
            grams = [tuple(ids[i : i + ngram_size]) for i in range(len(ids) - ngram_size + 1)]
            repeated = 1 - len(set(grams)) / len(grams) if grams else 0.0
            rewards.append(repeated * max_penalty if repeated else 0.0)  # never -0.0
        return rewards

    return repetition_penalty_reward


NEED_ANSWERS.add(reasoning_accuracy_reward)
BUILT_IN: dict[str, Callable] = {
    "reasoning_accuracy": reasoning_accuracy_reward,
    "think_format": think_format_reward,
    "soft_overlong": get_soft_overlong_punishment,
    "cosine": get_cosine_scaled_reward,
    "repetition_penalty": get_repetition_penalty_reward,
}
BY_NAME = BUILT_IN | {function.__name__: function for function in BUILT_IN.values()}
