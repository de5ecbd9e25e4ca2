"""Packing: which rank computes which samples, strips within a budget, shared prompts, and every
vector of a strip (the basis of invariants 1 and 5).

Read next: test_objectives.py, which compares the gradients of any micro-batches.
"""

import dataclasses
import re
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nanogrpo import Config
from nanogrpo.grpo import loss as grpo
from nanogrpo.grpo import packing, schedule
from nanogrpo.grpo.loss import token_weight
from nanogrpo.types import Facts, PackedBatch, Prompt, Sample
from tests.conftest import packed


@st.composite
def sample_lists(draw) -> list[Sample]:
    """Up to twelve samples of up to four prompts, some of them with inserted tokens, such as the
    answers of tools. All tokens differ, so no misplaced one hides.
    """
    fresh = iter(range(10_000))
    prompts = [
        Prompt(10 + i, "", [next(fresh) for _ in range(draw(st.integers(1, 9)))]) for i in range(4)
    ]
    out = []
    for _ in range(draw(st.integers(0, 12))):
        c = draw(st.integers(0, 9))
        prompt = prompts[draw(st.integers(0, 3))]
        logp = [-float(draw(st.integers(0, 50))) for _ in range(c)]
        ids = [next(fresh) for _ in range(c)]
        sample = Sample(prompt, 0, ids, logp, draw(st.booleans()), [0] * c)
        sample.advantage = draw(st.sampled_from([-1.0, 0.0, 2.0]))
        if draw(st.booleans()):
            sample.is_model_token = draw(st.lists(st.booleans(), min_size=c, max_size=c))
        out.append(sample)
    return out


def size(prompt: int, prompt_length: int, length: int) -> Facts:
    """The sizes of a sample without tool answers."""
    return Facts(prompt, prompt_length, length, length, True, {}, None, advantage=1.0)


def pieces(ranks: list[list[schedule.Strip]]) -> list[schedule.Piece]:
    return [piece for strips in ranks for strip in strips for piece in strip]


WORLDS = st.sampled_from([1, 2, 3, 4])


def computed(samples: list[Sample], cfg: Config) -> list[int]:
    """Return the samples that a plan must contain: those with an advantage, or else the smallest,
    and with a KL all of them.
    """
    able = [i for i, s in enumerate(samples) if s.facts.length and grpo.is_trained(s, cfg)]
    some = [i for i in able if samples[i].advantage or cfg.beta]
    size = [s.facts.prompt_length + s.facts.end for s in samples]
    return some or [min(able, key=size.__getitem__)] if able else []


@given(
    sample_lists(),
    st.integers(1, 60),
    WORLDS,
    st.booleans(),
    st.sampled_from([0.0, 0.01]),
    st.booleans(),
)
def test_a_plan_has_each_trained_sample_once_and_as_many_strips_for_every_rank(
    samples, budget, world, share, pair_cost, beta
):
    cfg = Config(token_budget=budget, share_prompts=share, beta=float(beta))
    known = [s.facts for s in samples]
    everything = list(range(len(samples)))
    ranks = schedule.plan(everything, known, cfg, world, pair_cost).strips
    trained = computed(samples, cfg)
    assert sorted(i for p in pieces(ranks) for i in p.samples) == trained
    assert len(ranks) == world
    assert len({len(strips) for strips in ranks}) == 1
    # a rank without samples has an empty strip, because its gradient is needed
    assert ranks[0]
    # one rank alone has no empty strips
    assert world > 1 or not trained or all(strip for strips in ranks for strip in strips)
    for strips in ranks:
        for strip in strips:
            # only a single completion may exceed the budget
            alone = sum(len(p.samples) for p in strip) == 1
            assert sum(p.tokens for p in strip) <= budget or alone
            assert sum(p.key_rows for p in strip) <= schedule.KEY_ROWS * budget or alone
            for piece in strip:
                assert len({samples[i].prompt.id for i in piece.samples}) == 1
                assert share or len(piece.samples) == 1
    assert ranks == schedule.plan(everything, known, cfg, world, pair_cost).strips  # pure


