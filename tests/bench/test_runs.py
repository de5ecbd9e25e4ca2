"""Tests of the benches that compare full runs with TRL: they run, and they compare like with like.

Here the runs have two or three steps; how fast and how well the sides learn is for the benches to
measure. Read next: bench/runs.py.
"""

import dataclasses
import functools
import inspect
import itertools
import json

import pytest
import torch
from trl.generation.vllm_client import VLLMClient

from bench import common, end_to_end, learning, parity_trl, runs, trl_peer, trl_run
from bench.rewards import share_of_even
from nanogrpo import cli
from nanogrpo.config import Config
from nanogrpo.data import prompts as data
from nanogrpo.model.tokenizer import Tokenizer
from nanogrpo.run import warmup
from nanogrpo.types import Prompt, Sample
from tests.bench.conftest import run_here
from tests.conftest import positions_of

# TRL uses deprecated parts of transformers
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench") / "base"
    warmup.make_base(folder, steps=2)
    return folder


# --- TRL's trainer ---


def test_trl_sees_the_prompts_that_our_steps_draw(base, tmp_path):
    cfg = Config(
        model=str(base),
        data=("arithmetic",),
        num_generations=4,
        generation_batch_size=12,
        max_steps=3,
        seed=5,
    )
    (prompts,) = data.load_all(["arithmetic"], Tokenizer(base))
    trainer = trl_run.trainer(cfg, prompts, [share_of_even], tmp_path)
    batches = list(itertools.islice(trainer.get_train_dataloader(), 3))
    for step, batch in enumerate(batches):
        drawn = [p for p in data.draw(prompts, 3, cfg.seed, step) for _ in range(4)]
        assert [row["prompt"] for row in batch] == [p.text for p in drawn]
        assert [row["answer"] for row in batch] == [p.columns["answer"] for p in drawn]


def test_trl_trains_with_our_options(tmp_path):
    cfg = Config(
        model="-",
        data=("-",),
        learning_rate=3e-5,
        weight_decay=0.1,
        max_grad_norm=0.5,
        adam_beta2=0.9,
        epsilon=0.1,
        device="cpu",
    )
    theirs = trl_run.options(cfg, tmp_path)
    for name in set(trl_run.SAME) - {"lr_scheduler_type"}:
        assert getattr(theirs, name) == getattr(cfg, name), name
    assert theirs.lr_scheduler_type.value == "constant"
    assert theirs.gradient_accumulation_steps == 1
    assert theirs.generation_batch_size == cfg.generation_batch_size
    assert not theirs.gradient_checkpointing
    assert not theirs.bf16


# --- learning ---


def test_learning_runs_each_side_once(base, tmp_path, monkeypatch, in_this_process):
    # A high learning rate and a reward that a random model gets: the weights must move.
    small = {
        "num_generations": 4,
        "generation_batch_size": 16,
        "max_completion_length": 8,
        "learning_rate": 1e-3,
    }
    monkeypatch.setattr(learning, "SETTINGS", {**learning.SETTINGS, **small})
    rewards = {"reward_funcs": ("accuracy", "bench.rewards:share_of_even"), "reward_timeout": 0.0}
    monkeypatch.setattr(learning, "Config", functools.partial(Config, **rewards))
    argv = f"--seeds 1 --steps 3 --eval-steps 2 --threads 1 --base {base} --out {tmp_path}".split()
    argv += ["--picture", f"{tmp_path}/x.png"]
    records = learning.main(argv)
    assert [(record["seed"], record["side"]) for record in records] == [
        (0, "nanogrpo"),
        (0, "TRL"),
        (0, common.REPLAYED),
    ]
    assert (tmp_path / "x.png").stat().st_size > 10_000
    for record in records:
        assert list(record["held_out"]) == ["0", "2", "3"]
        assert len(record["seconds"]) == len(record["reward"]) == 3
        assert all(s > 0 for s in record["seconds"])
    assert len({record["held_out"]["0"] for record in records}) == 1  # same base, same evaluation

    # TRL turns our completions into our model: the replay differs only by rounding, which Adam
    # amplifies where a gradient is nothing but rounding.
    ours, _, replay = records
    assert replay["ours"] == ours["held_out"]
    assert replay["weights_apart"] < 1e-3

    assert len(in_this_process) == 3
    assert learning.main(argv) == records  # a run that has a record is not repeated
    assert learning.main([*argv, "--redraw"]) == records
    assert len(in_this_process) == 3
    monkeypatch.setattr(runs, "run", lambda *_: pytest.fail("a new run"))
    with pytest.raises(pytest.fail.Exception):  # because other options are other runs
        learning.main([*argv, "--steps", "4"])


def test_a_replay_needs_the_same_prompts_on_both_sides():
    samples = [Sample(Prompt(0, "1+1=", [1]), 0, [2], [0.0], True, [0])]
    with pytest.raises(RuntimeError, match="different prompts"):
        runs.rollout(samples, ["1+2="])


# --- end to end ---


