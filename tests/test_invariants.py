"""Invariants of the algorithm, whatever the code looks like: what is left out, samples against each
other, repetition, learning.

The last ones are runs of train.py on a task of one digit: the answer to "7=" is
`<answer>7</answer>`, and the base model sometimes gives it. There are twelve numbered
invariants. 1 is in tests/grpo/test_objectives.py, 3 and 7 are in tests/grpo/test_loss.py, 4 is in
tests/grpo/test_advantages.py, 5 is in tests/grpo/test_packing.py and tests/engine/test_local.py,
which has 6, too. 12 is in tests/grpo/test_trl_parity.py, and the killed
runs of 9 are in tests/run/test_state.py. Read it next.
"""

import random
from pathlib import Path

import pytest
import torch

import train
from nanogrpo import Config
from nanogrpo.extras.arithmetic import warmup
from nanogrpo.extras.entropy import Entropy
from nanogrpo.extras.objectives import Objectives
from nanogrpo.grpo import advantages
from nanogrpo.model import checkpoint
from nanogrpo.model.decoder import Decoder
from nanogrpo.types import Prompt, Sample
from tests.conftest import (
    completion,
    lines,
    logp_alone,
    packed,
    random_samples,
    set_logp,
    timeless,
    tiny_config,
    tiny_model,
    write_rows,
)


def config(**options) -> Config:
    return Config(max_completion_length=20, **options)


# --- completions without a signal ---


def test_a_loss_with_other_terms_leaves_nothing_out():
    samples = random_samples()
    for s in samples:
        s.advantage = 0.0
    penalty = config(loss_type="dppo_tv", loss_kwargs={"dppo_penalty": 0.1})
    for cfg, feature in (
        (config(beta=0.1), Objectives(config())),
        (config(entropy_coef=0.01), Entropy()),
        (penalty, Objectives(penalty)),
    ):
        found = {i for b in packed(samples, cfg, feature.all_gradients) for i in b.sample.tolist()}
        assert found == set(range(12))


# --- 2: a sample's log-probs do not depend on other samples ---


def test_packed_log_probs_equal_those_of_the_sample_alone():
    model, samples, cfg = tiny_model(), random_samples(), config(temperature=0.7)
    set_logp(model, samples, "old_logp", cfg)
    for s in samples:
        torch.testing.assert_close(s.old_logp, logp_alone(model, s, 0.7), rtol=1e-5, atol=1e-5)


# --- the task of one digit ---


@pytest.fixture(scope="session")
def digit_base(tmp_path_factory) -> Path:
    """A base model that answers in the right form, two times out of five with the right digit."""
    folder = tmp_path_factory.mktemp("digits") / "base"
    folder.mkdir()
    tokenizer = warmup.write_tokenizer(folder)
    torch.manual_seed(0)
    rng, model = random.Random(0), Decoder(tiny_config(vocab_size=tokenizer.vocab_size))

    def answers(step: int) -> list[Sample]:
        samples = []
        for digit in list(range(10)) * 4:
            answer = digit if rng.random() < 0.5 else rng.randrange(10)
            ids = tokenizer.encode(f"<answer>{answer}</answer><|end|>")
            prompt = Prompt(digit, "", tokenizer.encode(f"{digit}="))
            samples.append(completion(prompt, ids, advantage=1.0))
        return samples

    warmup.imitate(model, answers, 150, rise=10)
    checkpoint.export(model, folder, tokenizer)
    return folder


@pytest.fixture(scope="session")
def digit_data(tmp_path_factory) -> Path:
    rows = ({"prompt": f"{d}=", "answer": str(d)} for d in range(10))
    return write_rows(tmp_path_factory.mktemp("digits") / "digits.jsonl", rows)


def run(base: Path, data: Path, output: Path, options: str) -> list[dict]:
    """Run train.py in this process; return the log records of its steps."""
    argv = f"--model {base} --data {data} --output-dir {output} --reward-funcs accuracy"
    argv += " --max-completion-length 6 --generation-batch-size 64 --num-generations 8"
    argv += f" --learning-rate 3e-3 --device cpu {options}"
    assert train.main(argv.split()) == 0
    return [line for line in lines(output) if "reward" in line]


# --- 9: the same seed, the same run ---


def test_the_same_seed_gives_the_same_run_and_another_seed_another(
    digit_base, digit_data, tmp_path
):
    options = "--max-steps 3 --steps-per-generation 2 --num-iterations 2 --temperature 0.9"
    options += " --beta 0.1"
    first = run(digit_base, digit_data, tmp_path / "a", options)
    torch.manual_seed(123)  # the global random state has no influence
    random.seed(123)
    second = run(digit_base, digit_data, tmp_path / "b", options)
    third = run(digit_base, digit_data, tmp_path / "c", f"{options} --seed 1 --max-steps 1")
    assert [timeless(line) for line in first] == [timeless(line) for line in second]
    assert first[0]["loss"] != third[0]["loss"]
    assert (tmp_path / "a/checkpoint-3/model.safetensors").read_bytes() == (
        tmp_path / "b/checkpoint-3/model.safetensors"
    ).read_bytes()
    for line in first:  # 6, in the log
        mean, most = (line[f"sampling/sampling_logp_difference/{x}"] for x in ("mean", "max"))
        assert 0 < mean <= most < 1e-4


# --- 10: it learns ---


def learned(lines: list[dict]) -> tuple[float, float]:
    """Return the mean reward of the first four steps, and of the last four."""
    first, last = (sum(line["reward"] for line in part) / 4 for part in (lines[:4], lines[-4:]))
    return first, last


def test_the_reward_rises(digit_base, digit_data, tmp_path):
    before, after = learned(run(digit_base, digit_data, tmp_path, "--max-steps 30"))
    assert before < 0.6
    assert after > before + 0.2


def test_with_negated_advantages_the_accuracy_falls(digit_base, digit_data, tmp_path, monkeypatch):
    """One sign differs, so luck or a drift of the sampler would raise the reward here too."""
    right_way = advantages.group_relative
    monkeypatch.setattr(
        advantages, "group_relative", lambda *args: (-right_way(*args)[0], right_way(*args)[1])
    )
    before, after = learned(run(digit_base, digit_data, tmp_path, "--max-steps 16"))
    assert before > 0.2
    assert after < before / 3
