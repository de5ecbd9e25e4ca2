"""Reward models give the scores that transformers gives for the same folder and texts.

Read next: tests/model/test_decoder.py, test_rewards.py (reward functions of other kinds).
"""

import shutil
from pathlib import Path

import pytest
import torch
import transformers

from nanogrpo import Config
from nanogrpo.extras import reward_model
from nanogrpo.extras.arithmetic import warmup
from nanogrpo.extras.reward_model import RewardModel
from nanogrpo.extras.rewards import Rewards
from tests.conftest import edit_json, refused, said, tiny_config
from tests.model.tokenizer_folder import make_folder
from tests.rewards.conftest import runner

PROMPTS = [
    "3+4=",
    said("3+4="),
    "a long question " * 9,
    said("Be brief.", "system"),
]
COMPLETIONS = [
    "7",
    said("It is 7.", "assistant"),
    "no",
    said("yes " * 20, "assistant"),
]


def make(
    folder: Path, kind: str = "qwen3", tokenizer=make_folder, labels: int = 1, **changes
) -> Path:
    """Save a random classifier of transformers with a tokenizer."""
    folder.mkdir()
    tokenizer(folder)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    size = {"vocab_size": len(theirs), "head_dim": 12 if kind == "qwen2" else 16}
    fields = tiny_config(model_type=kind, **size, **changes).to_dict()
    config = transformers.AutoConfig.for_model(
        **fields, pad_token_id=theirs.pad_token_id, num_labels=labels
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForSequenceClassification.from_config(config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.normal_(1.0 if name.endswith("norm.weight") else 0.0, 0.2)
    model.save_pretrained(folder)
    return folder


@torch.no_grad()
def theirs(folder: Path, prompts: list, completions: list) -> list[float]:
    """Return the scores as TRL computes them, text by text, so there is no padding to mask."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    scores = []
    for prompt, completion in zip(prompts, completions):
        text = prompt + completion
        if not isinstance(text, str):
            text = tokenizer.apply_chat_template(text, tokenize=False)
        inputs = tokenizer(text, return_tensors="pt", add_special_tokens=False)
        scores.append(model(**inputs).logits[0, 0].item())
    return scores


@pytest.mark.parametrize("kind", ["qwen3", "qwen2"])
@pytest.mark.parametrize(
    "changes", [{}, {"tie_word_embeddings": True, "rope_theta": 1e6, "num_key_value_heads": 4}]
)
def test_scores_equal_those_of_transformers(tmp_path, monkeypatch, kind, changes):
    folder = make(tmp_path / "judge", kind, **changes)
    judge, expected = RewardModel.load(str(folder)), theirs(folder, PROMPTS, COMPLETIONS)
    assert torch.tensor(expected).std() > 0.1
    assert judge(prompts=PROMPTS, completions=COMPLETIONS) == pytest.approx(expected, abs=1e-5)
    for budget in (1, 60):  # one text per forward pass; two
        monkeypatch.setattr(reward_model, "TOKEN_BUDGET", budget)
        assert judge(prompts=PROMPTS, completions=COMPLETIONS) == pytest.approx(expected, abs=1e-5)


def test_padding_tokens_at_the_end_of_a_text_are_skipped_as_in_transformers(tmp_path):
    folder = make(tmp_path / "judge")
    pad = transformers.AutoTokenizer.from_pretrained(folder).pad_token
    judge = RewardModel.load(str(folder))
    given = ["3+4=", "3+4="], [f"7{pad}{pad}", "7"]
    scores = judge(prompts=given[0], completions=given[1])
    assert scores == pytest.approx(theirs(folder, *given), abs=1e-5)
    assert scores[0] == pytest.approx(scores[1], abs=1e-5)
    judge.pad_token_id = None  # a folder without one: the last token counts
    assert judge(prompts=given[0], completions=given[1])[0] != pytest.approx(scores[1], abs=1e-2)


def test_a_reward_model_scores_a_run(rows_of, tmp_path):
    judge = make(tmp_path / "judge", tokenizer=warmup.write_tokenizer)
    functions = f"--reward-funcs model:{judge} FILES/reward.py:even --reward-weights 1 0.5"
    rows = rows_of(f"{functions} --max-steps 2")
    for row in rows:
        assert row["reward"] == pytest.approx(
            row["rewards/judge/mean"] + 0.5 * row["rewards/even/mean"]
        )
        assert row["rewards/judge/std"] > 0
    assert len(rows) == 2


def test_a_folder_without_a_reward_model_is_an_error(tiny_base, tmp_path):
    good = make(tmp_path / "judge")
    make(tmp_path / "three", labels=3)
    for name, change in {"bert": {"model_type": "bert"}, "small": {"hidden_size": 32}}.items():
        edit_json(shutil.copytree(good, tmp_path / name) / "config.json", **change)
    for folder, message in (
        (tmp_path / "three", r"but this is a Qwen3ForSequenceClassification \(labels: 3\)"),
        (tiny_base, r"one label, but this is a Qwen3ForCausalLM"),
        (tmp_path / "bert", r"model_type 'bert' is not supported"),
        (tmp_path / "small", r"has shape .* config\.json asks for"),
        (tmp_path / "none", r"--reward-funcs model: \S+none: there is no such folder"),
    ):
        with refused(message):
            runner("format", f"model:{folder}", features=[Rewards(Config())])


def test_a_text_longer_than_the_context_is_an_error(tmp_path):
    judge = RewardModel.load(str(make(tmp_path / "judge", max_position_embeddings=16)))
    with refused(
        r"reward model judge cannot score a text of \d+ tokens \(its context is 16\)",
    ):
        judge(prompts=["3+4=" * 20], completions=["7"])
    with refused("a text of 0 tokens"):
        judge(prompts=[""], completions=[""])