@given(
    sample_lists(),
    st.integers(1, 60),
    WORLDS,
    st.booleans(),
    st.sampled_from(["grpo", "dapo", "dr_grpo"]),
    st.booleans(),
)
def test_every_vector_of_a_strip_is_correct(samples, budget, world, masked, loss_type, share):
    options = {"mask_truncated_completions": masked, "loss_type": loss_type, "share_prompts": share}
    cfg = Config(token_budget=budget, max_completion_length=9, **options)
    known = [s.facts for s in samples]
    n_tokens = sum(s.facts.length for s in samples if s.stopped or not masked)
    update = schedule.plan(list(range(len(samples))), known, cfg, world)
    assert update.n_tokens == n_tokens
    seen = []
    for rank in range(world):
        for number, b in enumerate(packing.pack(update, samples, cfg, rank)):
            bounds = list(pairwise(b.cu_seqlens.tolist()))
            assert b.cu_seqlens.dtype == torch.int32
            assert (bounds[0][0], bounds[-1][1]) == (0, len(b.tokens))
            assert b.max_len == max(end - start for start, end in bounds)
            assert (b.old_logp, b.ref_logp) == (None, None)
            strip = update.strips[rank][number]
            assert len(b.tokens if b.kv_rows is None else b.kv_rows) == (
                sum(p.key_rows for p in strip) or 1
            )
            views = [list(range(*bound)) for bound in bounds]
            if b.kv_rows is not None:
                assert share
                views = [b.kv_rows[a:z].tolist() for a, z in pairwise(b.kv_cu_seqlens.tolist())]
                assert b.kv_max_len == max(map(len, views))
            sees = {}  # row → the tokens that its hidden state depends on, its own last
            for (start, end), view in zip(bounds, views):
                assert view[len(view) - (end - start) :] == list(range(start, end))
                for row in range(start, end):
                    sees[row] = [b.tokens[r].item() for r in view[: len(view) - (end - row) + 1]]
                    # positions continue those of the shared prompt
                    assert b.positions[row] == len(sees[row]) - 1
            for i in b.sample.unique().tolist():
                s, mine = samples[i], b.sample == i
                assert s.stopped or not masked
                whole, own = s.prompt.token_ids + s.token_ids, s.model_token_indices
                for t, row, target in zip(
                    own, b.rows[mine].tolist(), b.targets[mine].tolist(), strict=True
                ):
                    # exactly the tokens before the target
                    assert sees[row] == whole[: len(s.prompt.token_ids) + t]
                    assert target == s.token_ids[t]
                assert b.sampling_logp[mine].tolist() == [s.logp[t] for t in own]
                assert set(b.advantage[mine].tolist()) == {s.advantage}
                expected = token_weight(len(own), len(samples), n_tokens, cfg)
                assert b.weight[mine].tolist() == pytest.approx([expected] * len(own), rel=1e-6)
                seen.append(i)
    assert sorted(seen) == computed(samples, cfg)


def a_group() -> list[Sample]:
    prompt = Prompt(0, "", [100, 101])
    first = Sample(prompt, 0, [7, 8, 9], [-0.1, -0.2, -0.3], True, [0] * 3, advantage=1.0)
    return [first, Sample(prompt, 1, [5, 6], [-0.4, -0.5], True, [0] * 2, advantage=-1.0)]


def test_the_example_in_the_docstring_of_packed_batch():
    names = dict(zip(("p0", "p1", *"abcde"), (100, 101, 7, 8, 9, 5, 6)))
    table, own_prompts = PackedBatch.__doc__.split("Example: ")[1].split("If each sequence")
    for share, text in ((True, table), (False, own_prompts)):
        (b,) = packed(a_group(), Config(share_prompts=share))
        shown = re.findall(r"\b([a-z_]+) += ([\w ·-]+?)(?=,| +\[)", text)
        assert len(shown) == (9 if share else 3)
        for name, words in shown:
            numbers = [int(names.get(word, word)) for word in words.replace("·", "").split()]
            assert getattr(b, name).tolist() == numbers
        assert b.weight.tolist() == pytest.approx([1 / 5] * 5)
    assert b.kv_rows is None
    group = a_group()
    group[0].token_advantages, group[0].is_model_token = [3.0, 0.0, -2.0], [True, False, True]
    (b,) = packed(group, Config())
    assert b.advantage.tolist() == [3, -2, -1, -1]
    group[0].token_advantages = [3.0, 0.0]
    with pytest.raises(ValueError, match="shape"):
        packed(group, Config())


