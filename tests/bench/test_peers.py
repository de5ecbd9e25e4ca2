"""The benchmarks compare like with like: the same prompts, options, weights and work on both sides.

Read next: test_scripts.py.
"""

import itertools
import sys

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from bench import (
    common,
    parity_trl,
    rollout_speed,
    runs,
    step_large,
    step_sides,
    trl_peer,
    trl_run,
)
from bench.rewards import share_of_even
from nanogrpo import Config
from nanogrpo.data import prompts as data
from nanogrpo.engine.base import SamplingParams
from nanogrpo.extras.data.sources import Sources
from nanogrpo.extras.window import FULL, SLIDING, Windows
from nanogrpo.model.decoder import Decoder, logits
from nanogrpo.model.tokenizer import Tokenizer
from nanogrpo.types import Prompt
from tests.conftest import random_tokens, steps, tiny_model
from tests.engine.small import make_engine

pytestmark = [
    pytest.mark.skipif(sys.version_info < (3, 11), reason="TRL needs Python 3.11"),
    # TRL uses deprecated parts of transformers
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
TINY = common.small_qwen3(32, 2, 104, 32)


def test_trl_sees_the_prompts_and_options_of_our_steps(tiny_base, tmp_path):
    options = {"num_generations": 4, "generation_batch_size": 12, "max_steps": 3, "seed": 5}
    cfg = Config(model=str(tiny_base), data=("arithmetic",), learning_rate=3e-5, **options)
    theirs = trl_run.options(cfg, tmp_path)
    for name in set(trl_run.SAME) - {"lr_scheduler_type"}:
        assert getattr(theirs, name) == getattr(cfg, name), name
    prompts = data.load(cfg, Tokenizer(tiny_base), ["arithmetic"], [Sources(cfg)])
    trainer = trl_run.trainer(cfg, prompts, [share_of_even], tmp_path)
    for step, batch in enumerate(itertools.islice(trainer.get_train_dataloader(), 3)):
        drawn = [p for p in data.draw(prompts, 3, cfg.seed, step) for _ in range(4)]
        assert [row["prompt"] for row in batch] == [p.text for p in drawn]
        assert [row["answer"] for row in batch] == [p.columns["answer"] for p in drawn]


def test_trl_takes_our_steps_even_those_in_which_all_completions_are_masked(tiny_base, tmp_path):
    """On our completions. In TRL, AdamW takes a step with a gradient of 0."""
    cfg = Config(
        model=str(tiny_base),
        data=("arithmetic",),
        reward_funcs=("bench.rewards:share_of_even",),
        output_dir=str(tmp_path),
        num_generations=2,
        generation_batch_size=4,
        max_completion_length=12,
        mask_truncated_completions=True,
        max_steps=8,
        learning_rate=1e-2,
        weight_decay=0.1,
        device="cpu",
    )
    assert runs.replayed(cfg)["weights_apart"] < 1e-3
    masked = [step["completions/clipped_ratio"] == 1 for step in steps(tmp_path / "ours")]
    assert True in masked[masked.index(False) :]  # AdamW has moments by then


def test_different_gradient_norms_are_an_error():
    step_sides.check_norms("case", {"nanogrpo": 1.0, "TRL": 1.0005})
    with pytest.raises(RuntimeError, match="case: the gradient norms differ"):
        step_sides.check_norms("case", {"nanogrpo": 1.0, "TRL": 1.002})


def test_the_table_of_differences_finds_them(tmp_path, monkeypatch):
    monkeypatch.setattr(parity_trl, "pairs", lambda: [("dapo", "plain"), ("bnpo", "kl")])
    records = parity_trl.main(["--seeds", "1", "--out", str(tmp_path)])
    assert max(record["largest_value"] for record in records) < 1e-6
    weight = trl_peer.grpo.token_weight
    monkeypatch.setattr(trl_peer.grpo, "token_weight", lambda *args: 1.001 * weight(*args))
    records = parity_trl.main(["--seeds", "1", "--out", str(tmp_path)])
    assert all((r["largest_value"] > 5e-4) == (r["what"] == "loss") for r in records)


@pytest.mark.parametrize("layers", [None, Windows(4, (SLIDING, FULL))])
def test_both_sides_of_the_rollout_have_the_same_weights(layers):
    """With greedy sampling the two models continue a prompt with the same tokens."""
    model = tiny_model(tie_word_embeddings=True, layers=layers)
    theirs = rollout_speed.peer(model, "sdpa")
    prompt = Prompt(0, "", random_tokens(9).tolist())
    engine = make_engine(model)
    (ours,) = engine.sample([prompt], 1, SamplingParams(temperature=0.0, max_tokens=12), step=0)
    ids = torch.tensor([prompt.token_ids])
    mask = torch.ones_like(ids)
    out = theirs.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=12)
    assert out[0, 9:].tolist() == ours.token_ids


def test_flops_equal_those_of_the_matrix_products():
    """torch counts the matrix products, with a plain head. Pairs are counted by their definition:
    two products forward, four backward.
    """
    case = step_sides.Case(P=2, G=4, prompt=8, longest=24)
    cfg, samples = step_sides.options_of(case, token_budget=64)
    batches = step_sides.strips(samples, cfg, TINY.pair_cost)
    model, pairs = Decoder(TINY), 0
    with FlopCounterMode(display=False) as counter:
        for batch in batches:
            model.forward_strip(batch, logits).square().sum().backward()
    for batch in batches:
        keys = batch.cu_seqlens if batch.kv_cu_seqlens is None else batch.kv_cu_seqlens
        for q, k in zip(batch.cu_seqlens.diff().tolist(), keys.diff().tolist()):
            pairs += sum(k - q + i + 1 for i in range(q))
    found = counter.get_flop_counts()["Global"].items()
    counted = sum(n for op, n in found if "attention" not in str(op))
    heads = TINY.num_attention_heads * TINY.head_dim
    attention = pairs * TINY.num_hidden_layers * heads * 2 * (2 + 4)
    assert step_large.needed_flops(TINY, batches) == counted + attention
