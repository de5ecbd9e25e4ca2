"""The benches of whole runs against TRL run, compare like with like, and their rows hold what was
run. Read next: bench/runs.py.

How fast and how well the sides learn is the benches' to say: here the runs have two steps.
"""

import dataclasses
import inspect
import itertools
import json

import pytest
import torch
from trl.generation.vllm_client import VLLMClient

from bench import common, end_to_end, learning, parity_trl, runs, trl_peer, trl_run
from nanogrpo import cli
from nanogrpo.config import Config
from nanogrpo.data import prompts as data
from nanogrpo.data import tasks
from nanogrpo.model.tokenizer import Tokenizer
from nanogrpo.run import warmup
from nanogrpo.types import Prompt, Sample
from tests.conftest import positions_of

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # of TRL to transformers


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench") / "base"
    warmup.make_base(folder, steps=2, quiet=True)
    return folder


# ---- TRL's trainer -------------------------------------------------------------------------------


def test_trl_sees_the_prompts_that_our_steps_draw(base, tmp_path):
    cfg = Config(
        model=str(base),
        data=("arithmetic",),
        num_generations=4,
        generation_batch_size=12,
        max_steps=3,
        seed=5,
    )
    prompts = data.from_rows(tasks.rows("arithmetic", "train"), Tokenizer(base))
    trainer = trl_run.trainer(cfg, prompts, [runs.share_of_even], tmp_path)
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
    assert {
        name: getattr(theirs, name) for name in trl_run.SAME if name != "lr_scheduler_type"
    } == {name: getattr(cfg, name) for name in trl_run.SAME if name != "lr_scheduler_type"}
    assert theirs.lr_scheduler_type.value == "constant"
    assert (theirs.gradient_accumulation_steps, theirs.generation_batch_size) == (
        1,
        cfg.generation_batch_size,
    )
    assert not theirs.gradient_checkpointing
    assert not theirs.bf16


# ---- learning ------------------------------------------------------------------------------------


def test_learning_runs_both_sides_once(base, tmp_path, monkeypatch):
    argv = f"--seeds 1 --steps 2 --eval-steps 1 --threads 1 --base {base} --out {tmp_path} --picture {tmp_path}/x.png".split()
    monkeypatch.setattr(
        learning,
        "SETTINGS",
        {**learning.SETTINGS, "generation_batch_size": 16, "max_completion_length": 8},
    )
    rows = learning.main(argv)
    assert [(row["seed"], row["side"]) for row in rows] == [
        (0, "nanogrpo"),
        (0, "TRL"),
        (0, common.REPLAYED),
    ]
    assert (tmp_path / "x.png").stat().st_size > 10_000
    for row in rows:
        assert list(row["held_out"]) == ["0", "1", "2"]
        assert len(row["seconds"]) == len(row["reward"]) == 2
        assert all(s > 0 for s in row["seconds"])
        assert 0 < row["peak_bytes_above_libraries"] < row["peak_bytes"]
    assert len({row["held_out"]["0"] for row in rows}) == 1  # one base, one judge

    monkeypatch.setattr(
        runs, "run", lambda *_: pytest.fail("a run whose row stands is not repeated")
    )
    assert learning.main(argv) == rows
    assert learning.main([*argv, "--redraw"]) == rows
    with pytest.raises(pytest.fail.Exception):  # other options: other runs
        learning.main([*argv, "--steps", "3"])


def test_trl_on_our_completions_makes_the_same_model_of_them(base):
    options = {
        "num_generations": 4,
        "generation_batch_size": 16,
        "max_completion_length": 8,
        "max_steps": 3,
        "learning_rate": 1e-3,
    }
    cfg = Config(
        model=str(base),
        data=("arithmetic",),
        reward_funcs=("bench.runs:share_of_even",),
        device="cpu",
        **options,
    )
    found = runs.run(common.REPLAYED, cfg, threads=1)
    assert found["ours"] == {}  # nothing was evaluated
    # of the way: Adam makes whole steps of gradients that are nothing but rounding
    assert found["weights_apart"] < 1e-3
    with pytest.raises(RuntimeError, match="different prompts"):
        runs.taken([Sample(Prompt(0, "1+1=", [1]), 0, [2], [0.0], True, [0])], ["1+2="])


# ---- end to end ----------------------------------------------------------------------------------


