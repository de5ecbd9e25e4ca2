"""Full runs of train.py against a fake server: how the loop uses a server, and how it loses one.

The weights really arrive (`fake.weights`), but the log-probs do not fit them. So these runs learn
nothing, but every option shows in the log. Read next: test_train_real.py.
"""

from __future__ import annotations

import pytest
import torch

import train
from nanogrpo.config import CHOICES
from nanogrpo.model import checkpoint
from nanogrpo.model.tokenizer import Tokenizer
from tests.conftest import arguments, steps, tiny_config
from tests.vllm.fake import FakeVLLM


@pytest.fixture
def fake(tiny_base):
    with FakeVLLM(tiny_config(vocab_size=Tokenizer(tiny_base).vocab_size)) as server:
        yield server


@pytest.fixture
def argv(tiny_base, files, tmp_path, fake):
    """A function of options: the command line of a run of three steps against the fake."""
    server = ["--engine", "vllm", "--server", fake.url, "--weight-transport", "memory"]
    return lambda *options: arguments(tiny_base, files, tmp_path, *server, *options)


def generation(fake, number: int):
    """Return a disturbance: after `number` requests for completions, answer only with 500."""

    def disturb(method, path, body):
        return 500 if len(fake.generated()) > number and path != "/nanogrpo" else None

    return disturb


@pytest.mark.parametrize("adapters", [[], ["--lora-r", "4", "--lora-alpha", "8"]])
def test_a_run_samples_from_the_server_and_sends_it_the_weights_of_every_step(
    argv, tmp_path, fake, adapters
):
    """Adapters are merged first."""
    assert train.main(argv("--save-steps", "2", "--server-window", "2", *adapters)) == 0
    after_two = checkpoint.load_model(tmp_path / "checkpoint-2")
    for name, p in after_two.named_parameters():
        # the weights that sampled the third step
        assert torch.equal(fake.weights[name], p), name
    rows = steps(tmp_path)
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert len(fake.generated()) == 3 * 4  # one request a group
    for row in rows:
        assert (row["staleness/max"], row["staleness/mixed"], row["vllm/restarts"]) == (0, 0.0, 0)
        # the fake's log-probs are invented
        assert row["sampling/sampling_logp_difference/max"] > 0.1
        assert row["sampling/k3"] > 0
        assert "sampling/importance_sampling_ratio/mean" not in row


@pytest.mark.parametrize("mode", CHOICES["vllm_importance_sampling_mode"][1:])
def test_the_correction_is_applied_and_logged(argv, tmp_path, mode):
    bounds = [
        "--vllm-importance-sampling-clip-min",
        "0.1",
        "--vllm-importance-sampling-clip-max",
        "2",
    ]
    assert train.main(argv("--vllm-importance-sampling-mode", mode, *bounds)) == 0
    row = steps(tmp_path)[0]
    low, high = (row[f"sampling/importance_sampling_ratio/{how}"] for how in ("min", "max"))
    assert high <= 2
    assert low >= 0.1 if mode.endswith("truncate") else low == 0
    assert (row["sampling/masked"] > 0) == mode.endswith("mask")
    assert 0 <= row["sampling/ess"] <= 1


def test_masked_completions_do_not_change_the_weights(argv, tmp_path, tiny_base):
    """The product of a completion's ratios is far from 1, so all completions are masked. Only a
    loss that ignores the mask would change the weights.
    """
    bounds = [
        "--vllm-importance-sampling-clip-min",
        "0.9999",
        "--vllm-importance-sampling-clip-max",
        "1.0001",
    ]
    assert train.main(argv("--vllm-importance-sampling-mode", "sequence_mask", *bounds)) == 0
    assert all(row["sampling/masked"] == 1.0 and row["loss"] == 0.0 for row in steps(tmp_path))
    before, after = (checkpoint.load_model(f) for f in (tiny_base, tmp_path / "checkpoint-3"))
    assert all(torch.equal(p, q) for p, q in zip(before.parameters(), after.parameters()))


def test_the_ratio_can_use_the_log_probs_of_the_engine(argv, tmp_path):
    """The fake invents them, so ratios are far from 1 and clipped. With the trainer's own log-probs
    they would be exactly 1.
    """
    assert train.main(argv("--old-logp-from", "engine")) == 0
    assert all(row["clip_ratio/region_mean"] > 0 for row in steps(tmp_path))


def test_sampling_ahead_keeps_its_bound_and_requests_no_step_beyond_the_last(argv, tmp_path, fake):
    assert train.main(argv("--max-staleness", "1", "--max-steps", "5")) == 0
    rows = steps(tmp_path)
    assert len(fake.generated()) == 5 * 4  # nothing beyond the last step
    assert max(row["staleness/max"] for row in rows) <= 1
    # auto: the ratio is against the older weights
    assert all(row["clip_ratio/region_mean"] > 0 for row in rows)


def test_staleness_describes_the_samples_that_are_trained_on(argv, tmp_path):
    """Every group is sampled again with the current weights, because all rewards are equal."""
    function = "def f(prompts, **kwargs):\n    return [1.0] * len(prompts)\n"
    (tmp_path / "reward.py").write_text(function)
    options = ["--reward-funcs", f"{tmp_path / 'reward.py'}:f", "--max-resample-times", "1"]
    assert train.main(argv("--max-staleness", "1", *options)) == 0
    for row in steps(tmp_path):
        assert (row["resampled_groups"], row["staleness/mean"], row["staleness/max"]) == (4, 0, 0)


