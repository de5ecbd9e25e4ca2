"""The built-in rewards have the names and the values of TRL's.

TRL runs its own functions here. On the table of outputs it may be wrong where we are right, but not
the other way round. Read next: test_builtin.py.
"""

import random

from trl import rewards as trl

from nanogrpo import Config
from nanogrpo.extras import rewards as extra
from nanogrpo.rewards.builtin import accuracy_reward, load_function
from tests.conftest import said
from tests.rewards.answer_table import MISTAKEN, ROWS


def message(text: str) -> list[dict]:
    return said(text, "assistant")


def test_no_output_is_judged_wrong_here_and_right_by_trl():
    """docs/log.md has the two numbers of right verdicts."""
    outputs, references, verdicts = zip(*ROWS, (*MISTAKEN, True))
    ours = accuracy_reward([*map(message, outputs)], solution=references)
    # One by one, because a reference that TRL cannot read has no reward (None).
    theirs = [trl.accuracy_reward([message(o)], [r])[0] for o, r in zip(outputs, references)]
    right = [(our == v, their == v) for our, their, v in zip(ours, theirs, verdicts)]
    assert (False, True) not in right
    assert [*map(sum, zip(*right))] == [621, 281]


TEXTS = ["<think>", "</think>", "\n", "so ", r"\boxed{7}", r"\boxed{8}", " "]


def test_formats_and_reasoning_equal_those_of_trl():
    rng = random.Random(0)
    texts = ["".join(rng.choices(TEXTS, k=rng.randrange(7))) for _ in range(300)]
    completions = list(map(message, texts))
    ours, theirs = extra.think_format_reward(completions), trl.think_format_reward(completions)
    assert ours == theirs == extra.think_format_reward(texts)
    ours = extra.reasoning_accuracy_reward(completions, solution=["7"] * 300)
    theirs = trl.reasoning_accuracy_reward(completions, solution=["7"] * 300)
    # We read several boxes, and an unclosed <think>, in another way: see the table.
    ends = [text.rpartition("</think>")[2] for text in texts]
    same = [end.count("boxed") < 2 and "<think>" not in end for end in ends]
    assert sum(same) > 150
    assert [o for o, s in zip(ours, same) if s] == [t for t, s in zip(theirs, same) if s]
    assert {*ours} == {0.0, 1.0}


def test_lengths_and_repetition_equal_those_of_trl():
    rng = random.Random(0)
    lengths = [*range(0, 130, 3), 80, 100, 101]
    ids = [[rng.randrange(3) for _ in range(n)] for n in lengths]
    completions = [message(rng.choice([r"\boxed{7}", r"\boxed{8}", "7"])) for _ in ids]
    columns = {"completions": completions, "completion_ids": ids, "solution": ["7"] * len(ids)}
    for spec in [
        "get_soft_overlong_punishment:max_completion_len=100,soft_punish_cache=20",
        "get_soft_overlong_punishment:max_completion_len=100,soft_punish_cache=0",
        "get_cosine_scaled_reward:max_len=100",
        "get_cosine_scaled_reward:max_len=50,min_value_wrong=0,max_value_wrong=0",
        "get_cosine_scaled_reward:max_len=70,min_value_correct=-1,max_value_correct=3",
        "get_repetition_penalty_reward",
        "get_repetition_penalty_reward:ngram_size=1,max_penalty=-0.3",
        "get_repetition_penalty_reward:ngram_size=2,max_penalty=-2",
    ]:
        ours = extra.Rewards(Config()).reward(spec, "cpu")
        theirs = load_function(f"trl.rewards:{spec}")  # as a user's
        assert ours(**columns) == theirs(**columns)
        assert ours.__name__ == theirs.__name__
