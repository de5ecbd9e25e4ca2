"""Full runs of train.py against a fake server: how the loop uses a server, and how it loses one.

The weights really arrive (`fake.weights`), but the log-probs do not fit them. So these runs learn
nothing, but every option shows in the log. Read next: test_train_real.py.
"""

import pytest
import torch

import train
from nanogrpo.extras.options import WEIGHTED
from nanogrpo.logs.files import checkpoints
from nanogrpo.model import checkpoint
from tests.conftest import arguments, one_sentence, steps, tiny_config
from tests.vllm.fake import FakeVLLM


@pytest.fixture
def fake(tiny_tokenizer):
    with FakeVLLM(tiny_config(vocab_size=tiny_tokenizer.vocab_size)) as server:
        yield server


@pytest.fixture
def argv(tiny_base, files, tmp_path, fake, monkeypatch):
    """A function of options: the command line of a run of three steps against the fake, which is
    not waited for if it is lost.
    """
    monkeypatch.setattr("nanogrpo.vllm.client.PATIENCE", 0.3)
    server = ["--engine", "vllm", "--server", fake.url, "--weight-transport", "memory"]
    return lambda *options: arguments(tiny_base, files, tmp_path, *server, *options)


@pytest.mark.parametrize("adapters", ["", "--lora-r 4 --lora-alpha 8", "--lora-r 4 --load-in-4bit"])
def test_a_run_samples_from_the_server_and_sends_it_the_weights_of_every_step(
    argv, tmp_path, fake, adapters
):
    """Adapters are merged first, and a base in 4 bits is sent dequantized."""
    assert train.main(argv("--save-steps", "2", *adapters.split())) == 0
    after_two = checkpoint.load_model(tmp_path / "checkpoint-2")
    for name, p in after_two.named_parameters():
        # the weights that sampled the third step
        assert torch.equal(fake.weights[name], p), name
    rows = steps(tmp_path)
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert len(fake.generated()) == 3 * 4  # one request a group
    for row in rows:
        assert row["vllm/restarts"] == 0
        # the fake's log-probs are invented
        assert row["sampling/sampling_logp_difference/max"] > 0.1
        assert row["sampling/k3"] > 0
        assert "sampling/importance_sampling_ratio/mean" not in row


@pytest.mark.parametrize("mode", WEIGHTED)
def test_the_correction_is_applied_and_logged(argv, tmp_path, mode):
    bounds = "--vllm-importance-sampling-clip-min 0.1 --vllm-importance-sampling-clip-max 2"
    assert train.main(argv("--vllm-importance-sampling-mode", mode, *bounds.split())) == 0
    row = steps(tmp_path)[0]
    low, high = (row[f"sampling/importance_sampling_ratio/{how}"] for how in ("min", "max"))
    assert high <= 2
    assert low >= 0.1 if mode.endswith("truncate") else low == 0
    assert (row["sampling/masked"] > 0) == mode.endswith("mask")
    assert 0 <= row["sampling/ess"] <= 1


def test_the_ratio_can_use_the_log_probs_of_the_engine(argv, tmp_path):
    """The fake invents them, so ratios are far from 1 and clipped. With the trainer's own log-probs
    they would be exactly 1.
    """
    assert train.main(argv("--vllm-importance-sampling-mode", "ratio")) == 0
    assert all(row["clip_ratio/region_mean"] > 0 for row in steps(tmp_path))


def test_sampling_ahead_keeps_its_bound_and_requests_no_step_beyond_the_last(argv, tmp_path, fake):
    """A reward function asks for entropies, which the trainer computes for samples that arrive."""
    function = "def f(entropy, **kwargs):\n    return [sum(each) for each in entropy]\n"
    (tmp_path / "reward.py").write_text(function)
    options = ["--reward-funcs", f"{tmp_path / 'reward.py'}:f", "--max-steps", "5"]
    assert train.main(argv("--max-staleness", "1", *options)) == 0
    rows = steps(tmp_path)
    assert len(fake.generated()) == 5 * 4  # nothing beyond the last step
    assert max(row["staleness/max"] for row in rows) <= 1
    # auto: the ratio is against the older weights
    assert all(row["clip_ratio/region_mean"] > 0 for row in rows)


def test_staleness_describes_the_samples_that_are_trained_on(argv, tmp_path):
    """Every group is sampled again with the current weights, because all rewards are 0."""
    options = ["--reward-funcs", "format", "--max-resample-times", "1"]
    assert train.main(argv("--max-staleness", "1", *options)) == 0
    for row in steps(tmp_path):
        assert (row["resampled_groups"], row["staleness/mean"], row["staleness/max"]) == (4, 0, 0)


@pytest.mark.parametrize(
    ("path", "requests", "done"),
    [("", 5, 1), ("/update_weights", 8, 2), ("", 0, 0)],
    ids=["while sampling", "during a sync", "before the first step"],
)
def test_a_lost_server_leaves_a_checkpoint_to_resume(
    argv, tmp_path, fake, capsys, path, requests, done
):
    """Without a finished step there is none, and a new run may use the folder. After two steps, the
    checkpoint exists already.
    """

    def disturb(method, called, body):
        lost = len(fake.generated()) >= requests + (path == "") and path in called
        return 500 if lost and called != "/nanogrpo" else None

    fake.disturb = disturb
    assert train.main(argv("--save-steps", "2")) == 2
    assert "continue with --resume" in capsys.readouterr().err
    assert [p.name for p in checkpoints(tmp_path)] == [f"checkpoint-{done}"][:done]
    fake.disturb = lambda *call: None
    assert train.main(argv(*["--resume"][:done])) == 0
    assert [row["step"] for row in steps(tmp_path)] == [0, 1, 2]


def test_a_server_that_cannot_be_started_is_reported(
    tiny_base, files, tmp_path, capsys, monkeypatch
):
    monkeypatch.setenv("NANOGRPO_VLLM_PYTHON", "/nowhere/python")
    assert train.main(arguments(tiny_base, files, tmp_path, "--engine", "vllm")) == 2
    assert "NANOGRPO_VLLM_PYTHON /nowhere/python cannot be run" in one_sentence(capsys)