def test_a_server_lost_while_sampling_leaves_a_checkpoint_to_resume(argv, tmp_path, fake, capsys):
    fake.disturb = generation(fake, 5)  # in the second step
    assert train.main(argv("--server-patience", "0.3")) == 2
    assert "continue with --resume" in capsys.readouterr().err
    assert [p.name for p in checkpoint.checkpoints(tmp_path)] == ["checkpoint-1"]
    assert [row["step"] for row in steps(tmp_path)] == [0]
    fake.disturb = lambda *call: None
    assert train.main(argv("--resume")) == 0
    assert [row["step"] for row in steps(tmp_path)] == [0, 1, 2]


@pytest.mark.parametrize("field", ["token_ids", "choices"])
def test_a_server_that_answers_nonsense_leaves_a_checkpoint(argv, tmp_path, fake, capsys, field):
    """Nested without end, or without the tokens."""

    def disturb(method, path, body):
        if len(fake.generated()) <= 5 or "generate" not in path:
            return None
        return {"choices": [{}] * 4} if field == "token_ids" else b'{"choices":' + b"[" * 200_000

    fake.disturb = disturb
    assert train.main(argv("--server-patience", "0.3")) == 2
    assert "continue with --resume" in capsys.readouterr().err
    assert [p.name for p in checkpoint.checkpoints(tmp_path)] == ["checkpoint-1"]


def test_a_server_lost_during_a_sync_leaves_a_checkpoint(argv, tmp_path, fake):
    # after step 2
    fake.disturb = lambda m, path, b: (
        500 if path == "/update_weights" and len(fake.generated()) == 8 else None
    )
    assert train.main(argv("--server-patience", "0.3")) == 2
    assert [p.name for p in checkpoint.checkpoints(tmp_path)] == ["checkpoint-2"]
    assert [row["step"] for row in steps(tmp_path)] == [0, 1]


def test_a_server_lost_before_the_first_step_leaves_nothing_behind(argv, tmp_path, fake):
    fake.disturb = generation(fake, 0)
    assert train.main(argv("--server-patience", "0.3")) == 2
    assert checkpoint.checkpoints(tmp_path) == []
    fake.disturb = lambda *call: None
    assert train.main(argv()) == 0  # the folder is not taken


def test_retries_do_not_change_the_log_of_a_run(argv, tmp_path, fake, tiny_base, files):
    """Two requests fail. Their retries have the same seeds, so they return the same samples, and
    rewards and weights are the same too.
    """
    assert train.main(argv()) == 0
    rows = steps(tmp_path)
    failures = iter([500, None, None, 500] + [None] * 1000)
    fake.disturb = lambda m, path, b: next(failures) if "generate" in path else None
    again = arguments(
        tiny_base,
        files,
        tmp_path / "again",
        "--engine",
        "vllm",
        "--server",
        fake.url,
        "--weight-transport",
        "memory",
    )
    assert train.main(again) == 0
    assert steps(tmp_path / "again") == rows


# --- bad input ---


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            ["--server", "http://127.0.0.1:9", "--server-patience", "0"],
            "start serve.py there first",
        ),
        (["--server", "nowhere"], "--server nowhere is not an address"),
        (["--max-completion-length", "200"], "start serve.py with --max-model-len"),
        (["--top-p", "0.9"], "--top-p 0.9 cannot be used with --engine vllm"),
        (["--vllm-options", "x"], "leave --server out"),
        (["--vllm-importance-sampling-clip-min", "2"], "do not enclose 1"),
        (
            ["--old-logp-from", "engine", "--vllm-importance-sampling-mode", "token_mask"],
            "already includes the correction",
        ),
        (["--max-staleness", "1", "--old-logp-from", "trainer"], "leave --old-logp-from at auto"),
        (["--max-staleness", "-1"], "--max-staleness is -1"),
        (["--engine", "local"], "which has no effect with --engine local: choose vllm"),
        (["--engine", "sglang"], "choose one of local, vllm"),
    ],
)
def test_options_that_cannot_work_are_reported_in_one_sentence(
    argv, fake, capsys, options, sentence
):
    fake.facts["max_model_len"] = 64
    assert train.main(argv(*options)) == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert said.startswith("error: ")
    assert sentence in said


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--vllm-python", "/nowhere/python"], "--vllm-python /nowhere/python cannot be run"),
        (["--vllm-options='"], "close the quotes"),
        (["--vllm-python", "false"], "The vLLM sidecar ended with status 1"),
    ],
)
def test_a_server_that_cannot_be_started_is_reported(
    tiny_base, files, tmp_path, capsys, options, sentence
):
    assert train.main(arguments(tiny_base, files, tmp_path, "--engine", "vllm", *options)) == 2
    assert sentence in capsys.readouterr().err


def test_a_run_refuses_a_server_of_another_model(tiny_base, files, tmp_path, capsys):
    with FakeVLLM(
        tiny_config(vocab_size=Tokenizer(tiny_base).vocab_size, num_hidden_layers=3)
    ) as other:
        assert (
            train.main(
                arguments(tiny_base, files, tmp_path, "--engine", "vllm", "--server", other.url)
            )
            == 2
        )
    assert "serves another model: its num_hidden_layers is 3" in capsys.readouterr().err
    assert not (tmp_path / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            ["--vllm-options=--dtype float32 --port 8001"],
            "--vllm-options sets --port, which the trainer chooses",
        ),
        (["--vllm-options=--host=0.0.0.0"], "--vllm-options sets --host"),
        # it would sample at 0.01
        (
            ["--temperature", "0.001"],
            "--temperature 0.001 is outside the range of vLLM: give a value between 0.01 and 2",
        ),
        (["--temperature", "3"], "--temperature 3.0 is outside the range of vLLM"),
    ],
)
def test_options_that_no_server_accepts_are_reported_before_one_starts(
    tiny_base, files, tmp_path, capsys, options, sentence
):
    assert train.main(arguments(tiny_base, files, tmp_path, "--engine", "vllm", *options)) == 2
    assert sentence in capsys.readouterr().err
