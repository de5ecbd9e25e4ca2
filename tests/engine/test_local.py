"""The local engine: its cache against the full forward, its log-probs against the trainer's, its
rows against each other, and its weights.

Everything runs on a tiny random decoder. Read next: tests/engine/test_sampler.py,
tests/bench/test_peers.py.
"""

import dataclasses

import pytest
import torch

from nanogrpo import Config
from nanogrpo.engine import local, runner
from nanogrpo.engine.base import SamplingParams
from nanogrpo.engine.runner import Runner
from nanogrpo.extras.rope_scaling import Scaling
from nanogrpo.extras.window import FULL, SLIDING, Windows
from tests.conftest import logp_of, tiny_model
from tests.engine.small import make_engine, make_prompts, same

STOPS = range(12)  # of 151 tokens: about one in twelve stops a completion
PARAMS = SamplingParams(max_tokens=24, stop_token_ids=STOPS, seed=5)


# --- the cache ---


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize(
    ("temperature", "changes"),
    [
        (1.0, {}),
        (0.7, {"model_type": "qwen2"}),
        (0.0, {"tie_word_embeddings": True}),
        (1.7, {"model_type": "llama", "mlp_bias": True, "rope_scaling": Scaling("yarn", 4.0, 32)}),
        (0.7, {"model_type": "mistral", "num_key_value_heads": 1}),
        (1.0, {"layers": Windows(37, (FULL, SLIDING))}),
        (1.0, {"model_type": "mistral", "layers": Windows(6)}),
    ],
    ids=["qwen3", "qwen2", "tied", "llama", "mistral", "some windows", "windows"],
)
def test_log_probs_equal_the_trainers_after_each_load(temperature, changes, paged, monkeypatch):
    """The engine has a copy, so that an update without a load changes nothing."""
    # every weight of the tiny model is repacked, not the head alone
    monkeypatch.setattr(local, "REPACK_FROM", 0)
    engine = make_engine(tiny_model(**changes), slots=5, max_len=80, paged=paged)
    # the cache of a CPU widens after 64 tokens
    params = dataclasses.replace(PARAMS, temperature=temperature, max_tokens=40)
    for seed in (0, 1):
        model, updated = (tiny_model(seed=seed, **changes) for _ in range(2))
        engine.load(updated, version=seed)
        updated.load_state_dict({n: -x for n, x in model.state_dict().items()})
        samples = engine.sample(make_prompts(), 4, params, step=0)
        assert {v for s in samples for v in s.versions} == {seed}
        cfg = Config(num_generations=4, temperature=temperature or 1.0)
        for s, logp in zip(samples, logp_of(model, samples, cfg)):
            torch.testing.assert_close(torch.tensor(s.logp), logp, atol=1e-5, rtol=1e-5)


# --- rows ---


def ids(samples):
    return [s.token_ids for s in samples]


def test_completions_do_not_depend_on_the_batching(monkeypatch):
    model, prompts = tiny_model(), make_prompts()
    wide = make_engine(model, slots=64).sample(prompts, 6, PARAMS, step=2)
    assert [(s.prompt.id, s.index) for s in wide] == [(p.id, j) for p in prompts for j in range(6)]
    assert len({len(s.token_ids) for s in wide}) > 5  # rows left at different times
    assert ids(make_engine(model, slots=3).sample(prompts, 6, PARAMS, step=2)) == ids(wide)
    alone = [
        s for p in reversed(prompts) for s in make_engine(model).sample([p], 6, PARAMS, step=2)
    ]
    assert sorted(ids(alone)) == sorted(ids(wide))
    assert ids(make_engine(model).sample(prompts, 2, PARAMS, step=2)) == [
        s.token_ids for s in wide if s.index < 2
    ]
    # several prefills, one of them for a prompt above the budget
    monkeypatch.setattr(runner, "PREFILL_TOKENS", 20)
    assert ids(make_engine(model, slots=5).sample(prompts, 6, PARAMS, step=2)) == ids(wide)