@given(
    st.integers(1, 4), st.integers(1, 4), st.integers(2, 4), st.integers(0, 99), st.integers(0, 99)
)
def test_a_schedule_partitions_complete_groups(per_part, parts, G, seed, step):
    cfg = Config(num_generations=G, steps_per_generation=parts, seed=seed)
    sizes = [size(i // G, 3, 1 + i % 5) for i in range(per_part * parts * G)]
    updates = schedule.schedule(sizes, cfg, step)
    assert len(updates) == parts
    assert sorted(i for u in updates for i in u.samples) == list(range(len(sizes)))
    for u in updates:
        assert len(u.samples) == per_part * G
        assert u.n_tokens == sum(sizes[i].end for i in u.samples)
        for j in range(0, len(u.samples), G):  # complete groups, in order
            assert u.samples[j : j + G] == list(range(u.samples[j], u.samples[j] + G))
            assert u.samples[j] % G == 0
    assert updates == schedule.schedule(sizes, cfg, step)


def test_a_schedule_changes_with_the_step_and_the_seed():
    sizes = [size(i // 2, 1, 1) for i in range(32)]
    cfg = Config(num_generations=2, steps_per_generation=4)

    def order(cfg: Config, step: int) -> list[int]:
        return [i for u in schedule.schedule(sizes, cfg, step) for i in u.samples]

    assert order(cfg, 0) != order(cfg, 1) != order(dataclasses.replace(cfg, seed=1), 1)


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_uneven_lengths_are_spread_evenly_and_cost_no_extra_tokens(world):
    """Of exponential lengths with a mean of about a third of the longest."""
    g = torch.Generator().manual_seed(0)
    draws = torch.empty(8 * 8 * world).exponential_(1 / 64, generator=g).ceil().clamp(1, 192)
    sizes = [size(i // 8, 32, int(n)) for i, n in enumerate(draws)]
    cfg = Config(token_budget=2048)
    ranks = schedule.plan(list(range(len(sizes))), sizes, cfg, world, pair_cost=1e-3).strips
    needed = sum(s.end - 1 for s in sizes) + 8 * world * 32  # every prompt once
    assert sum(p.tokens for p in pieces(ranks)) <= 1.02 * needed
    costs = [[sum(p.cost for p in strip) for strip in strips] for strips in ranks]
    for slot in zip(*costs):  # ranks wait for the slowest in each micro-batch
        assert max(slot) <= 1.15 * sum(slot) / world


def test_a_long_prompt_with_many_completions_is_split_to_bound_its_key_rows():
    """64 completions of 100 tokens on a prompt of 1,000 have ten key rows per token."""
    sizes = [size(0, 1000, 101)] * 64
    everything, cfg = list(range(64)), Config(token_budget=8000, num_generations=64)
    (strips,) = schedule.plan(everything, sizes, cfg).strips
    for strip in strips:
        assert sum(p.key_rows for p in strip) <= schedule.KEY_ROWS * 8000
    # with room for its key rows the group is one piece
    wide = dataclasses.replace(cfg, token_budget=20_000)
    (((piece,),),) = schedule.plan(everything, sizes, wide).strips
    assert piece.tokens <= 8000 < piece.key_rows / schedule.KEY_ROWS
    assert piece.key_rows == 1000 + 64 * 1100
    # another group of this prompt, such as one of an environment, may have other tokens
    wide = dataclasses.replace(wide, num_generations=32)
    assert len(pieces(schedule.plan(everything, sizes, wide).strips)) == 2
    # a group may have several prompts in turn, which its completions still share
    turns = [size(i % 2, 1000, 101) for i in everything]
    assert len(pieces(schedule.plan(everything, turns, wide).strips)) == 4


# --- samples stay on the rank that sampled them ---


def moved(sizes: list[Facts], updates: list[schedule.Update], world: int) -> int:
    """Return the number of tokens that change rank."""
    away = [
        (i, r)
        for r, want in enumerate(schedule.wanted(updates, world))
        for i in want
        if i * world // len(sizes) != r
    ]
    return sum(sizes[i].end for i, _ in away)


@pytest.mark.parametrize("budget", [300, 2000, 10**6])
@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("world", [2, 4, 8])
def test_with_even_lengths_no_sample_changes_rank(world, share, budget):
    sizes = [size(i // 8, 20, 50) for i in range(8 * 4 * world)]
    cfg = Config(token_budget=budget, share_prompts=share)
    assert moved(sizes, schedule.schedule(sizes, cfg, 0, world), world) == 0
