"""The paged cache of a GPU: the same completions as with the CPU's cache in a pool of any size, and
each page belongs to one row or one prompt.

Without a GPU, its attention runs as written in kernels/reference/paged.py, and once in Triton's
interpreter. Read next: test_launches.py, tests/kernels/test_paged.py.
"""

import dataclasses
import functools
import inspect
import itertools

import pytest
import torch
from nanogrpo.kernels.triton import paged, sample

from nanogrpo.engine.base import SamplingParams
from nanogrpo.engine.paged_cache import PAGE, cache_tokens, pages_of
from nanogrpo.extras.window import FULL, SLIDING, Windows
from nanogrpo.model import dispatch
from tests.conftest import tiny_model
from tests.engine import small
from tests.engine.small import same

MAX_LEN = 200
PARAMS = SamplingParams(max_tokens=100, stop_token_ids=range(2), seed=5)
# the first two prompts have full pages to share: one of them ends with a page, one does not
LENGTHS = (PAGE + 1, 2 * PAGE + 9, 1, 3, 30)


# tokens after a stop token and above a limit are discarded, also within eight steps
LIMITS = (None, None, None, 13, 5)
make_engine = functools.partial(small.make_engine, max_len=MAX_LEN, paged=True)


def make_prompts(lengths=LENGTHS):
    prompts = zip(small.make_prompts(lengths), LIMITS)
    return [dataclasses.replace(p, max_tokens=limit) for p, limit in prompts]


@pytest.fixture(scope="module")
def expected():
    """Completions that the CPU's engine sampled, four of each prompt."""
    samples = make_engine(paged=False).sample(make_prompts(), 4, PARAMS, step=0)
    assert len({len(s.token_ids) for s in samples}) > 8  # they end at different times
    return samples


def watch(engine):
    """Check at each step that the pages add up, and that rows write to pages of their own. Return
    a list that counts the rows of each step.
    """
    cache, rows, reserve = engine.cache, [], engine.cache.reserve

    def check(lengths):
        lengths = list(lengths)
        done = reserve(lengths)
        shared = {id(prefix): prefix for prefix, _ in cache.rows}.values()
        owned = [page for _, own in cache.rows for page in own]
        once = [*owned, *(page for prefix in shared for page in prefix.pages), *cache.free]
        assert sorted(once) == list(range(1, cache.kv.shape[2]))  # each page once; 0 is nobody's
        for row, (prefix, own) in enumerate(cache.rows):
            pages = [*prefix.pages, *own]
            assert cache.on_host[row].tolist() == pages + [0] * (cache.table.shape[1] - len(pages))
            if done:
                assert lengths[row] - 1 < PAGE * len(pages)
                assert len(prefix.pages) * PAGE <= engine.scheduler.active[row].position
        assert not cache.on_host[len(cache.rows) :].any()
        active = [c.turn for c in engine.scheduler.active]
        # only the youngest wait
        assert not active or all(max(active) < c.turn for c in engine.scheduler.waiting)
        rows.append(len(cache.rows))
        return done

    cache.reserve = check
    return rows


@pytest.mark.parametrize(
    ("slots", "stride", "behind", "contexts"),
    [(64, 1, 0, 64), (5, 8, 1, 5), (64, 1, 1, 1), (64, 8, 0, 2), (7, 4, 1, 2)],
)
def test_pages_give_the_same_completions(slots, stride, behind, contexts, expected):
    """Also in a pool that is much too small: 20 completions of up to 173 tokens share one context,
    or two. Completions that enter later share the pages of their prompt, too.
    """
    engine = make_engine(slots=slots, cache_tokens=contexts * PAGE * pages_of(MAX_LEN))
    engine.runner.stride, engine.runner.behind = stride, behind
    rows = watch(engine)
    same(engine.sample(make_prompts(), 4, PARAMS, step=0), expected)
    if contexts < 5:
        assert engine.metrics()["sampling/put_back"] > 3
        assert max(rows) < 20
        assert any(a > b > 0 for a, b in itertools.pairwise(rows))
    assert engine.metrics()["sampling/put_back"] == 0  # since the last call
    assert len(engine.cache.free) == contexts * pages_of(MAX_LEN)
    # a second call starts with an empty cache, even if the first was abandoned
    next(iter(engine.sample_steps(make_prompts(), 4, PARAMS, step=3)))
    same(engine.sample(make_prompts(), 4, PARAMS, step=0), expected)