def test_a_prompt_is_prefilled_once_for_its_group():
    engine, seen = make_engine(slots=3), []
    engine.model.model.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
    engine.sample(make_prompts([20]), 5, SamplingParams(max_tokens=4), step=0)
    assert seen == [19] + 4 * [3] + 4 * [2]


def test_a_step_computes_only_the_active_rows():
    engine, seen = make_engine(slots=4), []
    engine.model.model.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
    limits = (1, 2, None, 1, 1, 3)
    prompts = [dataclasses.replace(p, max_tokens=m) for p, m in zip(make_prompts([1] * 6), limits)]
    engine.sample(prompts, 1, SamplingParams(max_tokens=9), step=0)
    assert seen == [4, 4, 2, 2, 1, 1, 1, 1, 1]  # two waiting completions enter after the first step


def test_the_stream_is_a_function_of_seed_step_prompt_and_sample():
    engine, prompts = make_engine(), make_prompts([4])
    once = ids(engine.sample(prompts, 3, PARAMS, step=0))
    assert ids(engine.sample(prompts, 3, PARAMS, step=0)) == once
    assert ids(engine.sample(prompts, 3, PARAMS, step=1)) != once
    assert ids(engine.sample(prompts, 3, dataclasses.replace(PARAMS, seed=6), step=0)) != once
    renamed = [dataclasses.replace(prompts[0], id=1)]
    assert ids(engine.sample(renamed, 3, PARAMS, step=0)) != once
    assert len({tuple(x) for x in once}) == 3


def test_a_completion_ends_at_a_stop_token_or_at_its_limit():
    samples = make_engine().sample(make_prompts(), 8, PARAMS, step=0)
    assert {s.stopped for s in samples} == {True, False}
    for s in samples:
        assert s.stopped == (s.token_ids[-1] in STOPS)
        assert not set(s.token_ids[:-1]) & set(STOPS)
        assert s.stopped or len(s.token_ids) == PARAMS.max_tokens
        assert len(s.logp) == len(s.versions) == len(s.token_ids)


def test_the_context_can_be_filled_to_the_last_token():
    engine = make_engine(max_len=40)
    (s,) = engine.sample(make_prompts([30]), 1, SamplingParams(max_tokens=10), step=0)
    assert len(s.token_ids) == 10
    assert engine.sample([], 4, PARAMS, step=0) == []


# --- weights ---


@pytest.mark.parametrize("paged", [False, True])
def test_non_finite_logits_raise_an_error_and_leave_no_nan_in_the_cache(paged):
    model, broken, prompts = tiny_model(), tiny_model(), make_prompts()
    engine = make_engine(model, paged=paged)
    good = ids(engine.sample(prompts, 2, PARAMS, step=0))
    for value in (float("nan"), float("inf")):
        for name in ("model.layers.0.self_attn.v_proj.weight", "lm_head.weight"):
            broken.load_state_dict(model.state_dict())
            with torch.no_grad():
                broken.get_parameter(name)[3, 1] = value
            engine.load(broken, version=9)
            with pytest.raises(FloatingPointError, match=r"prompt 10\d"):
                engine.sample(prompts, 2, PARAMS, step=0)
    engine.load(model, version=10)
    assert ids(engine.sample(prompts, 2, PARAMS, step=0)) == good


# --- GPU ---


@pytest.mark.gpu
@pytest.mark.parametrize(
    "changes",
    [{}, {"temperature": 0.7, "top_k": 20, "top_p": 0.9}, {"temperature": 0.0}],
)
def test_cuda_graphs_sample_what_eager_decoding_samples(changes):
    """Also with newly loaded weights."""
    models = [tiny_model(seed=seed).cuda() for seed in range(2)]
    params = dataclasses.replace(PARAMS, **changes)
    eager, graphs = (
        make_engine(models[0], slots=7, device="cuda", dtype=torch.float32) for _ in range(2)
    )
    eager.runner = Runner(eager.model, eager.cache, eager.scheduler.state)
    for model in models:
        for engine in (graphs, eager):
            engine.load(model, version=8)
        same(*(engine.sample(make_prompts(), 6, params, step=0) for engine in (graphs, eager)))
