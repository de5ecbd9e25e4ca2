"""The prompts of a step are a pure function of (seed, step). Each comes once per epoch, and sources
are mixed in exact shares.

Read next: test_prompts.py (where the prompts come from).
"""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from nanogrpo.data.prompts import _mixed_order, _order, draw, draw_mixed, smallest
from nanogrpo.types import Prompt

# --- draw ---


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


# --- draw_mixed ---

WEIGHTS = st.lists(st.one_of(st.integers(1, 9), st.floats(0.01, 5)), min_size=1, max_size=4)


def mixture(weights, n, more):
    """Return sources of the smallest allowed size plus `more`. Ids show the source."""
    sizes = [smallest(weights, i, n) + more for i in range(len(weights))]
    return [
        [Prompt(id=1000 * i + j, text="", token_ids=[1]) for j in range(size)]
        for i, size in enumerate(sizes)
    ]


@given(weights=WEIGHTS, n=st.integers(1, 12), seed=SEEDS, more=st.integers(0, 3))
@settings(max_examples=30)
def test_a_mixture_keeps_its_shares_its_epochs_and_no_prompt_twice_in_a_step(
    weights, n, seed, more
):
    parts = mixture(weights, n, more)
    steps = [ids(draw_mixed(parts, weights, n, seed, step)) for step in range(30)]
    assert all(len(step) == n and len(set(step)) == n for step in steps)
    sequence = [i for step in steps for i in step]
    for i, part in enumerate(parts):
        own = [j for j in sequence if j // 1000 == i]
        for e in range(len(own) // len(part)):  # each source has epochs of its own
            assert sorted(own[e * len(part) : (e + 1) * len(part)]) == ids(part)
        for k in range(1, len(sequence) + 1):
            share = weights[i] / sum(weights) * k
            assert abs(sum(j // 1000 == i for j in sequence[:k]) - share) <= len(weights) / 2 + 1e-6


@given(weights=WEIGHTS, n=st.integers(1, 9), seed=SEEDS, order=st.permutations(range(8)))
@settings(max_examples=15)
def test_a_mixture_is_a_pure_function_of_seed_and_step(weights, n, seed, order):
    parts = mixture(weights, n, 1)
    far = 10**6
    forward = [ids(draw_mixed(parts, weights, n, seed, far + step)) for step in range(8)]
    for step in order:
        _mixed_order.cache_clear()
        assert ids(draw_mixed(parts, weights, n, seed, far + step)) == forward[step]
    scaled = [
        ids(draw_mixed(parts, [4 * w for w in weights], n, seed, far + step)) for step in range(8)
    ]
    assert scaled == forward  # shares, not sizes


def test_weights_are_shares_of_the_prompts_drawn():
    parts = [prompts(40)[:30], prompts(40)[30:]]
    drawn = [i for step in range(100) for i in ids(draw_mixed(parts, (0.7, 0.3), 4, 0, step))]
    counts = Counter(i >= 30 for i in drawn)
    assert (counts[False], counts[True]) == (280, 120)
    # the small source is repeated 12 times, the large one 9 and a third
    assert {Counter(drawn)[i] for i in range(30, 40)} == {12}
    assert {Counter(drawn)[i] for i in range(30)} == {9, 10}
    assert ids(draw_mixed(parts, (0.7, 0.3), 4, 0, 0)) != ids(
        draw_mixed(parts, (0.7, 0.3), 4, 1, 0)
    )


def test_each_epoch_of_a_source_has_another_order():
    (part,) = mixture([1], 4, 11)
    epochs = [tuple(ids(draw_mixed([part], [1], 4, 5, step))) for step in range(15)]
    assert len(set(epochs)) == 15