def test_stop_probabilities_give_the_mean_length():
    p = end_to_end.stop_probability(64, 192)
    ends = (
        torch.empty(200_000)
        .geometric_(p, generator=torch.Generator().manual_seed(0))
        .clamp(max=192)
    )
    assert ends.mean().item() == pytest.approx(64, rel=0.01)


def test_the_ending_model_ends_as_often_as_it_is_told():
    shape = common.small_qwen3(64, 2, 300, 64)
    shape = type(shape)(**{**vars(shape), "tie_word_embeddings": False})
    torch.manual_seed(0)
    tokens = torch.randint(300, (60,))
    positions, attend = positions_of([40, 20])
    for wanted in (0.0, 0.01, 0.2):
        model = end_to_end.ending_model(shape, stop=7, probability=wanted)
        with torch.no_grad():
            found = model(tokens, positions, attend).softmax(-1)[:, 7]
        torch.testing.assert_close(found, torch.full((60,), wanted), rtol=0.03, atol=1e-9)


def test_end_to_end_runs_both_sides(tmp_path):
    small = "--hidden 64 --layers 1 --vocab 128 --prompts 2 --group 2 --prompt-length 5 --length 6 --rounds 1 --steps 3 --threads 1"
    rows = end_to_end.main([*small.split(), "--cases", "even", "--out", str(tmp_path)])
    assert json.loads((tmp_path / "end_to_end.json").read_text()) == rows
    assert [(row["case"], row["side"]) for row in rows] == [("even", "nanogrpo"), ("even", "TRL")]
    for row in rows:
        assert len(row["seconds"]) == 2  # the first step is not counted
        assert row["mean_length"] == 6
        assert row["tokens_per_second"] == pytest.approx(2 * 4 * 6 / sum(row["seconds"]))
        assert set(row["phases"]) >= {"sample"}


def test_trl_cannot_use_a_server_without_cuda():
    """What the table says of TRL's side with --vllm, held to TRL's source: no request is made
    before the device is known.
    """
    source = inspect.getsource(VLLMClient.init_communicator)
    assert 'if device.type != "cuda":\n            raise' in source
    assert "NCCL weight-transfer engine, which needs a CUDA device" in source


def test_a_run_that_fails_says_why(tmp_path):
    cfg = Config(model=str(tmp_path), data=("arithmetic",))
    with pytest.raises(RuntimeError, match=r"has no tokenizer\.json"):
        runs.run("nanogrpo", cfg, threads=1)


# ---- differences ---------------------------------------------------------------------------------


def test_the_table_of_differences_finds_them(tmp_path, monkeypatch):
    monkeypatch.setattr(parity_trl, "OBJECTIVES", {"plain": {}})
    rows = parity_trl.main(["--seeds", "1", "--out", str(tmp_path)])
    assert {row["case"].partition(":")[0] for row in rows if row["what"] == "loss"} == set(
        trl_peer.LOSSES
    )
    assert max(row["largest_value"] for row in rows) < 1e-6
    assert max(row["largest_metric"] for row in rows) < 1e-5

    weight = trl_peer.grpo.token_weight
    monkeypatch.setattr(trl_peer.grpo, "token_weight", lambda *args: 1.001 * weight(*args))
    rows = parity_trl.main(["--seeds", "1", "--out", str(tmp_path)])
    assert all((row["largest_value"] > 5e-4) == (row["what"] == "loss") for row in rows)


@pytest.mark.parametrize("mode", parity_trl.MODES[1:])
@pytest.mark.parametrize("bounds", parity_trl.BOUNDS)
def test_importance_weights_are_trls(mode, bounds):
    ours, theirs = parity_trl.importance_of_both(mode, bounds, seed=1)
    torch.testing.assert_close(
        ours.pop("weight").double(), theirs.pop("weight").double(), rtol=1e-6, atol=1e-12
    )
    assert ours == pytest.approx(theirs, rel=1e-6)


def test_the_options_of_a_run_survive_the_way():
    """Config → JSON → Config → command line → Config: tuples, booleans and a text that looks like
    an option.
    """
    cfg = Config(
        model="m",
        data=("a", "b"),
        reward_funcs=("x:y",),
        reward_weights=(0.5,),
        vllm_options="--dtype float32",
    )
    cfg = dataclasses.replace(cfg, share_prompts=False, epsilon_high=0.3, eval_steps=2)
    back = json.loads(json.dumps(vars(cfg)))
    assert Config(**{k: tuple(v) if isinstance(v, list) else v for k, v in back.items()}) == cfg
    assert cli.parse(runs.arguments(cfg)) == cfg
