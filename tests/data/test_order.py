"""The prompts of a step are a pure function of (seed, step). Each comes once per epoch.

Read next: test_prompts.py (where the prompts come from).
"""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from nanogrpo.data.prompts import _order, draw
from nanogrpo.types import Prompt


def prompts(count):
    return [Prompt(id=i, text=str(i), token_ids=[i]) for i in range(count)]


def ids(drawn):
    return [prompt.id for prompt in drawn]


SEEDS = st.integers(-(2**63), 2**64)


@given(count=st.integers(1, 40), n=st.integers(1, 60), seed=SEEDS, epochs=st.integers(1, 6))
@settings(max_examples=60)
def test_each_prompt_comes_once_per_epoch_and_at_most_once_per_step(count, n, seed, epochs):
    data = prompts(count)
    steps = [ids(draw(data, n, seed, step)) for step in range(-(-epochs * count // n))]
    sequence = [i for step in steps for i in step]
    for e in range(epochs):
        assert sorted(sequence[e * count : (e + 1) * count]) == list(range(count))
    for step in steps:
        assert len(step) == n
        assert n > count or len(set(step)) == n


@given(count=st.integers(1, 30), n=st.integers(1, 40), seed=SEEDS, order=st.permutations(range(12)))
@settings(max_examples=20)
def test_draw_is_a_pure_function_of_seed_and_step(count, n, seed, order):
    data = prompts(count)
    forward = [ids(draw(data, n, seed, step)) for step in range(12)]
    # in any order and with an empty cache, as in a resumed process
    for step in order:
        _order.cache_clear()
        assert ids(draw(data, n, seed, step)) == forward[step]


def test_the_order_is_the_same_on_every_machine():
    """The values are fixed here, because another stream would break resuming."""
    assert [ids(draw(prompts(7), 3, seed=42, step=s)) for s in range(5)] == [
        [3, 5, 0],
        [4, 1, 6],
        [2, 5, 3],
        [1, 2, 4],
        [6, 0, 1],
    ]


def test_seeds_and_epochs_differ_and_positions_are_fair():
    data = prompts(50)
    assert (
        len({tuple(ids(draw(data, 50, seed, step))) for seed in range(4) for step in range(4)})
        == 16
    )
    # 1000 seeds, 5 prompts, steps of 4: step 1 crosses the first boundary, where the order is
    # rearranged. Each prompt is still equally likely at each place: the expected count is 200, its
    # standard deviation 12.6, and the bound is 5 of them.
    drawn = [ids(draw(prompts(5), 4, seed, step=1)) for seed in range(1000)]
    for place in range(4):
        seen = Counter(step[place] for step in drawn)
        assert all(abs(seen[i] - 200) < 63 for i in range(5))