def test_stop_probabilities_give_the_mean_length():
    p = end_to_end.stop_probability(64, 192)
    generator = torch.Generator().manual_seed(0)
    ends = torch.empty(200_000).geometric_(p, generator=generator).clamp(max=192)
    assert ends.mean().item() == pytest.approx(64, rel=0.01)


def test_the_ending_model_stops_with_the_given_probability():
    shape = common.small_qwen3(64, 2, 300, 64)
    shape = dataclasses.replace(shape, tie_word_embeddings=False)
    torch.manual_seed(0)
    tokens = torch.randint(300, (60,))
    positions, attend = positions_of([40, 20])
    for wanted in (0.0, 0.01, 0.2):
        model = end_to_end.ending_model(shape, stop=7, probability=wanted)
        with torch.no_grad():
            found = model(tokens, positions, attend).softmax(-1)[:, 7]
        torch.testing.assert_close(found, torch.full((60,), wanted), rtol=0.03, atol=1e-9)


def test_end_to_end_runs_both_sides(tmp_path, monkeypatch):
    start = common.in_process

    def run_ours_in_a_process(folder, argv, threads):
        return (start if "nanogrpo" in argv else run_here)(folder, argv, threads)

    monkeypatch.setattr(common, "in_process", run_ours_in_a_process)
    argv = "--hidden 64 --layers 1 --vocab 128 --prompts 2 --group 2 --prompt-length 5 --length 6"
    argv += f" --rounds 1 --steps 3 --threads 1 --cases even --out {tmp_path}"
    records = end_to_end.main(argv.split())
    assert common.read("end_to_end", tmp_path) == records
    assert [(record["case"], record["side"]) for record in records] == [
        ("even", "nanogrpo"),
        ("even", "TRL"),
    ]
    assert 0 < records[0]["peak_bytes_above_libraries"] < records[0]["peak_bytes"]
    for record in records:
        assert len(record["seconds"]) == 2  # the first step is not counted
        assert record["mean_length"] == 6
        assert record["tokens_per_second"] == pytest.approx(2 * 4 * 6 / sum(record["seconds"]))
        assert "sample" in record["phases"]


def test_trl_cannot_use_a_server_without_cuda():
    """The table says so for TRL's side with --vllm; here is the evidence in TRL's source."""
    source = inspect.getsource(VLLMClient.init_communicator)
    assert 'if device.type != "cuda":\n            raise' in source
    assert "NCCL weight-transfer engine, which needs a CUDA device" in source


def test_a_process_that_fails_shows_its_output(tmp_path):
    with pytest.raises(RuntimeError, match="No module named no_such_bench"):
        common.in_process(tmp_path, ["no_such_bench"], threads=1)


def test_a_run_that_fails_prints_the_reason(tmp_path, capsys):
    options = dataclasses.asdict(Config(model=str(tmp_path), data=("arithmetic",)))
    (tmp_path / "options.json").write_text(json.dumps(options))
    with pytest.raises(SystemExit) as e:
        runs.main(["nanogrpo", str(tmp_path)])
    assert e.value.code == 2
    assert "has no tokenizer.json" in capsys.readouterr().err


# --- differences from TRL's code ---


def test_the_table_of_differences_finds_them(tmp_path, monkeypatch):
    monkeypatch.setattr(parity_trl, "OBJECTIVES", {"plain": {}})
    records = parity_trl.main(["--seeds", "1", "--out", str(tmp_path)])
    losses = {r["case"].partition(":")[0] for r in records if r["what"] == "loss"}
    assert losses == set(trl_peer.LOSSES)
    assert max(record["largest_value"] for record in records) < 1e-6
    assert max(record["largest_metric"] for record in records) < 1e-5

    weight = trl_peer.grpo.token_weight
    monkeypatch.setattr(trl_peer.grpo, "token_weight", lambda *args: 1.001 * weight(*args))
    records = parity_trl.main(["--seeds", "1", "--out", str(tmp_path)])
    assert all((r["largest_value"] > 5e-4) == (r["what"] == "loss") for r in records)


@pytest.mark.parametrize("mode", parity_trl.MODES[1:])
@pytest.mark.parametrize("bounds", parity_trl.BOUNDS)
def test_importance_weights_equal_trls(mode, bounds):
    ours, theirs = parity_trl.importance_of_both(mode, bounds, seed=1)
    torch.testing.assert_close(
        ours.pop("weight").double(), theirs.pop("weight").double(), rtol=1e-6, atol=1e-12
    )
    assert ours == pytest.approx(theirs, rel=1e-6)


def test_options_survive_json_and_the_command_line():
    """Config → JSON → Config, and Config → command line → Config, with tuples and booleans."""
    cfg = Config(
        model="m",
        data=("a", "b"),
        reward_funcs=("x:y",),
        reward_weights=(0.5,),
        vllm_options="--dtype float32",  # looks like an option itself
        share_prompts=False,
        epsilon_high=0.3,
        eval_steps=2,
        lr_scheduler_kwargs={"min_lr_rate": 0.1},
    )
    back = json.loads(json.dumps(vars(cfg)))
    assert Config(**back) == cfg
    assert cli.parse(runs.arguments(cfg)) == cfg
