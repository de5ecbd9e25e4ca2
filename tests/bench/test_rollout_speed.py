"""Tests that the rollout bench runs and that its records are right: lengths, medians, machine. Its
speeds are not tested.
"""

import json
import os

import pytest
import torch

from bench import common, rollout_speed
from nanogrpo.engine.base import SamplingParams
from nanogrpo.engine.local import LocalEngine
from nanogrpo.types import Prompt
from tests.conftest import random_tokens, tiny_model

SMALL = (
    "--hidden 64 --layers 1 --vocab 128 --batch 8 --group 4 --prompt-length 5 --length 6"
    " --longest 12 --batches 2 --repeats 3 --threads 1"
)


@pytest.fixture
def threads():
    """Restore the number of threads of this process, which the bench sets."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_each_record_is_complete_by_itself(tmp_path, capsys, threads):
    rollout_speed.main([*SMALL.split(), "--vllm-python", "", "--out", str(tmp_path)])
    records = json.loads((tmp_path / "rollout_speed.json").read_text())
    assert [(r["case"], r["side"]) for r in records] == [
        (case, side)
        for case in ("even", "uneven")
        for side in ("nanogrpo", "nanogrpo, unpacked", "transformers eager", "transformers sdpa")
    ]
    for r in records:
        assert len(r["seconds"]) == 3
        assert r["tokens_per_second"] == pytest.approx(r["tokens"] / sorted(r["seconds"])[1])
        assert r["command"].startswith("python -m bench.rollout_speed --hidden 64")
        assert {"cpu", "cores", "threads", "versions", "commit", "load_average"} <= set(
            r["machine"]
        )
        assert r["machine"]["threads"] == 1
    assert records[0]["tokens"] == 8 * 6
    assert records[4]["tokens"] == sum(rollout_speed.uneven_lengths(16, 12))
    assert "even" in capsys.readouterr().out


@pytest.mark.vllm
def test_an_installed_vllm_is_a_side(tmp_path, threads):
    if not common.vllm_python():
        assert not os.environ.get("NANOGRPO_REQUIRE_VLLM"), (
            "NANOGRPO_REQUIRE_VLLM is set but there is no vLLM"
        )
        pytest.skip("needs a real vLLM (docs/vllm.md)")
    records = rollout_speed.main([*SMALL.split(), "--repeats", "1", "--out", str(tmp_path)])
    # each side asserts that its completions have the requested lengths
    asked = {(r["case"], r["side"]): r["tokens"] for r in records}
    assert asked["uneven", "vLLM"] == asked["uneven", "nanogrpo"]
    assert asked["even", "vLLM"] == 8 * 6


def test_uneven_lengths_have_a_third_of_the_maximum_as_their_mean():
    lengths = rollout_speed.uneven_lengths(256, 192)
    assert min(lengths) >= 1
    assert max(lengths) == 192
    assert sum(lengths) / 256 == pytest.approx(64, abs=1)
    assert lengths == rollout_speed.uneven_lengths(256, 192)


def test_both_sides_have_the_same_weights():
    """With greedy sampling the two models continue a prompt with the same tokens."""
    model = tiny_model(tie_word_embeddings=True)
    theirs = rollout_speed.peer(model, "sdpa")
    prompt = Prompt(0, "", random_tokens(9).tolist())
    engine = LocalEngine(model.cfg, max_len=32, device="cpu")
    engine.load(model, version=0)
    (ours,) = engine.sample([prompt], 1, SamplingParams(temperature=0.0, max_tokens=12), step=0)
    ids = torch.tensor([prompt.token_ids])
    out = theirs.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12
    )
    assert out[0, 9:].tolist() == ours.token_ids


def test_generate_ends_a_batch_with_its_longest_row():
    theirs = rollout_speed.peer(tiny_model(tie_word_embeddings=True), "sdpa")
    steps = []
    theirs.register_forward_pre_hook(lambda *_: steps.append(1))
    prompts = [Prompt(i, "", random_tokens(4, seed=i).tolist()) for i in range(4)]
    assert rollout_speed.generate(theirs, prompts, [2, 5, 1, 3], batch=2) == [2, 5, 1, 3]
    assert len(steps) == 5 + 3
