"""Rewards of single tokens: what reward functions receive, and the recipes for steps and turns."""

import json

import torch

import train
from nanogrpo.model.checkpoint import load_model
from nanogrpo.model.tokenizer import Tokenizer
from tests.conftest import arguments, positions_of

FUNCTION = """
import json, pathlib

def by_token(prompts, completion_ids, logp, entropy, pieces, **kwargs):
    rows = list(zip(prompts, completion_ids, logp, entropy, pieces))
    pathlib.Path(__file__).with_name("seen.json").write_text(json.dumps(rows))
    return [[float(i % 2) for i in ids] for ids in completion_ids]
"""


def test_reward_functions_may_ask_for_numbers_of_the_tokens(tiny_base, files, tmp_path):
    (tmp_path / "reward.py").write_text(FUNCTION)
    options = ["--reward-funcs", f"{tmp_path}/reward.py:by_token", "--max-steps", "1"]
    options += ["--token-budget", "60", "--temperature", "0.7"]
    argv = arguments(tiny_base, files, tmp_path / "run", *options)
    assert train.main(argv) == 0
    tokenizer, model = Tokenizer(tiny_base), load_model(tiny_base)
    rows = json.loads((tmp_path / "seen.json").read_text())
    assert len(rows) == 16
    for prompt, ids, logp, entropy, pieces in rows:
        given = tokenizer.encode_prompt(prompt)
        with torch.no_grad():
            logits = model(torch.tensor(given + ids), *positions_of([len(given) + len(ids)]))
        found = (logits[len(given) - 1 : -1] / 0.7).log_softmax(-1)  # [M, V]
        torch.testing.assert_close(torch.tensor(entropy), -(found.exp() * found).sum(-1))
        torch.testing.assert_close(
            torch.tensor(logp), found.gather(1, torch.tensor(ids)[:, None])[:, 0]
        )
        assert (len(pieces), "".join(pieces)) == (
            len(ids),
            tokenizer.decode(ids, skip_special_tokens=False),
        )