def test_a_completion_that_was_put_back_is_prefilled_with_its_tokens():
    engine, seen = make_engine(cache_tokens=MAX_LEN), []
    engine.model.model.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
    prompts, params = make_prompts([60, 60]), dataclasses.replace(PARAMS, stop_token_ids=())
    samples = engine.sample(prompts, 1, params, step=0)
    assert seen[0] == 2 * 59
    again = [n for n in seen[1:] if n > 2]  # the others are decode steps
    assert len(again) == engine.metrics()["sampling/put_back"] > 0
    assert all(60 <= n < 160 for n in again)
    alone = [make_engine().sample([p], 1, params, step=0)[0] for p in prompts]
    same(samples, alone)


def test_a_prefill_keeps_keys_and_values_alone():
    """They come from a product with the queries, which would need several times their memory."""
    engine, seen = make_engine(), []
    engine.model.model.register_forward_pre_hook(lambda _, args: seen.append(args[2]))
    engine.sample(make_prompts([40, 30]), 1, dataclasses.replace(PARAMS, max_tokens=1), step=0)
    kept = inspect.getclosurevars(seen[0]).nonlocals["kept"]
    assert all(x.shape == (2, 68, 2, 16) for x in kept)
    assert all(x.untyped_storage().nbytes() == x.nbytes for x in kept)


def test_the_completions_of_a_prompt_share_its_full_pages():
    engine = make_engine()
    total = len(engine.cache.free)
    prompts = make_prompts([2 * PAGE + 9])
    steps = engine.sample_steps(prompts, 6, dataclasses.replace(PARAMS, stop_token_ids=()), step=0)
    next(iter(steps))
    assert total - len(engine.cache.free) == 2 + 6
    assert (engine.cache.table[:6, :2] == engine.cache.table[0, :2]).all()
    assert engine.cache.table[:6, 2].unique().numel() == 6


def test_no_tensor_moves_between_steps():
    """CUDA graphs use the addresses of all tensors that outlive a step."""
    engine = make_engine(slots=7, cache_tokens=2 * MAX_LEN)

    def addresses():
        joint = [b.self_attn.q_proj.weight for b in engine.model.model.layers]
        cache = engine.cache.kv, engine.cache.table
        own = (engine.scheduler.state,)
        return [x.data_ptr() for x in (*cache, *own, *joint, *engine.model.parameters())]

    before = addresses()
    for n, longest in ((1, 3), (6, 100), (2, 20)):
        engine.sample(make_prompts(), n, dataclasses.replace(PARAMS, max_tokens=longest), step=n)
        engine.load(tiny_model(seed=n), version=n)
        assert addresses() == before


@pytest.mark.parametrize("wanted", [None, 1, 400, 10**9])
def test_the_cache_has_as_many_tokens_as_announced(wanted):
    cache = make_engine(slots=3, cache_tokens=wanted).cache
    announced = cache_tokens(3, MAX_LEN, wanted)
    assert announced == cache.kv.shape[2] * PAGE == (len(cache.free) + 1) * PAGE
    assert MAX_LEN + PAGE <= announced <= 3 * (MAX_LEN + PAGE) + PAGE
    assert wanted != 400 or announced == 400 // PAGE * PAGE + PAGE


@pytest.mark.parametrize("layers", [None, Windows(4, (SLIDING, FULL))])
def test_the_kernels_give_the_same_completions(layers, monkeypatch):
    """All of them, in Triton's interpreter unless there is a GPU."""
    model, prompts = tiny_model(layers=layers), make_prompts([PAGE + 2, 3])
    params = dataclasses.replace(PARAMS, max_tokens=3)
    expected = make_engine(model, paged=False).sample(prompts, 2, params, step=0)
    monkeypatch.setattr(dispatch, "choice", "triton")
    monkeypatch.setattr(paged, "PROGRAMS", 16)
    monkeypatch.setattr(sample, "BLOCK", 64)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    engine = make_engine(model.to(device), device=device, dtype=torch.float32)
    same(engine.sample(prompts, 2, params, step=0), expected)
