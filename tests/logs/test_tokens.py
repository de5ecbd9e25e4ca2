"""The numbers of each token that `--log-tokens` writes: each is what training computed, each token
is there once, and the files stay within their limit.

Read before: test_completions.py. Read next: test_view.py.
"""

import gzip
import itertools
import json
import math
from types import SimpleNamespace

import pytest
import torch

from nanogrpo import Config
from nanogrpo.extras.completions import Completions
from nanogrpo.extras.objectives import TERMS, Objectives
from nanogrpo.extras.view import tokens
from nanogrpo.extras.view.tokens import TokenLog, gradient
from nanogrpo.grpo.loss import objective
from nanogrpo.model.tokenizer import Tokenizer
from nanogrpo.types import Prompt, Sample
from tests.conftest import SOLO, random_batch
from tests.logs.conftest import completions_of
from tests.model.tokenizer_folder import make_folder


def table(folder, step: int) -> list[dict]:
    data = (folder / "completions" / f"tokens_{step:05d}.jsonl.gz").read_bytes()
    return [json.loads(line) for line in gzip.decompress(data).splitlines()]


LOG = "--max-steps 2 --log-completions --log-tokens"


def test_every_token_of_a_run_is_written_with_its_numbers(rows_of, tmp_path, tiny_base):
    metrics, tokenizer = rows_of(LOG), Tokenizer(tiny_base)
    assert metrics == rows_of("--max-steps 2", folder="other")  # the run itself does not change
    for step, metric in enumerate(metrics, start=1):
        rows, found = completions_of(tmp_path, step), table(tmp_path, step)
        assert [line["row"] for line in found] == [*range(16)]
        for row, line in zip(rows, found):
            assert tokenizer.decode(line["id"]) == row["completion"]
            assert all(len(line[name]) == len(line["id"]) for name in line.keys() - {"row"})
            assert ("share" in line) == (row["advantage"] != 0)
        trained = [line for line in found if "share" in line]
        gaps = [abs(gap) for line in trained for gap in line["gap"]]
        entropy = [h for line in trained for h in line["entropy"]]
        assert max(gaps) == pytest.approx(metric["sampling/sampling_logp_difference/max"], rel=1e-3)
        assert sum(entropy) / len(entropy) == pytest.approx(metric["entropy"], rel=1e-3)
        assert {ratio for line in trained for ratio in line["ratio"]} == {1.0}
        assert sum(s for line in trained for s in line["share"]) == pytest.approx(1, rel=1e-3)


def test_several_updates_write_each_token_once_with_its_last_ratio(rows_of, tmp_path):
    rows_of(f"{LOG} --num-iterations 2 --steps-per-generation 2 --max-steps 1")
    found = table(tmp_path, 1)
    assert [line["row"] for line in found] == [*range(16)]
    trained = [line for line in found if "share" in line]
    assert {r for line in trained for r in line["ratio"]} != {1.0}
    assert max(abs(gap) for line in trained for gap in line["gap"]) < 1e-4  # not the drift
    # two updates, each with all of its gradient
    assert sum(s for line in trained for s in line["share"]) == pytest.approx(2, rel=1e-3)


# --- the share of the gradient ---


OWN_RATIOS = ("dppo", "vespo")  # they define their own ratios, not those of a level
OBJECTIVES = [(name, "token") for name in TERMS]
OBJECTIVES += [(name, "sequence") for name in TERMS if not name.startswith(OWN_RATIOS)]


@pytest.mark.parametrize(("loss_type", "level"), OBJECTIVES)
def test_the_gradient_of_a_token_is_the_l1_norm_at_its_logits(loss_type, level):
    """With hidden states that are the logits, autograd gives the gradient at the logits."""
    cfg = Config(loss_type=loss_type, importance_sampling_level=level, temperature=0.7, beta=0.1)
    batch = random_batch([(2, 5), (3, 4), (2, 6)])
    V, M = 151, len(batch.targets)
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(M, V, generator=generator).requires_grad_()
    logp = (logits.detach() / 0.7).log_softmax(-1).gather(1, batch.targets[:, None])[:, 0]
    batch.old_logp = logp + 0.3 * torch.randn(M, generator=generator)  # clips some tokens
    batch.ref_logp = logp + 0.1
    out = objective(batch, cfg, [Objectives(cfg)])(logits, torch.eye(V))
    out.loss.backward()
    expected = logits.grad.abs().sum(-1) * 0.7 / 2
    found = gradient(batch, out, cfg).tolist()
    assert found == pytest.approx(expected.tolist(), rel=1e-3, abs=1e-7)
    assert len({*found}) > M / 2


# --- the limit ---


def config(folder, **options) -> Config:
    logs = {"log_completions": True, "log_tokens": True, "num_generations": 4}
    return Config(**{"output_dir": str(folder), **logs, **options})


def write_steps(cfg: Config, tokenizer: Tokenizer, steps: range, length: int) -> None:
    log, n = TokenLog(cfg), 16
    run = SimpleNamespace(cfg=cfg, world=SOLO, tokenizer=tokenizer, start=steps.start)
    Completions(cfg).running(run)
    random = torch.Generator().manual_seed(0)
    for step in steps:
        ids = torch.randint(tokenizer.vocab_size, (n, length), generator=random).tolist()
        logp = (-torch.rand(n, length, generator=random)).tolist()
        samples = [
            Sample(Prompt(i // 4, "?", [1]), i % 4, ids[i], logp[i], True, [0] * length)
            for i in range(n)
        ]
        for sample in samples[8:]:
            sample.advantage = 1.0
        log.step(run, step, samples)


def test_the_files_stay_within_their_limit_and_cover_the_whole_run(
    tmp_path, tiny_tokenizer, monkeypatch
):
    monkeypatch.setattr(tokens, "LIMIT", 2**18)
    write_steps(config(tmp_path, max_steps=40), tiny_tokenizer, range(40), length=100)
    files = sorted((tmp_path / "completions").glob("tokens_*.gz"))
    assert 0.6 < sum(path.stat().st_size for path in files) / 2**18 <= 1
    numbers = [int(path.name[7:12]) for path in files]
    assert numbers[0] == 1
    assert numbers[-1] >= 35
    assert max(b - a for a, b in itertools.pairwise(numbers)) <= 5
    for number in numbers:
        rows = [line["row"] for line in table(tmp_path, number)]
        groups = {row // 4 for row in rows}
        assert len(rows) == 4 * len(groups)
        assert groups <= {2, 3} or groups >= {2, 3}  # those with a gradient come first


# --- the text of a token ---


def test_the_texts_of_the_tokens_make_up_the_completion(tmp_path):
    tokenizer = Tokenizer(make_folder(tmp_path / "chat"))
    text = "The sum is 7.\n\tна 日本 👩‍🚀 é\u2028 end"
    ids = [*tokenizer.encode(text, special=False), *tokenizer.stop_token_ids[:1]]
    pieces = tokens.pieces(ids, tokenizer, {})
    assert len(pieces) == len(ids)
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=False)
    assert "" in pieces  # a character of several tokens
    assert "\ufffd" not in "".join(pieces)
    # a part of a character remains at the end, and a broken one in the middle
    broken = ids[:-1] + tokenizer.encode("👩", special=False)[:1]
    for some in (broken, broken + ids):
        pieces = tokens.pieces(some, tokenizer, {})
        assert len(pieces) == len(some)
        assert "\ufffd" in "".join(pieces)


def test_inserted_text_has_no_numbers(tmp_path, tiny_tokenizer):
    model = [True, False, True]
    samples = [
        Sample(Prompt(0, "?", [1]), i, [1, 2, 3], [-1.0, 0.0, math.nan], True, [0] * 3, model)
        for i in range(4)
    ]
    cfg = config(tmp_path)
    run = SimpleNamespace(cfg=cfg, world=SOLO, tokenizer=tiny_tokenizer)
    TokenLog(cfg).step(run, 0, samples)
    assert {json.dumps(line["logp"]) for line in table(tmp_path, 1)} == {"[-1.0, null, null]"}
